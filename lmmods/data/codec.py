"""The codec of a task: how records become rows of batches, and the model's outputs predictions."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

from lmmods.core.errors import UserError
from lmmods.core.labels import IGNORED
from lmmods.data.batch.collate import Collate, Collator
from lmmods.data.encode.encoder import Encoder
from lmmods.data.encode.tokenizer import decode
from lmmods.data.encode.words import texts_in
from lmmods.data.read.conversation import Conversation
from lmmods.data.read.preferences import Answers
from lmmods.data.read.readers import Row
from lmmods.data.read.source_reader import SourceReader
from lmmods.data.store.rows import PromptSet, RowSet
from lmmods.recipe.tasks.base import DataFields


class Settings(DataFields):
    """Fields of a recipe's `data` as the stages after reading see them: with those that the data module fills in."""

    max_length: int
    eval_batch_size: int
    seed: int


@dataclass(frozen=True)
class ModelFacts:
    """Facts about the model that rows depend on.

    Args:
        token_types: True if the model uses token types.
        answers: How the loss uses a row of preferences.
        label_names: Labels of the pretrained model, in the order of its outputs; None if it names none.
        new_tokens: Tokens of an answer, for which a prompt leaves space.
        max_new_tokens: Maximum length of an answer in predict; None if it generates none.
        tools: Specifications of the tools in every prompt.
        reward_columns: Columns that rewards read; None means all.
    """

    token_types: bool = True
    answers: Answers = "pair"
    label_names: list[str] | None = None
    new_tokens: int = 1
    max_new_tokens: int | None = None
    tools: list[dict[str, Any]] = field(default_factory=list)
    reward_columns: tuple[str, ...] | None = ()


class Predictions(NamedTuple):
    """Outputs converted back to the terms of the task.

    Args:
        rows: Records of predictions.jsonl, in the order of the data.
        scores: Metrics, if the data contain right answers.
        files: Further JSON files of the run folder, by name.
        warnings: What users should know about them.
    """

    rows: list[dict[str, Any]]
    scores: dict[str, float]
    files: dict[str, Any]
    warnings: tuple[str, ...] = ()


class Generated(NamedTuple):
    """Text that follows a prompt; `is_cut` is True if it ended only because it reached the maximum length."""

    prompt: str
    text: str
    is_cut: bool = False


class Codec(ABC):
    """Converts records to rows, rows to batches, and outputs to predictions. Abstract: each task has its own.

    A codec knows neither ranks and the trainer nor which rows a set has; it gets these as arguments.

    Args:
        settings: Fields of the recipe's `data`, with `max_length` and `seed` filled in.
        tokenizer: The tokenizer of the run.
        model: Facts about the model that rows depend on.
    """

    draws_by_epoch: ClassVar[bool] = False  # True if items differ between epochs or buffers
    left_over: ClassVar[str] = "not_used"  # in the data report: key of the parts of records that are in no token

    def __init__(self, settings: Settings, tokenizer: Any, model: ModelFacts = ModelFacts()) -> None:
        self.settings, self.tokenizer, self.model = settings, tokenizer, model

    # From records to rows

    @abstractmethod
    def make_encoder(self, reader: SourceReader, first: Row, prompts_only: bool) -> tuple[Encoder, dict[str, Any]]:
        """Return the encoder of a source, given its first usable record, and facts about the source for the report.

        Args:
            prompts_only: Encode records only up to where a response starts.

        Raises:
            UserError: The records are not data of this task.
        """

    @abstractmethod
    def encoding_settings(self) -> dict[str, Any]:
        """Return all settings that change what encoders return."""

    def regroup(self, records: Iterable[Row], info: dict[str, Any]) -> Iterable[Row]:
        """Convert records as read to those that are encoded. Default: unchanged.

        Args:
            info: Facts about the source, as in `make_encoder`.
        """
        return records

    def list_texts(self, record: dict[str, Any], info: dict[str, Any]) -> list[str]:
        """Return the texts by which records are compared: what distinguishes one, so neither ids nor what many
        records share. Default: all strings.

        Raises:
            RowProblem: The record cannot be used.
        """
        return texts_in(record)

    def context_of(self, record: dict[str, Any], info: dict[str, Any]) -> str:
        """Return what repeated records have in common besides their texts, such as system turns. Default: nothing."""
        return ""

    def comparison_settings(self) -> Any:
        """Return settings that change `context_of`, besides those of encoding. Default: none."""
        return None

    # From rows to batches

    def make_items(self, rows: RowSet, by_source: bool) -> Any:
        """Return the training or evaluation items of a set: a map-style dataset with `lengths` and `truncated`, and
        with `source_sizes`, the items of each source, if they are not one for each row. Default: the rows.

        Args:
            by_source: No item may be made from rows of two sources, as each source has its share of the items.
        """
        return rows

    @abstractmethod
    def batch_columns(self, sets: Sequence[RowSet]) -> tuple[str, ...]:
        """Return the columns of a training batch besides `attention_mask`.

        Args:
            sets: The sets that have been opened: batches of all of them have the same columns.
        """

    @property
    def side(self) -> str:
        """Padding side in training and evaluation."""
        return "right"

    def make_collator(self, collator: Collator, sets: Sequence[RowSet], added: Sequence[str] = ()) -> Collate:
        """Return the collator of training and evaluation items.

        Args:
            collator: Without columns.
            sets: See `batch_columns`.
            added: Columns of the batch that are not the task's.
        """
        return replace(collator, keys=(*self.batch_columns(sets), *added), side=self.side)

    def fingerprint_files(self, rows: RowSet) -> str:
        """Return a fingerprint of the contents of files that rows refer to, such as images. Default: of none."""
        return ""

    def sequences_per_row(self, sets: Sequence[RowSet]) -> int:
        """Return how many sequences of a batch a training row is, such as the answers of a pair. Default: 1."""
        return 1

    @property
    def has_token_types(self) -> bool:
        """True if batches contain the token types of pairs of texts."""
        return "token_type_ids" in self.batch_columns(())

    def is_scored(self, item: dict[str, Any], role: str) -> bool:
        """Return True if an item has a target for the loss of a role (train, val, test).

        Default: a token other than the first has a label; items without labels count as targets.
        """
        return "labels" not in item or bool((item["labels"][1:] != IGNORED).any())

    def describe_scored(self, item: dict[str, Any], record: dict[str, Any], info: dict[str, Any]) -> str | None:
        """Describe the targets of a training item, for `inspect`; None if its tokens or names show them.

        Args:
            record: As read, that the item was made from.
            info: Facts about its source.
        """
        return None

    def count_labels(self, rows: RowSet) -> dict[str, int]:
        """Return how many rows (or tokens) have each label, for the report. Default: none."""
        return {}

    # Prompts of predict

    def make_prompts(self, rows: RowSet) -> Any:
        """Return the items of predict, a dataset with `lengths`. Default: `prompt_of` each row."""
        return PromptSet(rows, self.prompt_of)

    def prompt_of(self, row: dict[str, Any]) -> dict[str, Any]:
        """Return the item of predict for a row: `input_ids` and `index`."""
        return {"input_ids": row["input_ids"], "index": row["index"]}

    @property
    def prompt_columns(self) -> tuple[str, ...]:
        """Columns of a predict batch besides `attention_mask`."""
        return ("input_ids", "index")

    @property
    def prompt_side(self) -> str:
        """Padding side in predict: left, so that generation continues after the last token."""
        return "left"

    def make_prompt_collator(self, collator: Collator, sets: Sequence[RowSet]) -> Collate:
        """Return the collator of the items of predict; arguments as in `make_collator`."""
        return replace(collator, keys=self.prompt_columns, side=self.prompt_side)

    # Texts to generate from, and generated texts

    @cached_property
    def stop_token_ids(self) -> list[int]:
        """Tokens on which generation must stop."""
        return [] if self.tokenizer.eos_token_id is None else [self.tokenizer.eos_token_id]

    def decode_answers(self, rows: Iterable[Sequence[int]]) -> list[str]:
        """Return the texts of generated ids, without the tokens that end an answer and padding; see `decode`."""
        return [decode(self.tokenizer, ids, self.stop_token_ids) for ids in rows]

    def decode_prompts(self, rows: Iterable[Sequence[int]]) -> list[str]:
        """Return the texts of the ids of prompts, without begin token and padding; see `decode`."""
        return [decode(self.tokenizer, ids) for ids in rows]

    def chat_template(self, rows: RowSet) -> str | None:
        """Return the Jinja template that renders conversations as in training rows; None if they are none."""
        return None

    def encode_prompts(self, texts: list[str], training_rows: Callable[[], RowSet]) -> list[list[int]]:
        """Return the token ids of prompts to generate from, encoded like training rows. Raises UserError.

        Args:
            training_rows: Returns these, which a task may need for their layout.
        """
        raise UserError(f"samples.prompts: {type(self.settings).__name__} belongs to a task without generation. Set "
                        "samples.prompts to null")

    def inference_prompts(self, rows: RowSet, index: int) -> list[list[int]]:
        """Return the token ids of the prompts that transformers' `apply_chat_template` makes from record `index`."""
        return []

    def model_files(self, find_base_file: Callable[[str], Path | None]) -> dict[str, Any]:
        """Return the task's own JSON files of an exported model, by name, such as the settings of an image processor.

        Default: none.

        Args:
            find_base_file: Returns the path of a file of the model that training started from; None if it has none.
        """
        return {}

    # From outputs to predictions

    def example(self, rows: RowSet, index: int) -> dict[str, Any]:
        """Return the record behind `index` of a predict batch."""
        return rows.source_row(index)

    def decode_batch(self, batch: dict[str, Any], outputs: Any) -> dict[int, Any]:
        """Return the outputs of a predict batch by `index`, without padding rows: here `Generated`.

        Args:
            batch: The batch, with `input_ids` [B, T].
            outputs: Generated tokens [B, T_new]; those after the token that ends an answer are padding, and JAX leaves
                out that token, too.
        """
        ends = set(self.stop_token_ids)
        are_cut = [len(tokens) == self.model.max_new_tokens and ends.isdisjoint(map(int, tokens)) for tokens in outputs]
        return {index: Generated(prompt, text, is_cut) for index, prompt, text, is_cut in zip(
            batch["index"].tolist(), self.decode_prompts(batch["input_ids"]), self.decode_answers(outputs), are_cut,
            strict=True) if index >= 0}

    def complete(self, rows: RowSet, outputs: dict[int, Any]) -> dict[int, Any]:
        """Return all outputs of predict of this process with what can only be computed for all at once. Default:
        unchanged.
        """
        return outputs

    def predict(self, rows: RowSet, outputs: dict[int, Any]) -> Predictions:
        """Return records, scores and files from all outputs of predict by `index`: here of `Generated`.

        With scores, `answers_cut` counts the answers that reached the maximum length, if there are any: such an answer
        may be right only because it does not continue.
        """
        answers = {index: Generated(*output) for index, output in sorted(outputs.items())}
        records = [{**self.example(rows, index), "prediction_with_input": answer.prompt + answer.text,
                    "prediction": answer.text.strip()} for index, answer in answers.items()]
        scores, warnings = self.score(rows, {index: answer.text for index, answer in answers.items()})
        num_cut = sum(answer.is_cut for answer in answers.values())
        return Predictions(records, {**scores, "answers_cut": float(num_cut)} if scores and num_cut else scores, {},
                           warnings)

    def score(self, rows: RowSet, texts: dict[int, str]) -> tuple[dict[str, float], tuple[str, ...]]:
        """Return metrics of generated texts by `index`, and warnings; no metrics if the data contain no answers."""
        return {}, ()

    def build_reward_input(self, rows: RowSet, index: int, prompt: str, text: str) -> str | Conversation:
        """Return the reward model's input for an answer to a predict row. Default: the prompt and the answer."""
        return prompt + text


class NumbersCodec(Codec):
    """A codec of a task whose outputs are numbers of each row, such as logits. Abstract."""

    def decode_batch(self, batch: dict[str, Any], outputs: Any) -> dict[int, Any]:
        """Return the outputs, which the model already returns by `index`."""
        return outputs

    @abstractmethod
    def evaluate(self, role: str, rows: RowSet, outputs: dict[int, Any]) -> Predictions:
        """Return records, scores and files from all outputs of an evaluation, by `index`.

        Args:
            role: val, test or predict, for messages.
        """

    def predict(self, rows: RowSet, outputs: dict[int, Any]) -> Predictions:
        """See `evaluate`."""
        return self.evaluate("predict", rows, outputs)


def can_score(role: str, is_labelled: list[bool]) -> tuple[bool, tuple[str, ...]]:
    """Return whether all rows of an evaluation have a right answer, and a warning if only some have one.

    A score over some rows would be mistaken for a score over all.
    """
    missing = is_labelled.count(False)
    warnings = (f"{role} has no scores: {missing} of {len(is_labelled)} rows have no right answer, or one that "
                "training did not have. Complete or remove them.",) if 0 < missing < len(is_labelled) else ()
    return bool(is_labelled) and not missing, warnings
