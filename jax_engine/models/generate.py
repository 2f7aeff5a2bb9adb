"""Text from a causal network: greedy search, sampling and beam search, compiled once per shape."""

from collections.abc import Callable, Sequence
from dataclasses import astuple, replace
from functools import lru_cache

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from jax_engine.distributed.tree import Tree
from jax_engine.models.beams import beam_search
from jax_engine.models.decoding import Forward, constrained, narrowed
from jax_engine.models.network import Network
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


def check_room(network: Network, length: int, settings: Generation) -> None:
    """Raise UserError for an empty prompt, or where prompt and answer go beyond the network's learned positions."""
    if not length:
        raise UserError("An empty prompt cannot be continued: give it at least a beginning-of-text token.")
    if network.arch.positions != "rope":
        settings.check_positions(length, network.arch.max_positions)


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
    check_room(network, min(len(prompt) for prompt in prompts), settings)
    check_room(network, longest, settings)
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
    total = width + settings.max_new_tokens
    begin, step = token_steps(network, width, total, settings, ends)

    def program(params: Tree, ids: Array, mask: Array, numbers: Array) -> Array:
        def go_on(state: Tree) -> Tree:
            return step(params, state, jax.lax.dynamic_index_in_dim(numbers, state["place"] - width, 1, False))

        final = jax.lax.while_loop(lambda s: (s["place"] < total) & ~s["ended"].all(), go_on, begin(params, ids, mask))
        # A row that ended went on beside the others; the caller truncates it after its first end token.
        return final["tokens"][:, width:]

    return program


def token_steps(network: Network, width: int, total: int, settings: Generation, ends: Array
                ) -> tuple[Callable, Callable]:
    """The two parts of single search, over texts of `total` tokens of which the first `width` are the prompts.

    Returns:
        (params, ids [B, width], mask [B, width]) -> state, whose `tokens` [B, total] are complete before `place`; and
        (params, state, numbers [B] that tokens are drawn by) -> the state with a token more, which is `latest` [B].
    """
    forward = Forward(network, settings.use_cache)

    def choose(logits: Array, state: Tree, numbers: Array) -> Array:
        logits = constrained(settings, logits, state["tokens"], state["real"], state["place"], width, ends)
        return drawn(narrowed(settings, logits), numbers) if settings.do_sample else logits.argmax(-1)

    def begin(params: Tree, ids: Array, mask: Array) -> Tree:
        tokens = jnp.pad(ids, ((0, 0), (0, total - width)))
        real = jnp.pad(mask, ((0, 0), (0, total - width))) > 0
        kept, hidden = forward.start(params, tokens, real, width)
        return {"tokens": tokens, "real": real, "place": jnp.int32(width), "kept": kept, "hidden": hidden,
                "latest": tokens[:, 0], "ended": jnp.zeros(len(ids), bool)}

    def step(params: Tree, state: Tree, numbers: Array) -> Tree:
        place = state["place"]
        token = choose(network.logits(params, state["hidden"]), state, numbers).astype(jnp.int32)
        tokens = jax.lax.dynamic_update_slice_in_dim(state["tokens"], token[:, None], place, axis=1)
        here = jnp.ones((len(tokens), 1), bool)
        real = jax.lax.dynamic_update_slice_in_dim(state["real"], here, place, axis=1)
        kept, hidden = forward.step(params, state["kept"], tokens, real, place)
        ended = state["ended"] | jnp.isin(token, ends)
        return {"tokens": tokens, "real": real, "place": place + 1, "kept": kept, "hidden": hidden, "latest": token,
                "ended": ended}

    return begin, step


def stream(network: Network, params: Tree, prompt: list[int], settings: Generation, eos: list[int], pad: int,
           seed: int, row: int, on_token: Callable[[int], bool]) -> bool:
    """`generate` for one prompt, handing over each token as soon as it is chosen; returns whether an end token came.

    Beams are searched to their end first. Raises UserError as `generate` does.

    Args:
        on_token: Given a token of the answer, says whether to go on.
    """
    if settings.num_beams > 1:
        [answer] = generate(network, params, [prompt], settings, eos, pad, seed, [row])
        return all(map(on_token, answer)) and len(answer) < settings.max_new_tokens
    check_supported(settings)
    check_room(network, len(prompt), settings)
    width, room = power_of_two(len(prompt)), settings.max_new_tokens
    fields = astuple(replace(settings, max_new_tokens=1))  # which the programs do not depend on
    begin, step = _compiled_steps(network, width, width + power_of_two(room), fields, tuple(sorted(eos)))
    ids, mask = np.full((1, width), pad, np.int32), np.zeros((1, width), np.int32)
    ids[0, width - len(prompt):], mask[0, width - len(prompt):] = prompt, 1
    state, numbers = begin(params, ids, mask), draws(seed, [row], room)
    for place in range(room):
        state = step(params, state, numbers[:, place])
        token = int(np.asarray(state["latest"])[0])
        if token in eos:
            return True
        if not on_token(token):
            break
    return False


def power_of_two(length: int) -> int:
    """Room for so many tokens, in one of few sizes, so that a conversation that grows seldom compiles anew."""
    return max(BUCKET, 1 << (length - 1).bit_length())


@lru_cache(maxsize=64)
def _compiled_steps(network: Network, width: int, total: int, fields: tuple, eos: tuple[int, ...]
                    ) -> tuple[Callable, Callable]:
    """`token_steps`, jitted; a state is used up by the step after it."""
    begin, step = token_steps(network, width, total, Generation(*fields), jnp.array(eos, jnp.int32))
    return jax.jit(begin), jax.jit(step, donate_argnums=1)
