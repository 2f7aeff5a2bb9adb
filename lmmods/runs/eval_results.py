"""Scores on benchmarks of the Hugging Face hub: `.eval_results/` of an exported model."""

import math
from pathlib import Path
from typing import Any

from lmmods.core.console import warn
from lmmods.recipe.block_fields import BenchmarkScore
from lmmods.recipe.files import as_yaml
from lmmods.runs.run_files import inside, write_text

FOLDER = ".eval_results"


def eval_results(recipe: dict[str, Any], metrics: dict[str, Any], measured: set[str]) -> dict[str, str]:
    """Return the scores of publish.eval_results as files in the hub's format, one per benchmark.

    A score is left out if its metric is missing or not finite, with a warning if it should have been measured by now.

    Args:
        metrics: Content of metrics.json.
        measured: Prefixes of the metrics that were just measured, such as `val` for val/loss.

    Returns:
        YAML by path in the model's folder, `.eval_results/<owner>--<name>.yaml`.
    """
    from huggingface_hub import EvalResultEntry, eval_result_entries_to_yaml

    entries: dict[str, list[EvalResultEntry]] = {}
    for score in (BenchmarkScore(**fields) for fields in (recipe.get("publish") or {}).get("eval_results") or []):
        value = metrics.get(score.metric)
        if isinstance(value, int | float) and math.isfinite(value):
            entries.setdefault(score.dataset, []).append(EvalResultEntry(
                score.dataset, score.task, value * score.scale, dataset_revision=score.revision, notes=score.notes))
        elif score.metric.partition("/")[0] in measured:
            warn(f"publish.eval_results: {score.metric} is {metrics.get(score.metric, 'not a metric of this run')}, so "
                 f"no score on {score.dataset} is written. Use a metric of metrics.json.")
    return {f"{FOLDER}/{dataset.replace('/', '--')}.yaml": as_yaml(eval_result_entries_to_yaml(scores))
            for dataset, scores in entries.items()}


def write_eval_results(model: Path, files: dict[str, str]) -> None:
    """Write the files that `eval_results` returns to a model's folder."""
    for name, text in files.items():
        path = inside(model, name)
        path.parent.mkdir(exist_ok=True)
        write_text(path, text)
