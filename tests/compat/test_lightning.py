"""Private API of Lightning that lmmods/torch_engine/compat/lightning.py uses.
For the state of its loops, see tests/runs/test_progress.py."""

import inspect

import pytest
from lightning.pytorch.callbacks import EarlyStopping
from lightning.pytorch.strategies import ModelParallelStrategy

from lmmods.torch_engine.compat import lightning as compat
from tests.compat.contract import fix


@pytest.mark.parametrize("value", [None, True, False])
def test_the_time_of_early_stopping_checks_is_known(value):
    callback = EarlyStopping("loss", check_on_train_epoch_end=value)
    assert compat.checks_at_epoch_end(callback) is value, fix("lightning", compat.checks_at_epoch_end)


def test_all_processes_share_one_copy_of_the_parameters(monkeypatch):
    strategy = ModelParallelStrategy(tensor_parallel_size=2)
    monkeypatch.setattr(ModelParallelStrategy, "num_processes", 6)
    compat.shard_over_all(strategy)
    source = inspect.getsource(ModelParallelStrategy.setup_environment)
    assert strategy._data_parallel_size == 3 and "self._data_parallel_size, self._tensor_parallel_size" in source, fix(
        "lightning", compat.shard_over_all)
