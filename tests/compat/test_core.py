"""Private API of transformers, jinja2, datasets, huggingface_hub and Lightning that lmmods/core/compat.py uses."""

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
from tests.compat.contract import fix


def test_the_chat_template_environment_is_sandboxed():
    environment = compat.chat_template_environment()
    assert isinstance(environment, ImmutableSandboxedEnvironment) and {"raise_exception", "strftime_now"} <= set(
        environment.globals) and environment.filters["tojson"]({"ä": 1}) == '{"ä": 1}', fix(
        "transformers", compat.chat_template_environment)


def test_chat_templates_are_rendered_by_another_class():
    class Compiled:
        def __init__(self, source):
            self.source = source

        def render(self, messages, add_generation_prompt, **variables):
            return f"{self.source}:{messages[0]['content']}:{add_generation_prompt}"

    render = functools.partial(chat_template_utils.render_jinja_template, [[{"role": "user", "content": "a"}]],
                               chat_template="{{ messages[0].content }}", add_generation_prompt=True)
    with compat.rendering_by(Compiled):
        texts, _ = render()
    assert texts == ["{{ messages[0].content }}:a:True"], fix("transformers", compat.rendering_by)
    assert render()[0] == ["a"]


def test_the_values_of_a_jinja_namespace_are_readable():
    namespace = Namespace(one=1)
    namespace["two"] = [2]
    assert compat.namespace_values(namespace) == {"one": 1, "two": [2]}, fix("jinja2", compat.namespace_values)


def test_rows_have_a_fingerprint():
    first, second = (datasets.Dataset.from_list([{"text": text}]) for text in "ab")
    fingerprint = compat.rows_fingerprint(first)
    assert isinstance(fingerprint, str) and fingerprint, fix("datasets", compat.rows_fingerprint)
    assert fingerprint != compat.rows_fingerprint(second) and fingerprint == compat.rows_fingerprint(
        datasets.Dataset.from_list([{"text": "a"}])), fix("datasets", compat.rows_fingerprint)
    assert compat.rows_fingerprint(iter([])) is None


@pytest.mark.parametrize("value", [False, True, "all"])
def test_the_checkpoints_that_a_logger_uploads_are_known(value, tmp_path):
    logger = WandbLogger(log_model=value, save_dir=str(tmp_path))
    assert compat.logged_checkpoints(logger) == value, fix("lightning", compat.logged_checkpoints)
    assert compat.logged_checkpoints(CSVLogger(str(tmp_path))) is False


def test_the_obsolete_anonymous_option_of_wandb_is_removed(tmp_path):
    logger = WandbLogger(save_dir=str(tmp_path))
    assert "anonymous" in logger._wandb_init, fix("lightning", compat.without_anonymous)
    compat.without_anonymous(logger)
    assert "anonymous" not in logger._wandb_init
    compat.without_anonymous(CSVLogger(str(tmp_path)))


def test_libraries_work_offline(monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "0")
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", False)
    compat.work_offline()
    assert os.environ["HF_HUB_OFFLINE"] == "1" and is_offline_mode(), fix("huggingface_hub", compat.work_offline)
    with pytest.raises(ConnectionError, match="OfflineModeIsEnabled|Offline mode is enabled"):
        datasets.load_dataset("some/thing"), fix("datasets", compat.work_offline)


def test_the_cache_folder_of_a_hub_dataset_is_known(monkeypatch, tmp_path):
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", str(tmp_path))
    (tmp_path / "some___my_thing" / "default" / "0.0.0" / "c0ffee").mkdir(parents=True)
    root, folder = compat.cached_as("some/MyThing")
    assert (root / folder / "default").is_dir(), fix("datasets", compat.cached_as)
    module = datasets.load.CachedDatasetModuleFactory("some/MyThing").get_module()
    assert module.builder_kwargs["dataset_name"] == "MyThing", fix("datasets", compat.cached_as)


def test_a_processor_can_be_made_without_its_part_for_videos():
    from transformers import AutoTokenizer, Qwen2VLImageProcessorPil, Qwen3VLProcessor

    cls = compat.without_parts(Qwen3VLProcessor)
    tokenizer = AutoTokenizer.from_pretrained("demo/llama")
    processor = cls(Qwen2VLImageProcessorPil(), tokenizer, None)
    assert cls.get_attributes() == ["image_processor", "tokenizer", "video_processor"]
    assert processor.video_processor is None
    assert type(processor).__name__ == "Qwen3VLProcessor", fix("transformers", compat.without_parts)
    with pytest.raises((TypeError, ValueError, AttributeError)):
        cls(tokenizer, tokenizer, None)
