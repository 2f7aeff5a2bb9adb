"""Preference training: DPO and its relatives."""

from dataclasses import dataclass
from typing import Any, ClassVar, Literal

from lmmods.core.errors import UserError
from lmmods.core.markdown import code
from lmmods.core.preference_losses import GAMMA, PreferenceLoss
from lmmods.core.settings import require
from lmmods.recipe.images import ImageDataFields, ImageFields
from lmmods.recipe.tasks.base import Usual


@dataclass(kw_only=True, eq=False, repr=False)
class PreferenceFields(ImageFields):
    """Train a causal LM to prefer answers to others; predict generates answers.

    Args:
        loss: Loss of a pair: sigmoid (DPO), robust, hinge, ipo, sigmoid_norm, nca_pair, bco_pair, sppo_hard, apo_zero,
            apo_down, exo_pair, or without a reference simpo, orpo, cpo. Of single labelled answers: kto,
            apo_zero_unpaired.
        beta: Weight of changes in log-probability; for ipo, of staying near the reference; for orpo, of the odds ratio.
        label_smoothing: Assumed fraction of pairs with swapped answers (sigmoid, robust, sigmoid_norm, exo_pair, simpo,
            cpo).
        gamma: Margin between the answers in simpo.
        sft_weight: Weight of the chosen answer's negative log-likelihood per token, for each pair. Default: 1 for orpo
            and cpo, as in their papers, otherwise 0.
        desirable_weight: Weight of desirable answers (kto, apo_zero_unpaired).
        undesirable_weight: Weight of undesirable answers.
        reference: Model that answers are compared with: `base` is the model without its adapter, `copy` a frozen copy
            from before the first step, `cache` its log-probabilities, computed once. Default: none for a loss without
            a reference, `base` with `lora`, otherwise `copy`.
    """

    takes: ClassVar[str] = "PreferenceData"
    adapter_has_dropout: ClassVar[bool] = False
    accuracy: ClassVar[str] = "val/rewards/accuracy"
    usual: ClassVar[Usual] = Usual(epochs=1, rows=32, lr=1e-6, small_lr=1e-5, adapter_lr=1e-5,
                                   prompt="Name three fruits.")

    loss: str = "sigmoid"
    beta: float = 0.1
    label_smoothing: float = 0.0
    gamma: float = GAMMA
    sft_weight: float | None = None
    desirable_weight: float = 1.0
    undesirable_weight: float = 1.0
    reference: Literal["base", "copy", "cache"] | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        method = self.preference_loss.method
        require(method.has_reference or self.reference is None, "model.reference", self.reference,
                f"null with the loss {self.loss}, which has no reference", "model.loss")
        require(self.reference != "base" or self.trains_adapter, "model.reference", self.reference,
                "copy or cache (or null) without an adapter", "model.lora", "model.adapter")
        require(self.reference != "base" or self.starts_at_base, "model.reference", self.reference,
                "copy or cache (or null) with lora.init: pissa, whose base alone is not the model",
                "model.lora.init")
        require(self.max_memory is None, "model.max_memory", self.max_memory, "null for preference optimisation")
        require(not self.balance_loss, "model.balance_loss", self.balance_loss, "0 for preference optimisation")

    @classmethod
    def method(cls, settings: dict[str, Any]) -> tuple[list[str], str]:
        loss = settings.get("loss", "sigmoid")
        weight = f", sft_weight {settings['sft_weight']}" if settings.get("sft_weight") else ""
        return (["preference-optimization", loss if loss in ("orpo", "kto", "cpo", "simpo", "ipo") else "dpo"],
                f"Trained on preferences: loss {code(str(loss))}, beta {settings.get('beta', 0.1)}{weight}.")

    @property
    def overrides(self) -> dict[str, Any]:
        """Fields changed in the configuration: no dropout, unless the recipe sets a rate.

        The reference model has no dropout either. Raises UserError for an unknown model.
        """
        return self._without_dropout()

    @property
    def preference_loss(self) -> PreferenceLoss:
        """The loss with its settings. Raises UserError if they cannot be combined."""
        return PreferenceLoss(self.loss, self.beta, self.label_smoothing, self.gamma, self.sft_weight,
                              self.desirable_weight, self.undesirable_weight)

    @property
    def answers(self) -> Literal["pair", "single", "mismatched"]:
        """How the loss treats a row of preferences."""
        method = self.preference_loss.method
        return "pair" if method.is_paired else "mismatched" if method.has_baseline else "single"

    @property
    def reference_kind(self) -> Literal["base", "copy", "cache"] | None:
        """`reference` with its default filled in."""
        if not self.preference_loss.method.has_reference:
            return None
        return self.reference or ("base" if self.lora and self.starts_at_base else "copy")


@dataclass(kw_only=True, eq=False, repr=False)
class PreferenceDataFields(ImageDataFields):
    """Pairs of answers, or single labelled answers; one row of a batch is a pair or an answer.

    Args:
        source: Training rows: file, folder, glob, URL, hub id, a mapping {path, name, split, revision, columns, limit,
            weight, format}, or a list of these. Rows are pairs (chosen, rejected), lists of answers with scores, or
            single labelled answers.
        max_length: Maximum length of a prompt with one of its answers, in tokens. Default: 1024, or the model's limit
            if that is lower.
        batch_size: Pairs per micro-batch and device in training.
    """

    kind: ClassVar[str] = "PreferenceData"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.packing:
            raise UserError("data.packing is not supported for preferences, where the answers of a pair stay together; "
                            "use data.group_by_length to save most of the padding", "data.packing")
