"""Declarations for the command line before libraries are imported: keys, types, defaults, docs and class names.

Fields are declared in the modules that the engines share. This module adds the keys of Lightning's trainer and
stand-ins named after the tasks and data modules. tests/commands/test_early_check.py keeps them equal to the real
classes.
"""

from dataclasses import dataclass
from datetime import timedelta
from typing import Literal

from lmmods.recipe import data_fields, task_fields, trainer_fields
from lmmods.recipe.allowed_callbacks import ALLOWED

# trainer ----------------------------------------------------------------------------------------------------------


class ClusterEnvironment:
    """How the processes of a run find each other: stands for Lightning's class, as `Profiler` does."""


class Profiler:
    """What measures the parts of a step."""


@dataclass(kw_only=True)
class TorchTrainerFields(trainer_fields.TrainerFields):
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


LOGGERS = ("CSVLogger", "MLFlowLogger", "TensorBoardLogger", "WandbLogger")
# Keys whose values are library classes, with the tested classes that may be given by short name; any other class needs
# its import path. Their settings are validated by the engine.
CLASSES = {
    "torch": {
        "trainer.logger": LOGGERS,
        "trainer.callbacks": tuple(ALLOWED),
        "trainer.strategy": ("lmmods.strategies.FSDP2", "lmmods.strategies.DeepSpeed", "DDPStrategy",
                             "SingleDeviceStrategy"),
        "trainer.plugins": ("KubeflowEnvironment", "LSFEnvironment", "LightningEnvironment", "MPIEnvironment",
                            "SLURMEnvironment", "TorchElasticEnvironment", "XLAEnvironment"),
        "trainer.profiler": ("AdvancedProfiler", "PyTorchProfiler", "SimpleProfiler"),
    },
    "jax": {"trainer.logger": LOGGERS, "trainer.callbacks": ("EarlyStopping",), "trainer.strategy": ("MeshSharding",)},
}


class EngineCommands:
    """What the commands that an engine performs take beside the recipe, on either engine."""

    def fit(self, ckpt_path: str | None = None, overwrite: bool = False, stop_at: int | None = None) -> None:
        """Train.

        Args:
            ckpt_path: Go on from a checkpoint: `last`, `best`, a step number or a path. `auto` is the last one, or
                begins the run where there is none yet: the same command starts a run and restarts it.
            overwrite: Delete what an earlier run left in the run folder.
            stop_at: Save and end after this optimiser step. Rates and order stay those of the whole run, which
                `--ckpt_path last` goes on with.
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
                which: Literal["first", "longest", "most_cut", "most_unknown"] | list[int] = "first",
                recipe: bool = False, parity: bool = False) -> None:
        """Show what would be trained on, and train nothing.

        Args:
            rows: How many rows to show with their loss mask, or to compare the engines on.
            which: Which rows: the first, the worst by a measure, or these numbers of training rows.
            recipe: Also print the recipe with every default filled in.
            parity: Instead load the model in both engines, one after the other, and say by how much logits, loss and
                gradient of the first rows of training differ; the status is 1 where they do not agree.
        """

    def plan(self, on: str) -> None:
        """Say whether a recipe fits on devices that need not be here, what takes the memory, and how long it runs.

        Args:
            on: The devices: `8xH100`, `v5e-16`, `v5p-64`, `cpu`. They take the place of `trainer.devices`.
        """

    def find(self, what: Literal["lr", "batch_size", "both", "step"] = "both", steps: int = 100, min_lr: float = 1e-7,
             max_lr: float = 1.0, memory: float | None = None, plot: str = "lr.png", write: bool = False,
             result: str | None = None) -> None:
        """Find the learning rate and the fastest batch size; neither takes or makes a run folder.

        Args:
            what: `lr`: a range test. `batch_size`: the fastest that fits, with the same rows in each optimiser step.
                `both`: one after the other. `step`: only measure a step of the recipe as it is, on its longest rows.
            steps: Optimiser steps of the range test.
            min_lr: Learning rate of its first step.
            max_lr: Learning rate of its last step, if the loss does not diverge before.
            memory: GiB that a batch may need, on each GPU or else of this machine; null is what is free.
            plot: Picture of the range test.
            write: Write what is found into the recipe's file; comments stay.
            result: File to write what is found to, as JSON.
        """


# model and data ---------------------------------------------------------------------------------------------------


class Declared:
    """Stands for a class that another module defines. Below it a dataclass is to jsonargparse a class to be named."""


class TaskModule(task_fields.TaskFields, Declared):
    """A network in training."""


class SFT(task_fields.SFTFields, TaskModule):
    """Fine-tune a causal LM on instructions or chats; predict generates answers."""


class CLM(task_fields.CLMFields, TaskModule):
    """Train a causal LM on text; predict goes on with the text."""


class MLM(task_fields.MLMFields, TaskModule):
    """Train a masked LM; predict fills the gaps."""


class Preference(task_fields.PreferenceFields, TaskModule):
    """Train a causal LM to prefer answers to others; predict generates answers."""


class QA(task_fields.QAFields, TaskModule):
    """Find the span of a context that answers a question."""


class DataModule(data_fields.DataFields, Declared):
    """Text in, batches out."""


class SFTData(data_fields.SFTDataFields, DataModule):
    """Conversations for supervised fine-tuning; one row of a batch is one conversation."""


class CLMData(data_fields.CLMDataFields, DataModule):
    """Text for causal language modelling."""


class MLMData(data_fields.MLMDataFields, DataModule):
    """Text for masked language modelling."""


class PreferenceData(data_fields.PreferenceDataFields, DataModule):
    """Pairs of answers, or single ones with a label; one row of a batch is a pair, or one answer."""


class QAData(data_fields.QADataFields, DataModule):
    """Questions on contexts."""


TASKS = {"model": ("CLM", "MLM", "Preference", "QA", "SFT"),
         "data": ("CLMData", "MLMData", "PreferenceData", "QAData", "SFTData")}
# Packages of further classes that a recipe may name without their module: user-defined tasks, our callbacks, loggers.
FOLDERS = {
    "torch": {"model": "lmmods.torch_engine.tasks", "data": "lmmods.data",
              "trainer.callbacks": "lmmods.torch_engine.callbacks", "trainer.logger": "lmmods.runs"},
    "jax": {"model": "jax_engine.tasks", "data": "lmmods.data", "trainer.callbacks": "jax_engine",
            "trainer.logger": "lmmods.runs"},
}
