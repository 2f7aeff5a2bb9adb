"""Keys of `trainer`: types, defaults, documentation. Those of TrainerFields work on both engines.

The JAX engine's trainer inherits its fields; the torch engine's hands most of them to Lightning.
"""

import math
from dataclasses import dataclass
from datetime import timedelta
from fractions import Fraction
from typing import Literal

from lmmods.core.errors import UserError
from lmmods.core.settings import require


class Logger:
    """Where a run logs beside metrics.csv: stands for the engine's class."""


class Callback:
    """Watches a run: stands for the engine's class."""


class Strategy:
    """How a run is spread over devices: stands for the engine's classes."""


class ClusterEnvironment:
    """How the processes of a run find each other: stands for Lightning's class, as `Profiler` does."""


class Profiler:
    """What measures the parts of a step."""


@dataclass(kw_only=True, eq=False, repr=False)
class TrainerFields:
    """Train, evaluate and predict.

    Args:
        accelerator: Platform: cpu, gpu, tpu; `auto` takes the best there is.
        devices: How many devices of this machine, or on torch a list of GPUs such as [0, 2]; `auto` and -1 take all (on
            a CPU one).
        num_nodes: Machines of the run; see docs/cluster.md.
        strategy: `ddp` keeps everything on every device; `fsdp` shards parameters, gradients and optimiser state over
            all of them; `auto` takes ddp when there are several devices. As a class: on torch
            lmmods.strategies.FSDP2, lmmods.strategies.DeepSpeed or lightning's DDPStrategy, on JAX MeshSharding. See
            docs/cluster.md.
        precision: Arithmetic: float32; bfloat16 throughout; or mixed, with float32 master weights. `auto` is bf16-mixed
            where the hardware multiplies bfloat16 and 32-true elsewhere; config.yaml names what it was.
        logger: Loggers in addition to metrics.csv, which is always written. True or false add none.
        callbacks: Callbacks in addition to those of the blocks checkpoint, samples, mmlu and publish.
        max_epochs: Epochs to train; a fraction is allowed: 1.5 ends in the middle of the second epoch.
        max_steps: Optimiser steps to train; -1 leaves it to max_epochs.
        accumulate_grad_batches: Micro-batches of each device that make an optimiser step.
        gradient_clip_val: Largest norm (or value) of the averaged gradient; null does not clip.
        gradient_clip_algorithm: What gradient_clip_val bounds: norm or value; null is norm.
        val_check_interval: Optimiser steps (an integer, over the whole run) or share of an epoch's steps between
            validations; null is once an epoch.
        check_val_every_n_epoch: Epochs between validations where val_check_interval is no integer.
        limit_train_batches: How much of an epoch: micro-batches of each device, or a share.
        limit_val_batches: The same of the validation set.
        limit_test_batches: The same of the test set.
        limit_predict_batches: The same of the rows to predict.
        overfit_batches: Train and validate on the same few micro-batches (a number or a share), unshuffled.
        num_sanity_val_steps: Validation batches tried before training; null is 2, -1 tries all.
        log_every_n_steps: Optimiser steps between logged rows; null is 50.
        enable_checkpointing: False writes no checkpoint.
        enable_progress_bar: False shows no bar and no lines in its place.
        default_root_dir: The run folder.
        detect_anomaly: Stop at the operation that makes a NaN; slow.
        heartbeat_timeout: Seconds without a sign of life of another process after which it is lost and the run ends;
            null waits for it as long as the libraries do.
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
        min_epochs: Epochs to train at least, whatever would stop the run before.
        min_steps: Optimiser steps to train at least.
        max_time: Stop after this time: DD:HH:MM:SS, or a mapping such as {hours: 8}.
        fast_dev_run: Run one batch of each loop (true), or so many, and write nothing.
        deterministic: Require deterministic algorithms of torch; `warn` uses them where there are some.
        benchmark: cuDNN's search for the fastest algorithm.
        inference_mode: Evaluate under torch.inference_mode instead of no_grad.
        profiler: Profiler of the parts of a step: simple, advanced, pytorch, or a class.
        barebones: Leave out all that could slow a step down, to measure the loop itself.
        sync_batchnorm: Share the statistics of batch norms between processes.
        reload_dataloaders_every_n_epochs: Epochs after which loaders are made anew; 0 keeps them.
        plugins: Cluster environments.
        model_registry: Name of the model on Lightning's hub.
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
    """Train, evaluate and predict on JAX, which takes some values less."""

    accelerator: Literal["auto", "cpu", "gpu", "cuda", "tpu"] = "auto"
    devices: int | Literal["auto"] = "auto"
    precision: Literal["auto", "32-true", "bf16-true", "bf16-mixed"] = "auto"
    gradient_clip_algorithm: Literal["norm", "value"] | None = None


# ---------------------------------------------------------------------------------------------------------------------
# How many optimiser steps a run has, by `trainer.max_epochs` and `trainer.max_steps`.

def check_length(max_epochs: int | float | None, max_steps: int) -> None:
    """Raise UserError unless the keys say how long to train."""
    if max_epochs is None and max_steps == -1:
        raise UserError("trainer.max_steps or trainer.max_epochs is missing: say how long to train.")
    require(max_epochs in (None, -1) or math.isfinite(max_epochs) and max_epochs >= 0, "trainer.max_epochs", max_epochs,
            "a number of epochs, 0 or more; 1.5 is one and a half, and -1 leaves it to trainer.max_steps")


def steps_per_epoch(batches_per_epoch: int, batches_per_step: int) -> int:
    """Optimiser steps of an epoch; arguments as of `num_steps`."""
    return -(-batches_per_epoch // batches_per_step)


def num_steps(batches_per_epoch: int, batches_per_step: int, max_epochs: int | float | None, max_steps: int) -> int:
    """Optimiser steps of a run. Raises UserError: the run has no end.

    Args:
        batches_per_epoch: Micro-batches of each device in an epoch.
        batches_per_step: Micro-batches of each device in an optimiser step; the last step of an epoch may have fewer.
        max_epochs: Epochs; a fraction of the steps of one is rounded up to whole steps. None or -1: max_steps decides.
        max_steps: Optimiser steps; -1: max_epochs decides.
    """
    check_length(max_epochs, max_steps)
    by_epochs = math.inf
    if max_epochs not in (None, -1):
        whole, part = divmod(Fraction(str(max_epochs)), 1)  # as written: 1.1 is no more than eleven tenths
        steps = steps_per_epoch(batches_per_epoch, batches_per_step)
        by_epochs = whole * steps + math.ceil(part * steps)
    steps = min(by_epochs, math.inf if max_steps == -1 else max_steps)
    if math.isinf(steps):
        raise UserError("trainer.max_steps or trainer.max_epochs is missing: say how long to train.")
    return steps


def limited(num_batches: int, limit: int | float | None, role: str) -> int:
    """Global micro-batches of a pass over a set, limited by `trainer.limit_<role>_batches`: a number or a share.

    Raises:
        UserError: Nothing is left to train on.
    """
    if limit is None:
        return num_batches
    wanted = int(num_batches * limit) if isinstance(limit, float) else limit
    if wanted < 1 and role == "train":
        raise UserError(f"trainer.limit_train_batches is {limit}: of {num_batches} micro-batches nothing is left.")
    return min(wanted, num_batches)
