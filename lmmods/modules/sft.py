"""Supervised fine-tuning: full, LoRA or QLoRA."""

from dataclasses import asdict

from torch import Tensor

from lmmods.modules.base import TaskModule, base_seed
from lmmods.modules.causal import CausalHead, causal_loss
from lmmods.modules.loss import LossSums
from lmmods.modules.window import seed_step
from lmmods.settings import Generation


class SFT(TaskModule):
    """Fine-tune a causal LM on instructions or chats; predict generates answers.

    Args:
        generation: How predict and samples generate.
    """

    auto_class = "AutoModelForCausalLM"
    task_type = "CAUSAL_LM"

    def __init__(self, generation: Generation = Generation(), **kwargs):
        super().__init__(**kwargs)
        self.generation = generation
        self.head: CausalHead | None = None

    def on_model_ready(self) -> None:
        self.head = CausalHead.of(self.model)

    def batch_loss(self, batch: dict[str, Tensor], count_correct: bool = False) -> LossSums:
        return causal_loss(self.model, self.head, batch, count_correct)

    def predict_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        """New tokens [B, T_new] after the left-padded prompts of the batch, padded at the end."""
        from lmmods.modules.decoding import generate

        seed_step(base_seed(), batch_idx)
        data = self.trainer.datamodule
        config = generation_config(self.generation, data.tokenizer, data.stop_token_ids)
        tokens = generate(self.model, batch["input_ids"], batch["attention_mask"], config)
        return tokens[:, batch["input_ids"].shape[1]:]


def generation_config(settings: Generation, tokenizer, stop_token_ids: list[int]):
    """transformers' GenerationConfig of our settings and the tokens that end an answer."""
    from transformers import GenerationConfig

    options = asdict(settings)
    if not settings.do_sample:
        for name in ("temperature", "top_p", "typical_p") + (() if settings.penalty_alpha else ("top_k",)):
            del options[name]
    return GenerationConfig(**options, pad_token_id=tokenizer.pad_token_id, eos_token_id=stop_token_ids,
                            bos_token_id=tokenizer.bos_token_id)
