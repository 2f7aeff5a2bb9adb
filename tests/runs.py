"""What several tests ask of a finished run."""

import csv

from safetensors.numpy import load_file

from lmmods.runs.folder import RunFolder


def seconds_of_steps(run: RunFolder) -> list[float]:
    """Seconds that each logged step took by the speed that the run has logged for it."""
    with open(run.metrics_csv, newline="") as file:
        rows = list(csv.DictReader(file))
    seen = [float(row["train/tokens"]) for row in rows]
    return [(now - before) / float(row["train/tokens_per_second"])
            for before, now, row in zip([0, *seen], seen, rows, strict=False)]


def assert_same_checkpoint(run: RunFolder, other: RunFolder) -> None:
    """The last checkpoints hold the same bits of weights and optimiser state."""
    for name in ("model", "optimizer"):
        left, right = (load_file(each.resolve("last") / f"{name}.safetensors") for each in (run, other))
        assert left.keys() == right.keys() and all((tensor == right[key]).all() for key, tensor in left.items())
