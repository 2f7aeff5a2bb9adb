"""Masked language modelling on plain text."""

from functools import cached_property
from typing import Any

import numpy as np

from lmmods.core.errors import UserError
from lmmods.core.labels import IGNORED
from lmmods.data.base import DataModule
from lmmods.data.batches.blocks import BlockSet
from lmmods.data.batches.masking import MaskedSet, Masker, tokens_around, vocabulary_flags
from lmmods.data.encode.encoder import Encoder
from lmmods.data.encode.text_encoder import TextEncoder
from lmmods.data.encode.texts import TextRowEncoder, check_text_column
from lmmods.data.fields import MLMDataFields
from lmmods.data.scoring.predictions import Predictions
from lmmods.data.sources.readers import Row
from lmmods.data.sources.source import Source
from lmmods.data.sources.source_reader import SourceReader
from lmmods.data.store.rows import RowSet


class MLMData(MLMDataFields, DataModule):
    """Texts for masked language modelling. Training masks are drawn anew in each epoch, evaluation masks are fixed.

    In predict, the mask token typed in a text of `predict_source` is the gap to fill.
    """

    def _reader(self, source: Source, streaming: bool = False) -> SourceReader:
        return SourceReader(source, self.documents, streaming)

    def _encoding_settings(self) -> dict[str, Any]:
        return {"text_column": self.text_column, "join": self.join, "max_length": self.max_length}

    def _encoder(self, source: Source, first: Row, prompts_only: bool) -> tuple[Encoder, dict[str, Any]]:
        if self.tokenizer.mask_token_id is None:
            raise UserError("the tokenizer has no mask token; use one of a masked language model")
        check_text_column(first, self.text_column)
        separated = self.join and not prompts_only and self.tokenizer.sep_token_id is not None
        between = [self.tokenizer.sep_token_id] if separated else []
        encoder = TextRowEncoder(self.text_column, TextEncoder(self.tokenizer), begin=[], end=between,
                                 gap=self.tokenizer.mask_token if prompts_only else None,
                                 longest=self._room() if prompts_only else None)
        return encoder, {"format": "text"}

    def _room(self) -> int:
        before, behind = tokens_around(self.tokenizer)
        return self.max_length - len(before) - len(behind)

    def _batch_keys(self) -> tuple[str, ...]:
        return ("input_ids", "labels")

    def _arrange(self, rows: RowSet) -> MaskedSet:
        special, continues = vocabulary_flags(self.tokenizer)
        masker = Masker(self.tokenizer.mask_token_id, special, continues, self.mlm_probability, self.whole_word_masking)
        return MaskedSet(BlockSet(rows, self._room(), self.join), masker, tokens_around(self.tokenizer), self.seed)

    def _is_scored(self, item: dict[str, Any], role: str) -> bool:
        if (item["labels"] != IGNORED).any():
            return True
        return role == "train" and not self._special[item["input_ids"]].all()  # masks are drawn anew in each epoch

    @cached_property
    def _special(self) -> np.ndarray:
        """For each id, whether it is special. [V] bool."""
        return vocabulary_flags(self.tokenizer)[0]

    def _prompt(self, row: dict[str, Any]) -> dict[str, Any]:
        before, behind = tokens_around(self.tokenizer)
        ids = row["input_ids"][: self._room()].tolist()
        return {"input_ids": [*before, *ids, *behind], "index": row["index"]}

    def _draws_by_epoch(self) -> bool:
        return True

    def _prompt_side(self) -> str:
        return "right"

    def outputs_by_index(self, batch: dict[str, Any], outputs: Any) -> dict[int, Any]:
        """(text with each gap filled by its most likely token, candidates of each gap) of a predict batch by `index`.

        Args:
            batch: The batch, with `input_ids` [B, T].
            outputs: Candidates [G, K] and their probabilities [G, K]: of all gaps of the batch, row by row.
        """
        tokens, probabilities = (part.tolist() for part in outputs)
        ids, fills, gap = batch["input_ids"].tolist(), [], 0
        for row in ids:
            fills.append([])
            for place in [place for place, token in enumerate(row) if token == self.tokenizer.mask_token_id]:
                row[place] = tokens[gap][0]
                fills[-1].append([{"token": self.tokenizer.decode([token]), "probability": probability}
                                  for token, probability in zip(tokens[gap], probabilities[gap])])
                gap += 1
        texts = self.tokenizer.batch_decode(ids, skip_special_tokens=True)
        return {index: pair for index, *pair in zip(batch["index"].tolist(), texts, fills) if index >= 0}

    def predictions(self, outputs: dict[int, Any]) -> Predictions:
        """Rows with `prediction`, the text filled in, and `fills`, for each gap its candidates, the likeliest first.

        Raises:
            UserError: No text has a gap.
        """
        if not any(fills for _, fills in outputs.values()):
            raise UserError(f"predict fills the gaps that the mask token {self.tokenizer.mask_token} leaves in the "
                            "texts of data.predict_source, but no text has one")
        rows = [{**self.example(index), "prediction": text, "fills": fills}
                for index, (text, fills) in sorted(outputs.items())]
        return Predictions(rows, {}, {})
