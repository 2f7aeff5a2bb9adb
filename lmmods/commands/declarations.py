"""What the command line must know before libraries are imported: keys, types, defaults, documentation and class names.

The fields of tasks, data modules and blocks are declared where both engines take them from. Here are the keys of
`trainer`, whose two classes lie behind the libraries, and stand-ins that bear the names of tasks and data modules.
tests/test_early_check.py holds all of it equal to the real classes.
"""

from dataclasses import dataclass
from datetime import timedelta
from typing import Literal

from lmmods.commands.allowed_callbacks import ALLOWED
from lmmods.core import task_fields
from lmmods.data import fields


class Declared:
    """Stands for a class that another module defines."""


# trainer ----------------------------------------------------------------------------------------------------------


class Logger(Declared):
    """Where a run logs beside metrics.csv."""


class Callback(Declared):
    """A callback of the engine."""


class Strategy(Declared):
    """How a run is spread over devices."""


class ClusterEnvironment(Declared):
    """How the processes of a run find each other."""


class Profiler(Declared):
    """What measures the parts of a step."""


@dataclass(kw_only=True)
class TrainerKeys(Declared):
    """Train, evaluate and predict.

    Args:
        accelerator: Platform: cpu, gpu, tpu; `auto` takes the best there is.
        devices: How many devices of this machine, or on torch a list of GPUs; `auto` takes all (on a CPU one).
        num_nodes: Machines of the run; see docs/cluster.md.
        strategy: `ddp` keeps everything on every device; `fsdp` shards parameters, gradients and optimiser state over
            all of them; `auto` takes ddp when there are several devices. As a class: on torch
            lmmods.strategies.FSDP2, lmmods.strategies.DeepSpeed or lightning's DDPStrategy, on JAX MeshSharding.
        precision: Arithmetic: float32; bfloat16 throughout; or mixed, with float32 master weights. `auto` is bf16-mixed
            where the hardware multiplies bfloat16 and 32-true elsewhere; config.yaml names what it was.
        logger: Loggers beside metrics.csv, which is always written. True or false add none.
        callbacks: Callbacks beside those of the blocks checkpoint, samples, mmlu and publish.
        max_epochs: Epochs to train; a fraction is allowed.
        max_steps: Optimiser steps to train; -1 leaves it to max_epochs.
        accumulate_grad_batches: Micro-batches of each device that make an optimiser step.
        gradient_clip_val: Largest norm (or value) of the averaged gradient; null does not clip.
        gradient_clip_algorithm: What gradient_clip_val bounds: norm or value; null is norm.
        val_check_interval: Micro-batches of each device (an integer, over the whole run) or share of an epoch between
            validations; null is once an epoch.
        check_val_every_n_epoch: Epochs between validations where val_check_interval is no integer.
        limit_train_batches: How much of an epoch: micro-batches of each device, or a share.
        limit_val_batches: The same of the validation set.
        limit_test_batches: The same of the test set.
        limit_predict_batches: The same of the rows to predict.
        overfit_batches: Train and validate on the same few micro-batches (a number or a share), unshuffled.
        num_sanity_val_steps: Validation batches checked before training; -1 takes all, null 2.
        log_every_n_steps: Optimiser steps between logged rows; null is 50.
        enable_checkpointing: False writes no checkpoint.
        enable_progress_bar: False shows no bar and no lines in its place.
        default_root_dir: The run folder.
        detect_anomaly: Stop at the operation that makes a NaN; slow.
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


@dataclass(kw_only=True)
class TorchTrainerKeys(TrainerKeys):
    """Train, evaluate and predict with Lightning.

    Args:
        min_epochs: Epochs to train at least, whatever would stop the run before.
        min_steps: Optimiser steps to train at least.
        max_time: Stop after this time: DD:HH:MM:SS, or a mapping such as {hours: 8}.
        fast_dev_run: Run one batch of each loop (true), or so many, and write nothing.
        deterministic: Whether torch must use deterministic algorithms; `warn` uses them where there are some.
        benchmark: cuDNN's search for the fastest algorithm.
        inference_mode: Evaluate under torch.inference_mode instead of no_grad.
        profiler: What measures the parts of a step: simple, advanced, pytorch, or a class.
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


@dataclass(kw_only=True)
class JaxTrainerKeys(TrainerKeys):
    """Train, evaluate and predict on JAX."""

    accelerator: Literal["auto", "cpu", "gpu", "cuda", "tpu"] = "auto"
    devices: int | Literal["auto"] = "auto"
    precision: Literal["auto", "32-true", "bf16-true", "bf16-mixed"] = "auto"
    gradient_clip_algorithm: Literal["norm", "value"] | None = None


# Keys whose values are classes of libraries, and which of them may be named; what they hold is left to the engine.
CLASSES = {
    "torch": {
        "trainer.logger": ("CSVLogger", "CometLogger", "MLFlowLogger", "TensorBoardLogger", "WandbLogger"),
        "trainer.callbacks": tuple(ALLOWED),
        "trainer.strategy": ("lmmods.strategies.FSDP2", "lmmods.strategies.DeepSpeed", "DDPStrategy",
                             "SingleDeviceStrategy"),
        "trainer.plugins": ("KubeflowEnvironment", "LSFEnvironment", "LightningEnvironment", "MPIEnvironment",
                            "SLURMEnvironment", "TorchElasticEnvironment", "XLAEnvironment"),
        "trainer.profiler": ("AdvancedProfiler", "PassThroughProfiler", "PyTorchProfiler", "SimpleProfiler",
                             "XLAProfiler"),
    },
    "jax": {
        "trainer.logger": ("CSVLogger", "CometLogger", "MLFlowLogger", "TensorBoardLogger", "WandbLogger"),
        "trainer.callbacks": ("EarlyStopping",),
        "trainer.strategy": ("MeshSharding",),
    },
}


class EngineCommands:
    """What `fit`, `validate`, `test`, `predict` and `inspect` take beside the recipe, on either engine."""

    def fit(self, ckpt_path: str | None = None, overwrite: bool = False) -> None:
        """Train.

        Args:
            ckpt_path: Go on from a checkpoint: `last`, `best`, a step number or a path.
            overwrite: Delete what an earlier run left in the run folder.
        """

    def validate(self, ckpt_path: str | None = None) -> None:
        """Evaluate on the validation set.

        Args:
            ckpt_path: Checkpoint to evaluate: `last`, `best`, a step number or a path; null is the untrained start.
        """

    def test(self, ckpt_path: str | None = None) -> None:
        """Evaluate on the test set.

        Args:
            ckpt_path: Checkpoint to evaluate: `last`, `best`, a step number or a path; null is the untrained start.
        """

    def predict(self, ckpt_path: str | None = None) -> None:
        """Write predictions.jsonl.

        Args:
            ckpt_path: Checkpoint to use: `last`, `best`, a step number or a path; null is the untrained start.
        """

    def inspect(self, rows: int = 4,
                which: Literal["first", "longest", "most_cut", "most_unknown"] | list[int] = "first") -> None:
        """Show what would be trained on, and train nothing.

        Args:
            rows: How many rows to show with their loss mask.
            which: Which rows: the first, the worst by a measure, or these numbers of training rows.
        """


# model and data ---------------------------------------------------------------------------------------------------


class TaskModule(task_fields.TaskFields, Declared):
    """A network in training."""


class SFT(task_fields.CausalFields, TaskModule):
    """Fine-tune a causal LM on instructions or chats; predict generates answers."""


class CLM(task_fields.CausalFields, TaskModule):
    """Train a causal LM on text; predict goes on with the text."""


class MLM(task_fields.MLMFields, TaskModule):
    """Train a masked LM; predict fills the gaps."""


class QA(TaskModule):
    """Find the span of a context that answers a question."""


class DataModule(fields.DataFields, Declared):
    """Text in, batches out."""


class SFTData(fields.SFTDataFields, DataModule):
    """Conversations for supervised fine-tuning; one row of a batch is one conversation."""


class CLMData(fields.CLMDataFields, DataModule):
    """Text for causal language modelling."""


class MLMData(fields.MLMDataFields, DataModule):
    """Text for masked language modelling."""


class QAData(fields.QADataFields, DataModule):
    """Questions on contexts."""


TASKS = {"model": ("CLM", "MLM", "QA", "SFT"), "data": ("CLMData", "MLMData", "QAData", "SFTData")}
