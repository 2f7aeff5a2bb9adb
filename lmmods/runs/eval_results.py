"""Scores on benchmarks of the Hugging Face hub: `.eval_results/` of an exported model."""

import math
from typing import Any

from lmmods.recipe.block_fields import BenchmarkScore
from lmmods.recipe.files import as_yaml

FOLDER = ".eval_results"


def eval_results(publish: dict[str, Any], metrics: dict[str, Any]) -> tuple[dict[str, str], list[BenchmarkScore]]:
    """Return files in the hub's format, one for each benchmark, and the scores without a finite metric.

    Args:
        publish: The block of the recipe.
        metrics: Content of metrics.json.

    Returns:
        YAML by path in the model's folder, `.eval_results/<owner>--<name>.yaml`; scores that are in none of them.
    """
    from huggingface_hub import EvalResultEntry, eval_result_entries_to_yaml

    entries: dict[str, list[EvalResultEntry]] = {}
    missing = []
    for score in (BenchmarkScore(**fields) for fields in publish.get("eval_results") or []):
        value = metrics.get(score.metric)
        if isinstance(value, int | float) and math.isfinite(value):
            entries.setdefault(score.dataset, []).append(EvalResultEntry(
                score.dataset, score.task, value * score.scale, dataset_revision=score.revision, notes=score.notes))
        else:
            missing.append(score)
    return {f"{FOLDER}/{dataset.replace('/', '--')}.yaml": as_yaml(eval_result_entries_to_yaml(found))
            for dataset, found in entries.items()}, missing
