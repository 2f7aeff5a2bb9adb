"""Text from a causal network: greedy search, sampling and beam search, compiled once per shape."""

from collections.abc import Callable, Sequence
from dataclasses import astuple
from functools import lru_cache

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from jax_engine.models.beams import beam_search
from jax_engine.models.decoding import Forward, constrained, narrowed
from jax_engine.models.network import Network, Tree
from lmmods.core.errors import UserError
from lmmods.core.sampling import UNIT, draws
from lmmods.core.settings import Generation, check_beam_groups

BUCKET = 32  # prompt lengths are rounded up to a multiple of this, so that few shapes are compiled


def check_supported(settings: Generation) -> None:
    """Raise UserError for a way of decoding that this engine does not have, or that does not exist."""
    if settings.penalty_alpha:
        raise UserError(f"generation.penalty_alpha is {settings.penalty_alpha}: the JAX engine has no contrastive "
                        "search. Take it out, or use engine: torch.")
    check_beam_groups(settings.num_beams, settings.num_beam_groups, settings.diversity_penalty, settings.do_sample)


def generate(network: Network, params: Tree, prompts: list[list[int]], settings: Generation, eos: list[int],
             pad: int, seed: int = 0, rows: Sequence[int] | None = None) -> list[list[int]]:
    """New tokens after each prompt, up to and without the first end token.

    A row's answer does not depend on the other rows of the batch. Raises UserError: a way of decoding that the engine
    does not have, or more tokens than the model has positions.

    Args:
        prompts: Token ids, at least one each; filled up on the left with `pad`.
        seed: Of the sampling.
        rows: Numbers of the rows, by which they draw; None counts from 0.
    """
    check_supported(settings)
    longest = max(len(prompt) for prompt in prompts)
    if min(len(prompt) for prompt in prompts) == 0:
        raise UserError("An empty prompt cannot be continued: give it at least a beginning-of-text token.")
    arch = network.arch
    if arch.positions != "rope":
        settings.check_positions(longest, arch.max_positions)
    width = -(-longest // BUCKET) * BUCKET
    ids = np.full((len(prompts), width), pad, np.int32)
    mask = np.zeros_like(ids)
    rows = range(len(prompts)) if rows is None else rows
    for row, prompt in enumerate(prompts):
        ids[row, width - len(prompt):] = prompt
        mask[row, width - len(prompt):] = 1
    run = _compiled(network, width, astuple(settings), tuple(sorted(eos)))
    if settings.num_beams > 1:  # of which each draws several tokens without replacement
        chance = jax.vmap(jax.random.fold_in, in_axes=(None, 0))(jax.random.key(seed), np.array(rows, np.int32))
    else:
        chance = draws(seed, rows, settings.max_new_tokens)
    tokens = np.asarray(run(params, ids, mask, chance))
    return [_until(row.tolist(), eos) for row in tokens]


def drawn(logits: Array, numbers: Array) -> Array:
    """For each row the first token [B] at which the probabilities, added up, exceed its number.

    Args:
        logits: [B, V].
        numbers: [B] in [0, 1).
    """
    added = jnp.cumsum(jnp.round(jax.nn.softmax(logits, -1) / UNIT).astype(jnp.int32), -1)
    # Not a share of 1 but of what the sum came to, and less than it.
    wanted = jnp.minimum((numbers * added[:, -1]).astype(jnp.int32), added[:, -1] - 1)
    return (added <= wanted[:, None]).sum(-1)


def _until(tokens: list[int], ends: list[int]) -> list[int]:
    return tokens[:next((place for place, token in enumerate(tokens) if token in ends), len(tokens))]


@lru_cache(maxsize=64)
def _compiled(network: Network, width: int, fields: tuple, eos: tuple[int, ...]) -> Callable:
    """The jitted program (params, ids [B, width], mask [B, width], chance) -> new tokens [B, max_new_tokens].

    Chance is `draws` [B, max_new_tokens] of single search, and keys [B] of beams.
    """
    settings = Generation(*fields)
    make = beam_search if settings.num_beams > 1 else single_search
    return jax.jit(make(network, width, settings, jnp.array(eos, jnp.int32)))


def single_search(network: Network, width: int, settings: Generation, ends: Array) -> Callable:
    """Greedy search, or sampling: one text for each prompt."""
    forward, total = Forward(network, settings.use_cache), width + settings.max_new_tokens

    def choose(logits: Array, tokens: Array, real: Array, place: Array, numbers: Array) -> Array:
        logits = constrained(settings, logits, tokens, real, place, width, ends)
        if not settings.do_sample:
            return logits.argmax(-1)
        return drawn(narrowed(settings, logits), jax.lax.dynamic_index_in_dim(numbers, place - width, 1, False))

    def program(params: Tree, ids: Array, mask: Array, numbers: Array) -> Array:
        rows = ids.shape[0]
        tokens = jnp.pad(ids, ((0, 0), (0, settings.max_new_tokens)))
        real = jnp.pad(mask, ((0, 0), (0, settings.max_new_tokens))) > 0
        kept, hidden = forward.start(params, tokens, real, width)
        state = {"tokens": tokens, "real": real, "place": jnp.int32(width), "kept": kept, "hidden": hidden,
                 "ended": jnp.zeros(rows, bool)}

        def step(state: Tree) -> Tree:
            place = state["place"]
            logits = network.logits(params, state["hidden"])
            token = choose(logits, state["tokens"], state["real"], place, numbers).astype(jnp.int32)
            tokens = jax.lax.dynamic_update_slice_in_dim(state["tokens"], token[:, None], place, axis=1)
            real = jax.lax.dynamic_update_slice_in_dim(state["real"], jnp.ones((rows, 1), bool), place, axis=1)
            kept, hidden = forward.step(params, state["kept"], tokens, real, place)
            ended = state["ended"] | jnp.isin(token, ends)
            return {"tokens": tokens, "real": real, "place": place + 1, "kept": kept, "hidden": hidden, "ended": ended}

        final = jax.lax.while_loop(lambda s: (s["place"] < total) & ~s["ended"].all(), step, state)
        # A row that ended went on beside the others; the caller truncates it after its first end token.
        return final["tokens"][:, width:]

    return program
