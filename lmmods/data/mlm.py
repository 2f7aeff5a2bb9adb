"""Masked language modelling on plain text."""

from typing import Any, Literal

from lmmods.core.errors import UserError
from lmmods.data.base import DataModule
from lmmods.data.batches.blocks import BlockSet
from lmmods.data.batches.masking import MaskedSet, Masker, tokens_around, vocabulary_flags
from lmmods.data.encode.encoded import Encoder
from lmmods.data.encode.encoding import TextEncoder
from lmmods.data.encode.texts import TextRowEncoder
from lmmods.data.predictions import Predictions
from lmmods.data.sources.readers import Row
from lmmods.data.sources.sources import Source, SourceReader
from lmmods.data.store.rows import RowSet


class MLMData(DataModule):
    """Texts for masked language modelling. Training masks are drawn anew in each epoch, evaluation masks are fixed.

    In predict, the mask token typed in a text of `predict_source` is the gap to fill.

    Args:
        source: Where the training texts come from: file, folder, glob, URL, hub id, a mapping {path, name, split,
            revision, columns, limit, weight}, or a list of these. Text files, or files with a text column.
        text_column: Column that holds the text.
        documents: What a document of a .txt file is: the whole `file`, each `paragraph` (parted by blank lines) or
            each `line`.
        join: Lay the documents end to end before cutting, a separator between them. Otherwise each fills rows of its
            own.
        mlm_probability: Share of tokens to predict; of these 80 % are masked, 10 % replaced by others, 10 % kept.
        whole_word_masking: Choose whole words instead of tokens.
        **common: Fields of every data module.
    """

    def __init__(
        self,
        source: str | Source | list[str | Source],
        *,
        text_column: str = "text",
        documents: Literal["file", "paragraph", "line"] = "file",
        join: bool = True,
        mlm_probability: float = 0.15,
        whole_word_masking: bool = False,
        **common: Any,
    ) -> None:
        super().__init__(source, **common)
        if self.packing:
            raise UserError("data.packing is not for masked language modelling; data.join fills rows")
        if not 0 < mlm_probability < 1:
            raise UserError(f"data.mlm_probability is {mlm_probability}, but must be between 0 and 1")
        self.text_column = text_column
        self.documents = documents
        self.join = join
        self.mlm_probability = mlm_probability
        self.whole_word_masking = whole_word_masking

    def _reader(self, source: Source, streaming: bool = False) -> SourceReader:
        return SourceReader(source, self.documents, streaming)

    def _encoding_settings(self) -> dict[str, Any]:
        return {"text_column": self.text_column, "join": self.join, "max_length": self.max_length}

    def _encoder(self, source: Source, first: Row, prompts_only: bool) -> tuple[Encoder, dict[str, Any]]:
        if self.tokenizer.mask_token_id is None:
            raise UserError("the tokenizer has no mask token; use one of a masked language model")
        if self.text_column not in first.values:
            raise UserError(
                f"{first.file}:{first.line}: no column {self.text_column!r}; the columns are "
                f"{', '.join(first.values)}. Name yours with data.text_column"
            )
        separated = self.join and not prompts_only and self.tokenizer.sep_token_id is not None
        between = [self.tokenizer.sep_token_id] if separated else []
        encoder = TextRowEncoder(
            self.text_column,
            TextEncoder(self.tokenizer),
            begin=[],
            end=between,
            gap=self.tokenizer.mask_token if prompts_only else None,
            longest=self._room() if prompts_only else None,
        )
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
