"""`fit`, `validate`, `test` and `predict`: build what a recipe describes and hand it to the engine's trainer."""

from typing import Any

from lmmods.recipe.reader import Recipe


def fit(parsed: Recipe, ckpt_path: str | None = None, overwrite: bool = False, stop_at: int | None = None) -> None:
    """Train.

    Args:
        ckpt_path: Go on from a checkpoint: `last`, `best`, a step number or a path. `auto` is the last one, or
            begins the run where there is none yet: the same command starts a run and restarts it.
        overwrite: Delete what an earlier run left in the run folder.
        stop_at: Save and end after this optimiser step. Rates and order stay those of the whole run, which
            `--ckpt_path last` goes on with.
    """
    _run(parsed, ckpt_path=ckpt_path, overwrite=overwrite, stop_at=stop_at)


def validate(parsed: Recipe, ckpt_path: str | None = None) -> None:
    """Evaluate on the validation set.

    Args:
        ckpt_path: Checkpoint to evaluate: `last`, `best`, a step number or a path; null is the untrained start.
    """
    _run(parsed, ckpt_path=ckpt_path)


def test(parsed: Recipe, ckpt_path: str | None = None) -> None:
    """Evaluate on the test set.

    Args:
        ckpt_path: Checkpoint to evaluate: `last`, `best`, a step number or a path; null is the untrained start.
    """
    _run(parsed, ckpt_path=ckpt_path)


def predict(parsed: Recipe, ckpt_path: str | None = None) -> None:
    """Write predictions.jsonl.

    Args:
        ckpt_path: Checkpoint to use: `last`, `best`, a step number or a path; null is the untrained start.
    """
    _run(parsed, ckpt_path=ckpt_path)


def _run(parsed: Recipe, **options: Any) -> None:
    from lmmods.commands.setup import Setup

    with Setup(parsed) as setup:
        getattr(setup.trainer, parsed.command)(setup.model, datamodule=setup.datamodule, **options)
