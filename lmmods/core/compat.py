"""Uses of libraries' private names by both engines; the torch engine's own uses are in torch_engine/compat.

Each use is checked by tests/compat/test_core.py.
"""

import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any


@cache
def chat_template_environment() -> Any:
    """Return the Jinja environment in which transformers renders chat templates: from `_compile_jinja_template`.

    As of transformers 5.23. The public `render_jinja_template` renders, but exposes neither filters nor tests.
    """
    from transformers.utils.chat_template_utils import _compile_jinja_template

    return _compile_jinja_template("").environment


@contextmanager
def rendering_by(compile_: Callable[[str], Any]) -> Iterator[None]:
    """Make `apply_chat_template` render by `compile_(source).render(messages=…, …)`: `_compile_jinja_template`.

    As of transformers 5.23, where no argument sets the renderer.
    """
    from transformers.utils import chat_template_utils

    chat_template_environment()  # cache it before the patch: `compile_` needs the original
    original: Any = chat_template_utils._compile_jinja_template
    chat_template_utils._compile_jinja_template = compile_  # type: ignore[assignment]  # it replaces a cached function
    try:
        yield
    finally:
        chat_template_utils._compile_jinja_template = original


def namespace_values(namespace: Any) -> dict[str, Any]:
    """Return the values that a template has set in a `namespace()`: its private dictionary, hidden from templates.

    As of jinja2 3.1, whose Namespace returns single values only.
    """
    return namespace._Namespace__attrs


def rows_fingerprint(rows: object) -> str | None:
    """Return the fingerprint of the contents of a hub dataset: `Dataset._fingerprint`.

    As of datasets 5.2. None for a streaming one. It is part of the identity of runs, so nothing else can replace it.
    """
    return getattr(rows, "_fingerprint", None)


def logged_checkpoints(logger: object) -> bool | str:
    """Return the argument `log_model` of Lightning's WandbLogger, stored only in `_log_model`; False for other loggers.

    As of lightning 2.6.
    """
    return getattr(logger, "_log_model", False)


def without_anonymous(logger: object) -> None:
    """Remove the option `anonymous` from the arguments of Lightning's WandbLogger to wandb.init: `_wandb_init`.

    As of lightning 2.6, which always passes it, and wandb 0.28, which ignores it with a warning.
    """
    getattr(logger, "_wandb_init", {}).pop("anonymous", None)


def work_offline() -> None:
    """Make the hub's library, and datasets, use only their caches, as if HF_HUB_OFFLINE were set.

    As of huggingface_hub 2.4, whose `is_offline_mode` reads its constant, and datasets 5.2, which copies it on import.
    Processes that are started later read the environment.
    """
    from huggingface_hub import constants

    os.environ["HF_HUB_OFFLINE"] = "1"
    constants.HF_HUB_OFFLINE = True
    if "datasets" in sys.modules:
        sys.modules["datasets"].config.HF_HUB_OFFLINE = True


def cached_as(name: str) -> tuple[Path, str]:
    """Return the cache in which datasets looks for a hub dataset while offline, and the folder of the dataset there.

    As of datasets 5.2: CachedDatasetModuleFactory.
    """
    from datasets import config
    from datasets.naming import camelcase_to_snakecase

    *owner, last = name.split("/")
    return Path(config.HF_DATASETS_CACHE), "___".join([*owner, camelcase_to_snakecase(last)])


def without_parts(processor_class: Any) -> Any:
    """Return a processor class whose parts may be None, by overriding `check_argument_for_proper_class`.

    As of transformers 5.24, whose processors of images and videos cannot be made without torchvision, which only the
    part for videos needs.
    """
    def check(self: Any, name: str, argument: Any) -> Any:
        return None if argument is None else super(cls, self).check_argument_for_proper_class(name, argument)

    cls: Any = type(processor_class.__name__, (processor_class,), {"check_argument_for_proper_class": check})
    return cls
