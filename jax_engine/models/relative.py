"""Disentangled attention (DeBERTa, He et al. 2021): scores between content and relative positions."""

from dataclasses import dataclass
from functools import cache
from typing import Literal, NamedTuple

import jax.numpy as jnp
import numpy as np
from jax import Array


@dataclass(frozen=True)
class Relative:
    """Relative-position table of 2 x span rows, one per bucket of query-key distances, shared by all layers.

    Rows are projected to keys, scored by the queries (content to position), and to queries (position to content).

    Args:
        max_distance: Distances from half the span up to this one use logarithmic buckets; None: one bucket each.
        scores: Scores to add to the content-to-content scores.
        normed: True if the table is normed.
        shared: True if rows are projected by the content's query and key matrices.
    """

    span: int
    max_distance: int | None
    scores: tuple[Literal["c2p", "p2c"], ...]
    normed: bool
    shared: bool

    def buckets(self, length: int) -> np.ndarray:
        """Return the table row for each query and key of rows of this length, [length, length]."""
        return _buckets(self.span, self.max_distance, length)


@cache
def _buckets(span: int, max_distance: int | None, length: int) -> np.ndarray:
    # Query minus key: [length, length].
    distance = np.arange(length)[:, None] - np.arange(length)
    if max_distance is not None:
        middle = span // 2
        # float32 as in transformers: its rounding determines buckets at the borders. The maximum sets the logarithm of
        # near distances, which are not used, to 0.
        size = np.maximum(np.abs(distance), middle).astype(np.float32) / np.float32(middle)
        fraction = np.log(size) / np.log(np.float32((max_distance - 1) / middle))
        far = np.ceil(fraction * np.float32(middle - 1)).astype(np.int64) + middle
        distance = np.where(np.abs(distance) <= middle, distance, far * np.sign(distance))
    return np.clip(distance + span, 0, 2 * span - 1)


class Table(NamedTuple):
    """The relative-position table [2 x span, D], and the row index [T, T] by query and key."""

    rows: Array
    buckets: Array


def content_to_position(queries: Array, keys: Array, buckets: Array) -> Array:
    """Score queries [B, T, heads, head_dim] against the table's keys [rows, heads, head_dim]: [B, heads, T, T]."""
    # Score every row of the table, then pick by distance, so that no table rows [T, T, D] are formed.
    by_row = jnp.einsum("bthd,rhd->bhtr", queries, keys, preferred_element_type=jnp.float32)
    return jnp.take_along_axis(by_row, buckets[None, None], axis=-1)


def position_to_content(queries: Array, keys: Array, buckets: Array) -> Array:
    """Score the table's queries [rows, heads, head_dim] against keys [B, T, heads, head_dim]: [B, heads, T, T]."""
    # Swap the roles of queries and keys: [B, heads, key, query]; then transpose the result.
    return content_to_position(keys, queries, buckets.T).swapaxes(-1, -2)
