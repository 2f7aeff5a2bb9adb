"""What a task makes of the network's outputs: rows for predictions.jsonl, scores, further files."""

from typing import Any, NamedTuple


class Predictions(NamedTuple):
    """Outputs turned back into the task's terms.

    Args:
        rows: Records of predictions.jsonl, in the order of the data.
        scores: Metrics, where the data hold right answers.
        files: Further JSON files of the run folder, by name.
    """

    rows: list[dict[str, Any]]
    scores: dict[str, float]
    files: dict[str, Any]
