"""Fields of the blocks beside trainer, model and data: checkpoint, samples, mmlu and publish, on either engine."""

from dataclasses import dataclass
from typing import Literal

from lmmods.core.hub import HUB_ID
from lmmods.core.settings import require
from lmmods.recipe.source import SourceLike


@dataclass(eq=False, repr=False)
class CheckpointFields:
    """When a checkpoint is written besides after each validation, at the end and when interrupted, and which stay.

    Args:
        every_n_steps: Optimiser steps between checkpoints; null saves after each validation and at the end only.
        keep_last: How many of the newest to keep.
        keep_best: How many of the best by `monitor` to keep in addition.
        monitor: Metric that says which is best; null is val/loss, in reinforcement learning val/reward.
        mode: Direction of `monitor`: `min` if smaller is better, `max` if larger is; null is that of the metric that
            null means there, else min.
    """

    every_n_steps: int | None = 250
    keep_last: int = 2
    keep_best: int = 1
    monitor: str | None = None
    mode: Literal["min", "max"] | None = None

    def __post_init__(self) -> None:
        require(self.every_n_steps is None or self.every_n_steps >= 1, "checkpoint.every_n_steps", self.every_n_steps,
                "1 or more")
        require(self.keep_last >= 1, "checkpoint.keep_last", self.keep_last, "1 or more")
        require(self.keep_best >= 0, "checkpoint.keep_best", self.keep_best, "0 or more")


@dataclass(eq=False, repr=False)
class SampleFields:
    """Generate from fixed prompts, always the likeliest token, so that the answers of two steps can be compared.

    They go to samples.jsonl, to the console, and to W&B and TensorBoard where these log.

    Args:
        prompts: What to ask: instructions in fine-tuning, beginnings of texts in language modelling; null asks nothing.
        every_n_steps: Optimiser steps between samples. The end of the run is sampled too.
        max_new_tokens: Longest answer in tokens.
        compare_base: Also ask before the first step, and write that answer next to each later one.
    """

    prompts: list[str] | None = None
    every_n_steps: int = 100
    max_new_tokens: int = 64
    compare_base: bool = True

    def __post_init__(self) -> None:
        require(self.prompts is None or bool(self.prompts) and all(prompt.strip() for prompt in self.prompts),
                "samples.prompts", self.prompts, "null or a list of texts, none of them empty")
        require(self.every_n_steps >= 1, "samples.every_n_steps", self.every_n_steps, "1 or more")
        require(self.max_new_tokens >= 1, "samples.max_new_tokens", self.max_new_tokens, "1 or more")


@dataclass(eq=False, repr=False)
class MMLUFields:
    """Ask multiple-choice questions while training; the answer is the likeliest letter, not a generated text.

    Rows are `subject, input, output`: the whole prompt, up to and with `Answer:`, and the right letter, from A to J.
    Metrics are `mmlu/<name>/accuracy` (of all questions), `mmlu/<name>/mean_subject_accuracy` (of the subjects' own
    accuracies), `mmlu/<name>/loss` (cross-entropy over the letters) and `mmlu/<name>/<subject>`.

    Args:
        source: Where the questions come from: file, folder, glob, URL, hub id, a mapping as in data.source, or a list
            of these; null asks nothing.
        every_n_steps: Optimiser steps between rounds of questions; null asks at each validation, so that checkpoints
            and early stopping may go by the accuracy. The end of the run is asked too.
        limit: Ask only so many of the questions, spread evenly over all; null asks all.
        max_length: Longest prompt in tokens, at most what the model takes; longer ones lose their beginning and are
            counted.
        name: The part of the metrics' names that says which questions these are.
    """

    source: SourceLike | None = None
    every_n_steps: int | None = None
    limit: int | None = None
    max_length: int = 2048
    name: str = "eval"

    def __post_init__(self) -> None:
        require(self.source is None or bool(self.source), "mmlu.source", self.source,
                "null, or a file, folder, glob or hub id")
        require(self.every_n_steps is None or self.every_n_steps >= 1, "mmlu.every_n_steps", self.every_n_steps,
                "null, or 1 or more")
        require(self.limit is None or self.limit >= 1, "mmlu.limit", self.limit, "null, or 1 or more")
        require(self.max_length >= 2, "mmlu.max_length", self.max_length, "2 or more")
        require(bool(self.name.strip()) and "/" not in self.name, "mmlu.name", repr(self.name),
                "a word without a slash")


@dataclass
class BenchmarkScore:
    """A metric of the run as a score on the leaderboard of a benchmark.

    Args:
        metric: Name in metrics.json, such as test/exact_match; those of the command evaluate begin with eval/.
        dataset: Hub id of the benchmark.
        task: The benchmark's name of the task, `task_id` in its eval.yaml.
        revision: Commit of the benchmark that was used.
        scale: Factor between the metric and the score, such as 100 for a share that is wanted in per cent.
        notes: How it was measured, in a few words.
    """

    metric: str
    dataset: str
    task: str
    revision: str | None = None
    scale: float = 1.0
    notes: str | None = None

    def __post_init__(self) -> None:
        require(self.metric.startswith(("val/", "test/", "mmlu/", "eval/")), "publish.eval_results.metric", self.metric,
                "a metric of validation, test, mmlu or evaluate: val/..., test/..., mmlu/... or eval/...")
        require("/" in self.dataset and bool(HUB_ID.fullmatch(self.dataset)), "publish.eval_results.dataset",
                self.dataset, "owner/name")
        require(bool(self.task.strip()), "publish.eval_results.task", repr(self.task), "the name of a task")
        require(0 < self.scale < float("inf"), "publish.eval_results.scale", self.scale, "more than 0")


@dataclass(eq=False, repr=False)
class PublishFields:
    """Upload model/ with its card. The token is huggingface_hub's own: $HF_TOKEN, or what `hf auth login` has stored.

    Repository, token and write permission are checked before training. An upload that fails during training is reported
    once and training continues; at the end it is an error (exit status 2) after everything else has been written.

    Args:
        repo: Hub repository `user/name`, created if there is none; null uploads nothing.
        private: Make the repository private.
        when: `end` uploads what the finished run exports; `save` also the model of each checkpoint, in the background,
            leaving one out while the upload before it is under way.
        license: License in the card, as the hub names them (apache-2.0, mit, ...).
        eval_results: Metrics that are scores on benchmarks of the hub, a list of mappings `metric`, `dataset`, `task`
            and optionally `revision`, `scale`, `notes`. They are written into .eval_results/ of model/, from where the
            hub takes them for the page of the model and the leaderboard of the benchmark.
    """

    repo: str | None = None
    private: bool = True
    when: Literal["end", "save"] = "end"
    license: str | None = None
    eval_results: list[BenchmarkScore] | None = None

    def __post_init__(self) -> None:
        require(self.repo is None or "/" in self.repo and bool(HUB_ID.fullmatch(self.repo)), "publish.repo", self.repo,
                "user/name")
        require(self.license is None or self.repo is not None, "publish.repo", self.repo,
                "set where publish.license is")
