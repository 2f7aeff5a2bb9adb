"""What lmmods/core/compat.py needs of transformers, jinja2, datasets, huggingface_hub and Lightning."""

import functools
import os

import datasets
import pytest
from huggingface_hub import constants, is_offline_mode
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace
from lightning.pytorch.loggers import CSVLogger, WandbLogger
from transformers.utils import chat_template_utils

from lmmods.core import compat
from tests.compat.contract import mend


def test_the_environment_of_chat_templates():
    found = compat.chat_template_environment()
    assert isinstance(found, ImmutableSandboxedEnvironment) and {"raise_exception", "strftime_now"} <= set(
        found.globals) and found.filters["tojson"]({"ä": 1}) == '{"ä": 1}', mend(
        "transformers", compat.chat_template_environment)


def test_chat_templates_are_rendered_by_another():
    class Compiled:
        def __init__(self, source):
            self.source = source

        def render(self, messages, add_generation_prompt, **given):
            return f"{self.source}:{messages[0]['content']}:{add_generation_prompt}"

    ask = functools.partial(chat_template_utils.render_jinja_template, [[{"role": "user", "content": "a"}]],
                            chat_template="{{ messages[0].content }}", add_generation_prompt=True)
    with compat.rendering_by(Compiled):
        found, _ = ask()
    assert found == ["{{ messages[0].content }}:a:True"], mend("transformers", compat.rendering_by)
    assert ask()[0] == ["a"]


def test_the_values_of_a_namespace():
    namespace = Namespace(one=1)
    namespace["two"] = [2]
    assert compat.namespace_values(namespace) == {"one": 1, "two": [2]}, mend("jinja2", compat.namespace_values)


def test_rows_have_a_fingerprint():
    first, second = (datasets.Dataset.from_list([{"text": text}]) for text in "ab")
    found = compat.rows_fingerprint(first)
    assert isinstance(found, str) and found, mend("datasets", compat.rows_fingerprint)
    assert found != compat.rows_fingerprint(second) and found == compat.rows_fingerprint(
        datasets.Dataset.from_list([{"text": "a"}])), mend("datasets", compat.rows_fingerprint)
    assert compat.rows_fingerprint(iter([])) is None


@pytest.mark.parametrize("value", [False, True, "all"])
def test_which_checkpoints_a_logger_keeps(value, tmp_path):
    logger = WandbLogger(log_model=value, save_dir=str(tmp_path))
    assert compat.logged_checkpoints(logger) == value, mend("lightning", compat.logged_checkpoints)
    assert compat.logged_checkpoints(CSVLogger(str(tmp_path))) is False


def test_the_option_of_wandb_that_does_nothing(tmp_path):
    logger = WandbLogger(save_dir=str(tmp_path))
    assert "anonymous" in logger._wandb_init, mend("lightning", compat.without_anonymous)
    compat.without_anonymous(logger)
    assert "anonymous" not in logger._wandb_init
    compat.without_anonymous(CSVLogger(str(tmp_path)))


def test_libraries_work_offline(monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "0")
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", False)
    compat.work_offline()
    assert os.environ["HF_HUB_OFFLINE"] == "1" and is_offline_mode(), mend("huggingface_hub", compat.work_offline)
    with pytest.raises(ConnectionError, match="OfflineModeIsEnabled|Offline mode is enabled"):
        datasets.load_dataset("some/thing"), mend("datasets", compat.work_offline)


def test_where_a_set_of_the_hub_is_cached(monkeypatch, tmp_path):
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", str(tmp_path))
    (tmp_path / "some___my_thing" / "default" / "0.0.0" / "c0ffee").mkdir(parents=True)
    root, folder = compat.cached_as("some/MyThing")
    assert (root / folder / "default").is_dir(), mend("datasets", compat.cached_as)
    found = datasets.load.CachedDatasetModuleFactory("some/MyThing").get_module()
    assert found.builder_kwargs["dataset_name"] == "MyThing", mend("datasets", compat.cached_as)
