"""Runs share compiled programs where nothing differs that these are made of."""

from dataclasses import replace

from jax_engine.models import attention
from lmmods.core.settings import Optimizer
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
