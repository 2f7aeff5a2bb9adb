"""Text generation: transformers' `generate`, contrastive search, diverse beam search and sampling by given numbers.

transformers 5 does not include the two searches and would fetch their code from the hub, and its sampling uses one
generator for all rows. All three are implemented here, the searches from their papers, and run through `generate(...,
custom_generate=function)`: transformers prepares masks, positions, cache, logits processors and stopping criteria as
for its own methods, then calls the function with them.

B: prompts, padded on the left. T: tokens. K: candidates. G: groups of S beams. H: hidden size. V: vocabulary.
"""

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import GenerationConfig, LogitsProcessorList, StoppingCriteriaList

from lmmods.core.errors import UserError
from lmmods.core.generation_config import UNIT
from lmmods.core.settings import check_beam_groups

UNUSED = -1  # Fills positions after the end of finished beams until the longest is known; no token has this id.
LOST = -1e9  # Score of a discarded beam; not -inf, so that sums with it stay finite.
# Outputs of a step that are inputs of the next: the cache, `past_key_values` before transformers 5.24, and the states
# of RWKV and XLNet.
CARRIED = ("cache", "past_key_values", "state", "mems")
# Inputs that describe the tokens so far, and how the column of a new token follows from the last one.
COLUMNS: dict[str, Callable[[Tensor], Tensor]] = {
    "attention_mask": torch.ones_like, "position_ids": lambda last: last + 1, "token_type_ids": torch.clone,
    "mm_token_type_ids": torch.zeros_like}


def generate(model: nn.Module, input_ids: Tensor, attention_mask: Tensor, generation_config: GenerationConfig,
             synced: bool = False, draws: Tensor | None = None, **kwargs: Any) -> Tensor:
    """Continue the prompts by the method that the options select.

    Args:
        model: A causal language model of transformers, bare or wrapped by PEFT.
        input_ids: [B, T] prompts, padded on the left.
        attention_mask: [B, T], 0 on padding.
        synced: Continue until all processes are done, as each step gathers sharded parameters from all of them.
        draws: [B, max_new_tokens] float32 in [0, 1), with which `do_sample` without beams samples tokens; None uses
            torch's generator, as beams always do.
        kwargs: Options that override those of `generation_config`; others are passed to the model's `generate`.

    Returns:
        [B * num_return_sequences, T + T_new] prompts and answers, padded after the end of an answer.
    """
    config = copy.deepcopy(generation_config)  # `update` and the settings below change it
    kwargs = config.update(**kwargs) | _custom_method(config, synced, draws)
    # Hidden from transformers, which would fetch code from the hub. Not None, which the model's own defaults replace.
    config.penalty_alpha, config.num_beam_groups, config.diversity_penalty = 0.0, 1, 0.0
    config.return_dict_in_generate = False
    return model.generate(input_ids=input_ids, attention_mask=attention_mask, generation_config=config,
                          synced_gpus=synced, **kwargs)


def _refuse(wrong: bool | None, message: str) -> None:
    if wrong:
        raise UserError(message)


def _custom_method(config: GenerationConfig, synced: bool, draws: Tensor | None) -> dict[str, Any]:
    """Check the options, and return the arguments of `generate` that select a method of this file, if any."""
    alpha, groups, beams = config.penalty_alpha or 0.0, config.num_beam_groups or 1, config.num_beams or 1
    if alpha:
        _refuse(not 0 < alpha <= 1, f"penalty_alpha is {alpha}, but must be from 0 to 1 (0: no contrastive search)")
        _refuse(beams > 1, f"penalty_alpha cannot go with num_beams {beams}: set num_beams to 1 or penalty_alpha to 0")
        _refuse(config.do_sample, "penalty_alpha cannot go with do_sample: set that to false or penalty_alpha to 0")
        _refuse(config.top_k == 0, "penalty_alpha weighs the top_k likeliest tokens, but top_k is 0: set it to 4, say")
        _refuse(config.use_cache is False, "penalty_alpha needs the cache: set use_cache to true or penalty_alpha to 0")
        # Not None, as above. 50 is transformers' default, with which it does not warn that top_k is unused.
        top_k, config.top_k = 50 if config.top_k is None else config.top_k, 50
        config.do_sample, config.num_beams, config.use_cache = False, 1, True
        return {"custom_generate": contrastive_search, "penalty_alpha": alpha, "top_k": top_k, "synced": synced}
    if groups > 1:
        penalty = config.diversity_penalty or 0.0
        check_beam_groups(beams, groups, penalty, config.do_sample)
        config.do_sample = False
        return {"custom_generate": group_beam_search, "num_beam_groups": groups, "diversity_penalty": penalty,
                "synced": synced}
    if config.do_sample and beams == 1 and draws is not None:
        return {"custom_generate": sample, "draws": draws, "synced": synced}
    return {}


def sample(model: nn.Module, input_ids: Tensor, logits_processor: LogitsProcessorList,
           stopping_criteria: StoppingCriteriaList, generation_config: GenerationConfig, draws: Tensor,
           synced: bool = False, **model_kwargs: Any) -> Tensor:
    """Sample tokens by the given numbers, see `generate`; returns [B, T + T_new]."""
    finished, prompt_length = torch.zeros_like(input_ids[:, 0], dtype=torch.bool), input_ids.shape[1]
    while _goes_on(bool(finished.all()), synced, input_ids.device):
        place = input_ids.shape[1] - prompt_length
        outputs, model_kwargs = _forward(model, input_ids, model_kwargs, prompt=not place)
        scores = logits_processor(input_ids, outputs.logits[:, -1].float())  # [B, V]
        # A process that waits for others may run out of numbers; its further tokens are masked anyway.
        token = drawn(scores, draws[:, min(place, draws.shape[1] - 1)])
        input_ids = torch.cat([input_ids, token.masked_fill(finished, _pad_token(generation_config))[:, None]], 1)
        finished |= stopping_criteria(input_ids, None)
    return input_ids


def drawn(scores: Tensor, numbers: Tensor) -> Tensor:
    """Return for each row the first token [B] at which the cumulative probability exceeds its number.

    Probabilities are summed as integers, so that the result does not depend on the order of a device's sums.

    Args:
        scores: [B, V] logits.
        numbers: [B] in [0, 1).
    """
    added = (scores.softmax(-1) / UNIT).round().long().cumsum(-1)  # [B, V] int64, multiples of UNIT
    # Scaled by the actual total, which rounding keeps from being exactly 1, and kept below it.
    wanted = (numbers * added[:, -1]).long().minimum(added[:, -1] - 1)
    # The number of tokens whose cumulative probability does not exceed the wanted one is the id of the first that does.
    return (added <= wanted[:, None]).sum(-1)


def contrastive_search(model: nn.Module, input_ids: Tensor, logits_processor: LogitsProcessorList,
                       stopping_criteria: StoppingCriteriaList, generation_config: GenerationConfig,
                       penalty_alpha: float, top_k: int, synced: bool = False, **model_kwargs: Any) -> Tensor:
    """Contrastive search (Su et al. 2022, "A Contrastive Framework for Neural Text Generation"), [B, T + T_new].

    Each step runs the model on the top_k likeliest tokens v and chooses the one with the highest
    (1 - alpha) p(v | x) - alpha max_j cos(h_v, h_j), where h_j are the hidden states of the tokens so far.
    """
    outputs, model_kwargs = _forward(model, input_ids, model_kwargs | {"output_hidden_states": True}, prompt=True)
    # The states h_j to compare with, [B, T, H], of the last layer.
    context = _context(outputs.hidden_states[-1], model_kwargs.get("attention_mask"))
    logits, k = outputs.logits[:, -1], min(top_k, outputs.logits.shape[-1])
    rows = torch.arange(len(input_ids), device=input_ids.device)
    # Rows of the cache that the candidates continue: at first each prompt's own row, K times.
    origin, finished = rows.repeat_interleave(k), torch.zeros_like(rows, dtype=torch.bool)
    # From here on masks and positions have a row per candidate; `reorder_cache` expands the cache likewise.
    model_kwargs |= {name: value.repeat_interleave(k, 0) for name, value in model_kwargs.items()
                     if torch.is_tensor(value)}
    while _goes_on(bool(finished.all()), synced, input_ids.device):
        probs, tokens = logits_processor(input_ids, logits.float()).softmax(-1).topk(k)  # [B, K]
        candidates = torch.cat([input_ids.repeat_interleave(k, 0), tokens.view(-1, 1)], 1)  # [B * K, T + 1]
        _reorder_cache(model_kwargs, origin)
        outputs, model_kwargs = _forward(model, candidates, model_kwargs)
        # [B * K, T, H] -> last position [B * K, H] -> [B, K, H]
        states = F.normalize(outputs.hidden_states[-1][:, -1].float(), dim=-1).unflatten(0, (-1, k))
        # Cosines [B, K, H] [B, H, T] -> [B, K, T]; their maximum over the context is the penalty.
        best = ((1 - penalty_alpha) * probs - penalty_alpha * (states @ context.mT).amax(-1)).argmax(-1)
        token = tokens[rows, best].masked_fill(finished, _pad_token(generation_config))
        input_ids = torch.cat([input_ids, token[:, None]], 1)
        context = torch.cat([context, states[rows, best][:, None]], 1)
        # The chosen candidate's pass already has the next logits [B, V] and cache, so a step runs the model once.
        logits, origin = outputs.logits[rows * k + best, -1], (rows * k + best).repeat_interleave(k)
        finished |= stopping_criteria(input_ids, None)
    return input_ids


def _context(hidden: Tensor, mask: Tensor | None) -> Tensor:
    """Return the normalised hidden states of the prompt [B, T, H]; padding is replaced by the last token.

    A duplicate does not change the maximum over the context.
    """
    states = F.normalize(hidden.float(), dim=-1)
    return states if mask is None else torch.where(mask[:, :hidden.shape[1], None].bool(), states, states[:, -1:])


def group_beam_search(model: nn.Module, input_ids: Tensor, logits_processor: LogitsProcessorList,
                      stopping_criteria: StoppingCriteriaList, generation_config: GenerationConfig,
                      num_beam_groups: int, diversity_penalty: float, synced: bool = False,
                      **model_kwargs: Any) -> Tensor:
    """Diverse beam search (Vijayakumar et al. 2018) with Hamming diversity; one group is plain beam search.

    `input_ids` is [B * num_beams, T]; returns the best answers of all groups, [B * num_return_sequences, T + T_new].
    """
    config, prompt_length = generation_config, input_ids.shape[1]
    # [B * G * S, T] -> [B, G, S, T]
    ids = input_ids.unflatten(0, (-1, num_beam_groups, config.num_beams // num_beam_groups))
    groups = [_Group(part, config) for part in ids.unbind(1)]
    while _goes_on(not any(group.open.any() for group in groups), synced, input_ids.device):
        ids = torch.stack([group.ids for group in groups], 1)
        outputs, model_kwargs = _forward(model, ids.flatten(0, 2), model_kwargs, ids.shape[-1] == prompt_length)
        log_probs = outputs.logits[:, -1].float().log_softmax(-1).unflatten(0, ids.shape[:3])  # [B, G, S, V]
        # [B, V], how many beams of the earlier groups chose each token in this step.
        taken = torch.zeros_like(log_probs[:, 0, 0])
        for n, group in enumerate(groups):
            # As in transformers 4, processors follow the penalty. Some identify rows by index, so they get all rows.
            scores = (log_probs - diversity_penalty * taken[:, None, None]).flatten(0, 2)
            scores = logits_processor(ids.flatten(0, 2), scores).view_as(log_probs)[:, n]
            taken += group.advance(scores, stopping_criteria)
        # Rows of the cache [B, G * S]: beams within a prompt, then `first` adds the prompt's offset.
        parents = torch.cat([group.parents + n * group.size for n, group in enumerate(groups)], 1)
        first = torch.arange(len(parents), device=parents.device)[:, None] * config.num_beams
        if model_kwargs["use_cache"]:
            _reorder_cache(model_kwargs, (first + parents).flatten())
    # All groups compete for the answers that are returned.
    scores = torch.cat([group.best_scores for group in groups], 1)
    top = scores.topk(config.num_return_sequences).indices[..., None]
    best = torch.cat([group.best for group in groups], 1).take_along_dim(top, 1)
    best = best[..., :(best != UNUSED).sum(-1).max()].flatten(0, 1)  # cut after the longest answer
    return best.masked_fill(best == UNUSED, _pad_token(config))


class _Group:
    """Beam search with S beams for each of B prompts, starting from `ids` [B, S, T]; rules as in transformers 5."""

    def __init__(self, ids: Tensor, config: GenerationConfig):
        self.config, (self.size, self.prompt_length) = config, ids.shape[1:]
        self.eos = ids.new_tensor(_end_tokens(config))
        # Running beams and their summed log-probabilities [B, S]: all start alike, so only the first may continue.
        self.ids, self.scores = ids, torch.full(ids.shape[:2], LOST, device=ids.device)
        self.scores[:, 0] = 0.0
        # The best finished beams, and their sums divided by length ** length_penalty [B, S], best first.
        self.best, self.best_scores = ids, torch.full_like(self.scores, -torch.inf)
        self.open = torch.ones_like(ids[:, 0, 0], dtype=torch.bool)  # [B]: True if better ones may still be found.

    def advance(self, log_probs: Tensor, stopping_criteria: StoppingCriteriaList) -> Tensor:
        """Extend each beam by a token, given scores [B, S, V]; returns how many beams chose each token [B, V]."""
        # Enough candidates that S of them continue, even if end tokens are the likeliest for every beam.
        count, was_open = self.size * max(2, 1 + len(self.eos)), self.open[:, None]
        # [B, S, V] -> [B, S * V] -> [B, count]
        scores, picked = (self.scores[..., None] + log_probs).flatten(1).topk(count)
        parents, tokens = picked // log_probs.shape[-1], picked % log_probs.shape[-1]
        ids = torch.cat([self.ids.take_along_dim(parents[..., None], 1), tokens[..., None]], -1)
        ended = stopping_criteria(ids.flatten(0, 1), None).view_as(tokens)
        self._keep_finished(ids, scores, ended)
        # Running ones first, then those ended by length only: other groups are penalised for these, not for end tokens.
        kept = (ended.int() + torch.isin(tokens, self.eos)).argsort(dim=1, stable=True)[:, :self.size]  # [B, S]
        self.scores, self.parents = scores.masked_fill(ended, LOST).gather(1, kept), parents.gather(1, kept)
        self.ids = ids.take_along_dim(kept[..., None], 1)
        self.open = self.open & self._may_improve() & ~ended.all(1)
        # Beams of finished searches continue along with the others, but their tokens do not count.
        took = was_open.expand(-1, self.size).to(scores)
        return torch.zeros_like(log_probs[:, 0]).scatter_add_(1, self.ids[..., -1], took)

    def _keep_finished(self, ids: Tensor, scores: Tensor, ended: Tensor) -> None:
        """Add ended candidates [B, K, T] to the finished beams, if they are among the first S."""
        won = ended & self.open[:, None]
        # Candidates are sorted by score. One that ends below the first S is dropped, not finished.
        won[:, self.size:] = False
        scores = scores / (ids.shape[-1] - self.prompt_length) ** self.config.length_penalty
        scores = torch.cat([self.best_scores, scores.masked_fill(~won, -torch.inf)], 1)
        self.best_scores, kept = scores.topk(self.size)
        beams = torch.cat([F.pad(self.best, (0, 1), value=UNUSED), ids], 1)
        self.best = beams.take_along_dim(kept[..., None], 1)

    def _may_improve(self) -> Tensor:
        """Return [B], True if a running beam may still beat the worst finished one; rule by `early_stopping`."""
        worst, penalty, early = self.best_scores[:, -1], self.config.length_penalty, self.config.early_stopping
        # Under "never" with a positive penalty, the best that a running beam can still reach is at the maximum length.
        length = self.config.max_length if early == "never" and penalty > 0 else self.ids.shape[-1]
        best = self.scores[:, 0] / (length - self.prompt_length) ** penalty
        return worst == -torch.inf if early is True else best > worst


def _forward(model: nn.Module, ids: Tensor, kwargs: dict[str, Any], prompt: bool = False) -> tuple[Any, dict[str, Any]]:
    """Run the model on whole prompts, or on the last tokens (all, without cache); returns outputs and new kwargs."""
    length = 1 if kwargs["use_cache"] and not prompt else None
    inputs = model.prepare_inputs_for_generation(ids, next_sequence_length=length, is_first_iteration=prompt, **kwargs)
    outputs = model(**inputs, return_dict=True)
    carried = {name: value for name, value in outputs.items() if name in CARRIED}
    # Each input gains the column of the new token: [B, T] -> [B, T + 1].
    grown = {name: torch.cat([kwargs[name], column(kwargs[name][..., -1:])], -1) for name, column in COLUMNS.items()
             if kwargs.get(name) is not None}
    return outputs, kwargs | grown | carried


def _reorder_cache(kwargs: dict[str, Any], rows: Tensor) -> None:
    """Make the cache that of these rows, in this order; rows may repeat."""
    next(kwargs[name] for name in CARRIED if name in kwargs).reorder_cache(rows)


def _pad_token(config: GenerationConfig) -> int:
    """Return the padding token, else the end token as in transformers, else 0: then no row ends early."""
    return next(token for token in (config.pad_token_id, *_end_tokens(config), 0) if token is not None)


def _end_tokens(config: GenerationConfig) -> list[int]:
    tokens = config.eos_token_id
    return [] if tokens is None else tokens if isinstance(tokens, list) else [tokens]


def _goes_on(is_done: bool, synced: bool, device: torch.device) -> bool:
    """True if another step is needed by this process or, if `synced`, by any process."""
    if not synced:
        return not is_done
    # A collective call: each process must take part in every step, finished or not.
    waiting = torch.tensor(float(not is_done), device=device)
    torch.distributed.all_reduce(waiting)
    return waiting.item() > 0
