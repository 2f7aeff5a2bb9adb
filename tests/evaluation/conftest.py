"""A clock that passes as a test says, and runs on one device and on two."""

import pytest

from lmmods.cli import main
from lmmods.runs.folder import RunFolder
from tests.forks import together


class Clock:
    """Stands in for `time`: a millisecond passes at each look, and what a test says."""

    now = 0.0

    def perf_counter(self) -> float:
        self.now += 0.001
        return self.now


@pytest.fixture
def clock(monkeypatch) -> Clock:
    """The clock by which both engines measure training."""
    from lmmods.core import throughput

    clock = Clock()
    monkeypatch.setattr("lmmods.core.throughput.time", clock)
    monkeypatch.setattr("jax_engine.trainer.compile_clock", lambda: throughput.now)  # the other leaves real seconds out
    return clock


@pytest.fixture
def on_one_and_two(recipe, tmp_path):
    """A function that trains a recipe on one device and on two with the same steps; the folders, and what two said."""
    one, two = RunFolder(tmp_path / "one"), RunFolder(tmp_path / "two")

    def train(strategy: str, processes: int, **changes) -> tuple[RunFolder, RunFolder, str]:
        changes |= {"model__init_args__optimizer": {"lr": 0.003}, "data__init_args__val_size": 6,
                    "data__init_args__batch_size": 3}
        assert main(["fit", *recipe(**changes, trainer__accumulate_grad_batches=2,
                                    trainer__default_root_dir=str(one.root))]) == 0
        arguments = recipe("two.yaml", **changes, trainer__devices=2 // processes, trainer__strategy=strategy,
                           trainer__val_check_interval=2, trainer__default_root_dir=str(two.root))
        return one, two, "".join(together(["fit", *arguments], processes, devices=2 // processes))

    return train
