"""Beam search, and diverse beam search in groups (Vijayakumar et al. 2018), by the rules of the torch engine.

B: prompts. G: groups of S beams, K = G * S. C: candidates. V: vocabulary. `total`: prompt and answer.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import Array

from jax_engine.distributed.tree import Tree
from jax_engine.models.decoding import Forward, constrained, narrowed
from jax_engine.models.network import Network
from lmmods.core.settings import Generation

LOST = -1e9  # Score of a beam that is out of the running; sums with it stay finite.


def beam_search(network: Network, width: int, settings: Generation, ends: Array) -> Callable:
    """The program (params, ids [B, width], mask [B, width], keys [B]) -> the best new tokens [B, max_new_tokens].

    The caller truncates after an end token. With `do_sample` candidates are drawn instead of taken by their scores.
    """
    num_groups, new = settings.num_beam_groups, settings.max_new_tokens
    size, total = settings.num_beams // num_groups, width + new
    forward, group = Forward(network, settings.use_cache), _Group(width, settings, ends, size)

    def program(params: Tree, ids: Array, mask: Array, row_keys: Array) -> Array:
        batch = ids.shape[0]
        tokens, real = jnp.pad(ids, ((0, 0), (0, new))), jnp.pad(mask, ((0, 0), (0, new))) > 0
        kept, hidden = forward.start(params, tokens, real, width)
        copies = jnp.repeat(jnp.arange(batch), settings.num_beams)
        state = {"groups": [group.start(tokens) for _ in range(num_groups)], "real": real, "place": jnp.int32(width),
                 "kept": forward.pick(kept, copies), "hidden": hidden[copies]}

        def step(state: Tree) -> Tree:
            place = state["place"]
            logs = jax.nn.log_softmax(network.logits(params, state["hidden"]), -1)
            logs = logs.reshape(batch, num_groups, size, -1)
            keys = jax.vmap(jax.random.fold_in, in_axes=(0, None))(row_keys, place - width)
            taken = jnp.zeros_like(logs[:, 0, 0])  # how many beams of the groups before took each token
            groups, parents = [], []
            for number, beams in enumerate(state["groups"]):
                penalised = logs[:, number] - settings.diversity_penalty * taken[:, None] if number else logs[:, 0]
                beams, origin, took = group.advance(beams, penalised, state["real"], place, keys)
                groups.append(beams)
                parents.append(origin + number * size)
                taken = taken + took
            real = jax.lax.dynamic_update_slice_in_dim(state["real"], jnp.ones((batch, 1), bool), place, axis=1)
            rows = (jnp.arange(batch)[:, None] * settings.num_beams + jnp.concatenate(parents, 1)).reshape(-1)
            tokens = jnp.stack([beams["tokens"] for beams in groups], 1).reshape(-1, total)
            kept, hidden = forward.step(params, forward.pick(state["kept"], rows), tokens, real[copies], place)
            return {"groups": groups, "real": real, "place": place + 1, "kept": kept, "hidden": hidden}

        def goes_on(state: Tree) -> Array:
            return (state["place"] < total) & jnp.stack([beams["open"] for beams in state["groups"]]).any()

        groups = jax.lax.while_loop(goes_on, step, state)["groups"]
        best = jnp.concatenate([beams["best_scores"] for beams in groups], 1).argmax(1)
        return _at(jnp.concatenate([beams["best"] for beams in groups], 1), best[:, None])[:, 0]

    return program


class _Group:
    """A beam search of S beams for each of B prompts, as a state that `advance` moves on by a token."""

    def __init__(self, width: int, settings: Generation, ends: Array, size: int):
        self._width, self._settings, self._ends, self._size = width, settings, ends, size

    def start(self, tokens: Array) -> Tree:
        """Of prompts [B, total]."""
        scores = jnp.full((len(tokens), self._size), LOST).at[:, 0].set(0.0)  # as all start alike, only one may go on
        tokens = jnp.repeat(tokens[:, None], self._size, 1)
        return {"tokens": tokens, "scores": scores,  # running beams, and the sums of their log-probabilities
                # The best finished beams, and their sums over length ** length_penalty, best first.
                "best": tokens[..., self._width:], "best_scores": jnp.full_like(scores, -jnp.inf),
                "open": jnp.ones(len(tokens), bool)}  # whether better ones may come

    def advance(self, beams: Tree, logs: Array, real: Array, place: Array, keys: Array) -> tuple[Tree, Array, Array]:
        """The state with a token more, the beam [B, S] that each goes on from, and how many took each token [B, V].

        Args:
            logs: [B, S, V] log-probabilities of the next token.
            real: [B, total] which tokens are text so far.
            place: Of the next token.
            keys: [B] for draws.
        """
        batch, size, vocabulary = logs.shape
        scores, picked = self._candidates(beams, logs, real, place, keys)
        parents, token = picked // vocabulary, picked % vocabulary
        tokens = _at(beams["tokens"], parents)
        tokens = jax.lax.dynamic_update_slice_in_dim(tokens, token[..., None], place, axis=2)
        length, was_open, ends = place + 1 - self._width, beams["open"][:, None], jnp.isin(token, self._ends)
        ended = ends | (length == self._settings.max_new_tokens)
        weight = jnp.float32(length) ** self._settings.length_penalty
        # Candidates that have ended are among the best if they are among the first S.
        won = ended & was_open & (jnp.arange(scores.shape[1]) < size)
        best_scores = jnp.concatenate([beams["best_scores"], jnp.where(won, scores / weight, -jnp.inf)], 1)
        best_scores, best = jax.lax.top_k(best_scores, size)
        best = _at(jnp.concatenate([beams["best"], tokens[..., self._width:]], 1), best)
        # Running ones first, then those that only the length ended: other groups shun these too, but no end token.
        order = jnp.lexsort((-scores, ended.astype(jnp.int32) + ends))[:, :size]
        scores, tokens = _at(jnp.where(ended, LOST, scores), order), _at(tokens, order)
        is_open = beams["open"] & (scores[:, 0] / weight > best_scores[:, -1]) & ~ended.all(1)
        # Where the search had ended, beams run along, but their tokens do not count.
        chosen = jnp.broadcast_to(was_open, order.shape).astype(jnp.float32)
        took = jnp.zeros((batch, vocabulary)).at[jnp.arange(batch)[:, None], _at(token, order)].add(chosen)
        state = {"tokens": tokens, "scores": scores, "best": best, "best_scores": best_scores, "open": is_open}
        return state, _at(parents, order), took

    def _candidates(self, beams: Tree, logs: Array, real: Array, place: Array, keys: Array) -> tuple[Array, Array]:
        """Sums [B, C] of the candidates and their numbers among S * V: enough that S run on if all others end."""
        batch, size, vocabulary = logs.shape
        settings, count = self._settings, size * max(2, 1 + len(self._ends))
        logs = constrained(settings, logs.reshape(-1, vocabulary), beams["tokens"].reshape(batch * size, -1),
                           jnp.repeat(real, size, 0), place, self._width, self._ends)
        if settings.do_sample:
            logs = narrowed(settings, logs, least=1 + max(1, len(self._ends)))
        sums = (beams["scores"][..., None] + logs.reshape(batch, size, vocabulary)).reshape(batch, -1)
        ranks = sums
        if settings.do_sample:  # the largest of Gumbel-perturbed scores are draws without replacement
            ranks = sums + jax.vmap(lambda key: jax.random.gumbel(key, sums.shape[1:]))(keys)
        picked = jax.lax.top_k(ranks, min(count, sums.shape[1]))[1]
        return _at(sums, picked), picked


def _at(x: Array, places: Array) -> Array:
    """Of x [B, N, ...] the items [B, M, ...] at places [B, M]."""
    return jnp.take_along_axis(x, places.reshape(*places.shape, *[1] * (x.ndim - 2)), axis=1)
