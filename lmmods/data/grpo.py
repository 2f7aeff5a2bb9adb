"""Reinforcement learning: prompts, the answers that the model gives to them, and what rewards see of both."""

import json
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any, NamedTuple, cast

import numpy as np
import torch

from lmmods.core import fingerprints
from lmmods.core.errors import UserError
from lmmods.core.labels import IGNORED
from lmmods.data.batch.collate import SEEDS, Collator
from lmmods.data.batch.loader import EvaluationLoader, Shard
from lmmods.data.batch.rollouts import PlannedRollout, RolloutLoader, RolloutPlan
from lmmods.data.conversations import ConversationCodec, ConversationData, ConversationSettings
from lmmods.data.encode.conversations import SFTEncoder
from lmmods.data.encode.encoder import Encoder
from lmmods.data.loaders import Loaders
from lmmods.data.read.by_role import Role
from lmmods.data.read.cells import check_unicode
from lmmods.data.read.conversation import Conversation, RowProblem
from lmmods.data.read.formats import detect_format, find_format, format_of, read_conversation
from lmmods.data.read.readers import Row
from lmmods.data.read.source_reader import SourceReader
from lmmods.data.shown_rows import Which
from lmmods.data.store.rows import RowSet
from lmmods.recipe.tasks.grpo import PromptDataFields

# Per answer: its advantage, and its weight in the loss if not computed.
ROW_COLUMNS = ("advantages", "idle_weight")
# Columns in which datasets have the right answer.
ANSWERS = ("answer", "solution", "ground_truth", "target", "label", "reference", "expected_answer", "final_answer")


class Prompt(NamedTuple):
    """A prompt, and what rewards see of it.

    Args:
        row_index: Index of the row; sampling its answers depends on it.
        ids: Token ids.
        conversation: Its turns; None for rows of plain text.
        row: The row as read.
        reference: The response in the data, None if there is none.
    """

    row_index: int
    ids: list[int]
    conversation: Conversation | None
    row: dict[str, Any]
    reference: str | None


class PromptSettings(PromptDataFields, ConversationSettings):
    """See `Settings`."""


class PromptCodec(ConversationCodec):
    """Prompts; one row of a training batch is an answer to one, and of an evaluation batch a prompt."""

    settings: PromptSettings
    left_over = "for_rewards"

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self._encoders: dict[str, SFTEncoder] = {}  # of prompts, by layout

    # From records to rows

    def make_encoder(self, reader: SourceReader, first: Row, prompts_only: bool) -> tuple[Encoder, dict[str, Any]]:
        layout = reader.source.format or self.settings.dataset_format or detect_format(
            first.values, f"{first.file}:{first.line}", prompts_only=True)
        if self.model.tools:
            self._check_tools(layout)
        return self.encoder_and_facts(layout, prompts_only=True)

    def conversation_encoder(self, layout: str, prompts_only: bool) -> SFTEncoder:
        return replace(super().conversation_encoder(layout, prompts_only), tools=self.model.tools)

    def _check_tools(self, layout: str) -> None:
        """Raise UserError unless the template renders tools and their answers."""
        encoder, name = self.prompt_encoder(layout), self.model.tools[0]["function"]["name"]
        try:
            [prompt] = encoder.prompts([[{"role": "user", "content": "a"}]])
            encoder.tool_turns([{"role": "tool", "name": name, "content": "b"}])
        except RowProblem as problem:
            raise UserError(f"model.environment has tools, but {problem}") from problem
        if name not in self.tokenizer.decode(prompt):
            raise UserError("model.environment has tools, but the chat template does not render them. Set "
                            "data.template to a Jinja file that does.")

    def encoding_settings(self) -> dict[str, Any]:
        tools = {"tools": self.model.tools} if self.model.tools else {}
        return {**super().encoding_settings(), "new_tokens": self.model.new_tokens, **tools}

    def list_texts(self, record: dict[str, Any], info: dict[str, Any]) -> list[str]:
        messages = self.read(record, info).messages
        is_answered = bool(messages) and messages[-1]["role"] == "assistant"
        return self.list_spoken(messages[:-1] if is_answered else messages)

    def context_of(self, record: dict[str, Any], info: dict[str, Any]) -> str:
        """Return what also determines the right answer: the reference, and the columns that rewards read."""
        messages, names = self.read(record, info).messages, self.model.reward_columns
        reference = messages[-1]["content"] if messages and messages[-1]["role"] == "assistant" else None
        columns = record if names is None else {name: record.get(name) for name in names}
        return super().context_of(record, info) + json.dumps([reference, columns], sort_keys=True, default=str)

    def comparison_settings(self) -> Any:
        return self.model.reward_columns

    # Prompts

    def prompt(self, rows: RowSet, position: int) -> Prompt:
        """Return a prompt by its index among the rows."""
        encoded = rows[position]
        index = encoded["index"]
        conversation, reference = self._split(rows.info(index)["format"], record := rows.source_row(index))
        return Prompt(position, encoded["input_ids"].tolist(), conversation, record, reference)

    def _split(self, layout: str, record: dict[str, Any]) -> tuple[Conversation | None, str | None]:
        """Return the turns to answer and the response in the data, each None if missing."""
        if find_format(layout).template is not None:
            return None, None
        conversation = self.read(record, {"format": layout})
        if layout not in self._encoders:
            self._encoders[layout] = self.prompt_encoder(layout)
        prompt, last = self._encoders[layout].normalise(conversation), conversation.messages[-1]
        if last["role"] != "assistant":
            return prompt, None
        return replace(prompt, messages=prompt.messages[:-1]), last["content"]

    def prompt_with(self, prompt: Prompt, text: str) -> Prompt:
        """Return a prompt with a text after its last message.

        Raises:
            RowProblem: It is not a conversation, cannot be rendered, or leaves no space for an answer.
        """
        if prompt.conversation is None:
            raise RowProblem("the row is not a conversation, so nothing can be added to its last message")
        check_unicode(text)
        *before, last = prompt.conversation.messages
        conversation = replace(prompt.conversation,
                               messages=[*before,
                                         {**last, "content": last["content"] + text}])
        [ids] = self.prompt_encoder("messages").prompts_of([conversation])
        if len(ids) + self.model.new_tokens > self.settings.max_length:
            raise RowProblem(f"the prompt has {len(ids)} tokens with the added text, which leaves no space for an "
                             "answer")
        return prompt._replace(ids=ids, conversation=conversation)

    # Batches of prompts

    def batch_columns(self, sets: object) -> tuple[str, ...]:
        return ("input_ids", "index")

    @property
    def side(self) -> str:
        """Padding side of prompts."""
        return "left"

    def prompt_of(self, row: dict[str, Any]) -> dict[str, Any]:
        return {"input_ids": row["input_ids"], "index": row["index"]}

    def is_scored(self, item: dict[str, Any], role: str) -> bool:
        return True  # answers are

    def describe_scored(self, item: dict[str, Any], record: dict[str, Any], info: dict[str, Any]) -> str:
        _, reference = self._split(info["format"], record)
        return "the answer, by rewards" + ("" if reference is None else f"; the reference answer is: {reference}")


class PromptData(PromptDataFields, ConversationData):
    """Prompts; one row of a training batch is an answer to one, and of an evaluation batch a prompt.

    Attributes:
        reward_scorers: Reward models by the label of their reward.
        is_scored_by_environment: True if `model.environment` gives a reward.
    """

    codec_class = PromptCodec
    codec: PromptCodec

    def __post_init__(self) -> None:
        super().__post_init__()
        self.reward_scorers: dict[str, Callable[[list[Any]], list[float | None]]] | None = None
        self.is_scored_by_environment = False
        self._check_prompts: Callable[[str, Iterator[Prompt], bool], None] | None = None
        self._row_source = Rollouts()

    @classmethod
    def recognise(cls, row: Row) -> str | None:
        """Return None: rows of prompts look like those of fine-tuning."""
        return None

    @classmethod
    def model_settings(cls, row: Row) -> dict[str, tuple[Any, str]]:
        has_response = _has_response(row)
        column = next((name for name in ANSWERS if row.values.get(name) is not None), None)
        reward = {"name": "exact_match"} | ({} if has_response or column is None else {"column": column})
        has_answer = has_response or column is not None
        return {"rewards": ([reward], "1 where the answer is the right one; others: docs/rewards.md" if has_answer else
                            "no known column has a right answer: set column: NAME"),
                "num_generations": (8, "answers to each prompt, which are compared with each other"),
                "num_generations_eval": (0, "validation answers greedily; 8 samples 8 more answers, for pass@8"),
                "max_new_tokens": (512, "maximum answer length in tokens; longer answers are truncated")}

    def connect(self, *, check_prompts: Callable[[str, Iterator[Prompt], bool], None] | None = None,
                reward_scorers: dict[str, Callable[[list[Any]], list[float | None]]] | None = None,
                is_scored_by_environment: bool = False, **settings: Any) -> None:
        """See `DataModule`.

        Args:
            check_prompts: Checks the prompts of a set, given its recipe key, the prompts, and whether it may warn.
                Raises UserError: no answer to them could have a reward.
            reward_scorers: Reward models by the label of their reward.
            is_scored_by_environment: True if `model.environment` gives a reward.
        """
        super().connect(**settings)
        self.reward_scorers, self.is_scored_by_environment = reward_scorers, is_scored_by_environment
        self._check_prompts = check_prompts

    def identity(self) -> dict[str, Any]:
        tools = self._model.tools
        facts = {"environment": fingerprints.combine_fingerprints([json.dumps(tools, sort_keys=True)])} if tools else {}
        return {**super().identity(), **facts}

    def prompt(self, role: Role, position: int) -> Prompt:
        """Return a prompt of a role by its index among the rows."""
        return self.codec.prompt(self.rows(role), position)

    def num_prompts(self, role: Role) -> int:
        """Return the number of prompts of a role."""
        return len(self.rows(role))

    def train_batches(self) -> RolloutLoader:
        """Return answers of this rank, sampled where the position reaches new prompts. Raises UserError."""
        if getattr(self.trainer, "overfit_batches", 0):
            raise UserError("trainer.overfit_batches is not supported for GRPO, which samples new batches. Set "
                            "data.source.limit to train on a few rows")
        return cast(RolloutLoader, super().train_batches())  # what `Rollouts` makes

    def val_dataloader(self) -> EvaluationLoader | list:
        return self.evaluation_loader("val") if "val" in self.sets else []

    def evaluation_loader(self, role: Role, *added: str) -> EvaluationLoader:
        """Return prompts of this rank, padded on the left; `index` is the row's index."""
        self.rows(role)
        collate = _IndexCollator(self.collator())
        return self._built.loaders.evaluation(role, replace(self.shard(), num_workers=0), collate=collate)

    def _check_splits(self, stage: str | None) -> None:
        """See `DataModule`. Raises UserError: no answer to the prompts of a set could have a reward."""
        roles: list[Role] = [role for role in ("train", "val", "test")
                             if role in self.sets and role not in self._checked]
        super()._check_splits(stage)
        if self._check_prompts is None:
            return
        for role in roles:
            self._check_prompts(self.sources.key(role),
                                (self.prompt(role, position) for position in range(self.num_prompts(role))),
                                getattr(self.trainer, "is_global_zero", True))

    def rows_for_inspection(self, num_rows: int, which: Which | list[int] = "first") -> list[dict[str, Any]]:
        """Return prompts as the model sees them, without targets."""
        return [{name: value for name, value in row.items() if name != "labels"}
                for row in super().rows_for_inspection(num_rows, which)]


# ---------------------------------------------------------------------------------------------------------------------
# Answers of the model in training as training rows.

MakeOrRead = Callable[[PlannedRollout, str | None], tuple[str, list[dict[str, Any]]] | None]


def sample_nothing(planned: PlannedRollout, name: str | None) -> None:
    """Return None: stand-ins replace the answers."""


def plan_single_answers(num_prompts: int, rows_per_step: int) -> RolloutPlan:
    """Return a plan with one answer to each prompt."""
    return RolloutPlan(num_prompts, 1, rows_per_step)


class Rollouts(NamedTuple):
    """Makes training rows of the answers that the model in training samples.

    Args:
        plan: Makes the division of epochs into rollouts from the numbers of prompts and of answers of a step.
        token_columns: Further columns of answers, [T] float32 each.
        make_or_read: As in `RolloutLoader`. Where nothing is sampled it returns None, and stand-ins replace the
            answers.
    """

    plan: Callable[[int, int], RolloutPlan] = plan_single_answers
    token_columns: tuple[str, ...] = ()
    make_or_read: MakeOrRead = sample_nothing

    def make_loader(self, loaders: Loaders, shard: Shard) -> RolloutLoader:
        """Return answers of one rank, sampled where the position reaches new prompts. Raises UserError."""
        prompts, settings = loaders.splits.rows("train"), loaders.settings
        plan = self.plan(len(prompts), settings.batch_size * shard.batches_per_step)

        def make_or_read(planned: PlannedRollout, name: str | None) -> tuple[str, list[dict[str, Any]]]:
            sampled = None if loaders.longest_first else self.make_or_read(planned, name)
            return sampled or ("", self._make_stand_ins(loaders, planned, plan.num_generations))

        collator = RolloutCollator(replace(loaders.base_collator, keys=("input_ids", "labels", SEEDS)),
                                   self.token_columns)
        # Processes that prepare batches would not see the rollouts.
        return RolloutLoader(plan, collator, replace(shard, num_workers=0), settings.batch_size, make_or_read)

    def _make_stand_ins(self, loaders: Loaders, planned: PlannedRollout, size: int) -> list[dict[str, Any]]:
        """Return stand-ins for the answers of a rollout, `size` to each prompt.

        An answer is the start of its prompt (with `longest_first` repeated up to `max_length`), with an advantage
        of 1 or -1; columns of log-probabilities are 0.
        """
        items = []
        for prompt in planned.prompts.tolist():
            ids = loaders.splits.rows("train")[prompt]["input_ids"]
            max_new_tokens = max(loaders.settings.max_length - len(ids), 1)
            answer = np.resize(ids, max_new_tokens) if loaders.longest_first else ids[:max_new_tokens]
            item: dict[str, Any] = {
                "input_ids": np.concatenate([ids, answer]).astype(np.int32),
                "labels": np.concatenate([np.full(len(ids), IGNORED), answer]).astype(np.int32), "idle_weight": 0.0}
            columns = {name: np.zeros(len(item["input_ids"]), np.float32) for name in self.token_columns}
            items += [{**item, **columns, "row": prompt * size + answer_index,
                       "advantages": (-1.0) ** (prompt * size + answer_index)} for answer_index in range(size)]
        return items


class _IndexCollator:
    """Collates prompts with their row index as `index`."""

    def __init__(self, collator: Callable[[list], dict[str, torch.Tensor]]) -> None:
        self._collator = collator

    def __call__(self, items: list[dict[str, Any] | None]) -> dict[str, torch.Tensor]:
        return self._collator([None if item is None else {**item, "index": item["row"]} for item in items])


class RolloutCollator:
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
            for index, item in enumerate(items):
                if item is not None:
                    batch[name][index, : len(item[name])] = torch.from_numpy(item[name])
        return batch


def _has_response(row: Row) -> bool:
    """Return True if a row of a known layout ends in a response."""
    layout = format_of(row.values)
    if layout is None or find_format(layout).template is not None:
        return False
    first = next(iter(find_format(layout).regroup([row])), row)
    try:
        return read_conversation(layout, first.values, {}).messages[-1]["role"] == "assistant"
    except RowProblem:
        return False
