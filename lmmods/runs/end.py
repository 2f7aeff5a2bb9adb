"""The end of a training run: what came of it, and the commands that go on from there."""

import math
import shlex
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lmmods.core.console import say
from lmmods.core.progress_bar import clock, describe
from lmmods.core.task_fields import CausalFields, TaskFields
from lmmods.runs.checkpoint_policy import CheckpointPolicy
from lmmods.runs.folder import RunFolder
from lmmods.runs.repair import read_table
from lmmods.runs.step_metrics import StepMetrics
from lmmods.runs.wandb import sync_commands

ACCURACY = "val/rewards/accuracy"  # of Preference; may rise on where val/loss falls no longer


@dataclass(frozen=True)
class RunEnd:
    """A run that has left all its files.

    Args:
        task: Its fields.
        data: The DataModule.
        metrics: What was measured.
        policy: Which checkpoints were kept; None where none were written.
        first_step: Where this process began.
        step: Where the run has ended.
        seconds: Between the two.
        loggers: Of the run.
    """

    folder: RunFolder
    task: TaskFields
    data: Any
    metrics: StepMetrics
    policy: CheckpointPolicy | None
    first_step: int
    step: int
    seconds: float
    loggers: list[Any]

    def say(self) -> None:
        """Called by the first process."""
        steps = f"{self.step} steps" if not self.first_step else f"steps {self.first_step + 1} to {self.step}"
        say(f"Done: {steps} in {clock(self.seconds)}, {self.metrics.num_tokens:,} tokens since the start of the run.")
        if self.policy is not None and self.policy.best:
            value, name = self.policy.best[0]
            step = name.partition("=")[2]
            say(f"Best: {self.policy.monitor} {value:.4g} at step {step} (--ckpt_path best).")
            if self.policy.monitor == "val/loss" and (more_accurate := self._more_accurate(step)):
                say(f"Not the most accurate: {ACCURACY} was {more_accurate}. checkpoint.monitor: {ACCURACY} with "
                    "checkpoint.mode: max keeps that one.")
        if held_out := describe(self.metrics.latest, "val/"):
            say(f"Held out, at the end: {held_out}")
        if commands := self.commands():
            say("Next:\n" + "\n".join(f"  {command}" for command in commands))

    def _more_accurate(self, step: str) -> str | None:
        """Where pairs were told apart better than at a step, and how much; None if nowhere."""
        found = {row["step"]: float(row[ACCURACY]) for row in read_table(self.folder.metrics_csv).rows
                 if ACCURACY in row and math.isfinite(float(row[ACCURACY]))}
        best = max(found, key=found.get, default=step)
        if found.get(best, 0) <= found.get(step, math.inf):
            return None
        return f"{found[best]:.4g} at step {best}, {found[step]:.4g} at step {step}"

    def commands(self) -> list[str]:
        """What goes on from this run, ready to be typed."""
        root, found = self.folder.root, []
        data = self.data
        if self.policy is not None and (data.predict_source or data.test_source or data.val_source or data.val_size):
            found.append(_command("predict", "--config", self.folder.config, "--ckpt_path",
                                  "best" if self.policy.best else "last"))
        if isinstance(self.task, CausalFields):
            found.append(_command("chat", "--run", root))
            if self.task.trains_adapter:
                found.append(_command("merge", "--run", root, "--out", root.with_name(f"{root.name}-merged")))
        return found + sync_commands(self.loggers)


def _command(*words: str | Path) -> str:
    """A command of this program as the user started it."""
    program = sys.argv[0] if Path(sys.argv[0]).name == "train.py" else "train.py"
    return shlex.join(["python", program, *map(str, words)])
