"""What every task on torch shares: how a network is made, how a window of micro-batches becomes one exact step."""

import math
import os
from abc import ABC, abstractmethod
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning as L
import torch
from lightning.pytorch.strategies import SingleDeviceStrategy
from torch import Tensor, nn

from lmmods.core.errors import UserError
from lmmods.core.hf_config import load_config, special_ids, vocabulary_fields
from lmmods.core.settings import require
from lmmods.core.task_fields import TaskFields
from lmmods.runs.identity import check_parameters
from lmmods.torch_engine.nn import loading, sharding, summary
from lmmods.torch_engine.nn.attention import choosing_attention, prefer_float32
from lmmods.torch_engine.nn.cpu_kernels import bound_onednn_cache
from lmmods.torch_engine.nn.export import save
from lmmods.torch_engine.nn.fused_lora import fuse_adapters
from lmmods.torch_engine.nn.gradient_accumulation import WeightedMean, Window, seed_step
from lmmods.torch_engine.nn.loss import IGNORED, LossSums
from lmmods.torch_engine.nn.micro_batching import cut, default_size
from lmmods.torch_engine.nn.optim import build_optimizer, build_schedule, total_norm


class TaskModule(TaskFields, L.LightningModule, ABC):
    """A network in training."""

    auto_class = "AutoModel"
    task_type: str | None = None

    def __post_init__(self) -> None:
        L.LightningModule.__init__(self)  # takes none of the fields
        super().__post_init__()
        require(self.gradient_checkpointing != "minimal", "model.gradient_checkpointing", "minimal",
                "true or false in the torch engine")
        self.model: nn.Module | None = None
        self.strict_loading = False  # a checkpoint holds what trains; `on_load_checkpoint` checks it to the letter
        self._waiting: list[dict[str, Tensor]] = []
        self.window = Window()
        self.eval_metrics = nn.ModuleDict({name: WeightedMean() for name in ("loss", "accuracy")})

    # The network -----------------------------------------------------------------------------------------------------

    @property
    def is_causal(self) -> bool:
        return self.auto_class == "AutoModelForCausalLM"

    def configure_model(self) -> None:
        """Build the network on the device and in the dtypes that the trainer asks for."""
        if self.model is not None:
            return
        if self.max_memory is not None and not isinstance(self.trainer.strategy, SingleDeviceStrategy):
            raise UserError("model.max_memory spreads the model over the GPUs within one process: set trainer.devices "
                            "to 1, or take it out and cut the model with trainer.strategy: fsdp.")
        bound_onednn_cache()
        torch.manual_seed(base_seed())
        precision = self.trainer.precision
        model = self.load_base(precision)
        if self.fast_kernels:
            loading.fuse_activations(model)
            if self.device.type == "cpu" and precision.startswith("bf16") and self.attention is None:
                prefer_float32(model)
        tokenizer = self.trainer.datamodule.tokenizer
        loading.resize_embeddings(model, len(tokenizer))
        self.fit_tokenizer(model, tokenizer)
        if self.trains_adapter:
            torch.manual_seed(base_seed())  # the adapter starts the same however the base was loaded
            dtype = torch.bfloat16 if precision == "bf16-true" else torch.float32
            model = self._with_adapter(model, self.trainer.datamodule.trainable_new_tokens, dtype)
            if self.fast_kernels and not self.compile:  # the compiler joins them by itself
                fuse_adapters(model)
        if self.gradient_checkpointing:
            loading.enable_checkpointing(model)
        if self.compile:
            loading.compile_layers(model)
        self.model = model.train()
        with self.trainer.precision_plugin.forward_context():
            self.on_model_ready()
        if self.device_mesh is not None:
            sharding.shard(self, self.model, self.device_mesh["data_parallel"])

    def forward(self, function: Callable[..., Any], *args: Any) -> Any:
        """Run a function that uses the network. Sharded parameters are whole only while this runs."""
        return function(*args)

    def load_base(self, precision: str) -> nn.Module:
        """The network without adapter, in training mode."""
        import transformers

        if self.config is not None:
            config = load_config(self.config, self.config_overrides, self.revision, self.trust_remote_code,
                                 vocabulary_fields(self.trainer.datamodule.tokenizer, self.is_causal))
            dtype = torch.bfloat16 if precision == "bf16-true" else torch.float32
            with loading.sizes_checked(), choosing_attention(self.attention):
                return getattr(transformers, self.auto_class).from_config(
                    config, dtype=dtype, attn_implementation=self.attention, trust_remote_code=self.trust_remote_code)
        return loading.load_pretrained(
            getattr(transformers, self.auto_class),
            self.pretrained,
            overrides=self.config_overrides,
            revision=self.revision,
            trust_remote_code=self.trust_remote_code,
            quantize=self.quantize,
            double_quant=self.double_quant,
            quant_storage=self.quant_storage,
            precision=precision,
            frozen=self.trains_adapter,
            attention=self.attention,
            device=self.trainer.strategy.root_device,
            max_memory=self.max_memory,
            seed=base_seed(),
        )

    def fit_tokenizer(self, model: nn.Module, tokenizer) -> None:
        """Tell the configuration which tokens begin, end and pad a text."""
        for name, token in special_ids(tokenizer, self.is_causal).items():
            if token is not None:
                setattr(model.config, name, token)
        if model.can_generate():
            model.generation_config.pad_token_id = tokenizer.pad_token_id

    def on_model_ready(self) -> None:
        """Called once the network stands."""

    def _with_adapter(self, model: nn.Module, trainable_tokens: list[int], dtype: torch.dtype) -> nn.Module:
        if self.adapter is None:
            return loading.add_lora(model, self.lora, trainable_tokens, dtype, self.task_type, base_seed())
        return loading.continue_adapter(model, self.adapter, dtype)

    def trainable(self) -> dict[str, nn.Parameter]:
        """Trainable parameters by name; a tied parameter appears once."""
        return {name: p for name, p in self.named_parameters() if p.requires_grad}

    def configure_optimizers(self):
        optimizer = build_optimizer(self.named_parameters(), self.optimizer)
        self._group_settings = [{name: value for name, value in group.items() if name != "params"}
                                for group in optimizer.param_groups]
        schedule = build_schedule(optimizer, self.optimizer, int(self.trainer.estimated_stepping_batches))
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}

    # Training: sums over a window, divided once ----------------------------------------------------------------------

    @abstractmethod
    def batch_loss(self, batch: dict[str, Tensor], count_correct: bool = False) -> LossSums:
        """Summed loss and weight of a micro-batch."""

    def on_train_batch_start(self, batch: dict[str, Tensor], batch_idx: int) -> None:
        # Dropout of a micro-batch depends on seed and position alone: no evaluation, no resume, no number of processes
        # can shift it.
        place = batch_idx * self.trainer.world_size + self.trainer.global_rank
        seed_step(base_seed(), self.trainer.current_epoch, place)

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        size = self.piece_size()
        piece, *self._waiting = cut(batch, size) if size else [batch]
        sums = self(self.batch_loss, piece)
        self.window.add(sums, *self._counts(piece))
        return sums.total / Window.GRADIENT_SCALE

    def backward(self, loss: Tensor, *args: Any, **kwargs: Any) -> None:
        """Lightning's backward pass, then forward and backward of the pieces that wait: gradients add up."""
        super().backward(loss, *args, **kwargs)
        for piece in self._waiting:
            with self.trainer.precision_plugin.forward_context():
                sums = self(self.batch_loss, piece)
            self.window.add_piece(sums, *self._counts(piece))
            (sums.total / self._divisor()).backward()
        self._waiting = []

    def piece_size(self) -> int:
        """Tokens of a piece of a micro-batch; 0 computes it whole.

        Several processes meet in each backward pass, and GPUs like large products: only a CPU by itself cuts.

        Raises:
            UserError: `piece_tokens` asks for what several processes, or 16-mixed with its scaled gradients, cannot do.
        """
        can_cut = isinstance(self.trainer.strategy, SingleDeviceStrategy) and self.trainer.precision != "16-mixed"
        if self.piece_tokens and not can_cut:
            raise UserError(f"model.piece_tokens is {self.piece_tokens}, but only one process cuts micro-batches, and "
                            "not with precision 16-mixed: set it to 0 or null.")
        if self.piece_tokens is not None:
            return self.piece_tokens
        if not can_cut or self.device.type != "cpu":
            return 0
        return default_size(self.model.config.get_text_config().hidden_size)

    def _counts(self, batch: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
        """Real tokens of the rows that score, and how many rows do: others only even out the processes."""
        scored = self.scored_rows(batch)
        return (batch["attention_mask"] * scored.unsqueeze(1)).sum(), scored.sum()

    def configure_gradient_clipping(self, optimizer, gradient_clip_val=None, gradient_clip_algorithm=None) -> None:
        """Turn the gradient of the summed loss into that of the mean over the window, then clip it.

        Lightning would average the means of micro-batches, and of ranks, however many tokens each held.
        """
        sums = self.trainer.strategy.reduce(self.window.sums(), reduce_op="sum")
        averaged = self.trainer.accumulate_grad_batches * self.trainer.world_size
        grads = [p.grad for group in optimizer.param_groups for p in group["params"] if p.grad is not None]
        factor = Window.GRADIENT_SCALE * averaged / sums[1].clamp(min=1)
        for device in {grad.device for grad in grads}:  # several where the model is spread
            torch._foreach_mul_([sharding.local(grad) for grad in grads if grad.device == device], factor.to(device))
        norm = total_norm(grads)
        self.window.close(sums, norm, optimizer.param_groups[0]["lr"])
        if self.device.type == "cpu" and self.trainer.precision != "16-mixed":
            self.window.check_finite(self.trainer.global_step + 1, self.trainer.current_epoch)
        if gradient_clip_val and gradient_clip_algorithm in (None, "norm"):
            torch.nn.utils.clip_grads_with_norm_([p for group in optimizer.param_groups for p in group["params"]],
                                                 gradient_clip_val, norm)
        elif gradient_clip_val:
            self.clip_gradients(optimizer, gradient_clip_val, gradient_clip_algorithm)

    def scored_rows(self, batch: dict[str, Tensor]) -> Tensor:
        """[B] bool: which rows carry a label."""
        return (batch["labels"] != IGNORED).any(dim=1)

    # Evaluation ------------------------------------------------------------------------------------------------------

    def validation_step(self, batch: dict[str, Tensor], batch_idx: int) -> None:
        sums = self(self.batch_loss, batch, True)
        self.eval_metrics["loss"].update(sums.total, sums.weight)
        self.eval_metrics["accuracy"].update(sums.correct, sums.weight)

    test_step = validation_step

    def eval_results(self, role: str) -> tuple[dict[str, float], dict[str, Any]]:
        """Metrics of the evaluation that ends, over all ranks, and JSON files it leaves; the sums start anew.

        Args:
            role: `val` or `test`.
        """
        results = {name: metric.compute().item() for name, metric in self.eval_metrics.items()}
        results["perplexity"] = math.exp(min(results["loss"], 700))  # float64 ends near exp(709)
        for metric in self.eval_metrics.values():
            metric.reset()
        return results, {}

    # Checkpoints -----------------------------------------------------------------------------------------------------

    def on_save_checkpoint(self, checkpoint: dict) -> None:
        """Keep what trains, and the gradients of a window that is still open."""
        trainable = self.trainable()
        state = checkpoint["state_dict"]
        checkpoint["state_dict"] = {name: state[name] for name in trainable}
        checkpoint["param_names"] = list(trainable)
        checkpoint["window"] = self.window.pack(trainable, self.trainer.strategy, self._divisor())

    def _divisor(self) -> float:
        """What the gradients of an open window have been divided by: `training_step` and Lightning both do."""
        return Window.GRADIENT_SCALE * self.trainer.accumulate_grad_batches

    def on_load_checkpoint(self, checkpoint: dict) -> None:
        check_parameters(*({name: tuple(tensor.shape) for name, tensor in tensors.items()}
                           for tensors in (checkpoint["state_dict"], self.trainable())))
        self.window.unpack(checkpoint["window"], self._divisor(), self.trainer.global_rank == 0)

    def on_train_start(self) -> None:
        self._follow_recipe()
        self.window.put_gradients(self.trainable(), self.trainer.world_size, self.trainer.global_rank == 0)

    def _follow_recipe(self) -> None:
        """A checkpoint brings the optimiser's state; its settings and the length of the schedule are the recipe's."""
        optimizer, schedule = self.optimizers(use_pl_optimizer=False), self.lr_schedulers()
        for number, settings in enumerate(self._group_settings):
            group, factor = optimizer.param_groups[number], schedule.lr_lambdas[number](schedule.last_epoch)
            group.update(settings, initial_lr=settings["lr"], lr=settings["lr"] * factor)
            schedule.base_lrs[number] = settings["lr"]

    # Sizes -----------------------------------------------------------------------------------------------------------

    def describe(self) -> str:
        """Parameters, dtypes and how micro-batches are computed, in a line or two."""
        sizes = summary.summarize(self.model)
        piece = self.piece_size()
        share = ", ".join(f"{name} {count / sizes.num_params:.1%}" for name, count in sizes.dtypes.items())
        return (f"Parameters: {sizes.num_params:,}, of which {sizes.num_trainable:,} train "
                f"({sizes.num_trainable / sizes.num_params:.2%}). Stored as: {share}."
                + (f" On this CPU a micro-batch is computed {piece} tokens at a time." if piece else ""))

    def memory_estimate(self) -> int:
        """Rough bytes of a training step on this device."""
        data = self.trainer.datamodule
        compute_bytes = 4 if self.trainer.precision == "32-true" else 2
        tokens, piece = data.batch_size * data.max_length, self.piece_size()
        if piece:
            tokens = min(tokens, max(piece, data.max_length))
        return summary.training_bytes(self.model, self.optimizer.name, tokens,
                                      self.gradient_checkpointing, compute_bytes)

    def flops_per_token(self) -> int:
        """Arithmetic of one training token."""
        return summary.flops_per_token(self.model)

    # Export ----------------------------------------------------------------------------------------------------------

    def export(self, folder: Path) -> None:
        """Write the model, or its adapter, as a folder that from_pretrained / PeftModel reads.

        All processes must call this; the first one writes.
        """
        save(self.model, folder, self.trains_adapter, self.save_dtype and getattr(torch, self.save_dtype),
             writes=self.trainer.is_global_zero)


def base_seed() -> int:
    """The seed that `seed_everything` has set."""
    return int(os.environ.get("PL_GLOBAL_SEED", 0))
