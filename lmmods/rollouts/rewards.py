"""Score answers with the rewards of a recipe."""

import importlib.util
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from lmmods.core.console import warn
from lmmods.core.errors import UserError
from lmmods.data.grpo import Prompt
from lmmods.data.read.conversation import Conversation
from lmmods.recipe.rewards import Code, Function, Math, Model, RewardSettings, did_you_mean
from lmmods.recipe.tasks.base import Scorer
from lmmods.recipe.trust import refuse_function
from lmmods.rollouts import code_tests
from lmmods.rollouts.named_rewards import NamedScorer, Text, Unscorable, read_expected
from lmmods.rollouts.own_functions import Completion, FunctionScorer
from lmmods.rollouts.reward_processes import Batch, RewardProcesses

KEY = "model.rewards"
MAX_CHECKED_ROWS = 10_000  # rows of a set; more are read until every reward can score one


class RewardInput(NamedTuple):
    """An answer to a prompt.

    Args:
        prompt: A string, or messages.
        text: The answer, without end tokens and padding.
        ids: Token ids of the answer.
        row: The row of the prompt.
        reference: The row's reference answer; None if it has none.
        ended: True if the answer ends with an end token; False if it is truncated.
    """

    prompt: str | list[dict[str, Any]]
    text: str
    ids: list[int]
    row: dict[str, Any]
    reference: str | None
    ended: bool


# Scores answers with a reward model; None or NaN for an answer that it cannot read.
ModelScorer = Callable[[list[RewardInput]], Sequence[float | None]]


class Scores(NamedTuple):
    """F rewards of N answers.

    Args:
        values: [N, F] float32; NaN where a reward does not apply, or failed and has no lowest value.
        reasons: For each answer, why rewards failed, by the name of the reward.
    """

    values: np.ndarray
    reasons: list[dict[str, str]]


class Rewards:
    """Scores answers with the rewards of a recipe. All but reward models run in processes that can be killed.

    Args:
        settings: Settings of the rewards.
        timeout: Maximum seconds for an answer; `code` adds its own timeout.
        num_processes: Number of processes for named rewards. Each of the user's functions has another one.
        scorers: Reward models, by the name of their reward.

    Raises:
        UserError: A function is not trusted or cannot be imported, or a package is missing.
    """

    def __init__(self, settings: Sequence[RewardSettings], timeout: float, num_processes: int,
                 scorers: Mapping[str, ModelScorer] | None = None) -> None:
        self._settings, self._timeout, self._models = list(settings), timeout, dict(scorers or {})
        model_names = {reward.name for reward in settings if isinstance(reward, Model)}
        if model_names != self._models.keys():
            raise ValueError(f"scorers are for {sorted(self._models)}, but the model rewards are {sorted(model_names)}")
        self.names = tuple(reward.name for reward in settings)
        self.weights = np.array([reward.weight for reward in settings], np.float64)
        _check_available(self._settings)
        self._processes = RewardProcesses(num_processes)
        try:
            self._load_functions()
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> "Rewards":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """End the processes and everything that they have started."""
        self._processes.close()

    @property
    def pids(self) -> list[int]:
        """Ids of the processes that have started."""
        return self._processes.pids

    def score(self, answers: Sequence[RewardInput]) -> Scores:
        """Return the scores of answers, in their order."""
        values = np.full((len(answers), len(self._settings)), np.nan, np.float32)
        reasons: list[dict[str, str]] = [{} for _ in answers]
        # For each reward that a process scores: its column in `values`, the indices of its answers, and the batch.
        jobs: list[tuple[int, list[int], Batch]] = []
        for column, reward in enumerate(self._settings):
            if isinstance(reward, Model):
                continue
            indices, inputs = self._build_inputs(reward, answers, reasons)
            limit = self._timeout + (reward.timeout if isinstance(reward, Code) else 0.0)
            if indices:
                lowest = None if isinstance(reward, Function) else 0.0
                jobs.append((column, indices, Batch(_make_scorer(reward), inputs, limit, _own_process(reward), lowest)))
        batch_outcomes = self._processes.run([batch for *_, batch in jobs])
        for (column, indices, batch), outcomes in zip(jobs, batch_outcomes, strict=True):
            for index, outcome in zip(indices, outcomes, strict=True):
                if outcome.reason is not None:
                    reasons[index][self.names[column]] = outcome.reason
                if outcome.value is not None:
                    values[index, column] = outcome.value
            if num_lowest := sum(outcome.value is not None and outcome.reason is not None for outcome in outcomes):
                warn(f"{num_lowest} of {len(outcomes)} answers made the reward {self.names[column]} hang or end its "
                     f"process. They get {batch.lowest:g}; the reasons are in the rollout file.")
        for name, scorer in self._models.items():
            self._score_by_model(name, scorer, answers, values, reasons)
        return Scores(values, reasons)

    def _build_inputs(self, settings: RewardSettings, answers: Sequence[RewardInput],
                      reasons: list[dict[str, str]]) -> tuple[list[int], list[Any]]:
        """Return the indices of answers that a reward can score, and its inputs; add the reasons for other answers."""
        if isinstance(settings, Function):
            return list(range(len(answers))), [Completion(answer.prompt, answer.text, answer.ids, answer.row)
                                               for answer in answers]
        indices, inputs = [], []
        for index, answer in enumerate(answers):
            try:
                expected = read_expected(settings, answer.row, answer.reference)
            except Unscorable as reason:
                reasons[index][settings.name] = str(reason)
            else:
                indices.append(index)
                inputs.append(Text(answer.text, len(answer.ids), expected))
        return indices, inputs

    def _score_by_model(self, name: str, scorer: ModelScorer, answers: Sequence[RewardInput], values: np.ndarray,
                        reasons: list[dict[str, str]]) -> None:
        scores = np.array([np.nan if score is None else score for score in scorer(list(answers))], np.float32)
        values[:, self.names.index(name)] = np.where(np.isfinite(scores), scores, np.nan)
        for index in np.flatnonzero(~np.isfinite(scores)):
            reasons[index][name] = "the model gives no score"

    def _load_functions(self) -> None:
        functions = {index: function for index, function in enumerate(self._settings) if isinstance(function, Function)}
        scorers = {_own_process(function): _make_scorer(function) for function in functions.values()}
        reasons = self._processes.load(scorers)
        for index, function in functions.items():
            if reasons[function.name] is not None:
                raise UserError(f"{KEY}[{index}].function: {function.function} cannot be loaded: "
                                f"{reasons[function.name]}")


def adapt_scorer(scorer: Scorer) -> ModelScorer:
    """Adapt a reward model that scores texts and conversations to answers."""
    return lambda answers: scorer([
        answer.prompt + answer.text if isinstance(answer.prompt, str) else
        Conversation([*answer.prompt, {"role": "assistant", "content": answer.text.strip()}])
        for answer in answers])


def check_prompts(settings: Sequence[RewardSettings], key: str, prompts: Iterable[Prompt], may_warn: bool) -> None:
    """Check that rows have what rewards need, such as a column with the right answer, and warn about those that do not.

    Args:
        key: Recipe key of the rows.
        prompts: Prompts of the rows.
        may_warn: False turns off the warning.

    Raises:
        UserError: No row has what a reward needs, so no answer could have a reward.
    """
    # A reward needs something from rows if it cannot score answers to an empty row.
    missing = {index: Counter() for index, reward in enumerate(settings) if _find_missing(reward, {}, None) is not None}
    never_met, count, row = set(missing), 0, {}
    for prompt in prompts if missing else ():
        if count >= MAX_CHECKED_ROWS and not never_met:
            break
        count, row = count + 1, prompt.row
        for index, reasons in missing.items():
            if (reason := _find_missing(settings[index], row, prompt.reference)) is None:
                never_met.discard(index)
            else:
                reasons[reason] += 1
    for index in sorted(never_met) if count else ():
        reward = settings[index]
        column = reward.tests if isinstance(reward, Code) else reward.column
        advice = "Set another column" if column else "Set column to the name of the column with the right answer"
        hint = did_you_mean(column, list(row)) if column and column not in row else ""
        raise UserError(f"{KEY}[{index}]: {reward.name} cannot score answers to any of the {count} rows of {key}: "
                        f"{missing[index].most_common(1)[0][0]}. {advice}. The columns are {', '.join(row)}.{hint}")
    for index, reasons in missing.items():
        if reasons and may_warn:
            reason, num_rows = reasons.most_common(1)[0]
            warn(f"{KEY}[{index}]: answers to {sum(reasons.values())} of {count} rows of {key} have no reward and are "
                 f"not trained on, as {settings[index].name} cannot score them: {reason} ({num_rows} rows).")


def _find_missing(settings: RewardSettings, row: dict[str, Any], reference: str | None) -> str | None:
    """Return what a row lacks for a reward to score an answer; None if nothing."""
    try:
        read_expected(settings, row, reference)
    except Unscorable as reason:
        return str(reason)
    return None


def sum_rewards(values: np.ndarray, weights: np.ndarray, reasons: Sequence[Mapping[str, str]],
                names: Sequence[str]) -> np.ndarray:
    """Return the weighted sums [N] float64 of the known rewards; NaN where one failed without a value or none applies.

    Args:
        values: [N, F], NaN where a reward is unknown.
        weights: [F] weights of the rewards.
        reasons: For each answer, why rewards failed, by name. A failed reward with a value counts.
        names: [F] names of the rewards.
    """
    known = ~np.isnan(values)
    sums = (np.where(known, values, 0.0).astype(np.float64) * weights).sum(axis=1)
    has_failed = np.array([not failures.keys() <= {name for name, is_known in zip(names, row, strict=True) if is_known}
                           for failures, row in zip(reasons, known, strict=True)], bool)
    return np.where(known.any(axis=1) & ~has_failed, sums, np.nan)


def _make_scorer(settings: RewardSettings) -> NamedScorer | FunctionScorer:
    return FunctionScorer(settings.function) if isinstance(settings, Function) else NamedScorer(settings)


def _own_process(settings: RewardSettings) -> str | None:
    """Return the name of a function's own process, so that its state does not depend on the number of others."""
    return settings.name if isinstance(settings, Function) else None


def _check_available(settings: Sequence[RewardSettings]) -> None:
    for index, reward in enumerate(settings):
        if isinstance(reward, Function):
            refuse_function(f"{KEY}[{index}].function", reward.function)
        if isinstance(reward, Math) and importlib.util.find_spec("math_verify") is None:
            raise UserError(f"{KEY}[{index}]: math needs math-verify. Install it: pip install -e '.[math]'")
    if any(isinstance(reward, Code) for reward in settings) and not code_tests.can_isolate():
        warn("This system cannot isolate generated programs: they keep network access and may leave processes running. "
             "Only time, memory and file size are limited.")
