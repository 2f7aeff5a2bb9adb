"""Losses of reinforcement learning, written once for both engines.

Each is a function of single answers, so that its sum does not depend on the batch split.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

from lmmods.core.settings import require

Array = Any  # of the calling engine
LOSSES = ("dapo", "grpo", "dr_grpo", "cispo")
RATIOS = ("token", "sequence")
EPSILON = 0.2
MAX_RATIO = 5.0  # default for cispo; as in ScaleRL (Khatri et al. 2025)


class Operations(Protocol):
    """Element-wise operations of an engine's arrays."""

    exp: Callable[[Array], Array]
    where: Callable[[Array, Array | float, Array | float], Array]
    stop_gradient: Callable[[Array], Array]


@dataclass(frozen=True)
class PolicyLoss:
    """A loss with its settings, see `GRPOFields`. Raises UserError if they are inconsistent.

    With an answer's advantage A and the ratio r of its probabilities now and at sampling, the loss of a token is
    -min(r A, clip(r, 1 - epsilon, 1 + epsilon_high) A) (PPO, Schulman et al. 2017; without a critic: GRPO, Shao et al.
    2024), or -min(r, epsilon_high) A log p, where the ratio has no gradient (CISPO, MiniMax 2025). The divergence
    k3 = exp(d) - d - 1 is added, times `beta`; d is the log-probability under the reference minus log p (Schulman
    2020). With `use_bias_correction_kl` k3 is multiplied by r, so that its gradient is the divergence's (DeepSeek-V3.2,
    2025).

    A step divides the summed losses by the summed weights: by tokens (dapo: Yu et al. 2025; cispo), by answers, each of
    which is the mean over its tokens (grpo), or by answers of `max_new_tokens` tokens (dr_grpo: Liu et al. 2025). Rows
    without tokens, such as padding, have no weight.
    """

    loss: str = "dapo"
    ratio: str = "token"
    epsilon: float = EPSILON
    epsilon_high: float | None = None
    beta: float = 0.0
    use_bias_correction_kl: bool = True
    max_new_tokens: int = 512

    def __post_init__(self) -> None:
        require(self.loss in LOSSES, "model.loss", self.loss, f"one of {', '.join(LOSSES)}")
        require(self.ratio in RATIOS, "model.ratio", self.ratio, f"one of {', '.join(RATIOS)}")
        require(0 <= self.epsilon <= 1, "model.epsilon", self.epsilon, "from 0 to 1")
        if self.loss == "cispo":
            require(self.epsilon == EPSILON, "model.epsilon", self.epsilon,
                    f"{EPSILON} with the loss cispo, which does not use it: set model.epsilon_high", "model.loss")
            require(self.epsilon_high is None or self.epsilon_high > 0, "model.epsilon_high", self.epsilon_high,
                    "null, or more than 0: with the loss cispo it is the maximum ratio",
                    "model.loss")
        require(self.epsilon_high is None or self.epsilon_high >= 0, "model.epsilon_high", self.epsilon_high,
                "null, or 0 or more")
        require(self.beta >= 0, "model.beta", self.beta, "0 or more")
        require(self.beta > 0 or self.use_bias_correction_kl, "model.use_bias_correction_kl",
                self.use_bias_correction_kl, "true with model.beta 0, which has no divergence", "model.beta")
        require(self.max_new_tokens >= 1, "model.max_new_tokens", self.max_new_tokens, "1 or more")

    @property
    def max_ratio(self) -> float:
        """Ratio above which the loss is clipped."""
        if self.loss == "cispo":
            return MAX_RATIO if self.epsilon_high is None else self.epsilon_high
        return 1 + (self.epsilon if self.epsilon_high is None else self.epsilon_high)

    def of_rows(self, ops: Operations, logps: Array, mask: Array, advantages: Array, old: Array | None = None,
                reference: Array | None = None, sampler_weights: Array | None = None,
                row_sums: Callable[[Array], Array] = lambda x: x.sum(-1)
                ) -> tuple[Array, Array, dict[str, tuple[Array, Array]]]:
        """Return summed loss [N] and weight [N] of each answer, and metrics by name: summed value [N] and weight [N].

        `ratio` is the mean ratio; `clip_ratio/low` and `clip_ratio/high` are the fractions that are clipped: below with
        a negative advantage, above with a positive one. They are means over tokens, or over answers if an answer has
        one ratio. `kl` is the divergence of a token as in the loss.

        Args:
            logps: [N, T] float32, log-probability of each token. Other positions are ignored, here and in the arrays
                below.
            mask: [N, T] float32, 1 where the policy sampled the token, else 0.
            advantages: [N] float32.
            old: [N, T] `logps` at sampling; None if the weights are still the same, so that every ratio is 1.
            reference: [N, T] `logps` under the reference; only needed with `beta`.
            sampler_weights: [N, T] factors of the loss without the divergence, if another program sampled the answers.
            row_sums: Sums [N, T] over all tokens of a row, [N]. If each process has a part of the tokens, it sums over
                all processes; the results are this process's parts, and add up.
        """
        def at_tokens(values: Array) -> Array:
            return ops.where(mask > 0, values, 0.0)  # a product with 0 would keep infinities and NaN

        logps, advantages = at_tokens(logps), advantages[:, None]
        tokens, row_tokens = mask.sum(-1), row_sums(mask)
        row_tokens = ops.where(row_tokens > 0, row_tokens, 1.0)
        rows = tokens / row_tokens  # 1 for a row with tokens if all of them are here

        log_ratio = logps - (ops.stop_gradient(logps) if old is None else at_tokens(old))
        if self.ratio == "sequence":  # one ratio per row: geometric mean over its tokens (GSPO, Zheng et al. 2025)
            log_ratio = (row_sums(log_ratio * mask) / row_tokens)[:, None]
        ratio = ops.exp(log_ratio)
        is_high = (ratio > self.max_ratio) & (advantages > 0)
        if self.loss == "cispo":
            is_low = None
            losses = -ops.stop_gradient(ops.where(ratio > self.max_ratio, self.max_ratio, ratio)) * advantages * logps
        else:
            is_low = (ratio < 1 - self.epsilon) & (advantages < 0)
            # This is the minimum of the clipped and the unclipped objective, without ties: their gradients differ
            # between engines.
            clipped = ops.where(is_high, self.max_ratio, ops.where(is_low, 1 - self.epsilon, ratio))
            losses = -clipped * advantages
        if sampler_weights is not None:
            losses = losses * at_tokens(sampler_weights)
        kl = None
        if self.beta:
            difference = at_tokens(reference) - logps
            kl = ops.exp(difference) - difference - 1
            if self.use_bias_correction_kl:
                kl = kl * ratio
            losses = losses + self.beta * kl

        total, weight = (losses * mask).sum(-1), tokens
        if self.loss == "grpo":
            total, weight = total / row_tokens, rows
        elif self.loss == "dr_grpo":
            total, weight = total / self.max_new_tokens, rows

        def sum_rows(values: Array) -> tuple[Array, Array]:
            values = ops.stop_gradient(values)
            return (values[:, 0] * rows, rows) if self.ratio == "sequence" else ((values * mask).sum(-1), tokens)

        metrics = {"ratio": sum_rows(ratio)}
        if is_low is not None:
            metrics["clip_ratio/low"] = sum_rows(ops.where(is_low, 1.0, 0.0))
        metrics["clip_ratio/high"] = sum_rows(ops.where(is_high, 1.0, 0.0))
        if kl is not None:
            metrics["kl"] = ((ops.stop_gradient(kl) * mask).sum(-1), tokens)
        return total, weight, metrics

    def weight_of(self, num_tokens: Array) -> Array:
        """Return the weight of answers with this many tokens, as `of_rows` does."""
        return num_tokens if self.loss in ("dapo", "cispo") else num_tokens > 0

    @property
    def metric_names(self) -> tuple[str, ...]:
        """Names of the metrics, in order."""
        return ("ratio", *([] if self.loss == "cispo" else ["clip_ratio/low"]), "clip_ratio/high",
                *(["kl"] if self.beta else []))
