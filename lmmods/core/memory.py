"""Size of a model, and memory of a training step: bytes on a device, whether they fit, and how they were determined.

The start of a run, `inspect`, `new`, `find` and `plan` all answer with a `StepMemory`.
"""

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from lmmods.core.experts import mixture_of
from lmmods.core.hf_config import layer_config
from lmmods.core.optimizers import OPTIMIZERS

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

# ---------------------------------------------------------------------------------------------------------------------
# Size of a model, and the arithmetic of training it, the same on both engines.

# Bytes of a 4-bit weight: half a byte, an 8-bit scale per 64 weights, a 32-bit scale per 256 scales.
NF4_BYTES = 1 / 2 + 1 / 64 + 4 / (64 * 256)


@dataclass(frozen=True)
class Widths:
    """Dimensions that determine the size of activations.

    Args:
        num_layers: Number of blocks.
        hidden: Width of the residual stream.
        wide: Width of the MLP's inner features.
        query: Number of query heads times their size, the mean over layers.
        key_value: Number of key heads times their size, the mean over layers.
        vocabulary: Number of tokens that the output head scores.
        has_rms_norm: True for RMSNorm, which transformers computes by single operations on float32 copies, and a gated
            MLP; False for LayerNorm, which torch computes in one operation, and a plain MLP.
        has_qk_norm: True if queries and keys have norms too.
    """

    num_layers: int
    hidden: int
    wide: int
    query: int
    key_value: int
    vocabulary: int = 0
    has_rms_norm: bool = True
    has_qk_norm: bool = False


def widths_of(config: "PreTrainedConfig", has_qk_norm: bool = False) -> Widths:
    """Return the dimensions of a model from its transformers configuration, which does not define `has_qk_norm`."""
    text, mixture = config.get_text_config(), mixture_of(config)
    wide = getattr(text, "intermediate_size", None) or 4 * text.hidden_size
    if mixture is not None:
        # Activations exist only for the experts that a token uses.
        shared_mlp = wide if mixture.has_mlp else 0
        wide = mixture.per_token * (getattr(text, "moe_intermediate_size", None) or wide) + shared_mlp
    queries, keys = zip(*(_attention_widths(layer_config(text, layer)) for layer in range(text.num_hidden_layers)))
    return Widths(text.num_hidden_layers, text.hidden_size, wide, sum(queries) // len(queries), sum(keys) // len(keys),
                  getattr(text, "vocab_size", 0), hasattr(text, "rms_norm_eps"), has_qk_norm)


def _attention_widths(layer: Any) -> tuple[int, int]:
    """Return the number of query heads times their size, and of key heads times their size, of a layer."""
    heads, size, key_value_heads = (value if isinstance(value := getattr(layer, name, None), int) else 0 for name in (
        "num_attention_heads", "head_dim", "num_key_value_heads"))  # a few families have a list or none
    heads = heads or 1
    size = size or layer.hidden_size // heads
    return heads * size, (key_value_heads or heads) * size


@dataclass(frozen=True)
class NetworkShape:
    """Size of a model before anything is quantised or adapted.

    Args:
        num_params: Number of all parameters, tied ones once.
        num_linear: Number of parameters that can be quantised: in experts, and in linear layers except the output head.
        lora_per_rank: Number of parameters per rank of adapters on these layers.
        widths: Dimensions of its activations.
        head: Number of parameters of the output head over the vocabulary; 0 if there is none.
    """

    num_params: int
    num_linear: int
    lora_per_rank: int
    widths: Widths
    head: int = 0

    def base_bytes(self, quantized: bool, compute_bytes: int) -> float:
        """Return the bytes of a frozen base's weights, whose linear layers may be in 4 bits."""
        num_unquantised = self.num_params - self.num_linear if quantized else self.num_params
        return num_unquantised * compute_bytes + (self.num_linear * NF4_BYTES if quantized else 0)


def describe_sizes(num_params: int, num_trainable: int, by_type: dict[str, int]) -> str:
    """Return the number of parameters and the types they are stored in, in one line."""
    fractions = ", ".join(f"{name} {count / num_params:.1%}" for name, count in by_type.items())
    return (f"Parameters: {num_params:,}, of which {num_trainable:,} train ({num_trainable / num_params:.2%}). "
            f"Stored as: {fractions}.")


def describe_teacher(name: str, num_params: int, by_type: dict[str, int]) -> str:
    """Return a description of the frozen model that a run learns from, on a separate line."""
    fractions = ", ".join(f"{dtype} {count / num_params:.1%}" for dtype, count in by_type.items())
    return f"\nTeacher: {name}, {num_params:,} parameters, frozen. Stored as: {fractions}."


def flops_per_token(num_params: int, num_trainable: int) -> int:
    """Return the FLOP of one training token: 2 per weight forward, 2 backward, 2 more per trained weight.

    Attention scores are not counted, as is usual (Kaplan et al. 2020).

    Args:
        num_params: Number of parameters, without an embedding that is only looked up, and with the fraction of the
            experts that a token uses.
        num_trainable: Number of these that train.
    """
    # The backward pass needs the gradient of each layer's input (2 per weight), and of the weight if it trains (2).
    return 4 * num_params + 2 * num_trainable


def score_flops(length: int, windows: Iterable[int | None], features: int, causal: bool) -> int:
    """Return the FLOP of attention scores, and of the values that they weight, in one forward pass of a row.

    Args:
        length: Number of tokens in the row.
        windows: For each layer, the number of past tokens that a token attends to, itself included (not causal: on each
            side); None is all.
        features: Number of heads times features per head.
    """
    def pairs(window: int | None) -> int:
        reach = length if window is None else min(window, length)
        back = reach * (reach + 1) // 2 + (length - reach) * reach  # sum over all tokens, each itself included
        # Both sides count the token itself, which is subtracted once.
        return back if causal else 2 * back - length

    # 2 FLOP per multiplication and addition, for the scores (q k) and the weighted values (p v) each.
    return sum(4 * features * pairs(window) for window in windows)


def cache_bytes(config: "PreTrainedConfig", length: int, itemsize: int) -> int:
    """Return the bytes of the keys and values in all layers of a text, and of the states that Gated DeltaNet keeps.

    Architectures that compress keys and values or keep another state are not supported.

    Args:
        config: transformers configuration.
        length: Number of tokens in the text.
        itemsize: Bytes of an element.
    """
    text = config.get_text_config()
    num_layers = text.num_hidden_layers
    layer_types = getattr(text, "layer_types", None) or ["full_attention"] * num_layers
    window = min(length, getattr(text, "sliding_window", None) or length)
    lengths = {"full_attention": length, "sliding_attention": window}
    # The last layers may share the keys and values of earlier ones.
    num_with_cache = num_layers - (getattr(text, "num_kv_shared_layers", None) or 0)
    total = 0
    for layer, layer_type in enumerate(layer_types[:num_with_cache]):
        settings = layer_config(text, layer)
        if layer_type == "linear_attention" and hasattr(settings, "linear_num_value_heads"):
            keys = settings.linear_num_key_heads * settings.linear_key_head_dim
            values = settings.linear_num_value_heads * settings.linear_value_head_dim
            # A float32 matrix of each value head, and the last inputs of the convolution.
            total += 4 * values * settings.linear_key_head_dim
            total += itemsize * (2 * keys + values) * (settings.linear_conv_kernel_dim - 1)
            continue
        heads = getattr(settings, "num_key_value_heads", None) or settings.num_attention_heads
        size = getattr(settings, "head_dim", None) or settings.hidden_size // settings.num_attention_heads
        total += 2 * itemsize * heads * size * lengths.get(layer_type, 0)
    return total


# ---------------------------------------------------------------------------------------------------------------------
# Memory of a step.

GIB = 2**30
# Losses over the vocabulary, on both engines: approximate bytes of the float32 logits that are computed at once. Each
# chunk reads the head's weights, and their gradient if they train, again: on GPUs this costs more than the memory of
# larger chunks; on CPUs larger chunks are not faster.
CHUNK_BYTES = 32 * 2**20
CHUNK_BYTES_GPU = 256 * 2**20
MIN_CHUNK = 128  # minimum positions of a chunk, so that reading the weights of a large vocabulary pays
Method = Literal["counted from the configuration", "counted on fake tensors", "compiled by XLA", "measured"]


# A block larger than this fraction of its gap fits only just: a batch or a result that is placed inside the gap divides
# it, and another release of XLA may need a few percent more than the one that compiled a plan.
TIGHT = 0.8


@dataclass(frozen=True)
class StepMemory:
    """Peak memory of a training step on each device.

    Args:
        parts: Bytes by part; their sum is the peak.
        available: Bytes available to the step; infinite if there is no known limit.
        method: How `parts` was determined.
        refusal: Message of a compiler that ran out of memory, if any.
        trusts_compiler: Only `refusal` decides whether the step fits, as the compiler may move what it counts.
        block: Bytes of `parts` that must be one block, such as XLA's temporaries.
        gap: Bytes of the largest free block of memory after everything else is placed.
    """

    parts: Mapping[str, float]
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
        """True if it fits, but leaves little space for the block."""
        return self.fits and self.block > TIGHT * self.gap

    def __str__(self) -> str:
        limit = "" if math.isinf(self.available) else f" of {gibibytes(self.available)}"
        block_note = (f"; {gibibytes(self.block)} of it must be one block, and the largest free block has "
                      f"{gibibytes(self.gap)}" if self.block > TIGHT * self.gap else "")
        return f"about {gibibytes(self.needed)}{limit} for a step, {self.method}{block_note}"


def gibibytes(num_bytes: float) -> str:
    """Return bytes as text in GiB, with two decimals or, if small, three digits."""
    size = num_bytes / GIB
    return f"{size:,.2f} GiB" if size >= 0.1 else f"{size:.3g} GiB"


# With gradient_checkpointing: offload, tokens of a row that an MLP computes at a time: enough to keep a GPU busy, and
# few enough that their features are small beside the row's other activations.
MLP_CHUNK = 8192


@dataclass(frozen=True)
class Step:
    """How an engine runs a step: all settings that its memory depends on.

    Args:
        num_trainable: Number of parameters that train.
        optimizer: A key of `OPTIMIZERS`.
        checkpointing: True if only the blocks' inputs are kept, and the backward pass recomputes each block.
        compute_bytes: Bytes of an activation.
        param_bytes: Bytes of a parameter that trains, and of its gradient.
        runs: `eager` by single operations of torch; `compiled` by torch.compile; `scanned` by XLA, block after block.
        recomputes: True if a block keeps its input and the results of products and attention, and recomputes the rest.
        averages: True if parameters are averaged over steps, in float32.
        sums_gradients: True if gradients are summed over micro-batches in separate float32 arrays.
        in_full: True if all weights train, without an adapter.
        has_dropout: True if adapters drop features of their inputs, and masks are saved.
        chunk_bytes: Bytes of the float32 logits that the loss computes at once, infinite for all; 0 if it is not over
            the vocabulary.
        trained_head: Number of parameters of the output head if it trains, else 0.
        offloads: True if the blocks' inputs are kept in the host's memory, and MLPs are computed in chunks.
    """

    num_trainable: int
    optimizer: str
    checkpointing: bool
    compute_bytes: int
    param_bytes: float = 4.0
    runs: Literal["eager", "compiled", "scanned"] = "eager"
    recomputes: bool = False
    averages: bool = False
    sums_gradients: bool = False
    in_full: bool = False
    has_dropout: bool = False
    chunk_bytes: float = 0.0
    trained_head: int = 0
    offloads: bool = False

    @property
    def is_mixed(self) -> bool:
        """True if products use fewer bytes per element than the parameters that train."""
        return self.compute_bytes < self.param_bytes

    def kept_in_block(self, widths: Widths) -> float:
        """Return the bytes per token that a block keeps for the backward pass."""
        hidden, query, size = widths.hidden, widths.query, self.compute_bytes
        is_wide = self.in_full and self.is_mixed
        if self.recomputes:
            products = hidden + 2 * query + 2 * widths.key_value
            return size * products + hidden * (4 if is_wide else size) + self.kept_in_mlp(widths)
        # Both norms' results, which are the inputs of products; queries, keys, values and the result of attention.
        total: float = size * (2 * hidden + 2 * query + 2 * widths.key_value)
        # Inputs of the norms: the residual stream, which is float32 if all weights are, or a float32 copy made by the
        # operations of transformers. A compiler recomputes what is inside of a norm.
        normed, is_eager = 2 * hidden + widths.has_qk_norm * (query + widths.key_value), self.runs == "eager"
        total += normed * (4 if is_eager and widths.has_rms_norm or is_wide else size)
        total += self.kept_in_mlp(widths)
        if self.in_full and is_eager and widths.has_rms_norm:
            total += self.param_bytes * normed  # results of the norms before their weights
        if is_wide and self.runs != "compiled":
            total += size * 3 * hidden  # each of the five products casts its own input
        if self.has_dropout:
            # A norm's result is dropped separately for each product that reads it, and is then not kept. Attention's
            # result (which is kept) and the MLP's are dropped too. A mask takes a byte.
            drops = 5 if widths.has_rms_norm else 4
            total += size * ((drops - 2) * hidden + query) + drops * hidden + query
        return total

    def kept_in_mlp(self, widths: Widths) -> float:
        """Return the part of `kept_in_block` that is as wide as the MLP."""
        if self.recomputes:
            return self.compute_bytes * widths.wide * (2 if widths.has_rms_norm else 1)
        # The inner features, and with a gate: gate, up and product; by single operations also the gate's SiLU.
        features = 2 if not widths.has_rms_norm else 4 if self.runs == "eager" else 3
        return widths.wide * (self.compute_bytes * features + self.has_dropout)

    def loss_bytes(self, vocabulary: int, num_tokens: int) -> float:
        """Return the bytes that the loss needs while it is computed.

        These are a chunk's logits and their softmax, and the gradient of a head that trains, in float32.
        """
        if not (self.chunk_bytes and vocabulary):
            return 0
        positions = int(min(max(self.chunk_bytes / (4 * vocabulary), MIN_CHUNK), num_tokens))
        return 2 * 4 * vocabulary * positions + 4 * self.trained_head


def estimate_step(widths: Widths, weight_bytes: float, step: Step, num_tokens: int, available: float) -> StepMemory:
    """Estimate the memory of a step from the dimensions of its network, assuming that attention keeps no scores.

    Args:
        weight_bytes: Bytes of all weights, adapters included.
        num_tokens: Number of tokens in a micro-batch, padding included.
        available: See `StepMemory`.
    """
    inputs, block = widths.hidden * step.compute_bytes, step.kept_in_block(widths)
    num_kept = 1 if step.offloads else widths.num_layers
    kept_bytes = num_tokens * ((inputs if step.checkpointing else block) * num_kept + 4 * inputs)
    # The peak is at the loss, or at the first block of the backward pass: its recomputed activations, or in a loop of
    # XLA the gradients of its kept ones.
    recomputed = num_tokens * block if step.checkpointing or step.runs == "scanned" else 0
    if step.offloads:
        # The MLP's features exist for one chunk. By single operations, the others exist along with their gradients.
        mlp = step.kept_in_mlp(widths)
        recomputed = (num_tokens * (block - mlp) * (2 if step.runs == "eager" else 1)
                      + min(num_tokens, MLP_CHUNK) * mlp)
    loss = step.loss_bytes(widths.vocabulary, num_tokens)
    state = OPTIMIZERS[step.optimizer].bytes_per_parameter(step.param_bytes)
    gradients = step.param_bytes + 4 * step.sums_gradients
    # Autocast casts the weights that train once, and keeps the copies for the backward pass.
    copies = step.compute_bytes * step.num_trainable if step.is_mixed and step.runs != "scanned" else 0
    return StepMemory({"parameters": weight_bytes, "gradients": gradients * step.num_trainable,
                       "optimiser state": step.num_trainable * (state + 4 * step.averages),
                       "activations": kept_bytes + copies + max(recomputed - loss, 0), "loss": loss},
                      available, "counted from the configuration")
