"""Mixture of experts (Shazeer et al. 2017): a router, and MLPs of which each token uses a few.

There is no capacity limit, so no token is dropped, and tokens do not affect each other. Three implementations of the
same function: `dense` applies all experts to all tokens, and is the reference; `ragged` sorts tokens by expert for
`jax.lax.ragged_dot`, a native XLA operation; `blocks` loops over blocks of sorted tokens, each of one expert, for CPUs,
where XLA lowers `ragged_dot` to a product of all experts with all sorted tokens. With 8 experts, 2 for each of 1024
tokens of 256 features, a gradient takes 0.14 s in blocks, 0.52 s dense and 0.88 s by `ragged_dot` on two cores.

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
# Smallest and largest block: larger blocks read matrices less often, but have more empty rows if experts get few
# tokens.
BLOCK_SIZES = (8, 128)


def check_shared(expert_size: int, model_type: str, experts: Experts | None) -> None:
    """Raise UserError if the experts of a layer cannot be divided over `expert_size` ranks."""
    if expert_size > 1 and (experts is None or experts.num % expert_size):
        has = f"{experts.num} experts in each layer, which {expert_size} does not divide" if experts else "no experts"
        raise UserError(f"strategy: mesh size expert is {expert_size}, but {model_type} has {has}. Lower it, and raise "
                        "fsdp or data in its place.")


class Load(NamedTuple):
    """A router's distribution of each row's real tokens over the experts.

    Args:
        counts: Number of times each expert was chosen, float32 [B, E].
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
        # A linear layer also in transformers, which other routers are not: it may be quantised and adapted.
        self.proj = Linear(arch.hidden_size, arch.experts.num, "layers.moe.router.proj", build, std=arch.layer_std,
                           bias=False)

    def __call__(self, x: Array, seeds: Seeds | None) -> Array:
        """Return float32 logits [..., E] for x [..., D]; `seeds` are for an adapter's dropout."""
        scaled = divide_by_rms(x, self.eps) * self.scale[...].astype(x.dtype)
        return self.proj(scaled * jnp.float32(x.shape[-1]**-0.5), seeds).astype(jnp.float32)

    def factors(self, chosen: Array) -> Array:
        """Return the factors on the weights of these experts."""
        return self.per_expert_scale[...].astype(jnp.float32)[chosen]


class ExpertAdapter(nnx.Module):
    """Adapters of one matrix of all experts, stored as PEFT's leaves, one matrix each for A and B.

    Rows of A are grouped by expert; columns of B are interleaved: the first of each expert, then the second.
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
    """The stacked matrices of all experts, with torch's names."""

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
        found = {}
        for name, value in vars(self).items():
            if isinstance(value, nnx.Param):
                weights = value.get_value()
                found[name] = weights if isinstance(weights, Quantized) else weights.astype(self.build.dtype)
            elif isinstance(value, ExpertAdapter):
                found[name] = value.arrays(self.build.lora, self.build.dtype)
        return found


class SparseMLP(nnx.Module):
    """Mixture of experts: the sum of each token's experts, weighted by the router."""

    def __init__(self, arch: Architecture, build: Build):
        self.arch, self.build = arch, build
        experts = arch.experts
        self.router = (ScaledRouter if experts.scaled_router else Router)(arch, build)
        self.experts = ExpertMatrices(arch, build)
        self.norm, self.out_norm = (Norm(arch.hidden_size, arch.norm, arch.norm_eps) if experts.beside_mlp else None
                                    for _ in range(2))

    def __call__(self, x: Array, real: Array | None, seeds: Seeds | None = None) -> tuple[Array, Load | None]:
        """Map x [B, T, D] to [B, T, D]; given `real` [B, T] bool (False for padding), also return the load.

        Args:
            x: The residual stream beside an MLP, else its norm.
        """
        experts = self.arch.experts
        probabilities = jax.nn.softmax(self.router(x, seeds), axis=-1)
        shares, chosen = jax.lax.top_k(probabilities, experts.per_token)
        if experts.normalised:
            # The same as a softmax over the chosen experts' logits.
            shares = shares / shares.sum(-1, keepdims=True)
        if experts.scaled_router:
            shares = shares * self.router.factors(chosen)
        matrices = self.experts.arrays()
        # `dense` is left to XLA's partitioner, the other two forms are divided over the mesh by hand.
        mix = partial(_mix, self._inner, self.build.experts, experts.transposed)
        if self.build.experts != "dense" and on_mesh():
            mix = _over_mesh(mix, experts.num)
        read = x if self.norm is None else self.norm(x)
        mixed = mix(read.astype(self.build.dtype), shares, chosen, matrices).astype(x.dtype)
        mixed = mixed if self.out_norm is None else self.out_norm(mixed)
        return mixed, None if real is None else _load(probabilities, chosen, real)

    def _inner(self, gate_up: Array) -> Array:
        """Apply the gated activation, [..., 2 F] to [..., F]."""
        if self.arch.experts.clamp is None:
            gate, up = jnp.split(gate_up, 2, axis=-1)
            return ACTIVATIONS[self.arch.activation](gate) * up
        gain, limit = self.arch.experts.clamp
        gate, up = jnp.minimum(gate_up[..., ::2], limit), jnp.clip(gate_up[..., 1::2], -limit, limit)
        return gate * jax.nn.sigmoid(gain * gate) * (up + 1)


def _load(probabilities: Array, chosen: Array, real: Array) -> Load:
    weights = real.astype(jnp.float32)
    # [B, T, K, E] -> [B, T, E]. Choices are piecewise constant: only the probabilities carry a gradient.
    taken = jax.nn.one_hot(chosen, probabilities.shape[-1]).sum(-2)
    return Load(*(jnp.einsum("bte,bt->be", x, weights) for x in (jax.lax.stop_gradient(taken), probabilities)),
                weights.sum(1))


def _over_mesh(mix, num_experts: int):
    """Return `mix` for a mesh: on the tokens of all ranks along `expert`, whose devices divide the experts.

    Experts are divided further along `tensor`, whose devices have the same tokens, if the sizes divide their number;
    otherwise these devices repeat the computation.
    """
    sizes = jax.sharding.get_abstract_mesh().shape
    axes = ("expert", "tensor") if num_experts % (sizes["expert"] * sizes["tensor"]) == 0 else ("expert",)

    def local(x, shares, chosen, matrices):
        # Every device along `expert` gets the tokens of all of them, applies its own experts, and the sums go back.
        gathered = [jax.lax.all_gather(part, "expert", tiled=True) for part in (x, shares, chosen)]
        # Relative to this device's first expert, choices of other devices' experts are out of range and contribute
        # nothing.
        first = jax.lax.axis_index(axes) * matrices["down_proj"].shape[0]
        found = jax.lax.psum(mix(*gathered[:2], gathered[2] - first, matrices), axes[1:])
        return jax.lax.psum_scatter(found, "expert", tiled=True)

    over_ranks = PartitionSpec(DATA_AXES, SEQUENCE)
    mapped = jax.shard_map(local, in_specs=(over_ranks,) * 3 + (PartitionSpec(axes),), out_specs=over_ranks,
                           check_vma=False)
    return lambda x, shares, chosen, matrices: mapped(x, shares, chosen, {
        name: _for_shards(matrix, x.dtype) for name, matrix in matrices.items()})


def _for_shards(matrix: Array | Quantized | tuple[Array, Array], dtype: jnp.dtype) -> Array | FourBit:
    """Return the matrix in a form that can be sharded along its first dimension (experts, or all their rows)."""
    if not isinstance(matrix, FourBit):
        return matrix
    # Doubly quantised scales span experts. One long line of codes cannot be cut by experts: dequantise it.
    return matrix.with_plain_scales() if matrix.packed.shape[-2] > 1 else matrix.astype(dtype)


def _mix(inner: Callable[[Array], Array], form: str, transposed: bool, x: Array, shares: Array, chosen: Array,
         matrices: Matrices) -> Array:
    """Apply the experts to x [B, T, D], for shares and choices [B, T, K]; choices out of range contribute nothing.

    Args:
        inner: Gated activation, [..., 2 F] to [..., F].
        transposed: Matrices are [E, in, out].
    """
    tokens, shares, chosen = (part.reshape(-1, part.shape[-1]) for part in (x, shares, chosen))
    num = matrices["down_proj"].shape[0]
    shares = jnp.where((chosen >= 0) & (chosen < num), shares, 0)

    # All experts on all tokens: [E, N, D]. `each` [N, E] holds the share of each expert, 0 for those not chosen.
    if form == "dense":
        layer = partial(_layer, form, None, matrices, transposed)
        found = layer(inner(layer(jnp.broadcast_to(tokens, (num, *tokens.shape)), "gate_up_proj")), "down_proj")
        each = (jax.nn.one_hot(chosen, num) * shares[..., None]).sum(1)
        return jnp.einsum("end,ne->nd", found, each).reshape(x.shape)
    # `ragged_dot` takes rows of any number per expert; blocks must be whole.
    order = _sort(chosen, num, 1 if form == "ragged" else _block_size(chosen, num))

    layer = partial(_layer, form, order, matrices, transposed)
    # Empty rows have the token N, which is out of range and gives zeros. [N, D] -> [M / block, block, D]
    blocks = jnp.take(tokens, order.tokens, axis=0, mode="fill", fill_value=0)
    blocks = blocks.reshape(len(order.owners), -1, x.shape[-1])
    rows = layer(inner(layer(blocks, "gate_up_proj")), "down_proj").reshape(-1, x.shape[-1])
    # Back to the choices: [M, D] -> [N, K, D]. A choice out of range has the place M, and gets zeros.
    found = jnp.take(rows, order.places, axis=0, mode="fill", fill_value=0)
    return (found * shares[..., None]).sum(1).reshape(x.shape)


def _layer(form: str, order: "_Order | None", matrices: Matrices, transposed: bool, blocks: Array, name: str) -> Array:
    """Multiply blocks [M, rows, in], each of one expert, by the matrix of this name; returns [M, rows, out]."""
    times = _times_codes if isinstance(matrices[name], Quantized) else _times
    found = times(form, transposed, blocks, matrices[name], order)
    if f"{name}_lora" in matrices:
        a, b = matrices[f"{name}_lora"]
        found = found + _times(form, False, _times(form, False, blocks, a, order), b, order)
    owners = slice(None) if order is None else order.owners
    return found + matrices[f"{name}_bias"][owners][:, None] if f"{name}_bias" in matrices else found


def _times(form: str, transposed: bool, blocks: Array, matrices: Array, order: "_Order | None") -> Array:
    """Multiply blocks by their expert's matrix; without `order`, block e belongs to expert e."""
    if form == "dense":
        return jnp.einsum("eni,eio->eno" if transposed else "eni,eoi->eno", blocks, matrices)
    if form == "ragged":
        matrices = matrices if transposed else matrices.swapaxes(1, 2)
        return jax.lax.ragged_dot(blocks[:, 0], matrices, order.sizes)[:, None]
    return _times_blocks(transposed, blocks, matrices, order.owners, order.num_blocks)


@partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _times_codes(form: str, transposed: bool, blocks: Array, codes: Quantized, order: "_Order | None") -> Array:
    """`_times` for quantised matrices; only codes are saved, and dequantised again in the backward pass."""
    return _times(form, transposed, blocks, codes.astype(blocks.dtype), order)


def _codes_forward(form, transposed, blocks, codes, order):
    return _times_codes(form, transposed, blocks, codes, order), (jnp.zeros_like(blocks, shape=(0,)), codes, order)


def _codes_backward(form, transposed, kept, gradient):
    like, codes, order = kept
    # The barrier keeps XLA from sharing the dequantised matrices with the forward pass, which would keep them in
    # memory.
    matrices = jax.lax.optimization_barrier(codes).astype(like.dtype)
    blocks = jnp.zeros((*gradient.shape[:-1], matrices.shape[1 if transposed else 2]), like.dtype)
    # The product is linear in the blocks, so their values do not matter to the pullback.
    _, pullback = jax.vjp(lambda blocks: _times(form, transposed, blocks, matrices, order), blocks)
    return *pullback(gradient), None, None


_times_codes.defvjp(_codes_forward, _codes_backward)


class _Order(NamedTuple):
    """Sorting of tokens by expert, one row per choice, with each expert's rows padded to whole blocks.

    Args:
        tokens: [M] token of each row; N if the row is empty.
        places: [N, K] row of each choice; M for a choice out of range.
        sizes: [E] number of non-empty rows of each expert.
        owners: [M / block] expert of each block; the first `num_blocks` are in use.
    """

    tokens: Array
    places: Array
    sizes: Array
    owners: Array
    num_blocks: Array


def _block_size(chosen: Array, num: int) -> int:
    """Return the power of two at or above the rows per expert under an even load, within `BLOCK_SIZES`."""
    smallest, largest = BLOCK_SIZES
    size = smallest
    while size < min(largest, chosen.size // num):
        size *= 2
    return size


def _sort(chosen: Array, num: int, block: int) -> _Order:
    # Choices out of range get the number `num`: they sort last, and are dropped below.
    flat = jnp.where((chosen >= 0) & (chosen < num), chosen, num).reshape(-1)
    order = jnp.argsort(flat, stable=True)
    expert = flat[order]
    # Rows of each expert, their number in blocks, and the block after each expert's last.
    sizes = jnp.zeros(num, jnp.int32).at[flat].add(1, mode="drop")
    blocks = -(-sizes // block)
    ends = jnp.cumsum(blocks)
    # An upper bound, since shapes are static: all whole blocks, and one unfinished block of each expert.
    max_blocks = flat.size // block + min(num, flat.size) if block > 1 else flat.size
    before = jnp.cumsum(sizes) - sizes
    # A choice's row: the first of its expert's blocks, plus its rank among the expert's choices. `% num` only keeps the
    # index of dropped choices in range.
    place = (ends - blocks)[expert % num] * block + jnp.arange(flat.size) - before[expert % num]
    place = jnp.where(expert < num, place, max_blocks * block)
    # Choice i belongs to token i // K.
    tokens = jnp.full(max_blocks * block, len(chosen), jnp.int32).at[place].set(order // chosen.shape[1], mode="drop")
    # Undo the sort, so that a token finds the rows of its choices.
    places = jnp.zeros(flat.size, jnp.int32).at[order].set(place).reshape(chosen.shape)
    # The first expert whose blocks end after this one. Blocks not in use get a valid expert, but are not visited.
    owners = jnp.minimum(jnp.searchsorted(ends, jnp.arange(max_blocks), side="right"), num - 1)
    return _Order(tokens, places, sizes, owners, ends[-1])


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _times_blocks(transposed: bool, blocks: Array, matrices: Array, owners: Array, num_blocks: Array) -> Array:
    """Multiply blocks [M / block, block, in] by their expert's matrix; unused blocks give zeros."""
    return _each_block(transposed, blocks, matrices, owners, num_blocks)


def _each_block(transposed: bool, blocks: Array, matrices: Array, owners: Array, num_blocks: Array) -> Array:
    def step(number, found):
        new = jnp.einsum("bi,io->bo" if transposed else "bi,oi->bo", blocks[number], matrices[owners[number]])
        return jax.lax.dynamic_update_index_in_dim(found, new, number, 0)

    size = matrices.shape[2 if transposed else 1]
    # As many iterations as there are blocks in use, which is known only at run time.
    return jax.lax.fori_loop(0, num_blocks, step, jnp.zeros((*blocks.shape[:2], size), blocks.dtype))


def _blocks_forward(transposed, blocks, matrices, owners, num_blocks):
    return _times_blocks(transposed, blocks, matrices, owners, num_blocks), (blocks, matrices, owners, num_blocks)


def _blocks_backward(transposed, kept, gradient):
    blocks, matrices, owners, num_blocks = kept

    def step(number, found):
        sides = (blocks[number], gradient[number]) if transposed else (gradient[number], blocks[number])
        return found.at[owners[number]].add(jnp.einsum("bx,by->xy", *sides, preferred_element_type=jnp.float32))

    # A separate loop, which XLA eliminates if experts do not train.
    d_matrices = jax.lax.fori_loop(0, num_blocks, step, jnp.zeros(matrices.shape, jnp.float32))
    # The gradient of the blocks is the same product with transposed matrices.
    d_blocks = _each_block(not transposed, gradient, matrices, owners, num_blocks)
    return d_blocks, d_matrices.astype(matrices.dtype), None, None


_times_blocks.defvjp(_blocks_forward, _blocks_backward)
