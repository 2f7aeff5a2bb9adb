"""The reference of preference optimisation: the network as it was before training, beside the one in training.

What does not train is shared. What does is either left out (adapters switched off) or kept as a copy, which lies in the
tree of frozen parameters under a name of its own.
"""

import dataclasses
from typing import Literal

import jax
import numpy as np
from jax import Array

from jax_engine.distributed.tree import Tree, flatten, unflatten
from jax_engine.models.network import Network

COPIES = "reference"  # of the leaves under it, in the tree of frozen parameters


class Reference:
    """A network that does not train beside one that does.

    Args:
        network: The one that trains.
        kind: `base` is this network with its adapter switched off; `copy` is as it was when training started.
    """

    def __init__(self, network: Network, kind: Literal["base", "copy"]):
        self.kind, self.network = kind, network
        if kind == "base":
            build = dataclasses.replace(network.build, lora=None, adapted=frozenset())
            self.network = Network(network.config, network.family, network.arch, network.head, build, network.to_save,
                                   unroll=network.unroll)
        self._paths = flatten(self.network.shapes).keys()

    def copies(self, trainable: Tree, base: Tree) -> Tree:
        """What to add to the frozen parameters, on the host; empty where everything is shared.

        Args:
            trainable: First values of what trains.
            base: The base's values of what an adapter trains in full.
        """
        # arrays of their own, as the first step takes the memory of those that train
        kept = jax.tree.map(lambda leaf: leaf.copy() if isinstance(leaf, np.ndarray) else leaf,
                            base if self.kind == "base" else trainable)
        return {COPIES: kept} if kept else {}

    def hidden(self, params: Tree, rows: dict[str, Array]) -> Array:
        """As `Network.hidden`, without dropout and without a gradient; `params` are those of the one in training."""
        return jax.lax.stop_gradient(self.network.hidden(self._own(params), rows))

    def logits(self, params: Tree, hidden: Array) -> Array:
        """As `Network.logits`."""
        return self.network.logits(self._own(params), hidden)

    def _own(self, params: Tree) -> Tree:
        leaves = flatten(params)
        own = {path: leaves.get((COPIES, *path), leaves.get(path)) for path in self._paths}
        return jax.lax.stop_gradient(unflatten(own))
