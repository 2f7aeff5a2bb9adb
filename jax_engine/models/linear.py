"""Layers other than attention: linear layers with optional adapters, embeddings, norms, activations.

Weights keep torch's names and orientation ([out, in]; Conv1D [in, out]), so that loading and saving copy bits, and
block-wise quantisation sees the same rows as in torch.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import Array
from jax.ad_checkpoint import checkpoint_name

from jax_engine.distributed.mesh import gather, look_up
from jax_engine.models.architecture import NormKind
from jax_engine.models.dropout import Seeds, dropout
from jax_engine.models.quant import Quantized
from lmmods.core.errors import UserError
from lmmods.core.hardware import Target
from lmmods.core.initialization import Distribution, Normal, init_part, lora_a
from lmmods.core.lazy_array import LazyArray, Part
from lmmods.core.settings import LoRA


def exact_gelu(x: Array) -> Array:
    """Apply the exact GELU. float32 uses erf, as in torch; jax.nn.gelu uses erfc, which is slow, but bfloat16 needs it.
    """
    if x.dtype != jnp.float32:
        return jax.nn.gelu(x, approximate=False)
    return 0.5 * x * (1 + jax.lax.erf(x * math.sqrt(0.5)))


def soft_cap(x: Array, cap: float | None) -> Array:
    """Soft-cap x to (-cap, cap) by tanh (Bello et al. 2016); None leaves x unchanged."""
    return x if cap is None else cap * jnp.tanh(x / cap)


ACTIVATIONS = {
    "gelu": exact_gelu,
    "gelu_python": exact_gelu,
    "gelu_new": lambda x: jax.nn.gelu(x, approximate=True),
    "gelu_fast": lambda x: jax.nn.gelu(x, approximate=True),
    "gelu_pytorch_tanh": lambda x: jax.nn.gelu(x, approximate=True),
    "quick_gelu": lambda x: x * jax.nn.sigmoid(1.702 * x),
    "relu": jax.nn.relu,
    "silu": jax.nn.silu,
    "swish": jax.nn.silu,
    "tanh": jnp.tanh,
}


# Save only `gate` and `up` for the backward pass: the intermediate arrays are as large, and cheap to recompute.
@partial(jax.checkpoint, prevent_cse=False, static_argnums=0)
def apply_gate(activation: str, gate: Array, up: Array) -> Array:
    """Return act(gate) * up."""
    return ACTIVATIONS[activation](gate) * up


def check_activation(name: str) -> str:
    """Return `name`; raise UserError if the activation is not supported."""
    if name not in ACTIVATIONS:
        raise UserError(f"model.config: the activation {name!r} is not supported by the JAX engine. Use engine: "
                        f"torch, or one of {', '.join(sorted(ACTIVATIONS))}.")
    return name


@dataclass(frozen=True)
class Build:
    """Implementation choices and adapters of a network.

    Args:
        dtype: Dtype of matrix products; parameters keep their own.
        lora: Adapter settings.
        adapted: Paths of the linear layers with an adapter, for example `layers.attn.q`.
        adapted_experts: Names of the experts' matrices with an adapter: `gate_up_proj`, `down_proj`.
        rows: Tokens whose rows train alongside the adapters, by path of their table: `embed.tokens`, `head`.
        cpu_forms: Use implementations of weight gradients and layer stacks that are fast on CPUs.
        blocked: Compute attention in blocks, which is fast on CPUs.
        attention: The recipe's choice; `eager` is unfused attention.
        cut: Truncation of the initial distribution of matrices, in standard deviations; None does not truncate.
        experts: Implementation of mixtures of experts (see `jax_engine.models.experts`).
        on: The `target` that determines the implementations.
        noise: `TaskFields.neftune_alpha`; 0 adds none.
        mlp_chunk: Number of tokens of a row that an MLP computes at a time; 0 computes all at once.
    """

    dtype: jnp.dtype
    lora: LoRA | None = None
    adapted: frozenset[str] = frozenset()
    adapted_experts: tuple[str, ...] = ()
    rows: dict[str, tuple[int, ...]] = field(default_factory=dict)
    cpu_forms: bool = False
    blocked: bool = False
    attention: str | None = None
    cut: float | None = None
    experts: Literal["dense", "ragged", "blocks"] = "dense"
    on: Target | None = None
    noise: float = 0.0
    mlp_chunk: int = 0

    def normal(self, std: float) -> Normal:
        """Return the initial distribution with this standard deviation (before truncation)."""
        return Normal(std, cut=self.cut)


class Linear(nnx.Module):
    """Linear layer y = x W^T + b, with PEFT's adapter if `path` is among the adapted ones.

    The weight may be any object with an `astype` that returns a matrix, for example a quantised one. Adapters: LoRA
    (Hu et al. 2021), rank-stabilised (Kalajdzievski 2023), weight-decomposed (DoRA, Liu et al. 2024).
    """

    def __init__(self, in_size: int, out_size: int, path: str, build: Build, *, std: float, bias: bool = True,
                 conv1d: bool = False):
        self.path, self.build, self.conv1d = path, build, conv1d
        self.weight = parameter((in_size, out_size) if conv1d else (out_size, in_size), build.normal(std))
        self.bias = parameter((out_size,), 0.0) if bias else None
        self.adapted = path in build.adapted
        if self.adapted:
            self.lora_A = parameter((build.lora.rank, in_size), lora_a(in_size))
            self.lora_B = parameter((out_size, build.lora.rank), 0.0)
            if build.lora.dora:
                self.lora_magnitude_vector = parameter((out_size,), 1.0)  # set from the weight by `add_adapter`

    def __call__(self, x: Array, seeds: Seeds | None = None) -> Array:
        """Map features [..., in] to [..., out]; `seeds` are for the adapter's dropout."""
        dtype, weight = self.build.dtype, self.weight.get_value()
        y = self._product(x, weight)
        if self.adapted:
            y = y + self._adapter(x, y, weight, seeds)
        # Save the sum for the backward pass, not its terms (see `Network`).
        return checkpoint_name(y if self.bias is None else y + self.bias[...].astype(dtype), "linear")

    def _product(self, x: Array, weight: Any) -> Array:
        """Return x W^T."""
        name = f"{self.path}.weight"
        if isinstance(weight, Quantized):
            return _quantised_product(name, self.build, self.conv1d, x, weight)
        # Cast before the all-gather, which then transfers half the bytes in 16 bits.
        return product(x, gather(name, weight.astype(self.build.dtype)), self.build, self.conv1d)

    def _adapter(self, x: Array, y: Array, weight: Any, seeds: Seeds | None) -> Array:
        """Return the adapter's update to y = x W^T."""
        lora, dtype = self.build.lora, self.build.dtype
        scaling = lora.scaling
        dropped = dropout(x, lora.dropout, seeds, f"{self.path}.lora")
        # [rank, in] and [out, rank], sharded like the weight; gathered only during the product.
        a, b = (gather(f"{self.path}.{name}", getattr(self, name)[...].astype(dtype))
                for name in ("lora_A", "lora_B"))
        update = product(product(dropped, a, self.build), b, self.build) * scaling
        if not lora.dora:
            return update
        # DoRA rescales each row of the merged weight to a trained magnitude.
        delta = self.lora_B[...].astype(jnp.float32) @ self.lora_A[...].astype(jnp.float32)
        base = weight.astype(dtype).astype(jnp.float32)
        merged = base + scaling * (delta.T if self.conv1d else delta)
        # The norm is a constant in the gradient (section 4.3 of the paper).
        norms = jax.lax.stop_gradient(row_norms(merged, self.conv1d))
        factor = (self.lora_magnitude_vector[...] / norms).astype(dtype)
        # PEFT applies the weight to the dropped input here; without dropout, y is that product already.
        if dropped is not x:
            y = self._product(dropped, weight)
        # The caller adds y; without dropout the sum is factor * (y + update).
        return (factor - 1) * y + factor * update


def product(x: Array, matrix: Array, build: Build, conv1d: bool = False, result: jnp.dtype | None = None) -> Array:
    """Multiply x [..., in] by a matrix [out, in] (Conv1D: [in, out]) in the build's dtype."""
    multiply = _product_on_cpu if build.cpu_forms else _product
    return multiply(conv1d, result, x.astype(build.dtype), matrix.astype(build.dtype))


def _product(conv1d: bool, result: jnp.dtype | None, x: Array, matrix: Array) -> Array:
    return jnp.einsum("...i,io->...o" if conv1d else "...i,oi->...o", x, matrix, preferred_element_type=result)


def _einsum_in_float32(subscripts: str, x: Array, y: Array, dtype: jnp.dtype) -> Array:
    """Return an einsum computed in float32 and rounded once to `dtype`.

    XLA's bfloat16 kernels on CPUs return float32. For a bfloat16 result, XLA first converts the operands to float32,
    which takes three times as long.
    """
    return jnp.einsum(subscripts, x, y, preferred_element_type=jnp.float32).astype(dtype)


@partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _product_on_cpu(conv1d, result, x, matrix):
    return _einsum_in_float32("...i,io->...o" if conv1d else "...i,oi->...o", x, matrix, result or x.dtype)


def _product_forward(conv1d, result, x, matrix):
    return _product_on_cpu(conv1d, result, x, matrix), (x, matrix)


def _product_backward(conv1d, _result, residuals, gradient):
    """Compute the matrix gradient with its shorter side as rows, which is 1.5 times as fast on CPUs."""
    x, matrix = residuals
    d_x = _einsum_in_float32("...o,io->...i" if conv1d else "...o,oi->...i", gradient, matrix, x.dtype)
    # x is [N, in] and the gradient [N, out], with all leading dimensions in N.
    sides = (x, gradient) if x.shape[-1] <= gradient.shape[-1] else (gradient, x)
    d_matrix = _einsum_in_float32("ni,no->io", *(side.reshape(-1, side.shape[-1]) for side in sides), matrix.dtype)
    # The matrix is [out, in], or with Conv1D [in, out].
    if (sides[0] is x) != conv1d:
        d_matrix = jax.lax.optimization_barrier(d_matrix).T  # XLA would fold it into the product
    return d_x, d_matrix


_product_on_cpu.defvjp(_product_forward, _product_backward)


@partial(jax.custom_vjp, nondiff_argnums=(0, 1, 2))
def _quantised_product(name: str, build: Build, conv1d: bool, x: Array, weight: Quantized) -> Array:
    """Multiply x by a quantised matrix. The backward pass dequantises it again, so that only (sharded) codes are saved.
    """
    return product(x, _dequantise(name, build, gather(name, weight)), build, conv1d)


def _quantised_forward(name, build, conv1d, x, weight):
    # The weight is frozen, so x is not needed again; the empty array keeps its dtype.
    return _quantised_product(name, build, conv1d, x, weight), (weight, jnp.zeros(0, x.dtype))


def _quantised_backward(name, build, conv1d, residuals, gradient):
    weight, empty = residuals
    # With remat, the recomputed forward pass shares its gathered codes with the backward pass. The barrier stops XLA
    # from sharing the dequantised matrix as well, which would stay in memory.
    matrix = _dequantise(name, build, jax.lax.optimization_barrier(gather(name, weight)))
    subscripts = "...o,io->...i" if conv1d else "...o,oi->...i"
    if build.cpu_forms:
        return _einsum_in_float32(subscripts, gradient, matrix, empty.dtype), None
    return jnp.einsum(subscripts, gradient, matrix, preferred_element_type=gradient.dtype).astype(empty.dtype), None


def _dequantise(name: str, build: Build, codes: Quantized) -> Array:
    """Dequantise in the layout of the gathered codes. Otherwise XLA might dequantise shards and gather the result."""
    return gather(name, codes.astype(build.dtype))


_quantised_product.defvjp(_quantised_forward, _quantised_backward)


def vocabulary_logits(hidden: Array, table: Array, build: Build, tokens: tuple[int, ...], rows: Array | None) -> Array:
    """Return float32 logits [..., V] of hidden states [..., D].

    Args:
        table: [V, D].
        tokens: K tokens with replaced rows in the table.
        rows: [K, D] replacements. They are applied to the logits, not the table, so that the gradient of the whole
            table is never computed.
    """
    # Operands in the compute dtype, results in float32.
    logits = product(hidden, table, build, result=jnp.float32)
    if rows is None:
        return logits
    replacements = product(hidden, rows.astype(table.dtype), build, result=jnp.float32)
    return logits.at[..., np.array(tokens)].set(replacements)


def row_norms(matrix: Array, conv1d: bool) -> Array:
    """Return the Euclidean norm of each output's weights, [out]."""
    return jnp.linalg.norm(matrix, axis=-2 if conv1d else -1)


class Embedding(nnx.Module):
    """Embedding table [num, size].

    Row `padding_id` gets no gradient from look-ups, and starts at zero unless there is a `cut`. Trainable rows replace
    the rows of `tokens` in a frozen table, as with PEFT's trainable tokens.
    """

    def __init__(self, num: int, size: int, *, std: float, padding_id: int | None = None,
                 tokens: tuple[int, ...] = (), cut: float | None = None):
        # Negative ids count from the end, as in torch's padding_idx.
        self.padding_id = None if padding_id is None else padding_id % num
        # With a truncated distribution, transformers initialises the padding row like all others.
        self.weight = parameter((num, size), RandomRows(Normal(std, cut=cut), self.padding_id if cut is None else None))
        self.tokens = tokens
        if tokens:
            self.trainable_tokens_delta = parameter((len(tokens), size), 0.0)

    def __call__(self, ids: Array) -> Array:
        rows = look_up(self.weight[...], ids)  # ids out of range give NaN, which the trainer reports
        if self.tokens:
            # Vocabulary id -> trainable row, or -1.
            delta_rows = np.full(len(self.weight), -1, np.int32)
            delta_rows[list(self.tokens)] = np.arange(len(self.tokens))
            delta_row = jnp.take(delta_rows, ids)  # negative if the token has no trainable row or is out of range
            trained = jnp.take(self.trainable_tokens_delta[...], delta_row, axis=0, mode="clip").astype(rows.dtype)
            rows = jnp.where((delta_row >= 0)[..., None], trained, rows)
        if self.padding_id is None:
            return rows
        # Look up the padding row like any other, but give it no gradient, as torch's padding_idx does.
        return jnp.where((ids == self.padding_id)[..., None], jax.lax.stop_gradient(rows), rows)


class Norm(nnx.Module):
    """LayerNorm or RMSNorm over the last axis in float32. The result has the dtype of the input.

    Args:
        kind: `rms` rounds to that dtype before it applies the weight, and `rms_wide` after it; `rms_plus_one` applies
            1 + weight.
    """

    def __init__(self, size: int, kind: NormKind, eps: float):
        self.kind, self.eps = kind, eps
        self.weight = parameter((size,), 0.0 if kind == "rms_plus_one" else 1.0)
        self.bias = parameter((size,), 0.0) if kind == "layer" else None

    def __call__(self, x: Array) -> Array:
        return _normalise(self.kind, self.eps, x, self.weight[...], None if self.bias is None else self.bias[...])


# Save only the input for the backward pass, not float32 copies of each step.
@partial(jax.checkpoint, prevent_cse=False, static_argnums=(0, 1))
def _normalise(kind: NormKind, eps: float, x: Array, weight: Array, bias: Array | None) -> Array:
    y, weight = x.astype(jnp.float32), weight.astype(jnp.float32)
    if kind in ("layer", "layer_no_bias"):
        # The mean square of centred features is their variance, so the next line serves both kinds.
        y = y - y.mean(-1, keepdims=True)
    y = y * jax.lax.rsqrt(jnp.square(y).mean(-1, keepdims=True) + eps)
    if kind == "rms":
        y = y.astype(x.dtype).astype(jnp.float32)
    y = y * (1 + weight) if kind == "rms_plus_one" else y * weight
    return (y if bias is None else y + bias.astype(jnp.float32)).astype(x.dtype)


def divide_by_rms(x: Array, eps: float) -> Array:
    """Divide x by the root mean square of its last axis, in float32: an RMSNorm without a weight."""
    return _normalise("rms", eps, x, jnp.ones(x.shape[-1]), None)


# ---------------------------------------------------------------------------------------------------------------------
# Parameters of modules: in the description of a network they have a shape and an initialiser, but no values.


@dataclass(frozen=True)
class RandomRows:
    """Initialiser of a table with random rows; row `zeros`, if set, is zero (the padding token)."""

    values: Normal
    zeros: int | None = None


# A number fills the parameter; a function creates it from its shape.
Initialiser = Distribution | RandomRows | float | Callable[..., np.ndarray]


def parameter(shape: tuple[int, ...], initialiser: Initialiser) -> nnx.Param:
    """Return a parameter of zeros; under `nnx.eval_shape` only its shape remains."""
    return nnx.Param(jnp.zeros(shape), initialiser=initialiser)


def collect_initialisers(module: nnx.Module) -> dict[tuple[str, ...], Initialiser]:
    """Return the initialisers of a module's parameters, by path."""
    return {path: node.get_metadata("initialiser") for path, node in nnx.iter_graph(module)
            if isinstance(node, nnx.Param)}


class InitialValues(LazyArray):
    """Initial values of a leaf, sampled lazily in float32 and cast. Any part can be sampled without the other rows.

    Args:
        shape: Shape of one layer.
        names: Names in the Hugging Face folder, one per layer for a leaf of stacked layers [layers, *shape].
        is_stacked: True if the leaf has a leading layer axis.
    """

    def __init__(self, initialiser: Initialiser, shape: tuple[int, ...], seed: int, names: Sequence[str],
                 is_stacked: bool, dtype: np.dtype):
        self._initialiser, self._layer_shape, self._seed = initialiser, shape, seed
        self._names, self._is_stacked = names, is_stacked
        super().__init__((len(names), *shape) if is_stacked else shape, dtype, self._sample)

    def _sample(self, part: Part) -> np.ndarray:
        layers, part = (part[0], part[1:]) if self._is_stacked else (slice(None), part)
        # Sample each layer under its name, so that values are the same as in torch, where layers are separate tensors.
        values = [self._sample_layer(name, part).astype(self.dtype) for name in self._names[layers]]
        return np.stack(values) if self._is_stacked else values[0]

    def _sample_layer(self, name: str, part: Part) -> np.ndarray:
        initialiser, shape = self._initialiser, self._layer_shape
        if isinstance(initialiser, float):
            return np.full(shape, initialiser, np.float32)[part]
        if callable(initialiser):
            return np.asarray(initialiser(*shape), np.float32)[part]
        if not isinstance(initialiser, RandomRows):
            return init_part(self._seed, name, initialiser, shape, part)
        rows = init_part(self._seed, name, initialiser.values, shape, part)
        if initialiser.zeros is not None:
            # This part may not include the padding row.
            rows[np.arange(shape[0])[part[0]] == initialiser.zeros] = 0.0
        return rows
