"""A rollout: prompts, sampled answers, their rewards and advantages. The run folder has two files for each:

    rollouts/step=120.safetensors   everything that training needs
    rollouts/step=120.jsonl         the same to read, one line per answer

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
from lmmods.runs.run_files import STEP_FILE, write_bytes, write_text

VERSION = 1
BY_TOKEN = ("tokens", "logps", "entropies", "drawn")
COLUMNS = ("old_logps", "reference_logps", "sampler_weights")


@dataclass
class Answer:
    """An answer to a prompt.

    Args:
        tokens: [T] int32, all tokens after the prompt.
        logps: [T] float32, log-probabilities of the tokens under the policy that sampled them; 0 for other tokens.
        entropies: [T] float32, entropies of the distributions that they were sampled from; NaN where unknown.
        is_sampled: [T] bool, False for tokens that an environment added.
        ended: True if the answer ends with an end token, False if it is truncated.
        text: The text that rewards score.
        rewards: Values by name; None is missing.
        reasons: Why rewards are missing, by name.
        reward: Weighted sum of the rewards; None if the answer cannot be scored.
        columns: `old_logps`, `reference_logps` and `sampler_weights`, [T] float32, if training needs them.
        tools: With an environment, the numbers of model `turns`, tool `calls`, `failures` among them, and calls whose
            result was `cut`.
        full_text: With an environment, the text of all tokens, with special tokens.
    """

    tokens: np.ndarray
    logps: np.ndarray
    entropies: np.ndarray
    is_sampled: np.ndarray
    ended: bool
    text: str
    rewards: dict[str, float | None] = field(default_factory=dict)
    reasons: dict[str, str] = field(default_factory=dict)
    reward: float | None = None
    columns: dict[str, np.ndarray] = field(default_factory=dict)
    tools: dict[str, int] = field(default_factory=dict)
    full_text: str | None = None


@dataclass
class Group:
    """The answers to a prompt.

    Args:
        prompt_index: Index of the row.
        ids: Token ids of the prompt.
        text: The prompt as text.
        answers: G answers.
        advantages: [G] float32, set when all answers of the rollout are scored.
    """

    prompt_index: int
    ids: list[int]
    text: str
    answers: list[Answer]
    advantages: np.ndarray | None = None

    @property
    def rewards(self) -> np.ndarray:
        """Return the rewards [G] float64, NaN where missing."""
        return np.array([np.nan if answer.reward is None else answer.reward for answer in self.answers])

    def row(self, index: int) -> Row:
        """Return the prompt with one of its answers; labels are the sampled tokens."""
        answer = self.answers[index]
        ids = np.concatenate([np.array(self.ids, np.int32), answer.tokens.astype(np.int32)])
        labels = np.where(answer.is_sampled, answer.tokens, IGNORED)
        return Row(ids, np.concatenate([np.full(len(self.ids), IGNORED, np.int32), labels.astype(np.int32)]))


@dataclass
class Rollout:
    """Groups of answers that were sampled with the same weights.

    Args:
        step: Number of optimiser steps before it.
        groups: One group for each prompt.
        replaced: Indices of prompts that others replaced, because all of their answers had the same reward.
        seconds: Seconds for each part (drawing, rewards, scoring, all); empty for a rollout read from its file.
    """

    step: int
    groups: list[Group]
    replaced: list[int] = field(default_factory=list)
    seconds: dict[str, float] = field(default_factory=dict)

    @property
    def name(self) -> str:
        return rollout_name(self.step)

    def items(self, task: GRPOFields) -> list[dict[str, Any]]:
        """Return the answers as training rows, prompt by prompt.

        A row has `input_ids` and `labels` [T] int32, `advantages`, `row`, which seeds dropout, and the columns of its
        answer [T]. Answers without a reward have no labels, and with `mask_truncated` neither have truncated ones. An
        answer with an advantage of 0 cannot change the policy, so the row only has its `idle_weight` in the loss.
        """
        rows = []
        for group in self.groups:
            for index, answer in enumerate(group.answers):
                (ids, labels), prompt_length = group.row(index), len(group.ids)
                advantage, weight = float(group.advantages[index]), 0.0
                columns = {name: np.concatenate([np.zeros(prompt_length, np.float32), values])
                           for name, values in answer.columns.items()}
                if answer.reward is None or task.mask_truncated and not answer.ended:
                    ids, labels, columns = _shorten_row(ids, columns)
                elif advantage == 0 and not task.beta:
                    weight = float(task.policy_loss.weight_of(answer.is_sampled.sum()))
                    ids, labels, columns = _shorten_row(ids, columns)
                rows.append({"input_ids": ids, "labels": labels, "advantages": advantage, "idle_weight": weight,
                             "row": group.prompt_index * len(group.answers) + index, **columns})
        return rows

    # Files -----------------------------------------------------------------------------------------------------------

    def write(self, folder: Path) -> None:
        """Write both files. They are on disk when this returns."""
        answers = [answer for group in self.groups for answer in group.answers]
        arrays = {
            "prompts": np.array([group.prompt_index for group in self.groups], np.int64),
            "prompt_lengths": np.array([len(group.ids) for group in self.groups], np.int64),
            "prompt_ids": np.array([token for group in self.groups for token in group.ids], np.int32),
            "lengths": np.array([len(answer.tokens) for answer in answers], np.int64),
            "tokens": _concatenate([answer.tokens for answer in answers], np.int32),
            "logps": _concatenate([answer.logps for answer in answers], np.float32),
            "entropies": _concatenate([answer.entropies for answer in answers], np.float32),
            "drawn": _concatenate([answer.is_sampled for answer in answers], np.uint8),
            "ended": np.array([answer.ended for answer in answers], np.uint8),
            # float64, as advantages are computed from rewards
            "rewards": np.array([np.nan if answer.reward is None else answer.reward for answer in answers], np.float64),
            "advantages": _concatenate([group.advantages for group in self.groups], np.float32),
            **{name: _concatenate([answer.columns[name] for answer in answers], np.float32)
               for name in COLUMNS if answers and name in answers[0].columns},
        }
        # Without the seconds, so that making a rollout again writes the same file.
        details = {"version": VERSION, "step": self.step, "replaced": self.replaced,
                   "prompts": [group.text for group in self.groups],
                   "answers": [[answer.text, answer.rewards, answer.reasons,
                                *([answer.tools, answer.full_text] if answer.tools else [])] for answer in answers]}
        write_text(folder / f"{self.name}.jsonl", "".join(
            json.dumps(record, ensure_ascii=False) + "\n" for record in self.to_records()))
        write_bytes(folder / f"{self.name}.safetensors", save(arrays, {"rollout": json.dumps(details)}))

    def to_records(self) -> list[dict[str, Any]]:
        """Return the answers as records for the .jsonl file."""
        return [{"prompt": group.prompt_index, "sample": index, "asked": group.text, "answer": answer.text,
                 "reward": answer.reward, "rewards": answer.rewards,
                 **({"missing": answer.reasons} if answer.reasons else {}),
                 "advantage": float(group.advantages[index]), "tokens": len(answer.tokens), "ended": answer.ended,
                 **({**answer.tools, "conversation": answer.full_text} if answer.tools else {})}
                for group in self.groups for index, answer in enumerate(group.answers)]


def rollout_name(step: int) -> str:
    """Return the name of the rollout that was sampled after this optimiser step."""
    return f"step={step}"


def parse_step(path: Path) -> int | None:
    """Return the step in the name of a rollout file; None for another file."""
    match = STEP_FILE.fullmatch(path.name)
    return int(match[1]) if match else None


def read_rollout(folder: Path, name: str) -> Rollout:
    """Read a rollout. Raises UserError if it is missing or damaged."""
    path = folder / f"{name}.safetensors"
    try:
        with safe_open(path, "numpy") as file:
            details = json.loads(file.metadata()["rollout"])
            arrays = {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118 - it is not a mapping
    except FileNotFoundError:
        raise UserError(f"{path} is missing, but the checkpoint is inside this rollout. Restore the file, or resume "
                        "from a checkpoint at the end of another rollout.") from None
    except (OSError, SafetensorError, KeyError, TypeError, ValueError) as error:
        raise UserError(f"{path} is damaged ({error}). Resume from a checkpoint at the end of another rollout."
                        ) from error
    if details["version"] != VERSION:
        raise UserError(f"{path} has version {details['version']}, but this program reads version {VERSION}. Resume "
                        "with the program that wrote it.")
    prompts = np.split(arrays["prompt_ids"], np.cumsum(arrays["prompt_lengths"])[:-1])
    columns = {name: np.split(arrays[name], np.cumsum(arrays["lengths"])[:-1])
               for name in (*BY_TOKEN, *COLUMNS) if name in arrays}
    answers = [
        Answer(*(columns[name][index] for name in BY_TOKEN[:3]), columns["drawn"][index].astype(bool),
               bool(arrays["ended"][index]), text, rewards, reasons,
               None if np.isnan(arrays["rewards"][index]) else float(arrays["rewards"][index]),
               {name: columns[name][index] for name in COLUMNS if name in columns}, *tool_fields)
        for index, (text, rewards, reasons, *tool_fields) in enumerate(details["answers"])]
    size = len(answers) // max(len(prompts), 1)
    slices = [slice(index * size, (index + 1) * size) for index in range(len(prompts))]
    groups = [Group(int(prompt), ids.tolist(), text, answers[group_slice], arrays["advantages"][group_slice])
              for prompt, ids, text, group_slice in zip(arrays["prompts"], prompts, details["prompts"], slices,
                                                        strict=True)]
    return Rollout(details["step"], groups, details["replaced"])


def _shorten_row(ids: np.ndarray, columns: dict[str, np.ndarray]
                ) -> tuple[np.ndarray, np.ndarray, dict[str, np.ndarray]]:
    """Shorten a row to one token without a label."""
    return ids[:1], np.full(1, IGNORED, np.int32), {name: values[:1] for name, values in columns.items()}


def _concatenate(parts: list[np.ndarray], dtype: Any) -> np.ndarray:
    return np.ascontiguousarray(np.concatenate([np.zeros(0, dtype), *parts]).astype(dtype))
