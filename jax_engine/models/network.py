"""A network as functions of a plain tree of parameters: layers stacked and scanned, names as torch has them.

Flax NNX modules define the parts; between calls there is only a nested dict of arrays
`{embed, layers, norm, head}`, in which every leaf of `layers` has the layer as its leading axis.
"""

from collections.abc import Callable, Collection
from functools import partial
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import Array
from transformers import PreTrainedConfig

from jax_engine.distributed.interface import cut, num_sequence_parts, on_mesh
from jax_engine.distributed.tree import Path, flatten, merge, unflatten
from jax_engine.models import fused
from jax_engine.models.architecture import Architecture, Family, Head
from jax_engine.models.attention import attention_mask, cached_mask, real_tokens
from jax_engine.models.block import Block
from jax_engine.models.cut_rows import CutRows
from jax_engine.models.decoder import DecoderEmbedding, LMHead
from jax_engine.models.depth import Loop, joined, loops_of
from jax_engine.models.dropout import Seeds, site_seeds, token_words
from jax_engine.models.encoder import EncoderEmbedding, MLMHead, SpanHead
from jax_engine.models.experts import MATRICES, Load
from jax_engine.models.linear import Build, Linear, Norm
from jax_engine.models.names import EXPERTS, Names
from jax_engine.models.parameters import FirstValues, Start, starts
from jax_engine.models.rope import Angles, text_lengths
from lmmods.core.errors import UserError
from lmmods.core.settings import decays
from lmmods.core.task_fields import Quantize

Tree = dict[str, Any]
ROUTED = "_with_experts"
HEADS = {"causal": LMHead, "masked": MLMHead, "qa": SpanHead}
# So few layers need no loop on a CPU where all of them train: between its steps XLA copies what layers keep, and
# gradients. In deeper networks that was not measurable, and a loop of one layer compiles in the time of a shallow one.
UNROLL_CPU = 4
# What the backward pass finds kept; on a mesh never a gathered weight, which is gathered once more.
_KEPT = {"none": lambda primitive, *_, **__: primitive.name != "sharding_constraint", "full": None,
         "minimal": jax.checkpoint_policies.dots_with_no_batch_dims_saveable}


class Network(Names):
    """A family's network with one head.

    Args:
        config: Configuration of transformers; written back as it is on saving.
        to_save: Modules outside the adapters that train in full, by our paths; empty for full tuning.
        remat: What the backward pass computes again: nothing, all but matrix products, or whole layers.
        unroll: Layers per step of the scan; None takes 1, but all of few on a CPU where all of a network trains.
    """

    def __init__(self, config: PreTrainedConfig, family: Family, arch: Architecture, head: Head, build: Build,
                 to_save: frozenset[str] = frozenset(), remat: Literal["none", "minimal", "full"] = "none",
                 unroll: int | None = None):
        self.config, self.family, self.arch, self.head = config, family, arch, head
        self.build, self.to_save, self.remat = build, to_save, remat
        self.lora = build.lora
        unrolls = build.cpu_forms and remat == "none" and self.lora is None
        self.unroll = unroll or (arch.num_layers if unrolls and arch.num_layers <= UNROLL_CPU else 1)
        self._ropes = list(dict.fromkeys(arch.ropes))
        self.fused = fused.choose(arch, build.dtype, head, build.attention)
        self._loops = loops_of(arch)
        self._graphs: dict[str, nnx.GraphDef] = {}
        self._linears: list[str] = []
        self._starts: dict[Path, Start] = {}
        shapes: Tree = {}
        for name, part in self._parts().items():
            module = nnx.eval_shape(part)
            own = name.removesuffix(ROUTED)
            self._starts |= {(own, *path): start for path, start in starts(module).items()}
            self._linears += [node.path for _, node in nnx.iter_graph(module) if isinstance(node, Linear)]
            self._graphs[name], state = nnx.split(module)
            shapes[own] = merge(shapes.get(own, {}), nnx.to_pure_dict(state))
        numbers = {path: len(arch.layers_with(".".join(("layers", *path[:-1])))) for path in flatten(shapes["layers"])}
        shapes["layers"] = unflatten({path: jax.ShapeDtypeStruct((numbers[path], *leaf.shape), leaf.dtype)
                                      for path, leaf in flatten(shapes["layers"]).items()})
        self.shapes: Tree = {name: part for name, part in shapes.items() if part}
        super().__init__(family, head, self.shapes, arch, build.adapted, build.adapted_experts, to_save)
        lora_drops = build.lora is not None and build.lora.dropout > 0
        self.drops = lora_drops or any((arch.embedding_dropout, arch.attention_dropout, arch.residual_dropout,
                                        arch.mlp_dropout, arch.mlp_inner_dropout, arch.qa_dropout))
        self._sites = site_seeds(self, family, arch, build.adapted if lora_drops else frozenset())

    def _parts(self) -> dict[str, Any]:
        """How to make each part of the network."""
        arch, build = self.arch, self.build
        embedding = DecoderEmbedding if arch.causal else EncoderEmbedding
        parts = {"embed": lambda: embedding(arch, build)}
        kinds = {kind for loop in self._loops for kind in loop.kinds}
        parts |= {_block(routed): partial(Block, arch, build, routed) for routed in sorted(kinds)}
        if arch.final_norm_eps is not None:
            parts["norm"] = lambda: Norm(arch.hidden_size, arch.norm, arch.final_norm_eps)
        return parts | {"head": lambda: HEADS[self.head](arch, build)}

    def first_values(self, seed: int, dtype: str = "float32", paths: Collection[Path] | None = None) -> Tree:
        """First parameters, not drawn yet: the distributions of transformers, and the values that torch gets.

        Of an adapter: those of PEFT; what starts from the weights of the base, `add_adapter` puts right.

        Args:
            paths: Of the leaves to make; None makes all.
        """
        return unflatten({
            path: FirstValues(self._starts[path], self.shape(path), seed, self.drawn_names(path), path[0] == "layers",
                              jnp.dtype(dtype)) for path in (flatten(self.shapes) if paths is None else paths)})

    def init(self, seed: int, dtype: str = "float32", paths: Collection[Path] | None = None) -> Tree:
        """`first_values` as numpy arrays."""
        return jax.tree.map(np.asarray, self.first_values(seed, dtype, paths))

    def hidden(self, params: Tree, batch: dict[str, Array], training: bool = False, cache: Tree | None = None
               ) -> Array | tuple[Array, Tree]:
        """Hidden states [B, T, D] that the head reads; with a cache, also the cache after these tokens.

        Args:
            batch: `input_ids` [B, T]; `attention_mask`, or packed `segment_ids` and `position_ids` that restart at 0;
                `token_type_ids` where the network has types. Without `position_ids` they count from 0 in each row.
            training: With dropout, by the batch's `token_seeds` [B, T].
            cache: From `init_cache`; the batch's `attention_mask` then says which of its tokens are real.

        Raises:
            UserError: A row is longer than the table of positions, or has token types that the network lacks.
        """
        x, cache, _ = self._run(params, batch, training, cache)
        return x if cache is None else (x, cache)

    def hidden_and_load(self, params: Tree, batch: dict[str, Array], training: bool = False) -> tuple[Array, Load]:
        """Hidden states as `hidden`, and how each layer's router has spread the real tokens: [layers, B, ...]."""
        x, _, load = self._run(params, batch, training, None, True)
        return x, load

    def _run(self, params: Tree, batch: dict[str, Array], training: bool, cache: Tree | None, measures: bool = False
             ) -> tuple[Array, Tree | None, Load | None]:
        self._check(batch)
        position_ids = self._positions(batch)
        seeds = Seeds(token_words(batch), self._sites) if training and self.drops else None
        embedding = self._part("embed", params)
        x = cut(embedding(batch, position_ids, seeds))
        angles, key_angles = self._angles(batch, position_ids, cache)
        if self.arch.relative is not None:
            angles = [embedding.places(x.shape[1])]
        after_first = None
        if self.arch.convolution is not None:
            after_first = embedding.beside_first(x, real_tokens(batch), seeds)
        windows = sorted(set(self.arch.windows), key=str)
        kernel = self.fused.over(batch) if self.fused is not None and cache is None else None
        if kernel is not None:
            masks = [kernel]
        elif num_sequence_parts() > 1 and self.arch.relative is None:
            masks = [CutRows.of(batch, self.arch.causal, window) for window in windows]
        elif cache is None:
            masks = [attention_mask(batch, self.arch.causal, window) for window in windows]
        else:
            start, length = cache["length"], x.shape[1]
            valid = jax.lax.dynamic_update_slice_in_dim(cache["valid"], batch["attention_mask"] > 0, start, axis=1)
            masks = [cached_mask(valid, start, length, window) for window in windows]
        real = real_tokens(batch) if measures else None
        x, kv, load = self._layers(params["layers"], x, masks, windows, angles, key_angles, seeds, cache, real,
                                   after_first)
        if "norm" in self._graphs:
            x = self._part("norm", params)(x)
        if self.head == "qa":
            x = self._part("head", params).features(x, seeds)
        if self.head == "causal":
            x = x.astype(self.build.dtype)  # as the head reads it: half of what devices exchange
        return x, cache if cache is None else {**kv, "valid": valid, "length": start + length}, load

    def _layers(self, layers: Tree, x: Array, masks: list[Array], windows: list[int | None],
                angles: list[Angles], key_angles: list[Angles], seeds: Seeds | None, cache: Tree | None,
                real: Array | None, after_first: Callable[[Array], Array] | None
                ) -> tuple[Array, Tree | None, Load | None]:
        arch = self.arch
        shared = arch.passes != tuple(range(arch.num_stored_layers))
        steps = {"stored": jnp.array(arch.passes),
                 "scale": jnp.array(arch.attention_scales, jnp.float32),
                 "mask": jnp.array([windows.index(window) for window in arch.windows])}
        steps |= {"rope": jnp.array([self._ropes.index(rope) for rope in arch.ropes])} if len(angles) > 1 else {}
        if not arch.first_norm and "attn_norm" in layers:  # a row for the layer without, which nothing reads
            steps["has_norm"] = jnp.arange(arch.num_layers) > 0
            layers = layers | {"attn_norm": jax.tree.map(lambda leaf: jnp.pad(
                leaf, ((1, 0), (0, 0)), constant_values=1), layers["attn_norm"])}
        steps |= {} if after_first is None else {"is_first": jnp.arange(arch.num_layers) == 0}
        steps |= {} if shared else {"params": layers}
        inside = {site: words for site, words in self._sites.items() if site.startswith("layers.")}
        steps |= {} if seeds is None else {"sites": inside}
        steps |= {} if cache is None else {"cache": {"k": cache["k"], "v": cache["v"]}}

        def layer(routed: bool, x: Array, step: Tree) -> tuple[Array, tuple[Tree | None, Load | None]]:
            params = jax.tree.map(lambda leaf: jnp.asarray(leaf)[step["stored"]], layers) if shared else step["params"]
            block = nnx.merge(self._graphs[_block(routed)], params)
            mask = _chosen(masks, step["mask"])
            turns, key_turns = (_chosen(kinds, step.get("rope")) for kinds in (angles, key_angles))
            here = None if seeds is None else Seeds(seeds.tokens, step["sites"])
            x, *kept = block(x, mask, step["scale"], turns, here, step.get("cache"),
                             None if cache is None else cache["length"], key_turns, step.get("has_norm"), real)
            if after_first is not None:
                x = jax.lax.cond(step["is_first"], after_first, lambda x: x, x)
            return cut(x), tuple(kept)

        if self.remat != "none" or on_mesh():
            layer = jax.checkpoint(layer, policy=_KEPT[self.remat], prevent_cse=False, static_argnums=0)

        def body(loop: Loop, x: Array, step: Tree) -> tuple[Array, tuple[list, list]]:
            kept = []
            for number, routed in enumerate(loop.kinds):
                x, of_layer = layer(routed, x, loop.of_layer(step, arch, number))
                kept.append(of_layer)
            return x, tuple(map(list, zip(*kept, strict=True)))

        kept = []
        for loop in self._loops:
            x, of_loop = jax.lax.scan(partial(body, loop), x, loop.cut(steps, arch),
                                      unroll=self.unroll if cache is None else 1)
            kept.append(of_loop)
        kv, load = (joined(list(parts)) for parts in zip(*kept, strict=True))
        return x, kv, load

    def _angles(self, batch: dict[str, Array], position_ids: Array, cache: Tree | None
                ) -> tuple[list[Angles], list[Angles]]:
        """Of each kind of rope for these tokens; and for all slots of the cache, where they depend on the length."""
        if not any(rope.by_length for rope in self._ropes):
            return [rope.angles(position_ids, None) for rope in self._ropes], []
        if cache is None:
            real = batch["attention_mask"] > 0 if "attention_mask" in batch else None
            lengths = text_lengths(position_ids, real)
            return [rope.angles(position_ids, lengths) for rope in self._ropes], []
        lengths = position_ids[:, -1:] + 1  # a text in a cache ends with the latest token
        slots = jnp.arange(cache["valid"].shape[1]) - (cache["length"] + position_ids.shape[1] - lengths)
        return ([rope.angles(position_ids, lengths) for rope in self._ropes],
                [rope.angles(jnp.maximum(slots, 0), lengths) for rope in self._ropes])

    def logits(self, params: Tree, hidden: Array) -> Array:
        """The head on hidden states of any leading shape: float32 [..., V], or [..., 2] (start, end) for qa."""
        return self._part("head", params)(hidden, params["embed"]["tokens"])

    def init_cache(self, batch_size: int, length: int) -> Tree:
        """Room for the keys and values of `length` tokens of each row; starts empty."""
        shape = (self.arch.num_layers, batch_size, length, self.arch.num_kv_heads, self.arch.head_dim)
        return {"k": jnp.zeros(shape, self.build.dtype), "v": jnp.zeros(shape, self.build.dtype),
                "valid": jnp.zeros((batch_size, length), bool), "length": jnp.zeros((), jnp.int32)}

    def _part(self, name: str, params: Tree) -> nnx.Module:
        return nnx.merge(self._graphs[name], params.get(name, {}))

    def _positions(self, batch: dict[str, Array]) -> Array:
        ids, arch = batch["input_ids"], self.arch
        if arch.positions_after_padding:
            if "position_ids" in batch:
                return batch["position_ids"] + arch.padding_id + 1
            real = (ids != arch.padding_id).astype(jnp.int32)
            return jnp.cumsum(real, axis=1) * real + arch.padding_id
        return batch.get("position_ids", jnp.broadcast_to(jnp.arange(ids.shape[1]), ids.shape))

    def _check(self, batch: dict[str, Array]) -> None:
        if batch["input_ids"].ndim != 2:
            raise UserError("The batches hold several answers in each row: set model.class_path to Preference, or "
                            "data.class_path to that of the task.")
        arch, length = self.arch, batch["input_ids"].shape[1]
        room = arch.max_positions - (arch.padding_id + 1 if arch.positions_after_padding else 0)
        if arch.positions in ("learned", "sinusoid") and length > room and "position_ids" not in batch:
            raise UserError(f"Rows of {length} tokens do not fit this model, which has {room} positions: set "
                            f"data.max_length to {room} or less.")
        if "token_type_ids" in batch and not arch.num_types:
            raise UserError(f"The batch has token_type_ids, but {self.config.model_type} has no token types.")

    def modules(self) -> list[str]:
        """Our paths of all modules with parameters."""
        return sorted({".".join(path[:-1]) for path in flatten(self.shapes)})

    def linears(self) -> list[str]:
        """Our paths of the linear layers; the head that makes the logits is not among them."""
        return list(dict.fromkeys(self._linears))

    def quantised(self, kind: Quantize | None) -> set[Path]:
        """Leaves that `model.quantize` stores in codes of this kind: linear layers, and experts in 4 bits."""
        if kind is None:
            return set()
        linear = {(*ours.split("."), "weight") for ours in self.linears()}
        is_stacked = kind != "int8" and self.arch.experts is not None
        return linear | ({(*EXPERTS.split("."), name) for name in MATRICES} if is_stacked else set())

    def trainable(self, params: Tree) -> Tree:
        """`trains` for each leaf."""
        return unflatten({path: self.trains(path) for path in flatten(params)})

    def decays(self, params: Tree) -> Tree:
        """For each leaf, whether weight decay applies: matrices (per layer) yes, biases and norms no."""
        return unflatten({path: decays(path[-1], len(self.shape(path))) for path in flatten(params)})


def _block(routed: bool) -> str:
    """Name among the parts of the block of layers with experts, or without."""
    return "layers" + ROUTED * routed


def _chosen(kinds: list[Any], number: Array | None) -> Any:
    """One of several arrays, or trees of arrays, of the same shapes; None of none."""
    if len(kinds) < 2:
        return kinds[0] if kinds else None
    return jax.tree.map(lambda *alike: jnp.stack(alike)[number], *kinds)
