"""FSDP2: fully sharded data parallel training with torch's `fully_shard`."""

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning as L
import torch
from lightning.pytorch.strategies import ModelParallelStrategy
from torch import Tensor

from lmmods.core.errors import UserError
from lmmods.core.image_models import IMAGES_AUTO_CLASS
from lmmods.core.optimizers import SHARDABLE
from lmmods.runs.checkpoint import Shards, WriterRank
from lmmods.torch_engine.compat.lightning import shard_over_all
from lmmods.torch_engine.nn.micro_batches import gather
from lmmods.torch_engine.nn.sharding import is_sharded, load_into, local_rows, place_like, whole


class FSDP2(ModelParallelStrategy):
    """Parameters, gradients and optimiser state sharded over all processes (Zhao et al. 2023), torch's `fully_shard`.

    Checkpoints are the same as those of one process: a run can be resumed with any strategy on any number of processes.

    Args:
        sharded_checkpoints: Each process writes its own shard of the checkpoint while training continues. By default
            the first process gathers and writes everything. All processes must share the folder's file system.
        process_group_backend: `nccl` or `gloo`. Default: the device's backend.
        tensor_parallel_size: Number of processes that compute each micro-batch together, each with a part of every
            layer's matrices; see `nn.sharding`.
        context_parallel_size: Number of processes that compute each micro-batch together, each with some positions of
            every row; see `nn.context_parallel`.
    """

    def __init__(self, sharded_checkpoints: bool = False, process_group_backend: str | None = None,
                 tensor_parallel_size: int = 1, context_parallel_size: int = 1):
        super().__init__(tensor_parallel_size=tensor_parallel_size, process_group_backend=process_group_backend)
        self.sharded_checkpoints, self.tensor_parallel_size = sharded_checkpoints, tensor_parallel_size
        self.context_parallel_size = context_parallel_size

    lightning_restore_optimizer = True  # by `load_optimizer_state_dict`, as with every other strategy

    def check_run(self, module: L.LightningModule) -> None:
        """Raise UserError for settings that do not work with sharded parameters."""
        if module.quantize == "int8":
            raise UserError("model.quantize int8 cannot be combined with strategy fsdp, which cannot shard its scales. "
                            "Use nf4 or fp4, or strategy ddp.")
        teacher = getattr(module, "teacher", None)
        if teacher is not None and teacher.quantize == "int8":
            raise UserError("model.teacher.quantize int8 cannot be combined with strategy fsdp, which cannot shard its "
                            "scales. Use nf4 or fp4, or strategy ddp.")
        if module.optimizer.name not in SHARDABLE:
            raise UserError(f"optimizer.name {module.optimizer.name} cannot be combined with strategy fsdp, which "
                            f"shards parameters. Use {' or '.join(SHARDABLE)}, or strategy ddp.")
        sizes = {"tensor_parallel_size": self.tensor_parallel_size, "context_parallel_size": self.context_parallel_size}
        num_processes = self.num_nodes * self.num_processes
        if min(sizes.values()) < 1 or num_processes % math.prod(sizes.values()):
            size_names = " × ".join(f"{name} {size}" for name, size in sizes.items() if size != 1)
            raise UserError(f"trainer.strategy: {size_names} must divide the number of processes, {num_processes}. "
                            "Change the size or the number of processes.")
        images = {"model.images": getattr(module, "images", False)}
        if self.tensor_parallel_size != 1:
            self._reject(f"tensor_parallel_size {self.tensor_parallel_size}", images | {
                f"model.quantize {module.quantize}": module.quantize, "model.compile": module.compile,
                "model.teacher": teacher,
                "sharded_checkpoints": self.sharded_checkpoints,
                "trainer.gradient_clip_algorithm value": module.trainer.gradient_clip_algorithm == "value"})
        if self.context_parallel_size != 1:
            self._reject(f"context_parallel_size {self.context_parallel_size}", images | {
                f"model.class_path {type(module).__name__}": module.auto_class not in ("AutoModelForCausalLM",
                                                                                      IMAGES_AUTO_CLASS),
                "model.compile": module.compile, "model.teacher": teacher,
                f"model.attention {module.attention}": module.attention not in (None, "sdpa")})

    @staticmethod
    def _reject(size: str, settings: dict[str, Any]) -> None:
        if names := [name for name, is_on in settings.items() if is_on]:
            raise UserError(f"trainer.strategy: {size} cannot be combined with {', '.join(names)}. Remove that, or set "
                            "the size to 1; parameters are sharded over all processes anyway.")

    def setup_environment(self) -> None:
        self.check_run(self.lightning_module)
        shard_over_all(self)
        super().setup_environment()

    # Checkpoints: Lightning's own are pickled and include the frozen base --------------------------------------------

    def _store(self, tensor: Tensor) -> Tensor | Shards:
        """Return the part of a tensor that this process saves in a checkpoint. A collective call."""
        if self.sharded_checkpoints and is_sharded(tensor):
            shard, rows = local_rows(tensor)
            start = (rows.start, *[0] * (tensor.ndim - 1))  # offset of the shard in the whole tensor
            return Shards(tuple(tensor.shape), ((start, shard.detach().to("cpu", copy=True)),) if len(rows) else ())
        full = whole(tensor).detach()
        return full.cpu() if self.is_global_zero else full.new_empty(0)  # only the first process writes

    def lightning_module_state_dict(self) -> dict[str, Tensor | Shards]:
        return {name: self._store(param) for name, param in self.lightning_module.trainable().items()}

    def optimizer_state(self, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
        saved = optimizer.state_dict()
        state = {index: {key: self._store(value) if torch.is_tensor(value) else value
                         for key, value in values.items()} for index, values in saved["state"].items()}
        return {**saved, "state": state}

    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: str | Path,
                        storage_options: Callable[[], None] | None = None) -> None:
        path = Path(self.broadcast(filepath))
        if self.sharded_checkpoints:
            self.checkpoint_io.save_shards(checkpoint, path, storage_options,
                                           WriterRank(self.global_rank, self.world_size), self.barrier)
        elif self.is_global_zero:
            self.checkpoint_io.save_checkpoint(checkpoint, path, storage_options)

    def load_checkpoint(self, checkpoint_path: str | Path, weights_only: bool | None = None) -> dict[str, Any]:
        return self.checkpoint_io.open_checkpoint(Path(checkpoint_path),
                                                  lambda problems: gather(problems, self.world_size),
                                                  WriterRank(self.global_rank, self.world_size))

    def load_model_state_dict(self, checkpoint: dict[str, Any], strict: bool = True) -> None:
        for name, param in self.lightning_module.trainable().items():
            load_into(param, checkpoint["state_dict"][name])

    def load_optimizer_state_dict(self, checkpoint: dict[str, Any]) -> None:
        for optimizer, saved in zip(self.optimizers, checkpoint["optimizer_states"], strict=True):
            params = [param for group in optimizer.param_groups for param in group["params"]]
            # Moments are sharded like their parameter; scalars (`step`) are whole everywhere.
            state = {index: {key: place_like(value, params[index]) if getattr(value, "ndim", 0) else value
                             for key, value in values.items()} for index, values in saved["state"].items()}
            optimizer.load_state_dict({**saved, "state": state})
