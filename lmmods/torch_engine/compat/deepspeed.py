"""What the strategy DeepSpeed needs of ZeRO's optimisers that deepspeed does not document. Read in deepspeed 0.19.8.

Each use is held by tests/compat/test_deepspeed_contract.py, where the package is installed.
"""

from typing import Any

from torch import Tensor, nn


def flat_vectors(zero: Any, stage: int) -> list[Tensor]:
    """The flat float32 parameters of this process that torch's optimiser updates, one for each parameter group.

    `single_partition_of_fp32_groups` of stage 2, `fp32_partitioned_groups_flat` of stage 3.
    """
    return zero.single_partition_of_fp32_groups if stage == 2 else zero.fp32_partitioned_groups_flat


def link_states(zero: Any, groups: list[list[nn.Parameter]]) -> None:
    """Let each parameter find its part of the flat states of stage 2: `lazy_init_hp_params_optimizer_state`.

    deepspeed does so only once, after it has stepped the first parameter group, when the others have no state yet.
    """
    from deepspeed.utils import lazy_init_hp_params_optimizer_state

    for params, vector in zip(groups, flat_vectors(zero, 2), strict=True):
        lazy_init_hp_params_optimizer_state(params, vector, zero.optimizer.state)


def divide_gradients(zero: Any, divisor: float) -> None:
    """Let the next step divide its gradients before it clips: `override_loss_scale`, which scales losses too."""
    zero.override_loss_scale(divisor)


def shard_size(param: Tensor) -> int:
    """Elements of each process's shard of a parameter under stage 3: `ds_tensor`. All are of one size; the last is
    padded."""
    return param.ds_tensor.numel()
