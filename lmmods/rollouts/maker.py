"""Make rollouts, which sample answers, score and compare them, and write them to files; evaluate prompts."""

import time
from collections import Counter
from collections.abc import Callable, Iterable
from functools import cached_property, partial
from typing import Any

import numpy as np

from lmmods.core.console import warn
from lmmods.core.errors import UserError
from lmmods.core.generation_config import sampling_uniforms
from lmmods.core.labels import IGNORED
from lmmods.data.batch.rollouts import PlannedRollout, RolloutPlan
from lmmods.data.grpo import Prompt, PromptData
from lmmods.recipe.rewards import Model, columns_of, read_rewards
from lmmods.recipe.tasks.base import ReadScorer
from lmmods.recipe.tasks.grpo import GRPOFields
from lmmods.rollouts.advantages import compute_advantages, has_spread
from lmmods.rollouts.environments import ENVIRONMENT
from lmmods.rollouts.policy import Policy, SampledAnswer
from lmmods.rollouts.rewards import KEY, RewardInput, Rewards, adapt_scorer, check_prompts, sum_rewards
from lmmods.rollouts.rollout import Answer, Group, Rollout, parse_step, read_rollout, rollout_name
from lmmods.rollouts.server import ServedPolicy, importance_weights, read_server
from lmmods.rollouts.turns import Turns, read_environment_facts
from lmmods.runs.folder import RunFolder

REFILL = 1  # part of the seed for the order of replacement prompts


def read_prompt_facts(task: GRPOFields, command: str, read_scorer: ReadScorer) -> dict[str, Any]:
    """Return what the data module must know about a task's rewards and environment, for `TaskFields.data_facts`."""
    rewards, has_environment = read_rewards(task.rewards or []), task.environment is not None
    facts: dict[str, Any] = {"reward_columns": columns_of(rewards, has_environment)}
    if command in ("fit", "validate", "test"):
        scorers = {reward.name: adapt_scorer(read_scorer(reward.model, f"{KEY}[{index}].model"))
                   for index, reward in enumerate(rewards) if isinstance(reward, Model)}
        facts |= {"reward_scorers": scorers, "check_prompts": partial(check_prompts, rewards)}
    return facts | (read_environment_facts(task) if has_environment else {})


class RolloutMaker:
    """Makes and reads the rollouts of a run, and evaluates its policy. All methods are collective calls.

    Args:
        task: Settings of the task.
        data: The prompts, set up.
        folder: The run folder.
        policy: The network in training.
        step: Returns the number of optimiser steps so far.
        report: Receives each rollout and its metrics by name; called by all processes.
        is_first: True in the process that writes files.
    """

    def __init__(self, task: GRPOFields, data: PromptData, folder: RunFolder, policy: Policy,
                 step: Callable[[], int], report: Callable[[dict[str, float], Rollout], None], is_first: bool) -> None:
        self._task, self._data, self._folder = task, data, folder
        self._policy = policy if task.rollouts is None else ServedPolicy(policy, read_server(task.rollouts), folder,
                                                                         step)
        self._step, self._report, self._is_first = step, report, is_first
        self._has_warned_of_idle = False

    @cached_property
    def _rewards(self) -> Rewards:
        """Return the rewards, whose processes start when they are first needed."""
        return Rewards(read_rewards(self._task.rewards or []), self._task.reward_timeout, self._task.reward_processes,
                       self._data.reward_scorers)

    @cached_property
    def _turns(self) -> Turns:
        """Return what samples answers with an environment."""
        return Turns(self._task, self._data, self._policy)

    def close(self) -> None:
        """End reward processes and environments, and unload the weights from a rollout server."""
        if "_turns" in vars(self):
            self._turns.close()
        if "_rewards" in vars(self):
            self._rewards.close()
        if isinstance(self._policy, ServedPolicy):
            self._policy.close()

    # Training --------------------------------------------------------------------------------------------------------

    def make_or_read(self, planned: PlannedRollout, name: str | None) -> tuple[str, list[dict[str, Any]]]:
        """Make a rollout, or read the rollout of a checkpoint by its name; see `RolloutLoader`.

        Raises:
            UserError: The checkpoint's rollout cannot be read, or has other prompts.
        """
        if name is None:
            rollout = self._make_rollout(planned)
        else:
            rollout = read_rollout(self._folder.rollouts, name)
            if not rollout.replaced and [group.prompt_index for group in rollout.groups] != planned.prompts.tolist():
                raise UserError(f"{self._folder.rollouts / name} has other prompts than the checkpoint. Restore the "
                                "file, or resume from a checkpoint at the end of another rollout.")
        return rollout.name, rollout.items(self._task)

    def _make_rollout(self, planned: PlannedRollout) -> Rollout:
        task, seconds, start = self._task, {"drawing": 0.0, "rewards": 0.0, "scoring": 0.0}, time.perf_counter()
        groups = self._make_groups(planned.prompts.tolist(), seconds)
        replaced = self._replace_groups(groups, planned, seconds)
        all_advantages = compute_advantages(np.array([group.rewards for group in groups]), task.scale_rewards)
        for group, group_advantages in zip(groups, all_advantages, strict=True):
            group.advantages = group_advantages
        self._compute_logps(groups, seconds)
        rollout = Rollout(self._step(), groups, replaced, seconds)
        if self._is_first:
            self._folder.files.claim("rollouts")
            rollout.write(self._folder.rollouts)
            self._drop_old(rollout.step)
        if (reason := missing_reason(groups)) is not None:
            raise UserError(f"None of the {len(groups) * task.num_generations} answers sampled at step {rollout.step} "
                            f"has a reward, so there is nothing to learn: {reason}. Correct the reward; the answers "
                            f"are in {self._folder.rollouts / rollout.name}.jsonl.")
        if not self._has_warned_of_idle and all((item["labels"] == IGNORED).all() for item in rollout.items(task)):
            self._has_warned_of_idle = True
            cause = ("model.mask_truncated drops every answer that is better or worse than the others to its prompt; "
                     "train/truncated logs the fraction") if any(group.advantages.any() for group in groups) else (
                     "all answers to a prompt have the same reward; train/groups_without_spread logs the fraction")
            warn(f"Nothing is learned from the answers sampled at step {rollout.step}: {cause}. This is reported once.")
        seconds["all"] = time.perf_counter() - start
        self._report({f"train/{name}": value for name, value in metrics(rollout).items()}, rollout)
        return rollout

    def _make_groups(self, indices: list[int], seconds: dict[str, float]) -> list[Group]:
        """Sample and score answers to training prompts; each process samples a part of them."""
        policy, task = self._policy, self._task
        # Every n-th prompt, so that no process gets all long prompts of a sorted source.
        prompts = [self._data.prompt("train", index) for index in indices[policy.rank :: policy.num_ranks]]
        groups = self._sample_groups(prompts, task.num_generations, self._step(), seconds)
        by_index = policy.gather({prompt.row_index: group for prompt, group in zip(prompts, groups, strict=True)})
        return [by_index[index] for index in indices]

    def _replace_groups(self, groups: list[Group], planned: PlannedRollout, seconds: dict[str, float]) -> list[int]:
        """Replace prompts whose answers all have the same reward; return their indices.

        The order of new prompts depends only on the seed, the epoch and the rollout.
        """
        used = {group.prompt_index for group in groups}
        order = np.random.default_rng([self._data.seed, planned.epoch, planned.rollout, REFILL]).permutation(
            self._data.num_prompts("train"))
        candidates = iter([index for index in order.tolist() if index not in used])
        replaced: list[int] = []
        for _ in range(self._task.dynamic_sampling):
            without_spread = np.flatnonzero(~has_spread(np.array([group.rewards for group in groups]))).tolist()
            chosen = [index for index, _ in zip(candidates, without_spread, strict=False)]
            if not chosen:
                break
            for position, group in zip(without_spread, self._make_groups(chosen, seconds), strict=False):
                replaced.append(groups[position].prompt_index)
                groups[position] = group
        return replaced

    def _sample_groups(self, prompts: list[Prompt], size: int, step: int | None, seconds: dict[str, float],
                       is_greedy: bool = False) -> list[Group]:
        """Sample `size` answers to each prompt and score them."""
        task, data, start = self._task, self._data, time.perf_counter()
        uniforms = None if is_greedy else sampling_uniforms(data.run_seed, [prompt.row_index for prompt in prompts],
                                                            task.max_new_tokens, size, step)
        if task.environment is not None:
            prompts, answers = self._turns.answer(prompts, size, uniforms, seconds)
        else:
            sampled = self._policy.draw([prompt.ids for prompt in prompts for _ in range(size)], uniforms,
                                        task.temperature, task.max_new_tokens, data.codec.stop_token_ids)
            texts = data.codec.decode_answers(answer.tokens for answer in sampled)
            answers = [_to_answer(answer, text) for answer, text in zip(sampled, texts, strict=True)]
            seconds["drawing"] += time.perf_counter() - start
        prompt_texts = data.codec.decode_prompts(prompt.ids for prompt in prompts)
        groups = [Group(prompt.row_index, prompt.ids, text, answers[index * size : (index + 1) * size])
                  for index, (prompt, text) in enumerate(zip(prompts, prompt_texts, strict=True))]
        start = time.perf_counter()
        set_rewards(self._rewards, prompts, groups, self._data.is_scored_by_environment)
        seconds["rewards"] += time.perf_counter() - start
        return groups

    def _compute_logps(self, groups: list[Group], seconds: dict[str, float]) -> None:
        """Compute the log-probability columns that training needs."""
        task, policy, start = self._task, self._policy, time.perf_counter()
        local = range(policy.rank, len(groups), policy.num_ranks)
        names, size = token_columns(task), task.num_generations
        rows = [groups[group_index].row(answer_index) for group_index in local for answer_index in range(size)]
        computed = {}
        if {"old_logps", "sampler_weights"} & set(names):
            computed["old_logps"] = policy.logps(rows, task.temperature)
        if "reference_logps" in names:
            computed["reference_logps"] = policy.logps(rows, task.temperature, reference=True)
        computed_by_group = policy.gather({
            group_index: {name: values[position * size : (position + 1) * size] for name, values in computed.items()}
            for position, group_index in enumerate(local)})
        for group_index, group in enumerate(groups):
            for answer_index, answer in enumerate(group.answers):
                logps = {name: values[answer_index][len(group.ids) :]
                         for name, values in computed_by_group[group_index].items()}
                if "sampler_weights" in names:
                    logps["sampler_weights"] = importance_weights(logps["old_logps"], answer.logps,
                                                                  task.importance_sampling_cap)
                answer.columns = {name: logps[name] for name in names}
        seconds["scoring"] += time.perf_counter() - start

    def _drop_old(self, current: int) -> None:
        """Delete rollouts beyond `keep_rollouts` that no checkpoint needs."""
        keep = self._task.keep_rollouts
        if keep is None:
            return
        steps = sorted({parsed for path in self._folder.rollouts.iterdir() if (parsed := parse_step(path)) is not None})
        checkpoint_steps = self._folder.checkpoint_steps()
        # A checkpoint needs the last rollout at or before its step.
        needed = {max((step for step in steps if step <= checkpoint), default=None) for checkpoint in checkpoint_steps}
        for step in steps[: max(len(steps) - 1 - keep, 0)]:
            if step not in needed and step != current:
                for path in self._folder.rollouts.glob(f"{rollout_name(step)}.*"):
                    path.unlink()

    # Evaluation ------------------------------------------------------------------------------------------------------

    def evaluate(self, role: str, indices: Iterable[int]) -> tuple[dict[str, float], dict[str, Any]]:
        """Answer the prompts of a role greedily, and sample `num_generations_eval` answers to each.

        Sampling is the same in every evaluation.

        Args:
            indices: Indices of this process's prompts.

        Returns:
            Metrics, and an empty mapping of files to write.
        """
        task, size, seconds = self._task, self._task.eval_samples, {"drawing": 0.0, "rewards": 0.0}
        prompts = [self._data.prompt(role, index) for index in sorted(set(indices))]
        greedy_groups = self._sample_groups(prompts, 1, None, seconds, is_greedy=True)
        sampled_groups = self._sample_groups(prompts, size, None, seconds) if size else [None] * len(prompts)
        pairs_by_index = self._policy.gather({
            prompt.row_index: pair for prompt, *pair in zip(prompts, greedy_groups, sampled_groups, strict=True)})
        groups = [pairs_by_index[index] for index in sorted(pairs_by_index)]
        if self._is_first and (reason := missing_reason([group for group, _ in groups])) is not None:
            warn(f"None of the {len(groups)} answers to the {role} prompts has a reward: {reason}.")
        values = _reward_metrics([group for group, _ in groups])
        values["pass@1"] = _passed_fraction([group for group, _ in groups], task.pass_reward)
        if size:
            values[f"pass@{size}"] = _passed_fraction([group for _, group in groups], task.pass_reward)
        return {name: value for name, value in values.items() if value == value}, {}


def set_rewards(rewards: Rewards, prompts: list[Prompt], groups: list[Group], by_environment: bool = False) -> None:
    """Score answers and set their rewards.

    Args:
        by_environment: True if the environment has set a reward, which is added.
    """
    inputs = [RewardInput(group.text if prompt.conversation is None else prompt.conversation.messages, answer.text,
                          answer.tokens.tolist(), prompt.row, prompt.reference, answer.ended)
              for prompt, group in zip(prompts, groups, strict=True) for answer in group.answers]
    answers = [answer for group in groups for answer in group.answers]
    scores = rewards.score(inputs)
    names, weights, values = rewards.names, rewards.weights, scores.values
    if by_environment:
        by_answer = [np.nan if (value := answer.rewards[ENVIRONMENT]) is None else value for answer in answers]
        names, weights = (*names, ENVIRONMENT), np.append(weights, 1.0)
        values = np.column_stack([values, np.array(by_answer, np.float32)])
    for answer, reasons in zip(answers, scores.reasons, strict=True):
        answer.reasons = {**reasons, **answer.reasons}
    sums = sum_rewards(values, weights, [answer.reasons for answer in answers], names)
    for answer, answer_values, reward in zip(answers, values, sums, strict=True):
        answer.rewards = {name: None if np.isnan(value) else float(value)
                          for name, value in zip(names, answer_values, strict=True)}
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
    """Return the names of the further columns [T] of answers that a task's loss needs."""
    # A server's probabilities differ slightly, so the loss cannot compare with them.
    is_on_policy = task.is_on_policy and task.rollouts is None
    return (*(() if is_on_policy else ("old_logps",)), *(("reference_logps",) if task.reference_kind else ()),
            *(("sampler_weights",) if task.importance_sampling_cap is not None else ()))


def make_plan_function(task: GRPOFields, shuffle: bool, seed: int) -> Callable[[int, int], RolloutPlan]:
    """Return a function that makes a `RolloutPlan` from the numbers of prompts and of answers per step.

    It raises UserError if a step would split a prompt's answers, or does not have `prompts_per_step` prompts.
    """

    def plan(num_prompts: int, rows_per_step: int) -> RolloutPlan:
        size, prompts_per_step = task.num_generations, task.prompts_per_step
        product = "data.batch_size x trainer.accumulate_grad_batches x devices"
        if prompts_per_step is not None and prompts_per_step * size != rows_per_step:
            raise UserError(f"model.prompts_per_step {prompts_per_step} x model.num_generations {size} is "
                            f"{prompts_per_step * size} answers per step, but {product} is {rows_per_step}. Make both "
                            "equal.")
        if rows_per_step % size:
            raise UserError(f"A step has {rows_per_step} answers ({product}), which is not a multiple of "
                            f"model.num_generations {size}. Change one of them.")
        return RolloutPlan(num_prompts, size, rows_per_step // size, task.steps_per_rollout, task.num_iterations,
                           seed if shuffle else None)

    return plan


def _to_answer(sampled: SampledAnswer, text: str) -> Answer:
    return Answer(sampled.tokens.astype(np.int32), sampled.logps.astype(np.float32),
                  sampled.entropies.astype(np.float32), np.ones(len(sampled.tokens), bool), sampled.ended, text)


# ---------------------------------------------------------------------------------------------------------------------
# Metrics, over all answers of a rollout or of an evaluation.


def metrics(rollout: Rollout) -> dict[str, float]:
    """Return the metrics of a rollout, without undefined ones."""
    answers = [answer for group in rollout.groups for answer in group.answers]
    rewards = np.concatenate([group.rewards for group in rollout.groups])
    entropies = np.concatenate([answer.entropies[answer.is_sampled] for answer in answers])
    known = rewards[~np.isnan(rewards)]
    values = {
        **_reward_metrics(rollout.groups),
        "reward_std": float(known.std(ddof=1)) if len(known) > 1 else np.nan,
        "groups_without_spread": float(np.mean(~has_spread(np.array([group.rewards for group in rollout.groups])))),
        "replaced_prompts": float(len(rollout.replaced)) if rollout.replaced else np.nan,
        "entropy": float(np.nanmean(entropies)) if len(entropies) and not np.isnan(entropies).all() else np.nan,
        "sampler_gap": _sampler_gap(answers),
        **{f"seconds/{name}": value for name, value in rollout.seconds.items()},
    }
    return {name: value for name, value in values.items() if value == value}


def _reward_metrics(groups: list[Group]) -> dict[str, float]:
    """Return mean rewards, in total and by name, and metrics of the answers; NaN if undefined."""
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
        **_tool_metrics(answers),
    }


def _passed_fraction(groups: list[Group], minimum: float) -> float:
    """Return the fraction of prompts with an answer whose reward is at least `minimum`, among those with a reward."""
    best = [np.nanmax(group.rewards) for group in groups if not np.isnan(group.rewards).all()]
    return float(np.mean([value >= minimum for value in best])) if best else np.nan


def _tool_metrics(answers: list[Answer]) -> dict[str, float]:
    """Return mean turns and tool calls per answer, and the fractions of calls that failed or were truncated."""
    answer_tools = [answer.tools for answer in answers if answer.tools]
    counts = {name: sum(tools[name] for tools in answer_tools) for name in (answer_tools[0] if answer_tools else ())}
    calls = counts.get("calls")
    return {
        "turns": counts["turns"] / len(answer_tools) if answer_tools else np.nan,
        "tool_calls": calls / len(answer_tools) if answer_tools else np.nan,
        "tool_failures": counts["failures"] / calls if calls else np.nan,
        "tool_cuts": counts["cut"] / calls if calls else np.nan,
    }


def _sampler_gap(answers: list[Answer]) -> float:
    """Return the mean difference of log-probabilities between sampling and training; NaN if unknown."""
    gaps = [np.abs(answer.columns["old_logps"] - answer.logps)[answer.is_sampled] for answer in answers
            if "old_logps" in answer.columns]
    return float(np.concatenate(gaps).mean()) if gaps and sum(map(len, gaps)) else np.nan
