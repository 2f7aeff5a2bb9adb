"""Size of a network in words, and the arithmetic of training it, computed alike on both engines."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from lmmods.core.experts import mixture_of

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
        wide = mixture.per_token * (getattr(text, "moe_intermediate_size", None) or wide)
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


def flops_per_token(num_params: int, num_trainable: int) -> int:
    """FLOP of one training token: 2 per weight forward, 2 backward, 2 more per trained weight.

    Attention scores are not counted, as is usual (Kaplan et al. 2020).

    Args:
        num_params: Without an embedding that is only looked up, and with experts counted by the share that a token
            uses.
        num_trainable: The trained ones of these.
    """
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
        return back if causal else 2 * back - length

    return sum(4 * features * pairs(window) for window in windows)
