"""What every task on torch shares: how a network is made, how a window of micro-batches becomes one exact step."""

import math
import os
from abc import ABC, abstractmethod
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

import lightning as L
import torch
from lightning.pytorch.strategies import SingleDeviceStrategy
from torch import Tensor, nn

from lmmods.core.errors import UserError
from lmmods.core.hf_config import known_fields, load_config, position_limit, special_ids, vocabulary_fields
from lmmods.core.settings import LoRA, Optimizer, check_start, require
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


class TaskModule(L.LightningModule, ABC):
    """A network in training.

    Args:
        pretrained: Model to start from: a folder or a hub id.
        config: Start from random weights instead: `{model_type: llama, hidden_size: 256, ...}`, or the folder or hub id
            of a configuration. The vocabulary size defaults to the tokenizer's.
        config_overrides: Fields changed in the configuration that `config` or `pretrained` names.
        revision: Branch, tag or commit of a hub model.
        trust_remote_code: Run Python code that comes with the model.
        quantize: Store the frozen base in 4 bits (nf4, fp4) or 8 (int8); needs `lora` or `adapter`. QLoRA (Dettmers
            et al. 2023) is `lora` plus this field.
        double_quant: Quantise the 4-bit scales too.
        quant_storage: Type in which packed 4-bit weights are kept; null is uint8.
        lora: Train an adapter instead of the model itself; null is full tuning.
        adapter: Folder of an adapter to go on from, with its own rank, alpha and targets; instead of `lora`.
        optimizer: Update rule and schedule.
        gradient_checkpointing: Recompute activations in the backward pass: all of them (true: least memory, about a
            third more time); minimal, which keeps the products of weights, is the JAX engine's.
        attention: Attention implementation of transformers (sdpa, eager, flash_attention_2); null takes its choice.
        save_dtype: Type of the weights in model/; null keeps them as they trained.
        piece_tokens: A micro-batch is computed in pieces of so many tokens, rows of similar length together; 0 computes
            it whole. null is 2^18 / hidden size (at least 512) on one CPU and 0 elsewhere.
        fast_kernels: Take faster forms of the same function where there are some: logits of labelled positions only, a
            chunk at a time; oneDNN for float32 products on CPUs (after a trial), short rows attending in float32 under
            bfloat16 there, fused GELU, adapters computed with their layers, and on GPUs attention that knows packed
            rows. False needs the memory of all logits.
        compile: Compile the layers (torch.compile): slower to start, faster on GPUs.
        max_memory: Spread `pretrained` over the GPUs of this machine, layer by layer in one process: memory of its
            weights on each (20GiB), or by device ({0: 10GiB, 1: 20GiB}).
    """

    auto_class = "AutoModel"
    task_type: str | None = None

    def __init__(
        self,
        pretrained: str | None = None,
        config: str | dict[str, Any] | None = None,
        config_overrides: dict[str, Any] | None = None,
        revision: str | None = None,
        trust_remote_code: bool = False,
        quantize: loading.Quantize | None = None,
        double_quant: bool = True,
        quant_storage: Literal["uint8", "float32", "bfloat16", "float16"] | None = None,
        lora: LoRA | None = None,
        adapter: str | None = None,
        optimizer: Optimizer = Optimizer(),
        gradient_checkpointing: bool | Literal["minimal"] = False,
        attention: str | None = None,
        save_dtype: Literal["float32", "bfloat16", "float16"] | None = None,
        piece_tokens: int | None = None,
        fast_kernels: bool = True,
        compile: bool = False,
        max_memory: str | dict[int | str, str] | None = None,
    ):
        super().__init__()
        require(max_memory is None or config is None, "model.max_memory", max_memory, "null beside model.config")
        require(piece_tokens is None or piece_tokens >= 0, "model.piece_tokens", piece_tokens, "0 or more")
        require(gradient_checkpointing != "minimal", "model.gradient_checkpointing", "minimal",
                "true or false in the torch engine")
        check_start(pretrained, config, quantize, lora, adapter)
        self.config, self.config_overrides = config, config_overrides or {}
        self.pretrained, self.revision, self.trust_remote_code = pretrained, revision, trust_remote_code
        self.quantize, self.double_quant, self.quant_storage = quantize, double_quant, quant_storage
        self.lora, self.adapter = lora, adapter
        self.optimizer_settings = optimizer
        self.gradient_checkpointing, self.attention = gradient_checkpointing, attention
        self.save_dtype = getattr(torch, save_dtype) if save_dtype else None
        self.model: nn.Module | None = None
        self.strict_loading = False  # a checkpoint holds what trains; `on_load_checkpoint` checks it to the letter
        self.piece_tokens, self.fast_kernels, self.compile_layers = piece_tokens, fast_kernels, compile
        self.max_memory = max_memory
        self._waiting: list[dict[str, Tensor]] = []
        self.window = Window()
        self.eval_metrics = nn.ModuleDict({name: WeightedMean() for name in ("loss", "accuracy")})

    def max_positions(self) -> int | None:
        """Longest row the model takes, where its configuration says so. Raises UserError for an unknown model."""
        return position_limit(self.config_fields())

    def config_fields(self) -> dict[str, Any]:
        """`architectures.FIELDS` of the configuration, as far as set. Raises UserError for an unknown model."""
        return known_fields(load_config(self.pretrained or self.config, self.config_overrides, self.revision,
                                        self.trust_remote_code))

    # The network -----------------------------------------------------------------------------------------------------

    @property
    def is_causal(self) -> bool:
        return self.auto_class == "AutoModelForCausalLM"

    @property
    def trains_adapter(self) -> bool:
        return self.lora is not None or self.adapter is not None

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
            if self.fast_kernels and not self.compile_layers:  # the compiler joins them by itself
                fuse_adapters(model)
        if self.gradient_checkpointing:
            loading.enable_checkpointing(model)
        if self.compile_layers:
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
        optimizer = build_optimizer(self.named_parameters(), self.optimizer_settings)
        self._group_settings = [{name: value for name, value in group.items() if name != "params"}
                                for group in optimizer.param_groups]
        schedule = build_schedule(optimizer, self.optimizer_settings, int(self.trainer.estimated_stepping_batches))
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
        return summary.training_bytes(self.model, self.optimizer_settings.name, tokens,
                                      self.gradient_checkpointing, compute_bytes)

    def flops_per_token(self) -> int:
        """Arithmetic of one training token."""
        return summary.flops_per_token(self.model)

    # Export ----------------------------------------------------------------------------------------------------------

    def export(self, folder: Path) -> None:
        """Write the model, or its adapter, as a folder that from_pretrained / PeftModel reads.

        All processes must call this; the first one writes.
        """
        save(self.model, folder, self.trains_adapter, self.save_dtype, writes=self.trainer.is_global_zero)


def base_seed() -> int:
    """The seed that `seed_everything` has set."""
    return int(os.environ.get("PL_GLOBAL_SEED", 0))
