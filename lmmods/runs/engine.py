"""The trainer of an engine, as commands use it: `Trainer` of torch_engine and of jax_engine."""

from pathlib import Path
from typing import Any, Protocol

from lmmods.core.parity import Row
from lmmods.data.base import DataModule
from lmmods.data.shown_rows import Which
from lmmods.recipe.tasks.base import TaskFields
from lmmods.runs.folder import RunFolder
from lmmods.runs.identity import RunIdentity


class Engine(Protocol):
    """Runs the commands of a recipe on its engine.

    Attributes:
        precision: Lightning's name, without `auto`.
        recipe: As in config.yaml.
        is_global_zero: True in the process that writes files.
        accumulate_grad_batches: Micro-batches of an optimiser step on each device.
    """

    run_folder: RunFolder
    precision: str
    recipe: dict[str, Any]
    identity: RunIdentity
    is_global_zero: bool
    accumulate_grad_batches: int

    def fit(self, model: TaskFields, *, datamodule: DataModule, ckpt_path: str | None = None) -> None:
        """Train a model. Raises UserError."""

    def validate(self, model: TaskFields, *, datamodule: DataModule, ckpt_path: str | None = None) -> Any:
        """Evaluate a model on the validation set. Raises UserError."""

    def test(self, model: TaskFields, *, datamodule: DataModule, ckpt_path: str | None = None) -> Any:
        """Evaluate a model on the test set. Raises UserError."""

    def predict(self, model: TaskFields, *, datamodule: DataModule, ckpt_path: str | None = None) -> Any:
        """Write predictions.jsonl. Raises UserError."""

    def inspect(self, model: TaskFields, datamodule: DataModule, rows: int, which: Which | list[int],
                recipe: bool) -> None:
        """Print rows, loss mask and sizes; with `recipe` also the resolved recipe. Raises UserError."""

    def measure(self, model: TaskFields, datamodule: DataModule, rows: list[Row], folder: Path) -> None:
        """Write loss, logits and gradients of rows to `folder`, for `core.parity`."""
