"""Runs share compiled programs where nothing differs that these are made of."""

from dataclasses import replace
from types import SimpleNamespace

import pytest
from transformers import LlamaConfig

from jax_engine import trainer
from jax_engine.distributed.steps import Clipping
from jax_engine.models import attention
from lmmods.core.settings import LoRA, Optimizer
from tests import programs


def test_shared_where_nothing_differs(monkeypatch):
    programs.share()
    make = programs._shared(lambda _: object(), lambda settings: settings)
    settings = Optimizer(lr=1e-3)
    made = make(settings)
    assert make(replace(settings)) is made and make(replace(settings, lr=2e-3)) is not made
    with monkeypatch.context() as patched:
        patched.setattr(attention, "attention_mask", None)
        assert make(settings) is not made
    assert make(settings) is made
    programs.forget()
    assert make(settings) is not made


class Devices:
    num_devices = data_parallel_size = 1

    def compile(self, *_, **__):
        return object()


class Task:
    def __init__(self, optimizer, folder="a", lora=None):
        self.network = SimpleNamespace(config=LlamaConfig(name_or_path=folder), lora=lora)
        self.optimizer, self.pretrained = optimizer, folder

    def loss(self):
        return self


@pytest.mark.parametrize(("changes", "trains", "evaluates"), [
    ({"optimizer": Optimizer(lr=2e-3, warmup=3)}, True, True),
    ({"folder": "b"}, True, True),
    ({"optimizer": Optimizer(weight_decay=0.1)}, False, True),
    ({"lora": LoRA(rank=2)}, False, False),
])
def test_functions_are_shared_by_what_they_are_made_of(changes, trains, evaluates):
    programs.share()
    made, other = (trainer.Steps(Devices(), Task(**settings).loss, "an optimiser", Clipping())
                   for settings in ({"optimizer": Optimizer()}, {"optimizer": Optimizer(), **changes}))
    assert [made._full is other._full, made._update is other._update] == [trains] * 2
    assert [made._eval is other._eval, made._accumulate is other._accumulate] == [evaluates] * 2
    only_evaluates = trainer.Steps(Devices(), Task(Optimizer()).loss, None, Clipping())
    assert only_evaluates._eval is made._eval and only_evaluates._update is not made._update
