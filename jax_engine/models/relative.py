"""Disentangled attention (DeBERTa, He et al. 2021): content scored against tables of relative positions."""

from dataclasses import dataclass
from functools import cache
from typing import Literal, NamedTuple

import jax.numpy as jnp
import numpy as np
from jax import Array


@dataclass(frozen=True)
class Relative:
    """A table of 2 x span rows, one for each bucket of distances from query to key, shared by all layers.

    Its rows are projected as keys, to be scored by the queries (content to position), and as queries (position to
    content).

    Args:
        longest: Distances from half the span up to this share buckets, the wider the longer; None: one each.
        scores: Which of the two are added to those of content to content.
        normed: Whether the table has a norm.
        shared: Whether the matrices of these projections are those of the content.
    """

    span: int
    longest: int | None
    scores: tuple[Literal["c2p", "p2c"], ...]
    normed: bool
    shared: bool

    def buckets(self, length: int) -> np.ndarray:
        """Row of the table for each query and key of rows of this length: [length, length]."""
        return _buckets(self.span, self.longest, length)


@cache
def _buckets(span: int, longest: int | None, length: int) -> np.ndarray:
    distance = np.arange(length)[:, None] - np.arange(length)
    if longest is not None:
        middle = span // 2
        size = np.maximum(np.abs(distance), middle).astype(np.float32) / np.float32(middle)
        share = np.log(size) / np.log(np.float32((longest - 1) / middle))
        far = np.ceil(share * np.float32(middle - 1)).astype(np.int64) + middle
        distance = np.where(np.abs(distance) <= middle, distance, far * np.sign(distance))
    return np.clip(distance + span, 0, 2 * span - 1)


class Table(NamedTuple):
    """What a layer needs of relative positions: the table [2 x span, D], and its rows [T, T] by query and key."""

    rows: Array
    buckets: Array


def content_to_position(queries: Array, keys: Array, buckets: Array) -> Array:
    """Scores [B, heads, T, T] of queries [B, T, heads, head_dim] and the table's keys [rows, heads, head_dim]."""
    by_row = jnp.einsum("bthd,rhd->bhtr", queries, keys, preferred_element_type=jnp.float32)
    return jnp.take_along_axis(by_row, buckets[None, None], axis=-1)


def position_to_content(queries: Array, keys: Array, buckets: Array) -> Array:
    """Scores [B, heads, T, T] of the table's queries [rows, heads, head_dim] and keys [B, T, heads, head_dim]."""
    return content_to_position(keys, queries, buckets.T).swapaxes(-1, -2)
