"""Reinforcement learning: prompts, the answers that the network gives to them, and what rewards see of both."""

import json
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
import torch

from lmmods.core import fingerprints
from lmmods.core.errors import UserError
from lmmods.core.labels import IGNORED
from lmmods.data.base import Which
from lmmods.data.batches.collate import Collator
from lmmods.data.batches.loader import EvaluationLoader
from lmmods.data.batches.rollouts import Place, RolloutLoader, RolloutPlan
from lmmods.data.batches.sampler import evaluation_order
from lmmods.data.encode.conversations import Choices, SFTEncoder
from lmmods.data.encode.encoder import Encoder
from lmmods.data.sft import ConversationData
from lmmods.data.sources.cells import check_unicode
from lmmods.data.sources.conversation import Conversation, RowProblem
from lmmods.data.sources.formats import detect_format, find_format, format_of, read_conversation
from lmmods.data.sources.readers import Row
from lmmods.data.splits import Role
from lmmods.data.store.rows import PromptSet
from lmmods.recipe.source import Source
from lmmods.recipe.tasks.grpo import PromptDataFields

# Of answers: how much better they are than others, and the weight in the loss of those that are not computed.
ROW_COLUMNS = ("advantages", "idle_weight")
# Columns in which data sets have the right answer.
ANSWERS = ("answer", "solution", "ground_truth", "target", "label", "reference", "expected_answer", "final_answer")


class Prompt(NamedTuple):
    """A prompt, and what rewards see of it.

    Args:
        number: Of the row, which the draws of its answers depend on.
        ids: Token ids.
        conversation: Its turns; None for rows of plain text.
        row: The row as read.
        reference: The response in the data, None if there is none.
    """

    number: int
    ids: list[int]
    conversation: Conversation | None
    row: dict[str, Any]
    reference: str | None


class PromptData(PromptDataFields, ConversationData):
    """Prompts; one row of a training batch is an answer to one, and of an evaluation batch a prompt.

    Attributes:
        plan: Makes the division of epochs into rollouts from the prompts and the answers of a step. Set by the engine,
            like `begin_rollout`, before training; without, a prompt has one answer.
        begin_rollout: As in `RolloutLoader`; None takes stand-ins for answers.
        token_columns: Further columns of answers, [T] float32 each.
        reward_scorers: Reward models by the label of their reward.
        check_prompts: Checks the prompts of a set, given its recipe key, the prompts, and whether it may warn. Raises
            UserError: no answer to them could have a reward.
        reward_columns: Columns that rewards read; None are all.
        tools: Specifications of the tools of `model.environment`, which all prompts show. Set before rows are encoded.
        is_scored_by_environment: True if `model.environment` gives a reward.
    """

    plan: Callable[[int, int], RolloutPlan] | None = None
    begin_rollout: Callable[[Place, str | None], tuple[str, list[dict[str, Any]]]] | None = None
    left_over = "for_rewards"
    token_columns: tuple[str, ...] = ()
    reward_scorers: dict[str, Callable[[list[Any]], list[float | None]]] | None = None
    check_prompts: Callable[[str, Iterator[Prompt], bool], None] | None = None
    reward_columns: tuple[str, ...] | None = ()
    tools: list[dict[str, Any]] = []  # noqa: RUF012 - replaced, not changed
    is_scored_by_environment = False

    @classmethod
    def recognise(cls, row: Row) -> str | None:
        """Return None: rows of prompts look like those of fine-tuning."""
        return None

    @classmethod
    def model_settings(cls, row: Row) -> dict[str, tuple[Any, str]]:
        has_response = _has_response(row)
        column = next((name for name in ANSWERS if row.values.get(name) is not None), None)
        reward = {"name": "exact_match"} | ({} if has_response or column is None else {"column": column})
        known = has_response or column is not None
        return {"rewards": ([reward], "1 where the answer is the right one; others: docs/rewards.md" if known else
                            "no column with a right answer is known: name it, as column: NAME"),
                "num_generations": (8, "answers to each prompt, which are compared with each other"),
                "num_generations_eval": (0, "validation answers greedily; 8 draws as many more, for pass@8"),
                "max_new_tokens": (512, "longest answer; a longer one is cut off")}

    def identity(self) -> dict[str, Any]:
        tools = {"environment": fingerprints.joined([json.dumps(self.tools, sort_keys=True)])} if self.tools else {}
        return {**super().identity(), **tools}

    # Prompts ---------------------------------------------------------------------------------------------------------

    @cached_property
    def _encoders(self) -> dict[str, SFTEncoder]:
        """Encoders of prompts by layout, of the layouts met so far."""
        return {}

    def prompt(self, role: Role, place: int) -> Prompt:
        """Return a prompt of a role by its place among the rows."""
        rows = self._rows(role)
        kept = rows[place]
        index = kept["index"]
        row, layout = rows.source_row(index), rows.info(index)["format"]
        asked, reference = self._split(layout, row)
        return Prompt(place, kept["input_ids"].tolist(), asked, row, reference)

    def _split(self, layout: str, row: dict[str, Any]) -> tuple[Conversation | None, str | None]:
        """Return the turns to answer and the response in the data; None for what there is not."""
        if find_format(layout).template is not None:
            return None, None
        given = read_conversation(layout, row, self.roles, self.turn_fields)
        if layout not in self._encoders:
            self._encoders[layout] = self.prompt_encoder(layout)
        asked, last = self._encoders[layout].normalise(given), given.messages[-1]
        if last["role"] != "assistant":
            return asked, None
        return replace(asked, messages=asked.messages[:-1]), last["content"]

    def prompt_with(self, prompt: Prompt, text: str) -> Prompt:
        """Return a prompt with a text behind its last message.

        Raises:
            RowProblem: It is no conversation, cannot be rendered, or leaves no room for an answer.
        """
        if prompt.conversation is None:
            raise RowProblem("the row is no conversation, so nothing can be added to its last message")
        check_unicode(text)
        *before, last = prompt.conversation.messages
        conversation = replace(prompt.conversation,
                               messages=[*before, {**last, "content": last["content"] + text}])  # type: ignore[typeddict-item]
        [ids] = self.prompt_encoder("messages").prompts_of([conversation])
        if len(ids) + self.new_tokens > self.max_length:
            raise RowProblem(f"the prompt has {len(ids)} tokens with what was added, which leaves no room for an "
                             "answer")
        return prompt._replace(ids=ids, conversation=conversation)

    def num_prompts(self, role: Role) -> int:
        """Return the number of prompts of a role."""
        return len(self._rows(role))

    # Batches ---------------------------------------------------------------------------------------------------------

    def train_batches(self) -> RolloutLoader:
        """Answers of this rank, drawn where the position comes to new prompts. Raises UserError."""
        if getattr(self.trainer, "overfit_batches", 0):
            raise UserError("trainer.overfit_batches is not for reinforcement learning, whose batches are drawn anew: "
                            "set data.source to a few rows with its `limit`")
        shard = replace(self._shard(), num_workers=0)  # workers would not see the rollouts
        num_prompts, rows = self.num_prompts("train"), self.batch_size * shard.batches_per_step
        plan = RolloutPlan(num_prompts, 1, rows) if self.plan is None else self.plan(num_prompts, rows)
        begin = None if self.longest_first else self.begin_rollout
        begin = begin or (lambda place, _: ("", self.stand_ins(place, plan.num_generations)))
        self._loader = RolloutLoader(plan, self.collator(), shard, self.batch_size, begin)
        if self._position is not None:
            self._loader.load_state_dict(self._position)
            self._position = None
        return self._loader

    def stand_ins(self, place: Place, size: int) -> list[dict[str, Any]]:
        """Return items in place of the answers of a rollout, where nothing is drawn.

        An answer is the beginning of its prompt (with `longest_first` repeated up to `max_length`), with an advantage
        of 1 or -1; columns of log-probabilities are 0.

        Args:
            size: Answers to each prompt.
        """
        found = []
        for prompt in place.prompts.tolist():
            ids = self._rows("train")[prompt]["input_ids"]
            room = max(self.max_length - len(ids), 1)
            answer = np.resize(ids, room) if self.longest_first else ids[:room]
            item = {"input_ids": np.concatenate([ids, answer]).astype(np.int32),
                    "labels": np.concatenate([np.full(len(ids), IGNORED), answer]).astype(np.int32), "idle_weight": 0.0}
            columns = {name: np.zeros(len(item["input_ids"]), np.float32) for name in self.token_columns}
            found += [{**item, **columns, "row": prompt * size + number,
                       "advantages": (-1.0) ** (prompt * size + number)} for number in range(size)]
        return found

    def val_dataloader(self) -> EvaluationLoader | list:
        return self._prompts_of("val") if "val" in self._splits.sets else []

    def test_dataloader(self) -> EvaluationLoader:
        return self._prompts_of("test")

    def _prompts_of(self, role: Role) -> EvaluationLoader:
        """Prompts of this rank, padded on the left; `index` is the place among the rows."""
        rows = self._rows(role)
        prompts = PromptSet(rows, lambda row: row)
        order = evaluation_order(prompts.lengths, self.eval_batch_size)
        collator = Collator(("input_ids", "index"), self.tokenizer.pad_token_id, self.pad_to_multiple_of,
                            self.max_length, "left")
        places = {int(index): place for place, index in enumerate(rows.index)}

        def collate(items: list[dict[str, Any] | None]) -> dict[str, torch.Tensor]:
            return collator([None if item is None else {**item, "index": places[item["index"]]} for item in items])

        return EvaluationLoader(prompts, order, collate, replace(self._shard(), num_workers=0))

    def collator(self) -> Callable[[list], dict[str, Any]]:
        """Return the collator of answers."""
        return AnswerCollator(Collator(("input_ids", "labels", "token_seeds"), self.tokenizer.pad_token_id,
                                   self.pad_to_multiple_of, self.max_length, seed=self.run_seed), self.token_columns)

    # Rows ------------------------------------------------------------------------------------------------------------

    def _check_splits(self, stage: str | None) -> None:
        """As of `DataModule`. Raises UserError: no answer to the prompts of a set could have a reward."""
        roles: list[Role] = [role for role in ("train", "val", "test")
                             if role in self._splits.sets and role not in self._checked]
        super()._check_splits(stage)
        for role in roles if self.check_prompts is not None else ():
            self.check_prompts(self._splits.key(role), (self.prompt(role, place) for place in
                                                        range(self.num_prompts(role))),
                               getattr(self.trainer, "is_global_zero", True))

    def _choices(self) -> Choices:
        return Choices("responses", "all", self.reasoning, self.system_prompt, self.replace_system_prompt)

    def _encoding_settings(self) -> dict[str, Any]:
        tools = {"tools": self.tools} if self.tools else {}
        return {**super()._encoding_settings(), "new_tokens": self.new_tokens, **tools}

    def _encoder(self, source: Source, first: Row, prompts_only: bool) -> tuple[Encoder, dict[str, Any]]:
        layout = source.format or self.dataset_format or detect_format(
            first.values, f"{first.file}:{first.line}", prompts_only=True)
        if self.tools:
            self._check_tools(layout)
        return self._conversations(layout, prompts_only=True)

    def rows_for_inspection(self, num_rows: int, which: Which | list[int] = "first") -> list[dict[str, Any]]:
        """Prompts as the model sees them, none of whose tokens is scored."""
        return [{name: value for name, value in row.items() if name != "labels"}
                for row in super().rows_for_inspection(num_rows, which)]

    def _scored(self, item: dict[str, Any], source: dict[str, Any]) -> str:
        layout = self._rows("train").info(int(item["index"]))["format"]
        _, reference = self._split(layout, source)
        return "the answer, by rewards" + ("" if reference is None else f"; the reference answer is: {reference}")

    def _sft_encoder(self, layout: str, prompts_only: bool) -> SFTEncoder:
        return replace(super()._sft_encoder(layout, prompts_only), tools=self.tools)

    def _check_tools(self, layout: str) -> None:
        """Raise UserError unless the template shows tools and their answers."""
        encoder, name = self.prompt_encoder(layout), self.tools[0]["function"]["name"]
        try:
            [prompt] = encoder.prompts([[{"role": "user", "content": "a"}]])
            encoder.tool_turns([{"role": "tool", "name": name, "content": "b"}])
        except RowProblem as problem:
            raise UserError(f"model.environment has tools, but {problem}") from problem
        if name not in self.tokenizer.decode(prompt):
            raise UserError("model.environment has tools, but the chat template does not show them: name a file of "
                            "Jinja that does as data.template.")

    def _texts(self, row: dict[str, Any], info: dict[str, Any]) -> list[str]:
        messages = read_conversation(info["format"], row, self.roles, self.turn_fields).messages
        is_answered = bool(messages) and messages[-1]["role"] == "assistant"
        return self._spoken(messages[:-1] if is_answered else messages)

    def _context(self, row: dict[str, Any], info: dict[str, Any]) -> str:
        """What decides on the right answer, too: the reference, and the columns that rewards read."""
        messages = read_conversation(info["format"], row, self.roles, self.turn_fields).messages
        reference = messages[-1]["content"] if messages and messages[-1]["role"] == "assistant" else None
        columns = row if self.reward_columns is None else {name: row.get(name) for name in self.reward_columns}
        return super()._context(row, info) + json.dumps([reference, columns], sort_keys=True, default=str)

    def _compared_settings(self) -> Any:
        return self.reward_columns

    def _is_scored(self, item: dict[str, Any], role: str) -> bool:
        return True  # answers are

    def _batch_keys(self) -> tuple[str, ...]:
        return ("input_ids",)

    def _prompt(self, row: dict[str, Any]) -> dict[str, Any]:
        return {"input_ids": row["input_ids"], "index": row["index"]}


def _has_response(row: Row) -> bool:
    """True if a row of a known layout ends in a response."""
    layout = format_of(row.values)
    if layout is None or find_format(layout).template is not None:
        return False
    first = next(iter(find_format(layout).regroup([row])), row)
    try:
        return read_conversation(layout, first.values, {}).messages[-1]["role"] == "assistant"
    except RowProblem:
        return False


class AnswerCollator:
    """Collates answers: the columns of a collator, `ROW_COLUMNS` [B] float32, and `columns` [B, T] float32.

    Args:
        collator: Collator of the tokens.
    """

    def __init__(self, collator: Collator, columns: tuple[str, ...]) -> None:
        self._collator, self._columns = collator, columns

    def __call__(self, items: list[dict[str, Any] | None]) -> dict[str, torch.Tensor]:
        batch = self._collator(items)
        for name in ROW_COLUMNS:
            batch[name] = torch.tensor([0.0 if item is None else item[name] for item in items], dtype=torch.float32)
        for name in self._columns:
            batch[name] = torch.zeros(batch["input_ids"].shape)
            for place, item in enumerate(items):
                if item is not None:
                    batch[name][place, : len(item[name])] = torch.from_numpy(item[name])
        return batch
