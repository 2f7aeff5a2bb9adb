"""The reference model of preference optimisation and reinforcement learning: a network that does not train.

It exists in addition to the network in training and shares its frozen parameters. Trainable parameters are either
omitted (adapters switched off) or copied into the tree of frozen parameters under a separate key.
"""

import dataclasses
from typing import Literal

import jax
import numpy as np
from jax import Array

from jax_engine.distributed.tree import Tree, flatten, unflatten
from jax_engine.models.building import build_network
from jax_engine.models.network import Network
from jax_engine.tasks.causal_task import CausalTask
from lmmods.core.hardware import Target
from lmmods.data.base import DataModule

COPIES = "reference"  # key of the copies in the tree of frozen parameters


class Reference:
    """The reference model, a fixed network.

    Args:
        network: The network in training.
        kind: `base` is this network with its adapter switched off; `copy` is the network at the start of training.
    """

    def __init__(self, network: Network, kind: Literal["base", "copy"]):
        self.kind, self.network = kind, network
        if kind == "base":
            build = dataclasses.replace(network.build, lora=None, adapted=frozenset())
            self.network = Network(network.config, network.family, network.arch, network.head, build, network.to_save,
                                   unroll=network.unroll)
        self._paths = flatten(self.network.shapes).keys()

    def copies(self, trainable: Tree, base: Tree) -> Tree:
        """Return the tree to add to the frozen parameters, on the host; empty if everything is shared.

        Args:
            trainable: Initial trainable parameters, with whole stacks of layers.
            base: Base weights of the modules that are fully trained in addition to an adapter.
        """
        # Copy, because the trainable parameters' buffers are donated to the first step.
        copied = jax.tree.map(lambda leaf: leaf.copy() if isinstance(leaf, np.ndarray) else leaf,
                              base if self.kind == "base" else trainable)
        return {COPIES: copied} if copied else {}

    def hidden(self, params: Tree, rows: dict[str, Array]) -> Array:
        """Return `Network.hidden` without dropout or gradient, for the parameters of the network in training."""
        return jax.lax.stop_gradient(self.network.hidden(self._reference_params(params), rows))

    def logits(self, params: Tree, hidden: Array) -> Array:
        """Return `Network.logits` for the parameters of the network in training."""
        return self.network.logits(self._reference_params(params), hidden)

    def _reference_params(self, params: Tree) -> Tree:
        leaves = flatten(params)
        # The copy if it exists, otherwise the parameter that both networks share.
        merged = {path: leaves.get((COPIES, *path), leaves.get(path)) for path in self._paths}
        return jax.lax.stop_gradient(unflatten(merged))


def without_copies(frozen: Tree) -> Tree:
    """Return the frozen parameters of the network in training."""
    return {name: part for name, part in frozen.items() if name != COPIES}


class ReferencedTask(CausalTask):
    """Abstract causal LM task that may use a reference."""

    reference_kind: str | None  # a property of the task's fields

    def __post_init__(self) -> None:
        super().__post_init__()
        self._reference: Reference | None = None

    def build(self, precision: str, datamodule: DataModule, seed: int, abstract: bool = False, on: Target | None = None
              ) -> tuple[Tree, Tree]:
        self.built_for = on
        return self.adopt_network(*build_network(self, self.head, datamodule, precision=precision, seed=seed,
                                                 abstract=abstract, on=on))

    def adopt_network(self, network: Network, params: Tree, base: Tree) -> tuple[Tree, Tree]:
        """Adopt a network and create its reference. Arguments as from `build_network`, result as from `build`."""
        self.network = network
        trainable, frozen = network.split(params)
        if self.reference_kind in ("base", "copy"):
            self._reference = Reference(network, self.reference_kind)
            whole = unflatten({path: leaf for path, leaf in flatten(params).items() if network.trains(path)})
            frozen |= self._reference.copies(whole, base)
        return trainable, frozen

    # The reference's copies do not count as the model's parameters.

    def describe(self, trainable: Tree, frozen: Tree) -> str:
        return super().describe(trainable, without_copies(frozen))

    def flops_per_token(self, trainable: Tree, frozen: Tree) -> int:
        return super().flops_per_token(trainable, without_copies(frozen))
