"""Private parts of Lightning's trainer that the torch engine uses, as of lightning 2.6.

Each use is tested by tests/compat/test_lightning.py.
"""

import os
from collections.abc import Callable
from typing import Any

import lightning as L
from lightning.fabric.utilities.distributed import _set_num_threads_if_needed
from lightning.pytorch.callbacks import EarlyStopping
from lightning.pytorch.loops.fit_loop import _FitLoop
from lightning.pytorch.loops.training_epoch_loop import _TrainingEpochLoop
from lightning.pytorch.strategies import ModelParallelStrategy, Strategy
from lightning.pytorch.strategies.launchers.subprocess_script import _SubprocessScriptLauncher
from torch.distributed.device_mesh import DeviceMesh

from lmmods.core.peers import LAUNCHER, Peers


def decide_loops(trainer: L.Trainer, skips: Callable[[bool], bool], validates: Callable[[], bool],
                 is_inside_step: Callable[[], bool]) -> None:
    """Override the decisions of Lightning's fit loops, which are based on counts of micro-batches.

    Subclasses of `_FitLoop` and `_TrainingEpochLoop` replace the trainer's loops, which no argument of Trainer selects.
    `skip` of the first makes fit return at once, and its `_can_stop_early` lets `Trainer.should_stop` end the run;
    `_should_check_val_fx` of the second decides after each micro-batch, and on resume, whether a validation follows.

    Args:
        skips: Returns True to leave fit without performing the end of the run; receives Lightning's own decision.
        validates: Returns True if a validation is due at the current position. A run about to stop always validates.
        is_inside_step: Returns True if the current optimiser step is incomplete, which stops such as `max_time` wait
            for.
    """
    class FitLoop(_FitLoop):
        @property
        def skip(self) -> bool:
            return skips(super().skip)

        @property
        def _can_stop_early(self) -> bool:
            return super()._can_stop_early and not is_inside_step()

    class EpochLoop(_TrainingEpochLoop):
        def _should_check_val_fx(self, data_fetcher: Any) -> bool:
            # False inside a step: the run goes on first.
            stops = self.trainer.should_stop and self.trainer.fit_loop._can_stop_early
            return self.trainer.enable_validation and (stops or validates())

    loop = FitLoop(trainer, trainer.min_epochs, trainer.max_epochs)
    loop.epoch_loop = EpochLoop(trainer, trainer.min_steps, trainer.max_steps)
    trainer.fit_loop = loop


def end_after(trainer: L.Trainer, num_steps: int) -> None:
    """End fit after `num_steps` optimiser steps: `epoch_loop.max_steps`; `Trainer.max_steps` has no setter."""
    trainer.fit_loop.epoch_loop.max_steps = num_steps


def epoch_ends(trainer: L.Trainer) -> bool:
    """True if the epoch ends with this batch, in `on_train_batch_end`: `epoch_loop._num_ready_batches_reached`.

    `Trainer.is_last_batch` only detects the end of the data, not that of limit_train_batches on a stream.
    """
    return trainer.fit_loop.epoch_loop._num_ready_batches_reached()


def validation_follows(trainer: L.Trainer) -> bool:
    """True if Lightning validates after this batch, in `on_train_batch_end`.

    `epoch_loop._should_check_val_fx`, with the argument `fit_loop._data_fetcher`. There is no public way to know it
    beforehand.
    """
    return trainer.fit_loop.epoch_loop._should_check_val_fx(trainer.fit_loop._data_fetcher)


def correct_logged_step(trainer: L.Trainer) -> None:
    """Set the step that callbacks log at to the steps done: `epoch_loop._batches_that_stepped`.

    After some resumes Lightning's own count is one behind or ahead.
    """
    trainer.fit_loop.epoch_loop._batches_that_stepped = trainer.global_step


def checks_at_epoch_end(callback: EarlyStopping) -> bool | None:
    """Return its argument `check_on_train_epoch_end`, stored only in `_check_on_train_epoch_end`."""
    return callback._check_on_train_epoch_end


def shard_over_all(strategy: ModelParallelStrategy) -> None:
    """Shard one copy of the parameters over all processes; must be called before set-up.

    Sets `_data_parallel_size` by `_tensor_parallel_size`, which the constructor has set. The constructor's argument
    `data_parallel_size` cannot be used, as the number of processes is unknown when the recipe is read.
    """
    strategy._data_parallel_size = strategy.num_nodes * strategy.num_processes // strategy._tensor_parallel_size


def give_mesh(module: L.LightningModule, mesh: DeviceMesh) -> None:
    """Set a module's device mesh, as ModelParallelStrategy does: `_device_mesh`."""
    module._device_mesh = mesh


class WatchedLauncher(_SubprocessScriptLauncher):
    """Start the processes of a machine as Lightning does, watched by `Peers` from their start.

    Lightning's own `launch` starts a thread that checks every five seconds if a process has died, and then kills this
    one without a message. The launcher can only be changed by `Strategy._launcher`.
    """

    def launch(self, function: Callable, *args: Any, trainer: L.Trainer | None = None, **kwargs: Any) -> Any:
        """Start the other processes, then call `function`."""
        environment = self.cluster_environment
        environment.validate_settings(num_devices=self.num_processes, num_nodes=self.num_nodes)
        if not environment.creates_processes_externally:
            self._call_children_scripts()
            # Rank of the first process of this machine, which is this one.
            first = environment.node_rank() * self.num_processes
            Peers.current().watch_started(dict(enumerate(self.procs, first + 1)))
        _set_num_threads_if_needed(num_processes=self.num_processes)
        return function(*args, **kwargs)

    def _call_children_scripts(self) -> None:
        """Start listening in the first process before the others start and connect to it by the environment."""
        os.environ.update(MASTER_ADDR=self.cluster_environment.main_address,
                          MASTER_PORT=str(self.cluster_environment.main_port), LOCAL_RANK="0",
                          NODE_RANK=str(self.cluster_environment.node_rank()),
                          WORLD_SIZE=str(self.num_processes * self.num_nodes), **{LAUNCHER: str(os.getpid())})
        Peers.current().begin()
        super()._call_children_scripts()


def watch_launched(strategy: Strategy) -> None:
    """Make `Peers` watch the processes that a strategy will start."""
    if type(strategy._launcher) is _SubprocessScriptLauncher:
        strategy._launcher = WatchedLauncher(strategy.cluster_environment, strategy.num_processes, strategy.num_nodes)
