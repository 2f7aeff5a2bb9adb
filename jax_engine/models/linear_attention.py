"""Gated DeltaNet (Yang et al. 2025): attention by a state of fixed size, in time linear in the length of the row."""

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax import Array
from jax.sharding import PartitionSpec

from jax_engine.distributed.interface import DATA_AXES, SEQUENCE, constrain, context_parallel_size, shard_sequence
from jax_engine.models.architecture import Architecture, LinearHeads
from jax_engine.models.dropout import Seeds
from jax_engine.models.linear import ACTIVATIONS, Build, Linear, Norm, apply_gate, parameter
from lmmods.core.initialization import LogUniform

CHUNK = 64  # tokens per chunk; all products between its tokens are computed at once; a power of two
_product = partial(jnp.einsum, precision="highest")  # full float32 precision, which GPUs and TPUs otherwise reduce


class Texts(NamedTuple):
    """Texts of rows [B, T].

    Args:
        real: False for padding, which changes no state.
        documents: Index of each token's document in a packed row; None: a row is one text.
    """

    real: Array
    documents: Array | None


# Save only the inputs for the backward pass: intermediate arrays take several times their memory.
@partial(jax.checkpoint, prevent_cse=False)
def gated_delta_rule(q: Array, k: Array, v: Array, decay: Array, rate: Array, documents: Array | None = None,
                     state: Array | None = None) -> tuple[Array, Array]:
    """Read and write a state S [D, E] of each value head with each token, in float32.

        S_t = exp(decay_t) S_t-1 + k_t u_t^T,  u_t = rate_t (v_t - exp(decay_t) S_t-1^T k_t),  out_t = S_t^T q_t

    Within a chunk the u solve a triangular system (Yang et al. 2024); a scan carries the state from chunk to chunk.

    Args:
        q: [B, T, H, D]. k: the same.
        v: [B, T, H G, E]; a head of q and k serves G consecutive ones.
        decay: [B, T, H G], 0 or less. rate: the same, between 0 and 1.
        documents: [B, T]; the state is reset where the index changes. None: it is never reset.
        state: [B, H, G, D, E] before the first token; None is 0.

    Returns:
        [B, T, H G, E], and the state after the last token; both float32.
    """
    (batch, length, heads, size), (num_values, out_size) = k.shape, v.shape[2:]
    groups, chunk = num_values // heads, min(CHUNK, 1 << (length - 1).bit_length())
    padding = -length % chunk

    def in_chunks(x: Array, mode: str = "constant") -> Array:
        """Reshape [B, T, ...] to [chunks, B, C, ...]."""
        x = jnp.pad(x, ((0, 0), (0, padding), *[(0, 0)] * (x.ndim - 2)), mode=mode)
        return x.reshape(batch, -1, chunk, *x.shape[2:]).swapaxes(0, 1)

    def by_group(x: Array) -> Array:
        """Reshape [B, T, H G, ...] to [chunks, B, H, G, C, ...] in float32."""
        return jnp.moveaxis(in_chunks(x.astype(jnp.float32).reshape(batch, length, heads, groups, *x.shape[3:])), 2, 4)

    q, k = (jnp.moveaxis(in_chunks(x.astype(jnp.float32)), 2, 3) for x in (q, k))  # [chunks, B, H, C, D]
    v, decay, rate = by_group(v), by_group(decay), by_group(rate)
    # [chunks, B, C, C]: token j is not after token i, and in the same document. [chunks, B, C]: the token's document
    # continues from before the chunk.
    visible = jnp.broadcast_to(jnp.tri(chunk, dtype=bool), (len(k), batch, chunk, chunk))
    continues = jnp.ones((len(k), batch, chunk), bool)
    if documents is not None:
        documents = in_chunks(documents, "edge")
        visible &= documents[..., None] == documents[..., None, :]
        continues = documents == jnp.concatenate([documents[:1, :, 0], documents[:-1, :, -1]])[..., None]
    # Decay after token j up to token i, each summed separately: differences of cumulative sums would lose small values
    # next to large ones, and depend on earlier documents. Below, the decay from the start of the chunk up to token i.
    up_to = jnp.tri(chunk)
    between = _product("il,nbhglj->nbhgij", up_to, decay[..., None] * jnp.tri(chunk, k=-1))
    between = jnp.exp(between) * visible[:, :, None, None]
    since = jnp.exp(_product("il,nbhgl->nbhgi", up_to, decay)) * continues[:, :, None, None]
    system = rate[..., None] * between * _product("nbhid,nbhjd->nbhij", k, k)[:, :, :, None]
    inputs = jnp.concatenate([v, since[..., None] * k[:, :, :, None]], -1) * rate[..., None]
    solved = _product("nbhgij,nbhgje->nbhgie", invert_unit_lower(system), inputs)
    scores = between * _product("nbhid,nbhjd->nbhij", q, k)[:, :, :, None]
    steps = q, k, solved[..., :out_size], solved[..., out_size:], scores, since, between[..., -1, :]

    def step(state: Array, chunk: tuple[Array, ...]) -> tuple[Array, Array]:
        q, k, values, state_keys, scores, since, to_end = chunk
        written = values - _product("bhgid,bhgde->bhgie", state_keys, state)
        read = since[..., None] * _product("bhid,bhgde->bhgie", q, state)
        state = since[..., -1, None, None] * state + _product("bhjd,bhgje->bhgde", k, to_end[..., None] * written)
        return state, read + _product("bhgij,bhgje->bhgie", scores, written)

    state = jnp.zeros((batch, heads, groups, size, out_size)) if state is None else state
    state, out = jax.lax.scan(step, state, steps)
    # [chunks, B, H, G, C, E] -> [B, T, H G, E]
    return jnp.moveaxis(out, (0, 4), (1, 2)).reshape(batch, -1, num_values, out_size)[:, :length], state


@jax.custom_vjp
def invert_unit_lower(matrix: Array) -> Array:
    """Invert lower triangular matrices [..., C, C] with ones on the diagonal; C is a power of two.

    Only the part below the diagonal is read. Blocks double in size: the inverse of [[A, 0], [B, D]] is
    [[A^-1, 0], [-D^-1 B A^-1, D^-1]]. XLA's solver can deadlock on CPUs: its threads wait for each other, and two
    solvers at once may wait forever.
    """
    def double(level: Array, inverse: Array) -> Array:
        blocks = jnp.arange(matrix.shape[-1]) >> level  # index of each row's block
        is_below = (blocks[:, None] == blocks + 1) & (blocks % 2 == 0)
        return inverse - _product("...ij,...jk,...kl->...il", inverse, jnp.where(is_below, matrix, 0), inverse)

    identity = jnp.broadcast_to(jnp.eye(matrix.shape[-1], dtype=matrix.dtype), matrix.shape)
    return jax.lax.fori_loop(0, matrix.shape[-1].bit_length() - 1, double, identity)


def _inverse_forward(matrix: Array) -> tuple[Array, Array]:
    inverse = invert_unit_lower(matrix)
    return inverse, inverse


def _inverse_backward(inverse: Array, gradient: Array) -> tuple[Array]:
    return jnp.tril(-_product("...ji,...jk,...lk->...il", inverse, gradient, inverse), -1),


invert_unit_lower.defvjp(_inverse_forward, _inverse_backward)


def normalise(x: Array) -> Array:
    """Divide float32 x [..., D] by its Euclidean norm."""
    return x * jax.lax.rsqrt(jnp.square(x).sum(-1, keepdims=True) + 1e-6)


class CausalConvolution(nnx.Module):
    """Convolution of each feature over the last `width` tokens; the weight is [features, 1, width], as in torch."""

    def __init__(self, size: int, width: int, build: Build, std: float):
        self.weight = parameter((size, 1, width), build.normal(std))

    def __call__(self, x: Array, documents: Array | None, before: Array | None) -> tuple[Array, Array]:
        """Return the convolved features [B, T, F], and the last `width` - 1 inputs.

        Args:
            documents: [B, T]; tokens of another document count as 0.
            before: Inputs [B, width - 1, F] before the first token; None is 0.
        """
        weight = self.weight[...][:, 0].astype(jnp.float32)
        length, num_before = x.shape[1], weight.shape[1] - 1
        x = jnp.pad(x, ((0, 0), (num_before, 0), (0, 0))) if before is None else jnp.concatenate([before, x], 1)
        out = jnp.zeros((), jnp.float32)
        for offset in range(num_before + 1):
            neighbours = x[:, offset:offset + length].astype(jnp.float32)
            if documents is not None:
                their_documents = jnp.pad(documents, ((0, 0), (num_before - offset, 0)), constant_values=-1)[:, :length]
                neighbours = jnp.where((their_documents == documents)[..., None], neighbours, 0)
            out += neighbours * weight[:, offset]
        return out.astype(x.dtype), x[:, length:]


class LinearAttention(nnx.Module):
    """Linear attention of one layer with its projections: gated delta rule, gated norm."""

    def __init__(self, arch: Architecture, build: Build):
        self.heads, self.activation = arch.linear_heads, arch.activation
        heads, path, kwargs = arch.linear_heads, "layers.linear_attn", {"build": build, "bias": False}
        self.dt_bias = parameter((heads.num_values,), 1.0)
        self.A_log = parameter((heads.num_values,), LogUniform(0.01, 16))
        self.conv = CausalConvolution(heads.num_features, heads.width, build, arch.layer_std)
        self.norm = Norm(heads.value_dim, "rms", arch.norm_eps)
        inner, kwargs["std"] = heads.num_values * heads.value_dim, arch.layer_std
        self.qkv = Linear(arch.hidden_size, heads.num_features, f"{path}.qkv", **kwargs)
        self.z = Linear(arch.hidden_size, inner, f"{path}.z", **kwargs)
        self.b = Linear(arch.hidden_size, heads.num_values, f"{path}.b", **kwargs)
        self.a = Linear(arch.hidden_size, heads.num_values, f"{path}.a", **kwargs)
        self.o = Linear(inner, arch.hidden_size, f"{path}.o", **kwargs | {"std": arch.residual_std})

    def __call__(self, x: Array, texts: Texts, seeds: Seeds | None, cache: dict[str, Array] | None = None
                 ) -> tuple[Array, dict[str, Array] | None]:
        """Return the output [B, T, D], and the cache after these tokens.

        Args:
            cache: From `empty_cache`, or from the call for the preceding tokens.
        """
        heads, cached = self.heads, cache or {}
        x = jnp.where(texts.real[..., None], x, 0)
        mixed, conv = self.conv(_gather_rows(self.qkv(x, seeds)), texts.documents, cached.get("conv"))
        mixed = ACTIVATIONS[self.activation](mixed)
        keys = heads.num_keys * heads.key_dim
        q, k, v = (_gather_rows(part.reshape(*x.shape[:2], -1, size)) for part, size in zip(
            jnp.split(mixed, [keys, 2 * keys], -1), (heads.key_dim, heads.key_dim, heads.value_dim), strict=True))
        q, k = normalise(q.astype(jnp.float32)) * heads.key_dim**-0.5, normalise(k.astype(jnp.float32))
        rate = _gather_rows(jax.nn.sigmoid(self.b(x, seeds).astype(jnp.float32)))
        speed, bias = (leaf[...].astype(jnp.float32) for leaf in (self.A_log, self.dt_bias))
        decay = _gather_rows(-jnp.exp(speed) * jax.nn.softplus(self.a(x, seeds).astype(jnp.float32) + bias))
        out, state = gated_delta_rule(q, k, v, decay, rate, texts.documents, cached.get("state"))
        z = self.z(x, seeds)
        out = shard_sequence(out.astype(z.dtype)).reshape(*z.shape[:2], -1, heads.value_dim)
        out = apply_gate("silu", z.reshape(out.shape).astype(jnp.float32), self.norm(out)).astype(z.dtype)
        return self.o(out.reshape(z.shape), seeds), None if cache is None else {"conv": conv, "state": state}


def empty_cache(heads: LinearHeads, num_layers: int, batch_size: int, dtype: Any) -> dict[str, Array]:
    """Return the layers' empty cache of past tokens: the last inputs of the convolution, and the state."""
    shape = (num_layers, batch_size)
    groups = heads.num_values // heads.num_keys
    return {"conv": jnp.zeros((*shape, heads.width - 1, heads.num_features), dtype),
            "state": jnp.zeros((*shape, heads.num_keys, groups, heads.key_dim, heads.value_dim), jnp.float32)}


def _gather_rows(x: Array) -> Array:
    """With context parallelism, exchange shards of rows of x [B, T, N, ...] for whole rows of some of the N features.

    This is an all-to-all (Jacobs et al. 2023). If N is not divisible, every device gets all features or heads.
    """
    if context_parallel_size() == 1:
        return x
    sizes = jax.sharding.get_abstract_mesh().shape
    is_divisible = x.shape[2] % (sizes["tensor"] * sizes[SEQUENCE]) == 0
    return constrain(x, PartitionSpec(DATA_AXES, None, ("tensor", SEQUENCE) if is_divisible else None))
