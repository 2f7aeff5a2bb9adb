"""Rotary position embeddings (RoPE, Su et al. 2021) and their scaled variants."""

from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from transformers import PreTrainedConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from lmmods.core.errors import UserError, one_line

Angles = tuple[Array, Array]  # cosines and sines, each float32 [B, T, 1, rotated features]


@dataclass(frozen=True)
class Rope:
    """A rotary embedding of the first features of each head. The other features are not rotated.

    Args:
        inverse_frequencies: Radians per position of each pair of features; 0 does not rotate.
        factor: Factor on cosines and sines, which scales the scores (YaRN, Peng et al. 2023).
        interleaved: Pair adjacent features instead of features i and i + n / 2.
        length: Maximum number of tokens with these frequencies; longer texts use `long` or `growth`.
        long: Frequencies of longer texts (LongRoPE, Ding et al. 2024).
        growth: Factor that lowers the frequencies with the length of longer texts (dynamic NTK).
        axes: For positions of several axes, such as height and width, the axis of each pair of features.
    """

    inverse_frequencies: tuple[float, ...]
    factor: float = 1.0
    interleaved: bool = False
    length: int = 0
    long: tuple[float, ...] | None = None
    growth: float | None = None
    axes: tuple[int, ...] | None = None

    @property
    def by_length(self) -> bool:
        """True if the frequencies depend on the length of the text."""
        return self.long is not None or self.growth is not None

    def without_rotation(self) -> "Rope":
        """Return the rope with frequencies of zero, for NoPE layers (Kazemnejad et al. 2023)."""
        return Rope((0.0,) * len(self.inverse_frequencies), interleaved=self.interleaved)

    def angles(self, position_ids: Array, lengths: Array | None) -> Angles:
        """Return cosines and sines at positions [B, T], or [B, T, axes].

        Args:
            lengths: Length of each position's text, [B, T] or [B, 1]; may be None unless `by_length`.
        """
        frequencies = jnp.array(self.inverse_frequencies, jnp.float32)
        if self.long is not None:
            # [n / 2] -> [B, T, n / 2], because texts of a batch differ in their frequencies.
            frequencies = jnp.where(lengths[..., None] > self.length, jnp.array(self.long, jnp.float32), frequencies)
        if self.growth is not None:
            # The base grows by stretch ** (d / (d - 2)) for heads of d features, which multiplies frequency i by
            # stretch ** (-i / (d / 2 - 1)). Texts up to `length` have a stretch of 1.
            stretch = self.growth * jnp.maximum(lengths, self.length) / self.length - (self.growth - 1)
            pairs = len(self.inverse_frequencies)
            frequencies = frequencies * stretch[..., None] ** -(np.arange(pairs, dtype=np.float32) / (pairs - 1))
        # [B, T, 1], or the position of each pair [B, T, n / 2].
        positions = position_ids[..., None] if position_ids.ndim == 2 else position_ids[..., np.array(self.axes)]
        angles = (positions.astype(jnp.float32) * frequencies)[:, :, None]
        # Both features of a pair get the same angle: [B, T, 1, n / 2] -> [B, T, 1, n].
        angles = jnp.repeat(angles, 2, -1) if self.interleaved else jnp.concatenate([angles, angles], -1)
        return jnp.cos(angles) * self.factor, jnp.sin(angles) * self.factor


def rope_of(config: PreTrainedConfig, layer_type: str | None = None, *, partial: bool = False,
            interleaved: bool = False) -> Rope:
    """Return the rotary embedding of a configuration's `rope_parameters`. Scaled types use transformers' formulas.

    Args:
        layer_type: Type of the layers, if parameters differ between layers.
        partial: The family supports partial rotation of heads.

    Raises:
        UserError: transformers does not support the type, or parameters are missing.
    """
    parameters = config.rope_parameters if layer_type is None else config.rope_parameters[layer_type]
    rope_type, fraction = parameters.get("rope_type", "default"), parameters.get("partial_rotary_factor", 1.0)
    if fraction != 1.0 and not partial:
        raise _unsupported(parameters, f"{config.model_type} rotates whole heads")
    if rope_type == "default":
        return Rope(_plain_frequencies(config, parameters, fraction), interleaved=interleaved)
    if rope_type not in ROPE_INIT_FUNCTIONS:
        raise _unsupported(parameters, f"supported types are default, {', '.join(sorted(ROPE_INIT_FUNCTIONS))}")

    def scaled(length: int | None = None) -> tuple[tuple[float, ...], float]:
        # transformers' functions return torch tensors; a tuple of floats makes the rope hashable.
        frequencies, factor = ROPE_INIT_FUNCTIONS[rope_type](config, seq_len=length, layer_type=layer_type)
        return tuple(frequencies.tolist()), float(factor)

    try:
        frequencies, factor = scaled()
        rope = Rope(frequencies, factor, interleaved)
        if rope_type == "dynamic":
            return replace(rope, length=config.max_position_embeddings, growth=float(parameters["factor"]))
        if rope_type == "longrope":
            length = parameters["original_max_position_embeddings"]
            # One token above the original length selects the long frequencies.
            return replace(rope, length=length, long=scaled(length + 1)[0])
    except (KeyError, TypeError, ValueError, ArithmeticError, RuntimeError) as error:
        raise _unsupported(parameters, f"{type(error).__name__} {one_line(error)}") from error
    return rope


def image_rope_of(config: PreTrainedConfig, interleaved: bool) -> Rope:
    """Return the rope of a decoder whose image tokens have positions in time, height and width (M-RoPE).

    Args:
        interleaved: The axes of pairs alternate; otherwise each axis has a section of pairs.

    Raises:
        UserError: The type is not supported, or the sections do not fit the heads.
    """
    rope, parameters = rope_of(config), config.rope_parameters
    sections, num_pairs = parameters.get("mrope_section") or (), len(rope.inverse_frequencies)
    if rope.by_length:
        raise _unsupported(parameters, "the frequencies would depend on the length of a text with images")
    if len(sections) != 3 or sum(sections) != num_pairs:
        raise _unsupported(parameters, f"mrope_section must have three numbers whose sum is {num_pairs}")
    if not interleaved:
        return replace(rope, axes=tuple(axis for axis, size in enumerate(sections) for _ in range(size)))
    # Time, height, width, time, ..., until the pairs of height and width are used up; the rest is time.
    return replace(rope, axes=tuple(pair % 3 if pair < 3 * sections[pair % 3] else 0 for pair in range(num_pairs)))


def _plain_frequencies(config: PreTrainedConfig, parameters: dict[str, Any], fraction: float) -> tuple[float, ...]:
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    size = int(head_dim * fraction)
    frequencies = 1.0 / np.float32(parameters["rope_theta"]) ** (np.arange(0, size, 2, dtype=np.float32) / size)
    return tuple(frequencies.tolist())


def _unsupported(parameters: dict[str, Any], reason: str) -> UserError:
    return UserError(f"model.config: rope_parameters {parameters} are not supported: {reason}. Change them in "
                     "model.config or model.config_overrides.")


def text_lengths(position_ids: Array, real: Array | None) -> Array:
    """Return the length of each position's text [B, T]; a text starts where positions restart.

    Args:
        real: [B, T] bool, False for padding, which is not part of a text. None: no padding.
    """
    # True if the next position continues the same text.
    continues = position_ids[:, 1:] == position_ids[:, :-1] + 1
    if real is not None:
        continues &= real[:, 1:] | ~real[:, :-1]
    # The position of a text's last token is the length - 1. A cumulative minimum from the right gives the index of the
    # nearest last token.
    is_last = jnp.pad(~continues, ((0, 0), (0, 1)), constant_values=True)
    last_indices = jnp.where(is_last, jnp.arange(position_ids.shape[1]), position_ids.shape[1])
    ends = jax.lax.cummin(last_indices, axis=1, reverse=True)
    return jnp.take_along_axis(position_ids, ends, axis=1) + 1


def rotate(x: Array, angles: Angles, interleaved: bool) -> Array:
    """Rotate the first features of x [B, T, heads, head_dim] by their angles, in float32."""
    cos, sin = angles
    rotary, unrotated = jnp.split(x.astype(jnp.float32), [cos.shape[-1]], axis=-1)
    if interleaved:
        # The pair (a, b) becomes (a cos - b sin, b cos + a sin).
        rotated = jnp.stack([-rotary[..., 1::2], rotary[..., 0::2]], -1).reshape(rotary.shape)
    else:
        first, second = jnp.split(rotary, 2, axis=-1)
        rotated = jnp.concatenate([-second, first], -1)
    mixed = rotary * cos + rotated * sin
    return (mixed if unrotated.shape[-1] == 0 else jnp.concatenate([mixed, unrotated], -1)).astype(x.dtype)
