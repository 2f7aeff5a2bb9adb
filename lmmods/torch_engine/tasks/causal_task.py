"""Base class of the tasks on causal LMs: training and generation."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from lmmods.core.console import say
from lmmods.core.errors import UserError
from lmmods.core.experts import METRICS, Mixture, check_balance
from lmmods.core.generation_config import sampling_uniforms
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
from lmmods.torch_engine.nn.reference import eval_mode
from lmmods.torch_engine.nn.teacher import cached_teacher
from lmmods.torch_engine.tasks.base import TaskModule, base_seed, seed_step

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


class CausalModule(CausalFields, TaskModule):
    """Base class of causal LM tasks: next-token loss on target tokens, generation in predict."""

    auto_class = "AutoModelForCausalLM"
    task_type = "CAUSAL_LM"
    measures_experts = True  # if the network has experts

    def __post_init__(self) -> None:
        super().__post_init__()
        self.head: LMHead | None = None
        self.teacher_head: LMHead | None = None
        self._top_k: Callable[[Any], Any] | None = None  # looks up the output of a teacher with `top_k`
        self._num_columns = 0
        self._mixture: Mixture | None = None

    def link(self, datamodule: DataModule) -> None:
        if self.precomputes_teacher:
            datamodule.add_column(PLACES)

    def prepare_model(self) -> None:
        super().prepare_model()
        # Without a stage, as in a plan, no rows are read.
        if self.precomputes_teacher and getattr(getattr(self.trainer, "state", None), "fn", None):
            self._top_k, self._num_columns = cached_teacher(self)

    def on_model_ready(self) -> None:
        # With model.max_memory, hidden states stay on the model's last device, but its logits are moved to the labels'
        # device, so use the full logits.
        self.head = LMHead.from_model(self.model, plain=not self.fast_kernels) if self.max_memory is None else None
        if self.teacher_model is not None:
            self.teacher_head = LMHead.from_model(self.teacher_model, plain=not self.fast_kernels)
        if self.measures_experts:
            self._measure_experts()
        # Before the check below, which must run the kernel that training uses.
        if self.trainer.datamodule.packing and self.attention is None and self.fast_kernels:
            prefer_varlen(self.model)
            if self.teacher_model is not None:
                prefer_varlen(self.teacher_model)
        if self.trainer.datamodule.packing and not all(map(keeps_packed_apart, filter(None, (
                self.model, self.teacher_model)))):
            raise UserError("data.packing: in this architecture, documents packed into one row attend to each other. "
                            "Set data.packing to false; data.group_by_length also saves most of the padding.")

    def _measure_experts(self) -> None:
        mixture = routed_mixture(self.model)
        require(not (mixture and self.compile and self.balance_loss), "model.balance_loss", self.balance_loss,
                "0 with model.compile, which hides the routers")
        check_balance(self.model.config, self.balance_loss, mixture is not None)
        if mixture is not None and self.compile:
            say("Experts: their load is not logged, as model.compile hides the routers.")
        elif mixture is not None:
            self._mixture, self.metric_names = mixture, (*self.metric_names, *METRICS)

    def batch_loss(self, batch: dict[str, Tensor], count_correct: bool = False) -> LossSums:
        batch = batch if self.context_parallel is None else self.context_parallel.split(batch)
        teacher = None
        if self.teacher_model is not None:  # first, before the student's activations take memory
            with eval_mode(self.teacher_model):
                hidden, head, *_ = run_without_head(self.teacher_model, self.teacher_head, batch)
            # [B] -> [B, T]
            is_sampled = batch[DRAWN].unsqueeze(1).expand(batch["labels"].shape) if DRAWN in batch else None
            teacher = TeacherStates(hidden, head, is_sampled)
        elif self.precomputes_teacher:
            if PLACES not in batch:
                raise UserError(NO_PLACES)
            teacher = self._lookup_top_k(shift_weights(batch[PLACES]))
        loss = self.build_token_loss(teacher, is_training=not count_correct)
        if count_correct:  # in evaluation
            return causal_loss(self.model, self.head, batch, count_correct, device=self.built_for, loss=loss)
        return causal_loss(self.model, self.head, batch, mixture=self._mixture, balance_loss=self.balance_loss,
                           device=self.built_for, loss=loss)

    def target_weight(self, batch: dict[str, Tensor]) -> Tensor:
        is_target = shift_labels(batch["labels"]) != IGNORED
        return (is_target * shift_weights(batch["loss_weights"]) if "loss_weights" in batch else is_target).sum()

    @contextmanager
    def inference(self) -> Iterator[None]:
        """Disable gradient and dropout, and use the training precision."""
        with eval_mode(self.model), self.trainer.precision_plugin.forward_context():
            yield

    def _lookup_top_k(self, indices: Tensor) -> TeacherTopK:
        """Return the teacher's top k for target tokens, given their indices [B, T] in the teacher's table."""
        shape, top_k = indices.shape, self.teacher.top_k
        if self._top_k is None:
            return TeacherTopK(indices.new_zeros(*shape, top_k), torch.zeros(*shape, top_k + 1, device=indices.device),
                               self.model.config.get_text_config().vocab_size)
        ids, logps = (torch.from_numpy(array).to(indices.device) for array in self._top_k(indices.cpu().numpy()))
        return TeacherTopK(ids.long(), logps, self._num_columns)

    def predict_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        """Generate tokens [B * A, T_new], right-padded, from left-padded prompts [B, T].

        The A answers to a prompt are neighbours. Sampling depends on the seed, the row and the answer's index.
        """
        from lmmods.torch_engine.nn.capturing import choose_capture
        from lmmods.torch_engine.nn.decoding import generate

        seed_step(base_seed(), batch_idx)  # for beam sampling, which uses torch's generator
        data = self.trainer.datamodule
        prompt_length, num_positions = batch["input_ids"].shape[1], self.max_positions()
        # Learned position embeddings have a fixed number of rows; rotary ones support any position.
        if num_positions and getattr(self.model.config.get_text_config(), "rope_parameters", None) is None:
            self.generation.check_positions(prompt_length, num_positions)
        config = generation_config(self.generation, data.tokenizer, data.codec.stop_token_ids)
        uniforms = sampling_uniforms(base_seed(), batch["index"].tolist(), self.generation.max_new_tokens,
                                     self.num_answers)
        ids, mask = (batch[name].repeat_interleave(self.num_answers, 0) for name in ("input_ids", "attention_mask"))
        further_inputs = getattr(self.model, "further_inputs", lambda _: {})
        capture = choose_capture(self.cuda_graphs, self.device)
        tokens = self(partial(generate, capture=capture, **further_inputs(batch)), self.model, ids, mask, config,
                      self.device_mesh is not None, torch.from_numpy(uniforms).to(self.device))
        return tokens[:, prompt_length:]


def generation_config(settings: Generation, tokenizer: "PreTrainedTokenizerBase", stop_token_ids: list[int]) -> Any:
    """Build transformers' GenerationConfig from the settings and the tokens that end an answer."""
    from transformers import GenerationConfig

    options = asdict(settings)
    if not settings.do_sample:  # transformers warns about options that greedy and beam search do not use
        for name in ("temperature", "top_p", "typical_p") + (() if settings.penalty_alpha else ("top_k",)):
            del options[name]
    return GenerationConfig(**options, pad_token_id=tokenizer.pad_token_id, eos_token_id=stop_token_ids,
                            bos_token_id=tokenizer.bos_token_id)
