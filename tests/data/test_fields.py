"""Fields of the data modules: light to import, and a task can add keys in two ways."""

import subprocess
import sys
from dataclasses import dataclass
from typing import Any

import pytest

from lmmods.data.sft import SFTData
from lmmods.recipe.keys import keys_of
from lmmods.recipe.source import Source
from lmmods.recipe.tasks.sft import SFTDataFields


class WithConstructor(SFTData):
    """A custom data class.

    Args:
        more: A key of its own.
        **common: Fields of SFTData.
    """

    def __init__(self, source: str | Source | list[str | Source], *, more: int = 3, **common: Any) -> None:
        super().__init__(source, **common)
        self.more = more


@dataclass(kw_only=True, eq=False, repr=False)
class MoreFields(SFTDataFields):
    """Custom fields.

    Args:
        more: A key of its own.
    """

    more: int = 3


class WithFields(MoreFields, SFTData):
    """A custom data class."""


@pytest.mark.parametrize("data_class", [WithConstructor, WithFields])
def test_a_task_can_add_keys_to_the_common_ones(data_class):
    data = data_class("rows.jsonl", more=4, batch_size=2)
    assert (data.more, data.batch_size, data.eval_batch_size, data.seed, data.template) == (4, 2, 2, 0, None)
    keys = keys_of(data_class)
    assert keys["more"].text == "A key of its own."
    assert keys["batch_size"].text == "Rows per micro-batch and device in training."
    assert keys["template"].text.startswith("Chat template: alpaca")


def test_importing_the_fields_loads_no_heavy_library():
    code = ("import sys, lmmods.recipe.reader; "
            "print({'numpy', 'pyarrow', 'torch', 'lightning'} & sys.modules.keys())")
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout == "set()\n"
