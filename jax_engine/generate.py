"""Text from a causal network: greedy search and sampling with a cache, compiled once per shape."""

from collections.abc import Callable
from functools import lru_cache

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from jax_engine.models.network import Network, Tree
from lmmods.errors import UserError
from lmmods.settings import Generation

BUCKET = 32  # prompt lengths are rounded up to a multiple of this, so that few shapes are compiled
OUT = -jnp.inf


def check_supported(settings: Generation) -> None:
    """Raise UserError for a way of decoding that this engine does not have."""
    unsupported = {
        "penalty_alpha": (bool(settings.penalty_alpha), "contrastive search"),
        "num_beam_groups": (settings.num_beam_groups > 1, "diverse beam search"),
        "num_beams": (settings.num_beams > 1, "beam search"),
        "use_cache": (not settings.use_cache, "generation without a cache"),
    }
    for name, (wanted, way) in unsupported.items():
        if wanted:
            raise UserError(f"generation.{name} is {getattr(settings, name)}: the JAX engine has no {way}. "
                            f"Take it out, or use engine: torch.")


def generate(network: Network, params: Tree, prompts: list[list[int]], settings: Generation, eos: list[int],
             pad: int, seed: int = 0) -> list[list[int]]:
    """New tokens after each prompt, up to and without the first end token.

    A row's answer does not depend on the other rows of the batch.

    Args:
        network: With a causal head.
        prompts: Token ids, at least one each; filled up on the left with `pad`.
        settings: Names and meanings of transformers' GenerationConfig.
        eos: Tokens that end an answer.
        pad: Any token id.
        seed: Of the sampling; row n draws from key n.

    Raises:
        UserError: A way of decoding that the engine does not have, or more tokens than the model has positions.
    """
    check_supported(settings)
    longest = max(len(prompt) for prompt in prompts)
    if min(len(prompt) for prompt in prompts) == 0:
        raise UserError("An empty prompt cannot be continued: give it at least a beginning-of-text token.")
    arch = network.arch
    if arch.positions != "rope" and longest + settings.max_new_tokens > arch.max_positions:
        raise UserError(f"generation.max_new_tokens is {settings.max_new_tokens}: with a prompt of {longest} tokens "
                        f"that is more than the {arch.max_positions} positions of this model.")
    width = -(-longest // BUCKET) * BUCKET
    ids = np.full((len(prompts), width), pad, np.int32)
    mask = np.zeros_like(ids)
    for row, prompt in enumerate(prompts):
        ids[row, width - len(prompt):] = prompt
        mask[row, width - len(prompt):] = 1
    run = _compiled(network, width, *_frozen(settings), tuple(sorted(eos)))
    tokens = np.asarray(run(params, ids, mask, jax.random.key(seed)))
    return [_until(row.tolist(), eos) for row in tokens]


def _until(tokens: list[int], ends: list[int]) -> list[int]:
    return tokens[:next((place for place, token in enumerate(tokens) if token in ends), len(tokens))]


def _frozen(settings: Generation) -> tuple:
    """The settings that shape the compiled program."""
    return (settings.max_new_tokens, settings.min_new_tokens or 0, settings.do_sample, settings.temperature,
            settings.top_k, settings.top_p, settings.typical_p, settings.repetition_penalty,
            settings.no_repeat_ngram_size)


@lru_cache(maxsize=64)
def _compiled(network: Network, width: int, max_new: int, min_new: int, sample: bool, temperature: float, top_k: int,
              top_p: float, typical_p: float, penalty: float, ngram: int, eos: tuple[int, ...]) -> Callable:
    """The jitted program (params, ids [B, width], mask [B, width], key) -> new tokens [B, max_new]."""
    total = width + max_new
    ends = jnp.array(eos, jnp.int32)

    def choose(logits: Array, tokens: Array, real: Array, place: Array, keys: Array) -> Array:
        if penalty != 1.0:
            logits = repeated(logits, tokens, real, penalty)
        if ngram:
            logits = no_repeated_ngrams(logits, tokens, real, place, ngram)
        if min_new and eos:
            logits = jnp.where(place - width < min_new, logits.at[:, ends].set(OUT), logits)
        if not sample:
            return logits.argmax(-1)
        logits = logits / temperature
        logits = keep_top_k(logits, top_k) if top_k else logits
        logits = keep_top_p(logits, top_p) if top_p < 1.0 else logits
        logits = keep_typical(logits, typical_p) if typical_p < 1.0 else logits
        draw = jax.vmap(lambda key, row: jax.random.categorical(jax.random.fold_in(key, place - width), row))
        return draw(keys, logits)

    def program(params: Tree, ids: Array, mask: Array, key: Array) -> Array:
        rows = ids.shape[0]
        keys = jax.vmap(jax.random.fold_in, in_axes=(None, 0))(key, jnp.arange(rows))
        positions = jnp.maximum(jnp.cumsum(mask, axis=1) - 1, 0)
        batch = {"input_ids": ids, "attention_mask": mask, "position_ids": positions}
        hidden, cache = network.hidden(params, batch, cache=network.init_cache(rows, total))
        tokens = jnp.pad(ids, ((0, 0), (0, max_new)))
        real = jnp.pad(mask, ((0, 0), (0, max_new))) > 0
        state = {"tokens": tokens, "real": real, "place": jnp.int32(width), "cache": cache,
                 "hidden": hidden[:, -1], "position": positions[:, -1], "ended": jnp.zeros(rows, bool)}

        def step(state: Tree) -> Tree:
            place = state["place"]
            logits = network.logits(params, state["hidden"])
            token = choose(logits, state["tokens"], state["real"], place, keys).astype(jnp.int32)
            tokens = jax.lax.dynamic_update_slice_in_dim(state["tokens"], token[:, None], place, axis=1)
            real = jax.lax.dynamic_update_slice_in_dim(state["real"], jnp.ones((rows, 1), bool), place, axis=1)
            position = state["position"] + 1
            hidden, cache = network.hidden(params, {
                "input_ids": token[:, None], "attention_mask": jnp.ones((rows, 1), jnp.int32),
                "position_ids": position[:, None]}, cache=state["cache"])
            ended = state["ended"] | jnp.isin(token, ends)
            return {"tokens": tokens, "real": real, "place": place + 1, "cache": cache, "hidden": hidden[:, 0],
                    "position": position, "ended": ended}

        final = jax.lax.while_loop(lambda s: (s["place"] < total) & ~s["ended"].all(), step, state)
        # A row that ended went on beside the others; what lies behind its first end is cut by the caller.
        return final["tokens"][:, width:]

    return jax.jit(program)


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


def keep_top_p(logits: Array, p: float) -> Array:
    """Only the likeliest tokens that together reach the probability p (Holtzman et al. 2020)."""
    order = jnp.argsort(logits, axis=-1, stable=True)
    rising = jnp.cumsum(jax.nn.softmax(jnp.take_along_axis(logits, order, -1), -1), -1)
    out = (rising <= 1 - p).at[:, -1].set(False)
    return jnp.where(_scatter(out, order), OUT, logits)


def keep_typical(logits: Array, p: float) -> Array:
    """Only tokens whose surprise is nearest the entropy, together of probability p (Meister et al. 2022)."""
    logs = jax.nn.log_softmax(logits, -1)
    probs = jnp.exp(logs)
    entropy = -jnp.where(probs > 0, probs * logs, 0.0).sum(-1, keepdims=True)
    order = jnp.argsort(jnp.abs(-logs - entropy), axis=-1, stable=True)
    rising = jnp.cumsum(jnp.take_along_axis(probs, order, -1), -1)
    # As long as p has not been reached before it, a token stays; the first always does.
    out = jnp.concatenate([jnp.zeros_like(rising[:, :1], bool), rising[:, :-1] >= p], -1)
    return jnp.where(_scatter(out, order), OUT, logits)


def _scatter(values: Array, order: Array) -> Array:
    """Put values given in sorted order back to their tokens."""
    return jnp.zeros_like(values).at[jnp.arange(len(values))[:, None], order].set(values)
