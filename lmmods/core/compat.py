"""What both engines need of libraries that has no public name; the torch engine's own are in torch_engine/compat.

Each use is held by tests/compat/test_core.py.
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
    """The Jinja environment in which transformers renders chat templates: of `_compile_jinja_template`.

    Read in transformers 5.23. The public `render_jinja_template` renders, but hands out neither filters nor tests.
    """
    from transformers.utils.chat_template_utils import _compile_jinja_template

    return _compile_jinja_template("").environment


@contextmanager
def rendering_by(compiled: Callable[[str], Any]) -> Iterator[None]:
    """Within it, `apply_chat_template` renders by `compiled(source).render(messages=…, …)`: `_compile_jinja_template`.

    Read in transformers 5.23, where no argument chooses who renders.
    """
    from transformers.utils import chat_template_utils

    chat_template_environment()  # which is theirs, also for `compiled`
    theirs = chat_template_utils._compile_jinja_template
    chat_template_utils._compile_jinja_template = compiled
    try:
        yield
    finally:
        chat_template_utils._compile_jinja_template = theirs


def namespace_values(namespace: Any) -> dict[str, Any]:
    """What a template has put into a `namespace()`: its private dictionary, which no template can name.

    Read in jinja2 3.1, whose Namespace gives out single values only.
    """
    return namespace._Namespace__attrs


def rows_fingerprint(rows: Any) -> str | None:
    """What tells the contents of a data set of the hub apart from others: `Dataset._fingerprint`.

    Read in datasets 5.2. None for one that streams. It is part of the identity of runs, so nothing else can replace it.
    """
    return getattr(rows, "_fingerprint", None)


def logged_checkpoints(logger: Any) -> bool | str:
    """The argument `log_model` of Lightning's WandbLogger, which it keeps in `_log_model` alone; False for others.

    Read in lightning 2.6.
    """
    return getattr(logger, "_log_model", False)


def without_anonymous(logger: Any) -> None:
    """Take the option `anonymous` out of what Lightning's WandbLogger hands to wandb.init: `_wandb_init`.

    Read in lightning 2.6, which always hands it over, and wandb 0.28, which warns of it and ignores it.
    """
    getattr(logger, "_wandb_init", {}).pop("anonymous", None)


def work_offline() -> None:
    """Let the hub's library, and datasets, take what is cached and ask nobody, as their HF_HUB_OFFLINE does.

    Read in huggingface_hub 2.4, whose `is_offline_mode` reads its constant, and datasets 5.2, which copies it when it
    is imported. Processes that are started later read the environment.
    """
    from huggingface_hub import constants

    os.environ["HF_HUB_OFFLINE"] = "1"
    constants.HF_HUB_OFFLINE = True
    if "datasets" in sys.modules:
        sys.modules["datasets"].config.HF_HUB_OFFLINE = True


def cached_as(name: str) -> tuple[Path, str]:
    """The cache in which datasets looks for a data set of the hub while it is offline, and the set's folder there.

    Read in datasets 5.2: CachedDatasetModuleFactory.
    """
    from datasets import config
    from datasets.naming import camelcase_to_snakecase

    *owner, last = name.split("/")
    return Path(config.HF_DATASETS_CACHE), "___".join([*owner, camelcase_to_snakecase(last)])
