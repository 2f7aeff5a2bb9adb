"""Rows that repeat an earlier one: equal ones by a hash of all that is learned of them, nearly equal ones by MinHash
(Broder 1997) of their text.

Memory: 16 bytes for each row, for nearly equal ones 8 more for each band of the signature (18 at a threshold of 0.8);
no text is held.
"""

import os
import tempfile
import zipfile
import zlib
from collections import defaultdict
from collections.abc import Callable, Sequence
from functools import lru_cache
from hashlib import blake2b
from pathlib import Path
from typing import NamedTuple

import numpy as np
from tqdm import tqdm

from lmmods.data.encode.words import ngram_hashes, normalise, words_in
from lmmods.data.store.cache import reporting_writes

PERMUTATIONS = 128
SHINGLE = 5  # words
FOUND = 0.98  # probability of finding a pair whose similarity is just the threshold
AT_ONCE = 256  # shingles whose permutations are computed together; they fit into the cache of a core
DAMAGED = (OSError, ValueError, KeyError, EOFError, zipfile.BadZipFile, zlib.error)


class Duplicates(NamedTuple):
    """Rows to remove.

    Args:
        rows: Indices of the rows, int64 ascending.
        of: For each, the index of the row that stays instead.
        near: For each, True if it is only nearly equal.
    """

    rows: np.ndarray
    of: np.ndarray
    near: np.ndarray


def find_duplicates(indices: Sequence[int], texts_of: Callable[[int], list[str]], threshold: float | None,
                    encoded_of: Callable[[int], bytes] = lambda row: b"",
                    context_of: Callable[[int], str] = lambda row: "") -> Duplicates:
    """Find the rows that repeat an earlier row, which stays.

    Args:
        indices: Indices of the rows, in order.
        texts_of: Returns the texts of a row. A row without any is not a duplicate.
        threshold: Minimum Jaccard similarity of the word 5-grams of two rows that are nearly equal; None finds equal
            rows only. Of nearly equal rows, each is compared with those that stay.
        encoded_of: Returns the tokens and labels of a row, which equal rows have in common.
        context_of: Returns what equal and nearly equal rows have in common besides their texts.
    """
    count = len(indices)
    digests, has_text = np.zeros((count, 2), np.uint64), np.zeros(count, bool)
    signer = None if threshold is None else Signer(threshold)
    bands, has_words = np.zeros((signer.bands if signer else 0, count), np.uint64), np.zeros(count, bool)
    # As in `build_store`: a bar on terminals only, and only after two seconds.
    for index, row in enumerate(tqdm(indices, desc="comparing", unit=" rows", disable=None, delay=2)):
        text = normalise(texts_of(row))
        has_text[index] = bool(text)
        context = context_of(row).encode(errors="surrogatepass")
        parts = text.encode(errors="surrogatepass"), context, encoded_of(row)
        digest = blake2b(b"".join(len(part).to_bytes(8, "little") + part for part in parts), digest_size=16).digest()
        digests[index] = np.frombuffer(digest, "<u8")
        if signer is not None and len(grams := shingles(text)):
            # Added, so that rows of different contexts share no band.
            context_hash = np.frombuffer(blake2b(context, digest_size=8).digest(), "<u8") if context else np.uint64(0)
            has_words[index], bands[:, index] = True, signer(grams) + context_hash
    first = _first_equal(digests)
    first[~has_text] = np.flatnonzero(~has_text)
    stays = first == np.arange(count)
    near = np.full(count, -1)
    if threshold is not None:
        near = _find_near(bands, np.flatnonzero(stays & has_words), threshold, lambda index: texts_of(indices[index]))
    original = np.where(near >= 0, near, first)
    repeated = np.flatnonzero(original != np.arange(count))
    # An equal row may repeat one that is itself removed.
    rows = np.asarray(indices, np.int64)
    return Duplicates(rows[repeated], rows[original[original[repeated]]], near[first[repeated]] >= 0)


def _first_equal(digests: np.ndarray) -> np.ndarray:
    """Return the index of the first equal row, for each row of [N, 2]."""
    order = np.lexsort(digests.T)  # stable
    begins = np.ones(len(order), bool)
    begins[1:] = (digests[order[1:]] != digests[order[:-1]]).any(1)
    first = np.empty(len(order), np.int64)
    first[order] = order[np.flatnonzero(begins)[np.cumsum(begins) - 1]] if len(order) else order
    return first


def shingles(text: str) -> np.ndarray:
    """Return the unique hashes of a text's word 5-grams, ascending, or of all its words if it is shorter."""
    words = words_in(text)
    return np.unique(ngram_hashes(words, min(SHINGLE, max(len(words), 1))))


def compute_similarity(first: np.ndarray, second: np.ndarray) -> float:
    """Return the Jaccard similarity of two sets of shingles: their intersection divided by their union."""
    num_shared = len(np.intersect1d(first, second, assume_unique=True))
    return num_shared / (len(first) + len(second) - num_shared)


class Signer:
    """Computes the bands of MinHash signatures: rows that share one are compared.

    Args:
        threshold: Similarity of the pairs to find. The bands are as long as possible while `FOUND` of these pairs are
            found.
    """

    def __init__(self, threshold: float) -> None:
        self.size = next(size for size in range(PERMUTATIONS, 0, -1)
                         if 1 - (1 - threshold**size) ** (PERMUTATIONS // size) >= FOUND or size == 1)
        self.bands = PERMUTATIONS // self.size
        random = np.random.default_rng(0)
        self._factors = random.integers(0, 2**64, PERMUTATIONS, np.uint64) | np.uint64(1)
        self._added = random.integers(0, 2**64, PERMUTATIONS, np.uint64)
        self._mixed = random.integers(0, 2**64, self.size, np.uint64) | np.uint64(1)

    def signature(self, hashes: np.ndarray) -> np.ndarray:
        """Return the minimum of each permutation over a set of hashes, uint64 [PERMUTATIONS]."""
        parts = [(hashes[start : start + AT_ONCE, None] * self._factors + self._added).min(0)
                 for start in range(0, len(hashes), AT_ONCE)]
        return np.min(parts, 0)

    def __call__(self, hashes: np.ndarray) -> np.ndarray:
        """Return a hash of each band of the signature, uint64 [bands]."""
        parts = self.signature(hashes)[: self.bands * self.size].reshape(self.bands, self.size)
        return (parts * self._mixed).sum(1, dtype=np.uint64)


def _find_near(bands: np.ndarray, indices: np.ndarray, threshold: float, texts_of: Callable[[int], list[str]]
               ) -> np.ndarray:
    """Return, for each row, the index of the first earlier row that stays and is nearly equal; -1 if there is none.

    Args:
        bands: Hashes of the bands of each row, [bands, N].
        indices: Rows to compare, ascending.
    """
    groups, members, num_groups = [], [], 0
    for band in bands:
        values = band[indices]
        order = np.argsort(values, kind="stable")
        ordered = values[order]
        starts = np.ones(len(ordered), bool)
        starts[1:] = ordered[1:] != ordered[:-1]
        group_of = np.cumsum(starts) - 1
        # Most rows share this band with no other.
        shared = np.bincount(group_of)[group_of] > 1
        groups.append(group_of[shared] + num_groups)
        members.append(indices[order[shared]])
        num_groups += len(ordered)
    group, member = np.concatenate(groups), np.concatenate(members)
    order = np.argsort(member, kind="stable")
    group, member = group[order], member[order]
    rows, starts_of_rows = np.unique(member, return_index=True)
    duplicate_of = np.full(bands.shape[1], -1)
    staying: defaultdict[int, list[int]] = defaultdict(list)  # group -> its rows that stay
    read = lru_cache(1 << 12)(lambda index: shingles(normalise(texts_of(index))))
    for row, start, end in zip(rows.tolist(), starts_of_rows, [*starts_of_rows[1:], len(group)], strict=False):
        row_groups = group[start:end].tolist()
        candidates = sorted({candidate for group_index in row_groups for candidate in staying.get(group_index, ())})
        match = next((candidate for candidate in candidates
                      if compute_similarity(read(row), read(candidate)) >= threshold), None)
        if match is not None:
            duplicate_of[row] = match
            continue
        for group_index in row_groups:
            staying[group_index].append(row)
    return duplicate_of


def read_duplicates(path: Path) -> Duplicates | None:
    """Read a file of the cache; None if it is missing or damaged."""
    try:
        with np.load(path, allow_pickle=False) as file:
            return Duplicates(*(file[name] for name in Duplicates._fields))
    except DAMAGED:
        return None


def write_duplicates(path: Path, duplicates: Duplicates) -> None:
    """Write a file of the cache, so that no process sees half of it. Raises UserError if it cannot be written."""
    with reporting_writes(path.parent):
        path.parent.mkdir(parents=True, exist_ok=True)
        descriptor, temporary = tempfile.mkstemp(prefix=f"{path.name}.tmp-", dir=path.parent)
        with open(descriptor, "wb") as file:
            np.savez(file, **duplicates._asdict())
        os.replace(temporary, path)
