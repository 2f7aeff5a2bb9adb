"""What the torch engine needs of Lightning's trainer that has no public name. Read in lightning 2.6.

Each use is held by tests/compat/test_lightning.py.
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
    """Decide what Lightning's loops of fit decide by their own counts, which are of micro-batches.

    Subclasses of `_FitLoop` and `_TrainingEpochLoop` take the place of the trainer's loops, which no argument of
    Trainer chooses: the first one's `skip` returns from fit at once, and its `_can_stop_early` lets
    `Trainer.should_stop` end the run; after each micro-batch, and where a run goes on, the second one's
    `_should_check_val_fx` says whether a validation follows.

    Args:
        skips: Whether fit is left without going through its end, given what Lightning would do.
        validates: Whether a validation is due where the run stands. A run that is to stop validates in any case.
        is_inside_step: Whether the step under way is incomplete: what stops a run, such as `max_time`, waits for it.
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
            stops = self.trainer.should_stop and self.trainer.fit_loop._can_stop_early
            return self.trainer.enable_validation and (stops or validates())

    loop = FitLoop(trainer, trainer.min_epochs, trainer.max_epochs)
    loop.epoch_loop = EpochLoop(trainer, trainer.min_steps, trainer.max_steps)
    trainer.fit_loop = loop


def end_after(trainer: L.Trainer, num_steps: int) -> None:
    """End fit after so many optimiser steps: `epoch_loop.max_steps`; `Trainer.max_steps` has no setter."""
    trainer.fit_loop.epoch_loop.max_steps = num_steps


def epoch_ends(trainer: L.Trainer) -> bool:
    """In on_train_batch_end: whether the epoch ends with this batch: `epoch_loop._num_ready_batches_reached`.

    `Trainer.is_last_batch` knows the end of the data alone, not that of limit_train_batches on a stream.
    """
    return trainer.fit_loop.epoch_loop._num_ready_batches_reached()


def validation_follows(trainer: L.Trainer) -> bool:
    """In on_train_batch_end: whether Lightning validates after this batch: `epoch_loop._should_check_val_fx`, for the
    fetcher of batches that `fit_loop._data_fetcher` is. Nothing public says so beforehand."""
    return trainer.fit_loop.epoch_loop._should_check_val_fx(trainer.fit_loop._data_fetcher)


def checks_at_epoch_end(callback: EarlyStopping) -> bool | None:
    """Its argument `check_on_train_epoch_end`, which it keeps in `_check_on_train_epoch_end` alone."""
    return callback._check_on_train_epoch_end


def shard_over_all(strategy: ModelParallelStrategy) -> None:
    """Before set-up: let all processes share one copy of the parameters: `_data_parallel_size` by
    `_tensor_parallel_size`, which its argument of that name has set.

    Its argument `data_parallel_size` would do, but how many processes there are is not known when the recipe is read.
    """
    strategy._data_parallel_size = strategy.num_nodes * strategy.num_processes // strategy._tensor_parallel_size


def give_mesh(module: L.LightningModule, mesh: DeviceMesh) -> None:
    """Let a module find the mesh of its processes, as ModelParallelStrategy does: `_device_mesh`."""
    module._device_mesh = mesh


class WatchedLauncher(_SubprocessScriptLauncher):
    """Start the processes of a machine as Lightning does, and let `Peers` watch them from their first moment on.

    Lightning's own `launch` starts a thread that looks every five seconds whether one has died, and then kills this
    process without a word. Nothing chooses another launcher but `Strategy._launcher`.
    """

    def launch(self, function: Callable, *args: Any, trainer: L.Trainer | None = None, **kwargs: Any) -> Any:
        """Call `function` when the others have been started."""
        environment = self.cluster_environment
        environment.validate_settings(num_devices=self.num_processes, num_nodes=self.num_nodes)
        if not environment.creates_processes_externally:
            self._call_children_scripts()
            first = environment.node_rank() * self.num_processes
            Peers.current().watch_started(dict(enumerate(self.procs, first + 1)))
        _set_num_threads_if_needed(num_processes=self.num_processes)
        return function(*args, **kwargs)

    def _call_children_scripts(self) -> None:
        """The first process must listen before another one looks for it, where it reads in the environment."""
        os.environ.update(MASTER_ADDR=self.cluster_environment.main_address,
                          MASTER_PORT=str(self.cluster_environment.main_port), LOCAL_RANK="0",
                          NODE_RANK=str(self.cluster_environment.node_rank()),
                          WORLD_SIZE=str(self.num_processes * self.num_nodes), **{LAUNCHER: str(os.getpid())})
        Peers.current().begin()
        super()._call_children_scripts()


def watch_launched(strategy: Strategy) -> None:
    """Let `Peers` watch the processes that a strategy will start."""
    if type(strategy._launcher) is _SubprocessScriptLauncher:
        strategy._launcher = WatchedLauncher(strategy.cluster_environment, strategy.num_processes, strategy.num_nodes)
