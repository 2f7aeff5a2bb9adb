"""The parameters of a network on the devices."""

from functools import cached_property

from jax_engine.distributed.interface import Parallel
from jax_engine.distributed.tree import Tree, merge


class Weights:
    """Trainable and frozen parameters, trees of kind state."""

    def __init__(self, parallel: Parallel, trainable: Tree, frozen: Tree):
        self._parallel, self.trainable, self.frozen = parallel, trainable, frozen

    @cached_property
    def replica(self) -> Tree:
        """All of them as one network's parameters, for programs outside the steps. All processes must call this."""
        return self._parallel.replica(merge(self.trainable, self.frozen))
