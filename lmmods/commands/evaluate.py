"""`evaluate`: evaluate a finished run on the benchmarks of EleutherAI's lm-eval."""

import difflib
from typing import Any, Literal

from lmmods.commands.exported_model import FinishedRun
from lmmods.core import hub
from lmmods.core.console import tell
from lmmods.core.errors import UserError, first_line

# Keys of lm-eval's results that go into evaluate.json; the others identify this machine.
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
        UserError: lm-eval is not installed, no such run, model or task, or one of the tasks could not be evaluated.
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
    quiet = hub.silence()  # check the hub once; lm-eval would do so for each file of each task
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
    done: dict[str, Any] = {}
    failed: dict[str, Exception] = {}
    with finished.folder.lock("evaluate"), bounded_rendering():
        for name in dict.fromkeys(names):
            try:
                found = lm_eval.simple_evaluate(model, tasks=[name], limit=limit, num_fewshot=num_fewshot,
                                                task_manager=manager, apply_chat_template=apply_chat_template,
                                                log_samples=False)
            except Exception as error:  # raised again below
                failed[name] = error
                tell(f"{name} failed: {_reason(error)}")
                continue
            print(lm_eval.utils.make_table(found))
            done |= {key: {**done.get(key, {}), **found[key]} for key in REPORTED if key in found}
            finished.folder.merge_metrics(_scores(done))
            finished.folder.write_files({"evaluate.json": done})
    if done:
        print(f"Wrote {len(_scores(done))} scores to {finished.folder.metrics_json}.")
    if failed:
        raise _failure(failed, len(set(names)), quiet)


def _scores(found: dict[str, Any]) -> dict[str, float]:
    """Return lm-eval's results by `eval/<task>/<metric>`."""
    return {f"eval/{task}/{_metric(name)}": value for task, values in found["results"].items()
            for name, value in values.items() if isinstance(value, float | int) and "stderr" not in name
            and name not in ("sample_len", "sample_count")}


def _failure(failed: dict[str, Exception], num_tasks: int, quiet: str) -> Exception:
    """Return the exception for failed tasks: UserError if only data or packages are missing, else the first error."""
    if bug := next((error for error in failed.values() if not isinstance(error, OSError | ImportError)), None):
        return bug
    reasons = "; ".join(f"{name}: {_reason(error)}" for name, error in failed.items())
    return UserError(f"evaluate: {len(failed)} of {num_tasks} tasks failed ({reasons}). "
                     + ("The other scores are written. " if len(failed) < num_tasks else "")
                     + (f"The hub {quiet}. " if quiet else "")
                     + "Check the network, or use tasks on local files (--task_folder). Install packages that a task "
                     "needs with pip.")


def _reason(error: Exception) -> str:
    return f"{type(error).__name__}: {first_line(error)}"


def _metric(name: str) -> str:
    """Return `acc` for `acc,none` and `exact_match_strict` for `exact_match,strict`."""
    metric, _, filtered = name.partition(",")
    return metric if filtered in ("", "none") else f"{metric}_{filtered}"


def _check_names(names: list[str], known: list[str]) -> None:
    if not names:
        raise UserError("--tasks is empty. Add lm-eval tasks, for example hellaswag,arc_easy.")
    for name in names:
        if name not in known:
            near = difflib.get_close_matches(name, known, 3, 0.7)
            raise UserError(f"--tasks {name}: lm-eval has no such task, group or tag."
                            + (f" Did you mean {', '.join(near)}?" if near else "")
                            + " For your own task files, set --task_folder.")
