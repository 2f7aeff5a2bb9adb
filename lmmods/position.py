"""Where a run stands in its data, counted anew when it goes on with another number of processes or devices."""

from typing import Any

from lmmods.errors import UserError


def recount(ready: int, data: dict[str, Any], before: int, now: int, kind: str) -> tuple[int, int]:
    """Rounds, of one micro-batch on each worker, in the current epoch and in all.

    Args:
        ready: Rounds of `before` workers in the current epoch.
        data: Position of the training loader.
        before: Workers that wrote the checkpoint.
        now: Workers that go on.
        kind: What a worker is called.

    Raises:
        UserError: The position is inside a round of `now` workers.
    """
    everywhere, earlier, in_epoch = ready * before, 0, None
    if "num_rows" in data:  # a stream is one endless epoch
        in_epoch = -(-data["num_rows"] // data["batch_size"])
        everywhere, earlier = data["batches"], data["epoch"] * -(-in_epoch // now)
    if everywhere % now and everywhere != in_epoch:
        raise UserError(f"This checkpoint of {before} {kind} cannot go on with {now}: it stands at micro-batch "
                        f"{everywhere}, which {now} {kind} do not share evenly. Resume from one at another step, or "
                        f"with as many {kind} as before.")
    current = -(-everywhere // now)
    return current, earlier + current


def nothing_left(state: dict[str, Any], max_steps: int | None, max_epochs: int | float | None) -> str | None:
    """What to say where a checkpoint stands at the end of the run that the recipe asks for, or behind it.

    Args:
        state: Of the checkpoint, as state.json has it.
        max_steps: Optimiser steps of the run; None or -1 leaves it to the epochs.
        max_epochs: Epochs of the run; None or -1 leaves it to the steps.
    """
    step, fit = state["global_step"], state["loops"]["fit_loop"]
    epochs = fit["epoch_progress"]["current"]
    inside = epochs["ready"] > epochs["completed"]  # Lightning counts an epoch when it has left it
    finished = epochs["completed"] + (inside and fit["epoch_loop.batch_progress"]["is_last_batch"])
    for key, limit, done in (("max_steps", max_steps, step), ("max_epochs", max_epochs, finished)):
        if limit not in (None, -1) and done >= limit:
            return (f"Nothing is left to train: the checkpoint is at step {step} (epoch {finished}), and "
                    f"trainer.{key} is {limit}. Raise it to go on.")
    return None
