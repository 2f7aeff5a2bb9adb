"""Divide the time of profiled steps into groups, by one table of patterns for both engines on CPUs and GPUs."""

import re
from collections import defaultdict
from functools import cache
from typing import NamedTuple

OTHER, HOST = "other", "host"
WINDOW = "profiled steps"  # name of the range around them in a trace
# The first pattern that matches the origin of an operation decides. An origin has the names of the callers, outermost
# first, then the operation and its kernel. Readers of traces add [marks] to matrix products, by their shapes, and to
# operations on the codes of quantised weights.
PATTERNS = {
    HOST: r"enumerate\(DataLoader\)|aten::(view|_unsafe_view|reshape|t|transpose|permute|expand|as_strided|slice|"
          r"select|split|squeeze|unsqueeze|alias|detach|empty\w*|resize_)$",  # these start no kernel
    "optimiser": r"Optimizer\.|jax_engine/optim\.py|optax",
    "head and loss": r"_Chunked|cross_entropy|log_softmax|nll_loss|distributed/loss\.py|\[vocabulary\]",
    "dequantisation": r"(?i)dequant|models/(quant|mxfp4)\.py|\[codes\]",
    "attention": r"(?i)scaled_dot_product|_attention|flash|fmha|varlen_attn|models/(attention|fused)\.py|"
                 r"aten::b(add)?mm|\[batched product\]",
    "adapters": r"\[rank\]|linear\.py:\S*_adapter",
    "products": r"(?i)\[product\]|aten::(mm|addmm|linear|matmul)|gemm|nvjet|cutlass|cublas",
    "copies": r"(?i)memcpy|memset|aten::(copy_|clone|contiguous|zeros|zero_|fill_|slice_backward)|"
              r"wrapped_(copy|transpose|broadcast)|(^|> )(copy|transpose|broadcast)\b",
    "norms and activations": r"aten::(_to_copy|add|sub|mul|div|neg|pow|r?sqrt|mean|sum|cat|where|silu|gelu|tanh|"
                             r"sigmoid|cos|sin|\w*(layer|rms)_norm|native_dropout)|elementwise_kernel|"
                             r"reduce_kernel|triton_(poi|red|per)_|jax_engine/models/",
}
GROUPS = ("products", "adapters", "attention", "head and loss", "dequantisation", "norms and activations", "optimiser",
          "copies", OTHER, HOST)


class Span(NamedTuple):
    """Operation in a trace.

    Args:
        lane: What runs one operation at a time, such as a stream. In a lane, operations may contain others.
        start: Seconds.
        end: Seconds.
        origin: Names that PATTERNS are matched with.
        name: Name to list under `other`.
    """

    lane: object
    start: float
    end: float
    origin: str
    name: str


@cache
def find_group(origin: str) -> str:
    """Return the group of an operation."""
    return next((group for group, pattern in PATTERNS.items() if re.search(pattern, origin)), OTHER)


def divide(spans: list[Span], start: float, end: float) -> dict[str, dict[str, float]]:
    """Divide a window of time, so that each instant counts once.

    An instant belongs to the innermost operation of each lane. Lanes that are busy at the same time share it equally.
    If all are idle, it belongs to the host.

    Returns:
        `parts`, seconds by group, and `other`, seconds by name of the five largest operations in the group `other`.
    """
    parts: dict[str, float] = dict.fromkeys(GROUPS, 0.0)
    other: dict[str, float] = defaultdict(float)
    running: dict[object, list[Span]] = defaultdict(list)  # by lane, the innermost last
    clipped = [span._replace(start=max(span.start, start), end=min(span.end, end)) for span in spans]
    # Ends before starts; of equal starts, the longer operation contains the other.
    edges = sorted([(span.start, 1, -span.end, index) for index, span in enumerate(clipped) if span.end > span.start]
                   + [(span.end, 0, 0.0, index) for index, span in enumerate(clipped) if span.end > span.start])
    now = start
    for instant, is_start, _, index in edges:
        innermost = [lane[-1] for lane in running.values() if lane]
        for span in innermost:
            group, seconds = find_group(span.origin), (instant - now) / len(innermost)
            parts[group] += seconds
            if group == OTHER:
                other[span.name] += seconds
        if not innermost:
            parts[HOST] += instant - now
        now, span = instant, clipped[index]
        running[span.lane].append(span) if is_start else running[span.lane].remove(span)
    parts[HOST] += end - now
    return {"parts": parts, "other": dict(sorted(other.items(), key=lambda item: -item[1])[:5])}
