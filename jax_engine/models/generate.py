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
from lmmods.core.generation_config import UNIT, sampling_uniforms
from lmmods.core.settings import Generation, check_beam_groups
from lmmods.rollouts.policy import SampledAnswer

BUCKET = 32  # prompt lengths are rounded up to a multiple of this, so that few shapes are compiled
# Drop finished sequences when at most this fraction of the batch is still generating, and never from a batch of fewer
# than MIN_ROWS: every new batch size compiles a program.
ACTIVE_FRACTION, MIN_ROWS = 1 / 4, 16


def check_supported(settings: Generation) -> None:
    """Raise UserError for a decoding method that this engine does not support, or an invalid combination."""
    if settings.penalty_alpha:
        raise UserError(f"generation.penalty_alpha is {settings.penalty_alpha}, but the JAX engine does not support "
                        "contrastive search. Remove it, or use engine: torch.")
    check_beam_groups(settings.num_beams, settings.num_beam_groups, settings.diversity_penalty, settings.do_sample)


def check_length(network: Network, length: int, settings: Generation) -> None:
    """Raise UserError if the prompt is empty, or prompt and answer exceed the network's learned positions."""
    if not length:
        raise UserError("An empty prompt cannot be continued. Add at least a beginning-of-text token.")
    if network.arch.positions != "rope":
        settings.check_positions(length, network.arch.max_positions)


def generate(network: Network, params: Tree, prompts: list[list[int]], settings: Generation, eos: list[int],
             pad: int, seed: int = 0, rows: Sequence[int] | None = None, num_answers: int = 1,
             inputs: dict[str, np.ndarray] | None = None) -> list[list[int]]:
    """Return the new tokens after each prompt, up to but excluding the first end token.

    A row's answer does not depend on the other rows of the batch. Without beams, repeated prompts are computed once,
    and finished sequences leave the batch.

    Args:
        prompts: Token ids, at least one per prompt; left-padded with `pad`.
        seed: Sampling seed.
        rows: Row indices, which seed each row's sampling. Default: 0, 1, 2, ...
        num_answers: Number of sampled answers per prompt, consecutive in the result; 1 with beams.
        inputs: Further columns of the network's batches, [prompts, ...], such as images.

    Raises:
        UserError: The engine does not support the decoding method, or there are more tokens than positions.
    """
    check_supported(settings)
    max_length = max(len(prompt) for prompt in prompts)
    check_length(network, min(len(prompt) for prompt in prompts), settings)
    check_length(network, max_length, settings)
    width = -(-max_length // BUCKET) * BUCKET
    rows, inputs = range(len(prompts)) if rows is None else rows, inputs or {}
    # Hashable arguments: the compiled programs are cached by them.
    programs = _compiled(network, width, astuple(settings), tuple(sorted(eos)))
    if settings.num_beams > 1:  # beam search samples several tokens per step without replacement, which needs a key
        keys = jax.vmap(jax.random.fold_in, in_axes=(None, 0))(jax.random.key(seed), np.array(rows, np.int32))
        tokens = np.asarray(programs(params, *_pad(prompts, width, pad), keys, inputs))
    else:
        prompts = [prompt for prompt in prompts for _ in range(num_answers)]
        uniforms = sampling_uniforms(seed, rows, settings.max_new_tokens, num_answers)
        outputs = _run_single_search(programs, params, prompts, width, pad, uniforms, None, inputs, num_answers)
        tokens = outputs["tokens"]
    return [_truncate(row.tolist(), eos) for row in tokens]


def sample_answers(network: Network, params: Tree, prompts: Sequence[Sequence[int]], uniforms: np.ndarray | None,
                   temperature: float, max_new_tokens: int, ends: Sequence[int], pad: int) -> list[SampledAnswer]:
    """Answer prompts, and compute the log-probability and entropy of each token in the same pass.

    Samples from the whole vocabulary. Widths and batch sizes are rounded up to powers of two, so that few shapes are
    compiled. Arguments as for `Policy.draw`.

    Args:
        uniforms: The `numbers` of `Policy.draw`.
        temperature: Also applies to the log-probabilities and entropies of greedy search.
        pad: Token that prompts are left-padded with.

    Raises:
        UserError: A prompt is empty, or there are more tokens than positions.
    """
    if not len(prompts):
        return []
    settings = Generation(max_new_tokens=max_new_tokens, top_k=0)
    if uniforms is None:
        uniforms = np.zeros((len(prompts), max_new_tokens), np.float32)
    else:
        settings = replace(settings, do_sample=True, temperature=temperature)
    lengths = [len(prompt) for prompt in prompts]
    check_length(network, min(lengths), settings)
    check_length(network, max(lengths), settings)
    width = next_power_of_two(max(lengths), BUCKET)
    programs = _compiled(network, width, astuple(settings), tuple(sorted(ends)), temperature)
    outputs = _run_single_search(programs, params, prompts, width, pad, uniforms, next_power_of_two(len(prompts)))
    is_end = np.isin(outputs["tokens"], list(ends))
    has_ended = is_end.any(1)
    lengths = np.where(has_ended, is_end.argmax(1) + 1, max_new_tokens)
    # Copies, so that an answer does not keep all of them in memory.
    return [SampledAnswer(*(outputs[name][row, :length].copy() for name in ("tokens", *SCORES)), bool(has_ended[row]))
            for row, length in enumerate(lengths)]


def _pad(prompts: Sequence[Sequence[int]], width: int, pad: int) -> tuple[np.ndarray, np.ndarray]:
    """Return ids and mask [B, width] of prompts, left-padded, so that all end in the same column."""
    ids = np.full((len(prompts), width), pad, np.int32)
    mask = np.zeros_like(ids)
    for row, prompt in enumerate(prompts):
        ids[row, width - len(prompt):] = prompt
        mask[row, width - len(prompt):] = 1
    return ids, mask


def _run_single_search(programs: tuple[Callable, ...], params: Tree, prompts: Sequence[Sequence[int]], width: int,
                       pad: int, uniforms: np.ndarray, size: int | None = None,
                       inputs: dict[str, np.ndarray] | None = None, num_answers: int = 1) -> dict[str, np.ndarray]:
    """Run the programs of `single_search`.

    Args:
        size: Batch size, at least the number of prompts. Default: the number of prompts.
        inputs: Further columns of the network's batches, a row for every `num_answers` prompts, which are equal.

    Returns:
        New `tokens` [B, max_new_tokens], arbitrary after an end token, and `SCORES` likewise if the programs have them.
    """
    start, proceed, select = programs
    num, size = len(prompts), size or len(prompts)
    indices: dict[tuple[int, ...], int] = {}
    copies = np.zeros(size, np.int32)
    # With further inputs, prompts of the same tokens differ.
    keys = [(*prompt, row // num_answers) if inputs else tuple(prompt) for row, prompt in enumerate(prompts)]
    copies[:num] = [indices.setdefault(key, len(indices)) for key in keys]
    distinct = list(indices)
    are_distinct = len(distinct) == num
    # Round up the number of distinct prompts, so that few shapes are compiled.
    distinct += distinct[:1] * ((size if are_distinct else min(next_power_of_two(len(distinct)), size)) - len(distinct))
    columns = {name: column[[key[-1] for key in distinct]] for name, column in (inputs or {}).items()}
    distinct = [key[:-1] for key in distinct] if inputs else distinct
    state = start(params, *_pad(distinct, width, pad), None if are_distinct else copies, None if size == num else num,
                  columns)
    uniforms, rows = np.pad(uniforms, ((0, size - num), (0, 0))), np.arange(size)
    outputs = {name: np.zeros(uniforms.shape, state[name].dtype) for name in ("tokens", *SCORES) if name in state}
    while True:
        state = proceed(params, state, uniforms[rows])
        for name, values in outputs.items():
            values[rows] = np.asarray(state[name])[:, -values.shape[1]:]
        has_ended = np.asarray(state["ended"])
        if has_ended.all() or int(state["index"]) == width + uniforms.shape[1]:
            return {name: values[:num] for name, values in outputs.items()}
        # Unfinished rows first, then as many finished ones as fill a size that depends only on the batch size.
        kept = np.argsort(has_ended, kind="stable")[:next_power_of_two(int(ACTIVE_FRACTION * len(has_ended)))]
        state, rows = select(state, kept), rows[kept]


def sample_tokens(logits: Array, uniforms: Array) -> Array:
    """Sample tokens [B] by inversion: the first at which the cumulative probability exceeds the row's uniform number.

    Args:
        logits: [B, V].
        uniforms: [B] uniform random numbers in [0, 1).
    """
    # Integer arithmetic makes the cumulative sum exact, so it does not depend on the order of summation.
    units = jnp.round(jax.nn.softmax(logits, -1) / UNIT).astype(jnp.int32)
    num, size = units.shape
    # Sum in two steps, over blocks and within one of them: a cumulative sum of whole rows is slow in XLA on CPUs.
    block = int(size**0.5)
    blocks = jnp.pad(units, ((0, 0), (0, -size % block))).reshape(num, -1, block)
    ends = jnp.cumsum(blocks.sum(-1), -1)
    # Scale to the actual total, which rounding moves away from 1, and stay below it.
    threshold = jnp.minimum((uniforms * ends[:, -1]).astype(jnp.int32), ends[:, -1] - 1)[:, None]
    # The number of sums up to the threshold is the index of the first sum above it.
    block_index = (ends <= threshold).sum(-1, keepdims=True)
    block_units = jnp.take_along_axis(blocks, block_index[..., None], axis=1)[:, 0]
    sum_before = jnp.take_along_axis(ends, block_index, axis=1) - block_units.sum(-1, keepdims=True)
    return block_index[:, 0] * block + (sum_before + jnp.cumsum(block_units, -1) <= threshold).sum(-1)


SCORES = ("logps", "entropies")  # of new tokens, in the state of a search that computes them


def log_probs_and_entropies(logits: Array, tokens: Array) -> dict[str, Array]:
    """Return `SCORES` of tokens [B] sampled from logits [B, V], each [B] float32."""
    # `sample_tokens` needs the same maximum and exponentials; the compiler computes them once.
    shifted = logits - logits.max(-1, keepdims=True)
    weights = jnp.exp(shifted)
    total = weights.sum(-1)
    logps = jnp.take_along_axis(shifted, tokens[:, None], axis=1)[:, 0] - jnp.log(total)
    return {"logps": logps, "entropies": jnp.log(total) - (weights * shifted).sum(-1) / total}


def _truncate(tokens: list[int], ends: list[int]) -> list[int]:
    return tokens[:next((index for index, token in enumerate(tokens) if token in ends), len(tokens))]


@lru_cache(maxsize=64)
def _compiled(network: Network, width: int, fields: tuple, eos: tuple[int, ...], temperature: float | None = None
              ) -> Callable | tuple[Callable, ...]:
    """Return the jitted program of `beam_search`, or those of `single_search`."""
    settings, ends = Generation(*fields), jnp.array(eos, jnp.int32)
    if settings.num_beams > 1:
        return jax.jit(beam_search(network, width, settings, ends))
    start, proceed, select = single_search(network, width, settings, ends, temperature)
    return jax.jit(start), jax.jit(proceed, donate_argnums=1), jax.jit(select)


def single_search(network: Network, width: int, settings: Generation, ends: Array, temperature: float | None = None
                  ) -> tuple[Callable, ...]:
    """Return the programs of greedy search or sampling: one text per row.

    Args:
        temperature: See `token_steps`.

    Returns:
        start: (params, ids [U, width], mask [U, width], copies [B] or None, count or None, inputs [U, ...]) -> state of
            B rows. `copies` is the index of each row's prompt among U distinct ones; None: B = U. Rows from `count` on
            have ended. `inputs` are further columns of the prompts.
        proceed: (params, state, uniforms [B, max_new_tokens]) -> state in which all rows have ended or have
            `max_new_tokens` tokens, or so few are unfinished that the others should leave.
        select: (state, rows [N]) -> state of these rows.
    """
    total = width + settings.max_new_tokens
    prefill, step = token_steps(network, width, total, settings, ends, temperature)
    forward = Forward(network, settings.use_cache)

    def select(state: Tree, rows: Array) -> Tree:
        by_row = {name: x[rows] for name, x in state.items() if name not in ("index", "carry")}
        return {**state, **by_row, "carry": forward.select(state["carry"], rows)}

    def start(params: Tree, ids: Array, mask: Array, copies: Array | None = None, count: Array | None = None,
              inputs: dict[str, Array] | None = None) -> Tree:
        state = prefill(params, ids, mask, inputs)
        state = state if copies is None else select(state, copies)
        return state if count is None else {**state, "ended": jnp.arange(len(state["ended"])) >= count}

    def proceed(params: Tree, state: Tree, uniforms: Array) -> Tree:
        size = len(uniforms)
        min_active = int(ACTIVE_FRACTION * size) if size >= MIN_ROWS else 0

        def may_continue(state: Tree) -> Array:
            return (state["index"] < total) & ((~state["ended"]).sum() > min_active)

        def add_token(state: Tree) -> Tree:
            return step(params, state, jax.lax.dynamic_index_in_dim(uniforms, state["index"] - width, 1, False))

        return jax.lax.while_loop(may_continue, add_token, state)

    return start, proceed, select


def token_steps(network: Network, width: int, total: int, settings: Generation, ends: Array,
                temperature: float | None = None) -> tuple[Callable, Callable]:
    """Return the two functions of single search, for texts of `total` tokens; the first `width` are the prompts.

    Args:
        temperature: Temperature of `log_probs_and_entropies`; None does not compute them.

    Returns:
        prefill: (params, ids [B, width], mask [B, width], inputs [B, ...] or None) -> state. Its `tokens` [B, total]
            are filled up to `index`.
        step: (params, state, uniforms [B]) -> state with one more token, also in `latest` [B].
    """
    forward = Forward(network, settings.use_cache)

    def choose(logits: Array, state: Tree, uniforms: Array) -> Array:
        logits = apply_constraints(settings, logits, state["tokens"], state["real"], state["index"], width, ends)
        return sample_tokens(filter_logits(settings, logits), uniforms) if settings.do_sample else logits.argmax(-1)

    def prefill(params: Tree, ids: Array, mask: Array, inputs: dict[str, Array] | None = None) -> Tree:
        tokens = jnp.pad(ids, ((0, 0), (0, total - width)))
        real = jnp.pad(mask, ((0, 0), (0, total - width))) > 0
        # From here on arrays have the full length, so that every step has the same shapes.
        carry, hidden = forward.prefill(params, tokens, real, width, inputs)
        return {"tokens": tokens, "real": real, "index": jnp.int32(width), "carry": carry, "hidden": hidden,
                # No token has been chosen yet: any array of the right shape serves as `latest`.
                "latest": tokens[:, 0], "ended": jnp.zeros(len(ids), bool),
                **({} if temperature is None else {name: jnp.zeros((len(ids), total - width)) for name in SCORES})}

    def step(params: Tree, state: Tree, uniforms: Array) -> Tree:
        index = state["index"]
        logits = network.logits(params, state["hidden"])
        token = choose(logits, state, uniforms).astype(jnp.int32)
        tokens = jax.lax.dynamic_update_slice_in_dim(state["tokens"], token[:, None], index, axis=1)
        ones = jnp.ones((len(tokens), 1), bool)
        real = jax.lax.dynamic_update_slice_in_dim(state["real"], ones, index, axis=1)
        # Hidden states of the new token, from which the next step chooses.
        carry, hidden = forward.step(params, state["carry"], tokens, real, index)
        ended = state["ended"] | jnp.isin(token, ends)
        scores = {} if temperature is None else {
            name: jax.lax.dynamic_update_slice_in_dim(state[name], values[:, None], index - width, axis=1)
            for name, values in log_probs_and_entropies(logits / temperature, token).items()}
        return {"tokens": tokens, "real": real, "index": index + 1, "carry": carry, "hidden": hidden, "latest": token,
                "ended": ended, **scores}

    return prefill, step


def stream(network: Network, params: Tree, prompt: list[int], settings: Generation, eos: list[int], pad: int,
           seed: int, row: int, on_token: Callable[[int], bool], inputs: dict[str, np.ndarray] | None = None) -> bool:
    """Generate as `generate` for one prompt, and pass each token to `on_token` when it is chosen.

    Beam search passes all tokens at its end.

    Args:
        on_token: Called with each token of the answer. Generation stops if it returns False.
        inputs: Further columns of the network's batches, [1, ...].

    Returns:
        True if an end token was generated.

    Raises:
        UserError: As for `generate`.
    """
    if settings.num_beams > 1:
        # Until the search ends, another beam may overtake the best one, so no token is final before.
        [answer] = generate(network, params, [prompt], settings, eos, pad, seed, [row], inputs=inputs)
        return all(map(on_token, answer)) and len(answer) < settings.max_new_tokens
    check_supported(settings)
    check_length(network, len(prompt), settings)
    # A growing conversation rarely recompiles.
    width, max_new_tokens = next_power_of_two(len(prompt), BUCKET), settings.max_new_tokens
    fields = astuple(replace(settings, max_new_tokens=1))  # part of the cache key, but unused by the programs
    total = width + next_power_of_two(max_new_tokens, BUCKET)
    prefill, step = _compiled_steps(network, width, total, fields, tuple(sorted(eos)))
    # The same random numbers as in `generate`, so that a streamed answer is the same.
    state = prefill(params, *_pad([prompt], width, pad), inputs)
    uniforms = sampling_uniforms(seed, [row], max_new_tokens)
    for index in range(max_new_tokens):
        state = step(params, state, uniforms[:, index])
        token = int(np.asarray(state["latest"])[0])
        if token in eos:
            return True
        if not on_token(token):
            break
    return False


def next_power_of_two(count: int, minimum: int = 1) -> int:
    """Return the power of two at or above a count, at least `minimum`, so that few shapes are compiled."""
    return max(minimum, 1 << (int(count) - 1).bit_length())


@lru_cache(maxsize=64)
def _compiled_steps(network: Network, width: int, total: int, fields: tuple, eos: tuple[int, ...]
                    ) -> tuple[Callable, Callable]:
    """Return the jitted `token_steps`; a step's input state is donated."""
    prefill, step = token_steps(network, width, total, Generation(*fields), jnp.array(eos, jnp.int32))
    return jax.jit(prefill), jax.jit(step, donate_argnums=1)


# ---------------------------------------------------------------------------------------------------------------------
# Shared by all decoding methods: running the network on growing texts, and processing logits.

EXCLUDED = -jnp.inf


class Forward:
    """Forward passes over N texts that grow by one token per step, in arrays of `total` tokens.

    Args:
        use_cache: Cache keys and values of past tokens; False recomputes the whole text for each token.
    """

    def __init__(self, network: Network, use_cache: bool):
        self._network, self._use_cache = network, use_cache

    def prefill(self, params: Tree, tokens: Array, real: Array, width: int, inputs: dict[str, Array] | None = None
                ) -> tuple[Tree, Array]:
        """Return the state carried between steps, and the hidden states [N, D] of the prompts' last tokens.

        Args:
            tokens: [N, total], the prompts right-aligned in the first `width`.
            real: [N, total] bool, False for padding and tokens not yet generated.
            inputs: Further columns of the prompts, [N, ...].
        """
        if not self._use_cache:
            carry = dict(inputs or {})
            return carry, self._recompute(params, carry, tokens, real, width)
        batch = {"input_ids": tokens[:, :width], "attention_mask": real[:, :width].astype(jnp.int32),
                 "position_ids": _positions(real[:, :width]), **(inputs or {})}
        # New tokens continue after the largest position, which an image before the last token may have.
        latest = self._network.positions(batch).reshape(len(tokens), -1).max(1)
        # All prompts in one pass. They are right-aligned, so their last tokens are in the last column.
        hidden, cache = self._network.hidden(params, batch, cache=self._network.init_cache(*tokens.shape))
        return {"cache": cache, "position": latest}, hidden[:, -1]

    def step(self, params: Tree, carry: Tree, tokens: Array, real: Array, index: Array) -> tuple[Tree, Array]:
        """Return the carried state and the hidden states [N, D] of the latest tokens, at `index`."""
        if not self._use_cache:
            return carry, self._recompute(params, carry, tokens, real, index + 1)
        position, ones = carry["position"] + 1, jnp.ones((len(tokens), 1), jnp.int32)
        # One column of all rows; the cache remembers which of the earlier slots are padding.
        batch = {"input_ids": jax.lax.dynamic_slice_in_dim(tokens, index, 1, axis=1), "attention_mask": ones,
                 "position_ids": position[:, None]}
        hidden, cache = self._network.hidden(params, batch, cache=carry["cache"])
        return {"cache": cache, "position": position}, hidden[:, 0]

    def select(self, carry: Tree, rows: Array) -> Tree:
        """Return the carried state of these rows, in this order; rows may repeat."""
        if not self._use_cache:
            return {name: column[rows] for name, column in carry.items()}
        cache = carry["cache"]
        # Leaves are [layers, N, ...].
        selected = {"layers": jax.tree.map(lambda leaf: leaf[:, rows], cache["layers"]), "valid": cache["valid"][rows]}
        return {"cache": {**cache, **selected}, "position": carry["position"][rows]}

    def _recompute(self, params: Tree, inputs: dict[str, Array], tokens: Array, real: Array, end: Array | int) -> Array:
        # Pass segments, because the fused kernel does not support a left-padded `attention_mask`.
        batch = {"input_ids": tokens, "segment_ids": real.astype(jnp.int32), "position_ids": _positions(real), **inputs}
        hidden = self._network.hidden(params, batch)
        return jax.lax.dynamic_index_in_dim(hidden, end - 1, axis=1, keepdims=False)


def _positions(real: Array) -> Array:
    # Positions count real tokens from 0; padding before the text gets 0.
    return jnp.maximum(jnp.cumsum(real, axis=1) - 1, 0)


def apply_constraints(settings: Generation, logits: Array, tokens: Array, real: Array, index: Array, width: int,
                      ends: Array) -> Array:
    """Apply the rules common to search and sampling to the logits [N, V] of the token at `index`."""
    if settings.repetition_penalty != 1.0:
        logits = penalise_repetition(logits, tokens, real, settings.repetition_penalty)
    if settings.no_repeat_ngram_size:
        logits = ban_repeated_ngrams(logits, tokens, real, index, settings.no_repeat_ngram_size)
    if settings.min_new_tokens and len(ends):
        logits = jnp.where(index - width < settings.min_new_tokens, logits.at[:, ends].set(EXCLUDED), logits)
    return logits


def filter_logits(settings: Generation, logits: Array, min_tokens: int = 1) -> Array:
    """Apply temperature, top-k, top-p and typical filtering to logits [N, V]; keep at least `min_tokens` per row."""
    logits = logits / settings.temperature
    logits = keep_top_k(logits, max(settings.top_k, min_tokens)) if settings.top_k else logits
    logits = keep_top_p(logits, settings.top_p, min_tokens) if settings.top_p < 1.0 else logits
    return keep_typical(logits, settings.typical_p, min_tokens) if settings.typical_p < 1.0 else logits


def penalise_repetition(logits: Array, tokens: Array, real: Array, penalty: float) -> Array:
    """Apply the repetition penalty (Keskar et al. 2019). Padding does not count as an occurrence.

    Args:
        logits: [B, V].
        tokens: [B, S].
        real: [B, S] bool, True for the text so far.
    """
    rows = jnp.arange(len(logits))[:, None]
    # A maximum, because a token may occur both in the text and as padding.
    occurs = jnp.zeros(logits.shape, bool).at[rows, tokens].max(real)
    return jnp.where(occurs, jnp.where(logits < 0, logits * penalty, logits / penalty), logits)


def ban_repeated_ngrams(logits: Array, tokens: Array, real: Array, index: Array, size: int) -> Array:
    """Exclude tokens that would complete an n-gram already in the text before `index`."""
    # Compare the n - 1 latest tokens with the first n - 1 of the n-gram at every start.
    starts = tokens.shape[1] - size + 1
    latest = jax.lax.dynamic_slice_in_dim(tokens, index - size + 1, size - 1, axis=1) if size > 1 else tokens[:, :0]
    is_match = jnp.ones((len(tokens), starts), bool)
    for offset in range(size):
        is_match &= real[:, offset:offset + starts]
        if offset < size - 1:
            is_match &= tokens[:, offset:offset + starts] == latest[:, offset, None]
    # Only n-grams that end before `index` count; the last token of each match is banned.
    is_match &= jnp.arange(starts) + size - 1 < index
    rows = jnp.arange(len(logits))[:, None]
    is_banned = jnp.zeros(logits.shape, bool).at[rows, tokens[:, size - 1:]].max(is_match)
    return jnp.where(is_banned, EXCLUDED, logits)


def keep_top_k(logits: Array, k: int) -> Array:
    """Keep the k most likely tokens, and ties with the last of them."""
    return jnp.where(logits < kth_largest(logits, min(k, logits.shape[-1]))[:, None], EXCLUDED, logits)


def kth_largest(values: Array, k: int) -> Array:
    """Return the k-th largest value of each row, [N] for [N, V].

    XLA sorts whole rows on CPUs. Here each row is divided into blocks: the k blocks with the largest maxima contain the
    k largest values, or others equal to them, and only these are sorted.
    """
    num, size = values.shape
    # Blocks of this size make the two sorted lists, of maxima and of the values in k blocks, equally long.
    block = max(int((size / k) ** 0.5), 1)
    if block > 1:
        blocks = jnp.pad(values, ((0, 0), (0, -size % block)), constant_values=-jnp.inf).reshape(num, -1, block)
        chosen = jax.lax.top_k(blocks.max(-1), k)[1]
        values = jnp.take_along_axis(blocks, chosen[..., None], axis=1).reshape(num, -1)
    return jax.lax.top_k(values, k)[0][:, -1]


def keep_top_p(logits: Array, p: float, min_tokens: int = 1) -> Array:
    """Keep the smallest set of most likely tokens whose total probability reaches p (Holtzman et al. 2020)."""
    order = jnp.argsort(logits, axis=-1, stable=True)
    cumulative = jnp.cumsum(jax.nn.softmax(jnp.take_along_axis(logits, order, -1), -1), -1)
    # In ascending order, remove a token if it and all less likely ones have at most 1 - p in total.
    is_removed = (cumulative <= 1 - p).at[:, -min_tokens:].set(False)
    return jnp.where(_scatter(is_removed, order), EXCLUDED, logits)


def keep_typical(logits: Array, p: float, min_tokens: int = 1) -> Array:
    """Keep the tokens whose surprisal is nearest the entropy, up to a total probability of p (Meister et al. 2022)."""
    log_probs = jax.nn.log_softmax(logits, -1)
    probs = jnp.exp(log_probs)
    # 0 * -inf of tokens that earlier filters have excluded would be NaN.
    entropy = -jnp.where(probs > 0, probs * log_probs, 0.0).sum(-1, keepdims=True)
    order = jnp.argsort(jnp.abs(-log_probs - entropy), axis=-1, stable=True)
    cumulative = jnp.cumsum(jnp.take_along_axis(probs, order, -1), -1)
    # Keep a token if the earlier ones have not reached p, and the first `min_tokens` in any case.
    is_removed = jnp.concatenate([jnp.zeros_like(cumulative[:, :1], bool), cumulative[:, :-1] >= p], -1)
    is_removed = is_removed.at[:, :min_tokens].set(False)
    return jnp.where(_scatter(is_removed, order), EXCLUDED, logits)


def _scatter(values: Array, order: Array) -> Array:
    """Scatter values in sorted order back to token order."""
    return jnp.zeros_like(values).at[jnp.arange(len(values))[:, None], order].set(values)


# ---------------------------------------------------------------------------------------------------------------------
# Beam search, and diverse beam search in groups (Vijayakumar et al. 2018), by the torch engine's rules.
#
# B: prompts. G: groups of S beams, K = G * S. C: candidates. V: vocabulary. `total`: prompt and answer.

DEAD = -1e9  # score of a beam that no longer competes; finite, so that sums with it are finite


def beam_search(network: Network, width: int, settings: Generation, ends: Array) -> Callable:
    """Return the program (params, ids [B, width], mask [B, width], keys [B], inputs [B, ...]) -> best new tokens
    [B, max_new_tokens].

    The caller truncates at the first end token. With `do_sample`, candidates are sampled, not selected by score.
    """
    num_groups, new = settings.num_beam_groups, settings.max_new_tokens
    size, total = settings.num_beams // num_groups, width + new
    forward, group = Forward(network, settings.use_cache), _BeamGroup(width, settings, ends, size)

    def program(params: Tree, ids: Array, mask: Array, row_keys: Array, inputs: dict[str, Array]) -> Array:
        batch = ids.shape[0]
        tokens, real = jnp.pad(ids, ((0, 0), (0, new))), jnp.pad(mask, ((0, 0), (0, new))) > 0
        carry, hidden = forward.prefill(params, tokens, real, width, inputs)
        # Run each prompt once; its K beams start as copies of the result. [B * K]
        copies = jnp.repeat(jnp.arange(batch), settings.num_beams)
        state = {"groups": [group.init_state(tokens) for _ in range(num_groups)], "real": real,
                 "index": jnp.int32(width), "carry": forward.select(carry, copies), "hidden": hidden[copies]}

        def step(state: Tree) -> Tree:
            index = state["index"]
            log_probs = jax.nn.log_softmax(network.logits(params, state["hidden"]), -1)
            # [B * K, V] -> [B, G, S, V]
            log_probs = log_probs.reshape(batch, num_groups, size, -1)
            # A key per row and step, so that a row's samples do not depend on the others.
            keys = jax.vmap(jax.random.fold_in, in_axes=(0, None))(row_keys, index - width)
            counts = jnp.zeros_like(log_probs[:, 0, 0])  # number of beams of earlier groups that chose each token
            groups, parents = [], []
            # Groups take turns within a step: each is penalised for tokens that earlier groups chose in this step.
            for group_index, beams in enumerate(state["groups"]):
                scores = log_probs[:, group_index]
                scores = scores - settings.diversity_penalty * counts[:, None] if group_index else scores
                beams, group_parents, group_counts = group.advance(beams, scores, state["real"], index, keys)
                groups.append(beams)
                # From the group's S beams to the prompt's K.
                parents.append(group_parents + group_index * size)
                counts = counts + group_counts
            real = jax.lax.dynamic_update_slice_in_dim(state["real"], jnp.ones((batch, 1), bool), index, axis=1)
            # [B, K] parents -> [B * K] rows of the flat batch, by which the caches are reordered.
            rows = (jnp.arange(batch)[:, None] * settings.num_beams + jnp.concatenate(parents, 1)).reshape(-1)
            tokens = jnp.stack([beams["tokens"] for beams in groups], 1).reshape(-1, total)
            carry, hidden = forward.step(params, forward.select(state["carry"], rows), tokens, real[copies], index)
            return {"groups": groups, "real": real, "index": index + 1, "carry": carry, "hidden": hidden}

        def may_continue(state: Tree) -> Array:
            return (state["index"] < total) & jnp.stack([beams["open"] for beams in state["groups"]]).any()

        groups = jax.lax.while_loop(may_continue, step, state)["groups"]
        # The best finished beam over all groups of a prompt.
        best = jnp.concatenate([beams["best_scores"] for beams in groups], 1).argmax(1)
        return _take(jnp.concatenate([beams["best"] for beams in groups], 1), best[:, None])[:, 0]

    return program


class _BeamGroup:
    """Beam search with S beams for each of B prompts; `advance` extends its state by one token."""

    def __init__(self, width: int, settings: Generation, ends: Array, size: int):
        self._width, self._settings, self._ends, self._size = width, settings, ends, size

    def init_state(self, tokens: Array) -> Tree:
        """Return the initial state for prompts [B, total]."""
        scores = jnp.full((len(tokens), self._size), DEAD).at[:, 0].set(0.0)  # beams start equal: one runs
        tokens = jnp.repeat(tokens[:, None], self._size, 1)
        return {"tokens": tokens, "scores": scores,  # running beams, and their summed log-probabilities
                # The best finished beams, best first, and their sums divided by length ** length_penalty.
                "best": tokens[..., self._width:], "best_scores": jnp.full_like(scores, -jnp.inf),
                "open": jnp.ones(len(tokens), bool)}  # True while better beams may finish

    def advance(self, beams: Tree, log_probs: Array, real: Array, index: Array, keys: Array
                ) -> tuple[Tree, Array, Array]:
        """Return the state after one more token, each beam's parent [B, S], and the beams per chosen token [B, V].

        Args:
            log_probs: [B, S, V] log-probabilities of the next token.
            real: [B, total] bool, True for the text so far.
            index: Index of the next token.
            keys: [B] random keys.
        """
        batch, size, vocabulary = log_probs.shape
        scores, candidates = self._candidates(beams, log_probs, real, index, keys)
        # Candidates are indices into the flat [S * V]. Their texts: [B, C, total].
        parents, token = candidates // vocabulary, candidates % vocabulary
        tokens = _take(beams["tokens"], parents)
        tokens = jax.lax.dynamic_update_slice_in_dim(tokens, token[..., None], index, axis=2)
        length, was_open, is_end = index + 1 - self._width, beams["open"][:, None], jnp.isin(token, self._ends)
        has_ended = is_end | (length == self._settings.max_new_tokens)
        # `length` counts new tokens, this one included.
        weight = jnp.float32(length) ** self._settings.length_penalty
        # A candidate that ended can become one of the best only if it is among the first S.
        is_finished = has_ended & was_open & (jnp.arange(scores.shape[1]) < size)
        best_scores = jnp.concatenate([beams["best_scores"], jnp.where(is_finished, scores / weight, -jnp.inf)], 1)
        # [B, S + C] -> the S best, best first.
        best_scores, best = jax.lax.top_k(best_scores, size)
        best = _take(jnp.concatenate([beams["best"], tokens[..., self._width:]], 1), best)
        # Running beams first, then those ended by length only: their tokens count towards the diversity penalty of
        # later groups, while end tokens do not.
        # The last key of a lexsort counts first: 0 running, 1 ended by length, 2 ended by a token; then the score.
        order = jnp.lexsort((-scores, has_ended.astype(jnp.int32) + is_end))[:, :size]
        scores, tokens = _take(jnp.where(has_ended, DEAD, scores), order), _take(tokens, order)
        # Close the search once all candidates have ended, or the best running beam, at its current length, does not
        # beat the worst finished one.
        is_open = beams["open"] & (scores[:, 0] / weight > best_scores[:, -1]) & ~has_ended.all(1)
        # Beams of a search that has ended continue, but their tokens do not count.
        weights = jnp.broadcast_to(was_open, order.shape).astype(jnp.float32)
        token_counts = jnp.zeros((batch, vocabulary)).at[jnp.arange(batch)[:, None], _take(token, order)].add(weights)
        state = {"tokens": tokens, "scores": scores, "best": best, "best_scores": best_scores, "open": is_open}
        return state, _take(parents, order), token_counts

    def _candidates(self, beams: Tree, log_probs: Array, real: Array, index: Array, keys: Array) -> tuple[Array, Array]:
        """Return the candidates' sums [B, C] and indices into S * V. C is large enough that S candidates do not end."""
        batch, size, vocabulary = log_probs.shape
        settings, num_candidates = self._settings, size * max(2, 1 + len(self._ends))
        log_probs = apply_constraints(settings, log_probs.reshape(-1, vocabulary),
                                      beams["tokens"].reshape(batch * size, -1), jnp.repeat(real, size, 0), index,
                                      self._width, self._ends)
        if settings.do_sample:
            # Keep more tokens than there are end tokens, so that each beam can continue.
            log_probs = filter_logits(settings, log_probs, min_tokens=1 + max(1, len(self._ends)))
        sums = (beams["scores"][..., None] + log_probs.reshape(batch, size, vocabulary)).reshape(batch, -1)
        ranks = sums
        if settings.do_sample:  # Gumbel top-k: the largest perturbed scores are a sample without replacement
            ranks = sums + jax.vmap(lambda key: jax.random.gumbel(key, sums.shape[1:]))(keys)
        # Candidates are selected by the perturbed scores, and keep their original ones.
        candidates = jax.lax.top_k(ranks, min(num_candidates, sums.shape[1]))[1]
        return _take(sums, candidates), candidates


def _take(x: Array, indices: Array) -> Array:
    """Return the items [B, M, ...] of x [B, N, ...] at indices [B, M]."""
    return jnp.take_along_axis(x, indices.reshape(*indices.shape, *[1] * (x.ndim - 2)), axis=1)
