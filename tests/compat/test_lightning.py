"""What lmmods/torch_engine/compat/lightning.py needs of Lightning. Its loops' state: tests/runs/test_progress.py."""

import inspect

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import EarlyStopping
from lightning.pytorch.demos.boring_classes import BoringModel
from lightning.pytorch.strategies import ModelParallelStrategy

from lmmods.torch_engine.compat import lightning as compat
from tests.compat.contract import mend

QUIET = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False, "enable_model_summary": False,
         "accelerator": "cpu", "devices": 1}


class Seen(L.Callback):
    """Notes what the compat functions say at the end of each batch, and what then happens."""

    def __init__(self):
        self.ends, self.foretold, self.validated = [], [], []

    def on_train_batch_end(self, trainer, *_):
        self.ends.append(compat.epoch_ends(trainer))
        self.foretold.append(compat.validation_follows(trainer))
        self.validated.append(False)

    def on_validation_end(self, trainer, *_):
        self.validated[-1] = True


@pytest.fixture(scope="module")
def seen():
    torch.manual_seed(0)
    callback = Seen()
    trainer = L.Trainer(max_epochs=2, limit_train_batches=5, limit_val_batches=1, val_check_interval=2,
                        num_sanity_val_steps=0, callbacks=[callback], **QUIET)
    trainer.fit(BoringModel())
    return callback


def test_the_end_of_an_epoch_is_known_in_its_last_batch(seen):
    assert seen.ends == 2 * [False, False, False, False, True], mend("lightning", compat.epoch_ends)


def test_a_validation_is_known_beforehand(seen):
    assert sum(seen.validated) == 4 and seen.foretold == seen.validated, mend("lightning", compat.validation_follows)


@pytest.mark.parametrize("skips", [False, True])
def test_whether_fit_is_skipped_is_decided_here(skips):
    said = []
    trainer = L.Trainer(max_steps=1, limit_val_batches=0, **QUIET)
    compat.decide_loops(trainer, lambda lightnings: said.append(lightnings) or skips, lambda: False, lambda: False)
    trainer.fit(BoringModel())
    assert said == [False] and trainer.global_step == (0 if skips else 1), mend("lightning", compat.decide_loops)


def test_when_validations_follow_and_a_run_stops_is_decided_here():
    """After the third of seven micro-batches, and where the run is to stop: after the fourth, as a step ends then."""
    class Stopping(Seen):
        def on_train_batch_end(self, trainer, *args):
            trainer.should_stop = trainer.fit_loop.batch_idx >= 2
            super().on_train_batch_end(trainer, *args)

    callback = Stopping()
    trainer = L.Trainer(max_epochs=2, limit_train_batches=7, limit_val_batches=1, val_check_interval=5,
                        num_sanity_val_steps=0, accumulate_grad_batches=2, callbacks=[callback], **QUIET)
    compat.decide_loops(trainer, lambda lightnings: lightnings, lambda: trainer.fit_loop.batch_idx == 1,
                        lambda: trainer.fit_loop.batch_idx % 2 == 0)
    trainer.fit(BoringModel())
    assert callback.validated == callback.foretold == [False, True, False, True], mend("lightning", compat.decide_loops)


def test_a_run_ends_after_so_many_steps():
    trainer = L.Trainer(max_epochs=1, limit_val_batches=0, **QUIET)
    compat.end_after(trainer, 3)
    trainer.fit(BoringModel())
    assert trainer.global_step == 3, mend("lightning", compat.end_after)


@pytest.mark.parametrize("value", [None, True, False])
def test_when_early_stopping_checks(value):
    callback = EarlyStopping("loss", check_on_train_epoch_end=value)
    assert compat.checks_at_epoch_end(callback) is value, mend("lightning", compat.checks_at_epoch_end)


def test_all_processes_share_one_copy_of_the_parameters(monkeypatch):
    strategy = ModelParallelStrategy(tensor_parallel_size=2)
    monkeypatch.setattr(ModelParallelStrategy, "num_processes", 6)
    compat.shard_over_all(strategy)
    used = inspect.getsource(ModelParallelStrategy.setup_environment)
    assert strategy._data_parallel_size == 3 and "self._data_parallel_size, self._tensor_parallel_size" in used, mend(
        "lightning", compat.shard_over_all)
