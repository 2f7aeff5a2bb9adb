"""Messages and files at the start and the end of a training run.

The run folder is written only after data, model and checkpoint have been loaded, so a failed start changes nothing.
"""

import math
import shlex
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lmmods.core.console import say, warn
from lmmods.core.memory import StepMemory
from lmmods.core.progress_bar import clock, describe
from lmmods.data.base import DataModule
from lmmods.recipe.tasks.base import CausalFields, TaskFields
from lmmods.runs.checkpoint_policy import CheckpointPolicy
from lmmods.runs.csv_logger import Logger, MetricsCSV
from lmmods.runs.folder import RunFolder
from lmmods.runs.identity import RunIdentity
from lmmods.runs.manifest import start_manifest
from lmmods.runs.repair import read_table
from lmmods.runs.schedule import Schedule
from lmmods.runs.step_metrics import StepMetrics
from lmmods.runs.wandb import log_recipe, sync_commands


@dataclass(frozen=True)
class RunStart:
    """Files and messages written before the first step of a run, new or resumed.

    Args:
        data: The data module, set up.
        machine: The engine's description of its devices and settings, for manifest.json.
    """

    folder: RunFolder
    identity: RunIdentity
    recipe: dict[str, Any]
    data: DataModule
    machine: dict[str, Any]
    resumed_from: Path | None
    step: int

    def make_folder_ready(self) -> None:
        """Prepare the run folder. The first process calls this while the others wait."""
        self.folder.begin(self.resumed_from)
        self.folder.write_start(self.recipe, self.data.report)
        start_manifest(self.folder, self.recipe, self.data.sources.describe(), self.machine, self.resumed_from,
                       self.step)
        if self.resumed_from:
            self.identity.note_resume(self.folder, self.resumed_from, self.step)

    def begin_logging(self, loggers: list[Logger]) -> None:
        """Set the loggers of this process, if any, to the current step. The first one is `MetricsCSV`."""
        if self.resumed_from and loggers:
            assert isinstance(loggers[0], MetricsCSV)
            loggers[0].rewind(self.step)
        log_recipe(loggers[1:], self.recipe, self.data.report)

    def say(self, summary: "RunSummary") -> None:
        """Print the run's data, size and length. Call this after its loggers have been created."""
        say(f"Run folder: {self.folder.root}.")
        say(self.data.report_table())
        summary.say(self.data)
        if self.resumed_from:
            say(f"Resumed at step {self.step} from {self.resumed_from}.")


@dataclass(frozen=True)
class RunSummary:
    """Facts about a run that are known before its first step.

    Args:
        task: Fields of the task.
        description: One-line description of the network.
        schedule: Length of the run.
        ranks: Number of data-parallel ranks; each has its own micro-batch.
        memory: Memory of a step, per device.
    """

    task: TaskFields
    description: str
    schedule: Schedule
    ranks: int
    memory: StepMemory

    def say(self, data: DataModule) -> None:
        """Print sizes, trained weights, length of the run and memory of a step.

        Args:
            data: The DataModule, set up.
        """
        for line in (self.description, f"Trains: {self.trains()}.", *self._step(data), self._length()):
            say(line)
        refusal = f" ({self.memory.refusal})" if self.memory.refusal else ""
        memory = f"Memory: {self.memory}{refusal}."
        if self.memory.fits and not self.memory.is_tight:
            return say(memory)
        forecast = "It may not fit" if self.memory.fits else "It will probably not fit"
        warn(f"{memory} {forecast}: lower data.batch_size or data.max_length, or set model.gradient_checkpointing to "
             "true.")

    def trains(self) -> str:
        """Describe which weights train, and from which base."""
        task = self.task
        base = f"{task.pretrained or 'random weights'}" + (f" in {task.quantize}" if task.quantize else "")
        if task.adapter:
            return f"the adapter {task.adapter}, over {base}"
        if task.lora is None:
            weights = "a part of the weights" if task.freezes else "all weights"
            return f"{weights}, from random ones" if task.pretrained is None else f"{weights} of {base}"
        targets = task.lora.targets
        in_full = [*(task.lora.modules_to_save or []), *(["the head"] if task.trains_full_head else [])]
        fully = f", and in full {', '.join(in_full)}" if in_full else ""
        adapter = "a DoRA" if task.lora.dora else "a PiSSA" if task.lora.is_principal else "a LoRA"
        return (f"{adapter} adapter of rank {task.lora.rank} on "
                f"{targets if isinstance(targets, str) else ', '.join(targets)}{fully}, over {base}")

    def _step(self, data: DataModule) -> list[str]:
        # An epoch ends with a step, even if few rows are left for it.
        micro_batches = min(self.schedule.batches_per_step, self.schedule.batches_per_epoch)
        rows = data.batch_size * micro_batches * self.ranks
        factors = [*([f"{micro_batches} micro-batches"] if micro_batches > 1 else []),
                   *([f"{self.ranks} devices"] if self.ranks > 1 else [])]
        detail = f" ({' x '.join([str(data.batch_size), *factors])})" if factors else ""
        train = data.report["splits"].get("train")  # a stream has not been read
        if not self.schedule.is_endless and train and train["rows"] * self.task.rows_per_prompt < rows:
            detail = f" (an epoch, which is less than {' x '.join([f'data.batch_size {data.batch_size}', *factors])})"
            rows = train["rows"] * self.task.rows_per_prompt
        count, tokens = self.task.describe_step(rows, rows * train["tokens"] / train["rows"] if train else None)
        return [f"Step: {count}{detail}{', ' if tokens else ''}{tokens}.",
                *self.task.describe_training(rows, train["rows"] if train else None)]

    def _length(self) -> str:
        schedule = self.schedule
        epochs = ("" if schedule.is_endless
                  else f" ({schedule.num_epochs:.4g} epochs of {schedule.steps_per_epoch} steps)")
        count = schedule.validations_after(0)
        return f"Length: {schedule.num_steps} steps{epochs}; {count or 'no'} validation{'s' if count != 1 else ''}."


def say_engine(engine: str, num_devices: int, device_type: str, precision: str, reason: str | None) -> None:
    """Print engine, devices and precision of a command.

    Args:
        device_type: Type of the devices.
        reason: Why `trainer.precision: auto` is this precision here; None if the recipe sets it.
    """
    why = "set by trainer.precision" if reason is None else f"{reason}; trainer.precision sets another"
    say(f"Engine {engine} on {num_devices} device{'s' if num_devices > 1 else ''} ({device_type}), precision "
        f"{precision}: {why}.")


# ---------------------------------------------------------------------------------------------------------------------
# The end of a training run: its results and commands that use them.

@dataclass(frozen=True)
class RunEnd:
    """A run that has written all its files.

    Args:
        task: Fields of the task.
        data: The DataModule.
        metrics: Metrics of the run.
        policy: Which checkpoints were kept; None if none were written.
        first_step: Step at which this process started.
        step: Step at which the run ended.
        seconds: Time between these steps.
        loggers: Loggers of the run.
    """

    folder: RunFolder
    task: TaskFields
    data: DataModule
    metrics: StepMetrics
    policy: CheckpointPolicy | None
    first_step: int
    step: int
    seconds: float
    loggers: list[Any]

    def say(self) -> None:
        """Print the results. Called by the first process."""
        steps = f"{self.step} steps" if not self.first_step else f"steps {self.first_step + 1} to {self.step}"
        say(f"Done: {steps} in {clock(self.seconds)}, {self.metrics.num_tokens:,} tokens since the start of the run.")
        if not self.metrics.num_tokens:
            warn("The model has learned nothing: no step had a target token.")
        if self.policy is not None and self.policy.best:
            value, name = self.policy.best[0]
            step = name.partition("=")[2]
            monitor, _ = self.policy.ranking
            say(f"Best: {monitor} {value:.4g} at step {step} (--ckpt_path best).")
            if monitor == "val/loss" and (more_accurate := self._more_accurate(step)):
                say(f"Another checkpoint was more accurate: {self.task.accuracy} was {more_accurate}. To keep it, set "
                    f"checkpoint.monitor: {self.task.accuracy} and checkpoint.mode: max.")
        if held_out := describe(self.metrics.latest, "val/"):
            say(f"Validation at the end: {held_out}")
        if commands := self.commands():
            say("Next:\n" + "\n".join(f"  {command}" for command in commands))

    def _more_accurate(self, step: str) -> str | None:
        """Describe the most accurate step if it was more accurate than `step`, else None."""
        name = self.task.accuracy
        accuracies = {row["step"]: float(row[name]) for row in read_table(self.folder.metrics_csv).rows
                      if name in row and math.isfinite(float(row[name]))}
        best = max(accuracies, key=lambda step: accuracies[step], default=step)
        if accuracies.get(best, 0) <= accuracies.get(step, math.inf):
            return None
        return f"{accuracies[best]:.4g} at step {best}, {accuracies[step]:.4g} at step {step}"

    def commands(self) -> list[str]:
        """Return shell commands that use this run."""
        root, commands = self.folder.root, []
        data = self.data
        if self.policy is not None and (data.predict_source or data.test_source or data.val_source or data.val_size):
            commands.append(_command("predict", "--config", self.folder.config, "--ckpt_path",
                                     "best" if self.policy.best else "last"))
        if isinstance(self.task, CausalFields):
            commands.append(_command("chat", "--run", root))
        if self.task.trains_adapter and self.task.auto_class != TaskFields.auto_class:
            commands.append(_command("merge", "--run", root, "--out", root.with_name(f"{root.name}-merged")))
        return commands + sync_commands(self.loggers)


def _command(*words: str | Path) -> str:
    """Return a command of this program as the user started it, quoted for a shell."""
    program = sys.argv[0] if Path(sys.argv[0]).name == "train.py" else "train.py"
    return shlex.join(["python", program, *map(str, words)])
