"""Losses of preference optimisation, written once for both engines.

Each is a function of single pairs, or of single answers, so that its sum does not depend on the batch split. A score is
the log-probability of an answer, minus its log-probability under the reference model if the method has one, divided by
the number of its tokens if the method is per token.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

from lmmods.core.errors import UserError
from lmmods.core.settings import require

Array = Any  # of the calling engine
GAMMA = 0.5
MIN_NEGATIVE_LOGP = 1e-7  # negative log-probability per token below which odds are infinite in float32
TIE = 2.0**-17  # 64 roundings of float32: relative difference of two scores in a tie


class Operations(Protocol):
    """Element-wise operations of an engine's arrays."""

    log_sigmoid: Callable[[Array], Array]
    sigmoid: Callable[[Array], Array]
    relu: Callable[[Array], Array]
    log: Callable[[Array], Array]
    expm1: Callable[[Array], Array]
    where: Callable[[Array, Array | float, Array], Array]


PairFormula = Callable[[Operations, "PreferenceLoss", Array, Array], Array]


@dataclass(frozen=True)
class Method:
    """A loss by name.

    Args:
        formula: Loss [B] of the scores [B] of the chosen and of the rejected answer; None if answers are judged one by
            one.
        has_reference: True if scores are relative to a reference model.
        per_token: True if scores are divided by the number of tokens.
        sft_weight: Weight of the chosen answer's negative log-likelihood per token, unless a recipe sets it.
        smooths: True if it uses `label_smoothing`.
        has_baseline: True if it is relative to an estimate of the divergence from the reference.
    """

    formula: PairFormula | None
    has_reference: bool = True
    per_token: bool = False
    sft_weight: float = 0.0
    smooths: bool = False
    has_baseline: bool = False

    @property
    def is_paired(self) -> bool:
        """True if a row is a pair."""
        return self.formula is not None


def _smooth(ops: Operations, s: "PreferenceLoss", logits: Array) -> Array:
    """Return the cross-entropy if the labels are wrong with probability `label_smoothing`."""
    return -(1 - s.label_smoothing) * ops.log_sigmoid(logits) - s.label_smoothing * ops.log_sigmoid(-logits)


def _sigmoid(ops: Operations, s: "PreferenceLoss", chosen: Array, rejected: Array) -> Array:
    return _smooth(ops, s, s.beta * (chosen - rejected))


def _robust(ops: Operations, s: "PreferenceLoss", chosen: Array, rejected: Array) -> Array:
    logits = s.beta * (chosen - rejected)
    clean, flipped = -ops.log_sigmoid(logits), -ops.log_sigmoid(-logits)
    # Unbiased estimate of the loss with clean labels if each is flipped with probability `label_smoothing`.
    return ((1 - s.label_smoothing) * clean - s.label_smoothing * flipped) / (1 - 2 * s.label_smoothing)


def _hinge(ops: Operations, s: "PreferenceLoss", chosen: Array, rejected: Array) -> Array:
    return ops.relu(1 - s.beta * (chosen - rejected))


def _ipo(ops: Operations, s: "PreferenceLoss", chosen: Array, rejected: Array) -> Array:
    # A regression to a fixed margin: unlike a sigmoid, it stops pushing once the margin is reached.
    return (chosen - rejected - 1 / (2 * s.beta)) ** 2


def _nca_pair(ops: Operations, s: "PreferenceLoss", chosen: Array, rejected: Array) -> Array:
    # The chosen answer is in both classes: its score is bounded from above, too, not only the difference.
    return (-ops.log_sigmoid(s.beta * chosen) - 0.5 * ops.log_sigmoid(-s.beta * chosen)
            - 0.5 * ops.log_sigmoid(-s.beta * rejected))


def _bco_pair(ops: Operations, s: "PreferenceLoss", chosen: Array, rejected: Array) -> Array:
    # A binary classifier of single answers: chosen is 1, rejected is 0.
    return -ops.log_sigmoid(s.beta * chosen) - ops.log_sigmoid(-s.beta * rejected)


def _sppo_hard(ops: Operations, s: "PreferenceLoss", chosen: Array, rejected: Array) -> Array:
    # Regress the scores to +1 / (2 beta) and -1 / (2 beta).
    return (chosen - 0.5 / s.beta) ** 2 + (rejected + 0.5 / s.beta) ** 2


def _apo_zero(ops: Operations, s: "PreferenceLoss", chosen: Array, rejected: Array) -> Array:
    # Makes the chosen answer more likely and the rejected one less.
    return ops.sigmoid(-s.beta * chosen) + ops.sigmoid(s.beta * rejected)


def _apo_down(ops: Operations, s: "PreferenceLoss", chosen: Array, rejected: Array) -> Array:
    # Makes both answers less likely, the rejected one more so: for chosen answers worse than the model's own.
    return ops.sigmoid(s.beta * chosen) + ops.sigmoid(-s.beta * (chosen - rejected))


def _exo_pair(ops: Operations, s: "PreferenceLoss", chosen: Array, rejected: Array) -> Array:
    """Return the KL divergence of the model's preference from the smoothed label."""
    # The label is (1 - smoothing, smoothing); `smoothing` is above 0, or the divergence would be infinite.
    logits, smoothing = s.beta * (chosen - rejected), s.label_smoothing
    return (ops.sigmoid(logits) * (ops.log_sigmoid(logits) - math.log1p(-smoothing))
            + ops.sigmoid(-logits) * (ops.log_sigmoid(-logits) - math.log(smoothing)))


def _simpo(ops: Operations, s: "PreferenceLoss", chosen: Array, rejected: Array) -> Array:
    return _smooth(ops, s, s.beta * (chosen - rejected) - s.gamma)


def _orpo(ops: Operations, s: "PreferenceLoss", chosen: Array, rejected: Array) -> Array:
    return -s.beta * ops.log_sigmoid(_log_odds(ops, chosen) - _log_odds(ops, rejected))


def _log_odds(ops: Operations, score: Array) -> Array:
    """Return log(p / (1 - p)) for p = exp(score)."""
    # At p = 1 the odds are infinite; clamp before the logarithm, so that gradients stay finite, too. NaN is not
    # greater, so it stays NaN, which ends the run.
    score = ops.where(score > -MIN_NEGATIVE_LOGP, -MIN_NEGATIVE_LOGP, score)
    # -expm1(score) is 1 - p without cancellation for p near 1.
    return score - ops.log(-ops.expm1(score))


METHODS: dict[str, Method] = {
    "sigmoid": Method(_sigmoid, smooths=True),  # DPO, Rafailov et al. 2023; smoothed: cDPO, Mitchell 2023
    "robust": Method(_robust, smooths=True),  # Chowdhury et al. 2024
    "hinge": Method(_hinge),  # SLiC, Zhao et al. 2023
    "ipo": Method(_ipo, per_token=True),  # Azar et al. 2023; per token, as its authors intended
    "sigmoid_norm": Method(_sigmoid, per_token=True, smooths=True),  # DPO per token, Lambert et al. 2024 (Tülu 3)
    "nca_pair": Method(_nca_pair),  # Chen et al. 2024
    "bco_pair": Method(_bco_pair),  # Jung et al. 2024, without the running mean of rewards
    "sppo_hard": Method(_sppo_hard),  # Wu et al. 2024
    "apo_zero": Method(_apo_zero),  # D'Oosterlinck et al. 2024
    "apo_down": Method(_apo_down),  # the same
    "exo_pair": Method(_exo_pair, smooths=True),  # Ji et al. 2024
    "simpo": Method(_simpo, has_reference=False, per_token=True, smooths=True),  # Meng et al. 2024
    "orpo": Method(_orpo, has_reference=False, per_token=True, sft_weight=1.0),  # Hong et al. 2024; beta is its lambda
    "cpo": Method(_sigmoid, has_reference=False, sft_weight=1.0, smooths=True),  # Xu et al. 2024
    "kto": Method(None, has_baseline=True),  # Ethayarajh et al. 2024
    "apo_zero_unpaired": Method(None),  # D'Oosterlinck et al. 2024
}
_SORTS = "it sorts the scores of a micro-batch, so its gradient depends on the batch split"
UNSUPPORTED = {
    "aot": _SORTS, "aot_pair": _SORTS, "aot_unpaired": _SORTS,
    "bco": "it needs a running mean of rewards; bco_pair is the form without",
    "discopop": "it is not supported; sigmoid is the closest",
    "sft": "here it is a term added to a loss: set model.sft_weight",
    "dpo": "its name here is sigmoid",
    "rpo": "it is sigmoid with model.sft_weight above 0",
}


@dataclass(frozen=True)
class PreferenceLoss:
    """A loss with its settings, see `PreferenceFields`. Raises UserError if they are inconsistent."""

    loss: str = "sigmoid"
    beta: float = 0.1
    label_smoothing: float = 0.0
    gamma: float = GAMMA
    sft_weight: float | None = None
    desirable_weight: float = 1.0
    undesirable_weight: float = 1.0

    def __post_init__(self) -> None:
        if self.loss in UNSUPPORTED:
            raise UserError(f"model.loss {self.loss}: {UNSUPPORTED[self.loss]}.", "model.loss")
        require(self.loss in METHODS, "model.loss", self.loss, f"one of {', '.join(METHODS)}")
        method = self.method
        require(self.beta > 0, "model.beta", self.beta, "more than 0")
        require(0 <= self.label_smoothing < 0.5, "model.label_smoothing", self.label_smoothing, "from 0 to below 0.5")
        require(method.smooths or not self.label_smoothing, "model.label_smoothing", self.label_smoothing,
                f"0 with the loss {self.loss}, which does not use it", "model.loss")
        require(self.loss != "exo_pair" or self.label_smoothing > 0, "model.label_smoothing", self.label_smoothing,
                "more than 0 with the loss exo_pair (1.0e-3 is usual)", "model.loss")
        require(self.loss == "simpo" or self.gamma == GAMMA, "model.gamma", self.gamma,
                f"{GAMMA} unless the loss is simpo, the only one that uses it", "model.loss")
        require(self.sft_weight is None or self.sft_weight >= 0, "model.sft_weight", self.sft_weight, "0 or more")
        require(method.is_paired or not self.sft_weight, "model.sft_weight", self.sft_weight,
                f"0 with the loss {self.loss}, whose rows are not pairs", "model.loss")
        for name in ("desirable_weight", "undesirable_weight"):
            value = getattr(self, name)
            require(value >= 0, f"model.{name}", value, "0 or more")
            require(not method.is_paired or value == 1, f"model.{name}", value,
                    f"1 with the loss {self.loss}, whose rows are pairs", "model.loss")

    @property
    def method(self) -> Method:
        """The properties of the loss."""
        return METHODS[self.loss]

    def of_pairs(self, ops: Operations, logps: Array, lengths: Array, reference: Array | None
                 ) -> tuple[Array, dict[str, tuple[Array, Array]]]:
        """Return the loss [B] of each pair, and metrics by name: value [B], and weight [B] of the pair in it.

        `rewards/accuracy` is 1 if the chosen answer has the higher score, 0 if it has the lower one, and 1/2 in a tie:
        a margin of at most `TIE` times the log-probabilities that it is a difference of. The sign of such a margin is
        due to rounding, for example as long as the policy equals the reference.

        Args:
            logps: [B, 2] float32, summed log-probability of the tokens of the chosen and of the rejected answer.
            lengths: [B, 2], the number of these tokens.
            reference: [B, 2], `logps` under the reference model; None for a method without one.
        """
        # Padding rows have no tokens: 0 / 0 would be NaN, which a weight of 0 does not remove.
        lengths = ops.where(lengths > 0, lengths, 1)
        scores = logps if reference is None else logps - reference
        # Rounding errors of a score are relative to the numbers subtracted, not to the difference.
        sizes = abs(logps) if reference is None else abs(logps) + abs(reference)
        if self.method.per_token:
            scores, sizes = scores / lengths, sizes / lengths
        chosen, rejected = scores[:, 0], scores[:, 1]
        assert self.method.formula is not None
        losses = self.method.formula(ops, self, chosen, rejected)
        sft_weight = self.method.sft_weight if self.sft_weight is None else self.sft_weight
        if sft_weight:
            losses = losses - sft_weight * logps[:, 0] / lengths[:, 0]
        ones = chosen * 0 + 1  # ones [B] of the engine's array type
        margin, tie = chosen - rejected, TIE * (sizes[:, 0] + sizes[:, 1])
        values = {"rewards/chosen": self.beta * chosen, "rewards/rejected": self.beta * rejected,
                  "rewards/margin": self.beta * margin,
                  "rewards/accuracy": ops.where(margin > tie, ones, ops.where(margin < -tie, 0 * ones, ones / 2)),
                  "logps/chosen": logps[:, 0], "logps/rejected": logps[:, 1]}
        return losses, {name: (value, ones) for name, value in values.items()}

    def of_answers(self, ops: Operations, logps: Array, desirable: Array, reference: Array, baseline: Array | float
                   ) -> tuple[Array, dict[str, tuple[Array, Array]]]:
        """Return the loss [B] of each answer, and metrics as in `of_pairs`.

        Args:
            logps: [B] float32, summed log-probability of the tokens of the answer.
            desirable: [B] bool, True for desirable answers.
            reference: [B], `logps` under the reference model.
            baseline: Estimated divergence from the reference, without gradient and the same for all rows of a step, or
                of an evaluated set; 0 for a method without.
        """
        scores = logps - reference
        logits = self.beta * (scores - baseline)
        # Relative to the baseline, the loss 1 - sigmoid(x) = sigmoid(-x) falls with the score of a desirable answer.
        losses = ops.where(desirable, self.desirable_weight * ops.sigmoid(-logits),
                           self.undesirable_weight * ops.sigmoid(logits))
        ones = scores * 0 + 1
        # As weights, these restrict a metric to desirable or undesirable answers.
        weight = ops.where(desirable, ones, 0.0)
        metrics = {"rewards/chosen": (self.beta * scores, weight), "rewards/rejected": (self.beta * scores, 1 - weight),
                   "logps/chosen": (logps, weight), "logps/rejected": (logps, 1 - weight)}
        if self.method.has_baseline:
            metrics["kl"] = (ones * baseline, ones)
        return losses, metrics

    @property
    def metric_names(self) -> tuple[str, ...]:
        """Names of the metrics, in order."""
        if self.method.is_paired:
            return ("rewards/chosen", "rewards/rejected", "rewards/margin", "rewards/accuracy", "logps/chosen",
                    "logps/rejected")
        return ("rewards/chosen", "rewards/rejected", "logps/chosen", "logps/rejected",
                *(["kl"] if self.method.has_baseline else []))
