"""Causal language modelling: from scratch, full or with adapters."""

from typing import Any

import torch
from torch import Tensor, nn

from lmmods.errors import UserError
from lmmods.modules.base import TaskModule
from lmmods.modules.causal import CausalHead, causal_loss
from lmmods.modules.loading import load_config
from lmmods.modules.loss import LossSums


class CLM(TaskModule):
    """Train a causal LM on text.

    Args:
        config: Start from random weights: `{model_type: llama, hidden_size: 256, ...}`, or the folder or hub id of a
            configuration. The vocabulary size defaults to the tokenizer's.
        config_overrides: Fields changed in the configuration that `config` names.
    """

    auto_class = "AutoModelForCausalLM"
    task_type = "CAUSAL_LM"

    def __init__(self, config: str | dict[str, Any] | None = None, config_overrides: dict[str, Any] | None = None,
                 **kwargs):
        super().__init__(**kwargs)
        if (config is None) == (self.pretrained is None):
            raise UserError("model.pretrained and model.config exclude each other: name a model to start from, or a "
                            "configuration to start from random weights.")
        self.config, self.config_overrides = config, config_overrides or {}
        self.head: CausalHead | None = None

    def load_base(self, precision: str) -> nn.Module:
        if self.config is None:
            return super().load_base(precision)
        from transformers import AutoModelForCausalLM

        dtype = torch.bfloat16 if precision == "bf16-true" else torch.float32
        return AutoModelForCausalLM.from_config(self._scratch_config(), dtype=dtype,
                                                attn_implementation=self.attention,
                                                trust_remote_code=self.trust_remote_code)

    def _scratch_config(self):
        """Configuration of a model with random weights. Raises UserError for an unknown type or field."""
        from transformers import CONFIG_MAPPING

        if isinstance(self.config, str):
            config = load_config(self.config, self.revision, self.trust_remote_code)
            _check_fields(config, self.config_overrides)
            for name, value in self.config_overrides.items():
                setattr(config, name, value)
            return config
        tokenizer = self.trainer.datamodule.tokenizer
        special = {name: getattr(tokenizer, name) for name in ("bos_token_id", "eos_token_id", "pad_token_id")}
        fields = {"vocab_size": len(tokenizer), **special, **self.config, **self.config_overrides}
        model_type = fields.pop("model_type", None)
        if model_type not in CONFIG_MAPPING:
            raise UserError(f"model.config.model_type is {model_type!r}, which transformers does not know. "
                            "Examples: gpt2, llama, qwen3.")
        _check_fields(CONFIG_MAPPING[model_type](), fields)
        return CONFIG_MAPPING[model_type](**fields)  # not set one by one: sizes of heads follow from the others

    def on_model_ready(self) -> None:
        self.head = CausalHead.of(self.model)

    def batch_loss(self, batch: dict[str, Tensor], count_correct: bool = False) -> LossSums:
        return causal_loss(self.model, self.head, batch, count_correct)


def _check_fields(config: Any, fields: dict[str, Any]) -> None:
    for name in fields:
        if not hasattr(config, name):
            raise UserError(f"model.config: {type(config).__name__} has no field {name!r}.")
