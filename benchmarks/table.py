"""Rows of the figures that the programs here measure, and their table."""

from dataclasses import dataclass


@dataclass
class Row:
    """One comparison.

    Args:
        work: What was measured.
        against: What it was measured against.
        ratio: Ours by theirs.
        target: What the ratio should be, such as `<= 1.3`.
        note: The figures that the ratio is made of.
    """

    work: str
    against: str
    ratio: float
    target: str
    note: str


def markdown(rows: list[Row]) -> str:
    """The rows as a table in Markdown."""
    lines = ["| what | against | ratio | target | note |", "|---|---|---:|---:|---|"]
    return "\n".join([*lines, *(f"| {row.work} | {row.against} | {row.ratio:.2f} | {row.target} | {row.note} |"
                                for row in rows)])
