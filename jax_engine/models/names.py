"""Mapping between leaves of the parameter tree and torch's parameter names, per layer and in torch's order."""

from collections.abc import Collection, Sequence
from itertools import chain, groupby
from typing import Any

import jax
import numpy as np

from jax_engine.distributed.tree import AT, STACKS, Path, Tree, flatten, is_stacked, unflatten
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
        base_modules = {module: f"{self._base}.{torch_name}" for module, torch_name in family.modules.items()}
        head_modules = family.head_modules[head]
        if head in family.first:
            before = {module: name for module, name in head_modules.items() if not self._is_in_base(name)}
            base_modules = before | base_modules
        self._modules = base_modules | head_modules
        # PEFT wraps experts once for each adapted matrix; the last matrix has the outermost adapter.
        wraps = ".base_layer" * len(adapted_experts)
        for depth, name in enumerate(adapted_experts, 1):
            self._modules[f"{EXPERTS}.{name}_lora"] = self._modules[EXPERTS] + wraps[depth * len(".base_layer"):]
        # torch's order of parameters: by module in order of definition, then by leaf. torch lists all modules of one
        # layer before the next, while the tree stacks a leaf over layers.
        order = list(self._modules)
        starts = {root: next((i for i, name in enumerate(order) if name.startswith(f"{root}.")), 0) for root in STACKS}

        def rank(path: Path) -> tuple[int, ...]:
            index = order.index(_module_of(path))
            return starts.get(path[0], index), index, _leaf_rank(path[-1])

        self._entries: list[tuple[Path, int | None]] = []
        for root, group in groupby(sorted(self._leaves, key=rank), lambda path: path[0] if is_stacked(path) else None):
            paths = list(group)
            if root is None:
                self._entries += [(path, None) for path in paths]
                continue
            layers_of = {path: arch.layers_with(_module_of(path)) for path in paths}
            # A leaf is stacked over the layers that have it, so its index in the stack may differ from the layer's.
            self._entries += [(path, layers_of[path].index(layer)) for layer in sorted({*chain(*layers_of.values())})
                              for path in paths if layer in layers_of[path]]
        self._trained: dict[Path, tuple[int | None, ...]] | None = None  # see `train_only`

    def names(self, plain: bool = False) -> list[tuple[str, Path, int | None]]:
        """Return (torch name, path in the tree, index among the stacked layers) of every parameter, in torch's order.

        Args:
            plain: Return names as in files: without PEFT's wrapping and adapters, and with `CONSTANTS`.
        """
        return [(self._plain_name(path, layer) if plain else self.name(path, layer), path, layer)
                for path, layer in self._entries if path[-1] not in (ADAPTER_LEAVES if plain else CONSTANTS)]

    def shape(self, path: Path) -> tuple[int, ...]:
        """Return the shape of a leaf, or of a single layer if it is stacked."""
        shape = self._leaves[path].shape
        return shape[1:] if is_stacked(path) else shape

    def init_names(self, path: Path) -> list[str]:
        """Return the names that seed a leaf's initial values, one, or one per layer.

        They are the names in torch's model, or for adapters in PEFT's folder. transformers initialises A_log in a
        temporary tensor, which the torch engine names as the first of its module.
        """
        if path[-1] == "A_log":
            return [f"{name}#1" for name in self.torch_modules(_module_of(path))]
        name_of = self._saved_name if path[-1] in ADAPTER_LEAVES else self._model_name
        return [name_of(path, index) for index in self.stacked_indices(_module_of(path))]

    def num_stacked(self, path: Path) -> int:
        """Return the number of layers in a stacked leaf."""
        return self._leaves[path].shape[0]

    def _is_in_base(self, name: str) -> bool:
        """Return True for the torch name of a module of the base network."""
        return name.startswith(f"{self._base}.")

    def _saved_name(self, path: Path, layer: int | None) -> str:
        return saved_name(self.name(path, layer))

    def torch_module(self, module: str, layer: int | None) -> str:
        """Return torch's name of our module, without PEFT's wrapping."""
        return self.fill_layer(self._modules[module], None if layer is None else self._layers_with(module)[layer])

    def fill_layer(self, name: str, layer: int | None, in_base: bool = False) -> str:
        """Fill the layer index into torch's name; `in_base` prefixes a name that is relative to the base network."""
        name = f"{self._base}.{name}".rstrip(".") if in_base else name
        if layer is None:
            return name
        return name.format(*(divmod(layer, self._per_group) if self._per_group else (layer,)))

    def torch_modules(self, module: str) -> list[str]:
        """Return torch's names of our module, one per layer."""
        return [self.torch_module(module, index) for index in self.stacked_indices(module)]

    def head_module(self, module: str) -> str:
        """Return torch's name of the child of the model, or of the base (a pooler), that contains this head module."""
        torch_name = self.torch_module(module, None)
        return ".".join(torch_name.split(".")[:1 + self._is_in_base(torch_name)])

    def saved_module(self, module: str, layer: int | None) -> str:
        """Return torch's name of the module that PEFT wraps to train our module in full.

        For a head that trains as a whole, it is the `head_module`. In the layers it is the outermost saved module that
        contains this one.
        """
        head = {other for other in map(_module_of, self._leaves) if other.startswith("head")}
        if module in head <= self._to_save:
            return self.head_module(module)
        outer = [other for other in self._to_save
                 if is_stacked((*other.split("."),)) and f"{module}.".startswith(f"{other}.")]
        return self.torch_module(min(outer, key=len, default=module), layer)

    def stacked_indices(self, module: str) -> Sequence[int | None]:
        """Return a module's indices among the stacked layers; [None] outside the layers."""
        return range(len(self._layers_with(module))) if is_stacked((*module.split("."),)) else [None]

    def name(self, path: Path, layer: int | None) -> str:
        """Return torch's name of a parameter as in `named_parameters`, with PEFT's wrapping if there is any."""
        if not self._wrapped:
            return self._model_name(path, layer)
        module, leaf = _module_of(path), path[-1]
        torch_name = PEFT_PREFIX + self.torch_module(module, layer)
        if leaf in LORA_LEAVES:
            return f"{torch_name}.{leaf}.default.weight"
        if leaf == TOKEN_ROWS:
            return f"{torch_name}.token_adapter.{leaf}.default"
        if (*path[:-1], TOKEN_ROWS) in self._leaves:
            return f"{torch_name}.token_adapter.base_layer.{leaf}"
        if module in self._adapted:
            return f"{torch_name}.base_layer.{leaf}"
        if module == EXPERTS and self._adapted_experts:
            # PEFT wraps a module of experts once for each adapted matrix.
            return f"{torch_name}{'.base_layer' * len(self._adapted_experts)}.{leaf}"
        if not self.trains(path):
            return PEFT_PREFIX + self._model_name(path, layer)
        saved = self.saved_module(module, layer)
        return f"{PEFT_PREFIX}{saved}.modules_to_save.default{torch_name.removeprefix(PEFT_PREFIX + saved)}.{leaf}"

    def _plain_name(self, path: Path, layer: int | None) -> str:
        return f"{self.torch_module(_module_of(path), layer)}.{path[-1]}"

    def _model_name(self, path: Path, layer: int | None) -> str:
        name = self._plain_name(path, layer)
        return self._renamed.get(name, name)

    def trains(self, path: Path) -> bool:
        """Return True if a leaf trains: without adapters every leaf, else adapters and modules saved in full."""
        if path[-1] in CONSTANTS:
            return False
        if self._trained is not None:
            return path in self._trained
        return not self._wrapped or path[-1] in ADAPTER_LEAVES or _module_of(path) in self._to_save

    def train_only(self, trained: Collection[str]) -> None:
        """Train only the parameters with these names, in a network without adapters."""
        self._trained = {}
        for name, path, layer in self.names():
            if name in trained:
                self._trained[path] = (*self._trained.get(path, ()), layer)

    def split(self, params: Tree) -> tuple[Tree, Tree]:
        """Return the trainable parameters, and the frozen ones; `tree.merge` is the inverse."""
        trainable: dict[Path, Any] = {}
        frozen: dict[Path, Any] = {}
        for path, leaf in flatten(params).items():
            if not self.trains(path):
                frozen[path] = leaf
            elif (trained := self._trained_layers(path)) is None:
                trainable[path] = leaf
            else:
                frozen_layers = [index for index in range(self.num_stacked(path)) if index not in trained]
                trainable[path] = _select_layers(leaf, trained)
                root = f"{path[0]}{AT}{','.join(map(str, frozen_layers))}"
                frozen[(root, *path[1:])] = _select_layers(leaf, frozen_layers)
        return unflatten(trainable), unflatten(frozen)

    def _trained_layers(self, path: Path) -> tuple[int, ...] | None:
        """Return the indices of the layers that train in a stacked leaf; None if all do."""
        trained = (self._trained or {}).get(path)
        return trained if trained and is_stacked(path) and len(trained) < self.num_stacked(path) else None

    def to_torch(self, tree: Tree, plain: bool = False) -> dict[str, np.ndarray]:
        """Return leaves of a tree like the parameters, or a part of them, by torch's names (`plain` as in `names`).

        Stacked leaves may lack the layers that do not train. `Shards` are split by layer.
        """
        leaves = {path: leaf if isinstance(leaf, Shards) else np.asarray(leaf) for path, leaf in flatten(tree).items()}
        named = {}
        for name, path, layer in self.names(plain):
            if path not in leaves:
                continue
            trained = self._trained_layers(path)
            if trained is not None and leaves[path].shape[0] == len(trained):
                if layer not in trained:
                    continue
                layer = trained.index(layer)
            named[name] = leaves[path] if layer is None else leaves[path][layer]
        return {name: leaf if isinstance(leaf, Shards) else np.ascontiguousarray(leaf) for name, leaf in named.items()}

    def from_torch(self, named: dict[str, np.ndarray]) -> Tree:
        """Return the tree of named parameters, the inverse of `to_torch`. Lazy arrays stay lazy.

        Raises:
            UserError: A name is unknown, or a stacked leaf lacks layers that train.
        """
        entries = {name: (path, layer) for name, path, layer in self.names()}
        if unknown := sorted(set(named) - set(entries)):
            raise UserError(f"These parameters are not in this network: {some(unknown)}. Use the model and the targets "
                            "that they were trained with.")
        parts_by_path: dict[Path, dict[int | None, np.ndarray]] = {}
        for name, value in named.items():
            path, layer = entries[name]
            parts_by_path.setdefault(path, {})[layer] = value if isinstance(value, LazyArray) else np.asarray(value)
        # The network stacks layers, so either all layers have a leaf or none.
        missing = [self.name(path, layer) for path, parts in parts_by_path.items() if is_stacked(path)
                   for layer in self._trained_layers(path) or self.stacked_indices(_module_of(path))
                   if layer not in parts]
        if missing:
            raise UserError(f"These parameters are missing in some layers: {some(missing)}. Use a complete checkpoint "
                            "or adapter.")
        return unflatten({path: _stack([parts[layer] for layer in sorted(parts)])
                          if is_stacked(path) else parts[None] for path, parts in parts_by_path.items()})


def _select_layers(leaf: Any, indices: Sequence[int]) -> Any:
    """Return these layers of a stacked leaf, a lazy array, shape or array, as the same type."""
    shape = (len(indices), *leaf.shape[1:])
    if isinstance(leaf, jax.ShapeDtypeStruct):
        return jax.ShapeDtypeStruct(shape, leaf.dtype)
    if isinstance(leaf, LazyArray):
        return lazy_array.stack([lazy_array.row(leaf, index) for index in indices])
    return leaf[np.array(indices)]


def _stack(layers: list[np.ndarray | LazyArray]) -> np.ndarray | LazyArray:
    if all(isinstance(layer, np.ndarray) for layer in layers):
        return np.stack(layers)
    return lazy_array.stack([lazy_array.lazy(layer) for layer in layers])


def _module_of(path: Path) -> str:
    return ".".join(path[:-1])


def _leaf_rank(leaf: str) -> int:
    # torch's order of a module's parameters, then the adapters.
    return ("weight", "bias", "sinks", "dt_bias", "A_log", "scale", "per_expert_scale", "gate_up_proj",
            "gate_up_proj_bias", "mm_input_projection_weight", "down_proj", "down_proj_bias", *CONSTANTS,
            *ADAPTER_LEAVES).index(leaf)
