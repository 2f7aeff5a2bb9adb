"""Mixtures of experts on both engines: what a configuration says of them, what a run reports, which keys do not fit."""

from dataclasses import dataclass
from typing import Any

from lmmods.core.console import say
from lmmods.core.errors import UserError

# Means over rows, each counted by its scored tokens: the balance loss before its weight, and how often the experts that
# a row takes most and least are taken, as multiples of an even share.
METRICS = ("experts/balance", "experts/max_load", "experts/min_load")
_INSTEAD = ("Transformers' loss multiplies two means over a micro-batch, so it depends on how rows are cut into "
            "micro-batches. model.balance_loss does so row by row, which is the same under any cut.")


@dataclass(frozen=True)
class Mixture:
    """Sizes of a mixture of experts.

    Args:
        per_token: Experts that a token takes.
    """

    num: int
    per_token: int

    @property
    def share(self) -> float:
        """Of the experts, those that a token takes."""
        return self.per_token / self.num


def mixture_of(config: Any) -> Mixture | None:
    """That of a configuration of transformers, if it has one."""
    text = config.get_text_config()
    num = getattr(text, "num_local_experts", None) or getattr(text, "num_experts", None)
    per_token = getattr(text, "num_experts_per_tok", None)
    return Mixture(num, per_token) if num and per_token else None


def note_quantized(config: Any, quantize: str | None, in_files: bool) -> None:
    """Say that a quantised base has experts that are not.

    Args:
        in_files: Whether its files are quantised already.
    """
    if mixture_of(config) is not None and (in_files or quantize == "int8"):
        say(f"model.{'pretrained' if in_files else 'quantize'}: experts are not stored in {quantize}: "
            + ("the files have them in full." if in_files else "set nf4 or fp4 for that."))


def check_balance(config: Any, balance_loss: float, routes: bool) -> None:
    """Raise UserError where there is nothing to balance; say so where a model brings transformers' own loss.

    Args:
        routes: Whether the network tells how it routes tokens.
    """
    if balance_loss and not routes:
        raise UserError(f"model.balance_loss is {balance_loss}, but {config.model_type} has no experts whose router it "
                        "could reach: set it to 0.")
    if getattr(config, "output_router_logits", False) and not balance_loss:
        say(f"Experts: config.json asks for a loss that balances them (output_router_logits). {_INSTEAD} It is off.")


def check_overrides(fields: dict[str, Any]) -> None:
    """Raise UserError where the fields that a recipe gives a configuration ask for transformers' balance loss."""
    for name in ("output_router_logits", "router_aux_loss_coef"):
        if fields.get(name):
            raise UserError(f"model.config: {name} is {fields[name]}, which asks for transformers' own balance loss. "
                            f"{_INSTEAD} Take it out and set that.")
