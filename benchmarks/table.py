"""Table of the benchmarks' results."""

from dataclasses import dataclass


@dataclass
class Row:
    """Result of one comparison.

    Args:
        work: What was measured.
        against: What it was measured against.
        ratio: Our value divided by the other.
        target: Target of the ratio, such as `<= 1.3`.
        note: Values behind the ratio.
    """

    work: str
    against: str
    ratio: float
    target: str
    note: str


def markdown(rows: list[Row]) -> str:
    """Return the rows as a Markdown table."""
    lines = ["| what | against | ratio | target | note |", "|---|---|---:|---:|---|"]
    return "\n".join([*lines, *(f"| {row.work} | {row.against} | {row.ratio:.2f} | {row.target} | {row.note} |"
                                for row in rows)])
