"""Masked language modelling."""

from dataclasses import dataclass
from typing import ClassVar

from lmmods.core.errors import UserError, refuse_value
from lmmods.core.settings import require
from lmmods.recipe.tasks.base import TextDataFields, TokenLossFields, Usual


@dataclass(kw_only=True, eq=False, repr=False)
class MLMFields(TokenLossFields):
    """Train a masked LM; predict fills the gaps.

    Args:
        top_k: Number of candidates per gap in predict.
    """

    takes: ClassVar[str] = "MLMData"
    auto_class: ClassVar[str] = "AutoModelForMaskedLM"
    pipeline_tag: ClassVar[str] = "fill-mask"
    may_change: ClassVar[tuple[str, ...]] = ("top_k",)
    # Encoders of any size are tuned at 2e-5 to 5e-5 (Devlin et al., 2019, appendix A.3).
    usual: ClassVar[Usual] = Usual(rows=32, lr=5e-5, small_lr=5e-5)

    top_k: int = 5

    def __post_init__(self) -> None:
        super().__post_init__()
        require(self.top_k >= 1, "model.top_k", self.top_k, "1 or more")
        require(self.max_memory is None, "model.max_memory", self.max_memory, "null for masked LMs")
        require(self.teacher is None or self.teacher.top_k is None, "model.teacher.top_k",
                self.teacher and self.teacher.top_k, "null for masked LMs, whose masks change in each epoch")
        self._refuse_on_policy("masked LMs")


@dataclass(kw_only=True, eq=False, repr=False)
class MLMDataFields(TextDataFields):
    """Text for masked language modelling.

    Args:
        join: Concatenate documents before splitting them, with a separator. Otherwise each document fills separate
            rows.
        mlm_probability: Fraction of tokens to predict; 80 % of these are masked, 10 % replaced by others and 10 % kept.
        whole_word_masking: Mask whole words instead of tokens.
    """

    kind: ClassVar[str] = "MLMData"
    block: ClassVar[int] = 512

    join: bool = True
    mlm_probability: float = 0.15
    whole_word_masking: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.packing:
            raise UserError("data.packing is not supported for masked language modelling; use data.join to fill rows",
                            "data.packing")
        if not 0 < self.mlm_probability < 1:
            refuse_value(f"data.mlm_probability is {self.mlm_probability}, but must be between 0 and 1.",
                         "data.mlm_probability")
