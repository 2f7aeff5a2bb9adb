"""Mixture of experts (Shazeer et al. 2017): a router, and MLPs of which each token uses a few.

There is no capacity limit, so no token is dropped, and tokens do not affect each other. There are three implementations
of the same function: `dense` applies all experts to all tokens, and is the reference; `ragged` sorts tokens by expert
for `jax.lax.ragged_dot`, a native XLA operation; `blocks` loops over blocks of sorted tokens, each of one expert, for
CPUs, where XLA lowers `ragged_dot` to a product of all experts with all sorted tokens. With 8 experts, 2 for each of
1024 tokens of 256 features, a gradient takes 0.14 s in blocks, 0.52 s dense and 0.88 s by `ragged_dot` on two cores.

Shapes: N tokens of D features, E experts with F inner features, K experts per token, M sorted rows.
"""

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax import Array
from jax.sharding import PartitionSpec

from jax_engine.distributed.interface import DATA_AXES, SEQUENCE, on_mesh
from jax_engine.models.architecture import Architecture, Experts
from jax_engine.models.dropout import Seeds
from jax_engine.models.linear import ACTIVATIONS, Build, Linear, Norm, divide_by_rms, parameter, product
from jax_engine.models.quant import FourBit, Quantized
from lmmods.core.errors import UserError
from lmmods.core.initialization import Normal, lora_a
from lmmods.core.settings import LoRA

Matrices = dict[str, Array | Quantized | tuple[Array, Array]]
MATRICES = ("gate_up_proj", "down_proj")  # stacked over all experts of a layer, in torch's order
# Minimum and maximum block size: larger blocks read matrices less often, but have more empty rows if experts get few
# tokens.
BLOCK_SIZES = (8, 128)


def check_expert_mesh(expert_size: int, model_type: str, experts: Experts | None) -> None:
    """Raise UserError if the experts of a layer cannot be divided over `expert_size` ranks."""
    if expert_size > 1 and (experts is None or experts.num % expert_size):
        has = f"{experts.num} experts in each layer, which {expert_size} does not divide" if experts else "no experts"
        raise UserError(f"trainer.strategy: mesh size expert is {expert_size}, but {model_type} has {has}. Lower it, "
                        "and raise fsdp or data instead.")


class Load(NamedTuple):
    """Distribution of each row's real tokens over the experts.

    Args:
        counts: Number of times the router chose each expert, float32 [B, E].
        probabilities: Router probabilities summed over tokens, float32 [B, E]; differentiable.
        num_tokens: Number of real tokens, float32 [B].
    """

    counts: Array
    probabilities: Array
    num_tokens: Array


class Router(nnx.Module):
    """Linear router: expert logits for each token."""

    def __init__(self, arch: Architecture, build: Build):
        self.build = build
        self.weight = parameter((arch.experts.num, arch.hidden_size), Normal(arch.layer_std))
        self.bias = parameter((arch.experts.num,), Normal(arch.layer_std)) if arch.experts.bias else None

    def __call__(self, x: Array, seeds: Seeds | None = None) -> Array:
        """Return float32 logits [..., E] for x [..., D]."""
        logits = product(x, self.weight[...], self.build)
        return (logits if self.bias is None else logits + self.bias[...].astype(logits.dtype)).astype(jnp.float32)


class ScaledRouter(nnx.Module):
    """Router of tokens that are divided by their root mean square and scaled, with a factor for each expert."""

    def __init__(self, arch: Architecture, build: Build):
        self.eps = arch.norm_eps
        self.scale, self.per_expert_scale = parameter((arch.hidden_size,), 1.0), parameter((arch.experts.num,), 1.0)
        # Unlike other routers, this is a linear layer in transformers, so it may be quantised and adapted.
        self.proj = Linear(arch.hidden_size, arch.experts.num, "layers.moe.router.proj", build, std=arch.layer_std,
                           bias=False)

    def __call__(self, x: Array, seeds: Seeds | None) -> Array:
        """Return float32 logits [..., E] for x [..., D]; `seeds` are for an adapter's dropout."""
        scaled = divide_by_rms(x, self.eps) * self.scale[...].astype(x.dtype)
        return self.proj(scaled * jnp.float32(x.shape[-1]**-0.5), seeds).astype(jnp.float32)

    def factors(self, chosen: Array) -> Array:
        """Return the learned factors on the weights of these experts."""
        return self.per_expert_scale[...].astype(jnp.float32)[chosen]


class ExpertAdapter(nnx.Module):
    """Adapters of one matrix of all experts, stored as in PEFT: one matrix for all A, and one for all B.

    Rows of A are grouped by expert. Columns of B are interleaved: the first of each expert, then the second.
    """

    def __init__(self, num: int, in_size: int, out_size: int, rank: int):
        self.num = num
        self.lora_A = parameter((num * rank, in_size), lora_a(in_size))
        self.lora_B = parameter((out_size, num * rank), 0.0)

    def arrays(self, lora: LoRA, dtype: jnp.dtype) -> tuple[Array, Array]:
        """Return A [E, rank, in] and B [E, out, rank], with the scaling applied to B."""
        a, b = self.lora_A[...].astype(dtype), self.lora_B[...].astype(dtype)
        # [out, rank * E] -> [out, rank, E] -> [E, out, rank]
        b = b.reshape(len(b), -1, self.num).transpose(2, 0, 1)
        return a.reshape(self.num, -1, a.shape[-1]), b * lora.scaling


class ExpertMatrices(nnx.Module):
    """Stacked matrices of all experts, with torch's names."""

    def __init__(self, arch: Architecture, build: Build):
        self.build = build
        experts, size = arch.experts, arch.hidden_size
        shapes = dict(zip(MATRICES, ((2 * experts.size, size), (size, experts.size)), strict=True))
        stds = dict(zip(MATRICES, (arch.layer_std, arch.residual_std), strict=True))
        for name, shape in shapes.items():
            shape = shape[::-1] if experts.transposed else shape
            setattr(self, name, parameter((experts.num, *shape), Normal(stds[name])))
            if experts.bias:
                setattr(self, f"{name}_bias", parameter((experts.num, shapes[name][0]), 0.0))
            if name in build.adapted_experts:
                setattr(self, f"{name}_lora", ExpertAdapter(experts.num, *shapes[name][::-1], build.lora.rank))

    def arrays(self) -> Matrices:
        """Return the matrices by name, quantised or in the compute dtype; for `..._lora` the pair (A, B)."""
        arrays = {}
        for name, value in vars(self).items():
            if isinstance(value, nnx.Param):
                weights = value.get_value()
                arrays[name] = weights if isinstance(weights, Quantized) else weights.astype(self.build.dtype)
            elif isinstance(value, ExpertAdapter):
                arrays[name] = value.arrays(self.build.lora, self.build.dtype)
        return arrays


class SparseMLP(nnx.Module):
    """Mixture of experts: the sum of the outputs of each token's experts, weighted by the router."""

    def __init__(self, arch: Architecture, build: Build):
        self.arch, self.build = arch, build
        experts = arch.experts
        self.router = (ScaledRouter if experts.scaled_router else Router)(arch, build)
        self.experts = ExpertMatrices(arch, build)
        self.norm, self.out_norm = (Norm(arch.hidden_size, arch.norm, arch.norm_eps) if experts.has_mlp else None
                                    for _ in range(2))

    def __call__(self, x: Array, real: Array | None, seeds: Seeds | None = None) -> tuple[Array, Load | None]:
        """Map x [B, T, D] to [B, T, D], and return the load if `real` is not None.

        Args:
            x: The residual stream if the layer also has an MLP, else its norm.
            real: [B, T] bool, False for padding.
        """
        experts = self.arch.experts
        probabilities = jax.nn.softmax(self.router(x, seeds), axis=-1)
        weights, chosen = jax.lax.top_k(probabilities, experts.per_token)
        if experts.normalised:
            # This equals a softmax over the chosen experts' logits.
            weights = weights / weights.sum(-1, keepdims=True)
        if experts.scaled_router:
            weights = weights * self.router.factors(chosen)
        matrices = self.experts.arrays()
        # XLA partitions `dense`; the other two implementations are sharded over the mesh explicitly.
        mix = partial(_apply_experts, self._activate, self.build.experts, experts.transposed)
        if self.build.experts != "dense" and on_mesh():
            mix = _shard_over_mesh(mix, experts.num)
        inputs = x if self.norm is None else self.norm(x)
        mixed = mix(inputs.astype(self.build.dtype), weights, chosen, matrices).astype(x.dtype)
        mixed = mixed if self.out_norm is None else self.out_norm(mixed)
        return mixed, None if real is None else _load(probabilities, chosen, real)

    def _activate(self, gate_up: Array) -> Array:
        """Apply the gated activation, [..., 2 F] to [..., F]."""
        if self.arch.experts.clamp is None:
            gate, up = jnp.split(gate_up, 2, axis=-1)
            return ACTIVATIONS[self.arch.activation](gate) * up
        gain, limit = self.arch.experts.clamp
        gate, up = jnp.minimum(gate_up[..., ::2], limit), jnp.clip(gate_up[..., 1::2], -limit, limit)
        return gate * jax.nn.sigmoid(gain * gate) * (up + 1)


def _load(probabilities: Array, chosen: Array, real: Array) -> Load:
    mask = real.astype(jnp.float32)
    # [B, T, K, E] -> [B, T, E]. Choices are piecewise constant: only the probabilities carry a gradient.
    choices = jax.nn.one_hot(chosen, probabilities.shape[-1]).sum(-2)
    return Load(*(jnp.einsum("bte,bt->be", x, mask) for x in (jax.lax.stop_gradient(choices), probabilities)),
                mask.sum(1))


def _shard_over_mesh(mix, num_experts: int):
    """Return `mix` for a mesh, where devices along `expert` share their tokens and divide the experts.

    If the mesh sizes divide the number of experts, they are also divided along `tensor`, where devices have the same
    tokens. Otherwise these devices repeat the computation.
    """
    sizes = jax.sharding.get_abstract_mesh().shape
    axes = ("expert", "tensor") if num_experts % (sizes["expert"] * sizes["tensor"]) == 0 else ("expert",)

    def local(x, weights, chosen, matrices):
        # Every device along `expert` gathers all their tokens and applies its experts; the sums are scattered back.
        gathered = [jax.lax.all_gather(part, "expert", tiled=True) for part in (x, weights, chosen)]
        # Relative to this device's first expert, other devices' experts are out of range and contribute nothing.
        first = jax.lax.axis_index(axes) * matrices["down_proj"].shape[0]
        sums = jax.lax.psum(mix(*gathered[:2], gathered[2] - first, matrices), axes[1:])
        return jax.lax.psum_scatter(sums, "expert", tiled=True)

    over_ranks = PartitionSpec(DATA_AXES, SEQUENCE)
    mapped = jax.shard_map(local, in_specs=(over_ranks,) * 3 + (PartitionSpec(axes),), out_specs=over_ranks,
                           check_vma=False)
    return lambda x, weights, chosen, matrices: mapped(x, weights, chosen, {
        name: _make_shardable(matrix, x.dtype) for name, matrix in matrices.items()})


def _make_shardable(matrix: Array | Quantized | tuple[Array, Array], dtype: jnp.dtype) -> Array | FourBit:
    """Return the matrix in a form that can be sharded along its first dimension (experts, or all their rows)."""
    if not isinstance(matrix, FourBit):
        return matrix
    # Doubly quantised scales span experts. One long line of codes cannot be split by expert, so dequantise it.
    return matrix.with_plain_scales() if matrix.packed.shape[-2] > 1 else matrix.astype(dtype)


def _apply_experts(inner: Callable[[Array], Array], form: str, transposed: bool, x: Array, weights: Array,
                   chosen: Array, matrices: Matrices) -> Array:
    """Apply the experts to x [B, T, D], for weights and choices [B, T, K]; choices out of range contribute nothing.

    Args:
        inner: Gated activation, [..., 2 F] to [..., F].
        transposed: Matrices are [E, in, out].
    """
    tokens, weights, chosen = (part.reshape(-1, part.shape[-1]) for part in (x, weights, chosen))
    num = matrices["down_proj"].shape[0]
    weights = jnp.where((chosen >= 0) & (chosen < num), weights, 0)

    # All experts on all tokens: [E, N, D]. `token_weights` [N, E] has 0 for experts that are not chosen.
    if form == "dense":
        layer = partial(_apply_layer, form, None, matrices, transposed)
        outputs = layer(inner(layer(jnp.broadcast_to(tokens, (num, *tokens.shape)), "gate_up_proj")), "down_proj")
        token_weights = (jax.nn.one_hot(chosen, num) * weights[..., None]).sum(1)
        return jnp.einsum("end,ne->nd", outputs, token_weights).reshape(x.shape)
    # `ragged_dot` supports any number of rows per expert; blocks must be whole.
    order = _sort_by_expert(chosen, num, 1 if form == "ragged" else _block_size(chosen, num))

    layer = partial(_apply_layer, form, order, matrices, transposed)
    # Empty rows have the token N, which is out of range and gives zeros. [N, D] -> [M / block, block, D]
    blocks = jnp.take(tokens, order.tokens, axis=0, mode="fill", fill_value=0)
    blocks = blocks.reshape(len(order.owners), -1, x.shape[-1])
    rows = layer(inner(layer(blocks, "gate_up_proj")), "down_proj").reshape(-1, x.shape[-1])
    # Back to the choices: [M, D] -> [N, K, D]. A choice out of range has row M, and gets zeros.
    outputs = jnp.take(rows, order.rows, axis=0, mode="fill", fill_value=0)
    return (outputs * weights[..., None]).sum(1).reshape(x.shape)


def _apply_layer(form: str, order: "_Order | None", matrices: Matrices, transposed: bool, blocks: Array, name: str
                 ) -> Array:
    """Multiply blocks [M, rows, in], each of one expert, by the matrix of this name, to [M, rows, out]."""
    multiply = _multiply_quantised if isinstance(matrices[name], Quantized) else _multiply
    out = multiply(form, transposed, blocks, matrices[name], order)
    if f"{name}_lora" in matrices:
        a, b = matrices[f"{name}_lora"]
        out = out + _multiply(form, False, _multiply(form, False, blocks, a, order), b, order)
    owners = slice(None) if order is None else order.owners
    return out + matrices[f"{name}_bias"][owners][:, None] if f"{name}_bias" in matrices else out


def _multiply(form: str, transposed: bool, blocks: Array, matrices: Array, order: "_Order | None") -> Array:
    """Multiply blocks by their expert's matrix. Without `order`, block e belongs to expert e."""
    if form == "dense":
        return jnp.einsum("eni,eio->eno" if transposed else "eni,eoi->eno", blocks, matrices)
    if form == "ragged":
        matrices = matrices if transposed else matrices.swapaxes(1, 2)
        return jax.lax.ragged_dot(blocks[:, 0], matrices, order.sizes)[:, None]
    return _multiply_blocks(transposed, blocks, matrices, order.owners, order.num_blocks)


@partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _multiply_quantised(form: str, transposed: bool, blocks: Array, codes: Quantized, order: "_Order | None") -> Array:
    """Multiply by quantised matrices. The backward pass dequantises them again, so that only codes are saved."""
    return _multiply(form, transposed, blocks, codes.astype(blocks.dtype), order)


def _codes_forward(form, transposed, blocks, codes, order):
    empty = jnp.zeros_like(blocks, shape=(0,))
    return _multiply_quantised(form, transposed, blocks, codes, order), (empty, codes, order)


def _codes_backward(form, transposed, residuals, gradient):
    empty, codes, order = residuals
    # The barrier stops XLA from sharing the dequantised matrices with the forward pass, which would keep them in
    # memory.
    matrices = jax.lax.optimization_barrier(codes).astype(empty.dtype)
    blocks = jnp.zeros((*gradient.shape[:-1], matrices.shape[1 if transposed else 2]), empty.dtype)
    # The product is linear in the blocks, so their values do not matter to the pullback.
    _, pullback = jax.vjp(lambda blocks: _multiply(form, transposed, blocks, matrices, order), blocks)
    return *pullback(gradient), None, None


_multiply_quantised.defvjp(_codes_forward, _codes_backward)


class _Order(NamedTuple):
    """Sorting of tokens by expert, one row per choice, with each expert's rows padded to whole blocks.

    Args:
        tokens: [M] token of each row; N if the row is empty.
        rows: [N, K] row of each choice; M for a choice out of range.
        sizes: [E] number of non-empty rows of each expert.
        owners: [M / block] expert of each block; the first `num_blocks` are in use.
    """

    tokens: Array
    rows: Array
    sizes: Array
    owners: Array
    num_blocks: Array


def _block_size(chosen: Array, num: int) -> int:
    """Round the rows per expert under an even load up to a power of two within `BLOCK_SIZES`."""
    smallest, largest = BLOCK_SIZES
    size = smallest
    while size < min(largest, chosen.size // num):
        size *= 2
    return size


def _sort_by_expert(chosen: Array, num: int, block: int) -> _Order:
    # Choices out of range get the index `num`: they are sorted last, and dropped below.
    flat = jnp.where((chosen >= 0) & (chosen < num), chosen, num).reshape(-1)
    order = jnp.argsort(flat, stable=True)
    expert = flat[order]
    # Rows of each expert, their number of blocks, and the block after each expert's last.
    sizes = jnp.zeros(num, jnp.int32).at[flat].add(1, mode="drop")
    blocks = -(-sizes // block)
    ends = jnp.cumsum(blocks)
    # An upper bound, because shapes are static: all whole blocks, and one partial block per expert.
    max_blocks = flat.size // block + min(num, flat.size) if block > 1 else flat.size
    before = jnp.cumsum(sizes) - sizes
    # A choice's row is the first row of its expert, plus its rank among the expert's choices. `% num` only keeps the
    # index of dropped choices in range.
    row = (ends - blocks)[expert % num] * block + jnp.arange(flat.size) - before[expert % num]
    row = jnp.where(expert < num, row, max_blocks * block)
    # Choice i belongs to token i // K.
    tokens = jnp.full(max_blocks * block, len(chosen), jnp.int32).at[row].set(order // chosen.shape[1], mode="drop")
    # Undo the sort: rows by token and choice.
    rows = jnp.zeros(flat.size, jnp.int32).at[order].set(row).reshape(chosen.shape)
    # A block belongs to the first expert with blocks that end after it. Unused blocks get a valid expert, but are not
    # visited.
    owners = jnp.minimum(jnp.searchsorted(ends, jnp.arange(max_blocks), side="right"), num - 1)
    return _Order(tokens, rows, sizes, owners, ends[-1])


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _multiply_blocks(transposed: bool, blocks: Array, matrices: Array, owners: Array, num_blocks: Array) -> Array:
    """Multiply blocks [M / block, block, in] by their expert's matrix. Unused blocks give zeros."""
    return _loop_over_blocks(transposed, blocks, matrices, owners, num_blocks)


def _loop_over_blocks(transposed: bool, blocks: Array, matrices: Array, owners: Array, num_blocks: Array) -> Array:
    def step(index, out):
        result = jnp.einsum("bi,io->bo" if transposed else "bi,oi->bo", blocks[index], matrices[owners[index]])
        return jax.lax.dynamic_update_index_in_dim(out, result, index, 0)

    size = matrices.shape[2 if transposed else 1]
    # The number of blocks in use is known only at run time.
    return jax.lax.fori_loop(0, num_blocks, step, jnp.zeros((*blocks.shape[:2], size), blocks.dtype))


def _blocks_forward(transposed, blocks, matrices, owners, num_blocks):
    return _multiply_blocks(transposed, blocks, matrices, owners, num_blocks), (blocks, matrices, owners, num_blocks)


def _blocks_backward(transposed, residuals, gradient):
    blocks, matrices, owners, num_blocks = residuals

    def step(index, gradients):
        sides = (blocks[index], gradient[index]) if transposed else (gradient[index], blocks[index])
        return gradients.at[owners[index]].add(jnp.einsum("bx,by->xy", *sides, preferred_element_type=jnp.float32))

    # A separate loop, which XLA eliminates if experts do not train.
    d_matrices = jax.lax.fori_loop(0, num_blocks, step, jnp.zeros(matrices.shape, jnp.float32))
    # The gradient of the blocks is the same product with transposed matrices.
    d_blocks = _loop_over_blocks(not transposed, gradient, matrices, owners, num_blocks)
    return d_blocks, d_matrices.astype(matrices.dtype), None, None


_multiply_blocks.defvjp(_blocks_forward, _blocks_backward)
