"""Masked-language-model rows: special tokens around a block, and masks drawn from (seed, draw, row)."""

from dataclasses import dataclass
from typing import Any

import numpy as np
from torch.utils.data import Dataset

from lmmods.core.labels import IGNORED

MASK_SHARE, RANDOM_SHARE = 0.8, 0.1  # of the chosen tokens; the rest stays as it is (Devlin et al. 2018)


@dataclass
class Masker:
    """BERT's masking.

    Args:
        special: For each id of the vocabulary, whether it is special: such are neither masked nor drawn. [V] bool.
        continues: For each id, whether it goes on with the word before it. [V] bool.
        probability: Share of tokens (or words) to predict.
    """

    mask_id: int
    special: np.ndarray
    continues: np.ndarray
    probability: float
    whole_words: bool

    def __post_init__(self) -> None:
        self._ordinary = np.flatnonzero(~self.special)

    def __call__(self, ids: np.ndarray, random: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
        """Masked ids and labels, both [T]; labels are IGNORED where nothing was chosen."""
        chosen = self._choose(ids, random)
        fate = random.random(len(ids))
        replaced = np.where(fate < MASK_SHARE, self.mask_id, ids)
        swapped = (fate >= MASK_SHARE) & (fate < MASK_SHARE + RANDOM_SHARE)
        replaced = np.where(swapped, random.choice(self._ordinary, len(ids)), replaced)
        return np.where(chosen, replaced, ids), np.where(chosen, ids, IGNORED)

    def _choose(self, ids: np.ndarray, random: np.random.Generator) -> np.ndarray:
        special = self.special[ids]
        draw = random.random(len(ids)) < self.probability
        if self.whole_words:
            goes_on = self.continues[ids] & ~special
            goes_on[1:] &= ~special[:-1]
            goes_on[:1] = False
            draw = draw[np.maximum.accumulate(np.where(goes_on, 0, np.arange(len(ids))))]
        return draw & ~special


class MaskedSet(Dataset):
    """Blocks with special tokens around them and masks. Item -1 is None, a padding row.

    Item number + draw * len(self) is the block `number` with the masks of that draw (an epoch, or a buffer of a
    stream), so that masks depend neither on batches nor on workers and a resumed run draws the same.

    Args:
        blocks: Data set of {input_ids, index} with `lengths`.
        around: Ids before and behind each block.
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
    def truncated(self) -> np.ndarray:
        """Tokens lost from each row."""
        return self.blocks.truncated

    def __getitem__(self, number: int) -> dict[str, Any] | None:
        if number < 0:
            return None
        draw, place = divmod(number, len(self))
        block = self.blocks[place]
        ids = np.concatenate([self.around[0], block["input_ids"], self.around[1]]).astype(np.int64)
        masked, labels = self.masker(ids, np.random.default_rng([self.seed, draw, place]))
        return {"input_ids": masked, "labels": labels, "index": block["index"]}


def vocabulary_flags(tokenizer) -> tuple[np.ndarray, np.ndarray]:  # noqa: ANN001
    """For each id (bool [V]): whether it is special, and whether it continues a word.

    Words are recognised by the vocabulary: `##` continues one in WordPiece; in byte-level and SentencePiece
    vocabularies what does not begin with the sign of a space does.
    """
    size = len(tokenizer)
    tokens = tokenizer.convert_ids_to_tokens(list(range(size)))
    special = np.zeros(size, bool)
    special[[number for number, token in tokenizer.added_tokens_decoder.items() if token.special]] = True
    special[tokenizer.all_special_ids] = True
    if any(token is not None and token.startswith("##") for token in tokens):
        continues = [token is not None and token.startswith("##") for token in tokens]
    else:
        continues = [token is not None and not token.startswith(("Ġ", "▁")) for token in tokens]
    return special, np.array(continues)


def tokens_around(tokenizer) -> tuple[list[int], list[int]]:  # noqa: ANN001
    """Ids that the tokenizer puts before and behind one text."""
    bare = tokenizer("a", add_special_tokens=False).input_ids
    whole = tokenizer("a").input_ids
    if whole != bare:
        start = next(n for n in range(len(whole)) if whole[n : n + len(bare)] == bare)
        return whole[:start], whole[start + len(bare) :]
    ends = (tokenizer.cls_token_id, tokenizer.sep_token_id)
    return tuple([] if token is None else [token] for token in ends)  # type: ignore[return-value]
