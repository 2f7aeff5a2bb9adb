"""DeepSpeed: ZeRO stages 2 and 3 with exact steps and this project's checkpoints."""

import copy
import importlib.util
import os
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any, Literal

import lightning as L
import torch
from lightning.pytorch.strategies import DDPStrategy
from lightning.pytorch.trainer.states import TrainerFn
from torch import Tensor, nn

from lmmods.core.errors import UserError
from lmmods.core.optimizers import SHARDABLE
from lmmods.torch_engine.nn.optim import recipe_lr
from lmmods.torch_engine.nn.sharding import outside_blocks


class DeepSpeed(DDPStrategy):
    """ZeRO (Rajbhandari et al. 2020) by the deepspeed package: stage 2 shards gradients and optimiser state over the
    processes, stage 3 the parameters too.

    Checkpoints are the same as those of one process. Every process builds the whole network before it is sharded;
    commands that do not train keep it whole. Under bf16-true the optimiser keeps float32 copies of the parameters.

    Args:
        stage: ZeRO stage.
        offload_optimizer: Keep optimiser state in host memory and update it there.
        offload_parameters: Keep parameter shards in host memory; stage 3 only.
        persistence_threshold: In stage 3, parameters with at most this many elements are never sharded.
        process_group_backend: `nccl` or `gloo`. Default: the device's backend.
    """

    def __init__(self, stage: Literal[2, 3] = 2, offload_optimizer: bool = False, offload_parameters: bool = False,
                 persistence_threshold: int = 100_000, process_group_backend: str | None = None):
        super().__init__(process_group_backend=process_group_backend)
        self.stage, self.persistence_threshold = stage, persistence_threshold
        self.offload_optimizer, self.offload_parameters = offload_optimizer, offload_parameters

    def check(self) -> None:
        """Raise UserError if deepspeed is not installed or the options exclude each other."""
        if importlib.util.find_spec("deepspeed") is None:
            raise UserError("trainer.strategy: DeepSpeed needs the deepspeed package. Install it with pip install -e "
                            ".[deepspeed], or use fsdp, which also shards parameters, gradients and optimiser state.")
        if self.offload_parameters and self.stage != 3:
            raise UserError("trainer.strategy: DeepSpeed's offload_parameters needs stage 3. Set stage to 3.")

    def check_run(self, module: L.LightningModule) -> None:
        """Raise UserError for settings under which ZeRO's steps would not be exact."""
        trainer, name = module.trainer, module.optimizer.name
        if module.quantize and self.stage == 3:
            raise UserError(f"model.quantize {module.quantize}: ZeRO stage 3 cannot shard packed weights. "
                            "Set trainer.strategy to fsdp, or the stage to 2.")
        if module.quantize == "int8":
            raise UserError("model.quantize int8 cannot be combined with DeepSpeed. Use nf4, or strategy ddp.")
        if getattr(module, "teacher", None) is not None:
            raise UserError("model.teacher cannot be combined with DeepSpeed, which would also train the teacher. Use "
                            "strategy fsdp or ddp.")
        if getattr(module, "images", False):
            raise UserError("model.images cannot be combined with DeepSpeed. Use strategy fsdp or ddp.")
        if name not in SHARDABLE:
            raise UserError(f"optimizer.name {name} cannot be combined with DeepSpeed, which passes the optimiser one "
                            f"flat vector instead of the parameters. Use {' or '.join(SHARDABLE)}, or strategy ddp.")
        if module.optimizer.ema_decay is not None:
            raise UserError("optimizer.ema_decay cannot be combined with DeepSpeed, which passes the optimiser one "
                            "flat vector instead of the parameters. Set it to null, or use strategy ddp or fsdp.")
        if trainer.precision == "16-mixed":
            raise UserError("trainer.precision 16-mixed cannot be combined with DeepSpeed. Use bf16-mixed, or "
                            "strategy ddp.")
        if trainer.gradient_clip_algorithm == "value":
            raise UserError("trainer.gradient_clip_algorithm value cannot be combined with DeepSpeed. Set it to norm.")

    # Set-up ----------------------------------------------------------------------------------------------------------

    def setup_environment(self) -> None:
        self.check_run(self.lightning_module)
        super().setup_environment()

    def setup(self, trainer: L.Trainer) -> None:
        if trainer.state.fn != TrainerFn.FITTING:
            super().setup(trainer)
            return
        self.accelerator.setup(trainer)
        self.setup_optimizers(trainer)
        self.model, self.optimizers = self._start_engine(self.lightning_module, self.optimizers[0])
        self.setup_precision_plugin()

    def _start_engine(self, module: L.LightningModule, optimizer: torch.optim.Optimizer) -> tuple[nn.Module, list]:
        if self.root_device.type == "cpu":
            os.environ["DS_ACCELERATOR"] = "cpu"  # otherwise deepspeed looks for a GPU
        import deepspeed

        # Remembered, as deepspeed replaces the parameters in the groups by flat vectors.
        self._groups = [list(group["params"]) for group in optimizer.param_groups]
        deepspeed.init_distributed(self.process_group_backend, dist_init_required=False)
        engine, zero, _, _ = deepspeed.initialize(model=module, optimizer=optimizer, config=self._config(),
                                                  model_parameters=sum(self._groups, []), dist_init_required=False)
        if self.stage == 3:  # the loss uses the output head outside its forward, where ZeRO would not gather it
            for param in outside_blocks(module.model):
                deepspeed.zero.register_external_parameter(module, param)
        return engine, [zero]

    def _config(self) -> dict[str, Any]:
        trainer = self.lightning_module.trainer
        zero: dict[str, Any] = {"stage": self.stage, "stage3_param_persistence_threshold": self.persistence_threshold}
        if self.offload_optimizer:
            zero["offload_optimizer"] = {"device": "cpu"}
        if self.offload_parameters:
            zero["offload_param"] = {"device": "cpu"}
        return {
            "zero_optimization": zero,
            "zero_allow_untested_optimizer": True,
            "zero_force_ds_cpu_optimizer": False,
            "bf16": {"enabled": trainer.precision == "bf16-true"},
            "gradient_clipping": trainer.clip_val or 0.0,
            "train_micro_batch_size_per_gpu": 1,
            # Steps may differ in their number of micro-batches: deepspeed treats every `engine.step` as an optimiser
            # step.
            "gradient_accumulation_steps": 1,
            "managed_gradient_accumulation": False,
        }

    # Training --------------------------------------------------------------------------------------------------------

    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        """Call the module outside the engine, which needs one forward pass per backward pass; see `run_forward`."""
        return self.lightning_module.training_step(*args, **kwargs)

    def run_forward(self, *args: Any) -> Any:
        """Call the module within deepspeed's engine."""
        return self.model(*args)

    def backward(self, closure_loss: Tensor, optimizer: Any, *args: Any, **kwargs: Any) -> Tensor:
        loss = self.precision_plugin.pre_backward(closure_loss, self.lightning_module)
        self.model.backward(loss, scale_wrt_gas=False)
        return self.precision_plugin.post_backward(loss, self.lightning_module)

    def block_backward_sync(self) -> AbstractContextManager:
        return nullcontext()  # each micro-batch's gradient is reduced to shards at once, so there is no sync to block

    def optimizer_step(self, optimizer: Any, closure: Callable[[], Any], model: Any = None, **kwargs: Any) -> None:
        """Clip and update; deepspeed averages the gradients over processes, as DDP does."""
        module, lr = self.lightning_module, recipe_lr(self.model.optimizer, self.lightning_module.optimizer)
        self.model.step()
        module.finish_step(torch.as_tensor(self.model.get_global_grad_norm()), lr)
        module.check_finite(module.trainer.global_step + 1)

    # Checkpoints -----------------------------------------------------------------------------------------------------

    def lightning_module_state_dict(self) -> dict[str, Tensor]:
        from deepspeed.utils import safe_get_full_fp32_param

        return {name: self._on_writer(safe_get_full_fp32_param(param))
                for name, param in self.lightning_module.trainable().items()}

    def _on_writer(self, full: Tensor) -> Tensor:
        """Return a whole tensor on the process that writes the checkpoint, and an empty one on the others."""
        return full.cpu() if self.is_global_zero else full.new_empty(0)

    def _link_states(self, zero: Any) -> None:
        if self.stage == 2:
            link_states(zero, self._groups)

    def optimizer_state(self, optimizer: Any) -> dict[str, Any]:
        """Return the `state_dict()` that torch's optimiser would have for the parameters themselves."""
        from deepspeed.utils import safe_get_full_optimizer_state

        zero = self.model.optimizer
        self._link_states(zero)
        vector = flat_vectors(zero, self.stage)[0]
        values = zero.optimizer.state[vector]
        # Moments have an element per weight; the rest (`step`) is equal for all parameters of the vector.
        sharded = [key for key, value in values.items() if torch.is_tensor(value) and value.shape == vector.shape]
        rest = {key: value for key, value in values.items() if key not in sharded}
        state = {index: copy.deepcopy(rest)
                 | {key: self._on_writer(safe_get_full_optimizer_state(param, key)) for key in sharded}
                 for index, param in enumerate(sum(self._groups, []))}
        indices = iter(range(len(state)))
        groups = [{**group, "params": [next(indices) for _ in params]}
                  for group, params in zip(zero.param_groups, self._groups, strict=True)]
        return {"state": state, "param_groups": groups}

    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: str | Path, storage_options: Any = None) -> None:
        if self.is_global_zero:
            self.checkpoint_io.save_checkpoint(checkpoint, filepath, storage_options)

    def load_optimizer_state_dict(self, checkpoint: dict[str, Any]) -> None:
        saved, = checkpoint["optimizer_states"]
        zero, values = self.model.optimizer, saved["state"][0]
        sharded = [key for key, value in values.items() if torch.is_tensor(value) and value.ndim]
        # The flat states must exist before parts of them can be set.
        for vector in flat_vectors(zero, self.stage):
            rest = {key: copy.deepcopy(value) for key, value in values.items() if key not in sharded}
            zero.optimizer.state[vector] = rest | {key: torch.zeros_like(vector) for key in sharded}
        self._link_states(zero)
        names = {param: name for name, param in self.lightning_module.trainable().items()}
        for index, param in enumerate(sum(self._groups, [])):
            self._set(param, checkpoint["state_dict"][names[param]], None)
            for key in sharded:
                self._set(param, saved["state"][index][key], key)
        for group, saved_group in zip(zero.param_groups, saved["param_groups"], strict=True):
            group.update({key: value for key, value in saved_group.items() if key != "params"})

    def _set(self, param: Tensor, full: Tensor, key: str | None) -> None:
        """Set the float32 copy of a parameter, or `key` of its optimiser state, from the whole tensor."""
        from deepspeed import utils

        full = full.to(self.root_device, torch.float32)
        if self.stage == 2:
            setters = utils.safe_set_full_fp32_param, utils.safe_set_full_optimizer_state
        else:
            setters = utils.safe_set_local_fp32_param, utils.safe_set_local_optimizer_state
            # In stage 3 a process has one part of the flattened and padded parameter.
            size = shard_size(param)
            full = nn.functional.pad(full.flatten(), (0, size * self.world_size - full.numel()))
            full = full.narrow(0, size * self.global_rank, size)
        if key is None:
            setters[0](param, full)
        else:
            setters[1](param, full, key)


# ---------------------------------------------------------------------------------------------------------------------
# Undocumented parts of ZeRO's optimisers that the strategy uses, as of deepspeed 0.19.8.
#
# Each use is tested by tests/compat/test_deepspeed_contract.py if the package is installed.

def flat_vectors(zero: Any, stage: int) -> list[Tensor]:
    """Return this process's flat float32 parameters, which torch's optimiser updates; one per parameter group.

    `single_partition_of_fp32_groups` of stage 2, `fp32_partitioned_groups_flat` of stage 3.
    """
    return zero.single_partition_of_fp32_groups if stage == 2 else zero.fp32_partitioned_groups_flat


def link_states(zero: Any, groups: list[list[nn.Parameter]]) -> None:
    """Link each parameter to its part of the flat states of stage 2: `lazy_init_hp_params_optimizer_state`.

    deepspeed does this only once, after stepping the first parameter group, when the others have no state yet.
    """
    from deepspeed.utils import lazy_init_hp_params_optimizer_state

    for params, vector in zip(groups, flat_vectors(zero, 2), strict=True):
        lazy_init_hp_params_optimizer_state(params, vector, zero.optimizer.state)


def shard_size(param: Tensor) -> int:
    """Return the elements of a process's shard of a parameter under stage 3: `ds_tensor`.

    All shards have the same size; the last is padded.
    """
    return param.ds_tensor.numel()
