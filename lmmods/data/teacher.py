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
    """Raise UserError unless a teacher has the same vocabulary as the data.

    Its padding token may differ, and its network may have more rows than there are tokens; these are ignored.

    Args:
        tokenizer: Tokenizer of the data.
    """
    has_own = teacher.adapter is not None and os.path.isfile(os.path.join(teacher.adapter, "tokenizer_config.json"))
    path = teacher.adapter if has_own else teacher.pretrained
    teacher_tokenizer = TokenizerOptions(path, trust_remote_code=trust_remote_code).loaded
    ids, teacher_ids = tokenizer.get_vocab(), teacher_tokenizer.tokenizer.get_vocab()
    # A padding token that only one of them has is never predicted.
    padding = {tokenizer.pad_token, *teacher_tokenizer.tokenizer.convert_ids_to_tokens(teacher_tokenizer.new_tokens)}
    tokens = sorted({**ids, **teacher_ids}, key=lambda token: ids.get(token, teacher_ids.get(token)))
    differing = [token for token in tokens if ids.get(token) != teacher_ids.get(token) and token not in padding]
    if differing:
        examples = ", ".join(f"{token!r} ({_describe_id(ids, token)} here, {_describe_id(teacher_ids, token)} there)"
                             for token in differing[:SHOWN])
        raise UserError(f"model.teacher.pretrained is {teacher.pretrained}, but its vocabulary ({path}) differs from "
                        f"data.tokenizer's in {len(differing)} tokens, such as {examples}. Use a teacher with the same "
                        "tokenizer, as distributions are compared token by token.")
    rows = load_config(cast(str, teacher.pretrained), None, None, trust_remote_code).get_text_config().vocab_size
    if not has_own and rows < max(teacher_ids.values()) + 1 - len(teacher_tokenizer.new_tokens):
        raise UserError(f"model.teacher.pretrained is {teacher.pretrained}, but its network has {rows} tokens and its "
                        f"tokenizer {len(teacher_ids)}. Use a model that was trained with this tokenizer.")


def _describe_id(vocabulary: dict[str, int], token: str) -> str:
    return f"id {vocabulary[token]}" if token in vocabulary else "unknown"


# ---------------------------------------------------------------------------------------------------------------------
# Most likely tokens, computed before training.

NO_PLACES = ("The teacher's most likely tokens are unknown for these rows, for example in inspect --parity. Set "
             "model.teacher.top_k to null.")
COMPUTING = "Computing the {top_k} most likely tokens of {teacher} for {tokens:,} target tokens ({role})."


def num_columns(teacher: Teacher, tokenizer: Any, student_rows: int, trust_remote_code: bool = False) -> int:
    """Return how many tokens both distributions cover: the size of the smaller table.

    Raises:
        UserError: There are fewer than `top_k`.
    """
    config = load_config(cast(str, teacher.pretrained), None, None, trust_remote_code).get_text_config()
    size = min(student_rows, max(config.vocab_size, len(tokenizer)))
    if teacher.top_k > size:
        raise UserError(f"model.teacher.top_k is {teacher.top_k}, but must be at most {size}, the size of the "
                        "vocabulary.")
    return size


def number_targets(data: DataModule, stage: str) -> dict[Role, int]:
    """Count the target tokens of the sets of a stage; give each a number, one set after the other.

    Batches contain the numbers from 1 as `teacher_places` [B, T], 0 elsewhere.

    Raises:
        UserError: Rows of a stream are unknown before training.
    """
    if data.streaming and stage == "fit":
        raise UserError("model.teacher.top_k needs a pass over all rows before training, which data.streaming does "
                        "not support. Set model.teacher.top_k to null, or data.streaming to false")
    counts: dict[Role, int] = {}
    for role in STAGE_ROLES[stage]:
        if role in data.sets and role != "predict":
            items = data.unpacked_items(role)
            sizes = np.fromiter((is_scored(items[index]["labels"]).sum() for index in range(len(items))), np.int64,
                                len(items))
            data.fill_column(role, PLACES, _TargetIndices(sum(counts.values()) + np.cumsum(sizes) - sizes))
            counts[role] = int(sizes.sum())
    return counts


class _TargetIndices:
    """Returns the numbers of an item's target tokens; picklable, for processes that prepare batches.

    Args:
        starts: Number of target tokens before each item.
    """

    def __init__(self, starts: np.ndarray) -> None:
        self._starts = starts

    def __call__(self, index: int, item: dict[str, Any]) -> np.ndarray:
        is_target = is_scored(item["labels"])
        return np.where(is_target, self._starts[index] + np.cumsum(is_target), 0)


def is_scored(labels: np.ndarray) -> np.ndarray:
    """Return where a token is a target of a causal LM: it has a label, and is not the first."""
    return (labels != IGNORED) & (np.arange(len(labels)) > 0)


def teacher_store(data: DataModule, role: Role, network: dict[str, Any], count: int, top_k: int, size: int
                  ) -> ArrayStore:
    """Return the store of a teacher's most likely tokens for the target tokens of a set.

    Args:
        network: Everything that determines the teacher's outputs.
        count: Number of target tokens.
        size: Number of tokens that its distributions cover.
    """
    rows, items = data.rows(role), data.unpacked_items(role)
    key = fingerprint({"teacher": network, "top_k": top_k, "size": size,
                       "stores": [store.name for store in rows.stores], "rows": fingerprints.of_array(rows.selection),
                       "lengths": fingerprints.of_array(items.lengths), "max_length": data.max_length,
                       "parts": data.mixes and not data.streaming})
    return ArrayStore(cache_folder(data.cache_dir) / f"{REFERENCE}-{key}",
                      {"ids": (count, top_k), "logps": (count, top_k + 1)}, "tokens of a teacher")


class TeacherTopKTable:
    """A teacher's most likely tokens for each target token.

    Args:
        parts: `ids` and `logps` of each set, in the order of their target indices.
    """

    def __init__(self, parts: list[dict[str, np.ndarray]], top_k: int) -> None:
        self._parts, self._top_k = parts, top_k
        self._ends = np.cumsum([0, *(len(part["ids"]) for part in parts)])

    def __call__(self, indices: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return ids [..., k] int32 and log-probabilities [..., k + 1] float32 by target index; 0 for index 0."""
        flat = indices.ravel() - 1
        ids = np.zeros((len(flat), self._top_k), np.int32)
        logps = np.zeros((len(flat), self._top_k + 1), np.float32)
        for part, start, end in zip(self._parts, self._ends, self._ends[1:], strict=False):
            positions = np.flatnonzero((flat >= start) & (flat < end))
            ids[positions] = part["ids"][flat[positions] - start]
            logps[positions] = part["logps"][flat[positions] - start]
        return ids.reshape(*indices.shape, -1), logps.reshape(*indices.shape, -1)


def gather_top_k(parts: Iterator[tuple[np.ndarray, np.ndarray, np.ndarray]], start: int, count: int, top_k: int
                ) -> dict[str, np.ndarray]:
    """Return `ids` and `logps` of a set from parts of it: target indices [N], 0 for none, ids and log-probabilities.

    Args:
        start: Number of target tokens of the sets before it.
        count: Number of target tokens of this one.
    """
    top = {"ids": np.zeros((count, top_k), np.int32), "logps": np.zeros((count, top_k + 1), np.float32)}
    for indices, ids, logps in parts:
        is_target = indices > 0
        top["ids"][indices[is_target] - 1 - start] = ids[is_target]
        top["logps"][indices[is_target] - 1 - start] = logps[is_target]
    return top
