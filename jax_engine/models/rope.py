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
    """A rotary embedding of the first features of each head; the others are not rotated.

    Args:
        inverse_frequencies: Radians per position of each pair of features; 0 does not rotate.
        factor: Factor on cosines and sines, which scales the scores (YaRN, Peng et al. 2023).
        interleaved: Pair adjacent features instead of features i and i + n / 2.
        length: Number of tokens above which a text has other frequencies, from `long` or `growth`.
        long: Frequencies of longer texts (LongRoPE, Ding et al. 2024).
        growth: Factor by which frequencies fall with the length of longer texts (dynamic NTK).
    """

    inverse_frequencies: tuple[float, ...]
    factor: float = 1.0
    interleaved: bool = False
    length: int = 0
    long: tuple[float, ...] | None = None
    growth: float | None = None

    @property
    def by_length(self) -> bool:
        """True if the frequencies depend on the length of the text."""
        return self.long is not None or self.growth is not None

    def still(self) -> "Rope":
        """Return a rope of the same form that does not rotate, for NoPE layers (Kazemnejad et al. 2023)."""
        return Rope((0.0,) * len(self.inverse_frequencies), interleaved=self.interleaved)

    def angles(self, position_ids: Array, lengths: Array | None) -> Angles:
        """Return cosines and sines at positions [B, T].

        Args:
            lengths: Length of the text each position belongs to, [B, T] or [B, 1]; may be None unless `by_length`.
        """
        frequencies = jnp.array(self.inverse_frequencies, jnp.float32)
        if self.long is not None:
            # [n / 2] -> [B, T, n / 2], where texts of a batch differ in their frequencies.
            frequencies = jnp.where(lengths[..., None] > self.length, jnp.array(self.long, jnp.float32), frequencies)
        if self.growth is not None:
            # The base grows by stretch ** (d / (d - 2)) for heads of d features, which multiplies frequency i by
            # stretch ** (-i / (d / 2 - 1)). Texts up to `length` have a stretch of 1.
            stretch = self.growth * jnp.maximum(lengths, self.length) / self.length - (self.growth - 1)
            pairs = len(self.inverse_frequencies)
            frequencies = frequencies * stretch[..., None] ** -(np.arange(pairs, dtype=np.float32) / (pairs - 1))
        angles = (position_ids[..., None].astype(jnp.float32) * frequencies)[:, :, None]
        # Both features of a pair get the same angle: [B, T, 1, n / 2] -> [B, T, 1, n].
        angles = jnp.repeat(angles, 2, -1) if self.interleaved else jnp.concatenate([angles, angles], -1)
        return jnp.cos(angles) * self.factor, jnp.sin(angles) * self.factor


def rope_of(config: PreTrainedConfig, layer_type: str | None = None, *, partial: bool = False,
            interleaved: bool = False) -> Rope:
    """Return the rotary embedding of a configuration's `rope_parameters`; scaled ones use transformers' formulas.

    Args:
        layer_type: Type of the layers, if parameters differ between layers.
        partial: The family supports partial rotation of heads.

    Raises:
        UserError: The type is unknown to transformers, or parameters are missing.
    """
    parameters = config.rope_parameters if layer_type is None else config.rope_parameters[layer_type]
    kind, share = parameters.get("rope_type", "default"), parameters.get("partial_rotary_factor", 1.0)
    if share != 1.0 and not partial:
        raise _unsupported(parameters, f"{config.model_type} turns whole heads")
    if kind == "default":
        return Rope(_plain(config, parameters, share), interleaved=interleaved)
    if kind not in ROPE_INIT_FUNCTIONS:
        raise _unsupported(parameters, f"the known types are default, {', '.join(sorted(ROPE_INIT_FUNCTIONS))}")

    def scaled(length: int | None = None) -> tuple[tuple[float, ...], float]:
        # The functions of transformers return torch tensors; a tuple of floats makes the rope hashable.
        found, factor = ROPE_INIT_FUNCTIONS[kind](config, seq_len=length, layer_type=layer_type)
        return tuple(found.tolist()), float(factor)

    try:
        frequencies, factor = scaled()
        rope = Rope(frequencies, factor, interleaved)
        if kind == "dynamic":
            return replace(rope, length=config.max_position_embeddings, growth=float(parameters["factor"]))
        if kind == "longrope":
            length = parameters["original_max_position_embeddings"]
            # One token more than the original length selects the long frequencies.
            return replace(rope, length=length, long=scaled(length + 1)[0])
    except (KeyError, TypeError, ValueError, ArithmeticError, RuntimeError) as error:
        raise _unsupported(parameters, f"{type(error).__name__} {one_line(error)}") from error
    return rope


def _plain(config: PreTrainedConfig, parameters: dict[str, Any], share: float) -> tuple[float, ...]:
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    size = int(head_dim * share)
    frequencies = 1.0 / np.float32(parameters["rope_theta"]) ** (np.arange(0, size, 2, dtype=np.float32) / size)
    return tuple(frequencies.tolist())


def _unsupported(parameters: dict[str, Any], why: str) -> UserError:
    return UserError(f"model.config: rope_parameters {parameters} cannot be used: {why}. Change them in model.config "
                     "or model.config_overrides.")


def text_lengths(position_ids: Array, real: Array | None) -> Array:
    """Return the length of the text that each position [B, T] belongs to; a text begins where positions restart.

    Args:
        real: [B, T] bool, False for padding, which belongs to no text. None: no padding.
    """
    # True if the next position continues the same text.
    steps_on = position_ids[:, 1:] == position_ids[:, :-1] + 1
    if real is not None:
        steps_on &= real[:, 1:] | ~real[:, :-1]
    # The last token of each text, whose position is the length - 1; a cumulative minimum from the right finds the
    # nearest.
    last = jnp.pad(~steps_on, ((0, 0), (0, 1)), constant_values=True)
    places = jnp.where(last, jnp.arange(position_ids.shape[1]), position_ids.shape[1])
    ends = jax.lax.cummin(places, axis=1, reverse=True)
    return jnp.take_along_axis(position_ids, ends, axis=1) + 1


def rotate(x: Array, angles: Angles, interleaved: bool) -> Array:
    """Rotate the first features of x [B, T, heads, head_dim] by their angles, in float32."""
    cos, sin = angles
    wide, still = jnp.split(x.astype(jnp.float32), [cos.shape[-1]], axis=-1)
    if interleaved:
        # The pair (a, b) becomes (a cos - b sin, b cos + a sin).
        turned = jnp.stack([-wide[..., 1::2], wide[..., 0::2]], -1).reshape(wide.shape)
    else:
        first, second = jnp.split(wide, 2, axis=-1)
        turned = jnp.concatenate([-second, first], -1)
    mixed = wide * cos + turned * sin
    return (mixed if still.shape[-1] == 0 else jnp.concatenate([mixed, still], -1)).astype(x.dtype)
