"""The optimisers of both engines: all facts about each except its update rule.

An optimiser is an entry of `OPTIMIZERS` and a factory of the same name in each engine that has it: `FACTORIES` in
`torch_engine/nn/optim.py`, `RULES` in `jax_engine/optim.py`.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Literal


@dataclass(frozen=True)
class OptimizerSpec:
    """Facts about an optimiser. Checkpoints have the form of torch's, which the JAX engine writes from these.

    Args:
        state_bytes: Bytes of its state per trained parameter in float32.
        state_follows_dtype: The state has the dtype of its parameter, not float32.
        options: Settings that its rule reads, by the names of its arguments.
        group: Entries of a parameter group other than `options`, `lr` and `weight_decay`.
        counters: Entries of a parameter's state other than arrays of its size, after this many steps.
        has_matrix_rule: Matrices of layers follow a separate rule (`settings.is_hidden_matrix`).
        needs_momentum: It has no form without momentum.
        is_shardable: FSDP2 and DeepSpeed support it.
        is_bitsandbytes: On torch it is bitsandbytes', whose steps need values and which keeps no averages.
    """

    state_bytes: float
    state_follows_dtype: bool = False
    options: tuple[str, ...] = ()
    group: Mapping[str, Any] = field(default_factory=dict)
    counters: Callable[[int], dict[str, Any]] = lambda step: {}
    has_matrix_rule: bool = False
    needs_momentum: bool = False
    is_shardable: bool = False
    is_bitsandbytes: bool = False

    def bytes_per_parameter(self, param_bytes: float) -> float:
        """Return the bytes of state for a parameter of `param_bytes` bytes."""
        return self.state_bytes * (param_bytes / 4 if self.state_follows_dtype else 1)


def _float_counter(step: int) -> dict[str, Any]:
    import numpy as np

    return {"step": np.array(step, np.float32)}


_ADAMW = OptimizerSpec(
    8, state_follows_dtype=True, options=("betas", "eps"), is_shardable=True,
    group={"amsgrad": False, "maximize": False, "foreach": None, "capturable": False, "differentiable": False,
           "fused": True, "decoupled_weight_decay": True},
    counters=_float_counter)
_ADAMW_8BIT = OptimizerSpec(2, options=("betas", "eps"), is_bitsandbytes=True)
_LION_8BIT = OptimizerSpec(1, options=("betas",), is_bitsandbytes=True)

OPTIMIZERS = {
    "adamw": _ADAMW,
    "adafactor": OptimizerSpec(
        4.1, group={"eps": (1e-30, 1e-3), "clip_threshold": 1.0, "decay_rate": -0.8, "beta1": None,
                    "scale_parameter": False, "relative_step": False, "warmup_init": False},
        counters=lambda step: {"step": step, "RMS": 0}),
    "sgd": OptimizerSpec(
        4, state_follows_dtype=True, options=("momentum",), is_shardable=True,
        group={"dampening": 0, "nesterov": False, "maximize": False, "foreach": None, "differentiable": False,
               "fused": None}),
    "lion": OptimizerSpec(
        4, options=("betas",), is_bitsandbytes=True,
        group={"eps": 0.0, "alpha": 0.0, "t_alpha": None, "t_beta3": None}, counters=lambda step: {"step": step}),
    # Parameters that are not matrices of layers follow adamw.
    "muon": replace(_ADAMW, state_bytes=4, has_matrix_rule=True, is_shardable=False),
    "adamw_8bit": _ADAMW_8BIT,
    "lion_8bit": _LION_8BIT,
    "sgd_8bit": OptimizerSpec(1, options=("momentum",), needs_momentum=True, is_bitsandbytes=True),
    "paged_adamw_32bit": replace(_ADAMW_8BIT, state_bytes=8),
    "paged_adamw_8bit": _ADAMW_8BIT,
    "paged_lion_8bit": _LION_8BIT,
}
if TYPE_CHECKING:
    OptimizerName = str  # a checker cannot read the names from the table
else:
    OptimizerName = Literal[tuple(OPTIMIZERS)]
SHARDABLE = [name for name, spec in OPTIMIZERS.items() if spec.is_shardable]
