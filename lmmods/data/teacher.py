"""A teacher that a network learns from: its vocabulary, and its most likely tokens, if they are precomputed.

These are a folder of the cache, named by the fingerprint of everything they depend on and used by both engines. The
scored tokens of all sets of a command are numbered from 1, set by set and row by row; batches hold the numbers.

    ids.npy         [tokens, k] int32, most likely first
    logps.npy       [tokens, k + 1] float32: their log-probabilities, and that of all other tokens together
    manifest.json   their sizes and checksums
"""

import os
from collections.abc import Iterator
from typing import Any, cast

import numpy as np

from lmmods.core import fingerprints
from lmmods.core.errors import UserError
from lmmods.core.hardware import REFERENCE, cache_folder
from lmmods.core.hf_config import load_config
from lmmods.core.labels import IGNORED
from lmmods.core.settings import Teacher
from lmmods.data.base import DataModule
from lmmods.data.batch.collate import PLACES
from lmmods.data.encode.tokenizer import TokenizerOptions
from lmmods.data.read.by_role import STAGE_ROLES, Role
from lmmods.data.store.cache import fingerprint
from lmmods.data.store.references import ArrayStore

SHOWN = 3  # tokens named in a message


def check_teacher(teacher: Teacher, tokenizer: Any, trust_remote_code: bool = False) -> None:
    """Raise UserError unless a teacher has the vocabulary of the data, whose ids its distributions are over.

    Its padding token may be another, and its network may have more rows than there are tokens: these are left out.

    Args:
        tokenizer: Of the data.
    """
    has_own = teacher.adapter is not None and os.path.isfile(os.path.join(teacher.adapter, "tokenizer_config.json"))
    path = teacher.adapter if has_own else teacher.pretrained
    theirs = TokenizerOptions(path, trust_remote_code=trust_remote_code).loaded
    ours, known = tokenizer.get_vocab(), theirs.tokenizer.get_vocab()
    # A padding token that only one of them has is never predicted.
    padding = {tokenizer.pad_token, *theirs.tokenizer.convert_ids_to_tokens(theirs.new_tokens)}
    differing = [token for token in sorted({**ours, **known}, key=lambda token: ours.get(token, known.get(token)))
                 if ours.get(token) != known.get(token) and token not in padding]
    if differing:
        named = ", ".join(f"{token!r} ({_place(ours, token)} here, {_place(known, token)} there)"
                          for token in differing[:SHOWN])
        raise UserError(f"model.teacher.pretrained is {teacher.pretrained}, whose vocabulary ({path}) is not that of "
                        f"data.tokenizer: {len(differing)} tokens differ, such as {named}. Distributions are compared "
                        "token by token, so take a teacher with the same tokenizer.")
    rows = load_config(cast(str, teacher.pretrained), None, None, trust_remote_code).get_text_config().vocab_size
    if not has_own and rows < max(known.values()) + 1 - len(theirs.new_tokens):
        raise UserError(f"model.teacher.pretrained is {teacher.pretrained}, whose network knows {rows} tokens, but its "
                        f"tokenizer has {len(known)}. Name a model that was trained with this tokenizer.")


def _place(vocabulary: dict[str, int], token: str) -> str:
    return f"id {vocabulary[token]}" if token in vocabulary else "unknown"


# ---------------------------------------------------------------------------------------------------------------------
# Most likely tokens, computed before training.

NO_PLACES = ("A teacher's most likely tokens are not known for these rows, such as those of inspect --parity. Set "
             "model.teacher.top_k to null there.")
COMPUTING = "Computing the {top_k} most likely tokens of {teacher} for {tokens:,} target tokens ({role})."


def num_columns(teacher: Teacher, tokenizer: Any, student_rows: int, trust_remote_code: bool = False) -> int:
    """Return how many tokens both distributions are over: of the smaller table.

    Raises:
        UserError: There are fewer than `top_k`.
    """
    config = load_config(cast(str, teacher.pretrained), None, None, trust_remote_code).get_text_config()
    size = min(student_rows, max(config.vocab_size, len(tokenizer)))
    if teacher.top_k > size:
        raise UserError(f"model.teacher.top_k is {teacher.top_k}, but must be at most {size}, the size of the "
                        "vocabulary.")
    return size


def number_scored(data: DataModule, stage: str) -> dict[Role, int]:
    """Number the scored tokens of the sets of a stage, one set after the other; return how many each has.

    Batches hold the numbers from 1 as `teacher_places` [B, T], 0 elsewhere.

    Raises:
        UserError: Rows of a stream are not known before training.
    """
    if data.streaming and stage == "fit":
        raise UserError("model.teacher.top_k goes through all rows before training, which data.streaming does not "
                        "allow: set one of them to null, or false")
    counts: dict[Role, int] = {}
    for role in STAGE_ROLES[stage]:
        if role in data.sets and role != "predict":
            items = data.unpacked_items(role)
            sizes = np.fromiter((is_scored(items[index]["labels"]).sum() for index in range(len(items))), np.int64,
                                len(items))
            data.fill_column(role, PLACES, _Numbers(sum(counts.values()) + np.cumsum(sizes) - sizes))
            counts[role] = int(sizes.sum())
    return counts


class _Numbers:
    """Numbers of the scored tokens of an item; picklable, for processes that prepare batches.

    Args:
        starts: Scored tokens before each item.
    """

    def __init__(self, starts: np.ndarray) -> None:
        self._starts = starts

    def __call__(self, place: int, item: dict[str, Any]) -> np.ndarray:
        scored = is_scored(item["labels"])
        return np.where(scored, self._starts[place] + np.cumsum(scored), 0)


def is_scored(labels: np.ndarray) -> np.ndarray:
    """Return True where a causal LM is scored on a token: where it has a label, and is not the first."""
    return (labels != IGNORED) & (np.arange(len(labels)) > 0)


def teacher_store(data: DataModule, role: Role, network: dict[str, Any], count: int, top_k: int, size: int
                  ) -> ArrayStore:
    """Return the store of a teacher's most likely tokens for the target tokens of a set.

    Args:
        network: All that determines the teacher's numbers.
        count: Scored tokens.
        size: Tokens that its distributions are over.
    """
    rows, items = data.rows(role), data.unpacked_items(role)
    key = fingerprint({"teacher": network, "top_k": top_k, "size": size,
                       "stores": [store.name for store in rows.stores], "rows": fingerprints.of_array(rows.chosen),
                       "lengths": fingerprints.of_array(items.lengths), "max_length": data.max_length,
                       "parts": data.mixes and not data.streaming})
    return ArrayStore(cache_folder(data.cache_dir) / f"{REFERENCE}-{key}",
                      {"ids": (count, top_k), "logps": (count, top_k + 1)}, "tokens of a teacher")


class TeacherTopKTable:
    """A teacher's most likely tokens for each target token.

    Args:
        parts: `ids` and `logps` of each set, in the order of their numbers.
    """

    def __init__(self, parts: list[dict[str, np.ndarray]], top_k: int) -> None:
        self._parts, self._top_k = parts, top_k
        self._ends = np.cumsum([0, *(len(part["ids"]) for part in parts)])

    def __call__(self, numbers: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return ids [..., k] int32 and log-probabilities [..., k + 1] float32 by number; 0 where that is 0."""
        flat = numbers.ravel() - 1
        ids = np.zeros((len(flat), self._top_k), np.int32)
        logps = np.zeros((len(flat), self._top_k + 1), np.float32)
        for part, begin, end in zip(self._parts, self._ends, self._ends[1:], strict=False):
            is_own = np.flatnonzero((flat >= begin) & (flat < end))
            ids[is_own], logps[is_own] = part["ids"][flat[is_own] - begin], part["logps"][flat[is_own] - begin]
        return ids.reshape(*numbers.shape, -1), logps.reshape(*numbers.shape, -1)


def gather_top_k(parts: Iterator[tuple[np.ndarray, np.ndarray, np.ndarray]], begin: int, count: int, top_k: int
             ) -> dict[str, np.ndarray]:
    """Return `ids` and `logps` of a set from parts of it: numbers [N], 0 for none, ids [N, k], log-probabilities.

    Args:
        begin: Scored tokens of the sets before it.
        count: Those of this one.
    """
    top = {"ids": np.zeros((count, top_k), np.int32), "logps": np.zeros((count, top_k + 1), np.float32)}
    for numbers, ids, logps in parts:
        known = numbers > 0
        top["ids"][numbers[known] - 1 - begin] = ids[known]
        top["logps"][numbers[known] - 1 - begin] = logps[known]
    return top
