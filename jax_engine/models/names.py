"""Mapping between the leaves of the parameter tree and torch's parameter names, per layer and in torch's order."""

from collections.abc import Collection, Sequence
from typing import Any

import jax
import numpy as np

from jax_engine.distributed.tree import AT, Path, Tree, flatten, unflatten
from jax_engine.models.architecture import Architecture, Family, Head
from lmmods.core import lazy_array
from lmmods.core.adapters import saved_name
from lmmods.core.errors import UserError
from lmmods.core.hf_config import some
from lmmods.core.lazy_array import LazyArray
from lmmods.runs.checkpoint import Shards

LORA_LEAVES = ("lora_A", "lora_B", "lora_magnitude_vector")
TOKEN_ROWS = "trainable_tokens_delta"  # rows of new tokens that train alongside an adapter
ADAPTER_LEAVES = (*LORA_LEAVES, TOKEN_ROWS)
PEFT_PREFIX = "base_model.model."
EXPERTS = "layers.moe.experts"
CONSTANTS = ("layer_scalar",)  # leaves that are buffers in torch: read and saved, but never trained


class Names:
    """Torch's names of a network's parameters.

    Args:
        shapes: Tree of the parameters' shapes.
        arch: Determines which layers have which modules.
        adapted: Paths of modules with an adapter.
        adapted_experts: Names of the experts' matrices with an adapter.
        to_save: Paths of modules that train in full alongside adapters.
    """

    def __init__(self, family: Family, head: Head, shapes: Tree, arch: Architecture, adapted: frozenset[str],
                 adapted_experts: tuple[str, ...], to_save: frozenset[str]):
        self._adapted, self._to_save, self._layers_with = adapted, to_save, arch.layers_with
        self._adapted_experts = adapted_experts
        self._wrapped = bool(adapted or adapted_experts or to_save)
        self._leaves = flatten(shapes)
        self._per_group = arch.layers_per_group
        self._base, self._renamed = family.prefix(head), family.renamed.get(head, {})
        inside = {ours: f"{self._base}.{theirs}" for ours, theirs in family.modules.items()}
        own = family.head_modules[head]
        if head in family.first:
            inside = {ours: name for ours, name in own.items() if not self._is_inside(name)} | inside
        self._modules = inside | own
        # PEFT wraps experts once for each adapted matrix: the last one's adapter is the outermost.
        wraps = ".base_layer" * len(adapted_experts)
        for depth, name in enumerate(adapted_experts, 1):
            self._modules[f"{EXPERTS}.{name}_lora"] = self._modules[EXPERTS] + wraps[depth * len(".base_layer"):]
        # torch's order of parameters: by module in order of definition, then by leaf. Layers go one after the other,
        # each with all its modules, while the tree stacks a leaf over layers.
        order = list(self._modules)
        ranked = sorted(self._leaves, key=lambda path: (order.index(_module(path)), _leaf_rank(path[-1])))
        outer = [path for path in ranked if path[0] != "layers"]
        inner = [path for path in ranked if path[0] == "layers"]
        # Modules before the layers and after them.
        first = next(i for i, name in enumerate(order) if name.startswith("layers."))
        before = [path for path in outer if order.index(_module(path)) < first]
        after = [path for path in outer if order.index(_module(path)) > first]
        places = [(path, None) for path in before]
        layers_of = {path: arch.layers_with(_module(path)) for path in inner}
        # A leaf is stacked over the layers that have it, so its index there may differ from the number of the layer.
        places += [(path, layers_of[path].index(layer)) for layer in range(arch.num_stored_layers) for path in inner
                   if layer in layers_of[path]]
        self._places: list[tuple[Path, int | None]] = places + [(path, None) for path in after]
        self._trained: dict[Path, tuple[int | None, ...]] | None = None  # see `choose`

    def names(self, plain: bool = False) -> list[tuple[str, Path, int | None]]:
        """Return (torch name, path in the tree, index among the stacked layers) of every parameter, in torch's order.

        Args:
            plain: Return the names in files: without PEFT's wrapping and adapters, and with `CONSTANTS`.
        """
        return [(self._plain(path, layer) if plain else self.name(path, layer), path, layer)
                for path, layer in self._places if path[-1] not in (ADAPTER_LEAVES if plain else CONSTANTS)]

    def shape(self, path: Path) -> tuple[int, ...]:
        """Return the shape of a leaf; of a single layer, if it is stacked."""
        shape = self._leaves[path].shape
        return shape[1:] if path[0] == "layers" else shape

    def drawn_names(self, path: Path) -> list[str]:
        """Return the names of a leaf, one, or one per layer: in torch's model, or for adapters in PEFT's folder.

        transformers draws A_log in a temporary tensor: the first of its module, in the names of the torch engine.
        """
        if path[-1] == "A_log":
            return [f"{name}#1" for name in self.torch_modules(_module(path))]
        named = self._saved_name if path[-1] in ADAPTER_LEAVES else self._inside
        return [named(path, place) for place in self.places(_module(path))]

    def num_stacked(self, path: Path) -> int:
        """Return the number of layers of a stacked leaf."""
        return self._leaves[path].shape[0]

    def _is_inside(self, name: str) -> bool:
        """Return True for the torch name of a module of the base network."""
        return name.startswith(f"{self._base}.")

    def _saved_name(self, path: Path, layer: int | None) -> str:
        return saved_name(self.name(path, layer))

    def module(self, ours: str, layer: int | None) -> str:
        """Return torch's name of one of our modules, without PEFT's wrapping."""
        return self.filled_in(self._modules[ours], None if layer is None else self._layers_with(ours)[layer])

    def filled_in(self, name: str, layer: int | None, inside: bool = False) -> str:
        """Fill the layer number into torch's name; `inside` prefixes a name that is relative to the base network."""
        name = f"{self._base}.{name}".rstrip(".") if inside else name
        if layer is None:
            return name
        return name.format(*(divmod(layer, self._per_group) if self._per_group else (layer,)))

    def torch_modules(self, ours: str) -> list[str]:
        """Return torch's names of one of our modules, one per layer."""
        return [self.module(ours, place) for place in self.places(ours)]

    def head_module(self, ours: str) -> str:
        """Return torch's name of the child of the model, or of the base (a pooler), that holds this part of the head.
        """
        theirs = self.module(ours, None)
        return ".".join(theirs.split(".")[:1 + self._is_inside(theirs)])

    def saved_module(self, ours: str, layer: int | None) -> str:
        """Return torch's name of the module that PEFT wraps to train one of ours in full; a whole head's are children.

        In the layers it is the outermost module of ours that holds this one.
        """
        head = {part for part in map(_module, self._leaves) if part.startswith("head")}
        if ours in head <= self._to_save:
            return self.head_module(ours)
        outer = [part for part in self._to_save if part.startswith("layers.") and f"{ours}.".startswith(f"{part}.")]
        return self.module(min(outer, key=len, default=ours), layer)

    def places(self, ours: str) -> Sequence[int | None]:
        """Return the indices among the stacked layers of a module; [None] outside the layers."""
        return range(len(self._layers_with(ours))) if ours.startswith("layers.") else [None]

    def name(self, path: Path, layer: int | None) -> str:
        """Return torch's name of a parameter as in `named_parameters`, including PEFT's wrapping, if there is any."""
        if not self._wrapped:
            return self._inside(path, layer)
        ours, leaf = _module(path), path[-1]
        theirs = PEFT_PREFIX + self.module(ours, layer)
        if leaf in LORA_LEAVES:
            return f"{theirs}.{leaf}.default.weight"
        if leaf == TOKEN_ROWS:
            return f"{theirs}.token_adapter.{leaf}.default"
        if (*path[:-1], TOKEN_ROWS) in self._leaves:
            return f"{theirs}.token_adapter.base_layer.{leaf}"
        if ours in self._adapted:
            return f"{theirs}.base_layer.{leaf}"
        if ours == EXPERTS and self._adapted_experts:
            # PEFT wraps a module of experts once for each adapted matrix.
            return f"{theirs}{'.base_layer' * len(self._adapted_experts)}.{leaf}"
        if not self.trains(path):
            return PEFT_PREFIX + self._inside(path, layer)
        saved = self.saved_module(ours, layer)
        return f"{PEFT_PREFIX}{saved}.modules_to_save.default{theirs.removeprefix(PEFT_PREFIX + saved)}.{leaf}"

    def _plain(self, path: Path, layer: int | None) -> str:
        return f"{self.module(_module(path), layer)}.{path[-1]}"

    def _inside(self, path: Path, layer: int | None) -> str:
        name = self._plain(path, layer)
        return self._renamed.get(name, name)

    def trains(self, path: Path) -> bool:
        """Return True if a leaf trains: without adapters all do, else adapters and the modules saved in full."""
        if path[-1] in CONSTANTS:
            return False
        if self._trained is not None:
            return path in self._trained
        return not self._wrapped or path[-1] in ADAPTER_LEAVES or _module(path) in self._to_save

    def choose(self, trained: Collection[str]) -> None:
        """Let only the parameters of these names train, of a network without adapters."""
        self._trained = {}
        for name, path, layer in self.names():
            if name in trained:
                self._trained[path] = (*self._trained.get(path, ()), layer)

    def split(self, params: Tree) -> tuple[Tree, Tree]:
        """Return the parameters that train, and the others; `tree.merge` is the inverse."""
        trainable: dict[Path, Any] = {}
        frozen: dict[Path, Any] = {}
        for path, leaf in flatten(params).items():
            if not self.trains(path):
                frozen[path] = leaf
            elif (trained := self._partly(path)) is None:
                trainable[path] = leaf
            else:
                others = [place for place in range(self.num_stacked(path)) if place not in trained]
                trainable[path] = _rows(leaf, trained)
                frozen[(f"{path[0]}{AT}{','.join(map(str, others))}", *path[1:])] = _rows(leaf, others)
        return unflatten(trainable), unflatten(frozen)

    def _partly(self, path: Path) -> tuple[int, ...] | None:
        """Return the places of the layers that train of a stacked leaf; None if all of the leaf does."""
        trained = (self._trained or {}).get(path)
        return trained if trained and path[0] == "layers" and len(trained) < self.num_stacked(path) else None

    def to_torch(self, tree: Tree, plain: bool = False) -> dict[str, np.ndarray]:
        """Return the leaves of a tree like the parameters, or a part of them, by torch's names (`plain` as in `names`).

        A stack may lack the layers that do not train. `Shards` (shards) are split by layer.
        """
        leaves = {path: leaf if isinstance(leaf, Shards) else np.asarray(leaf) for path, leaf in flatten(tree).items()}
        named = {}
        for name, path, layer in self.names(plain):
            if path not in leaves:
                continue
            trained = self._partly(path)
            if trained is not None and leaves[path].shape[0] == len(trained):
                if layer not in trained:
                    continue
                layer = trained.index(layer)
            named[name] = leaves[path] if layer is None else leaves[path][layer]
        return {name: leaf if isinstance(leaf, Shards) else np.ascontiguousarray(leaf) for name, leaf in named.items()}

    def from_torch(self, named: dict[str, np.ndarray]) -> Tree:
        """Inverse of `to_torch`; the tree has only the named leaves, and lazy arrays stay lazy.

        Raises:
            UserError: A name is unknown, or a stacked leaf lacks layers that train.
        """
        known = {name: (path, layer) for name, path, layer in self.names()}
        if unknown := sorted(set(named) - set(known)):
            raise UserError(f"These parameters are not of this network: {some(unknown)}.")
        pieces: dict[Path, dict[int | None, np.ndarray]] = {}
        for name, value in named.items():
            path, layer = known[name]
            pieces.setdefault(path, {})[layer] = value if isinstance(value, LazyArray) else np.asarray(value)
        # The network stacks layers, so a leaf is either in all of them or in none.
        missing = [self.name(path, layer) for path, parts in pieces.items() if path[0] == "layers"
                   for layer in self._partly(path) or self.places(_module(path)) if layer not in parts]
        if missing:
            raise UserError(f"Some layers have parameters that others lack: {some(missing)}.")
        return unflatten({path: _stack([parts[layer] for layer in sorted(parts)])
                          if path[0] == "layers" else parts[None] for path, parts in pieces.items()})


def _rows(leaf: Any, places: Sequence[int]) -> Any:
    """Return these layers of a stacked leaf: a lazy array, shape or array of the same kind."""
    shape = (len(places), *leaf.shape[1:])
    if isinstance(leaf, jax.ShapeDtypeStruct):
        return jax.ShapeDtypeStruct(shape, leaf.dtype)
    if isinstance(leaf, LazyArray):
        return lazy_array.stack([lazy_array.row(leaf, place) for place in places])
    return leaf[np.array(places)]


def _stack(layers: list[np.ndarray | LazyArray]) -> np.ndarray | LazyArray:
    if all(isinstance(layer, np.ndarray) for layer in layers):
        return np.stack(layers)
    return lazy_array.stack([lazy_array.lazy(layer) for layer in layers])


def _module(path: Path) -> str:
    return ".".join(path[:-1])


def _leaf_rank(leaf: str) -> int:
    # torch's order of a module's own parameters, then the adapters.
    return ("weight", "bias", "sinks", "dt_bias", "A_log", "scale", "per_expert_scale", "gate_up_proj",
            "gate_up_proj_bias", "down_proj", "down_proj_bias", *CONSTANTS, *ADAPTER_LEAVES).index(leaf)
