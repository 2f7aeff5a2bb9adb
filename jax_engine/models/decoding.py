"""What all ways of decoding share: the network on texts that grow, and the rules on which token may come next."""

import jax
import jax.numpy as jnp
from jax import Array

from jax_engine.distributed.tree import Tree
from jax_engine.models.network import Network
from lmmods.core.settings import Generation

OUT = -jnp.inf


class Forward:
    """A network on texts that grow by one token a step, N of them side by side, `total` tokens of room each.

    Args:
        use_cache: Keep keys and values of past tokens; False computes the whole text anew for each token.
    """

    def __init__(self, network: Network, use_cache: bool):
        self._network, self._use_cache = network, use_cache

    def start(self, params: Tree, tokens: Array, real: Array, width: int) -> tuple[Tree, Array]:
        """What is kept between steps, and the hidden states [N, D] of the last tokens of the prompts.

        Args:
            tokens: [N, total], the prompts on the right of the first `width`.
            real: [N, total] which of them are text.
        """
        if not self._use_cache:
            return {}, self._whole(params, tokens, real, width)
        positions = _positions(real[:, :width])
        batch = {"input_ids": tokens[:, :width], "attention_mask": real[:, :width].astype(jnp.int32),
                 "position_ids": positions}
        hidden, cache = self._network.hidden(params, batch, cache=self._network.init_cache(*tokens.shape))
        return {"cache": cache, "position": positions[:, -1]}, hidden[:, -1]

    def step(self, params: Tree, kept: Tree, tokens: Array, real: Array, place: Array) -> tuple[Tree, Array]:
        """What is kept and the hidden states [N, D] of the tokens at `place`, the latest."""
        if not self._use_cache:
            return kept, self._whole(params, tokens, real, place + 1)
        position, ones = kept["position"] + 1, jnp.ones((len(tokens), 1), jnp.int32)
        batch = {"input_ids": jax.lax.dynamic_slice_in_dim(tokens, place, 1, axis=1), "attention_mask": ones,
                 "position_ids": position[:, None]}
        hidden, cache = self._network.hidden(params, batch, cache=kept["cache"])
        return {"cache": cache, "position": position}, hidden[:, 0]

    def pick(self, kept: Tree, rows: Array) -> Tree:
        """What is kept of these rows, in this order; a row may come more than once."""
        if not self._use_cache:
            return kept
        cache = kept["cache"]
        picked = {"k": cache["k"][:, rows], "v": cache["v"][:, rows], "valid": cache["valid"][rows]}
        return {"cache": {**cache, **picked}, "position": kept["position"][rows]}

    def _whole(self, params: Tree, tokens: Array, real: Array, end: Array | int) -> Array:
        # As segments, since padding on the left is no `attention_mask` for the fused kernel.
        batch = {"input_ids": tokens, "segment_ids": real.astype(jnp.int32), "position_ids": _positions(real)}
        hidden = self._network.hidden(params, batch)
        return jax.lax.dynamic_index_in_dim(hidden, end - 1, axis=1, keepdims=False)


def _positions(real: Array) -> Array:
    return jnp.maximum(jnp.cumsum(real, axis=1) - 1, 0)


def constrained(settings: Generation, logits: Array, tokens: Array, real: Array, place: Array, width: int, ends: Array
                ) -> Array:
    """Logits [N, V] of the token at `place` under the rules that hold for search and sampling alike."""
    if settings.repetition_penalty != 1.0:
        logits = repeated(logits, tokens, real, settings.repetition_penalty)
    if settings.no_repeat_ngram_size:
        logits = no_repeated_ngrams(logits, tokens, real, place, settings.no_repeat_ngram_size)
    if settings.min_new_tokens and len(ends):
        logits = jnp.where(place - width < settings.min_new_tokens, logits.at[:, ends].set(OUT), logits)
    return logits


def narrowed(settings: Generation, logits: Array, least: int = 1) -> Array:
    """Logits [N, V] to sample from; at least so many tokens of each row stay."""
    logits = logits / settings.temperature
    logits = keep_top_k(logits, max(settings.top_k, least)) if settings.top_k else logits
    logits = keep_top_p(logits, settings.top_p, least) if settings.top_p < 1.0 else logits
    return keep_typical(logits, settings.typical_p, least) if settings.typical_p < 1.0 else logits


def repeated(logits: Array, tokens: Array, real: Array, penalty: float) -> Array:
    """Make tokens that occur already less likely (Keskar et al. 2019). Padding does not count as occurring.

    Args:
        logits: [B, V].
        tokens: [B, S].
        real: [B, S] which of them are text so far.
    """
    rows = jnp.arange(len(logits))[:, None]
    seen = jnp.zeros(logits.shape, bool).at[rows, tokens].max(real)
    return jnp.where(seen, jnp.where(logits < 0, logits * penalty, logits / penalty), logits)


def no_repeated_ngrams(logits: Array, tokens: Array, real: Array, place: Array, size: int) -> Array:
    """Forbid each token that would complete an n-gram that the text before `place` has already."""
    starts = tokens.shape[1] - size + 1
    latest = jax.lax.dynamic_slice_in_dim(tokens, place - size + 1, size - 1, axis=1) if size > 1 else tokens[:, :0]
    same = jnp.ones((len(tokens), starts), bool)
    for offset in range(size):
        same &= real[:, offset:offset + starts]
        if offset < size - 1:
            same &= tokens[:, offset:offset + starts] == latest[:, offset, None]
    same &= jnp.arange(starts) + size - 1 < place
    rows = jnp.arange(len(logits))[:, None]
    banned = jnp.zeros(logits.shape, bool).at[rows, tokens[:, size - 1:]].max(same)
    return jnp.where(banned, OUT, logits)


def keep_top_k(logits: Array, k: int) -> Array:
    """Only the k likeliest tokens, and those as likely as the last of them."""
    return jnp.where(logits < jax.lax.top_k(logits, min(k, logits.shape[-1]))[0][:, -1:], OUT, logits)


def keep_top_p(logits: Array, p: float, least: int = 1) -> Array:
    """Only the likeliest tokens that together reach the probability p (Holtzman et al. 2020)."""
    order = jnp.argsort(logits, axis=-1, stable=True)
    rising = jnp.cumsum(jax.nn.softmax(jnp.take_along_axis(logits, order, -1), -1), -1)
    out = (rising <= 1 - p).at[:, -least:].set(False)
    return jnp.where(_scatter(out, order), OUT, logits)


def keep_typical(logits: Array, p: float, least: int = 1) -> Array:
    """Only tokens whose surprise is nearest the entropy, together of probability p (Meister et al. 2022)."""
    logs = jax.nn.log_softmax(logits, -1)
    probs = jnp.exp(logs)
    entropy = -jnp.where(probs > 0, probs * logs, 0.0).sum(-1, keepdims=True)
    order = jnp.argsort(jnp.abs(-logs - entropy), axis=-1, stable=True)
    rising = jnp.cumsum(jnp.take_along_axis(probs, order, -1), -1)
    # As long as p has not been reached before it, a token stays; the first ones always do.
    out = jnp.concatenate([jnp.zeros_like(rising[:, :1], bool), rising[:, :-1] >= p], -1).at[:, :least].set(False)
    return jnp.where(_scatter(out, order), OUT, logits)


def _scatter(values: Array, order: Array) -> Array:
    """Put values given in sorted order back to their tokens."""
    return jnp.zeros_like(values).at[jnp.arange(len(values))[:, None], order].set(values)
