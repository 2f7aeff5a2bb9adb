"""Fields of the data modules: light to import, and open to a task's own keys in two ways."""

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
    """Rows of one's own.

    Args:
        more: A key of its own.
        **common: Fields of SFTData.
    """

    def __init__(self, source: str | Source | list[str | Source], *, more: int = 3, **common: Any) -> None:
        super().__init__(source, **common)
        self.more = more


@dataclass(kw_only=True, eq=False, repr=False)
class MoreFields(SFTDataFields):
    """Fields of one's own.

    Args:
        more: A key of its own.
    """

    more: int = 3


class WithFields(MoreFields, SFTData):
    """Rows of one's own."""


@pytest.mark.parametrize("own", [WithConstructor, WithFields])
def test_own_keys_stand_beside_those_of_the_task(own):
    data = own("rows.jsonl", more=4, batch_size=2)
    assert (data.more, data.batch_size, data.eval_batch_size, data.seed, data.template) == (4, 2, 2, 0, None)
    keys = keys_of(own)
    assert keys["more"].text == "A key of its own."
    assert keys["batch_size"].text == "Rows per micro-batch and device in training."
    assert keys["template"].text.startswith("Chat template: alpaca")


def test_fields_need_no_library():
    code = ("import sys, lmmods.recipe.reader; "
            "print({'numpy', 'pyarrow', 'torch', 'lightning'} & sys.modules.keys())")
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout == "set()\n"
