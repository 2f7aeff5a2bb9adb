"""Words and n-grams of texts, by which rows are compared across files."""

import re
import unicodedata
from collections.abc import Iterable
from functools import lru_cache
from hashlib import blake2b
from typing import Any

import numpy as np

_WITHOUT_SPACES = "\u3005-\u3007\u3040-\u30ff\u3400-\u4dbf\u4e00-\u9fff\uf900-\ufaff"  # Chinese and Japanese
WORD = re.compile(rf"[{_WITHOUT_SPACES}]|[^\W{_WITHOUT_SPACES}]+")
_FACTOR = np.uint64(0x9E3779B97F4A7C15)  # odd, so that no bit of a word is lost


def texts_in(value: Any) -> list[str]:
    """Return all strings in a value, at any depth."""
    if isinstance(value, str):
        return [value]
    items = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return [text for item in items for text in texts_in(item)]


def normalise(texts: Iterable[str]) -> str:
    """Join texts, with Unicode's composed characters and one space for any stretch of spaces and line breaks."""
    return " ".join(unicodedata.normalize("NFC", "\n".join(texts)).split())


def words_in(text: str) -> list[str]:
    """Return the words in lower case, without punctuation; each Chinese or Japanese character is a word."""
    return WORD.findall(unicodedata.normalize("NFC", text).lower())


@lru_cache(1 << 18)
def _hash(word: str) -> int:
    # Not Python's own hash, which is another one in each process.
    return int.from_bytes(blake2b(word.encode(errors="surrogatepass"), digest_size=8).digest(), "little")


def ngram_hashes(words: list[str], size: int) -> np.ndarray:
    """Return a hash of each `size` consecutive words, uint64; of fewer words, none."""
    count = len(words) - size + 1
    if count <= 0:
        return np.empty(0, np.uint64)
    hashes = np.fromiter(map(_hash, words), np.uint64, len(words))
    total = np.zeros(count, np.uint64)
    for offset in range(size):  # a polynomial, modulo 2^64
        total = total * _FACTOR + hashes[offset : offset + count]
    return total
