"""A network as functions of a plain parameter tree, with scanned stacks of layers, and torch's parameter names.

Flax NNX modules define the parts. Between calls the parameters are a nested dict of arrays
`{embed, layers, norm, head}`; every leaf of `layers` has a leading layer axis.
"""

import dataclasses
from collections.abc import Callable, Collection, Sequence
from functools import partial
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import Array
from jax.ad_checkpoint import checkpoint_name
from transformers import PreTrainedConfig

from jax_engine.distributed.interface import context_parallel_size, on_mesh, shard_sequence
from jax_engine.distributed.tree import (
    IMAGE_LAYERS,
    IMAGE_MERGERS,
    Path,
    Tree,
    flatten,
    is_stacked,
    merge,
    unflatten,
)
from jax_engine.models import fused
from jax_engine.models.architecture import Architecture, Family, Head, LayerKind
from jax_engine.models.attention import Attention, KeysValues, attention_mask, cached_mask, real_tokens
from jax_engine.models.context_parallel import ContextParallel
from jax_engine.models.dropout import Seeds, add_noise, dropout, site_seeds, token_words
from jax_engine.models.experts import MATRICES, Load, SparseMLP
from jax_engine.models.heads import HEADS
from jax_engine.models.images import (
    GRID,
    PIXELS,
    Merger,
    Stream,
    build_encoder,
    image_blocks,
    image_positions,
    place_features,
)
from jax_engine.models.linear import (
    ACTIVATIONS,
    Build,
    Embedding,
    Initialiser,
    InitialValues,
    Linear,
    Norm,
    apply_gate,
    collect_initialisers,
    parameter,
)
from jax_engine.models.linear_attention import LinearAttention, Texts, empty_cache
from jax_engine.models.names import EXPERTS, Names
from jax_engine.models.relative import Table
from jax_engine.models.rope import Angles, text_lengths
from lmmods.core.errors import UserError
from lmmods.core.hf_config import PER_LAYER_VOCABULARY
from lmmods.core.settings import decays, depth, num_layers
from lmmods.recipe.tasks.base import Quantize

AfterLayer = Callable[[Array, Array], Array]  # (index of a layer, stream after it) -> stream [B, T, D]

# ---------------------------------------------------------------------------------------------------------------------
# Decoder: embeddings of tokens and positions.


class DecoderEmbedding(nnx.Module):
    """Embeddings of tokens and, unless they are rotary, positions."""

    def __init__(self, arch: Architecture, build: Build):
        self.arch, self.build = arch, build
        self.tokens = Embedding(arch.vocab_size, arch.hidden_size, std=arch.init_std, padding_id=arch.padding_id,
                                tokens=build.rows.get("embed.tokens", ()))
        self.positions = Embedding(arch.max_positions, arch.hidden_size, std=arch.init_std
                                   ) if arch.positions == "learned" else None
        if arch.layer_inputs:
            size = arch.num_layers * arch.layer_inputs
            self.layer_tokens = Embedding(arch.vocab_size, size, std=arch.init_std, padding_id=arch.padding_id)
            self.layer_project = Linear(arch.hidden_size, size, "embed.layer_project", build, std=arch.init_std,
                                        bias=False)
            self.layer_norm = Norm(arch.layer_inputs, arch.norm, arch.norm_eps)

    def __call__(self, batch: dict[str, Array], position_ids: Array, seeds: Seeds | None) -> Array:
        """Return the residual stream [B, T, D] that enters the first layer."""
        x = self.tokens(batch["input_ids"])
        # Rounded to the dtype of x, as transformers does (Gemma).
        scale = jnp.asarray(self.arch.embedding_scale, x.dtype)
        if self.arch.scales_in_table:
            x = add_noise(x * scale, batch, seeds, self.build.noise)
        else:
            x = add_noise(x, batch, seeds, self.build.noise) * scale
        if self.positions is not None:
            x = x + self.positions(position_ids)
        if self.arch.positions == "sinusoid":
            x = x + jnp.asarray(sinusoids(self.arch), x.dtype)[position_ids]
        return dropout(x, self.arch.embedding_dropout, seeds, "embed")

    def per_layer_inputs(self, batch: dict[str, Array], x: Array, seeds: Seeds | None) -> Array:
        """Return an input for each layer [layers, B, T, F], from tokens and the stream that enters the first layer."""
        arch = self.arch
        shape = (*x.shape[:2], arch.num_layers, arch.layer_inputs)
        embedded = self.layer_tokens(batch["input_ids"]).astype(x.dtype)
        embedded = (embedded * jnp.asarray(arch.layer_inputs**0.5, x.dtype)).reshape(shape)
        projected = self.layer_norm((self.layer_project(x, seeds) * arch.hidden_size**-0.5).reshape(shape))
        return jnp.moveaxis((projected.astype(x.dtype) + embedded) * 2**-0.5, 2, 0)


def sinusoids(arch: Architecture) -> np.ndarray:
    """Return sines, then cosines, of all frequencies: [max_positions, hidden_size] float32 (Keskar et al. 2019)."""
    size = arch.hidden_size
    rates = 1 / np.float32(10000) ** (np.arange(0, size, dtype=np.float32) // 2 * 2 / np.float32(size))
    angles = np.arange(arch.max_positions, dtype=np.float32)[:, None] * rates
    return np.concatenate([np.sin(angles[:, 0::2]), np.cos(angles[:, 1::2])], axis=1)


# ---------------------------------------------------------------------------------------------------------------------
# Encoder: normed embeddings.


class EncoderEmbedding(nnx.Module):
    """Normed sum of token, type and, unless they are rotary, position embeddings; projected if tables are narrower."""

    def __init__(self, arch: Architecture, build: Build):
        self.arch, self.build = arch, build
        size = arch.embedding_size or arch.hidden_size
        self.tokens = Embedding(arch.vocab_size, size, std=arch.init_std, padding_id=arch.padding_id,
                                tokens=build.rows.get("embed.tokens", ()), cut=build.cut)
        self.positions = Embedding(
            arch.max_positions, size, std=arch.init_std, padding_id=arch.padding_id if arch.positions_after_padding
            else None) if arch.positions == "learned" else None
        if arch.sinusoid_init:
            self.positions.weight = parameter((arch.max_positions, size), interleaved_sinusoids)
        self.relative = Embedding(2 * arch.relative.span, arch.hidden_size, std=arch.init_std
                                  ) if arch.relative else None
        self.relative_norm = Norm(arch.hidden_size, arch.norm, arch.norm_eps
                                  ) if arch.relative and arch.relative.normed else None
        self.types = Embedding(arch.num_types, size, std=arch.init_std) if arch.num_types else None
        self.norm = Norm(size, arch.norm, arch.norm_eps)
        self.conv = TokenConvolution(arch, build) if arch.convolution else None
        self.conv_norm = Norm(arch.hidden_size, arch.norm, arch.norm_eps) if arch.convolution else None
        self.project = Linear(size, arch.hidden_size, "embed.project", build, std=arch.init_std
                              ) if arch.embedding_size else None

    def __call__(self, batch: dict[str, Array], position_ids: Array, seeds: Seeds | None) -> Array:
        """Return the residual stream [B, T, D] that enters the first layer."""
        x = add_noise(self.tokens(batch["input_ids"]), batch, seeds, self.build.noise)
        x = x if self.positions is None else x + self.positions(position_ids)
        if self.types is not None:
            x = x + self.types(batch.get("token_type_ids", jnp.zeros_like(batch["input_ids"])))
        x = dropout(self.norm(x), self.arch.embedding_dropout, seeds, "embed")
        return x if self.project is None else self.project(x, seeds).astype(x.dtype)

    def build_after_layer(self, x: Array, real: Array, seeds: Seeds | None) -> "AfterLayer":
        """Return what follows layers: after the first, add a convolution of the embeddings `x`, and norm.

        Args:
            real: [B, T] bool, False for padding, which is not read and stays zero.
        """
        real = real[..., None].astype(x.dtype)
        convolved = dropout(self.conv(x * real) * real, self.arch.residual_dropout, seeds, "embed.conv")
        convolved = ACTIVATIONS[self.arch.convolution.activation](convolved)

        def add(x: Array) -> Array:
            return self.conv_norm(x + convolved) * real

        return lambda layer, x: jax.lax.cond(layer == 0, add, lambda x: x, x)

    def relative_table(self, length: int) -> Table:
        """Return the relative-position table for rows of this length."""
        rows = self.relative.weight[...]
        rows = rows if self.relative_norm is None else self.relative_norm(rows)
        return Table(rows, jnp.asarray(self.arch.relative.buckets(length)))


class TokenConvolution(nnx.Module):
    """Convolution over the tokens of a row, [B, T, D] to [B, T, D]. The weight is [out, in, width], as in torch."""

    def __init__(self, arch: Architecture, build: Build):
        self.build, self.groups = build, arch.convolution.groups
        size, width = arch.hidden_size, arch.convolution.width
        self.weight = parameter((size, size // self.groups, width), build.normal(arch.init_std))
        self.bias = parameter((size,), 0.0)

    def __call__(self, x: Array) -> Array:
        # As a matrix product: the gradient of XLA's convolution over sharded rows is wrong on some meshes.
        dtype, (batch, length, size) = self.build.dtype, x.shape
        weight = self.weight[...].astype(dtype).reshape(self.groups, size // self.groups, *self.weight.shape[1:])
        padding = weight.shape[-1] // 2
        # [B, T + width - 1, groups, D / groups]
        padded = jnp.pad(x.astype(dtype), ((0, 0), (padding, padding), (0, 0))).reshape(batch, -1, self.groups,
                                                                               size // self.groups)
        # Each token's neighbours: [B, T, groups, D / groups, width].
        neighbours = jnp.stack([padded[:, start:start + length] for start in range(weight.shape[-1])], axis=-1)
        out = jnp.einsum("btgiw,goiw->btgo", neighbours, weight).reshape(x.shape)
        return (out + self.bias[...].astype(dtype)).astype(x.dtype)


def interleaved_sinusoids(num: int, size: int) -> np.ndarray:
    """Return the sine and cosine of each frequency, interleaved: [num, size] (Vaswani et al. 2017)."""
    angles = np.arange(num)[:, None] / np.power(10000, 2 * (np.arange(size) // 2) / size)
    return np.where(np.arange(size) % 2 == 0, np.sin(angles), np.cos(angles)).astype(np.float32)


# Unroll stacks of up to this many layers on CPUs if all weights train: in a scan, XLA copies residuals and gradients
# between iterations. In deeper networks this cost is not measurable, and a scan compiles faster.
UNROLL_CPU = 4
# Layers per iteration during generation: each iteration copies its slice of the cache. 8 save a fifth of the time at
# 25M parameters.
UNROLL_CACHED_CPU = 8
# Primitives that the backward pass recomputes from the results of products and attention, because that is cheaper than
# storing and reading theirs: norms, activations, rope, sums and casts. On a mesh, weights are gathered again.
_RECOMPUTED = {"add", "sub", "mul", "div", "neg", "exp", "log", "logistic", "tanh", "erf", "rsqrt", "sqrt", "square",
               "integer_pow", "pow", "max", "min", "select_n", "convert_element_type", "reshape", "broadcast_in_dim",
               "transpose", "squeeze", "expand_dims", "slice", "split", "concatenate", "reduce_sum", "copy",
               "sharding_constraint"}
LAYER_INPUT = "layer input"
Remat = Literal["none", "minimal", "full", "offload"]
# Remat policies: the values saved for the backward pass.
_REMAT_POLICIES: dict[Remat, Any] = {
    "none": lambda primitive, *_, **__: primitive.name not in _RECOMPUTED,
    "minimal": jax.checkpoint_policies.dots_with_no_batch_dims_saveable,
    "full": None,
    "offload": jax.checkpoint_policies.save_and_offload_only_these_names(
        names_which_can_be_saved=[], names_which_can_be_offloaded=[LAYER_INPUT], offload_src="device",
        offload_dst="pinned_host"),
}


class Network(Names):
    """A family's network with one head. It has no parameters; until they exist, `resize` and `adapt` may change it.

    Args:
        config: transformers' configuration, saved unchanged.
        to_save: Paths of modules that train in full alongside the adapters; empty for full fine-tuning.
        remat: Activations that the backward pass recomputes: none, all but matrix products, whole layers, or whole
            layers whose inputs are kept in the host's memory.
        unroll: Layers per iteration of the scan. Default: 1, or on CPUs all layers of a shallow network (see
            `UNROLL_CPU`).
    """

    def __init__(self, config: PreTrainedConfig, family: Family, arch: Architecture, head: Head, build: Build,
                 to_save: frozenset[str] = frozenset(), remat: Remat = "none",
                 unroll: int | None = None):
        self.config, self.family, self.head = config, family, head
        self.remat, self._unroll = remat, unroll
        self.first_factors: dict[Path, np.ndarray] = {}  # A and B of a principal adapter before the first step
        self._define(arch, build, to_save)

    @property
    def recomputes(self) -> bool:
        """True if the backward pass recomputes `_RECOMPUTED`. On CPUs that costs more than it saves."""
        return not self.build.cpu_forms

    def resize(self, num_tokens: int) -> None:
        """Change the vocabulary size in place, as transformers' `resize_token_embeddings`."""
        self.config.get_text_config().vocab_size = num_tokens
        if self.arch.layer_inputs:
            setattr(self.config, PER_LAYER_VOCABULARY, num_tokens)
        self._define(dataclasses.replace(self.arch, vocab_size=num_tokens), self.build, self.to_save)

    def adapt(self, arch: Architecture, build: Build, to_save: frozenset[str]) -> None:
        """Add the adapters of `build` in place, as PEFT's `get_peft_model`; `lora.adapt` chooses the modules.

        Args:
            arch: The architecture; embedding and head have separate tables if only one of a tied pair trains.
            to_save: Paths of modules that train in full alongside the adapters.
        """
        self._define(arch, build, to_save)

    def _define(self, arch: Architecture, build: Build, to_save: frozenset[str]) -> None:
        """Trace the modules: their structure, and the shapes and torch names of their parameters."""
        self.arch, self.build, self.to_save = arch, build, to_save
        self.lora = build.lora
        unrolls = build.cpu_forms and self.remat == "none" and self.lora is None
        self.unroll = self._unroll or (arch.num_layers if unrolls and arch.num_layers <= UNROLL_CPU else 1)
        self._unroll_cached = UNROLL_CACHED_CPU if build.cpu_forms else 1
        self._ropes = list(dict.fromkeys(arch.ropes))
        self.fused = fused.choose(arch, build.dtype, self.head, build.attention, build.on)
        self._stacks = split_into_stacks(arch)
        self._graphs: dict[str | LayerKind, nnx.GraphDef] = {}
        self._linears: list[str] = []
        self._initialisers: dict[Path, Initialiser] = {}
        shapes: Tree = {}
        # Only trace shapes: every call puts the parameters into the modules again (`nnx.merge`).
        for name, part in self._parts().items():
            module = nnx.eval_shape(part)
            root = "layers" if isinstance(name, LayerKind) else name
            initialisers = collect_initialisers(module)
            self._initialisers |= {(root, *path): initialiser for path, initialiser in initialisers.items()}
            if not str(name).startswith("image"):  # adapters and quantisation are for the language model
                self._linears += [node.path for _, node in nnx.iter_graph(module) if isinstance(node, Linear)]
            self._graphs[name], state = nnx.split(module)
            # Blocks of all kinds are `layers`; leaves that several kinds have are stacked together.
            shapes[root] = merge(shapes.get(root, {}), nnx.to_pure_dict(state))
        # Stack each leaf of a layer over the layers that have it.
        leaves = {path: leaf if not is_stacked(path) else jax.ShapeDtypeStruct(
            (len(arch.layers_with(".".join(path[:-1]))), *leaf.shape), leaf.dtype)
            for path, leaf in flatten(shapes).items()}
        self.shapes: Tree = unflatten(leaves)  # a tied head without a bias has no parameters
        # Names depend on the shapes, and dropout seeds on the names.
        super().__init__(self.family, self.head, self.shapes, arch, build.adapted, build.adapted_experts, to_save)
        lora_drops = build.lora is not None and build.lora.dropout > 0
        head_rates = () if arch.classifier is None else (arch.classifier.dropout, arch.classifier.dense_dropout)
        self.drops = lora_drops or build.noise > 0 or any((
            arch.embedding_dropout, arch.attention_dropout, arch.residual_dropout, arch.mlp_dropout,
            arch.mlp_inner_dropout, *head_rates))
        self._sites = site_seeds(self, self.family, self.head, arch, build.adapted if lora_drops else frozenset())

    def _parts(self) -> dict[str | LayerKind, Any]:
        """Return the constructor of each part of the network."""
        arch, build = self.arch, self.build
        embedding = DecoderEmbedding if arch.causal else EncoderEmbedding
        parts = {"embed": lambda: embedding(arch, build)}
        parts |= {kind: partial(Block, arch, build, kind) for kind in dict.fromkeys(arch.kinds)}
        if arch.images is not None:
            tower, plain = arch.images.tower, dataclasses.replace(build, lora=None, adapted=frozenset(), rows={})
            parts |= {"images": lambda: build_encoder(arch, plain),
                      IMAGE_LAYERS: lambda: Block(tower, plain, tower.kinds[0])}
            if arch.images.taps:
                parts[IMAGE_MERGERS] = lambda: Merger(arch, plain, IMAGE_MERGERS, joins_first=True)
        if arch.final_norm_eps is not None:
            parts["norm"] = lambda: Norm(arch.hidden_size, arch.norm, arch.final_norm_eps)
        return parts | {"head": lambda: HEADS[self.head](arch, build)}

    def initial_values(self, seed: int, dtype: str = "float32", paths: Collection[Path] | None = None) -> Tree:
        """Return the initial parameters, sampled lazily from transformers' distributions as on the torch engine.

        Adapters are initialised as in PEFT; `add_adapter` sets those that start from the base weights.

        Args:
            paths: Leaves to create. Default: all.
        """
        return unflatten({
            path: InitialValues(self._initialisers[path], self.shape(path), seed, self.init_names(path),
                                is_stacked(path), jnp.dtype(dtype))
            for path in (flatten(self.shapes) if paths is None else paths)})

    def init(self, seed: int, dtype: str = "float32", paths: Collection[Path] | None = None) -> Tree:
        """Return `initial_values` as numpy arrays."""
        return jax.tree.map(np.asarray, self.initial_values(seed, dtype, paths))

    def hidden(self, params: Tree, batch: dict[str, Array], training: bool = False, cache: Tree | None = None
               ) -> Array | tuple[Array, Tree]:
        """Return the features that the head reads, [B, T, D], or [B, D] if it pools; with a cache, also the cache.

        Args:
            batch: `input_ids` [B, T]; `attention_mask`, or for packed rows `segment_ids` and `position_ids` that
                restart at 0; `token_type_ids` if the network has types; images as for its encoder. `position_ids`
                default to 0, 1, ... per row.
            training: Apply dropout, seeded by the batch's `token_seeds` [B, T].
            cache: From `init_cache`; the batch's `attention_mask` then marks its real tokens.

        Raises:
            UserError: A row is longer than the table of positions, or has token types that the network lacks.
        """
        x, cache, _ = self._run(params, batch, training, cache)
        return x if cache is None else (x, cache)

    def hidden_and_load(self, params: Tree, batch: dict[str, Array], training: bool = False) -> tuple[Array, Load]:
        """Return hidden states as `hidden`, and each layer's expert load of real tokens, [layers, B, ...]."""
        x, _, load = self._run(params, batch, training, None, True)
        return x, load

    def _run(self, params: Tree, batch: dict[str, Array], training: bool, cache: Tree | None, has_load: bool = False
             ) -> tuple[Array, Tree | None, Load | None]:
        self._check(batch)
        position_ids = self.positions(batch)
        seeds = Seeds(token_words(batch), self._sites) if training and self.drops else None
        embedding = self._part("embed", params)
        x = embedding(batch, position_ids, seeds)
        blocks = after_layer = None
        if (images := self.arch.images) is not None and PIXELS in batch:
            x, after_layer = self._place_images(params, batch, x)
        if images is not None and images.in_both_directions:
            blocks = image_blocks(batch["input_ids"], images.token)
        x = shard_sequence(x)
        angles, key_angles = self._angles(batch, position_ids, cache)
        if self.arch.relative is not None:
            angles = [embedding.relative_table(x.shape[1])]
        if self.arch.convolution is not None:
            after_layer = embedding.build_after_layer(x, real_tokens(batch), seeds)
        # One mask per distinct window; each layer selects its own. The sort key allows None among the numbers.
        windows = sorted(set(self.arch.windows), key=str)
        # Kernels support whole rows only, not a cache.
        kernel = self.fused.for_batch(batch) if self.fused is not None and cache is None else None
        if kernel is not None:
            masks = [kernel]
        elif context_parallel_size() > 1 and self.arch.relative is None:
            masks = [ContextParallel.from_batch(batch, self.arch.causal, window, blocks) for window in windows]
        elif cache is None:
            masks = [attention_mask(batch, self.arch.causal, window, blocks) for window in windows]
        else:
            # New tokens fill the slots from `start` on, the same in all rows.
            start, length = cache["length"], x.shape[1]
            valid = jax.lax.dynamic_update_slice_in_dim(cache["valid"], batch["attention_mask"] > 0, start, axis=1)
            masks = [cached_mask(valid, start, length, window, blocks) for window in windows]
        texts = Texts(real_tokens(batch), batch.get("segment_ids"))
        real = texts.real if has_load else None
        inputs = embedding.per_layer_inputs(batch, x, seeds) if self.arch.layer_inputs else None
        x, layer_caches, load = self._layers(params["layers"], x, masks, windows, angles, key_angles, seeds, cache,
                                             real, after_layer, inputs, texts)
        if "norm" in self._graphs:
            x = self._part("norm", params)(x)
        # Pooling and dropout of the head run here, where masks and seeds are available.
        x = self._part("head", params).features(x, batch, seeds)
        return x, cache if cache is None else {"layers": layer_caches, "valid": valid, "length": start + length}, load

    def _layers(self, layers: Tree, x: Array, masks: list[Array], windows: list[int | None],
                angles: list[Angles], key_angles: list[Angles], seeds: Seeds | None, cache: Tree | None,
                real: Array | None, after_layer: AfterLayer | None, inputs: Array | None, texts: Texts
                ) -> tuple[Array, Tree | None, Load | None]:
        arch = self.arch
        # Shared layers are selected by index from the stored ones; others are inputs of the scan.
        is_shared = arch.passes != tuple(range(arch.num_stored_layers))
        # Values that differ between layers, one row per layer: each iteration of the scan gets a row.
        steps = {"stored": jnp.array(arch.passes),
                 "scale": jnp.array(arch.attention_scales, jnp.float32),
                 "mask": jnp.array([windows.index(window) for window in arch.windows])}
        # With a single rope there is nothing to select (see `_select`).
        steps |= {"rope": jnp.array([self._ropes.index(rope) for rope in arch.ropes])} if len(angles) > 1 else {}
        if not arch.first_norm and "attn_norm" in layers:  # add an unused row, so that the scan has one per layer
            steps["has_norm"] = jnp.arange(arch.num_layers) > 0
            layers = layers | {"attn_norm": jax.tree.map(lambda leaf: jnp.pad(
                leaf, ((1, 0), (0, 0)), constant_values=1), layers["attn_norm"])}
        steps |= {} if after_layer is None else {"index": jnp.arange(arch.num_layers)}
        steps |= {} if is_shared else {"params": layers}
        sites = {site: words for site, words in self._sites.items() if site.startswith("layers.")}
        steps |= {} if seeds is None else {"sites": sites}
        steps |= {} if cache is None else {"cache": cache["layers"]}
        steps |= {} if inputs is None else {"input": inputs}
        lent: dict[str, KeysValues] = {}  # keys and values that later layers borrow, by name of the attention

        def layer(kind: LayerKind, rope: int | None, x: Array, step: Tree, borrowed: KeysValues | None
                  ) -> tuple[Array, tuple[Tree | None, Load | None, KeysValues | None]]:
            if self.remat == "offload":
                x = checkpoint_name(x, LAYER_INPUT)
            params = step["params"] if not is_shared else jax.tree.map(
                lambda leaf: jnp.asarray(leaf)[step["stored"]], layers)
            # The leaves of this layer, without the layer axis.
            block = nnx.merge(self._graphs[kind], params)
            mask = texts if kind.attention == "linear_attn" else _select(masks, step["mask"])
            query_rope, key_rope = (_select(by_rope, step.get("rope")) if rope is None else by_rope and by_rope[rope]
                                    for by_rope in (angles, key_angles))
            layer_seeds = None if seeds is None else Seeds(seeds.tokens, step["sites"])
            layer_cache = step.get("cache", {}).get(kind.attention)
            x, *outputs = block(x, mask, step["scale"], query_rope, layer_seeds, layer_cache,
                                None if cache is None else cache["length"], key_rope or None, step.get("has_norm"),
                                real, step.get("input"), borrowed)
            if after_layer is not None:
                # Inside the scan, so that the first layers need no separate program.
                x = after_layer(step["index"], x)
            return shard_sequence(x), tuple(outputs)

        # On a mesh always, so that gathered weights are not saved (see `_REMAT_POLICIES`). Inside a scan, XLA cannot
        # undo the recomputation by CSE, so the barriers of `prevent_cse` are not needed.
        if self.remat != "none" or on_mesh() or self.recomputes:
            layer = jax.checkpoint(layer, policy=_REMAT_POLICIES[self.remat], prevent_cse=False, static_argnums=(0, 1))

        def body(stack: LayerStack, x: Array, step: Tree) -> tuple[Array, tuple[list, list]]:
            outputs = []
            for index, kind in enumerate(stack.kinds):
                # Ropes of heads of several sizes cannot be selected by a traced index.
                ropes = set(arch.ropes[stack.first + index:stack.end:len(stack.kinds)])
                rope = self._ropes.index(ropes.pop()) if len(self._ropes) > 1 and len(ropes) == 1 else None
                borrowed = lent[kind.attention] if kind.keys == "borrowed" else None
                x, layer_outputs = layer(kind, rope, x, stack.select_layer(step, arch, index), borrowed)
                outputs.append(layer_outputs)
            return x, tuple(map(list, zip(*outputs, strict=True)))

        outputs = []
        # Most networks have one stack; mixtures of experts with dense layers may have several.
        for stack in self._stacks:
            x, stack_outputs = jax.lax.scan(partial(body, stack), x, stack.select_inputs(steps, arch),
                                            unroll=self.unroll if cache is None else self._unroll_cached)
            # A layer that lends is the only one of its kind, so its stack has one iteration.
            lent |= {kind.attention: jax.tree.map(lambda leaf: leaf[0], leaves)
                     for kind, leaves in zip(stack.kinds, stack_outputs[2], strict=True) if leaves is not None}
            outputs.append([[None if leaves is None else {kind.attention: leaves}
                             for kind, leaves in zip(stack.kinds, stack_outputs[0], strict=True)], stack_outputs[1]])
        caches, loads = zip(*outputs, strict=True)
        names = dict.fromkeys(kind.attention for kind in arch.kinds)
        by_name = {name: concatenate_layers([[leaves and leaves.get(name) for leaves in stack_caches]
                                             for stack_caches in caches]) for name in names}
        return x, None if cache is None else by_name, concatenate_layers(list(loads))

    def _place_images(self, params: Tree, batch: dict[str, Array], x: Array) -> tuple[Array, AfterLayer | None]:
        """Return embeddings [B, T, D] with image features instead of image tokens, and what follows the first layers.
        """
        images, encoder = self.arch.images, self._part("images", params)
        count = encoder.count(batch)

        def place(x: Array, stream: Stream, *merger: Merger) -> Array:
            features = encoder.features(batch, stream.x, *merger)
            return place_features(features, count, batch["input_ids"], images.token, x)

        stream, start, added = encoder.embed(batch), 0, []
        for index, tap in enumerate(images.taps):
            stream, start = self._image_layers(params[IMAGE_LAYERS], stream, slice(start, tap + 1)), tap + 1
            leaves = jax.tree.map(lambda leaf, index=index: leaf[index], params[IMAGE_MERGERS])
            added.append(place(jnp.zeros_like(x), stream, nnx.merge(self._graphs[IMAGE_MERGERS], leaves)))
        x = place(x, self._image_layers(params[IMAGE_LAYERS], stream, slice(start, None)))
        if not added:
            return x, None
        by_layer = jnp.stack(added)
        return x, lambda layer, x: jax.lax.cond(
            layer < len(by_layer), lambda x: x + by_layer[jnp.minimum(layer, len(by_layer) - 1)], lambda x: x, x)

    def _image_layers(self, layers: Tree, stream: Stream, indices: slice) -> Stream:
        """Return the stream of patches after these layers of their transformer."""
        images, masks = self.arch.images, stream.masks
        scale = jnp.float32(images.tower.attention_scales[0])
        steps = {"params": jax.tree.map(lambda leaf: leaf[indices], layers),
                 "mask": jnp.array(images.mask_indices[indices], jnp.int32)}

        def layer(x: Array, step: Tree) -> tuple[Array, None]:
            mask = masks[0] if len(masks) == 1 else partial(jax.lax.switch, step["mask"], masks)
            return nnx.merge(self._graphs[IMAGE_LAYERS], step["params"])(x, mask, scale, stream.angles, None)[0], None

        if self.remat != "none" or on_mesh() or self.recomputes:  # as in `_layers`
            layer = jax.checkpoint(layer, policy=_REMAT_POLICIES[self.remat], prevent_cse=False)
        return stream._replace(x=jax.lax.scan(layer, stream.x, steps)[0])

    def _angles(self, batch: dict[str, Array], position_ids: Array, cache: Tree | None
                ) -> tuple[list[Angles], list[Angles]]:
        """Return each rope's angles for these tokens, and for all cache slots if they depend on the length."""
        if not any(rope.by_length for rope in self._ropes):
            return [rope.angles(position_ids, None) for rope in self._ropes], []
        if cache is None:
            real = batch["attention_mask"] > 0 if "attention_mask" in batch else None
            lengths = text_lengths(position_ids, real)
            return [rope.angles(position_ids, lengths) for rope in self._ropes], []
        lengths = position_ids[:, -1:] + 1  # a text in the cache ends with the latest token
        # Texts end in the latest slot, so a slot's position is its distance from the text's first slot. Slots before
        # the text are padding, and get position 0.
        slots = jnp.arange(cache["valid"].shape[1]) - (cache["length"] + position_ids.shape[1] - lengths)
        return ([rope.angles(position_ids, lengths) for rope in self._ropes],
                [rope.angles(jnp.maximum(slots, 0), lengths) for rope in self._ropes])

    def logits(self, params: Tree, hidden: Array) -> Array:
        """Return the head's float32 logits [..., V or K] for features [..., D] of `hidden`; for qa start and end."""
        return self._part("head", params)(hidden, params["embed"]["tokens"])

    def scores(self, params: Tree, batch: dict[str, Array], training: bool = False) -> Array:
        """Return the float32 logits of all rows: [B, K] if the head pools, else [B, T, K]."""
        return self.logits(params, self.hidden(params, batch, training))

    @property
    def pools(self) -> bool:
        """True if the head scores rows, not positions."""
        return self.arch.classifier is not None and self.arch.classifier.pooling is not None

    def init_cache(self, batch_size: int, length: int) -> Tree:
        """Return an empty cache for `length` tokens per row; leaves of `layers` are [layers, B, ...]."""
        arch, layers = self.arch, {}
        for name in dict.fromkeys(kind.attention for kind in arch.kinds):
            if name == "linear_attn":
                layers[name] = empty_cache(arch.linear_heads, len(arch.linear_heads.layers), batch_size,
                                           self.build.dtype)
                continue
            num_kv_heads, head_dim = arch.head_sizes(name)
            shape = (len(arch.layers_with(f"layers.{name}.k")), batch_size, num_kv_heads, length, head_dim)
            layers[name] = {part: jnp.zeros(shape, self.build.dtype) for part in ("k", "v")}
        return {"layers": layers, "valid": jnp.zeros((batch_size, length), bool), "length": jnp.zeros((), jnp.int32)}

    def _part(self, name: str, params: Tree) -> nnx.Module:
        return nnx.merge(self._graphs[name], params.get(name, {}))

    def positions(self, batch: dict[str, Array]) -> Array:
        """Return the positions [B, T] of a batch's tokens; [B, T, 3] in time, height and width if it has such images.
        """
        ids, arch = batch["input_ids"], self.arch
        if arch.positions_after_padding:
            if "position_ids" in batch:
                return batch["position_ids"] + arch.padding_id + 1
            # As in RoBERTa: real tokens count from padding_id + 1, and padding has position padding_id.
            real = (ids != arch.padding_id).astype(jnp.int32)
            return jnp.cumsum(real, axis=1) * real + arch.padding_id
        positions = batch.get("position_ids", jnp.broadcast_to(jnp.arange(ids.shape[1]), ids.shape))
        return image_positions(arch.images, batch, positions) if GRID in batch else positions

    def _check(self, batch: dict[str, Array]) -> None:
        if batch["input_ids"].ndim != 2:
            raise UserError("Each row of the batches has several answers. Set model.class_path to Preference, or "
                            "data.class_path to the task's data.")
        arch, length = self.arch, batch["input_ids"].shape[1]
        # The table's first rows, up to the padding's, are not positions of text.
        num_positions = arch.max_positions - (arch.padding_id + 1 if arch.positions_after_padding else 0)
        if arch.positions in ("learned", "sinusoid") and length > num_positions and "position_ids" not in batch:
            raise UserError(f"Rows have {length} tokens, but this model has only {num_positions} positions. Set "
                            f"data.max_length to at most {num_positions}.")
        if "token_type_ids" in batch and not arch.num_types:
            raise UserError(f"The batches have token_type_ids, but {self.config.model_type} has no token types. Remove "
                            "the column in the data module's collator.")

    def modules(self) -> list[str]:
        """Return our paths of all modules with parameters."""
        return sorted({".".join(path[:-1]) for path in flatten(self.shapes)})

    def linears(self) -> list[str]:
        """Return our paths of the linear layers that may be adapted or quantised, without the head's, which train."""
        return [path for path in dict.fromkeys(self._linears) if path not in HEADS[self.head].in_full]

    def quantised(self, kind: Quantize | None) -> set[Path]:
        """Return the leaves that `model.quantize` stores in this format: linear layers and, for 4 bits, experts."""
        if kind is None:
            return set()
        linear = {(*module.split("."), "weight") for module in self.linears()}
        has_experts = kind != "int8" and self.arch.experts is not None
        return linear | ({(*EXPERTS.split("."), name) for name in MATRICES} if has_experts else set())

    def all_names(self) -> dict[str, list[str]]:
        """Return all torch names of each parameter, by the first; a table shared by embedding and head has two."""
        names, output = {name: [name] for name, *_ in self.names()}, self.torch_modules("head")[0]
        # In most encoders the output layer is inside the head's module, which has the bias that the two share.
        if HEADS[self.head].shares_table and self.torch_modules("head.dense")[0].startswith(f"{output}."):
            names[f"{output}.bias"].append(f"{output}.decoder.bias")
            output += ".decoder"
        if HEADS[self.head].vocabulary and ("head", "weight") not in flatten(self.shapes):
            # The first name belongs to the module that comes first: the head, in XLM-RoBERTa.
            first = self.name(("embed", "tokens", "weight"), None)
            names[first] = list({first, f"{self.torch_modules('embed.tokens')[0]}.weight", f"{output}.weight"})
        return names

    def decays(self, params: Tree) -> Tree:
        """Return whether weight decay applies to each leaf: to matrices (per layer), not to biases and norms."""
        return unflatten({path: decays(path[-1], len(self.shape(path))) for path in flatten(params)})

    @property
    def num_named_layers(self) -> int:
        """Number of layers by torch's names; layers that share their parameters count once."""
        return num_layers(name for name, *_ in self.names())

    def depths(self, params: Tree) -> Tree:
        """Return `settings.depth` of each trainable leaf; for stacked layers, of each layer that trains."""
        depths: dict[Path, int | tuple[int, ...]] = {}
        layers, leaves = self.num_named_layers, flatten(params)
        for name, path, layer in self.names():
            if path not in leaves:
                continue
            if layer is None:
                depths[path] = depth(name, layers)
            elif (trained := self._trained_layers(path)) is None or layer in trained:
                depths[path] = (*depths.get(path, ()), depth(name, layers))
        return unflatten(depths)


def _select(options: list[Any], index: Array | None) -> Any:
    """Return the array or tree of `options` at `index`, which may be traced; None if there are no options."""
    if len(options) < 2:
        return options[0] if options else None
    # A traced index cannot select from a Python list, hence the stack.
    return jax.tree.map(lambda *leaves: jnp.stack(leaves)[index], *options)


# ---------------------------------------------------------------------------------------------------------------------
# One layer: attention and MLP with their norms and residual connections.


class MLP(nnx.Module):
    """MLP down(act(up(x))); if gated (Shazeer 2020), down(act(gate(x)) * up(x))."""

    def __init__(self, arch: Architecture, build: Build, kind: LayerKind):
        self.activation, self.gated, self.fused = arch.activation, arch.gated, arch.fused_gate_up
        self.inner_dropout, self.chunk = arch.mlp_inner_dropout, build.mlp_chunk
        kwargs = {"build": build, "bias": arch.mlp_bias, "conv1d": arch.conv1d, "std": arch.layer_std}
        path, size = f"layers.{kind.mlp}", arch.wide_mlp_size if kind.mlp == "wide_mlp" else arch.mlp_size
        if self.fused:
            self.gate_up = Linear(arch.hidden_size, 2 * size, f"{path}.gate_up", **kwargs)
        else:
            self.gate = Linear(arch.hidden_size, size, f"{path}.gate", **kwargs) if arch.gated else None
            self.up = Linear(arch.hidden_size, size, f"{path}.up", **kwargs)
        self.down = Linear(size, arch.hidden_size, f"{path}.down", **kwargs | {"std": arch.residual_std})
        self.out_norm = Norm(arch.hidden_size, arch.norm, arch.norm_eps) if kind.routed else None  # next to experts

    def __call__(self, x: Array, seeds: Seeds | None) -> Array:
        length = x.shape[1]
        # With context parallelism, a device has a part of each row already.
        if not 0 < self.chunk < length or context_parallel_size() > 1:
            return self._forward(x, seeds)
        num = -(-length // self.chunk)
        size = -(-length // num)

        def split(array: Array) -> Array:  # [B, T, ...] -> [num, B, size, ...], zeros after the last token
            padding = [(0, 0), (0, num * size - length), *[(0, 0)] * (array.ndim - 2)]
            return jnp.moveaxis(jnp.pad(array, padding).reshape(-1, num, size, *array.shape[2:]), 1, 0)

        def run(part: tuple[Array, Array | None]) -> Array:
            return self._forward(part[0], seeds and seeds._replace(tokens=part[1]))

        # Each chunk is recomputed, so that the features of only one exist at a time.
        out = jax.lax.map(jax.checkpoint(run, prevent_cse=False), (split(x), seeds and split(seeds.tokens)))
        return jnp.moveaxis(out, 0, 1).reshape(len(x), num * size, -1)[:, :length]

    def _forward(self, x: Array, seeds: Seeds | None) -> Array:
        out = self.down(dropout(self._inner(x, seeds), self.inner_dropout, seeds, "layers.mlp.inner"), seeds)
        return out if self.out_norm is None else self.out_norm(out)

    def _inner(self, x: Array, seeds: Seeds | None) -> Array:
        if self.fused:
            return apply_gate(self.activation, *jnp.split(self.gate_up(x, seeds), 2, axis=-1))
        up = self.up(x, seeds)
        return apply_gate(self.activation, self.gate(x, seeds), up) if self.gated else ACTIVATIONS[self.activation](up)


class Block(nnx.Module):
    """One layer of a decoder or encoder. The residual stream keeps its dtype.

    `attn_norm` and `mlp_norm` act on a sublayer's input (pre-norm) or on the residual sum after it (post-norm),
    `..._out_norm` on its output.
    """

    def __init__(self, arch: Architecture, build: Build, kind: LayerKind):
        self.arch, self.kind = arch, kind
        self.is_linear = kind.attention == "linear_attn"
        setattr(self, kind.attention, LinearAttention(arch, build) if self.is_linear else Attention(arch, build, kind))
        if kind.mlp:
            setattr(self, kind.mlp, MLP(arch, build, kind))
        self.moe = SparseMLP(arch, build) if kind.routed else None
        if arch.layer_inputs:
            kwargs = {"build": build, "bias": False, "std": arch.layer_std}
            self.input_gate = Linear(arch.hidden_size, arch.layer_inputs, "layers.input_gate", **kwargs)
            self.input_project = Linear(arch.layer_inputs, arch.hidden_size, "layers.input_project", **kwargs)
            self.input_norm = Norm(arch.hidden_size, arch.norm, arch.norm_eps)
        self.out = Scalar() if arch.layer_scalar else None
        for name in ("attn", "mlp"):
            # Do not create norms that no layer has, as in OLMo2, which norms outputs only.
            has_input_norm = {"input", "sum"} & set(arch.norms) and not (name == "mlp" and arch.shared_norm)
            has_input_norm = has_input_norm and len(arch.layers_with(f"layers.{name}_norm")) > 0
            for norm, has_norm in ((f"{name}_norm", has_input_norm), (f"{name}_out_norm", "output" in arch.norms)):
                setattr(self, norm, Norm(arch.hidden_size, arch.norm, arch.norm_eps) if has_norm else None)

    def __call__(self, x: Array, mask: Array | Texts, scale: Array, angles: Angles | Table | None,
                 seeds: Seeds | None, cache: dict[str, Array] | None = None, start: Array | None = None,
                 key_angles: Angles | None = None, has_norm: Array | None = None, real: Array | None = None,
                 layer_input: Array | None = None, borrowed: KeysValues | None = None
                 ) -> tuple[Array, dict[str, Array] | None, Load | None, KeysValues | None]:
        """Return the residual stream [B, T, D] after this layer, its cache, its expert load, and the keys and values
        that it lends to later layers.

        Args:
            mask: As for `Attention`; for linear attention the texts of the rows.
            has_norm: True if this layer's attention has an input norm; None if all layers are alike.
            real: [B, T] bool, tokens that the load counts. None returns no load.
            layer_input: Input [B, T, F] of this layer alone, if the architecture has `layer_inputs`.
            borrowed: Keys and values, for a layer that does not compute them.
        """
        arch = self.arch
        attend = getattr(self, self.kind.attention)
        normed = self._norm_input(x, self.attn_norm)
        # The scan applies the norm in all layers; a layer without it ignores the result.
        normed = normed if has_norm is None else jnp.where(has_norm, normed, x)
        if self.is_linear:
            (mixed, cache), lent = attend(normed, mask, seeds, cache), None
        else:
            mixed, cache, lent = attend(normed, mask, scale, angles, seeds, cache, start, key_angles, borrowed)
        after = self._add_update(x, mixed, self.attn_norm, self.attn_out_norm, arch.residual_dropout, seeds,
                                 "layers.attn")
        # The MLP reads the stream before attention (parallel) or after it.
        stream = x if arch.parallel else after
        normed = normed if arch.parallel and arch.shared_norm else self._norm_input(stream, self.mlp_norm)
        update, load = self._mlp(stream, normed, real, seeds)
        x = self._add_update(after, update, self.mlp_norm, self.mlp_out_norm, arch.mlp_dropout, seeds, "layers.mlp")
        if layer_input is not None:
            update = apply_gate(arch.activation, self.input_gate(x, seeds), layer_input)
            x = x + self.input_norm(self.input_project(update, seeds)).astype(x.dtype)
        return x if self.out is None else self.out(x), cache, load, lent

    def _mlp(self, stream: Array, normed: Array, real: Array | None, seeds: Seeds | None
             ) -> tuple[Array, Load | None]:
        """Return the update of the residual stream by the MLP, the experts or both, and the experts' load."""
        if not self.kind.routed:
            return getattr(self, self.kind.mlp)(normed, seeds), None
        if self.kind.mlp is None:
            return self.moe(normed, real, seeds)
        mixed, load = self.moe(stream, real, seeds)
        return getattr(self, self.kind.mlp)(normed, seeds) + mixed, load

    def _norm_input(self, x: Array, norm: Norm | None) -> Array:
        return norm(x) if norm is not None and "input" in self.arch.norms else x

    def _add_update(self, x: Array, update: Array, norm: Norm | None, out_norm: Norm | None, rate: float,
                    seeds: Seeds | None, site: str) -> Array:
        """Add a sublayer's output to the residual stream `x`."""
        update = update if out_norm is None else out_norm(update)
        update = dropout(update, rate, seeds, site) * self.arch.residual_scale
        x = x + update.astype(x.dtype)
        return norm(x) if "sum" in self.arch.norms else x


class Scalar(nnx.Module):
    """Multiplication by a constant that is read from files and never trained."""

    def __init__(self):
        self.layer_scalar = parameter((1,), 1.0)

    def __call__(self, x: Array) -> Array:
        return x * jax.lax.stop_gradient(self.layer_scalar[...]).astype(x.dtype)


# ---------------------------------------------------------------------------------------------------------------------
# Layer stacks, each one scan: consecutive layers of one kind, or of kinds that alternate periodically.


class LayerStack(NamedTuple):
    """Consecutive layers that are scanned, one period of layers per iteration.

    Args:
        first: Index of the first layer.
        kinds: Kind of each layer of an iteration.
        num_steps: Number of iterations.
    """

    first: int
    kinds: tuple[LayerKind, ...]
    num_steps: int

    @property
    def end(self) -> int:
        """Index of the first layer after the stack."""
        return self.first + len(self.kinds) * self.num_steps

    def select_inputs(self, steps: Tree, arch: Architecture) -> Tree:
        """Return the scan's inputs [num_steps, ...], or [num_steps, n, ...] if n > 1 layers per iteration have a leaf.

        Args:
            steps: Leaves with one row per layer of the network, or for `params` per layer that has the leaf.
        """
        def rows(leaf: jax.Array, before: int, count: int) -> jax.Array:
            leaf = leaf[before:before + count * self.num_steps]
            return leaf if count == 1 else leaf.reshape(self.num_steps, count, *leaf.shape[1:])

        inputs = {}
        for path, leaf in flatten(steps).items():
            layers = _layers_with(path, arch)
            if indices := self._indices_in_step(layers):
                # Rows of the leaf that belong to earlier stacks.
                before = sum(layer < self.first for layer in layers)
                inputs[path] = jax.tree.map(lambda part, at=(before, len(indices)): rows(part, *at), leaf)
        return unflatten(inputs)

    def select_layer(self, step: Tree, arch: Architecture, index: int) -> Tree:
        """Return the inputs of the layer at `index` within an iteration, from the iteration's inputs."""
        inputs = {}
        for path, leaf in flatten(step).items():
            indices = self._indices_in_step(_layers_with(path, arch))
            if index in indices:
                # An iteration has the leaf for these of its layers, [len(indices), ...].
                row = indices.index(index)
                inputs[path] = leaf if len(indices) == 1 else jax.tree.map(lambda part, at=row: part[at], leaf)
        return unflatten(inputs)

    def _indices_in_step(self, layers: Sequence[int]) -> list[int]:
        """Return the indices within an iteration of these layers."""
        return [index for index in range(len(self.kinds)) if self.first + index in layers]


def _layers_with(path: tuple[str, ...], arch: Architecture) -> Sequence[int]:
    """Return the layers that have a leaf of the scan's inputs. A norm that the first layer lacks is already padded."""
    if path[0] not in ("params", "cache") or len(set(arch.kinds)) == 1:
        return range(arch.num_layers)
    # Cache leaves have the name of the matrix that fills them: attn.k.
    return arch.layers_with(".".join(("layers", *(path[1:-1] if path[0] == "params" else path[1:]))))


def split_into_stacks(arch: Architecture) -> list[LayerStack]:
    """Split the layers into stacks; greedily, each stack covers as many layers as possible."""
    kinds = [arch.kinds[stored] for stored in arch.passes]
    stacks, first = [], 0
    while first < len(kinds):
        candidates = []
        # Count how often the pattern of the first `period` layers repeats.
        for period in range(1, len(kinds) - first + 1):
            pattern, num_steps = kinds[first:first + period], 1
            while kinds[first + num_steps * period:first + (num_steps + 1) * period] == pattern:
                num_steps += 1
            # A longer pattern that does not repeat would only unroll its layers.
            if num_steps > 1 or period == 1:
                candidates.append(LayerStack(first, tuple(pattern), num_steps))
        stacks.append(max(candidates, key=lambda stack: len(stack.kinds) * stack.num_steps))
        first += len(stacks[-1].kinds) * stacks[-1].num_steps
    return stacks


def concatenate_layers(outputs: list[list[Tree | None]]) -> Tree | None:
    """Concatenate the scans' outputs to one row per layer, in order, for the layers that have an output.

    Args:
        outputs: For each stack, and each layer of its iterations, leaves with one row per iteration.
    """
    parts = []
    for layers in outputs:
        if present := [layer for layer in layers if layer is not None]:
            parts.append(present[0] if len(present) == 1 else jax.tree.map(
                # n arrays [num_steps, ...] -> [num_steps, n, ...] -> [num_steps * n, ...], in the order of the layers.
                lambda *rows: jnp.stack(rows, 1).reshape(-1, *rows[0].shape[1:]), *present))
    return jax.tree.map(lambda *rows: jnp.concatenate(rows), *parts) if len(parts) > 1 else parts[0] if parts else None
