"""The teacher of distillation on JAX: a frozen network beside the one in training, with parameters of its own."""

from collections.abc import Callable
from typing import Any

import jax
from jax import Array

from jax_engine.distributed.loss import beside_teacher
from jax_engine.distributed.tree import Tree
from jax_engine.models.architecture import Head
from jax_engine.models.building import build_network
from jax_engine.models.network import Network
from lmmods.core.hardware import Target
from lmmods.data.teacher import check_teacher
from lmmods.recipe.tasks.base import TokenLossFields

TEACHER = "teacher"  # key of its parameters in the tree of frozen ones


class Guide:
    """The network of `model.teacher`."""

    def __init__(self, network: Network):
        self.network = network

    @classmethod
    def build(cls, fields: TokenLossFields, head: Head, datamodule: Any, precision: str, seed: int, abstract: bool,
              on: Target | None) -> tuple["Guide", Tree]:
        """Return a task's teacher, and what to add to the frozen parameters, on the host.

        Args:
            fields: The task's; the other arguments are those of `build_network`.

        Raises:
            UserError: The teacher cannot be built, or has another vocabulary than the data.
        """
        check_teacher(fields.teacher, datamodule.tokenizer)
        network, params, _ = build_network(fields.teacher_fields, head, datamodule, precision=precision, seed=seed,
                                           frozen=True, abstract=abstract, on=on)
        return cls(network), {TEACHER: params}

    def beside(self, params: Tree, rows: dict[str, Array], hidden: Array, head: Callable[[Array], Array]
               ) -> tuple[Array, Callable[[Array], tuple[Array, Array]]]:
        """Join the student's hidden states and head with those of the teacher, see `beside_teacher`.

        Args:
            params: Those of the network in training, with the teacher's among them.
        """
        own = jax.lax.stop_gradient(params[TEACHER])
        return beside_teacher(hidden, head, self.network.hidden(own, rows), lambda x: self.network.logits(own, x))


def without_teacher(frozen: Tree) -> Tree:
    """Return the frozen parameters of the network in training."""
    return {name: part for name, part in frozen.items() if name != TEACHER}
