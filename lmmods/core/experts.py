"""Mixtures of experts on both engines: their sizes in a configuration, reported metrics, and checks of keys."""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from lmmods.core.console import say
from lmmods.core.errors import UserError

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

# Means over rows, weighted by target tokens: the balance loss before its weight, and the load of a row's most and least
# used experts, as multiples of an even load.
METRICS = ("experts/balance", "experts/max_load", "experts/min_load")
_INSTEAD = ("Transformers' loss multiplies two means over a micro-batch, so it depends on the batch split. "
            "model.balance_loss does so row by row, which does not.")


@dataclass(frozen=True)
class Mixture:
    """Sizes of a mixture of experts.

    Args:
        num: Number of experts.
        per_token: Number of experts used by a token.
        has_mlp: True if layers with experts also have an MLP.
    """

    num: int
    per_token: int
    has_mlp: bool = False

    @property
    def fraction(self) -> float:
        """Fraction of the experts used by a token."""
        return self.per_token / self.num


def mixture_of(config: "PreTrainedConfig") -> Mixture | None:
    """Return the mixture in a transformers configuration, if it has one."""
    # In a model with several parts (text and images), the language model has the experts.
    text = config.get_text_config()
    # Mixtral and gpt-oss use the first name, Qwen and OLMoE the second.
    num: Any = getattr(text, "num_local_experts", None) or getattr(text, "num_experts", None)
    per_token = getattr(text, "num_experts_per_tok", None)
    if getattr(text, "enable_moe_block", False):  # Gemma 4, whose dense models may have these numbers too
        return Mixture(num, text.top_k_experts, has_mlp=True)
    return Mixture(num, per_token) if num and per_token else None


def note_quantized(config: "PreTrainedConfig", quantize: str | None, in_files: bool) -> None:
    """Report that a quantised base has experts that are not quantised.

    Args:
        in_files: True if the files of the base are quantised.
    """
    if mixture_of(config) is not None and (in_files or quantize == "int8"):
        say(f"model.{'pretrained' if in_files else 'quantize'}: experts are not stored in {quantize}: "
            + ("the files have them unquantised." if in_files else "set nf4 or fp4 to quantise them."))


def check_balance(config: "PreTrainedConfig", balance_loss: float, routes: bool) -> None:
    """Raise UserError if there is nothing to balance; report a model that asks for transformers' own loss.

    Args:
        routes: True if the model exposes how it routes tokens.
    """
    if balance_loss and not routes:
        raise UserError(f"model.balance_loss is {balance_loss}, but {config.model_type} has no experts whose router it "
                        "could reach. Set it to 0.")
    if getattr(config, "output_router_logits", False) and not balance_loss:
        say("Experts: config.json sets transformers' balance loss (output_router_logits), which is ignored here. "
            f"{_INSTEAD}")


def check_overrides(fields: dict[str, Any]) -> None:
    """Raise UserError if overridden fields of a configuration ask for transformers' balance loss."""
    for name in ("output_router_logits", "router_aux_loss_coef"):
        if fields.get(name):
            raise UserError(f"model.config: {name} is {fields[name]}, which sets transformers' own balance loss. "
                            f"{_INSTEAD} Remove it and set model.balance_loss.", "model.config",
                            "model.config_overrides")
