"""Torch's parameter names of every leaf of the tree, one per layer and in torch's order, in both directions."""

from typing import Any

import numpy as np

from jax_engine.distributed.tree import Path, flatten, unflatten
from jax_engine.models.architecture import Architecture, Family, Head
from lmmods.core.errors import UserError

Tree = dict[str, Any]
LORA_LEAVES = ("lora_A", "lora_B", "lora_magnitude_vector")
PEFT_PREFIX = "base_model.model."


class Names:
    """Torch's names of a network's parameters.

    Args:
        shapes: Tree of shapes of the parameters.
        arch: Numbers of layers.
        adapted: Paths of modules with an adapter.
        to_save: Paths of modules that train in full beside adapters.
    """

    def __init__(self, family: Family, head: Head, shapes: Tree, arch: Architecture, adapted: frozenset[str],
                 to_save: frozenset[str]):
        self._adapted, self._to_save = adapted, to_save
        self._wrapped = bool(adapted or to_save)
        self._leaves = flatten(shapes)
        self._per_group = arch.layers_per_group
        base = family.prefix(head)
        self.modules = {ours: f"{base}.{theirs}" for ours, theirs in family.modules.items()}
        self.modules |= family.head_modules[head]
        self.stored = arch.num_stored_layers
        order = list(self.modules)
        ranked = sorted(self._leaves, key=lambda path: (order.index(_module(path)), _leaf_rank(path[-1])))
        outer = [path for path in ranked if path[0] != "layers"]
        inner = [path for path in ranked if path[0] == "layers"]
        first = next(i for i, name in enumerate(order) if name.startswith("layers."))
        before = [path for path in outer if order.index(_module(path)) < first]
        after = [path for path in outer if order.index(_module(path)) > first]
        places = [(path, None) for path in before]
        places += [(path, layer) for layer in range(self.stored) for path in inner]
        self._places: list[tuple[Path, int | None]] = places + [(path, None) for path in after]

    def entries(self, plain: bool = False) -> list[tuple[str, Path, int | None]]:
        """(torch name, path, layer) of every parameter, in torch's order.

        Args:
            plain: Names of the bare network, adapters left out; else as PEFT wraps it.
        """
        return [(self._plain(path, layer) if plain else self.name(path, layer), path, layer)
                for path, layer in self._places if not (plain and path[-1] in LORA_LEAVES)]

    def shape(self, path: Path) -> tuple[int, ...]:
        """Shape of a leaf, of one layer where it is stacked."""
        shape = self._leaves[path].shape
        return shape[1:] if path[0] == "layers" else shape

    def module(self, ours: str, layer: int | None) -> str:
        """Torch's name of one of our modules, without any wrapping."""
        if layer is None:
            return self.modules[ours]
        return self.modules[ours].format(*(divmod(layer, self._per_group) if self._per_group else (layer,)))

    def module_layers(self, ours: str) -> list[str]:
        """Torch's names of a module in all layers."""
        layers = range(self.stored) if ours.startswith("layers.") else [None]
        return [self.module(ours, layer) for layer in layers]

    def name(self, path: Path, layer: int | None) -> str:
        """Torch's name of a parameter, as in `named_parameters` of the network PEFT wraps, if it does."""
        if not self._wrapped:
            return self._plain(path, layer)
        ours, leaf = _module(path), path[-1]
        theirs = PEFT_PREFIX + self.module(ours, layer)
        if leaf in LORA_LEAVES:
            return f"{theirs}.{leaf}.default.weight"
        if ours in self._adapted:
            return f"{theirs}.base_layer.{leaf}"
        return f"{theirs}.modules_to_save.default.{leaf}" if self.trains(path) else f"{theirs}.{leaf}"

    def _plain(self, path: Path, layer: int | None) -> str:
        return f"{self.module(_module(path), layer)}.{path[-1]}"

    def trains(self, path: Path) -> bool:
        """Whether a leaf trains."""
        module = _module(path)
        return not self._wrapped or path[-1] in LORA_LEAVES or any(
            module == saved or module.startswith(f"{saved}.") for saved in self._to_save)

    def to_torch(self, tree: Tree, plain: bool) -> dict[str, np.ndarray]:
        """See Network.to_torch."""
        leaves = {path: np.asarray(leaf) for path, leaf in flatten(tree).items()}
        return {name: np.ascontiguousarray(leaves[path] if layer is None else leaves[path][layer])
                for name, path, layer in self.entries(plain) if path in leaves}

    def from_torch(self, named: dict[str, np.ndarray]) -> Tree:
        """See Network.from_torch."""
        known = {name: (path, layer) for name, path, layer in self.entries()}
        if unknown := sorted(set(named) - set(known)):
            raise UserError(f"These parameters are not of this network: {some(unknown)}.")
        pieces: dict[Path, dict[int | None, np.ndarray]] = {}
        for name, value in named.items():
            path, layer = known[name]
            pieces.setdefault(path, {})[layer] = np.asarray(value)
        missing = [self.name(path, layer) for path, parts in pieces.items() if path[0] == "layers"
                   for layer in range(self.stored) if layer not in parts]
        if missing:
            raise UserError(f"Some layers have parameters that others lack: {some(missing)}.")
        return unflatten({path: np.stack([parts[layer] for layer in range(self.stored)])
                          if path[0] == "layers" else parts[None] for path, parts in pieces.items()})


def some(names: list[str], limit: int = 8) -> str:
    """The first few of many names."""
    return ", ".join(names[:limit]) + (f" and {len(names) - limit} more" if len(names) > limit else "")


def _module(path: Path) -> str:
    return ".".join(path[:-1])


def _leaf_rank(leaf: str) -> int:
    return ("weight", "bias", *LORA_LEAVES).index(leaf)
