"""Lightning's Trainer with this project's run folder, exact resume and clean interruption."""

import functools
import os
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from datetime import timedelta
from pathlib import Path
from typing import Any, Literal

import lightning as L
import torch
from lightning.pytorch.callbacks import Timer
from lightning.pytorch.loggers import Logger
from lightning.pytorch.plugins.environments import ClusterEnvironment, SLURMEnvironment, TorchElasticEnvironment
from lightning.pytorch.strategies import DDPStrategy, SingleDeviceStrategy, Strategy
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from lightning.pytorch.utilities.rank_zero import rank_zero_only

from lmmods.core.console import say
from lmmods.core.errors import UserError, first_line
from lmmods.core.hardware import no_device, processor
from lmmods.core.parity import Row
from lmmods.core.peers import Peers, cannot_meet, check_timeout
from lmmods.core.signals import Interruption
from lmmods.data.base import DataModule
from lmmods.recipe.trainer_fields import check_length
from lmmods.runs.checkpoint import read_plain
from lmmods.runs.csv_logger import MetricsCSV
from lmmods.runs.folder import RunFolder, find_checkpoint_to_resume
from lmmods.runs.identity import RunIdentity
from lmmods.runs.inspect import show_data, show_recipe
from lmmods.runs.progress import BatchSplit
from lmmods.runs.progress import Progress as RunProgress
from lmmods.runs.schedule import Schedule
from lmmods.runs.start import RunSummary, say_engine
from lmmods.runs.step_metrics import check_evaluated
from lmmods.runs.wandb import RolloutTable
from lmmods.torch_engine.callbacks.checkpoint import Checkpoint, FolderCheckpointIO
from lmmods.torch_engine.callbacks.early_stopping import SharedEarlyStopping
from lmmods.torch_engine.callbacks.evaluation import PredictionWriter
from lmmods.torch_engine.callbacks.metrics import Metrics, Progress
from lmmods.torch_engine.callbacks.run_events import RunEvents, StartReport
from lmmods.torch_engine.compat.lightning import watch_launched
from lmmods.torch_engine.nn.cpu_kernels import fast_products
from lmmods.torch_engine.nn.micro_batches import sum_over_processes
from lmmods.torch_engine.nn.sharding import model_parallel_size
from lmmods.torch_engine.parity import measure
from lmmods.torch_engine.precision import choose_precision
from lmmods.torch_engine.strategies.deepspeed import DeepSpeed
from lmmods.torch_engine.strategies.fsdp2 import FSDP2


class Trainer(L.Trainer):
    """Train, evaluate and predict with Lightning; TrainerFields and TorchTrainerFields document the keys."""

    def __init__(self, *, logger: Logger | list[Logger] | bool | None = None,
                 callbacks: L.Callback | list[L.Callback] | None = None,
                 precision: Literal["auto", "32-true", "bf16-true", "bf16-mixed", "16-mixed"] = "auto",
                 strategy: Literal["auto", "ddp", "fsdp"] | Strategy = "auto", default_root_dir: str = "runs/default",
                 val_check_interval: int | float | None = None, check_val_every_n_epoch: int | None = 1,
                 enable_checkpointing: bool = True, enable_progress_bar: bool = True,
                 max_epochs: int | float | None = None, max_steps: int = -1, min_epochs: int | None = None,
                 max_time: str | timedelta | dict[str, int] | None = None, accumulate_grad_batches: int = 1,
                 gradient_clip_val: int | float | None = None, limit_train_batches: int | float | None = None,
                 accelerator: str = "auto", devices: list[int] | int | str = "auto",
                 plugins: ClusterEnvironment | list[ClusterEnvironment] | None = None,
                 heartbeat_timeout: int | None = 30, **kwargs: Any):
        self._precision_reason: str | None = None
        if precision == "auto":
            precision, self._precision_reason = choose_precision(accelerator)
        check_accelerator(accelerator, devices)
        callbacks = list(callbacks) if isinstance(callbacks, list) else [callbacks] if callbacks else []
        check_length(max_epochs, max_steps)
        check_timeout(heartbeat_timeout)
        checkpoints = [callback for callback in callbacks if isinstance(callback, Checkpoint)]
        callbacks = [SharedEarlyStopping.replace(callback) for callback in callbacks if callback not in checkpoints]
        if enable_checkpointing:
            callbacks += checkpoints or [Checkpoint()]
        progress = Progress() if enable_progress_bar else None
        self._metrics = metrics = Metrics(progress.show) if progress else Metrics()
        # The order matters: StartReport prepares the folder, and RunEvents saves the state of all callbacks before it.
        self._run_events = RunEvents(metrics, callbacks)
        callbacks = [StartReport(), metrics, *([RunTimer(max_time)] if max_time is not None else []), *callbacks,
                     self._run_events, PredictionWriter()]
        callbacks += [progress] if progress else []
        plugins = list(plugins) if isinstance(plugins, list) else [plugins] if plugins else []
        if SLURMEnvironment.detect() and not TorchElasticEnvironment.detect():
            # Lightning's requeueing writes its own checkpoint, which a later start would load instead of this run's.
            plugins.append(SLURMEnvironment(auto_requeue=False))
        try:
            super().__init__(
                # Loggers, checkpoints, progress bar and summary are this project's own.
                logger=False,
                callbacks=callbacks,
                precision=precision,
                strategy=choose_strategy(strategy),
                default_root_dir=default_root_dir,
                val_check_interval=val_check_interval,
                # An interval in steps counts over the whole run; Lightning then requires None.
                check_val_every_n_epoch=None if isinstance(val_check_interval, int) else check_val_every_n_epoch,
                enable_checkpointing=False,
                enable_progress_bar=False,
                enable_model_summary=False,
                enable_autolog_hparams=False,
                use_distributed_sampler=False,  # the data module divides batches among processes
                # `RunEvents` ends the run after its last step: Lightning's own limits know no fraction of an epoch, and
                # skip the end of a run that is resumed after it.
                max_epochs=-1,
                min_epochs=min_epochs or 0,  # with None, `min_steps` would make it 1
                accelerator=accelerator,
                devices="auto" if devices == -1 else devices,
                plugins=[*plugins, FolderCheckpointIO()],
                **kwargs,
            )
        except (MisconfigurationException, ModuleNotFoundError, TypeError, ValueError) as error:  # bad values
            raise UserError(f"trainer: {error}") from error
        # The training loader obeys these keys: to Lightning a batch is an optimiser step.
        self.train_limit = limit_train_batches
        if self.overfit_batches:
            self.limit_train_batches = 1.0
        self.accumulate, self.clip_val = accumulate_grad_batches, gradient_clip_val
        self.length = (max_steps, max_epochs)  # as written in the recipe
        if self.fast_dev_run:
            self.length = (int(self.fast_dev_run), None)
        self.stopwatch = metrics.stopwatch
        self._rollout_table = RolloutTable()
        self.run_folder = RunFolder(default_root_dir)
        extra = logger if isinstance(logger, list) else [logger] if isinstance(logger, Logger) else []
        # Attached only after data and model have loaded, so that a failed start leaves no files behind.
        self.run_loggers: list[Logger] = [MetricsCSV(self.run_folder.metrics_csv), *extra]
        self.resumed_from: Path | None = None
        self.recipe: dict[str, Any] = {}  # the complete recipe, written as config.yaml
        self.identity = RunIdentity()
        self.interruption = Interruption(saves=enable_checkpointing)
        self.heartbeat_timeout = heartbeat_timeout
        if heartbeat_timeout is not None:
            watch_launched(self.strategy)

    # Commands --------------------------------------------------------------------------------------------------------

    def fit(self, model, train_dataloaders=None, val_dataloaders=None, datamodule=None,
            ckpt_path: str | None = None, overwrite: bool = False, stop_at: int | None = None) -> None:
        self.interruption.stop_at = stop_at
        check = functools.partial(self.run_folder.check_fit, ckpt_path, overwrite, self.recipe, stop_at)
        with self._lock_run_folder("fit", check), self.fast_products(model):
            self.resumed_from = checkpoint = find_checkpoint_to_resume(self.run_folder, ckpt_path)
            if checkpoint:
                datamodule.resume_from(read_plain(checkpoint))
            # Before the process group exists and before anything is restored; only rank 0 reads the data.
            for line in self.identity.resolve(None if rank_zero_only.rank else datamodule, checkpoint,
                                              self.batch_split(datamodule)):
                say(line)
            with suppress(CompleteRun):
                super().fit(model, train_dataloaders, val_dataloaders, datamodule, ckpt_path=checkpoint)

    def validate(self, model=None, dataloaders=None, datamodule=None, ckpt_path: str | None = None) -> Any:
        """Evaluate on the validation set and return Lightning's metrics, one dict per loader."""
        with self._lock_run_folder("validate"), self.fast_products(model):
            checkpoint = self._prepare_checkpoint(ckpt_path, datamodule)
            metrics = super().validate(model, dataloaders, checkpoint, verbose=False, datamodule=datamodule)
        check_evaluated(metrics)
        return metrics

    def test(self, model=None, dataloaders=None, datamodule=None, ckpt_path: str | None = None) -> Any:
        """Evaluate on the test set and return Lightning's metrics, one dict per loader."""
        with self._lock_run_folder("test"), self.fast_products(model):
            checkpoint = self._prepare_checkpoint(ckpt_path, datamodule)
            return super().test(model, dataloaders, checkpoint, verbose=False, datamodule=datamodule)

    def predict(self, model=None, dataloaders=None, datamodule=None, ckpt_path: str | None = None) -> None:
        """Run the model on the predict set and write predictions.jsonl."""
        check = functools.partial(self.run_folder.check_results, self.recipe)
        with self._lock_run_folder("predict", check), self.fast_products(model):
            super().predict(model, dataloaders, datamodule, return_predictions=False,
                            ckpt_path=self._prepare_checkpoint(ckpt_path, datamodule))

    def inspect(self, model=None, datamodule=None, rows: int = 4,
                which: Literal["first", "longest", "most_cut", "most_unknown"] | list[int] = "first",
                recipe: bool = False) -> None:
        """Show training rows, sizes and memory, without training."""
        self._say_engine()
        datamodule.trainer = self
        datamodule.prepare_data()
        datamodule.setup("fit")
        self._build(model, datamodule)
        show_data(datamodule, rows, which)
        print()
        self.summary(datamodule.train_dataloader().num_batches).say(datamodule)
        if recipe:
            show_recipe(self.recipe, datamodule)

    def measure(self, model: Any, datamodule: DataModule, rows: list[Row], folder: Path) -> None:
        """Write torch's loss, logits and gradient of the given rows to a folder, to compare with JAX."""
        self._say_engine()
        self._build(model, datamodule)
        self.strategy.model_to_device()
        measure(model, rows, folder)

    def _build(self, model: Any, datamodule: DataModule) -> None:
        """Build the network without running Lightning's loops."""
        model.trainer = datamodule.trainer = self
        self.strategy.connect(model)
        with self.strategy.tensor_init_context():
            self.datamodule = datamodule
            model.configure_model()

    def _prepare_checkpoint(self, ckpt_path: str | None, datamodule: DataModule) -> Path | None:
        if ckpt_path is None:
            return None
        checkpoint = self.run_folder.resolve(ckpt_path)
        datamodule.resume_from(read_plain(checkpoint))
        for line in self.identity.check_evaluation(checkpoint):
            say(line)
        return checkpoint

    @contextmanager
    def _lock_run_folder(self, command: str, check: Callable[[], None] = lambda: None) -> Iterator[None]:
        """Lock the run folder for one command. Processes started by a launcher learn of a problem in `setup`."""
        self._say_engine()
        is_launched = self.world_size > 1 and self.strategy.cluster_environment.creates_processes_externally
        try:
            with Peers.current().end_together(), self.run_folder.lock(command, check, self.is_global_zero,
                                                                      stores_error=is_launched):
                yield
        except torch.distributed.DistError as error:
            # Once the group exists, a collective of the run has failed; before that, processes could not connect.
            if torch.distributed.is_initialized():
                raise
            address = os.environ.get("MASTER_ADDR"), os.environ.get("MASTER_PORT")
            raise cannot_meet(*address, first_line(error)) from error

    def fast_products(self, model: Any) -> AbstractContextManager[None]:
        """Return the context that a command computes in: fast products if `model.fast_kernels` is set."""
        return fast_products(self.strategy.root_device) if model.fast_kernels else nullcontext()

    def _say_engine(self) -> None:
        device = self.strategy.root_device
        device_name = torch.cuda.get_device_name(device) if device.type == "cuda" else device.type.upper()
        say_engine("torch", self.world_size, device_name, self.precision, self._precision_reason)

    # Metrics ---------------------------------------------------------------------------------------------------------

    def log_evaluation(self, metrics: dict[str, float]) -> None:
        """Log a callback's metrics at this step, and keep them for the final results."""
        self._metrics.steps.log(metrics, self.global_step)

    def log_rollout(self, metrics: dict[str, float], rollout: Any) -> None:
        """Log the metrics of a rollout at the step after which it was sampled."""
        self._metrics.steps.fetch()  # metrics of earlier steps come first
        self._metrics.steps.log(metrics, self.global_step)
        if self.is_global_zero:
            self._rollout_table.log(self.loggers, rollout.to_records(), self.global_step,
                                    self.log_every_n_steps)

    # Processes -------------------------------------------------------------------------------------------------------

    @property
    def num_data_ranks(self) -> int:
        """Number of micro-batches computed in parallel: one per process, or per group that shares a micro-batch."""
        return self.world_size // model_parallel_size(self.strategy)

    @property
    def batches_per_step(self) -> int:
        """Number of micro-batches per optimiser step, over all processes."""
        return self.accumulate * self.num_data_ranks

    def batch_split(self, data: DataModule) -> BatchSplit:
        """Return how optimiser steps are split into micro-batches."""
        return BatchSplit(data.batch_size, self.accumulate, self.num_data_ranks)

    @property
    def data_rank(self) -> int:
        """Index of this process's micro-batch among the parallel ones, from 0 to `num_data_ranks` - 1."""
        return self.global_rank // model_parallel_size(self.strategy)

    # Interruption ----------------------------------------------------------------------------------------------------

    def is_interrupted(self) -> bool:
        """True if any process has been asked to stop. A collective call: every process must make it."""
        if self.world_size == 1:
            return self.interruption.is_due
        # One process may receive the signal before the others, so all stop if any has received it.
        is_due = torch.tensor(float(self.interruption.is_due), device=self.strategy.root_device)
        return bool(sum_over_processes(is_due, self.strategy) > 0)

    def stop_if_requested(self) -> None:
        """Abandon the current step if this process, the only one of the run, has been asked to stop."""
        if self.world_size == 1 and self.interruption.is_due:
            self._run_events.abandon_step(self, self.lightning_module)

    # Length ----------------------------------------------------------------------------------------------------------

    @property
    def estimated_stepping_batches(self) -> int:
        """Number of optimiser steps of the run; loads the data."""
        self.fit_loop.setup_data()
        return self.num_steps

    @functools.cached_property
    def num_steps(self) -> int:
        """Number of optimiser steps of the run; for use in fit, once the data is loaded."""
        return self.schedule().num_steps

    @property
    def is_stopping(self) -> bool:
        """True if `should_stop` ends the run after this step: its minimum length is reached."""
        return self.should_stop and self.global_step >= (self.min_steps or 0) and self.current_epoch >= self.min_epochs

    def end(self) -> None:
        """End the run after the step just done, whatever its minimum length."""
        self.should_stop = True
        self.fit_loop.min_epochs = self.fit_loop.epoch_loop.min_steps = 0

    def check_unfinished(self) -> None:
        """Raise CompleteRun if a resumed run has nothing left to do, not even its end.

        A run killed after its last step still performs the end of a run, so that samples, metrics, model and loss plot
        are written. A complete run only reports that it is complete.
        """
        if self.resumed_from is None:
            return
        # For each stopping rule, why it keeps the resumed run stopped; empty if it does not.
        stop_reasons = [callback.rule.begin(self.has_validation) for callback in self.callbacks
                        if isinstance(callback, SharedEarlyStopping)]
        is_out_of_time = any(callback.time_remaining() <= 0
                             for callback in self.callbacks if isinstance(callback, Timer))
        if ((self.global_step >= self.num_steps or any(stop_reasons) or is_out_of_time)
                and self.run_folder.was_complete(self.global_step, *self.length, stop_reasons, is_out_of_time)):
            raise CompleteRun

    def schedule(self, batches_per_epoch: int | None = None) -> Schedule:
        """Return the schedule of the run: its length, and when it validates.

        Args:
            batches_per_epoch: Micro-batches per device and epoch. Default: the loader's number, once it is loaded.
        """
        max_steps, max_epochs = self.length
        return Schedule.from_keys(
            batches_per_epoch=batches_per_epoch or self.train_dataloader.num_batches,
            batches_per_step=self.accumulate, num_val_batches=int(self.has_validation),
            max_epochs=max_epochs, max_steps=max_steps, val_check_interval=self.val_check_interval,
            val_epochs=self.check_val_every_n_epoch)

    def summary(self, batches_per_epoch: int | None = None) -> RunSummary:
        """Summarise the run before its first step; arguments as in `schedule`."""
        module = self.lightning_module
        return RunSummary(module, module.describe(), self.schedule(batches_per_epoch), self.num_data_ranks,
                          module.step_memory())

    def machine(self) -> dict[str, Any]:
        """Return devices and settings for manifest.json."""
        return describe_machine(self)

    # Position --------------------------------------------------------------------------------------------------------

    @functools.cached_property
    def has_validation(self) -> bool:
        """True if the run has validation data; for use in fit."""
        return bool(self.limit_val_batches and self.datamodule.val_dataloader())

    @property
    def progress(self) -> RunProgress:
        """Position of the run; for use from `on_train_batch_end` to the next step, and at the start of a new run."""
        return RunProgress(self.current_epoch, self.fit_loop.batch_idx + 1, self.global_step, self.is_last_batch)

    def validation_is_due(self) -> bool:
        """True if a validation follows this step; for use in `on_train_batch_end`."""
        return self.has_validation and (self.is_stopping or self.schedule().validates_after(self.progress))


class CompleteRun(Exception):
    """Raised when a resumed run is already complete; nothing is changed."""


class RunTimer(Timer):
    """`trainer.max_time`. A run that is resumed without time left still performs its end."""

    @property
    def state_key(self) -> str:
        return Timer.__qualname__

    def on_fit_start(self, trainer: L.Trainer, *_: Any) -> None:
        """Do nothing: if time is up here, Lightning returns from `fit` at once."""

    def on_train_start(self, trainer: L.Trainer, module: L.LightningModule) -> None:
        super().on_train_start(trainer, module)
        if trainer.strategy.broadcast(self.time_remaining() <= 0):
            trainer.should_stop = True


# ---------------------------------------------------------------------------------------------------------------------
# Devices: check that the recipe's devices are available, and describe them for manifest.json.

def check_accelerator(accelerator: str, devices: list[int] | int | str) -> None:
    """Raise UserError if torch does not find these devices, or finds too few. Lightning checks the rest."""
    if accelerator == "tpu":
        raise UserError("trainer.accelerator is tpu, which the torch engine does not support. Use --engine jax.")
    cuda, mps = torch.cuda.is_available(), torch.backends.mps.is_available()
    if not {"gpu": cuda or mps, "cuda": cuda, "mps": mps}.get(accelerator, True):
        raise no_device(accelerator, "torch")
    indices = devices if isinstance(devices, list) else range(devices) if isinstance(devices, int) else []
    if accelerator == "cpu" or not cuda:
        if isinstance(devices, list) and not mps:
            raise UserError(f"trainer.devices is {devices}, indices of GPUs, but torch finds no GPU on this machine. "
                            "Set it to auto.")
    elif (num_gpus := torch.cuda.device_count()) <= max(indices, default=-1):
        raise UserError(f"trainer.devices is {devices}, but this machine has {num_gpus} CUDA GPUs. Lower it, or set "
                        "it to auto.")


def describe_machine(trainer: L.Trainer) -> dict[str, Any]:
    """Return devices and settings of a run about to start, with the JAX engine's keys."""
    device = trainer.strategy.root_device
    settings: dict[str, Any] = {
        "threads": torch.get_num_threads(), "cpu_capability": torch.backends.cpu.get_cpu_capability(),
        "deterministic": torch.are_deterministic_algorithms_enabled(),
        "matmul_precision": torch.get_float32_matmul_precision()}
    if device.type == "cuda":
        settings |= {"cuda": torch.version.cuda, "cudnn": torch.backends.cudnn.version(),
                     "cudnn_benchmark": torch.backends.cudnn.benchmark, "cudnn_tf32": torch.backends.cudnn.allow_tf32}
    return {"accelerator": device.type,
            "device": torch.cuda.get_device_name(device) if device.type == "cuda" else processor(),
            "num_devices": trainer.world_size, "num_processes": trainer.world_size,
            "strategy": type(trainer.strategy).__name__, "settings": settings}


# ---------------------------------------------------------------------------------------------------------------------
# Supported values of `trainer.strategy`.

def choose_strategy(strategy: str | Strategy) -> str | Strategy:
    """Return the strategy to pass to Lightning's trainer.

    Raises:
        UserError: DeepSpeed is not installed, or gradients or checkpoints could be wrong under the strategy.
    """
    if strategy == "fsdp":
        return FSDP2()
    if isinstance(strategy, DeepSpeed):
        strategy.check()
    if isinstance(strategy, (str, FSDP2, DeepSpeed)) or type(strategy) in (DDPStrategy, SingleDeviceStrategy):
        return strategy
    name = type(strategy).__name__
    instead = {"ModelParallelStrategy": "fsdp or lmmods.strategies.FSDP2", "FSDPStrategy": "fsdp",
               "DeepSpeedStrategy": "lmmods.strategies.DeepSpeed"}
    raise UserError(f"trainer.strategy: {name} is not supported: gradients or checkpoints could be wrong. Use "
                    f"{instead.get(name, 'ddp, fsdp or lmmods.strategies.DeepSpeed')} instead.")
