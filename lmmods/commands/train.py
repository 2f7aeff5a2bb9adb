"""`fit`, `validate`, `test` and `predict`: build what a recipe describes and hand it to the engine's trainer."""

from typing import Any

from lmmods.recipe.reader import Recipe


def fit(parsed: Recipe, ckpt_path: str | None = None, overwrite: bool = False, stop_at: int | None = None) -> None:
    """Train a model.

    Args:
        ckpt_path: Resume from a checkpoint: `last`, `best`, a step number or a path. `auto` resumes from the last
            checkpoint, or starts a new run if there is none, so the same command can be restarted.
        overwrite: Delete an earlier run's files from the run folder.
        stop_at: Save and exit after this optimiser step. The learning-rate schedule and data order of the full run do
            not change; resume with `--ckpt_path last`.
    """
    _run(parsed, ckpt_path=ckpt_path, overwrite=overwrite, stop_at=stop_at)


def validate(parsed: Recipe, ckpt_path: str | None = None) -> None:
    """Evaluate on the validation set.

    Args:
        ckpt_path: Checkpoint to evaluate: `last`, `best`, a step number or a path. null uses the initial model.
    """
    _run(parsed, ckpt_path=ckpt_path)


def test(parsed: Recipe, ckpt_path: str | None = None) -> None:
    """Evaluate on the test set.

    Args:
        ckpt_path: Checkpoint to evaluate: `last`, `best`, a step number or a path. null uses the initial model.
    """
    _run(parsed, ckpt_path=ckpt_path)


def predict(parsed: Recipe, ckpt_path: str | None = None) -> None:
    """Run the model on the predict set and write predictions.jsonl.

    Args:
        ckpt_path: Checkpoint to use: `last`, `best`, a step number or a path. null uses the initial model.
    """
    _run(parsed, ckpt_path=ckpt_path)


def _run(parsed: Recipe, **options: Any) -> None:
    from lmmods.commands.setup import Setup

    with Setup(parsed) as setup:
        getattr(setup.trainer, parsed.command)(setup.model, datamodule=setup.datamodule, **options)
