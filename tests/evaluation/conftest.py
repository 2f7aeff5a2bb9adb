"""A clock that tests control, and runs on one and on two devices."""

import pytest

from lmmods.cli import main
from lmmods.runs.folder import RunFolder
from tests.forks import together


class Clock:
    """Replacement for `time`: each call takes a millisecond, and tests add more."""

    now = 0.0

    def perf_counter(self) -> float:
        self.now += 0.001
        return self.now


@pytest.fixture
def clock(monkeypatch) -> Clock:
    """Return the clock with which both engines measure training."""
    from lmmods.core import throughput

    clock = Clock()
    monkeypatch.setattr("lmmods.core.throughput.time", clock)
    monkeypatch.setattr("jax_engine.trainer.compile_clock", lambda: throughput.now)  # it excludes real seconds
    return clock


@pytest.fixture
def on_one_and_two(recipe, tmp_path):
    """Return a function that trains a recipe on one and two devices; it returns both folders, and the output of two."""
    single, two = RunFolder(tmp_path / "one"), RunFolder(tmp_path / "two")

    def train(strategy: str, processes: int, **changes) -> tuple[RunFolder, RunFolder, str]:
        changes |= {"model__init_args__optimizer": {"lr": 0.003}, "data__init_args__val_size": 6,
                    "data__init_args__batch_size": 3}
        assert main(["fit", *recipe(**changes, trainer__accumulate_grad_batches=2,
                                    trainer__default_root_dir=str(single.root))]) == 0
        arguments = recipe("two.yaml", **changes, trainer__devices=2 // processes, trainer__strategy=strategy,
                           trainer__val_check_interval=2, trainer__default_root_dir=str(two.root))
        return single, two, "".join(together(["fit", *arguments], processes, devices=2 // processes))

    return train
