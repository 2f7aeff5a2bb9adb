"""Fields of the blocks checkpoint, samples, mmlu and publish, for both engines."""

from dataclasses import dataclass
from typing import Literal

from lmmods.core.hub import HUB_ID
from lmmods.core.settings import require
from lmmods.recipe.source import SourceLike


@dataclass(eq=False, repr=False)
class CheckpointFields:
    """Which checkpoints to write and keep. One is also written after each validation, at the end and on interruption.

    Args:
        every_n_steps: Optimiser steps between checkpoints, in addition to those after validations, at the end and on
            interruption. null writes only these.
        keep_last: Number of newest checkpoints to keep.
        keep_best: Number of best checkpoints, by `monitor`, to keep in addition.
        monitor: Metric that ranks checkpoints. Default: val/loss; for GRPO val/reward.
        mode: `min` if lower values of `monitor` are better, otherwise `max`. Default: what the default metric needs,
            otherwise min.
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
    """Answer fixed prompts during training, by greedy decoding, so that steps can be compared.

    They go to samples.jsonl, to the console, and to W&B and TensorBoard where these log.

    Args:
        prompts: Prompts: instructions in fine-tuning, beginnings of texts in language modelling. null generates
            nothing.
        every_n_steps: Optimiser steps between samples. There are also samples at the end.
        max_new_tokens: Maximum number of tokens in an answer.
        compare_base: Also generate before the first step, and write that answer next to each later one.
    """

    prompts: list[str] | None = None
    every_n_steps: int = 100
    max_new_tokens: int = 64
    compare_base: bool = True

    def __post_init__(self) -> None:
        require(self.prompts is None or bool(self.prompts) and all(prompt.strip() for prompt in self.prompts),
                "samples.prompts", self.prompts, "null or a list of strings, none of them empty")
        require(self.every_n_steps >= 1, "samples.every_n_steps", self.every_n_steps, "1 or more")
        require(self.max_new_tokens >= 1, "samples.max_new_tokens", self.max_new_tokens, "1 or more")


@dataclass(eq=False, repr=False)
class MMLUFields:
    """Ask multiple-choice questions during training; the answer is the most likely letter, not a generated text.

    Rows are `subject, input, output`: the whole prompt, up to and with `Answer:`, and the right letter, from A to J.
    Metrics are `mmlu/<name>/accuracy` (of all questions), `mmlu/<name>/mean_subject_accuracy` (of the subjects' own
    accuracies), `mmlu/<name>/loss` (cross-entropy over the letters) and `mmlu/<name>/<subject>`.

    Args:
        source: Questions: file, folder, glob, URL, hub id, a mapping as in data.source, or a list of these. null asks
            none.
        every_n_steps: Optimiser steps between rounds. Default: at each validation, so that checkpoints and early
            stopping can use the accuracy. There is also a round at the end.
        limit: Maximum number of questions, spread evenly over all. null asks all.
        max_length: Maximum prompt length in tokens, at most the model's limit; longer prompts lose their beginning and
            are counted.
        name: Name of the question set in metrics.
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
    """A metric of the run as a score on a benchmark's leaderboard.

    Args:
        metric: Name in metrics.json, such as test/exact_match; metrics of the evaluate command start with eval/.
        dataset: Hub id of the benchmark.
        task: The benchmark's name of the task: `task_id` in its eval.yaml.
        revision: Commit of the benchmark.
        scale: Factor from the metric to the score, for example 100 from a fraction to per cent.
        notes: How the score was measured, in a few words.
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
    """Upload model/ with its card to the Hugging Face hub. The token is $HF_TOKEN or stored by `hf auth login`.

    Repository, token and write permission are checked before training. An upload that fails during training is reported
    once and training continues; at the end it is an error (exit status 2) after everything else has been written.

    Args:
        repo: Hub repository `user/name`, created if it does not exist. null uploads nothing.
        private: Make the repository private.
        when: `end` uploads the finished run's export; `save` also the model of each checkpoint, in the background,
            unless the previous upload is still running.
        license: License in the card, by its name on the hub (apache-2.0, mit, ...).
        eval_results: Metrics to publish as benchmark scores, which the hub shows: mappings with `metric`, `dataset`,
            `task` and optionally `revision`, `scale`, `notes`.
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
                "set where publish.license is", "publish.license")
