"""The loops of a network's depth: neighbouring layers of one kind share one, and so do kinds that take turns."""

from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp

from jax_engine.distributed.tree import Tree, flatten, unflatten
from jax_engine.models.architecture import Architecture


class Loop(NamedTuple):
    """Neighbouring layers, some in each step.

    Args:
        first: Number of the first layer.
        kinds: Of each layer of a step whether it has experts.
        num_steps: Number of steps.
    """

    first: int
    kinds: tuple[bool, ...]
    num_steps: int

    def cut(self, steps: Tree, arch: Architecture) -> Tree:
        """What the loop's steps take, by step: layers of one step that a leaf has stand in a second axis, if several.

        Args:
            steps: Leaves with a row for each layer of the network; those of `params` for each that has them.
        """
        def rows(leaf: jax.Array, before: int, count: int) -> jax.Array:
            leaf = leaf[before:before + count * self.num_steps]
            return leaf if count == 1 else leaf.reshape(self.num_steps, count, *leaf.shape[1:])

        found = {}
        for path, leaf in flatten(steps).items():
            has = _layers_with(path, arch)
            if own := self._own(has):
                before = sum(layer < self.first for layer in has)
                found[path] = jax.tree.map(lambda part, at=(before, len(own)): rows(part, *at), leaf)
        return unflatten(found)

    def of_layer(self, step: Tree, arch: Architecture, number: int) -> Tree:
        """Of what a step takes that of the layer with this number in it."""
        found = {}
        for path, leaf in flatten(step).items():
            own = self._own(_layers_with(path, arch))
            if number in own:
                place = own.index(number)
                found[path] = leaf if len(own) == 1 else jax.tree.map(lambda part, at=place: part[at], leaf)
        return unflatten(found)

    def _own(self, has: Sequence[int]) -> list[int]:
        """Numbers within a step of the layers that are among these."""
        return [number for number in range(len(self.kinds)) if self.first + number in has]


def _layers_with(path: tuple[str, ...], arch: Architecture) -> Sequence[int]:
    """Layers that have a leaf of what steps take; rows of a norm that the first layer lacks are filled up before."""
    if path[0] != "params" or not arch.dense_layers:
        return range(arch.num_layers)
    return arch.layers_with(".".join(("layers", *path[1:-1])))


def loops_of(arch: Architecture) -> list[Loop]:
    """Loops over all layers, each as long as it can be."""
    kinds = [arch.experts is not None and layer not in arch.dense_layers for layer in range(arch.num_layers)]
    loops, first = [], 0
    while first < len(kinds):
        found = []
        for period in range(1, len(kinds) - first + 1):
            pattern, num_steps = kinds[first:first + period], 1
            while kinds[first + num_steps * period:first + (num_steps + 1) * period] == pattern:
                num_steps += 1
            if num_steps > 1 or period == 1:
                found.append(Loop(first, tuple(pattern), num_steps))
        loops.append(max(found, key=lambda loop: len(loop.kinds) * loop.num_steps))
        first += len(loops[-1].kinds) * loops[-1].num_steps
    return loops


def joined(kept: list[list[Tree | None]]) -> Tree | None:
    """What loops have kept of their layers, a row for each layer in order; layers without anything have none.

    Args:
        kept: For each loop and each layer of its steps, leaves with a row for each step.
    """
    parts = []
    for layers in kept:
        if own := [layer for layer in layers if layer is not None]:
            parts.append(own[0] if len(own) == 1 else jax.tree.map(
                lambda *rows: jnp.stack(rows, 1).reshape(-1, *rows[0].shape[1:]), *own))
    return jax.tree.map(lambda *rows: jnp.concatenate(rows), *parts) if len(parts) > 1 else parts[0] if parts else None
