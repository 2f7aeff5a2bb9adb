"""Keys of `trainer`: types, defaults, documentation. The keys of TrainerFields work on both engines.

The JAX engine's trainer inherits its fields; the torch engine's passes most of them to Lightning.
"""

import math
from dataclasses import dataclass
from datetime import timedelta
from fractions import Fraction
from typing import Literal

from lmmods.core.errors import UserError
from lmmods.core.settings import require


class Logger:
    """Stand-in for the engine's class of loggers."""


class Callback:
    """Stand-in for the engine's class of callbacks."""


class Strategy:
    """Stand-in for the engine's classes of strategies."""


class ClusterEnvironment:
    """Stand-in for Lightning's class."""


class Profiler:
    """Stand-in for Lightning's class."""


@dataclass(kw_only=True, eq=False, repr=False)
class TrainerFields:
    """Train, evaluate and predict.

    Args:
        accelerator: Device type: cpu, gpu or tpu. `auto` picks the best available.
        devices: Number of devices per machine, or on torch a list of GPUs such as [0, 2]. `auto` and -1 use all
            devices, or one CPU.
        num_nodes: Number of machines. See docs/cluster.md.
        strategy: `ddp` replicates the model on every device; `fsdp` shards parameters, gradients and optimiser state
            across them. `auto` uses ddp on several devices. Or a class, such as lmmods.strategies.FSDP2: see
            docs/cluster.md.
        precision: Arithmetic: float32, bfloat16, or mixed with float32 master weights. `auto` is bf16-mixed if the
            hardware supports bfloat16, otherwise 32-true.
        logger: Loggers in addition to metrics.csv, which is always written. true and false add none.
        callbacks: Callbacks in addition to the built-in ones (checkpoint, samples, mmlu, publish). See
            docs/extending.md.
        max_epochs: Number of epochs; 1.5 stops in the middle of the second one.
        max_steps: Number of optimiser steps; -1 uses max_epochs.
        accumulate_grad_batches: Number of micro-batches per optimiser step on each device.
        gradient_clip_val: Maximum norm (or value) of the averaged gradient. null does not clip.
        gradient_clip_algorithm: What gradient_clip_val limits: norm or value. Default: norm.
        val_check_interval: Optimiser steps between validations (integer, over the whole run), or fraction of an epoch.
            Default: once per epoch.
        check_val_every_n_epoch: Epochs between validations, unless val_check_interval is an integer.
        limit_train_batches: Number of micro-batches per epoch on each device, or fraction of the epoch.
        limit_val_batches: Like limit_train_batches, for validation.
        limit_test_batches: Like limit_train_batches, for test.
        limit_predict_batches: Like limit_train_batches, for predict.
        overfit_batches: Train and validate on the same few micro-batches (number or fraction), without shuffling.
        num_sanity_val_steps: Number of validation batches to try before training; -1 tries all. Default: 2.
        log_every_n_steps: Optimiser steps between log entries. Default: 50.
        enable_checkpointing: Write checkpoints.
        enable_progress_bar: Show a progress bar, or lines where a bar is not possible.
        default_root_dir: Run folder.
        detect_anomaly: Stop at the operation that produces a NaN. Slow.
        heartbeat_timeout: Seconds without a heartbeat of another process after which the run ends. null waits as long
            as the libraries do. See docs/cluster.md.
    """

    accelerator: str = "auto"
    devices: list[int] | int | str = "auto"
    num_nodes: int = 1
    strategy: Literal["auto", "ddp", "fsdp"] | Strategy = "auto"
    precision: Literal["auto", "32-true", "bf16-true", "bf16-mixed", "16-mixed"] = "auto"
    logger: Logger | list[Logger] | bool | None = None
    callbacks: Callback | list[Callback] | None = None
    max_epochs: int | float | None = None
    max_steps: int = -1
    accumulate_grad_batches: int = 1
    gradient_clip_val: int | float | None = None
    gradient_clip_algorithm: str | None = None
    val_check_interval: int | float | None = None
    check_val_every_n_epoch: int | None = 1
    limit_train_batches: int | float | None = None
    limit_val_batches: int | float | None = None
    limit_test_batches: int | float | None = None
    limit_predict_batches: int | float | None = None
    overfit_batches: int | float = 0.0
    num_sanity_val_steps: int | None = None
    log_every_n_steps: int | None = None
    enable_checkpointing: bool = True
    enable_progress_bar: bool = True
    default_root_dir: str = "runs/default"
    detect_anomaly: bool = False
    heartbeat_timeout: int | None = 30


@dataclass(kw_only=True, eq=False, repr=False)
class TorchTrainerFields(TrainerFields):
    """Train, evaluate and predict with Lightning.

    Args:
        min_epochs: Minimum number of epochs.
        min_steps: Minimum number of optimiser steps.
        max_time: Maximum training time: DD:HH:MM:SS, or a mapping such as {hours: 8}.
        fast_dev_run: Run this many batches of each loop (true: one) and write nothing.
        deterministic: Require deterministic algorithms; `warn` uses them where they exist.
        benchmark: Let cuDNN search for the fastest algorithm.
        inference_mode: Evaluate under torch.inference_mode instead of torch.no_grad.
        profiler: Profile the parts of a step: simple, advanced, pytorch, or a class.
        barebones: Disable everything that could slow a step, to measure the loop.
        sync_batchnorm: Synchronise batch norm statistics between processes.
        reload_dataloaders_every_n_epochs: Epochs after which data loaders are rebuilt; 0 keeps them.
        plugins: Cluster environments.
        model_registry: Model name on Lightning's hub.
    """

    min_epochs: int | None = None
    min_steps: int | None = None
    max_time: str | timedelta | dict[str, int] | None = None
    fast_dev_run: int | bool = False
    deterministic: bool | Literal["warn"] | None = None
    benchmark: bool | None = None
    inference_mode: bool = True
    profiler: Profiler | str | None = None
    barebones: bool = False
    sync_batchnorm: bool = False
    reload_dataloaders_every_n_epochs: int = 0
    plugins: ClusterEnvironment | list[ClusterEnvironment] | None = None
    model_registry: str | None = None


@dataclass(kw_only=True, eq=False, repr=False)
class JaxTrainerFields(TrainerFields):
    """Train, evaluate and predict on JAX, which supports fewer values."""

    accelerator: Literal["auto", "cpu", "gpu", "cuda", "tpu"] = "auto"
    devices: int | Literal["auto"] = "auto"
    precision: Literal["auto", "32-true", "bf16-true", "bf16-mixed"] = "auto"
    gradient_clip_algorithm: Literal["norm", "value"] | None = None


# ---------------------------------------------------------------------------------------------------------------------
# Number of optimiser steps of a run, from `trainer.max_epochs` and `trainer.max_steps`.

def check_length(max_epochs: int | float | None, max_steps: int) -> None:
    """Raise UserError unless one of the keys limits training."""
    if max_epochs is None and max_steps == -1:
        raise UserError("trainer.max_steps or trainer.max_epochs is missing. Set one of them.", "trainer.max_steps",
                        "trainer.max_epochs")
    require(max_epochs in (None, -1) or math.isfinite(max_epochs) and max_epochs >= 0, "trainer.max_epochs", max_epochs,
            "0 or more (1.5 is one and a half epochs), or -1 to use trainer.max_steps")


def steps_per_epoch(batches_per_epoch: int, batches_per_step: int) -> int:
    """Return the number of optimiser steps in an epoch; arguments as in `num_steps`."""
    return -(-batches_per_epoch // batches_per_step)


def num_steps(batches_per_epoch: int, batches_per_step: int, max_epochs: int | float | None, max_steps: int) -> int:
    """Return the number of optimiser steps in a run. Raises UserError if neither key limits it.

    Args:
        batches_per_epoch: Micro-batches per device in an epoch.
        batches_per_step: Micro-batches per device in an optimiser step; the last step of an epoch may have fewer.
        max_epochs: Number of epochs; a partial epoch is rounded up to whole steps. None or -1 uses max_steps.
        max_steps: Number of optimiser steps; -1 uses max_epochs.
    """
    check_length(max_epochs, max_steps)
    steps_by_epochs = math.inf
    if max_epochs is not None and max_epochs != -1:
        # From the decimal digits: as a float, 1.1 is a little more than eleven tenths.
        full_epochs, partial_epoch = divmod(Fraction(str(max_epochs)), 1)
        steps = steps_per_epoch(batches_per_epoch, batches_per_step)
        steps_by_epochs = full_epochs * steps + math.ceil(partial_epoch * steps)
    length = min(steps_by_epochs, math.inf if max_steps == -1 else max_steps)
    if math.isinf(length):
        raise UserError("trainer.max_steps or trainer.max_epochs is missing. Set one of them.")
    return int(length)


def limit_batches(num_batches: int, limit: int | float | None, role: str) -> int:
    """Return the number of micro-batches in a pass over a set, limited by `trainer.limit_<role>_batches`.

    Args:
        num_batches: Number of micro-batches in the set, each counted once for all devices.
        limit: Number or fraction of the micro-batches; None does not limit them.

    Raises:
        UserError: No micro-batch is left to train on.
    """
    if limit is None:
        return num_batches
    count = int(num_batches * limit) if isinstance(limit, float) else limit
    if count < 1 and role == "train":
        raise UserError(f"trainer.limit_train_batches is {limit}, which leaves none of {num_batches} micro-batches. "
                        "Raise it.")
    return min(count, num_batches)
