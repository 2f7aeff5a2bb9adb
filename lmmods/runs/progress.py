"""Where a run stands in its data, counted anew when it goes on with another number of processes or devices."""

from typing import Any

from lmmods.core.errors import UserError


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
