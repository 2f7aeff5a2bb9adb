"""`evaluate`: evaluate a finished run on the benchmarks of EleutherAI's lm-eval."""

import difflib
from typing import Any, Literal

from lmmods.commands.exported_model import FinishedRun
from lmmods.core import hub
from lmmods.core.console import tell
from lmmods.core.errors import UserError, first_line

# Keys of lm-eval's results for evaluate.json; other keys would identify this machine.
REPORTED = ("results", "groups", "versions", "n-shot", "higher_is_better", "n-samples")


def evaluate(run: str, tasks: str, limit: int | None = None, num_fewshot: int | None = None, batch_size: int = 8,
             task_folder: str | None = None, apply_chat_template: bool = False,
             dtype: Literal["float32", "bfloat16", "float16"] = "float32", device: str = "auto") -> None:
    """Run lm-eval benchmarks on a run's model, with its adapter and its quantised base.

    Scores go to metrics.json as `eval/<task>/<metric>`, everything else to evaluate.json, both after each task. If
    a task fails, the others still run, and the exit status is not 0.

    Args:
        run: Run folder, of either engine.
        tasks: Comma-separated names, for example `hellaswag,mmlu`; also groups and tags.
        limit: Maximum number of documents per task. null uses all.
        num_fewshot: Number of examples before each question. Default: the task's.
        batch_size: Number of rows per batch.
        task_folder: Folder with your own task files (YAML).
        apply_chat_template: Ask as a chat, with the tokenizer's template.
        dtype: Type that the model computes in.
        device: cpu, cuda or cuda:1. auto uses a GPU if there is one.

    Raises:
        UserError: lm-eval is not installed; the run, its model or a task does not exist; or a task has failed.
    """
    try:
        import lm_eval
        from lm_eval.models.huggingface import HFLM
        from lm_eval.tasks import TaskManager
    except ImportError as error:
        raise UserError(f"evaluate needs lm-eval ({error}). Install it: pip install -e '.[eval]'") from error
    import torch

    from lmmods.data.encode.chat_template import bounded_rendering

    finished = FinishedRun.read(run, "evaluate")
    hub_problem = hub.unreachable_reason()  # checks the hub once; lm-eval would check it for each file of each task
    names = [name.strip() for name in tasks.split(",") if name.strip()]
    manager = TaskManager(include_path=task_folder)
    _check_names(names, manager.all_tasks)
    tokenizer = finished.tokenizer()
    if apply_chat_template and not tokenizer.chat_template:
        raise UserError(f"--apply_chat_template: {finished.folder.model} has no chat template. Remove it.")
    device = ("cuda" if torch.cuda.is_available() else "cpu") if device == "auto" else device
    base = finished.load(finished.quantize if finished.has_adapter else None,
                         {"float32": "32-true", "bfloat16": "bf16-true", "float16": "16-mixed"}[dtype], device)
    model = HFLM(pretrained=finished.with_adapter(base), tokenizer=tokenizer, batch_size=batch_size, device=device)
    all_results: dict[str, Any] = {}
    failed: dict[str, Exception] = {}
    with finished.folder.lock("evaluate"), bounded_rendering():
        for name in dict.fromkeys(names):
            try:
                results = lm_eval.simple_evaluate(model, tasks=[name], limit=limit, num_fewshot=num_fewshot,
                                                  task_manager=manager, apply_chat_template=apply_chat_template,
                                                  log_samples=False)
            except Exception as error:  # raised again below
                failed[name] = error
                tell(f"{name} failed: {_describe(error)}")
                continue
            print(lm_eval.utils.make_table(results))
            all_results |= {key: {**all_results.get(key, {}), **results[key]} for key in REPORTED if key in results}
            finished.folder.merge_metrics(_list_scores(all_results))
            finished.folder.write_files({"evaluate.json": all_results})
    if all_results:
        print(f"Wrote {len(_list_scores(all_results))} scores to {finished.folder.metrics_json}.")
    if failed:
        raise _build_error(failed, len(set(names)), hub_problem)


def _list_scores(results: dict[str, Any]) -> dict[str, float]:
    """Return lm-eval's metrics, named `eval/<task>/<metric>`."""
    return {f"eval/{task}/{_metric_name(name)}": value for task, values in results["results"].items()
            for name, value in values.items() if isinstance(value, float | int) and "stderr" not in name
            and name not in ("sample_len", "sample_count")}


def _build_error(failed: dict[str, Exception], num_tasks: int, hub_problem: str) -> Exception:
    """Return the error for failed tasks: UserError if only data or packages are missing, else the first other error."""
    if bug := next((error for error in failed.values() if not isinstance(error, OSError | ImportError)), None):
        return bug
    reasons = "; ".join(f"{name}: {_describe(error)}" for name, error in failed.items())
    return UserError(f"evaluate: {len(failed)} of {num_tasks} tasks failed ({reasons}). "
                     + ("The other scores are written. " if len(failed) < num_tasks else "")
                     + (f"The hub {hub_problem}. " if hub_problem else "")
                     + "Check the network, or use tasks on local files (--task_folder). Install packages that a task "
                     "needs with pip.")


def _describe(error: Exception) -> str:
    return f"{type(error).__name__}: {first_line(error)}"


def _metric_name(name: str) -> str:
    """Return `acc` for `acc,none` and `exact_match_strict` for `exact_match,strict`."""
    metric, _, filter_name = name.partition(",")
    return metric if filter_name in ("", "none") else f"{metric}_{filter_name}"


def _check_names(names: list[str], available: list[str]) -> None:
    if not names:
        raise UserError("--tasks is empty. Add lm-eval tasks, for example hellaswag,arc_easy.")
    for name in names:
        if name not in available:
            matches = difflib.get_close_matches(name, available, 3, 0.7)
            raise UserError(f"--tasks {name}: lm-eval has no such task, group or tag."
                            + (f" Did you mean {', '.join(matches)}?" if matches else "")
                            + " For your own task files, set --task_folder.")
