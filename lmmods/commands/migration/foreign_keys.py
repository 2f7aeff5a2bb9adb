"""Keys of other programs and what they are here: the tables of foreign_keys.txt, read when they are needed."""

import functools
import re
from dataclasses import dataclass
from pathlib import Path

TABLES = Path(__file__).with_name("foreign_keys.txt")
NOT_NEEDED = "not needed"
NO_KEY = ("none", NOT_NEEDED)


@dataclass(frozen=True)
class Row:
    """A line of a table.

    Args:
        program: The table: a section of the file.
        cells: Old, ours and notes, as they stand there.
        pairs: Each old key with its keys here: none where there is no counterpart.
    """

    program: str
    cells: tuple[str, str, str]
    pairs: tuple[tuple[str, tuple[str, ...]], ...]

    @property
    def note(self) -> str:
        """The notes as plain text."""
        return re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", self.cells[2]).replace("`", "")


@functools.cache
def read_rows() -> tuple[Row, ...]:
    """All rows, in the order of the file."""
    rows, program = [], ""
    for line in TABLES.read_text(encoding="utf-8").splitlines():
        if line.startswith("["):
            program = line.strip("[]")
        elif line and not line.startswith("#"):
            old, ours, note = (cell.strip() for cell in line.split("|", 2))
            rows.append(Row(program, (old, ours, note), _pairs(old, ours)))
    return tuple(rows)


def rows_of(program: str) -> dict[str, Row]:
    """Old key -> the row of a program's table."""
    return {name: row for row in read_rows() if row.program == program for name, _ in row.pairs}


def counterparts(key: str) -> list[tuple[tuple[str, ...], str]]:
    """What a key of any program is here: keys (none where there is no counterpart) and a note, those with keys first.

    Args:
        key: Dotted; `lora.r` is looked up as lora_r before r.
    """
    parts = re.sub(r"\.(init_args|dict_kwargs)\b", "", key).replace("-", "_").split(".")
    for name in ("_".join(parts[-2:]), parts[-1]):
        found: dict[tuple[str, ...], str] = {}
        for row in read_rows():
            for old, ours in row.pairs:
                if old == name and not found.get(ours):
                    found[ours] = row.note
        if found:
            return sorted(found.items(), key=lambda item: not item[0])
    return []


def _pairs(old: str, ours: str) -> tuple[tuple[str, tuple[str, ...]], ...]:
    names, keys = _names(old), () if ours in NO_KEY else tuple(ours.split(", "))
    if len(names) == len(keys):
        return tuple((name, (key,)) for name, key in zip(names, keys, strict=True))
    return tuple((name, keys) for name in names)


def _names(cell: str) -> list[str]:
    """The keys of the first column: what has a space in it is none, and what follows a colon are values."""
    names = []
    for item in cell.split(", "):
        name, colon, _ = item.partition(":")
        if re.fullmatch(r"[\w.\[\]]+", name):
            names.append(name)
        if colon:
            break
    return names
