"""Rewards of answers."""

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
from lmmods.rollouts.named_rewards import NamedScorer, Text, Unscorable, wanted_by
from lmmods.rollouts.own_functions import Completion, FunctionScorer
from lmmods.rollouts.reward_processes import Batch, RewardProcesses

KEY = "model.rewards"
LOOKED_AT = 10_000  # rows of a set that are looked through for what rewards need


class RewardInput(NamedTuple):
    """An answer to a prompt.

    Args:
        prompt: Text, or messages.
        text: The answer, without the tokens that end it and padding.
        ids: Its tokens.
        row: The row that the prompt is from.
        reference: The reference answer of the row, if it has one.
        ended: True if the answer ends in an end token; False if it was cut off.
    """

    prompt: str | list[dict[str, Any]]
    text: str
    ids: list[int]
    row: dict[str, Any]
    reference: str | None
    ended: bool


# Scores of a reward model; None or NaN for an answer that it cannot read.
ModelScorer = Callable[[list[RewardInput]], Sequence[float | None]]


class Scores(NamedTuple):
    """Rewards of N answers.

    Args:
        values: [N, F] float32; NaN where a reward does not apply, or has failed and has no lowest value.
        reasons: Of each answer, why rewards have failed, by name.
    """

    values: np.ndarray
    reasons: list[dict[str, str]]


class Rewards:
    """Scores answers by the rewards of a recipe, all but those of models in processes that can be killed.

    Args:
        settings: Of the rewards.
        timeout: Longest time in seconds that an answer may take; `code` has its own time on top.
        processes: Processes that share the named rewards; each function of the user's has one of its own besides.
        scorers: Scores of the reward models, by the names of their rewards.

    Raises:
        UserError: A function is not trusted or cannot be imported, or a package is missing.
    """

    def __init__(self, settings: Sequence[RewardSettings], timeout: float, processes: int,
                 scorers: Mapping[str, ModelScorer] | None = None) -> None:
        self._settings, self._timeout, self._models = list(settings), timeout, dict(scorers or {})
        models = {each.name for each in settings if isinstance(each, Model)}
        if models != self._models.keys():
            raise ValueError(f"scorers are for {sorted(self._models)}, but the models are {sorted(models)}")
        self.names = tuple(each.name for each in settings)
        self.weights = np.array([each.weight for each in settings], np.float64)
        _check(self._settings)
        self._processes = RewardProcesses(processes)
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
        """End the processes, and what they have started."""
        self._processes.close()

    @property
    def pids(self) -> list[int]:
        """Ids of the processes that have started."""
        return self._processes.pids

    def score(self, answers: Sequence[RewardInput]) -> Scores:
        """Score answers. The order is that of the answers, whatever takes how long."""
        values = np.full((len(answers), len(self._settings)), np.nan, np.float32)
        reasons: list[dict[str, str]] = [{} for _ in answers]
        # Of each reward that has something to do in a process: its column, the rows, and the batch.
        jobs: list[tuple[int, list[int], Batch]] = []
        for column, each in enumerate(self._settings):
            if isinstance(each, Model):
                continue
            rows, inputs = self._inputs(each, answers, reasons)
            limit = self._timeout + (each.timeout if isinstance(each, Code) else 0.0)
            if rows:
                lowest = None if isinstance(each, Function) else 0.0
                jobs.append((column, rows, Batch(_scorer(each), inputs, limit, _own(each), lowest)))
        found = self._processes.run([batch for *_, batch in jobs])
        for (column, rows, batch), outcomes in zip(jobs, found, strict=True):
            for row, outcome in zip(rows, outcomes, strict=True):
                if outcome.reason is not None:
                    reasons[row][self.names[column]] = outcome.reason
                if outcome.value is not None:
                    values[row, column] = outcome.value
            if lowest := sum(each.value is not None and each.reason is not None for each in outcomes):
                warn(f"{lowest} of {len(outcomes)} answers made the reward {self.names[column]} hang or end its "
                     f"process. They get {batch.lowest:g}; the reasons are in the rollout's file.")
        for name, scorer in self._models.items():
            self._score_by_model(name, scorer, answers, values, reasons)
        return Scores(values, reasons)

    def _inputs(self, settings: RewardSettings, answers: Sequence[RewardInput],
                reasons: list[dict[str, str]]) -> tuple[list[int], list[Any]]:
        """Return the rows that a reward can score, and what it needs of each; note why others cannot be."""
        if isinstance(settings, Function):
            return list(range(len(answers))), [Completion(each.prompt, each.text, each.ids, each.row)
                                               for each in answers]
        rows, inputs = [], []
        for row, each in enumerate(answers):
            try:
                wanted = wanted_by(settings, each.row, each.reference)
            except Unscorable as reason:
                reasons[row][settings.name] = str(reason)
            else:
                rows.append(row)
                inputs.append(Text(each.text, len(each.ids), wanted))
        return rows, inputs

    def _score_by_model(self, name: str, scorer: ModelScorer, answers: Sequence[RewardInput], values: np.ndarray,
                        reasons: list[dict[str, str]]) -> None:
        scores = np.array([np.nan if score is None else score for score in scorer(list(answers))], np.float32)
        values[:, self.names.index(name)] = np.where(np.isfinite(scores), scores, np.nan)
        for row in np.flatnonzero(~np.isfinite(scores)):
            reasons[row][name] = "the model gives no score"

    def _load_functions(self) -> None:
        functions = {number: each for number, each in enumerate(self._settings) if isinstance(each, Function)}
        failures = self._processes.load({_own(each): _scorer(each) for each in functions.values()})
        for number, each in functions.items():
            if failures[each.name] is not None:
                raise UserError(f"{KEY}[{number}].function: {each.function} cannot be loaded: {failures[each.name]}")


def score_answers(scorer: Scorer) -> ModelScorer:
    """Return a reward model of texts and conversations as one of answers."""
    return lambda answers: scorer([
        answer.prompt + answer.text if isinstance(answer.prompt, str) else
        Conversation([*answer.prompt, {"role": "assistant", "content": answer.text.strip()}])
        for answer in answers])


def check_prompts(settings: Sequence[RewardSettings], key: str, prompts: Iterable[Prompt], warns: bool) -> None:
    """Check that rows have what rewards need, such as a column with the right answer; warn of rows that do not.

    Args:
        key: Recipe key of the rows.
        prompts: Of the rows.
        warns: False leaves out the warning.

    Raises:
        UserError: No row has what a reward needs, so no answer would have a reward.
    """
    # A reward needs something if it cannot score an answer to an empty row.
    missing = {number: Counter() for number, each in enumerate(settings) if _lacks(each, {}, None) is not None}
    unmet, count, row = set(missing), 0, {}
    for prompt in prompts if missing else ():
        if count >= LOOKED_AT and not unmet:
            break
        count, row = count + 1, prompt.row
        for number, reasons in missing.items():
            if (reason := _lacks(settings[number], row, prompt.reference)) is None:
                unmet.discard(number)
            else:
                reasons[reason] += 1
    for number in sorted(unmet) if count else ():
        each = settings[number]
        column = each.tests if isinstance(each, Code) else each.column
        advice = "Name another one" if column else "Name the column with the right answer, as column: NAME"
        meant = did_you_mean(column, list(row)) if column and column not in row else ""
        raise UserError(f"{KEY}[{number}]: {each.name} cannot score an answer to any of the {count} rows of {key}: "
                        f"{missing[number].most_common(1)[0][0]}. {advice}. The columns are {', '.join(row)}.{meant}")
    for number, reasons in missing.items():
        if reasons and warns:
            reason, first = reasons.most_common(1)[0]
            warn(f"{KEY}[{number}]: answers to {sum(reasons.values())} of {count} rows of {key} have no reward and are "
                 f"not trained on, as {settings[number].name} cannot score them: {reason} ({first} rows).")


def _lacks(settings: RewardSettings, row: dict[str, Any], reference: str | None) -> str | None:
    """Return what a reward lacks to score an answer to a row; None if nothing."""
    try:
        wanted_by(settings, row, reference)
    except Unscorable as reason:
        return str(reason)
    return None


def total(values: np.ndarray, weights: np.ndarray, reasons: Sequence[Mapping[str, str]],
          names: Sequence[str]) -> np.ndarray:
    """Return the weighted sums of the known rewards, [N] float64; NaN where one has failed or none applies.

    Args:
        values: [N, F], NaN where a reward is not known.
        weights: [F].
        reasons: Of each answer, why rewards have failed; those that have a value all the same count with it.
        names: [F], of the rewards.
    """
    known = ~np.isnan(values)
    sums = (np.where(known, values, 0.0).astype(np.float64) * weights).sum(axis=1)
    failed = np.array([not each.keys() <= {name for name, is_known in zip(names, row, strict=True) if is_known}
                       for each, row in zip(reasons, known, strict=True)], bool)
    return np.where(known.any(axis=1) & ~failed, sums, np.nan)


def _scorer(settings: RewardSettings) -> NamedScorer | FunctionScorer:
    return FunctionScorer(settings.function) if isinstance(settings, Function) else NamedScorer(settings)


def _own(settings: RewardSettings) -> str | None:
    """Name of the process that a function has for itself: its state must not depend on how many others there are."""
    return settings.name if isinstance(settings, Function) else None


def _check(settings: Sequence[RewardSettings]) -> None:
    for number, each in enumerate(settings):
        if isinstance(each, Function):
            refuse_function(f"{KEY}[{number}].function", each.function)
        if isinstance(each, Math) and importlib.util.find_spec("math_verify") is None:
            raise UserError(f"{KEY}[{number}]: math needs math-verify. Install it: pip install -e '.[math]'")
    if any(isinstance(each, Code) for each in settings) and not code_tests.isolates():
        warn("This system does not let programs in answers run without network, or end with all that they start. They "
             "have limits of time, memory and file size only.")
