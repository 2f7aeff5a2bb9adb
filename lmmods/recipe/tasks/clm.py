"""Causal language modelling: pretraining and continued pretraining."""

from dataclasses import dataclass
from typing import ClassVar

from lmmods.core.errors import UserError
from lmmods.recipe.tasks.base import CausalFields, TextDataFields, TokenLossFields, Usual


@dataclass(kw_only=True, eq=False, repr=False)
class CLMFields(TokenLossFields, CausalFields):
    """Train a causal LM on text; predict continues texts."""

    takes: ClassVar[str] = "CLMData"
    usual: ClassVar[Usual] = Usual(epochs=1, rows=32, prompt="Once upon a time")

    def __post_init__(self) -> None:
        super().__post_init__()
        self._refuse_on_policy("language modelling")


@dataclass(kw_only=True, eq=False, repr=False)
class CLMDataFields(TextDataFields):
    """Text for causal language modelling.

    Args:
        join: Concatenate documents before splitting them, so that every block but the last is full. Otherwise each
            document fills its own blocks, which are padded or, with `packing`, packed whole. Default: true without
            `packing`.
    """

    kind: ClassVar[str] = "CLMData"

    join: bool | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.join and self.packing:
            raise UserError("data.join and data.packing are both set; keep one of them, as joined blocks are full "
                            "already", "data.join", "data.packing")
