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
    """Return the scores that publish.eval_results names as files in the hub's format, one for each benchmark.

    A score without a finite metric is left out; a warning says so once its kind of metric has been measured.

    Args:
        metrics: Content of metrics.json.
        measured: Kinds of metrics that were measured just now: `val` of val/loss.

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
            warn(f"publish.eval_results: {score.metric} is {metrics.get(score.metric, 'no metric of this run')}, so "
                 f"there is no score on {score.dataset}. metrics.json has the metrics.")
    return {f"{FOLDER}/{dataset.replace('/', '--')}.yaml": as_yaml(eval_result_entries_to_yaml(found))
            for dataset, found in entries.items()}


def write_eval_results(model: Path, files: dict[str, str]) -> None:
    """Write what `eval_results` returns into a model's folder."""
    for name, text in files.items():
        path = inside(model, name)
        path.parent.mkdir(exist_ok=True)
        write_text(path, text)
