"""Private parts of Lightning's trainer that the torch engine uses, as of lightning 2.6.

Each use is tested by tests/compat/test_lightning.py.
"""

import os
from collections.abc import Callable
from typing import Any

import lightning as L
from lightning.fabric.utilities.distributed import _set_num_threads_if_needed
from lightning.pytorch.callbacks import EarlyStopping
from lightning.pytorch.strategies import ModelParallelStrategy, Strategy
from lightning.pytorch.strategies.launchers.subprocess_script import _SubprocessScriptLauncher
from torch.distributed.device_mesh import DeviceMesh

from lmmods.core.peers import LAUNCHER, Peers
from lmmods.runs.progress import Progress


def loops_state(progress: Progress) -> dict[str, Any]:
    """Return the state of Lightning's loops after a step, as it saves it in the hook after a batch.

    Lightning has more counters than this project; the other ones keep the values of a new run.
    """
    # The step of the hook is not completed yet, as otherwise Lightning would not reset its count after an epoch's last
    # step. At the start of an epoch there is no such step, as otherwise Lightning would skip the first one.
    latest = min(progress.epoch_step, 1)

    def batches(count: int) -> dict[str, int]:
        return {"ready": count, "started": count, "processed": count, "completed": count - latest}

    epochs = {"ready": progress.epoch + 1, "started": progress.epoch + 1, "processed": progress.epoch,
              "completed": progress.epoch}
    steps = {"ready": progress.step, "completed": progress.step}
    return {
        "fit_loop": {
            "epoch_progress": {"total": dict(epochs), "current": dict(epochs)},
            "epoch_loop.state_dict": {"_batches_that_stepped": max(progress.step - 1, 0)},
            "epoch_loop.batch_progress": {"total": batches(progress.step), "current": batches(progress.epoch_step),
                                          "is_last_batch": progress.ends_epoch},
            "epoch_loop.manual_optimization.optim_step_progress": {"total": dict(steps), "current": dict(steps)},
        },
        **{f"{name}_loop": {} for name in ("validate", "test", "predict")},
    }


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
            Peers.current().watch_children(dict(enumerate(self.procs, first + 1)))
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
