"""Checkpoints of a JAX run: their content, restoring, and saving in the background of training."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import numpy as np

from jax_engine.callbacks import EarlyStopping
from jax_engine.distributed import devices as machines
from jax_engine.distributed.tree import Tree
from jax_engine.optim import AVERAGE
from jax_engine.run import Run, Training
from jax_engine.tasks.base import Weights
from lmmods.core import lazy_array
from lmmods.core.errors import UserError
from lmmods.core.settings import Optimizer
from lmmods.runs.averaging import load_averages
from lmmods.runs.checkpoint import (
    BackgroundWriter,
    CheckpointContent,
    WriterRank,
    check_manifest,
    open_checkpoint,
)
from lmmods.runs.checkpoint_policy import CheckpointPolicy, KeptCheckpoints
from lmmods.runs.folder import checkpoint_name
from lmmods.runs.identity import RunIdentity, check_parameters
from lmmods.runs.progress import Progress, update_checkpoint
from lmmods.runs.wandb import log_checkpoint


class Checkpointer:
    """Save and restore everything a run needs to resume exactly."""

    def __init__(self, run: Training, policy: CheckpointPolicy, callbacks: list[EarlyStopping],
                 identity: RunIdentity):
        self._run, self._policy, self._callbacks, self._identity = run, policy, callbacks, identity
        self._latest: Path | None = None  # checkpoint restored or saved last
        self._writer = BackgroundWriter()
        self._writer_rank = WriterRank(jax.process_index(), jax.process_count()) if jax.process_count() > 1 else None

    # Restoring -------------------------------------------------------------------------------------------------------

    def restore(self, checkpoint: Path) -> None:
        """Restore the run from a checkpoint written by either engine."""
        run, network, parallel = self._run, self._run.task.network, self._run.parallel
        content = update_checkpoint(_open(checkpoint))
        # First: the steps below read the position from it.
        run.progress = Progress(**content["progress"])
        host = unpack(content, parallel.shapes(run.state), run.task.optimizer, network.to_torch, network.from_torch,
                      network.num_named_layers)
        run.replace_state(parallel.put_state(host))
        run.metrics.load_state_dict(content["callbacks"]["Metrics"])
        self._policy.load_state_dict(content["callbacks"]["Checkpoint"])
        for callback in self._callbacks:
            if callback.state_key in content["callbacks"]:
                callback.load_state_dict(content["callbacks"][callback.state_key])
        # The data module's state is under its class name.
        run.data.load_state_dict(content[type(run.data).__qualname__])
        self._latest = self.path

    def resume_from(self, checkpoint: Path) -> None:
        """Complete the clean-up of a run that was interrupted after writing `checkpoint`. First process only."""
        self._policy.resume(self._run.folder, checkpoint)

    # Saving ----------------------------------------------------------------------------------------------------------

    @property
    def path(self) -> Path:
        """Checkpoint path for the last completed step."""
        return self._run.folder.checkpoint(checkpoint_name(self._run.progress.step))

    def is_saved(self) -> bool:
        """Return True if the current position was restored from, or saved as, a checkpoint."""
        return self._latest == self.path

    def rank(self, metrics: dict[str, float]) -> None:
        """Rank the checkpoint that is about to be written."""
        self._policy.rank(metrics, self.path.name)

    def save(self) -> None:
        """Start writing a checkpoint of the current position in the background. All processes must call this."""
        run, self._latest = self._run, self.path
        path = self.path
        with run.stopwatch.paused():
            # Copies the state to the host, so that the next step may overwrite it while the writer works.
            content = self._content()
            # Decide now, with this step's ranking; apply once the checkpoint is complete.
            decision = self._policy.decide(path.name)
            self._writer.save(path, content, lambda: self._on_complete(path, decision), self._writer_rank,
                              lambda: machines.barrier("checkpoint begins"))

    def _on_complete(self, path: Path, decision: KeptCheckpoints) -> None:
        """Delete outdated checkpoints and log this one. The writer thread calls it once the checkpoint is complete."""
        decision.apply(self._run.folder)
        log_checkpoint(self._run.loggers, path)

    def check(self) -> None:
        """Raise the background writer's error, if any, without waiting."""
        self._writer.check()

    def wait(self) -> None:
        """Wait for the background writer and raise its error, if any."""
        self._writer.wait()

    def _content(self) -> CheckpointContent:
        """Return the content of a checkpoint of the current position. All processes must call this."""
        run, network, progress = self._run, self._run.task.network, self._run.progress
        state = (run.parallel.shards if self._writer_rank else run.parallel.fetch_state)(run.state)
        return {
            "engine": "jax",
            "epoch": progress.epoch,
            "global_step": progress.step,
            "progress": replace(progress, ends_epoch=run.ends_epoch).state(),
            **pack(state, run.task.optimizer, progress.step, run.schedule.num_steps, network.to_torch,
                   network.num_named_layers),
            "callbacks": {
                "Metrics": run.metrics.state_dict(),
                "Checkpoint": self._policy.state_dict(),
                **{callback.state_key: callback.state_dict() for callback in self._callbacks},
            },
            "world_size": run.parallel.data_parallel_size,
            "identity": self._identity.tree,
            type(run.data).__qualname__: run.data.state_at(run.data_position),
        }


def _open(checkpoint: Path) -> CheckpointContent:
    """Open a checkpoint after each process has verified its part of the files. All processes must call this."""
    rank, problems = jax.process_index(), {}
    try:
        check_manifest(checkpoint, share=(rank, jax.process_count()))
    except UserError as error:
        problems = {rank: str(error)}
    if problems := machines.gather(problems):
        raise UserError(problems[min(problems)])
    return open_checkpoint(checkpoint)


def load_weights(run: Run, checkpoint: Path) -> None:
    """Replace the run's initial parameters with a checkpoint's."""
    content, network, weights = _open(checkpoint), run.task.network, run.weights
    like = run.parallel.shapes(weights.trainable)
    content = {**content, "state_dict": load_averages(content, network.num_named_layers)}
    trainable = unpack_trainable(content, like, network.to_torch, network.from_torch)
    run.weights = Weights(run.parallel, run.parallel.put_state(trainable), weights.frozen)


# ---------------------------------------------------------------------------------------------------------------------
# Conversion of parameters and optimiser state to the names and indices of the torch engine, and back.

# In the torch engine the network is the attribute `model` of a LightningModule.
PREFIX = "model."
# bitsandbytes saves the slots of its optimisers under this key; it also loads them without it.
_BITSANDBYTES = "__bnb_optimizer_quant_state__"

ToTorch = Callable[[Tree], dict[str, Any]]
FromTorch = Callable[[dict[str, np.ndarray]], Tree]


def pack(state: Tree, settings: Optimizer, step: int, num_steps: int, to_torch: ToTorch, num_layers: int = 0
         ) -> CheckpointContent:
    """Return the part of a checkpoint with parameters, optimiser and schedule.

    Args:
        state: State on the host (`Parallel.fetch_state` or `Parallel.shards`).
        step: Number of optimiser steps taken, out of `num_steps`.
        to_torch: `Network.to_torch`.
        num_layers: `Network.num_named_layers`.
    """
    params = {PREFIX + name: array for name, array in to_torch(state["trainable"]).items()}
    # torch indexes parameters across all groups, and lists slots by index instead of name.
    ordered = _by_group(params, settings, num_layers)
    # Muon does not count steps, unlike the AdamW of the other parameters.
    entries: dict[int, dict[str, Any]] = {
        index: {} if settings.is_of_muon(settings.group_of(name, params[name].ndim, num_layers), num_layers)
        else settings.spec.counters(step) for index, name in enumerate(ordered)}
    index_of = {name: index for index, name in enumerate(ordered)}
    for slot, tree in state["optimizer"].items():
        for name, array in to_torch(tree).items():
            entries[index_of[PREFIX + name]][slot] = array
    groups = _groups(params, settings, settings.lr_at(step, num_steps), num_layers)
    return {
        "state_dict": params,
        "param_names": list(params),
        # Before the first step, torch's optimisers have no state.
        "optimizer_states": [{"state": {index: entry for index, entry in entries.items() if entry and step},
                              "param_groups": groups}],
        "lr_schedulers": [_schedule_state(groups, step)],
    }


def unpack(content: CheckpointContent, like: Tree, settings: Optimizer, to_torch: ToTorch, from_torch: FromTorch,
           num_layers: int = 0) -> Tree:
    """Return the state of a checkpoint on the host; `Parallel.put_state` copies it to the devices.

    Args:
        like: Shapes and dtypes of this run's state (`Parallel.shapes`).

    Raises:
        UserError: The checkpoint belongs to another model or optimiser.
    """
    saved = content["state_dict"]
    trainable = unpack_trainable(content, like["trainable"], to_torch, from_torch)
    like = jax.tree.map(_stand_in, like)
    # The indices follow from names and dimensions, as when the checkpoint was written.
    (optimizer,) = content["optimizer_states"]
    names = _by_group({name: saved[name] for name in content["param_names"]}, settings, num_layers)
    by_name = {names[index]: {**entry, **entry.get(_BITSANDBYTES, {})} for index, entry in optimizer["state"].items()}
    slots = {slot: from_torch(_fill(by_name, slot, to_torch(tree))) for slot, tree in like["optimizer"].items()}
    if AVERAGE in slots and not by_name:  # before the first step
        slots[AVERAGE] = jax.tree.map(lambda leaf: leaf.astype(np.float32), trainable)
    return {"trainable": trainable, "optimizer": slots}


def unpack_trainable(content: CheckpointContent, like: Tree, to_torch: ToTorch, from_torch: FromTorch) -> Tree:
    """Return only the trainable parameters, on the host; arguments and errors as for `unpack`."""
    saved = content["state_dict"]
    expected = {PREFIX + name: array for name, array in to_torch(jax.tree.map(_stand_in, like)).items()}
    check_parameters(*({name: array.shape for name, array in arrays.items()} for arrays in (saved, expected)))
    # Cast to this run's dtype, so that a run can resume with another precision.
    return from_torch({name.removeprefix(PREFIX): saved[name].astype(array.dtype) for name, array in expected.items()})


def _schedule_state(groups: list[dict[str, Any]], step: int) -> dict[str, Any]:
    """Return the state of torch's LambdaLR after `step` optimiser steps."""
    return {"base_lrs": [group["initial_lr"] for group in groups], "last_epoch": step, "_step_count": step + 1,
            "_is_initial": False, "_get_lr_called_within_step": False, "_last_lr": [group["lr"] for group in groups],
            "lr_lambdas": [None] * len(groups)}


def _by_group(params: dict[str, np.ndarray], settings: Optimizer, num_layers: int) -> list[str]:
    """Return names in the order of torch's indices: group by group of `Optimizer.group_of`."""
    # A stable sort keeps the order of the names within a group.
    return sorted(params, key=lambda name: settings.group_of(name, params[name].ndim, num_layers))


def _groups(params: dict[str, np.ndarray], settings: Optimizer, lr: float, num_layers: int) -> list[dict[str, Any]]:
    """Return torch's parameter groups; `lr` is the recipe's rate at this step."""
    options = {**settings.options, **settings.spec.group}
    group_indices = [settings.group_of(name, params[name].ndim, num_layers)
                     for name in _by_group(params, settings, num_layers)]
    factor = lr / (settings.lr or 1.0)
    # Groups without parameters are omitted, as in the torch engine.
    return [{"params": [index for index, group_index in enumerate(group_indices) if group_index == position], **group,
             "lr": group["lr"] * factor, "initial_lr": group["lr"],
             **(settings.muon_options if settings.is_of_muon(position, num_layers) else options)}
            for position, group in enumerate(settings.groups(num_layers)) if position in group_indices]


def _stand_in(leaf: jax.ShapeDtypeStruct) -> np.ndarray:
    """Return a zero array of this shape and dtype; its pages are never touched, so it takes no memory."""
    return np.zeros(leaf.shape, leaf.dtype)


def _fill(by_name: dict[str, dict[str, Any]], slot: str, expected: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Return one optimiser slot by parameter name; zeros before the first step."""
    filled = {}
    for name, array in expected.items():
        entry = by_name.get(PREFIX + name, {}) if by_name else {slot: lazy_array.zeros(array.shape)}
        is_8_bit = slot in entry and entry[slot].dtype == np.uint8  # bitsandbytes' codes, which are not supported
        if slot not in entry or is_8_bit or entry[slot].shape != array.shape:
            raise UserError(f"This checkpoint has no {slot} for {name}: it was saved with another optimiser. Resume "
                            "with the optimizer.name that the run was started with (config.yaml in its folder).")
        filled[name] = entry[slot].astype(array.dtype)
    return filled
