"""Torch's parameter names of every leaf of the tree, one per layer and in torch's order, in both directions."""

from collections.abc import Sequence

import numpy as np

from jax_engine.distributed.tree import Path, Tree, flatten, unflatten
from jax_engine.models.architecture import Architecture, Family, Head
from lmmods.core import lazy_array
from lmmods.core.adapters import saved_name
from lmmods.core.errors import UserError
from lmmods.core.hf_config import some
from lmmods.core.lazy_array import LazyArray
from lmmods.runs.checkpoint_pieces import Pieces

LORA_LEAVES = ("lora_A", "lora_B", "lora_magnitude_vector")
TOKEN_ROWS = "trainable_tokens_delta"  # rows of new tokens that train beside an adapter
ADAPTER_LEAVES = (*LORA_LEAVES, TOKEN_ROWS)
PEFT_PREFIX = "base_model.model."
EXPERTS = "layers.mlp.experts"


class Names:
    """What a network knows of torch's names of its parameters.

    Args:
        shapes: Tree of shapes of the parameters.
        arch: Numbers of layers.
        adapted: Paths of modules with an adapter.
        adapted_experts: Names of the experts' matrices with one.
        to_save: Paths of modules that train in full beside adapters.
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
        parts = [inside, family.head_modules[head]]
        self._modules = {**parts[head in family.first], **parts[head not in family.first]}
        # PEFT wraps experts once for each adapted matrix: the last one's adapter is the outermost.
        wraps = ".base_layer" * len(adapted_experts)
        for depth, name in enumerate(adapted_experts, 1):
            self._modules[f"{EXPERTS}.{name}_lora"] = self._modules[EXPERTS] + wraps[depth * len(".base_layer"):]
        order = list(self._modules)
        ranked = sorted(self._leaves, key=lambda path: (order.index(_module(path)), _leaf_rank(path[-1])))
        outer = [path for path in ranked if path[0] != "layers"]
        inner = [path for path in ranked if path[0] == "layers"]
        first = next(i for i, name in enumerate(order) if name.startswith("layers."))
        before = [path for path in outer if order.index(_module(path)) < first]
        after = [path for path in outer if order.index(_module(path)) > first]
        places = [(path, None) for path in before]
        layers_of = {path: arch.layers_with(_module(path)) for path in inner}
        places += [(path, layers_of[path].index(layer)) for layer in range(arch.num_stored_layers) for path in inner
                   if layer in layers_of[path]]
        self._places: list[tuple[Path, int | None]] = places + [(path, None) for path in after]

    def names(self, plain: bool = False) -> list[tuple[str, Path, int | None]]:
        """(torch name, path in the tree, place among the stacked layers) of every parameter, in torch's order.

        Args:
            plain: Names of the network without PEFT's wrapping; adapters are left out.
        """
        return [(self._plain(path, layer) if plain else self.name(path, layer), path, layer)
                for path, layer in self._places if not (plain and path[-1] in ADAPTER_LEAVES)]

    def shape(self, path: Path) -> tuple[int, ...]:
        """Shape of a leaf, of one layer where it is stacked."""
        shape = self._leaves[path].shape
        return shape[1:] if path[0] == "layers" else shape

    def drawn_names(self, path: Path) -> list[str]:
        """Names of a leaf in torch's model, of an adapter's in PEFT's folder: one, or one for each layer."""
        named = self._saved_name if path[-1] in ADAPTER_LEAVES else self._inside
        return [named(path, place) for place in self._stack(_module(path))]

    def num_stacked(self, path: Path) -> int:
        """Number of layers of a leaf that is stacked."""
        return self._leaves[path].shape[0]

    def _stack(self, ours: str) -> Sequence[int | None]:
        """Places among the stacked layers that one of our modules has."""
        return range(len(self._layers_with(ours))) if ours.startswith("layers.") else [None]

    def _saved_name(self, path: Path, layer: int | None) -> str:
        return saved_name(self.name(path, layer))

    def module(self, ours: str, layer: int | None) -> str:
        """Torch's name of one of our modules, without any wrapping."""
        return self.filled_in(self._modules[ours], None if layer is None else self._layers_with(ours)[layer])

    def filled_in(self, name: str, layer: int | None, inside: bool = False) -> str:
        """Torch's name with the number of a layer in it; `inside` is for one that begins inside the base network."""
        name = f"{self._base}.{name}".rstrip(".") if inside else name
        if layer is None:
            return name
        return name.format(*(divmod(layer, self._per_group) if self._per_group else (layer,)))

    def torch_modules(self, ours: str) -> list[str]:
        """Torch's names of one of our modules, one per layer."""
        return [self.module(ours, place) for place in self._stack(ours)]

    def name(self, path: Path, layer: int | None) -> str:
        """Torch's name of a parameter, as in `named_parameters` of the network PEFT wraps, if it does."""
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
            return f"{theirs}{'.base_layer' * len(self._adapted_experts)}.{leaf}"
        return (f"{theirs}.modules_to_save.default.{leaf}" if self.trains(path)
                else PEFT_PREFIX + self._inside(path, layer))

    def _plain(self, path: Path, layer: int | None) -> str:
        return f"{self.module(_module(path), layer)}.{path[-1]}"

    def _inside(self, path: Path, layer: int | None) -> str:
        name = self._plain(path, layer)
        return self._renamed.get(name, name)

    def trains(self, path: Path) -> bool:
        """Whether a leaf trains: all do without adapters, else those and the modules saved in full."""
        return not self._wrapped or path[-1] in ADAPTER_LEAVES or _module(path) in self._to_save

    def to_torch(self, tree: Tree, plain: bool = False) -> dict[str, np.ndarray]:
        """Leaves of any tree shaped like the parameters or a part of them, by torch's names (`plain` as in `names`).

        Of `Pieces` those of each layer.
        """
        leaves = {path: leaf if isinstance(leaf, Pieces) else np.asarray(leaf) for path, leaf in flatten(tree).items()}
        named = {name: leaves[path] if layer is None else leaves[path][layer]
                 for name, path, layer in self.names(plain) if path in leaves}
        return {name: leaf if isinstance(leaf, Pieces) else np.ascontiguousarray(leaf) for name, leaf in named.items()}

    def from_torch(self, named: dict[str, np.ndarray]) -> Tree:
        """Undo `to_torch`; the tree has the leaves that are named, lazy ones of lazy ones.

        Raises:
            UserError: A name that the network does not have, or a stacked leaf of which layers are missing.
        """
        known = {name: (path, layer) for name, path, layer in self.names()}
        if unknown := sorted(set(named) - set(known)):
            raise UserError(f"These parameters are not of this network: {some(unknown)}.")
        pieces: dict[Path, dict[int | None, np.ndarray]] = {}
        for name, value in named.items():
            path, layer = known[name]
            pieces.setdefault(path, {})[layer] = value if isinstance(value, LazyArray) else np.asarray(value)
        missing = [self.name(path, layer) for path, parts in pieces.items() if path[0] == "layers"
                   for layer in self._stack(_module(path)) if layer not in parts]
        if missing:
            raise UserError(f"Some layers have parameters that others lack: {some(missing)}.")
        return unflatten({path: _stacked([parts[layer] for layer in sorted(parts)])
                          if path[0] == "layers" else parts[None] for path, parts in pieces.items()})


def _stacked(layers: list[np.ndarray | LazyArray]) -> np.ndarray | LazyArray:
    if all(isinstance(layer, np.ndarray) for layer in layers):
        return np.stack(layers)
    return lazy_array.stack([lazy_array.of(layer) for layer in layers])


def _module(path: Path) -> str:
    return ".".join(path[:-1])


def _leaf_rank(leaf: str) -> int:
    return ("weight", "bias", "sinks", "gate_up_proj", "gate_up_proj_bias", "down_proj", "down_proj_bias",
            *ADAPTER_LEAVES).index(leaf)
