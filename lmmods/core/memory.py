"""Size of a network, and memory of a training step: what it needs on a device, whether that fits, and how it was found.

The start of a run, `inspect`, `new`, `find` and `plan` all answer with a `StepMemory`.
"""

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Literal

from lmmods.core.experts import mixture_of
from lmmods.core.hf_config import layer_config

# ---------------------------------------------------------------------------------------------------------------------
# Size of a network, and the arithmetic of training it, the same on both engines.

# Bytes of a 4-bit weight: half a byte, an 8-bit scale per 64 weights, a 32-bit scale per 256 scales.
NF4_BYTES = 1 / 2 + 1 / 64 + 4 / (64 * 256)


@dataclass(frozen=True)
class Widths:
    """Dimensions that determine the size of activations.

    Args:
        num_layers: Blocks.
        hidden: Width of the residual stream.
        wide: Width within the MLP.
    """

    num_layers: int
    hidden: int
    wide: int


def widths_of(config: Any) -> Widths:
    """Return the dimensions of a network from its transformers configuration."""
    text, mixture = config.get_text_config(), mixture_of(config)
    wide = getattr(text, "intermediate_size", None) or 4 * text.hidden_size
    if mixture is not None:
        # Activations exist only for the experts that a token uses.
        beside = wide if mixture.beside_mlp else 0
        wide = mixture.per_token * (getattr(text, "moe_intermediate_size", None) or wide) + beside
    return Widths(text.num_hidden_layers, text.hidden_size, wide)


@dataclass(frozen=True)
class NetworkShape:
    """Size of a network before anything is quantised or adapted.

    Args:
        num_params: All parameters, tied ones once.
        num_linear: Those in linear layers other than the output head, and in experts: the ones that get quantised.
        lora_per_rank: Parameters of adapters on these layers per rank.
        widths: Dimensions of its activations.
    """

    num_params: int
    num_linear: int
    lora_per_rank: int
    widths: Widths

    def base_bytes(self, quantized: bool, compute_bytes: int) -> float:
        """Memory of the weights of a frozen base, whose linear layers may be in 4 bits."""
        kept = self.num_params - self.num_linear if quantized else self.num_params
        return kept * compute_bytes + (self.num_linear * NF4_BYTES if quantized else 0)


def describe_sizes(num_params: int, num_trainable: int, by_type: dict[str, int]) -> str:
    """Number of parameters and the types they are stored in, in one line."""
    share = ", ".join(f"{name} {count / num_params:.1%}" for name, count in by_type.items())
    return (f"Parameters: {num_params:,}, of which {num_trainable:,} train ({num_trainable / num_params:.2%}). "
            f"Stored as: {share}.")


def describe_teacher(name: str, num_params: int, by_type: dict[str, int]) -> str:
    """The frozen network that a run learns from, in a line of its own."""
    share = ", ".join(f"{kind} {count / num_params:.1%}" for kind, count in by_type.items())
    return f"\nTeacher: {name}, {num_params:,} parameters, frozen. Stored as: {share}."


def flops_per_token(num_params: int, num_trainable: int) -> int:
    """FLOP of one training token: 2 per weight forward, 2 backward, 2 more per trained weight.

    Attention scores are not counted, as is usual (Kaplan et al. 2020).

    Args:
        num_params: Without an embedding that is only looked up, and with experts counted by the share that a token
            uses.
        num_trainable: The trained ones of these.
    """
    # The backward pass needs the gradient of each layer's input (2 per weight), and of the weight if it trains (2).
    return 4 * num_params + 2 * num_trainable


def score_flops(length: int, windows: Iterable[int | None], features: int, causal: bool) -> int:
    """FLOP of attention scores, and of the values that they weight, in one forward pass of a row.

    Args:
        length: Tokens of the row.
        windows: For each layer, the tokens back that one attends to, itself included (not causal: to each side); None:
            all.
        features: Heads times features per head.
    """
    def pairs(window: int | None) -> int:
        reach = length if window is None else min(window, length)
        back = reach * (reach + 1) // 2 + (length - reach) * reach  # sum over all tokens, each itself included
        # Both sides count the token itself, which is subtracted once.
        return back if causal else 2 * back - length

    # 2 FLOP per multiplication and addition, for the scores (q k) and the weighted values (p v) each.
    return sum(4 * features * pairs(window) for window in windows)


def cache_bytes(config: Any, length: int, itemsize: int) -> int:
    """Return the bytes of the keys and values in all layers of a text of `length` tokens, and of the states that Gated
    DeltaNet keeps instead; in architectures that neither compress keys and values nor keep another state.

    Args:
        config: transformers configuration.
        itemsize: Bytes of an element.
    """
    text = config.get_text_config()
    num = text.num_hidden_layers
    kinds = getattr(text, "layer_types", None) or ["full_attention"] * num
    window = min(length, getattr(text, "sliding_window", None) or length)
    known = {"full_attention": length, "sliding_attention": window}
    has_own = num - (getattr(text, "num_kv_shared_layers", None) or 0)  # later layers take those of earlier ones
    total = 0
    for layer, kind in enumerate(kinds[:has_own]):
        own = layer_config(text, layer)
        if kind == "linear_attention" and hasattr(own, "linear_num_value_heads"):
            keys = own.linear_num_key_heads * own.linear_key_head_dim
            values = own.linear_num_value_heads * own.linear_value_head_dim
            # A float32 matrix of each value head, and the last inputs of the convolution.
            total += 4 * values * own.linear_key_head_dim
            total += itemsize * (2 * keys + values) * (own.linear_conv_kernel_dim - 1)
            continue
        heads = getattr(own, "num_key_value_heads", None) or own.num_attention_heads
        size = getattr(own, "head_dim", None) or own.hidden_size // own.num_attention_heads
        total += 2 * itemsize * heads * size * known.get(kind, 0)
    return total


# ---------------------------------------------------------------------------------------------------------------------
# Memory of a step.

GIB = 2**30
Method = Literal["counted from the configuration", "counted on fake tensors", "compiled by XLA", "measured"]
# Bytes of optimiser state per trained parameter.
STATE_BYTES = {"adamw": 8, "paged_adamw_32bit": 8, "lion": 4, "muon": 4, "adafactor": 4.1, "sgd": 4, "adamw_8bit": 2,
               "paged_adamw_8bit": 2, "lion_8bit": 1, "paged_lion_8bit": 1, "sgd_8bit": 1}


# A block that takes more than this fraction of the gap for it fits only just: a batch or a result that is placed inside
# the gap divides it, and another release of XLA may need a few percent more than the one that compiled a plan.
TIGHT = 0.8


@dataclass(frozen=True)
class StepMemory:
    """Peak memory of a training step on each device.

    Args:
        parts: Bytes by part; together they are the peak.
        available: Bytes that the step may take; infinite if there is no limit to compare with.
        method: How `parts` was found.
        refusal: Message of a compiler that found no room; None if there is none.
        trusts_compiler: Only `refusal` decides whether the step fits, as the compiler may move what it counts.
        block: Bytes of `parts` that must be one block, such as XLA's temporaries.
        gap: Bytes of the largest free piece of memory once all but this block is placed.
    """

    parts: dict[str, float]
    available: float
    method: Method
    refusal: str | None = None
    trusts_compiler: bool = False
    block: float = 0.0
    gap: float = math.inf

    @property
    def needed(self) -> int:
        """Bytes at the peak."""
        return int(sum(self.parts.values()))

    @property
    def fits(self) -> bool:
        """True if the memory suffices."""
        suffices = self.needed <= self.available and self.block <= self.gap
        return self.refusal is None and (self.trusts_compiler or suffices)

    @property
    def is_tight(self) -> bool:
        """True if it fits, but leaves little room for the block."""
        return self.fits and self.block > TIGHT * self.gap

    def __str__(self) -> str:
        limit = "" if math.isinf(self.available) else f" of {gibibytes(self.available)}"
        piece = (f"; {gibibytes(self.block)} of it must be one block, and the largest free piece has "
                 f"{gibibytes(self.gap)}" if self.block > TIGHT * self.gap else "")
        return f"about {gibibytes(self.needed)}{limit} for a step, {self.method}{piece}"


def gibibytes(num_bytes: float) -> str:
    """Return bytes as text in GiB, with two decimals or, if small, three digits."""
    size = num_bytes / GIB
    return f"{size:,.2f} GiB" if size >= 0.1 else f"{size:.3g} GiB"


def estimate_step(widths: Widths, weight_bytes: float, num_trainable: int, optimizer: str, num_tokens: int,
                  checkpointing: bool, compute_bytes: int, available: float, averages: bool = False) -> StepMemory:
    """Count the memory of a step from the dimensions of its network, accurate to some tens of percent.

    Args:
        weight_bytes: Memory of all weights, adapters included.
        optimizer: A key of `STATE_BYTES`.
        num_tokens: Tokens of a micro-batch, padding included.
        checkpointing: True if only the blocks' inputs are kept.
        compute_bytes: Bytes of an activation.
        available: As in `StepMemory`.
        averages: True if parameters are averaged over steps, in float32.
    """
    # A block keeps roughly its normed inputs, q, k, v, the attention output and the MLP's gate, up and product.
    per_layer = widths.hidden if checkpointing else 8 * widths.hidden + 3 * widths.wide
    activations = num_tokens * (per_layer * widths.num_layers + 4 * widths.hidden) * compute_bytes
    # Gradients are counted in float32.
    return StepMemory({"parameters": weight_bytes, "gradients": 4 * num_trainable,
                       "optimiser state": num_trainable * (STATE_BYTES[optimizer] + 4 * averages),
                       "activations": activations},
                      available, "counted from the configuration")
