"""Mixtures of experts: how tokens are routed, and the loss that spreads them evenly."""

import inspect

import torch
from torch import Tensor, nn

from lmmods.core.experts import Mixture, mixture_of
from lmmods.torch_engine.nn.loss import LossSums


def routed_mixture(model: nn.Module) -> Mixture | None:
    """The mixture of experts of a network, also wrapped by PEFT, that tells its router's logits."""
    base = model.get_base_model() if hasattr(model, "get_base_model") else model
    tells = "output_router_logits" in inspect.signature(type(base).forward).parameters
    return mixture_of(model.config) if tells else None


def with_load(sums: LossSums, router_logits: tuple[Tensor, ...], mixture: Mixture, real: Tensor, row_weights: Tensor,
              coefficient: float) -> LossSums:
    """The sums with the balance loss of each row (DeepSeek-V3's sequence-wise form), and `core.experts.METRICS`.

    Within a row and layer that is E sum_e f_e P_e, with f_e the number of choices of expert e per token and P_e its
    mean probability; its mean over layers counts as often as the row has scored tokens.

    Args:
        router_logits: Of each layer [B * T, E].
        real: [B, T] which tokens are no padding.
        row_weights: [B] the part of `sums.weight` that is each row's.
        coefficient: Of the balance loss.
    """
    real, layers = real.float(), []
    num_tokens = real.sum(1, keepdim=True).clamp(min=1)
    for logits in router_logits:
        probabilities = logits.float().softmax(-1).view(*real.shape, -1)
        chosen = probabilities.detach().topk(mixture.per_token, -1).indices
        taken = torch.zeros_like(probabilities).scatter_(-1, chosen, 1.0)
        counts, means = (torch.einsum("bte,bt->be", x, real) / num_tokens for x in (taken, probabilities))
        even = counts * (mixture.num / mixture.per_token)
        layers.append(torch.stack([mixture.num * (counts * means).sum(-1), even.amax(-1), even.amin(-1)]))
    by_row = torch.stack(layers).mean(0)  # [3, B]
    summed = by_row @ row_weights.to(by_row)
    metrics = torch.stack([summed.detach(), row_weights.sum().to(summed).expand(3)], 1)
    return sums._replace(total=sums.total + coefficient * summed[0], metrics=metrics)
