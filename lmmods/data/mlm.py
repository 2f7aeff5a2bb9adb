"""Masked language modelling on plain text."""

from dataclasses import dataclass
from functools import cached_property
from typing import Any, ClassVar

import numpy as np
from torch.utils.data import Dataset

from lmmods.core.errors import UserError
from lmmods.core.labels import IGNORED
from lmmods.data.batch.blocks import BlockSet
from lmmods.data.clm import TextCodec, TextData, TextSettings
from lmmods.data.codec import Predictions
from lmmods.data.encode.encoder import Encoder, TextEncoder, TextRowEncoder, check_text_column
from lmmods.data.read.readers import Row
from lmmods.data.read.source_reader import SourceReader
from lmmods.data.store.rows import RowSet
from lmmods.recipe.tasks.mlm import MLMDataFields

# ---------------------------------------------------------------------------------------------------------------------
# Rows of masked language models: special tokens around a block, and random masks from (seed, draw, row).

MASK_SHARE, RANDOM_SHARE = 0.8, 0.1  # of the chosen tokens; the rest is unchanged (Devlin et al. 2018)


@dataclass
class Masker:
    """BERT's masking.

    Args:
        mask_id: Id of the mask token.
        special: [V] bool, True for special tokens: they are neither masked nor used as replacements.
        continues: [V] bool, True for tokens that continue a word.
        probability: Fraction of tokens (or words) to predict.
        whole_words: Mask whole words instead of tokens.
    """

    mask_id: int
    special: np.ndarray
    continues: np.ndarray
    probability: float
    whole_words: bool

    def __post_init__(self) -> None:
        self._ordinary = np.flatnonzero(~self.special)

    def __call__(self, ids: np.ndarray, random: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
        """Return masked ids and labels, both [T]; labels are IGNORED for tokens that were not chosen."""
        # All tokens get random numbers, so that their count does not depend on the choice.
        is_target = self._choose(ids, random)
        uniforms = random.random(len(ids))
        masked = np.where(uniforms < MASK_SHARE, self.mask_id, ids)
        is_random = (uniforms >= MASK_SHARE) & (uniforms < MASK_SHARE + RANDOM_SHARE)
        masked = np.where(is_random, random.choice(self._ordinary, len(ids)), masked)
        return np.where(is_target, masked, ids), np.where(is_target, ids, IGNORED)

    def _choose(self, ids: np.ndarray, random: np.random.Generator) -> np.ndarray:
        special = self.special[ids]
        is_chosen = random.random(len(ids)) < self.probability
        if self.whole_words:
            # True for tokens of a word but its first; what follows a special token, or starts the block, starts a word.
            continues_word = self.continues[ids] & ~special
            continues_word[1:] &= ~special[:-1]
            continues_word[:1] = False
            # Each token has the choice of its word's first: the running maximum is the position of that token.
            is_chosen = is_chosen[np.maximum.accumulate(np.where(continues_word, 0, np.arange(len(ids))))]
        return is_chosen & ~special


class MaskedSet(Dataset):
    """Blocks with special tokens around them and masks. Item -1 is None, a padding row.

    Item number + draw * len(self) is the block `number` with the masks of that draw (an epoch, or a buffer of a
    stream), so that masks depend neither on batches nor on workers and a resumed run has the same masks.

    Args:
        blocks: Dataset of {input_ids, index} with `lengths`.
        masker: Makes the masks.
        around: Ids before and after each block.
        seed: Seed of the masks.
    """

    def __init__(self, blocks: Any, masker: Masker, around: tuple[list[int], list[int]], seed: int) -> None:
        self.blocks, self.masker, self.around, self.seed = blocks, masker, around, seed

    def __len__(self) -> int:
        return len(self.blocks)

    @property
    def lengths(self) -> np.ndarray:
        """Tokens of each row."""
        return self.blocks.lengths + len(self.around[0]) + len(self.around[1])

    @property
    def source_sizes(self) -> np.ndarray:
        """Rows of each source."""
        return self.blocks.source_sizes

    @property
    def truncated(self) -> np.ndarray:
        """Tokens truncated from each row."""
        return self.blocks.truncated

    def __getitem__(self, index: int) -> dict[str, Any] | None:
        if index < 0:
            return None
        draw, row = divmod(index, len(self))
        block = self.blocks[row]
        ids = np.concatenate([self.around[0], block["input_ids"], self.around[1]]).astype(np.int64)
        masked, labels = self.masker(ids, np.random.default_rng([self.seed, draw, row]))
        return {"input_ids": masked, "labels": labels, "index": block["index"]}


def vocabulary_flags(tokenizer) -> tuple[np.ndarray, np.ndarray]:  # noqa: ANN001
    """For each id (bool [V]): whether it is special, and whether it continues a word.

    Words are recognised by the vocabulary: `##` continues one in WordPiece; in byte-level and SentencePiece
    vocabularies what does not start with the sign of a space does.
    """
    size = len(tokenizer)
    tokens = tokenizer.convert_ids_to_tokens(list(range(size)))
    special = np.zeros(size, bool)
    # Tokens that are marked special, and those with a role such as unk_token, which may not be marked.
    special[[token_id for token_id, token in tokenizer.added_tokens_decoder.items() if token.special]] = True
    special[tokenizer.all_special_ids] = True
    # The numbers of a vocabulary may have gaps, whose tokens are None.
    if any(token is not None and token.startswith("##") for token in tokens):
        continues = [token is not None and token.startswith("##") for token in tokens]
    else:
        continues = [token is not None and not token.startswith(("Ġ", "▁")) for token in tokens]
    return special, np.array(continues)


def tokens_around(tokenizer) -> tuple[list[int], list[int]]:  # noqa: ANN001
    """Return the ids that the tokenizer puts before and after a single text."""
    plain = tokenizer("a", add_special_tokens=False).input_ids
    full = tokenizer("a").input_ids
    if full != plain:
        # The tokenizer adds tokens: they surround the text.
        start = next(n for n in range(len(full)) if full[n : n + len(plain)] == plain)
        return full[:start], full[start + len(plain) :]
    # It adds none, so take what BERT does, as far as the vocabulary has these tokens.
    ends = (tokenizer.cls_token_id, tokenizer.sep_token_id)
    return tuple([] if token is None else [token] for token in ends)  # type: ignore[return-value]


class MLMSettings(MLMDataFields, TextSettings):
    """See `Settings`."""


class MLMCodec(TextCodec):
    """Texts in blocks between special tokens. Training masks differ between epochs, evaluation masks are fixed.

    In predict, the mask token typed in a text is the gap to fill.
    """

    settings: MLMSettings
    draws_by_epoch: ClassVar[bool] = True

    def make_encoder(self, reader: SourceReader, first: Row, prompts_only: bool) -> tuple[Encoder, dict[str, Any]]:
        if self.tokenizer.mask_token_id is None:
            raise UserError("the tokenizer has no mask token. Use the tokenizer of a masked language model")
        column = self.settings.text_column
        check_text_column(first, column)
        separated = self.settings.join and not prompts_only and self.tokenizer.sep_token_id is not None
        between = [self.tokenizer.sep_token_id] if separated else []
        encoder = TextRowEncoder(column, TextEncoder(self.tokenizer), begin=[], end=between,
                                 gap=self.tokenizer.mask_token if prompts_only else None,
                                 max_length=self._block_length() if prompts_only else None)
        return encoder, {"format": "text"}

    def _block_length(self) -> int:
        before, after = tokens_around(self.tokenizer)
        return self.settings.max_length - len(before) - len(after)

    def encoding_settings(self) -> dict[str, Any]:
        return {"text_column": self.settings.text_column, "join": self.settings.join,
                "max_length": self.settings.max_length}

    def make_items(self, rows: RowSet, by_source: bool) -> MaskedSet:
        special, continues = vocabulary_flags(self.tokenizer)
        masker = Masker(self.tokenizer.mask_token_id, special, continues, self.settings.mlm_probability,
                        self.settings.whole_word_masking)
        blocks = BlockSet(rows, self._block_length(), self.settings.join, by_source)
        return MaskedSet(blocks, masker, tokens_around(self.tokenizer), self.settings.seed)

    def is_scored(self, item: dict[str, Any], role: str) -> bool:
        if (item["labels"] != IGNORED).any():
            return True
        return role == "train" and not self._special[item["input_ids"]].all()  # masks differ between epochs

    @cached_property
    def _special(self) -> np.ndarray:
        """[V] bool, True for special tokens."""
        return vocabulary_flags(self.tokenizer)[0]

    def prompt_of(self, row: dict[str, Any]) -> dict[str, Any]:
        before, after = tokens_around(self.tokenizer)
        ids = row["input_ids"][: self._block_length()].tolist()
        return {"input_ids": [*before, *ids, *after], "index": row["index"]}

    @property
    def prompt_side(self) -> str:
        """Padding side in predict."""
        return "right"

    def decode_batch(self, batch: dict[str, Any], outputs: Any) -> dict[int, Any]:
        """Return (text with each gap filled by its most likely token, candidates of each gap) by `index`.

        Args:
            batch: The batch, with `input_ids` [B, T].
            outputs: Candidates [G, K] and their probabilities [G, K], for all gaps of the batch, row by row.
        """
        tokens, probabilities = (part.tolist() for part in outputs)
        fills: list[list[Any]] = []
        ids, gap = batch["input_ids"].tolist(), 0
        for row in ids:
            fills.append([])
            # The candidates of all gaps come in one list, row by row; `gap` is the next.
            for position in [position for position, token in enumerate(row) if token == self.tokenizer.mask_token_id]:
                # Filled in place, so that the text is decoded with all gaps closed.
                row[position] = tokens[gap][0]
                fills[-1].append([{"token": self.tokenizer.decode([token]), "probability": probability}
                                  for token, probability in zip(tokens[gap], probabilities[gap])])
                gap += 1
        texts = self.decode_prompts(ids)
        # -1 is the index of padding rows.
        return {index: pair for index, *pair in zip(batch["index"].tolist(), texts, fills) if index >= 0}

    def predict(self, rows: RowSet, outputs: dict[int, Any]) -> Predictions:
        """Return records with `prediction`, the filled text, and `fills`, each gap's candidates, most likely first.

        Raises:
            UserError: No text has a gap.
        """
        if not any(fills for _, fills in outputs.values()):
            raise UserError(f"predict fills the mask tokens ({self.tokenizer.mask_token}) in the texts of "
                            "data.predict_source, but no text has one. Add them")
        records = [{**self.example(rows, index), "prediction": text, "fills": fills}
                   for index, (text, fills) in sorted(outputs.items())]
        return Predictions(records, {}, {})


class MLMData(MLMDataFields, TextData):
    """Texts for masked language modelling."""

    codec_class = MLMCodec
