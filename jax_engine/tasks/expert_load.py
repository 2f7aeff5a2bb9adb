"""What a task with experts adds to its sums in training: the balance loss and the load."""

import jax.numpy as jnp
from jax import Array

from jax_engine.distributed.loss import LossSums
from jax_engine.models.experts import Load
from lmmods.core.experts import METRICS


def with_load(sums: LossSums, load: Load, row_weights: Array, coefficient: float) -> LossSums:
    """The sums with the balance loss of each row (DeepSeek-V3's sequence-wise form), and `core.experts.METRICS`.

    Within a row and layer that is E sum_e f_e P_e, with f_e the number of choices of expert e per token and P_e its
    mean probability; its mean over layers counts as often as the row has scored tokens.

    Args:
        load: Of each layer, [L, B, ...].
        row_weights: [B] the part of `sums.weight` that is each row's.
        coefficient: Of the balance loss.
    """
    num_experts = load.counts.shape[-1]
    num_tokens = jnp.maximum(load.num_tokens, 1)[..., None]
    chosen = load.counts / num_tokens
    balance = num_experts * (chosen * load.probabilities / num_tokens).sum(-1).mean(0)
    even = load.counts / jnp.maximum(load.counts.mean(-1, keepdims=True), 1 / num_experts)
    by_row = (balance, even.max(-1).mean(0), even.min(-1).mean(0))
    metrics = {name: jnp.stack([(row_weights * value).sum(), row_weights.sum()])
               for name, value in zip(METRICS, by_row, strict=True)}
    return sums._replace(total=sums.total + coefficient * (row_weights * balance).sum(), metrics=metrics)
