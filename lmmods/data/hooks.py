"""Hooks of a task's data: everything that a custom data module may override."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from functools import cached_property
from typing import Any, NamedTuple

from lmmods.core.console import warn
from lmmods.core.errors import UserError
from lmmods.core.labels import IGNORED
from lmmods.data import best_of
from lmmods.data.batches.collate import Collator
from lmmods.data.batches.on_policy import OnPolicy
from lmmods.data.encode.encoder import Encoder
from lmmods.data.encode.tokenizer import decode
from lmmods.data.encode.words import texts_in
from lmmods.data.scoring import Predictions
from lmmods.data.sources.conversation import Conversation
from lmmods.data.sources.preferences import Answers
from lmmods.data.sources.readers import Row
from lmmods.data.sources.source_reader import SourceReader
from lmmods.data.store.rows import PromptSet, RowSet
from lmmods.recipe.source import Source
from lmmods.recipe.tasks.base import DataFields


class Generated(NamedTuple):
    """Text that follows a prompt; `is_cut` is True if it ended only because it reached the maximum length."""

    prompt: str
    text: str
    is_cut: bool = False


class TaskHooks(DataFields, ABC):
    """Fields of a data module, and how its task converts rows and the network's outputs.

    The parts of a data module (splits, loaders) depend on this class alone.
    """

    eval_batch_size: int  # resolved before rows are read
    max_length: int
    seed: int
    run_seed: int = 0  # seeds all but the data: initial weights, dropout, sampled text
    longest_first: bool = False  # train on the longest rows first, to measure the memory of the largest batch
    token_types: bool = True  # True if the model uses token types
    answers: Answers = "pair"  # what a row of preferences is to the loss
    keeps_teacher = False  # True if batches hold `teacher_places`
    on_policy: OnPolicy | None = None  # which answers the network in training draws; set before the training loader
    reward_model: best_of.Scorer | None = None  # chooses among several answers of predict
    new_tokens: int = 1  # of an answer, for which a prompt leaves room
    max_new_tokens: int | None = None  # of an answer in predict
    label_names: list[str] | None = None  # labels of the pretrained model, in the order of its outputs
    left_over: str = "not_used"  # in the data report: key of the parts of rows that are in no token
    _adds_padding = True  # give a tokenizer without padding token a new one, and the network a row for it

    # What `new` asks

    @classmethod
    def recognise(cls, row: Row) -> str | None:
        """Return why a source with this first row is data of this task; None if it does not look like it."""
        return None

    @classmethod
    def model_settings(cls, row: Row) -> dict[str, tuple[Any, str]]:
        """Return keys of `model` that such rows decide: value and comment."""
        return {}

    # What the rows decide

    @property
    def network_fields(self) -> dict[str, Any]:
        """Fields of transformers' configuration that the rows decide, such as `id2label`; after `prepare_data`, or from
        a checkpoint. Default: none.
        """
        return {}

    def label_counts(self, role: str) -> dict[str, int]:
        """Rows (or tokens) of a role with each label, for the report. Default: none."""
        return {}

    # Rows

    @abstractmethod
    def _encoder(self, source: Source, first: Row, prompts_only: bool) -> tuple[Encoder, dict[str, Any]]:
        """Return the encoder of a source, given its first row, and facts about the source for the report."""

    @abstractmethod
    def _encoding_settings(self) -> dict[str, Any]:
        """All settings that change how the encoder converts a row."""

    @abstractmethod
    def _batch_keys(self) -> tuple[str, ...]:
        """Columns of a training batch besides attention_mask."""

    @property
    def has_token_types(self) -> bool:
        """True if batches say which of two texts a token is of."""
        return "token_type_ids" in self._batch_keys()

    def _reader(self, source: Source, streaming: bool = False) -> SourceReader:
        """Rows of a source as read."""
        return SourceReader(source, streaming=streaming)

    def _regrouped(self, rows: Iterable[Row], info: dict[str, Any]) -> Iterable[Row]:
        """Convert rows as read to rows as encoded. Default: unchanged."""
        return rows

    def _texts(self, row: dict[str, Any], info: dict[str, Any]) -> list[str]:
        """Texts of a row as encoded, by which rows are compared: what tells it from others, so neither ids nor what
        many rows share. Default: all strings of the row.

        Args:
            info: Facts about its source, as of `_encoder`.

        Raises:
            RowProblem: The row cannot be used.
        """
        return texts_in(row)

    def _context(self, row: dict[str, Any], info: dict[str, Any]) -> str:
        """What rows that repeat each other have in common besides `_texts`, such as system turns. Default: nothing."""
        return ""

    def _compared_settings(self) -> Any:
        """Settings that change `_context`, besides those of encoding. Default: none."""
        return None

    @property
    def sequences_per_row(self) -> int:
        """Sequences of a batch that a training row is, such as the answers of a pair; after `setup`. Default: 1."""
        return 1

    @property
    def parts_sources(self) -> bool:
        """True if no item may be made from rows of two sources, as each source has its share of the items."""
        return self.mixes and not self.streaming

    def _arrange(self, rows: RowSet) -> Any:
        """Training or evaluation items built from kept rows: a map-style data set with `lengths`, and with
        `source_sizes`, the items of each source, if they are fewer or more than the rows. Default: the rows.
        """
        return rows

    def _batch_collator(self, collator: Collator) -> Callable[[list], dict[str, Any]]:
        """Collator of training and evaluation items. Default: the collator of their columns."""
        return collator

    def _is_scored(self, item: dict[str, Any], role: str) -> bool:
        """True if the loss of a role (train, val, test) scores anything in an item.

        Default: a token other than the first has a label; items without labels are taken to be scored.
        """
        return "labels" not in item or bool((item["labels"][1:] != IGNORED).any())

    def _scored(self, item: dict[str, Any], source: dict[str, Any]) -> str | None:
        """Return in words what the loss scores in a training item, for `inspect`; None if its tokens or names say it.

        Args:
            item: As encoded.
            source: The row that it was made from, as read.
        """
        return None

    def _draws_by_epoch(self) -> bool:
        """True if item number + draw * len is a row drawn anew in each epoch and in each buffer of a stream."""
        return False

    def _side(self) -> str:
        """Padding side in training and evaluation."""
        return "right"

    # Prompts of predict

    def _prompts(self, rows: RowSet) -> Any:
        """Items of predict: a map-style data set with `lengths`. Default: `_prompt` of each kept row."""
        return PromptSet(rows, self._prompt)

    def _prompt(self, row: dict[str, Any]) -> dict[str, Any]:
        """Item of predict for a kept row: `input_ids` and `index`."""
        return {"input_ids": row["input_ids"], "index": row["index"]}

    def _prompt_keys(self) -> tuple[str, ...]:
        """Columns of a predict batch besides attention_mask."""
        return ("input_ids", "index")

    def _prompt_side(self) -> str:
        """Padding side in predict: left, so that generation continues after the last token."""
        return "left"

    # Outputs of the network

    @abstractmethod
    def example(self, index: int) -> dict[str, Any]:
        """The source row behind `index` of a predict batch."""

    @property
    def stop_token_ids(self) -> list[int]:
        """Tokens on which generation must stop."""
        return [] if self.tokenizer.eos_token_id is None else [self.tokenizer.eos_token_id]

    @cached_property
    def _answer_ends(self) -> list[int]:
        return self.stop_token_ids  # a task may have to read its template for them

    def decode_answers(self, rows: Iterable[Sequence[int]]) -> list[str]:
        """Return the texts of generated ids, without the tokens that end an answer and padding; see `decode`."""
        return [decode(self.tokenizer, ids, self._answer_ends) for ids in rows]

    def decode_prompts(self, rows: Iterable[Sequence[int]]) -> list[str]:
        """Return the texts of the ids of prompts, without begin token and padding; see `decode`."""
        return [decode(self.tokenizer, ids) for ids in rows]

    @property
    def chat_template(self) -> str | None:
        """Jinja template that renders conversations as in training; None if the rows are not conversations."""
        return None

    def encode_prompts(self, texts: list[str]) -> list[list[int]]:
        """Token ids of prompts to generate from, encoded like rows of predict. Raises UserError."""
        raise UserError(f"samples.prompts: {type(self).__name__} is of a task that generates no text; set "
                        "samples.prompts to null")

    def inference_prompts(self, index: int) -> list[list[int]]:
        """Token ids of the prompts that transformers' `apply_chat_template` makes from training source row `index`."""
        return []

    def outputs_by_index(self, batch: dict[str, Any], outputs: Any) -> dict[int, Any]:
        """Outputs of a predict batch by `index`, without padding rows: here `Generated`, or (prompt, generated texts)
        where a reward model chooses.

        Args:
            batch: The batch, with `input_ids` [B, T].
            outputs: Generated tokens [B * answers, T_new], with the answers to a prompt next to each other; those after
                the token that ends an answer are padding, and JAX leaves out that token, too.
        """
        prompts = self.decode_prompts(batch["input_ids"])
        texts: list[Any] = self.decode_answers(outputs)
        if self.reward_model is not None:
            size = len(texts) // max(len(prompts), 1)
            texts = [texts[first : first + size] for first in range(0, len(texts), size)]
            return {index: pair for index, *pair in zip(batch["index"].tolist(), prompts, texts) if index >= 0}
        ends = set(self._answer_ends)
        are_cut = [len(tokens) == self.max_new_tokens and ends.isdisjoint(map(int, tokens)) for tokens in outputs]
        return {index: Generated(*generated) for index, *generated in zip(
            batch["index"].tolist(), prompts, texts, are_cut, strict=True) if index >= 0}

    def judged(self, outputs: dict[int, Any]) -> dict[int, Any]:
        """The outputs of predict that this process has, with the scores of the reward model, if there is one."""
        if self.reward_model is None:
            return outputs
        return best_of.scored(outputs, self.reward_model, self.answered)

    def answered(self, index: int, prompt: str, text: str) -> str | Conversation:
        """What a reward model reads of an answer to a row of predict. Default: the text that it goes on with."""
        return prompt + text

    def answer(self, role: str, outputs: dict[int, Any]) -> Predictions:
        """Rows, scores and files from all outputs of an evaluation or of predict, by `index`.

        For tasks whose outputs are no text; their `outputs_by_index` and `predictions` lead here.
        """
        raise NotImplementedError(f"{type(self).__name__} has no `answer`")

    def predictions(self, outputs: dict[int, Any]) -> Predictions:
        """Rows, scores and files from all outputs of predict, by index: `Generated`, or `best_of.Candidates`.

        With scores, `answers_cut` counts the answers that reached the maximum length, if there are any: such an answer
        may be right only because it does not go on.
        """
        if self.reward_model is not None:
            return self._best_predictions(outputs)
        answers = {index: Generated(*output) for index, output in sorted(outputs.items())}
        rows = [{**self.example(index), "prediction_with_input": answer.prompt + answer.text,
                 "prediction": answer.text.strip()} for index, answer in answers.items()]
        scores = self.score({index: answer.text for index, answer in answers.items()})
        num_cut = sum(answer.is_cut for answer in answers.values())
        return Predictions(rows, {**scores, "answers_cut": float(num_cut)} if scores and num_cut else scores, {})

    def _best_predictions(self, found: dict[int, best_of.Candidates]) -> Predictions:
        if found and all(score is None for each in found.values() for score in each.scores):
            warn("model.best_of: the reward model scores none of the answers, so the first answer to each prompt is "
                 "taken. Use a reward model that accepts such texts, or lower model.generation.max_new_tokens.")
        texts = {index: each.texts[each.best] for index, each in sorted(found.items())}
        rows = [{**self.example(index), "prediction_with_input": found[index].prompt + text, "prediction": text.strip(),
                 "answers": found[index].listed()} for index, text in texts.items()]
        return Predictions(rows, {**self.score(texts), **best_of.reward_metrics(found.values())}, {})

    def reference(self, index: int) -> str | None:
        """The reference answer in the data, if there is one."""
        return None

    def score(self, predictions: dict[int, str]) -> dict[str, float]:
        """Metrics of generated texts by `index`; empty if the data hold no answers."""
        return {}
