"""Text generation with a causal network: greedy search, sampling and beam search, compiled once per shape."""

from collections.abc import Callable, Sequence
from dataclasses import astuple, replace
from functools import lru_cache

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from jax_engine.distributed.tree import Tree
from jax_engine.models.network import Network
from lmmods.core.errors import UserError
from lmmods.core.generation_config import UNIT, draws
from lmmods.core.settings import Generation, check_beam_groups
from lmmods.rollouts.policy import SampledAnswer

BUCKET = 32  # prompt lengths are rounded up to a multiple of this, so that few shapes are compiled
# Ended rows leave a batch once only this share of it goes on, and a batch of fewer rows never shrinks: each size that a
# batch shrinks to is compiled.
GOING_ON, LEAST_ROWS = 1 / 4, 16


def check_supported(settings: Generation) -> None:
    """Raise UserError for a decoding method that this engine does not support, or an invalid combination."""
    if settings.penalty_alpha:
        raise UserError(f"generation.penalty_alpha is {settings.penalty_alpha}: the JAX engine has no contrastive "
                        "search. Take it out, or use engine: torch.")
    check_beam_groups(settings.num_beams, settings.num_beam_groups, settings.diversity_penalty, settings.do_sample)


def check_room(network: Network, length: int, settings: Generation) -> None:
    """Raise UserError if the prompt is empty, or prompt and answer exceed the network's learned positions."""
    if not length:
        raise UserError("An empty prompt cannot be continued: give it at least a beginning-of-text token.")
    if network.arch.positions != "rope":
        settings.check_positions(length, network.arch.max_positions)


def generate(network: Network, params: Tree, prompts: list[list[int]], settings: Generation, eos: list[int],
             pad: int, seed: int = 0, rows: Sequence[int] | None = None, num_answers: int = 1) -> list[list[int]]:
    """Return the new tokens after each prompt, up to but excluding the first end token.

    A row's answer does not depend on the other rows of the batch. Without beams, a prompt given several times is
    computed once, and rows that have ended leave the batch.

    Args:
        prompts: Token ids, at least one per prompt; left-padded with `pad`.
        seed: Seed of the sampling.
        rows: Row numbers, which determine each row's random draws; None counts from 0.
        num_answers: Sampled answers to each prompt, which follow each other; 1 with beams.

    Raises:
        UserError: The engine does not support the decoding method, or there are more tokens than positions.
    """
    check_supported(settings)
    longest = max(len(prompt) for prompt in prompts)
    check_room(network, min(len(prompt) for prompt in prompts), settings)
    check_room(network, longest, settings)
    width = -(-longest // BUCKET) * BUCKET
    rows = range(len(prompts)) if rows is None else rows
    # Hashable arguments: the compiled programs are cached by them.
    programs = _compiled(network, width, astuple(settings), tuple(sorted(eos)))
    if settings.num_beams > 1:  # a beam search draws several tokens per step without replacement, which takes a key
        keys = jax.vmap(jax.random.fold_in, in_axes=(None, 0))(jax.random.key(seed), np.array(rows, np.int32))
        tokens = np.asarray(programs(params, *_pad(prompts, width, pad), keys))
    else:
        prompts = [prompt for prompt in prompts for _ in range(num_answers)]
        numbers = draws(seed, rows, settings.max_new_tokens, num_answers)
        tokens = _single(programs, params, prompts, width, pad, numbers)["tokens"]
    return [_until(row.tolist(), eos) for row in tokens]


def sample_answers(network: Network, params: Tree, prompts: Sequence[Sequence[int]], numbers: np.ndarray | None,
                   temperature: float, max_new_tokens: int, ends: Sequence[int], pad: int) -> list[SampledAnswer]:
    """Answer prompts, and measure the log-probability and the entropy of each token in the same pass.

    Sampling is from the whole vocabulary. Widths and numbers of rows are rounded up to powers of two, so that few
    shapes are compiled. Arguments as for `Policy.draw`.

    Args:
        temperature: Also of the log-probabilities and entropies of greedy search.
        pad: Token that prompts are left-padded with.

    Raises:
        UserError: A prompt is empty, or there are more tokens than positions.
    """
    if not len(prompts):
        return []
    settings = Generation(max_new_tokens=max_new_tokens, top_k=0)
    if numbers is None:
        numbers = np.zeros((len(prompts), max_new_tokens), np.float32)
    else:
        settings = replace(settings, do_sample=True, temperature=temperature)
    lengths = [len(prompt) for prompt in prompts]
    check_room(network, min(lengths), settings)
    check_room(network, max(lengths), settings)
    width = power_of_two(max(lengths), BUCKET)
    programs = _compiled(network, width, astuple(settings), tuple(sorted(ends)), temperature)
    found = _single(programs, params, prompts, width, pad, numbers, power_of_two(len(prompts)))
    is_end = np.isin(found["tokens"], list(ends))
    ended = is_end.any(1)
    lengths = np.where(ended, is_end.argmax(1) + 1, max_new_tokens)
    # Copies, so that an answer does not keep all of them in memory.
    return [SampledAnswer(*(found[name][row, :length].copy() for name in ("tokens", *SCORES)), bool(ended[row]))
            for row, length in enumerate(lengths)]


def _pad(prompts: Sequence[Sequence[int]], width: int, pad: int) -> tuple[np.ndarray, np.ndarray]:
    """Return ids and mask [B, width] of prompts, left-padded, so that all end in the same column."""
    ids = np.full((len(prompts), width), pad, np.int32)
    mask = np.zeros_like(ids)
    for row, prompt in enumerate(prompts):
        ids[row, width - len(prompt):] = prompt
        mask[row, width - len(prompt):] = 1
    return ids, mask


def _single(programs: tuple[Callable, ...], params: Tree, prompts: Sequence[Sequence[int]], width: int, pad: int,
            numbers: np.ndarray, size: int | None = None) -> dict[str, np.ndarray]:
    """Run the programs of `single_search`.

    Args:
        size: Rows to compute, at least as many as prompts; None is their number.

    Returns:
        New `tokens` [B, max_new_tokens], arbitrary after an end token, and `SCORES` likewise if the programs have them.
    """
    begin, proceed, pick = programs
    num, size = len(prompts), size or len(prompts)
    places: dict[tuple[int, ...], int] = {}
    copies = np.zeros(size, np.int32)
    copies[:num] = [places.setdefault(tuple(prompt), len(places)) for prompt in prompts]
    distinct = list(places)
    is_distinct = len(distinct) == num
    # Copies are made of a number of prompts that is rounded up, so that few shapes are compiled.
    distinct += distinct[:1] * ((size if is_distinct else min(power_of_two(len(distinct)), size)) - len(distinct))
    state = begin(params, *_pad(distinct, width, pad), None if is_distinct else copies, None if size == num else num)
    numbers, rows = np.pad(numbers, ((0, size - num), (0, 0))), np.arange(size)
    found = {name: np.zeros(numbers.shape, state[name].dtype) for name in ("tokens", *SCORES) if name in state}
    while True:
        state = proceed(params, state, numbers[rows])
        for name, values in found.items():
            values[rows] = np.asarray(state[name])[:, -values.shape[1]:]
        ended = np.asarray(state["ended"])
        if ended.all() or int(state["place"]) == width + numbers.shape[1]:
            return {name: values[:num] for name, values in found.items()}
        # Those that go on first, then as many of the ended ones as make a size that depends on that of the batch alone.
        chosen = np.argsort(ended, kind="stable")[:power_of_two(int(GOING_ON * len(ended)))]
        state, rows = pick(state, chosen), rows[chosen]


def sample_tokens(logits: Array, numbers: Array) -> Array:
    """Sample tokens [B] by inversion: the first at which the cumulative probability exceeds the row's number.

    Args:
        logits: [B, V].
        numbers: [B] uniform random numbers in [0, 1).
    """
    # Integer arithmetic makes the cumulative sum exact, so that it does not depend on the order of summation.
    shares = jnp.round(jax.nn.softmax(logits, -1) / UNIT).astype(jnp.int32)
    num, size = shares.shape
    # Summed in two steps, over blocks and within one of them: a running sum of whole rows is slow in XLA on CPUs.
    block = int(size**0.5)
    blocks = jnp.pad(shares, ((0, 0), (0, -size % block))).reshape(num, -1, block)
    ends = jnp.cumsum(blocks.sum(-1), -1)
    # Scale to the actual total, which rounding moves away from 1, and stay below it.
    wanted = jnp.minimum((numbers * ends[:, -1]).astype(jnp.int32), ends[:, -1] - 1)[:, None]
    # The number of sums up to `wanted` is the index of the first one above it.
    own = (ends <= wanted).sum(-1, keepdims=True)
    inside = jnp.take_along_axis(blocks, own[..., None], axis=1)[:, 0]
    before = jnp.take_along_axis(ends, own, axis=1) - inside.sum(-1, keepdims=True)
    return own[:, 0] * block + (before + jnp.cumsum(inside, -1) <= wanted).sum(-1)


SCORES = ("logps", "entropies")  # of new tokens, in the state of a search that measures them


def log_probs_and_entropies(logits: Array, tokens: Array) -> dict[str, Array]:
    """Return `SCORES` of tokens [B] drawn from logits [B, V], each [B] float32."""
    # The maximum and the exponentials are those of `drawn`, which the compiler computes once.
    shifted = logits - logits.max(-1, keepdims=True)
    weights = jnp.exp(shifted)
    total = weights.sum(-1)
    logps = jnp.take_along_axis(shifted, tokens[:, None], axis=1)[:, 0] - jnp.log(total)
    return {"logps": logps, "entropies": jnp.log(total) - (weights * shifted).sum(-1) / total}


def _until(tokens: list[int], ends: list[int]) -> list[int]:
    return tokens[:next((place for place, token in enumerate(tokens) if token in ends), len(tokens))]


@lru_cache(maxsize=64)
def _compiled(network: Network, width: int, fields: tuple, eos: tuple[int, ...], scored_at: float | None = None
              ) -> Callable | tuple[Callable, ...]:
    """Return the jitted program of `beam_search`, or those of `single_search`."""
    settings, ends = Generation(*fields), jnp.array(eos, jnp.int32)
    if settings.num_beams > 1:
        return jax.jit(beam_search(network, width, settings, ends))
    begin, proceed, pick = single_search(network, width, settings, ends, scored_at)
    return jax.jit(begin), jax.jit(proceed, donate_argnums=1), jax.jit(pick)


def single_search(network: Network, width: int, settings: Generation, ends: Array, scored_at: float | None = None
                  ) -> tuple[Callable, ...]:
    """Return the programs of greedy search or sampling: one text per row.

    Args:
        scored_at: See `token_steps`.

    Returns:
        begin: (params, ids [U, width], mask [U, width], copies [B] or None, count or None) -> state of B rows, each
            that of its distinct prompt; without copies row by row. Rows from `count` on have ended.
        proceed: (params, state, numbers [B, max_new_tokens]) -> state in which all rows have ended, or have their
            `max_new_tokens`, or so few go on that the others should leave.
        pick: (state, rows [N]) -> state of these rows.
    """
    total = width + settings.max_new_tokens
    start, step = token_steps(network, width, total, settings, ends, scored_at)
    forward = Forward(network, settings.use_cache)

    def pick(state: Tree, rows: Array) -> Tree:
        by_row = {name: x[rows] for name, x in state.items() if name not in ("place", "kept")}
        return {**state, **by_row, "kept": forward.pick(state["kept"], rows)}

    def begin(params: Tree, ids: Array, mask: Array, copies: Array | None = None, count: Array | None = None) -> Tree:
        state = start(params, ids, mask)
        state = state if copies is None else pick(state, copies)
        return state if count is None else {**state, "ended": jnp.arange(len(state["ended"])) >= count}

    def proceed(params: Tree, state: Tree, numbers: Array) -> Tree:
        size = len(numbers)
        fewest = int(GOING_ON * size) if size >= LEAST_ROWS else 0

        def goes_on(state: Tree) -> Array:
            return (state["place"] < total) & ((~state["ended"]).sum() > fewest)

        def go_on(state: Tree) -> Tree:
            return step(params, state, jax.lax.dynamic_index_in_dim(numbers, state["place"] - width, 1, False))

        return jax.lax.while_loop(goes_on, go_on, state)

    return begin, proceed, pick


def token_steps(network: Network, width: int, total: int, settings: Generation, ends: Array,
                scored_at: float | None = None) -> tuple[Callable, Callable]:
    """Return the two functions of single search, for texts of `total` tokens, the first `width` of them the prompts.

    Args:
        scored_at: Temperature at which tokens are `measured`; None does not measure them.

    Returns:
        begin: (params, ids [B, width], mask [B, width]) -> state, whose `tokens` [B, total] are filled before `place`.
        step: (params, state, random numbers [B]) -> state with one more token, which is `latest` [B].
    """
    forward = Forward(network, settings.use_cache)

    def choose(logits: Array, state: Tree, numbers: Array) -> Array:
        logits = apply_constraints(settings, logits, state["tokens"], state["real"], state["place"], width, ends)
        return sample_tokens(filter_logits(settings, logits), numbers) if settings.do_sample else logits.argmax(-1)

    def begin(params: Tree, ids: Array, mask: Array) -> Tree:
        tokens = jnp.pad(ids, ((0, 0), (0, total - width)))
        real = jnp.pad(mask, ((0, 0), (0, total - width))) > 0
        # From here on arrays have the full length, so that every step has the same shapes.
        kept, hidden = forward.start(params, tokens, real, width)
        return {"tokens": tokens, "real": real, "place": jnp.int32(width), "kept": kept, "hidden": hidden,
                # No token has been chosen yet: any array of the right shape serves as `latest`.
                "latest": tokens[:, 0], "ended": jnp.zeros(len(ids), bool),
                **({} if scored_at is None else {name: jnp.zeros((len(ids), total - width)) for name in SCORES})}

    def step(params: Tree, state: Tree, numbers: Array) -> Tree:
        place = state["place"]
        logits = network.logits(params, state["hidden"])
        token = choose(logits, state, numbers).astype(jnp.int32)
        tokens = jax.lax.dynamic_update_slice_in_dim(state["tokens"], token[:, None], place, axis=1)
        here = jnp.ones((len(tokens), 1), bool)
        real = jax.lax.dynamic_update_slice_in_dim(state["real"], here, place, axis=1)
        # Hidden states of the new token, from which the next step chooses.
        kept, hidden = forward.step(params, state["kept"], tokens, real, place)
        ended = state["ended"] | jnp.isin(token, ends)
        scores = {} if scored_at is None else {
            name: jax.lax.dynamic_update_slice_in_dim(state[name], new[:, None], place - width, axis=1)
            for name, new in log_probs_and_entropies(logits / scored_at, token).items()}
        return {"tokens": tokens, "real": real, "place": place + 1, "kept": kept, "hidden": hidden, "latest": token,
                "ended": ended, **scores}

    return begin, step


def stream(network: Network, params: Tree, prompt: list[int], settings: Generation, eos: list[int], pad: int,
           seed: int, row: int, on_token: Callable[[int], bool]) -> bool:
    """`generate` for one prompt, passing on each token as soon as it is chosen; beam search passes them at its end.

    Args:
        on_token: Called with each token of the answer; generation stops if it returns False.

    Returns:
        True if an end token was generated.

    Raises:
        UserError: As for `generate`.
    """
    if settings.num_beams > 1:
        # A beam may be overtaken until the search ends, so nothing can be passed on before.
        [answer] = generate(network, params, [prompt], settings, eos, pad, seed, [row])
        return all(map(on_token, answer)) and len(answer) < settings.max_new_tokens
    check_supported(settings)
    check_room(network, len(prompt), settings)
    # A growing conversation rarely recompiles.
    width, room = power_of_two(len(prompt), BUCKET), settings.max_new_tokens
    fields = astuple(replace(settings, max_new_tokens=1))  # part of the cache key, but unused by the programs
    begin, step = _compiled_steps(network, width, width + power_of_two(room, BUCKET), fields, tuple(sorted(eos)))
    # The same draws as in `generate`, so a streamed answer is the same.
    state, numbers = begin(params, *_pad([prompt], width, pad)), draws(seed, [row], room)
    for place in range(room):
        state = step(params, state, numbers[:, place])
        token = int(np.asarray(state["latest"])[0])
        if token in eos:
            return True
        if not on_token(token):
            break
    return False


def power_of_two(count: int, least: int = 1) -> int:
    """Round a number up to a power of two, so that few shapes are compiled."""
    return max(least, 1 << (int(count) - 1).bit_length())


@lru_cache(maxsize=64)
def _compiled_steps(network: Network, width: int, total: int, fields: tuple, eos: tuple[int, ...]
                    ) -> tuple[Callable, Callable]:
    """Return `token_steps`, jitted; a step's input state is donated."""
    begin, step = token_steps(network, width, total, Generation(*fields), jnp.array(eos, jnp.int32))
    return jax.jit(begin), jax.jit(step, donate_argnums=1)


# ---------------------------------------------------------------------------------------------------------------------
# Shared by all decoding methods: running the network on growing texts, and processing logits.

OUT = -jnp.inf


class Forward:
    """Run a network on N texts that grow by one token per step, in arrays of `total` tokens.

    Args:
        use_cache: Keep keys and values of past tokens; False recomputes the whole text for each token.
    """

    def __init__(self, network: Network, use_cache: bool):
        self._network, self._use_cache = network, use_cache

    def start(self, params: Tree, tokens: Array, real: Array, width: int) -> tuple[Tree, Array]:
        """Return the state kept between steps, and the hidden states [N, D] of the prompts' last tokens.

        Args:
            tokens: [N, total], the prompts right-aligned in the first `width`.
            real: [N, total] bool, False for padding and tokens not yet generated.
        """
        if not self._use_cache:
            return {}, self._whole(params, tokens, real, width)
        positions = _positions(real[:, :width])
        batch = {"input_ids": tokens[:, :width], "attention_mask": real[:, :width].astype(jnp.int32),
                 "position_ids": positions}
        # All prompts in one pass. They are right-aligned, so their last tokens are in the last column.
        hidden, cache = self._network.hidden(params, batch, cache=self._network.init_cache(*tokens.shape))
        return {"cache": cache, "position": positions[:, -1]}, hidden[:, -1]

    def step(self, params: Tree, kept: Tree, tokens: Array, real: Array, place: Array) -> tuple[Tree, Array]:
        """Return the state kept and the hidden states [N, D] of the latest tokens, at `place`."""
        if not self._use_cache:
            return kept, self._whole(params, tokens, real, place + 1)
        position, ones = kept["position"] + 1, jnp.ones((len(tokens), 1), jnp.int32)
        # One column of all rows; the cache remembers which of the earlier slots are padding.
        batch = {"input_ids": jax.lax.dynamic_slice_in_dim(tokens, place, 1, axis=1), "attention_mask": ones,
                 "position_ids": position[:, None]}
        hidden, cache = self._network.hidden(params, batch, cache=kept["cache"])
        return {"cache": cache, "position": position}, hidden[:, 0]

    def pick(self, kept: Tree, rows: Array) -> Tree:
        """Return the state kept for these rows, in this order; rows may repeat."""
        if not self._use_cache:
            return kept
        cache = kept["cache"]
        # Leaves are [layers, N, ...].
        picked = {"layers": jax.tree.map(lambda leaf: leaf[:, rows], cache["layers"]), "valid": cache["valid"][rows]}
        return {"cache": {**cache, **picked}, "position": kept["position"][rows]}

    def _whole(self, params: Tree, tokens: Array, real: Array, end: Array | int) -> Array:
        # As segments, because the fused kernel does not take a left-padded `attention_mask`.
        batch = {"input_ids": tokens, "segment_ids": real.astype(jnp.int32), "position_ids": _positions(real)}
        hidden = self._network.hidden(params, batch)
        return jax.lax.dynamic_index_in_dim(hidden, end - 1, axis=1, keepdims=False)


def _positions(real: Array) -> Array:
    # Positions count real tokens from 0; padding before the text gets 0.
    return jnp.maximum(jnp.cumsum(real, axis=1) - 1, 0)


def apply_constraints(settings: Generation, logits: Array, tokens: Array, real: Array, place: Array, width: int,
                      ends: Array
                ) -> Array:
    """Apply the rules common to search and sampling to the logits [N, V] of the token at `place`."""
    if settings.repetition_penalty != 1.0:
        logits = penalise_repetition(logits, tokens, real, settings.repetition_penalty)
    if settings.no_repeat_ngram_size:
        logits = ban_repeated_ngrams(logits, tokens, real, place, settings.no_repeat_ngram_size)
    if settings.min_new_tokens and len(ends):
        logits = jnp.where(place - width < settings.min_new_tokens, logits.at[:, ends].set(OUT), logits)
    return logits


def filter_logits(settings: Generation, logits: Array, least: int = 1) -> Array:
    """Apply temperature, top-k, top-p and typical filtering to logits [N, V]; keep at least `least` tokens per row."""
    logits = logits / settings.temperature
    logits = keep_top_k(logits, max(settings.top_k, least)) if settings.top_k else logits
    logits = keep_top_p(logits, settings.top_p, least) if settings.top_p < 1.0 else logits
    return keep_typical(logits, settings.typical_p, least) if settings.typical_p < 1.0 else logits


def penalise_repetition(logits: Array, tokens: Array, real: Array, penalty: float) -> Array:
    """Apply the repetition penalty (Keskar et al. 2019). Padding does not count as an occurrence.

    Args:
        logits: [B, V].
        tokens: [B, S].
        real: [B, S] bool, True for the text so far.
    """
    rows = jnp.arange(len(logits))[:, None]
    # A maximum, because a token may occur both in the text and as padding.
    seen = jnp.zeros(logits.shape, bool).at[rows, tokens].max(real)
    return jnp.where(seen, jnp.where(logits < 0, logits * penalty, logits / penalty), logits)


def ban_repeated_ngrams(logits: Array, tokens: Array, real: Array, place: Array, size: int) -> Array:
    """Forbid tokens that would complete an n-gram already in the text before `place`."""
    # Compare the n - 1 latest tokens with the beginning of the n-gram at every start.
    starts = tokens.shape[1] - size + 1
    latest = jax.lax.dynamic_slice_in_dim(tokens, place - size + 1, size - 1, axis=1) if size > 1 else tokens[:, :0]
    same = jnp.ones((len(tokens), starts), bool)
    for offset in range(size):
        same &= real[:, offset:offset + starts]
        if offset < size - 1:
            same &= tokens[:, offset:offset + starts] == latest[:, offset, None]
    # Only n-grams that end before `place`; the last token of each match is banned.
    same &= jnp.arange(starts) + size - 1 < place
    rows = jnp.arange(len(logits))[:, None]
    banned = jnp.zeros(logits.shape, bool).at[rows, tokens[:, size - 1:]].max(same)
    return jnp.where(banned, OUT, logits)


def keep_top_k(logits: Array, k: int) -> Array:
    """Keep the k likeliest tokens, and ties with the last of them."""
    return jnp.where(logits < kth_largest(logits, min(k, logits.shape[-1]))[:, None], OUT, logits)


def kth_largest(values: Array, k: int) -> Array:
    """Return the k-th largest value of each row, [N] for [N, V].

    XLA sorts whole rows on CPUs. Here each row is divided into blocks: the k blocks with the largest maxima hold the k
    largest values, or others equal to them, and only these are sorted.
    """
    num, size = values.shape
    # Blocks of this size make the two sorted lists, of maxima and of the values in k blocks, equally long.
    block = max(int((size / k) ** 0.5), 1)
    if block > 1:
        blocks = jnp.pad(values, ((0, 0), (0, -size % block)), constant_values=-jnp.inf).reshape(num, -1, block)
        chosen = jax.lax.top_k(blocks.max(-1), k)[1]
        values = jnp.take_along_axis(blocks, chosen[..., None], axis=1).reshape(num, -1)
    return jax.lax.top_k(values, k)[0][:, -1]


def keep_top_p(logits: Array, p: float, least: int = 1) -> Array:
    """Keep the smallest set of likeliest tokens whose total probability reaches p (Holtzman et al. 2020)."""
    order = jnp.argsort(logits, axis=-1, stable=True)
    rising = jnp.cumsum(jax.nn.softmax(jnp.take_along_axis(logits, order, -1), -1), -1)
    # In ascending order, a token goes if it and all less likely ones hold at most 1 - p.
    out = (rising <= 1 - p).at[:, -least:].set(False)
    return jnp.where(_scatter(out, order), OUT, logits)


def keep_typical(logits: Array, p: float, least: int = 1) -> Array:
    """Keep the tokens whose surprisal is nearest the entropy, up to a total probability of p (Meister et al. 2022)."""
    logs = jax.nn.log_softmax(logits, -1)
    probs = jnp.exp(logs)
    # 0 * -inf of tokens that earlier filters have excluded would be NaN.
    entropy = -jnp.where(probs > 0, probs * logs, 0.0).sum(-1, keepdims=True)
    order = jnp.argsort(jnp.abs(-logs - entropy), axis=-1, stable=True)
    rising = jnp.cumsum(jnp.take_along_axis(probs, order, -1), -1)
    # Keep a token if those before it have not reached p, and the first `least` in any case.
    out = jnp.concatenate([jnp.zeros_like(rising[:, :1], bool), rising[:, :-1] >= p], -1).at[:, :least].set(False)
    return jnp.where(_scatter(out, order), OUT, logits)


def _scatter(values: Array, order: Array) -> Array:
    """Scatter values in sorted order back to token order."""
    return jnp.zeros_like(values).at[jnp.arange(len(values))[:, None], order].set(values)


# ---------------------------------------------------------------------------------------------------------------------
# Beam search, and diverse beam search in groups (Vijayakumar et al. 2018), with the torch engine's rules.
#
# B: prompts. G: groups of S beams, K = G * S. C: candidates. V: vocabulary. `total`: prompt and answer.

LOST = -1e9  # score of a beam that is out of the running; finite, so that sums with it are too


def beam_search(network: Network, width: int, settings: Generation, ends: Array) -> Callable:
    """Return the program (params, ids [B, width], mask [B, width], keys [B]) -> best new tokens [B, max_new_tokens].

    The caller truncates at the first end token. With `do_sample` candidates are sampled, not taken by score.
    """
    num_groups, new = settings.num_beam_groups, settings.max_new_tokens
    size, total = settings.num_beams // num_groups, width + new
    forward, group = Forward(network, settings.use_cache), _Group(width, settings, ends, size)

    def program(params: Tree, ids: Array, mask: Array, row_keys: Array) -> Array:
        batch = ids.shape[0]
        tokens, real = jnp.pad(ids, ((0, 0), (0, new))), jnp.pad(mask, ((0, 0), (0, new))) > 0
        kept, hidden = forward.start(params, tokens, real, width)
        # Each prompt runs once; its K beams start as copies of the result. [B * K]
        copies = jnp.repeat(jnp.arange(batch), settings.num_beams)
        state = {"groups": [group.start(tokens) for _ in range(num_groups)], "real": real, "place": jnp.int32(width),
                 "kept": forward.pick(kept, copies), "hidden": hidden[copies]}

        def step(state: Tree) -> Tree:
            place = state["place"]
            logs = jax.nn.log_softmax(network.logits(params, state["hidden"]), -1)
            # [B * K, V] -> [B, G, S, V]
            logs = logs.reshape(batch, num_groups, size, -1)
            # A key per row and step, so that a row's draws do not depend on the others.
            keys = jax.vmap(jax.random.fold_in, in_axes=(0, None))(row_keys, place - width)
            taken = jnp.zeros_like(logs[:, 0, 0])  # number of beams of earlier groups that chose each token
            groups, parents = [], []
            # Groups take turns within a step: each is penalised for tokens that earlier groups have chosen at this
            # place.
            for number, beams in enumerate(state["groups"]):
                penalised = logs[:, number] - settings.diversity_penalty * taken[:, None] if number else logs[:, 0]
                beams, origin, took = group.advance(beams, penalised, state["real"], place, keys)
                groups.append(beams)
                # From the group's S beams to the prompt's K.
                parents.append(origin + number * size)
                taken = taken + took
            real = jax.lax.dynamic_update_slice_in_dim(state["real"], jnp.ones((batch, 1), bool), place, axis=1)
            # [B, K] parents -> [B * K] rows of the flat batch, by which the caches are reordered.
            rows = (jnp.arange(batch)[:, None] * settings.num_beams + jnp.concatenate(parents, 1)).reshape(-1)
            tokens = jnp.stack([beams["tokens"] for beams in groups], 1).reshape(-1, total)
            kept, hidden = forward.step(params, forward.pick(state["kept"], rows), tokens, real[copies], place)
            return {"groups": groups, "real": real, "place": place + 1, "kept": kept, "hidden": hidden}

        def goes_on(state: Tree) -> Array:
            return (state["place"] < total) & jnp.stack([beams["open"] for beams in state["groups"]]).any()

        groups = jax.lax.while_loop(goes_on, step, state)["groups"]
        # The best finished beam over all groups of a prompt.
        best = jnp.concatenate([beams["best_scores"] for beams in groups], 1).argmax(1)
        return _at(jnp.concatenate([beams["best"] for beams in groups], 1), best[:, None])[:, 0]

    return program


class _Group:
    """Beam search with S beams for each of B prompts; `advance` extends its state by one token."""

    def __init__(self, width: int, settings: Generation, ends: Array, size: int):
        self._width, self._settings, self._ends, self._size = width, settings, ends, size

    def start(self, tokens: Array) -> Tree:
        """Return the initial state for prompts [B, total]."""
        scores = jnp.full((len(tokens), self._size), LOST).at[:, 0].set(0.0)  # beams start equal: one runs
        tokens = jnp.repeat(tokens[:, None], self._size, 1)
        return {"tokens": tokens, "scores": scores,  # running beams, and their summed log-probabilities
                # The best finished beams, best first, and their sums divided by length ** length_penalty.
                "best": tokens[..., self._width:], "best_scores": jnp.full_like(scores, -jnp.inf),
                "open": jnp.ones(len(tokens), bool)}  # True while better beams may finish

    def advance(self, beams: Tree, logs: Array, real: Array, place: Array, keys: Array) -> tuple[Tree, Array, Array]:
        """Return the state after one more token, each beam's parent [B, S], and the beams per chosen token [B, V].

        Args:
            logs: [B, S, V] log-probabilities of the next token.
            real: [B, total] bool, True for the text so far.
            place: Index of the next token.
            keys: [B] random keys.
        """
        batch, size, vocabulary = logs.shape
        scores, picked = self._candidates(beams, logs, real, place, keys)
        # Candidates are indices into the flat [S * V]. Their texts: [B, C, total].
        parents, token = picked // vocabulary, picked % vocabulary
        tokens = _at(beams["tokens"], parents)
        tokens = jax.lax.dynamic_update_slice_in_dim(tokens, token[..., None], place, axis=2)
        length, was_open, ends = place + 1 - self._width, beams["open"][:, None], jnp.isin(token, self._ends)
        ended = ends | (length == self._settings.max_new_tokens)
        # `length` counts new tokens, this one included.
        weight = jnp.float32(length) ** self._settings.length_penalty
        # A candidate that ended can become one of the best only if it is among the first S.
        won = ended & was_open & (jnp.arange(scores.shape[1]) < size)
        best_scores = jnp.concatenate([beams["best_scores"], jnp.where(won, scores / weight, -jnp.inf)], 1)
        # [B, S + C] -> the S best, best first.
        best_scores, best = jax.lax.top_k(best_scores, size)
        best = _at(jnp.concatenate([beams["best"], tokens[..., self._width:]], 1), best)
        # Running beams first, then those ended by length only: their tokens count towards the diversity penalty of
        # later groups, while end tokens do not.
        # The last key of a lexsort counts first: 0 running, 1 ended by length, 2 ended by a token; then the score.
        order = jnp.lexsort((-scores, ended.astype(jnp.int32) + ends))[:, :size]
        scores, tokens = _at(jnp.where(ended, LOST, scores), order), _at(tokens, order)
        # Closed for good once all candidates have ended, or the best running beam, at its present length, does not beat
        # the worst of the finished ones.
        is_open = beams["open"] & (scores[:, 0] / weight > best_scores[:, -1]) & ~ended.all(1)
        # Beams of a search that has ended continue, but their tokens do not count.
        chosen = jnp.broadcast_to(was_open, order.shape).astype(jnp.float32)
        took = jnp.zeros((batch, vocabulary)).at[jnp.arange(batch)[:, None], _at(token, order)].add(chosen)
        state = {"tokens": tokens, "scores": scores, "best": best, "best_scores": best_scores, "open": is_open}
        return state, _at(parents, order), took

    def _candidates(self, beams: Tree, logs: Array, real: Array, place: Array, keys: Array) -> tuple[Array, Array]:
        """Return the candidates' sums [B, C] and indices into S * V. C is large enough that S candidates do not end."""
        batch, size, vocabulary = logs.shape
        settings, count = self._settings, size * max(2, 1 + len(self._ends))
        logs = apply_constraints(settings, logs.reshape(-1, vocabulary), beams["tokens"].reshape(batch * size, -1),
                                 jnp.repeat(real, size, 0), place, self._width, self._ends)
        if settings.do_sample:
            # More tokens than there are end tokens, so that each beam can go on.
            logs = filter_logits(settings, logs, least=1 + max(1, len(self._ends)))
        sums = (beams["scores"][..., None] + logs.reshape(batch, size, vocabulary)).reshape(batch, -1)
        ranks = sums
        if settings.do_sample:  # Gumbel top-k: the largest perturbed scores are a sample without replacement
            ranks = sums + jax.vmap(lambda key: jax.random.gumbel(key, sums.shape[1:]))(keys)
        # Candidates are chosen by the perturbed scores, and keep their own.
        picked = jax.lax.top_k(ranks, min(count, sums.shape[1]))[1]
        return _at(sums, picked), picked


def _at(x: Array, places: Array) -> Array:
    """Return the items [B, M, ...] of x [B, N, ...] at indices [B, M]."""
    return jnp.take_along_axis(x, places.reshape(*places.shape, *[1] * (x.ndim - 2)), axis=1)
