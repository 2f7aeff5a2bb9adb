"""What a checkpoint holds, of either engine: all that a run needs to go on exactly, as a tree of plain data and arrays.

The tree is that of Lightning's checkpoints, so that a run can change engine.
"""

from typing import Any, TypedDict


class AccumulatedGradients(TypedDict):
    """Micro-batches of an optimiser step that is not complete; in a checkpoint under the key `window`.

    Args:
        sums: [4 + 2 M] float64: summed loss, weight, real tokens and rows, over all processes and devices, and of each
            of the task's M metrics its summed values and their weight.
        num_batches: Micro-batches of each data-parallel rank.
        divisor: What the gradients have been divided by so far.
        gradients: Summed over all ranks, by the names of `state_dict`.
    """

    sums: Any
    num_batches: int
    divisor: float
    gradients: dict[str, Any]


class CheckpointContent(TypedDict, total=False):
    """The keys of a checkpoint.

    Beside them stand the state of the training data, under the DataModule's class name, and what one engine alone
    notes: `engine` on JAX, `pytorch-lightning_version` and Lightning's own keys on torch.

    Args:
        global_step: Optimiser steps done.
        loops: Micro-batches, steps and epochs done as Lightning's loops count them (lmmods.runs.progress).
        state_dict: Parameters that train, by the names of the torch engine.
        param_names: Their order, in which `optimizer_states` numbers them.
        optimizer_states: One state as torch's optimisers have it: `state` by number, `param_groups`.
        lr_schedulers: One state of torch's LambdaLR.
        callbacks: `Metrics` (lmmods.runs.step_metrics), `Checkpoint` (lmmods.runs.checkpoint_policy), and other
            callbacks' state under their keys.
        window: Gradients of an optimiser step that is not complete; empty between two steps.
        world_size: Data-parallel ranks, in which `loops` counts micro-batches.
    """

    global_step: int
    epoch: int
    loops: dict[str, Any]
    state_dict: dict[str, Any]
    param_names: list[str]
    optimizer_states: list[dict[str, Any]]
    lr_schedulers: list[dict[str, Any]]
    callbacks: dict[str, dict[str, Any]]
    window: AccumulatedGradients | dict[str, Any]
    world_size: int
    identity: dict[str, Any]


_KINDS = {dict: "an object", list: "a list", int: "a whole number"}
# What a run needs of a checkpoint of any age: older ones lack some keys.
_REQUIRED = {
    "state_dict": dict, "optimizer_states": list, "lr_schedulers": list, "global_step": int, "epoch": int,
    "callbacks|Metrics|num_tokens": int, "callbacks|Metrics|num_rows": int, "callbacks|Metrics|latest": dict,
    "callbacks|Checkpoint|best": list, "window": dict,
    "loops|fit_loop|epoch_progress": dict, "loops|fit_loop|epoch_loop.batch_progress|current": dict,
}


def missing_key(content: dict[str, Any]) -> tuple[str, str] | None:
    """Which key that both engines need is not there, and what it must be; None where all are there."""
    for path, kind in _REQUIRED.items():
        value: Any = content
        for key in path.split("|"):
            value = value.get(key) if isinstance(value, dict) else None
        if not isinstance(value, kind) or isinstance(value, bool):
            return path.replace("|", "."), _KINDS[kind]
    return None
