"""Makes rollouts: answers are drawn, scored, compared with the others to their prompt, and written; also evaluation."""

import time
from collections import Counter
from collections.abc import Callable, Iterable
from functools import cached_property, partial
from typing import Any

import numpy as np

from lmmods.core.console import warn
from lmmods.core.errors import UserError
from lmmods.core.generation_config import draws
from lmmods.core.labels import IGNORED
from lmmods.data.batch.rollouts import Place, RolloutPlan
from lmmods.data.grpo import Prompt, PromptData
from lmmods.recipe.rewards import Model, columns_of, read_rewards
from lmmods.recipe.tasks.base import ReadScorer
from lmmods.recipe.tasks.grpo import GRPOFields
from lmmods.rollouts.advantages import advantages, spread
from lmmods.rollouts.environments import ENVIRONMENT
from lmmods.rollouts.policy import Policy, SampledAnswer
from lmmods.rollouts.rewards import KEY, RewardInput, Rewards, check_prompts, score_answers, total
from lmmods.rollouts.rollout import Answer, Group, Rollout, read_rollout, rollout_name, step_of
from lmmods.rollouts.server import ServedPolicy, read_server, sampler_weights
from lmmods.rollouts.turns import Turns, environment_facts
from lmmods.runs.folder import RunFolder

REFILL = 1  # in the seed of the order in which prompts replace others


def prompt_facts(task: GRPOFields, command: str, read_scorer: ReadScorer) -> dict[str, Any]:
    """Return what prompts must know of the rewards and the environment of a task; as `TaskFields.data_facts`."""
    rewards, has_environment = read_rewards(task.rewards or []), task.environment is not None
    facts: dict[str, Any] = {"reward_columns": columns_of(rewards, has_environment)}
    if command in ("fit", "validate", "test"):
        scorers = {reward.name: score_answers(read_scorer(reward.model, f"{KEY}[{index}].model"))
                   for index, reward in enumerate(rewards) if isinstance(reward, Model)}
        facts |= {"reward_scorers": scorers, "check_prompts": partial(check_prompts, rewards)}
    return facts | (environment_facts(task) if has_environment else {})


class RolloutMaker:
    """Makes and reads the rollouts of a run, and evaluates its policy. All processes call its methods alike.

    Args:
        task: Settings of the task.
        data: The prompts, set up.
        folder: The run folder.
        policy: The network in training.
        step: Returns the optimiser steps taken so far.
        report: Receives the metrics of each rollout by name; called by all processes.
        is_first: True in the process that writes files.
    """

    def __init__(self, task: GRPOFields, data: PromptData, folder: RunFolder, policy: Policy,
                 step: Callable[[], int], report: Callable[[dict[str, float], Rollout], None], is_first: bool) -> None:
        self._task, self._data, self._folder = task, data, folder
        self._policy = policy if task.rollouts is None else ServedPolicy(policy, read_server(task.rollouts), folder,
                                                                         step)
        self._step, self._report, self._is_first = step, report, is_first
        self._has_told_of_idle = False

    @cached_property
    def _rewards(self) -> Rewards:
        """Scores answers, in processes that start with the first ones."""
        return Rewards(read_rewards(self._task.rewards or []), self._task.reward_timeout, self._task.reward_processes,
                       self._data.reward_scorers)

    @cached_property
    def _turns(self) -> Turns:
        """Answers with an environment."""
        return Turns(self._task, self._data, self._policy)

    def close(self) -> None:
        """End the processes that score answers and the environments, and what a server keeps of the run."""
        if "_turns" in vars(self):
            self._turns.close()
        if "_rewards" in vars(self):
            self._rewards.close()
        if isinstance(self._policy, ServedPolicy):
            self._policy.close()

    # Training --------------------------------------------------------------------------------------------------------

    def begin(self, place: Place, name: str | None) -> tuple[str, list[dict[str, Any]]]:
        """Make the rollout of a place, or read that of a checkpoint; as `RolloutLoader` calls it.

        Raises:
            UserError: The rollout of the checkpoint cannot be read, or is of other prompts.
        """
        if name is None:
            rollout = self._make(place)
        else:
            rollout = read_rollout(self._folder.rollouts, name)
            if not rollout.replaced and [group.prompt for group in rollout.groups] != place.prompts.tolist():
                raise UserError(f"{self._folder.rollouts / name} is of other prompts than the checkpoint's position.")
        return rollout.name, rollout.items(self._task)

    def _make(self, place: Place) -> Rollout:
        task, seconds, began = self._task, {"drawing": 0.0, "rewards": 0.0, "scoring": 0.0}, time.perf_counter()
        groups = self._groups(place.prompts.tolist(), seconds)
        replaced = self._replace(groups, place, seconds)
        all_advantages = advantages(np.array([group.rewards for group in groups]), task.scale_rewards)
        for group, values in zip(groups, all_advantages, strict=True):
            group.advantages = values
        self._score(groups, seconds)
        rollout = Rollout(self._step(), groups, replaced, seconds)
        if self._is_first:
            self._folder.files.claim("rollouts")
            rollout.write(self._folder.rollouts)
            self._drop_old(rollout.step)
        if (reason := missing_reason(groups)) is not None:
            raise UserError(f"None of the {len(groups) * task.num_generations} answers that were drawn at step "
                            f"{rollout.step} has a reward, so there is nothing to learn from them: {reason}. Correct "
                            f"the reward; the answers are in {self._folder.rollouts / rollout.name}.jsonl.")
        if not self._has_told_of_idle and all((item["labels"] == IGNORED).all() for item in rollout.items(task)):
            self._has_told_of_idle = True
            why = ("model.mask_truncated leaves out all that are better or worse than others to their prompt. "
                   "train/truncated counts them") if any(group.advantages.any() for group in groups) else (
                   "all answers to a prompt have the same reward. train/groups_without_spread counts such prompts")
            warn(f"Nothing is learned from the answers drawn at step {rollout.step}: {why}. This is said once.")
        seconds["all"] = time.perf_counter() - began
        self._report({f"train/{name}": value for name, value in metrics(rollout).items()}, rollout)
        return rollout

    def _groups(self, numbers: list[int], seconds: dict[str, float]) -> list[Group]:
        """Answer prompts of the training rows and score the answers; each process has a share of the prompts."""
        policy, task = self._policy, self._task
        # In turn, so that no process has all of the long prompts of a sorted source.
        own = [self._data.prompt("train", number) for number in numbers[policy.rank :: policy.num_ranks]]
        found = self._answer(own, task.num_generations, self._step(), seconds)
        parts = policy.gather({prompt.number: group for prompt, group in zip(own, found, strict=True)})
        return [parts[number] for number in numbers]

    def _replace(self, groups: list[Group], place: Place, seconds: dict[str, float]) -> list[int]:
        """Replace prompts whose answers all have the same reward; return their numbers.

        Prompts come from an order of the epoch that depends on the seed and the rollout alone, without its own.
        """
        own = {group.prompt for group in groups}
        order = np.random.default_rng([self._data.seed, place.epoch, place.number, REFILL]).permutation(
            self._data.num_prompts("train"))
        others = iter([number for number in order.tolist() if number not in own])
        replaced: list[int] = []
        for _ in range(self._task.dynamic_sampling):
            dull = np.flatnonzero(~spread(np.array([group.rewards for group in groups]))).tolist()
            chosen = [number for number, _ in zip(others, dull, strict=False)]
            if not chosen:
                break
            for where, group in zip(dull, self._groups(chosen, seconds), strict=False):
                replaced.append(groups[where].prompt)
                groups[where] = group
        return replaced

    def _answer(self, prompts: list[Prompt], size: int, step: int | None, seconds: dict[str, float],
                greedy: bool = False) -> list[Group]:
        """Draw `size` answers to each prompt and score them."""
        task, data, began = self._task, self._data, time.perf_counter()
        numbers = None if greedy else draws(data.run_seed, [prompt.number for prompt in prompts], task.max_new_tokens,
                                            size, step)
        if task.environment is not None:
            prompts, answers = self._turns.answer(prompts, size, numbers, seconds)
        else:
            drawn = self._policy.draw([prompt.ids for prompt in prompts for _ in range(size)], numbers,
                                      task.temperature, task.max_new_tokens, data.codec.stop_token_ids)
            texts = data.codec.decode_answers(each.tokens for each in drawn)
            answers = [_answer(each, text) for each, text in zip(drawn, texts, strict=True)]
            seconds["drawing"] += time.perf_counter() - began
        asked = data.codec.decode_prompts(prompt.ids for prompt in prompts)
        groups = [Group(prompt.number, prompt.ids, text, answers[place * size : (place + 1) * size])
                  for place, (prompt, text) in enumerate(zip(prompts, asked, strict=True))]
        began = time.perf_counter()
        set_rewards(self._rewards, prompts, groups, self._data.is_scored_by_environment)
        seconds["rewards"] += time.perf_counter() - began
        return groups

    def _score(self, groups: list[Group], seconds: dict[str, float]) -> None:
        """Set the columns of log-probabilities that training needs."""
        task, policy, began = self._task, self._policy, time.perf_counter()
        own = range(policy.rank, len(groups), policy.num_ranks)
        rows = [groups[place].row(number) for place in own for number in range(task.num_generations)]
        columns, size = token_columns(task), task.num_generations
        found = {}
        if {"old_logps", "sampler_weights"} & set(columns):
            found["old_logps"] = policy.logps(rows, task.temperature)
        if "reference_logps" in columns:
            found["reference_logps"] = policy.logps(rows, task.temperature, reference=True)
        parts = policy.gather({place: {name: values[at * size : (at + 1) * size] for name, values in found.items()}
                               for at, place in enumerate(own)})
        for place, group in enumerate(groups):
            for number, answer in enumerate(group.answers):
                logps = {name: values[number][len(group.ids) :] for name, values in parts[place].items()}
                if "sampler_weights" in columns:
                    logps["sampler_weights"] = sampler_weights(logps["old_logps"], answer.logps,
                                                               task.importance_sampling_cap)
                answer.columns = {name: logps[name] for name in columns}
        seconds["scoring"] += time.perf_counter() - began

    def _drop_old(self, step: int) -> None:
        """Delete rollouts that neither `keep_rollouts` nor a checkpoint keeps."""
        keep = self._task.keep_rollouts
        if keep is None:
            return
        steps = sorted({found for path in self._folder.rollouts.iterdir() if (found := step_of(path)) is not None})
        checkpoints = self._folder.checkpoint_steps()
        # A checkpoint inside a rollout lies between its step and that of the next one.
        needed = {max((each for each in steps if each <= at), default=None) for at in checkpoints}
        for each in steps[: max(len(steps) - 1 - keep, 0)]:
            if each not in needed and each != step:
                for path in self._folder.rollouts.glob(f"{rollout_name(each)}.*"):
                    path.unlink()

    # Evaluation ------------------------------------------------------------------------------------------------------

    def evaluate(self, role: str, numbers: Iterable[int]) -> tuple[dict[str, float], dict[str, Any]]:
        """Answer prompts of a role greedily, and draw `num_generations_eval` answers to each.

        The draws are the same whenever it is called.

        Args:
            numbers: This process's prompts.

        Returns:
            Metrics, and files to write: none.
        """
        task, size, seconds = self._task, self._task.eval_samples, {"drawing": 0.0, "rewards": 0.0}
        prompts = [self._data.prompt(role, number) for number in sorted(set(numbers))]
        greedy = self._answer(prompts, 1, None, seconds, greedy=True)
        drawn = self._answer(prompts, size, None, seconds) if size else [None] * len(prompts)
        parts = self._policy.gather({prompt.number: pair for prompt, *pair in zip(prompts, greedy, drawn, strict=True)})
        groups = [parts[number] for number in sorted(parts)]
        if self._is_first and (reason := missing_reason([group for group, _ in groups])) is not None:
            warn(f"None of the {len(groups)} answers to the prompts of {role} has a reward: {reason}.")
        found = _rewards_of([group for group, _ in groups])
        found["pass@1"] = _passed_fraction([group for group, _ in groups], task.pass_reward)
        if size:
            found[f"pass@{size}"] = _passed_fraction([group for _, group in groups], task.pass_reward)
        return {name: value for name, value in found.items() if value == value}, {}


def set_rewards(rewards: Rewards, prompts: list[Prompt], groups: list[Group], by_environment: bool = False) -> None:
    """Score answers and set their rewards.

    Args:
        by_environment: Their environment has given them a reward, which is added.
    """
    scored = [RewardInput(group.text if prompt.conversation is None else prompt.conversation.messages, answer.text,
                          answer.tokens.tolist(), prompt.row, prompt.reference, answer.ended)
              for prompt, group in zip(prompts, groups, strict=True) for answer in group.answers]
    answers = [answer for group in groups for answer in group.answers]
    scores = rewards.score(scored)
    names, weights, values = rewards.names, rewards.weights, scores.values
    if by_environment:
        own = [np.nan if (value := answer.rewards[ENVIRONMENT]) is None else value for answer in answers]
        names, weights = (*names, ENVIRONMENT), np.append(weights, 1.0)
        values = np.column_stack([values, np.array(own, np.float32)])
    for answer, reasons in zip(answers, scores.reasons, strict=True):
        answer.reasons = {**reasons, **answer.reasons}
    sums = total(values, weights, [answer.reasons for answer in answers], names)
    for answer, row, reward in zip(answers, values, sums, strict=True):
        answer.rewards = {name: None if np.isnan(value) else float(value)
                          for name, value in zip(names, row, strict=True)}
        answer.reward = None if np.isnan(reward) else float(reward)


def missing_reason(groups: list[Group]) -> str | None:
    """Return the most common reason why answers have no reward; None if one has a reward, or there are no answers."""
    answers = [answer for group in groups for answer in group.answers]
    if not answers or any(answer.reward is not None for answer in answers):
        return None
    reasons = Counter(f"{name}: {reason}" for answer in answers for name, reason in answer.reasons.items())
    if not reasons:
        return f"{', '.join(answers[0].rewards)} returned None for every answer"
    reason, count = reasons.most_common(1)[0]
    return f"{reason} ({count} answers)"


def token_columns(task: GRPOFields) -> tuple[str, ...]:
    """Return the further columns of answers that the loss of a task needs, [T] each."""
    # What a server drew is of slightly other probabilities, which are not those to compare with.
    is_on_policy = task.is_on_policy and task.rollouts is None
    return (*(() if is_on_policy else ("old_logps",)), *(("reference_logps",) if task.reference_kind else ()),
            *(("sampler_weights",) if task.importance_sampling_cap is not None else ()))


def plan_of(task: GRPOFields, shuffle: bool, seed: int) -> Callable[[int, int], RolloutPlan]:
    """Return what makes a `RolloutPlan` from the number of prompts and the answers of a step.

    It raises UserError if the answers of a step are not those of whole prompts, or of `prompts_per_step`.
    """

    def plan(num_prompts: int, rows_per_step: int) -> RolloutPlan:
        size, wanted = task.num_generations, task.prompts_per_step
        cut = "data.batch_size x trainer.accumulate_grad_batches x devices"
        if wanted is not None and wanted * size != rows_per_step:
            raise UserError(f"model.prompts_per_step {wanted} with model.num_generations {size} are {wanted * size} "
                            f"answers in a step, but {cut} come to {rows_per_step}: make both equal.")
        if rows_per_step % size:
            raise UserError(f"A step has {rows_per_step} answers ({cut}), which is no multiple of "
                            f"model.num_generations {size}: change one of them.")
        return RolloutPlan(num_prompts, size, rows_per_step // size, task.steps_per_rollout, task.num_iterations,
                           seed if shuffle else None)

    return plan


def _answer(drawn: SampledAnswer, text: str) -> Answer:
    return Answer(drawn.tokens.astype(np.int32), drawn.logps.astype(np.float32), drawn.entropies.astype(np.float32),
                  np.ones(len(drawn.tokens), bool), drawn.ended, text)


# ---------------------------------------------------------------------------------------------------------------------
# Metrics, over all answers of a rollout or of an evaluation.


def metrics(rollout: Rollout) -> dict[str, float]:
    """Return the metrics of a rollout; those of nothing are left out."""
    answers = [answer for group in rollout.groups for answer in group.answers]
    rewards = np.concatenate([group.rewards for group in rollout.groups])
    tokens = np.concatenate([answer.entropies[answer.drawn] for answer in answers])
    known = rewards[~np.isnan(rewards)]
    found = {
        **_rewards_of(rollout.groups),
        "reward_std": float(known.std(ddof=1)) if len(known) > 1 else np.nan,
        "groups_without_spread": float(np.mean(~spread(np.array([group.rewards for group in rollout.groups])))),
        "replaced_prompts": float(len(rollout.replaced)) if rollout.replaced else np.nan,
        "entropy": float(np.nanmean(tokens)) if len(tokens) and not np.isnan(tokens).all() else np.nan,
        "sampler_gap": _gap(answers),
        **{f"seconds/{name}": value for name, value in rollout.seconds.items()},
    }
    return {name: value for name, value in found.items() if value == value}


def _rewards_of(groups: list[Group]) -> dict[str, float]:
    """Mean rewards, all and by name, and facts about the answers; NaN for means of nothing."""
    answers = [answer for group in groups for answer in group.answers]
    known = [answer.reward for answer in answers if answer.reward is not None]
    names = answers[0].rewards if answers else ()
    by_name = {name: [value for answer in answers if (value := answer.rewards[name]) is not None] for name in names}
    missing = len(answers) - len(known)
    return {
        "reward": float(np.mean(known)) if known else np.nan,
        **{f"rewards/{name}": float(np.mean(values)) if values else np.nan for name, values in by_name.items()
           if len(by_name) > 1},
        "missing_rewards": float(missing) if missing else np.nan,
        "answer_length": float(np.mean([len(answer.tokens) for answer in answers])) if answers else np.nan,
        "truncated": float(np.mean([not answer.ended for answer in answers])) if answers else np.nan,
        **_tools(answers),
    }


def _passed_fraction(groups: list[Group], least: float) -> float:
    """Share of the prompts with an answer whose reward is at least `least`; those without any reward are left out."""
    best = [np.nanmax(group.rewards) for group in groups if not np.isnan(group.rewards).all()]
    return float(np.mean([value >= least for value in best])) if best else np.nan


def _tools(answers: list[Answer]) -> dict[str, float]:
    """Mean turns and calls of tools of answers with an environment, and shares of calls that failed or were cut."""
    used = [answer.tools for answer in answers if answer.tools]
    counts = {name: sum(tools[name] for tools in used) for name in (used[0] if used else ())}
    calls = counts.get("calls")
    return {
        "turns": counts["turns"] / len(used) if used else np.nan,
        "tool_calls": calls / len(used) if used else np.nan,
        "tool_failures": counts["failures"] / calls if calls else np.nan,
        "tool_cuts": counts["cut"] / calls if calls else np.nan,
    }


def _gap(answers: list[Answer]) -> float:
    """Mean difference of the log-probabilities of drawn tokens, where drawn and in training; NaN if unknown."""
    gaps = [np.abs(answer.columns["old_logps"] - answer.logps)[answer.drawn] for answer in answers
            if "old_logps" in answer.columns]
    return float(np.concatenate(gaps).mean()) if gaps and sum(map(len, gaps)) else np.nan
