"""Base class of the tasks on causal LMs: training and generation."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from lmmods.core.console import say
from lmmods.core.errors import UserError
from lmmods.core.experts import METRICS, Mixture, check_balance
from lmmods.core.generation_config import draws
from lmmods.core.settings import Generation, require
from lmmods.data.base import DataModule
from lmmods.data.batch.collate import DRAWN, PLACES
from lmmods.data.teacher import NO_PLACES
from lmmods.recipe.tasks.base import CausalFields
from lmmods.torch_engine.nn.attention import prefer_varlen
from lmmods.torch_engine.nn.distillation import TeacherStates, TeacherTopK
from lmmods.torch_engine.nn.experts import routed_mixture
from lmmods.torch_engine.nn.lm_head import LMHead, causal_loss, keeps_packed_apart, run_without_head
from lmmods.torch_engine.nn.loss import IGNORED, LossSums, shift_labels, shift_weights
from lmmods.torch_engine.nn.reference import evaluating
from lmmods.torch_engine.nn.teacher import cached_teacher
from lmmods.torch_engine.tasks.base import TaskModule, base_seed, seed_step

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


class CausalModule(CausalFields, TaskModule):
    """A causal LM: next-token loss on labelled tokens, generation in predict. Abstract; subclasses are the tasks."""

    auto_class = "AutoModelForCausalLM"
    task_type = "CAUSAL_LM"
    measures_experts = True  # if the network has any

    def __post_init__(self) -> None:
        super().__post_init__()
        self.head: LMHead | None = None
        self.teacher_head: LMHead | None = None
        self._top_k: Callable[[Any], Any] | None = None  # of a teacher with `top_k`
        self._num_columns = 0
        self._mixture: Mixture | None = None

    def link(self, datamodule: DataModule) -> None:
        if self.is_taught_beforehand:
            datamodule.add_column(PLACES)

    def prepare_model(self) -> None:
        super().prepare_model()
        # Without a stage, as in a plan, no loop reads rows.
        if self.is_taught_beforehand and getattr(getattr(self.trainer, "state", None), "fn", None):
            self._top_k, self._num_columns = cached_teacher(self)

    def on_model_ready(self) -> None:
        # With model.max_memory, hidden states stay on the model's last device, while its logits are moved back to the
        # labels' device: so the full logits are used there.
        self.head = LMHead.from_model(self.model, plain=not self.fast_kernels) if self.max_memory is None else None
        if self.teacher_model is not None:
            self.teacher_head = LMHead.from_model(self.teacher_model, plain=not self.fast_kernels)
        if self.measures_experts:
            self._measure_experts()
        # Before the check below, which runs the kernel that training will use.
        if self.trainer.datamodule.packing and self.attention is None and self.fast_kernels:
            prefer_varlen(self.model)
            if self.teacher_model is not None:
                prefer_varlen(self.teacher_model)
        if self.trainer.datamodule.packing and not all(map(keeps_packed_apart, filter(None, (
                self.model, self.teacher_model)))):
            raise UserError("data.packing: in this architecture documents packed into one row see each other. Set "
                            "data.packing to false; data.group_by_length saves most of the padding too.")

    def _measure_experts(self) -> None:
        mixture = routed_mixture(self.model)
        require(not (mixture and self.compile and self.balance_loss), "model.balance_loss", self.balance_loss,
                "0 with model.compile, which cannot see the routers")
        check_balance(self.model.config, self.balance_loss, mixture is not None)
        if mixture is not None and self.compile:
            say("Experts: their load is not measured, as model.compile cannot see the routers.")
        elif mixture is not None:
            self._mixture, self.metric_names = mixture, (*self.metric_names, *METRICS)

    def batch_loss(self, batch: dict[str, Tensor], count_correct: bool = False) -> LossSums:
        batch = batch if self.context_parallel is None else self.context_parallel.cut(batch)
        teacher = None
        if self.teacher_model is not None:  # first, while there are no activations of the student
            with evaluating(self.teacher_model):
                hidden, head, *_ = run_without_head(self.teacher_model, self.teacher_head, batch)
            # [B] -> [B, T]
            drawn = batch[DRAWN].unsqueeze(1).expand(batch["labels"].shape) if DRAWN in batch else None
            teacher = TeacherStates(hidden, head, drawn)
        elif self.is_taught_beforehand:
            if PLACES not in batch:
                raise UserError(NO_PLACES)
            teacher = self._top_k_at(shift_weights(batch[PLACES]))
        loss = self.loss_of_tokens(teacher, is_training=not count_correct)
        if count_correct:  # in evaluation
            return causal_loss(self.model, self.head, batch, count_correct, device=self.built_for, loss=loss)
        return causal_loss(self.model, self.head, batch, mixture=self._mixture, balance_loss=self.balance_loss,
                           device=self.built_for, loss=loss)

    def target_weight(self, batch: dict[str, Tensor]) -> Tensor:
        scored = shift_labels(batch["labels"]) != IGNORED
        return (scored * shift_weights(batch["loss_weights"]) if "loss_weights" in batch else scored).sum()

    @contextmanager
    def inference(self) -> Iterator[None]:
        """Disable gradient and dropout, in the precision of training."""
        with evaluating(self.model), self.trainer.precision_plugin.forward_context():
            yield

    def _top_k_at(self, places: Tensor) -> TeacherTopK:
        """Return the teacher's top k at positions [B, T], by the numbers of the tokens to predict there."""
        shape, top_k = places.shape, self.teacher.top_k
        if self._top_k is None:
            return TeacherTopK(places.new_zeros(*shape, top_k), torch.zeros(*shape, top_k + 1, device=places.device),
                               self.model.config.get_text_config().vocab_size)
        ids, logps = (torch.from_numpy(part).to(places.device) for part in self._top_k(places.cpu().numpy()))
        return TeacherTopK(ids.long(), logps, self._num_columns)

    def predict_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        """Generate tokens [B * A, T_new], right-padded, from left-padded prompts [B, T], with the A answers to a prompt
        next to each other; sampling depends on the seed, the row and the number of the answer.
        """
        from lmmods.torch_engine.nn.decoding import generate

        seed_step(base_seed(), batch_idx)  # for beam sampling, which uses torch's generator
        data = self.trainer.datamodule
        prompt_length, num_positions = batch["input_ids"].shape[1], self.max_positions()
        # Learned position embeddings have a fixed number of rows; rotary ones also take later positions.
        if num_positions and getattr(self.model.config.get_text_config(), "rope_parameters", None) is None:
            self.generation.check_positions(prompt_length, num_positions)
        config = generation_config(self.generation, data.tokenizer, data.codec.stop_token_ids)
        numbers = draws(base_seed(), batch["index"].tolist(), self.generation.max_new_tokens, self.num_answers)
        ids, mask = (batch[name].repeat_interleave(self.num_answers, 0) for name in ("input_ids", "attention_mask"))
        tokens = self(generate, self.model, ids, mask, config,
                      self.device_mesh is not None, torch.from_numpy(numbers).to(self.device))
        return tokens[:, prompt_length:]  # without the prompts


def generation_config(settings: Generation, tokenizer: "PreTrainedTokenizerBase", stop_token_ids: list[int]) -> Any:
    """Build transformers' GenerationConfig from the settings and the tokens that end an answer."""
    from transformers import GenerationConfig

    options = asdict(settings)
    if not settings.do_sample:  # transformers warns of options unused by greedy and beam search
        for name in ("temperature", "top_p", "typical_p") + (() if settings.penalty_alpha else ("top_k",)):
            del options[name]
    return GenerationConfig(**options, pad_token_id=tokenizer.pad_token_id, eos_token_id=stop_token_ids,
                            bos_token_id=tokenizer.bos_token_id)
