"""Both engines have the same recipe keys."""

import inspect
from dataclasses import dataclass

import pytest

from jax_engine.callbacks import EarlyStopping
from jax_engine.tasks.causal_task import CausalTask
from jax_engine.tasks.clm import CLM as JaxCLM
from jax_engine.tasks.mlm import MLM as JaxMLM
from jax_engine.tasks.preference import Preference as JaxPreference
from jax_engine.tasks.qa import QA as JaxQA
from jax_engine.tasks.sft import SFT as JaxSFT
from jax_engine.trainer import Trainer as JaxTrainer
from lmmods.core.errors import UserError
from lmmods.recipe.keys import keys_of
from lmmods.recipe.reader import read_object
from lmmods.recipe.tasks.base import CausalFields, TaskFields
from lmmods.torch_engine.tasks.causal_task import CausalModule
from lmmods.torch_engine.tasks.clm import CLM
from lmmods.torch_engine.tasks.mlm import MLM
from lmmods.torch_engine.tasks.preference import Preference
from lmmods.torch_engine.tasks.qa import QA
from lmmods.torch_engine.tasks.sft import SFT
from lmmods.torch_engine.trainer import Trainer


def read_fields(cls: type) -> dict[str, tuple]:
    """Return default and type of each constructor field of a class and our bases of it."""
    fields = {}
    for base in cls.__mro__:
        if base.__module__.startswith(("lmmods", "jax_engine")):
            fields |= {name: (field.default, str(field.annotation))
                       for name, field in inspect.signature(base.__init__).parameters.items()
                       if name not in ("self", "kwargs")}
    return fields


@pytest.mark.parametrize(("on_torch", "on_jax"), [
    (CLM, JaxCLM), (MLM, JaxMLM), (Preference, JaxPreference), (QA, JaxQA), (SFT, JaxSFT)])
def test_tasks_have_the_same_fields(on_torch, on_jax):
    assert on_torch.__name__ == on_jax.__name__
    assert {name: default for name, (default, _) in read_fields(on_torch).items()} == {
        name: default for name, (default, _) in read_fields(on_jax).items()}
    assert {name: type_ for name, (_, type_) in read_fields(on_torch).items() if "Literal" not in type_} == {
        name: type_ for name, (_, type_) in read_fields(on_jax).items() if "Literal" not in type_}


@pytest.mark.parametrize("base", [CausalModule, CausalTask])
def test_a_custom_task_adds_its_own_key(base):
    """As in docs/extending.md: a constructor with its own key passes on the others."""

    class Own(base):
        """Custom task.

        Args:
            own: Its key.
        """

        def __init__(self, own: int = 3, **common):
            super().__init__(**common)
            self.own = own

    keys = keys_of(Own)
    assert keys["own"].text == "Its key." and keys["generation"].text.startswith("Decoding settings of predict.")
    task = read_object(Own, {"own": 5, "pretrained": "x", "generation": {"top_k": 7}}, "model")
    assert (task.own, task.pretrained, task.generation.top_k, task.optimizer.lr) == (5, "x", 7, 2e-4)
    with pytest.raises(UserError, match="set one of them"):
        Own(own=5)

    @dataclass(kw_only=True, eq=False, repr=False)
    class OwnFields(CausalFields):
        own: int = 3

    class OnBoth(OwnFields, base):
        """Task with a key for both engines."""

    task = OnBoth(own=5, pretrained="x")
    assert (task.own, task.generation.top_k) == (5, 50) and task.trains_adapter is False


def test_every_field_is_documented_once():
    """It is under Args, where --help reads it."""
    for task in (JaxCLM, JaxMLM, JaxQA, JaxSFT):
        texts = "".join(inspect.getdoc(base) for base in task.__mro__ if issubclass(base, TaskFields))
        for name in read_fields(task):
            assert texts.count(f"\n    {name}: ") == 1, name


def test_the_jax_trainer_has_lightnings_keys_and_defaults():
    import lightning as L

    lightning_keys = {*inspect.signature(L.Trainer.__init__).parameters, "heartbeat_timeout"}  # ours on both engines
    assert set(inspect.signature(JaxTrainer.__init__).parameters) <= lightning_keys
    jax_fields, torch_fields = read_fields(JaxTrainer), read_fields(Trainer)
    same = set(jax_fields) & set(torch_fields) - {"strategy", "callbacks", "precision", "logger"}
    assert {name: jax_fields[name][0] for name in same} == {name: torch_fields[name][0] for name in same}


@pytest.mark.parametrize("command", ["fit", "validate", "test", "predict", "inspect"])
def test_commands_have_the_same_arguments(command):
    on_torch, on_jax = (list(inspect.signature(getattr(cls, command)).parameters) for cls in (Trainer, JaxTrainer))
    assert on_torch == on_jax


def test_early_stopping_has_lightnings_fields_and_defaults():
    from lightning.pytorch.callbacks import EarlyStopping as LightningEarlyStopping

    lightning_fields = inspect.signature(LightningEarlyStopping.__init__).parameters
    for name, field in inspect.signature(EarlyStopping.__init__).parameters.items():
        assert name in lightning_fields and (field.default == lightning_fields[name].default or name == "self"), name
