"""What a task says of its data: everything that a data module of one's own may override."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from typing import Any

from lmmods.core.errors import UserError
from lmmods.core.labels import IGNORED
from lmmods.data.batches.collate import Collator
from lmmods.data.encode.encoder import Encoder
from lmmods.data.fields import DataFields
from lmmods.data.scoring import Predictions
from lmmods.data.sources.preferences import Answers
from lmmods.data.sources.readers import Row
from lmmods.data.sources.source import Source
from lmmods.data.sources.source_reader import SourceReader
from lmmods.data.store.rows import PromptSet, RowSet


class TaskHooks(DataFields, ABC):
    """Fields of a data module, what its task makes of rows, and of the network's outputs.

    The parts of a data module (splits, loaders) know the module by this class alone.
    """

    eval_batch_size: int  # the fields that are settled before rows are read
    max_length: int
    seed: int
    run_seed: int = 0  # of all but the data: first weights, dropout, sampled text
    longest_first: bool = False  # whether training takes rows by length, to see what the largest batch needs
    token_types: bool = True  # whether the model tells kinds of token apart
    answers: Answers = "pair"  # what a row of preferences is to the model's loss
    _adds_padding = True  # whether a tokenizer without padding token gets a new one, and the network a row for it

    # Rows

    @abstractmethod
    def _encoder(self, source: Source, first: Row, prompts_only: bool) -> tuple[Encoder, dict[str, Any]]:
        """Encoder of a source whose first row is given, and what was found out about the source, for the report."""

    @abstractmethod
    def _encoding_settings(self) -> dict[str, Any]:
        """All settings that change what the encoder makes of a row."""

    @abstractmethod
    def _batch_keys(self) -> tuple[str, ...]:
        """Columns of a training batch beside attention_mask."""

    def _reader(self, source: Source, streaming: bool = False) -> SourceReader:
        """Rows of a source as read."""
        return SourceReader(source, streaming=streaming)

    def _regrouped(self, rows: Iterable[Row], info: dict[str, Any]) -> Iterable[Row]:
        """Rows as read -> rows as encoded. Default: the same."""
        return rows

    def _arrange(self, rows: RowSet) -> Any:
        """Training or evaluation items made of kept rows: a map-style data set with `lengths`. Default: the rows."""
        return rows

    def _batch_collator(self, collator: Collator) -> Callable[[list], dict[str, Any]]:
        """What makes training and evaluation batches of items. Default: the collator of their columns."""
        return collator

    def _is_scored(self, item: dict[str, Any], role: str) -> bool:
        """Whether the loss of a role (train, val, test) has something to measure in an item of batches. Default: a
        labelled token that another stands before; items without labels are taken to have it."""
        return "labels" not in item or bool((item["labels"][1:] != IGNORED).any())

    def _draws_by_epoch(self) -> bool:
        """Whether item number + draw * len is a row drawn anew, in each epoch and in each buffer of a stream."""
        return False

    def _side(self) -> str:
        """Side of the padding in training and evaluation."""
        return "right"

    # Prompts of predict

    def _prompts(self, rows: RowSet) -> Any:
        """What predict reads: a map-style data set with `lengths`. Default: `_prompt` of each kept row."""
        return PromptSet(rows, self._prompt)

    def _prompt(self, row: dict[str, Any]) -> dict[str, Any]:
        """What predict gets of a kept row: `input_ids` and `index`."""
        return {"input_ids": row["input_ids"], "index": row["index"]}

    def _prompt_keys(self) -> tuple[str, ...]:
        """Columns of a predict batch beside attention_mask."""
        return ("input_ids", "index")

    def _prompt_side(self) -> str:
        """Side of the padding in predict; on the left, so that generation goes on behind the last token."""
        return "left"

    # Outputs of the network

    @abstractmethod
    def example(self, index: int) -> dict[str, Any]:
        """The row as read behind `index` of a predict batch."""

    @property
    def stop_token_ids(self) -> list[int]:
        """Tokens on which generation must stop."""
        return [] if self.tokenizer.eos_token_id is None else [self.tokenizer.eos_token_id]

    @property
    def chat_template(self) -> str | None:
        """Jinja that writes conversations as the training rows were written; None where these are no conversations."""
        return None

    def encode_prompts(self, texts: list[str]) -> list[list[int]]:
        """Token ids of prompts, as the model sees a row of predict, to generate from. Raises UserError."""
        raise UserError(f"samples.prompts: {type(self).__name__} is of a task that generates no text; set "
                        "samples.prompts to null")

    def inference_prompts(self, index: int) -> list[list[int]]:
        """Token ids of each prompt that transformers' `apply_chat_template` makes of training row `index` as read."""
        return []

    def outputs_by_index(self, batch: dict[str, Any], outputs: Any) -> dict[int, Any]:
        """Outputs of a predict batch by its `index`, without padding rows: here (prompt, generated text).

        Args:
            batch: The batch, with `input_ids` [B, T].
            outputs: Generated tokens [B, T_new].
        """
        prompts = self.tokenizer.batch_decode(batch["input_ids"], skip_special_tokens=True)
        texts = self.tokenizer.batch_decode(outputs, skip_special_tokens=True)
        return {index: pair for index, *pair in zip(batch["index"].tolist(), prompts, texts) if index >= 0}

    def predictions(self, outputs: dict[int, Any]) -> Predictions:
        """Rows, scores and files of all outputs of predict, by index."""
        rows = [{**self.example(index), "prediction_with_input": prompt + text, "prediction": text.strip()}
                for index, (prompt, text) in sorted(outputs.items())]
        return Predictions(rows, self.score({index: text for index, (_, text) in outputs.items()}), {})

    def reference(self, index: int) -> str | None:
        """The text that the data give as the right answer, where there is one."""
        return None

    def score(self, predictions: dict[int, str]) -> dict[str, float]:
        """Metrics of generated texts by `index`; empty where the data hold no answers."""
        return {}
