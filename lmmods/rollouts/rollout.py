"""A rollout: prompts, answers drawn to them, their rewards and advantages; and its two files in the run folder.

    rollouts/step=120.safetensors   everything that training needs
    rollouts/step=120.jsonl         the same to read: a line for each answer

The first is written last, so a rollout that has it is complete.
"""

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save

from lmmods.core.errors import UserError
from lmmods.core.labels import IGNORED
from lmmods.recipe.tasks.grpo import GRPOFields
from lmmods.rollouts.policy import Row
from lmmods.runs.run_files import OF_STEP, write_bytes, write_text

VERSION = 1
BY_TOKEN = ("tokens", "logps", "entropies", "drawn")
COLUMNS = ("old_logps", "reference_logps", "sampler_weights")


@dataclass
class Answer:
    """An answer to a prompt.

    Args:
        tokens: [T] int32, all that follows the prompt.
        logps: [T] float32, log-probabilities of the tokens under the policy that drew them; 0 where it did not.
        entropies: [T] float32, entropies of the distributions that they were drawn from; NaN where unknown.
        drawn: [T] bool, False for tokens that an environment said.
        ended: True if it ends in an end token, False if it was cut off.
        text: What rewards see of it.
        rewards: Values by name; None is missing.
        reasons: Why rewards are missing, by name.
        reward: Their weighted sum; None if the answer cannot be scored.
        columns: `old_logps`, `reference_logps` and `sampler_weights`, [T] float32, as far as training needs them.
        tools: With an environment how many `turns` the model had, `calls` it made, how many of them were `failures`,
            and of how many the tool's answer was `cut`.
        whole: With an environment all of it as text, with special tokens.
    """

    tokens: np.ndarray
    logps: np.ndarray
    entropies: np.ndarray
    drawn: np.ndarray
    ended: bool
    text: str
    rewards: dict[str, float | None] = field(default_factory=dict)
    reasons: dict[str, str] = field(default_factory=dict)
    reward: float | None = None
    columns: dict[str, np.ndarray] = field(default_factory=dict)
    tools: dict[str, int] = field(default_factory=dict)
    whole: str | None = None


@dataclass
class Group:
    """The answers to a prompt.

    Args:
        prompt: Number of the row.
        ids: Token ids of the prompt.
        text: The prompt to read.
        advantages: [G] float32, after all answers of the rollout are scored.
    """

    prompt: int
    ids: list[int]
    text: str
    answers: list[Answer]
    advantages: np.ndarray | None = None

    @property
    def rewards(self) -> np.ndarray:
        """Rewards [G] float64, NaN where missing."""
        return np.array([np.nan if answer.reward is None else answer.reward for answer in self.answers])

    def row(self, number: int) -> Row:
        """Return the prompt with an answer, whose drawn tokens are labelled."""
        answer = self.answers[number]
        ids = np.concatenate([np.array(self.ids, np.int32), answer.tokens.astype(np.int32)])
        labels = np.where(answer.drawn, answer.tokens, IGNORED)
        return Row(ids, np.concatenate([np.full(len(self.ids), IGNORED, np.int32), labels.astype(np.int32)]))


@dataclass
class Rollout:
    """Groups of answers that were drawn with the same weights.

    Args:
        step: Optimiser steps taken before.
        replaced: Prompts whose answers all had the same reward, and which others replaced.
        seconds: Seconds by what took them (drawing, rewards, scoring, all); of one just made.
    """

    step: int
    groups: list[Group]
    replaced: list[int] = field(default_factory=list)
    seconds: dict[str, float] = field(default_factory=dict)

    @property
    def name(self) -> str:
        return rollout_name(self.step)

    def items(self, task: GRPOFields) -> list[dict[str, Any]]:
        """Return the answers as rows of training, prompt by prompt.

        Each has `input_ids` and `labels` [T] int32, `advantages`, `row`, which seeds dropout, and the columns of its
        answer [T]. Answers without a reward have no labels, nor with `mask_truncated` those that were cut off. Those
        that cannot move the policy, having an advantage of 0, are replaced by their `idle_weight` in the loss.
        """
        found = []
        for group in self.groups:
            for number, answer in enumerate(group.answers):
                (ids, labels), before = group.row(number), len(group.ids)
                advantage, weight = float(group.advantages[number]), 0.0
                columns = {name: np.concatenate([np.zeros(before, np.float32), values])
                           for name, values in answer.columns.items()}
                if answer.reward is None or task.mask_truncated and not answer.ended:
                    ids, labels, columns = _nothing(ids, columns)
                elif advantage == 0 and not task.beta:
                    weight = float(task.policy_loss.weight_of(answer.drawn.sum()))
                    ids, labels, columns = _nothing(ids, columns)
                found.append({"input_ids": ids, "labels": labels, "advantages": advantage, "idle_weight": weight,
                              "row": group.prompt * len(group.answers) + number, **columns})
        return found

    # Files -----------------------------------------------------------------------------------------------------------

    def write(self, folder: Path) -> None:
        """Write both files. They are on disk when this returns."""
        answers = [answer for group in self.groups for answer in group.answers]
        arrays = {
            "prompts": np.array([group.prompt for group in self.groups], np.int64),
            "prompt_lengths": np.array([len(group.ids) for group in self.groups], np.int64),
            "prompt_ids": np.array([token for group in self.groups for token in group.ids], np.int32),
            "lengths": np.array([len(answer.tokens) for answer in answers], np.int64),
            "tokens": _join([answer.tokens for answer in answers], np.int32),
            "logps": _join([answer.logps for answer in answers], np.float32),
            "entropies": _join([answer.entropies for answer in answers], np.float32),
            "drawn": _join([answer.drawn for answer in answers], np.uint8),
            "ended": np.array([answer.ended for answer in answers], np.uint8),
            # float64, as advantages are computed from them
            "rewards": np.array([np.nan if each.reward is None else each.reward for each in answers], np.float64),
            "advantages": _join([group.advantages for group in self.groups], np.float32),
            **{name: _join([answer.columns[name] for answer in answers], np.float32)
               for name in COLUMNS if answers and name in answers[0].columns},
        }
        # Without the seconds: a rollout that is made again is the same file.
        told = {"version": VERSION, "step": self.step, "replaced": self.replaced,
                "prompts": [group.text for group in self.groups],
                "answers": [[answer.text, answer.rewards, answer.reasons,
                             *([answer.tools, answer.whole] if answer.tools else [])] for answer in answers]}
        write_text(folder / f"{self.name}.jsonl", "".join(
            json.dumps(line, ensure_ascii=False) + "\n" for line in self.lines()))
        write_bytes(folder / f"{self.name}.safetensors", save(arrays, {"rollout": json.dumps(told)}))

    def lines(self) -> list[dict[str, Any]]:
        """Return the answers to read."""
        return [{"prompt": group.prompt, "sample": number, "asked": group.text, "answer": answer.text,
                 "reward": answer.reward, "rewards": answer.rewards,
                 **({"missing": answer.reasons} if answer.reasons else {}),
                 "advantage": float(group.advantages[number]), "tokens": len(answer.tokens), "ended": answer.ended,
                 **({**answer.tools, "conversation": answer.whole} if answer.tools else {})}
                for group in self.groups for number, answer in enumerate(group.answers)]


def rollout_name(step: int) -> str:
    """Return the name of the rollout that was drawn after so many optimiser steps."""
    return f"step={step}"


def step_of(path: Path) -> int | None:
    """Return the step in the name of a rollout's file; None for another file."""
    found = OF_STEP.fullmatch(path.name)
    return int(found[1]) if found else None


def read_rollout(folder: Path, name: str) -> Rollout:
    """Read a rollout. Raises UserError if it is missing or damaged."""
    path = folder / f"{name}.safetensors"
    try:
        with safe_open(path, "numpy") as file:
            told = json.loads(file.metadata()["rollout"])
            arrays = {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118 - it is no mapping
    except FileNotFoundError:
        raise UserError(f"{path} is missing, and the checkpoint lies inside this rollout. Put it back, or resume from "
                        "a checkpoint at the end of another rollout.") from None
    except (OSError, SafetensorError, KeyError, TypeError, ValueError) as error:
        raise UserError(f"{path} is damaged ({error}). Resume from a checkpoint at the end of another rollout."
                        ) from error
    if told["version"] != VERSION:
        raise UserError(f"{path} is of version {told['version']} of rollouts, but this program reads {VERSION}.")
    prompts = np.split(arrays["prompt_ids"], np.cumsum(arrays["prompt_lengths"])[:-1])
    columns = {name: np.split(arrays[name], np.cumsum(arrays["lengths"])[:-1])
               for name in (*BY_TOKEN, *COLUMNS) if name in arrays}
    answers = [
        Answer(*(columns[name][place] for name in BY_TOKEN[:3]), columns["drawn"][place].astype(bool),
               bool(arrays["ended"][place]), text, rewards, reasons,
               None if np.isnan(arrays["rewards"][place]) else float(arrays["rewards"][place]),
               {name: columns[name][place] for name in COLUMNS if name in columns}, *more)
        for place, (text, rewards, reasons, *more) in enumerate(told["answers"])]
    size = len(answers) // max(len(prompts), 1)
    parts = [slice(place * size, (place + 1) * size) for place in range(len(prompts))]
    groups = [Group(int(prompt), ids.tolist(), text, answers[part], arrays["advantages"][part])
              for prompt, ids, text, part in zip(arrays["prompts"], prompts, told["prompts"], parts, strict=True)]
    return Rollout(told["step"], groups, told["replaced"])


def _nothing(ids: np.ndarray, columns: dict[str, np.ndarray]
             ) -> tuple[np.ndarray, np.ndarray, dict[str, np.ndarray]]:
    """Return one token without a label in place of a row."""
    return ids[:1], np.full(1, IGNORED, np.int32), {name: values[:1] for name, values in columns.items()}


def _join(parts: list[np.ndarray], dtype: Any) -> np.ndarray:
    return np.ascontiguousarray(np.concatenate([np.zeros(0, dtype), *parts]).astype(dtype))
