"""Text generation: everything transformers' `generate` does, plus contrastive search and diverse beam search.

transformers 5 left those two out and would fetch their code from its hub. Both are written here from their papers
and run through the door `generate(..., custom_generate=function)`: transformers prepares mask, positions, cache, logits
processors and stopping criteria as for its own methods, then calls the function with them.

B: prompts, T: tokens so far (prompts are padded on the left), V: vocabulary, H: hidden size.
"""

import copy
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import GenerationConfig, LogitsProcessorList, StoppingCriteriaList

from lmmods.errors import UserError

# Marks unused cells behind finished beams until the longest one is known; no token has this id.
UNUSED = -1
# Keeps a beam out of the running without the NaNs that sums with -inf could bring.
LOST = -1e9


@torch.no_grad()
def generate(model: nn.Module, input_ids: Tensor, attention_mask: Tensor, generation_config: GenerationConfig,
             **kwargs: Any) -> Tensor:
    """Continue the prompts [B, T] by the method that the options ask for, which are those of GenerationConfig.

    Args:
        model: A causal language model of transformers, bare or wrapped by PEFT.
        input_ids: [B, T] prompts, padded on the left.
        attention_mask: [B, T], 0 on padding.
        generation_config: The options; `kwargs` of the same name go before them.
        kwargs: Everything else goes on to the model's `generate`.

    Returns:
        [B * num_return_sequences, T + T_new] prompts and answers; behind its end an answer is padded.
    """
    config = copy.deepcopy(generation_config)
    kwargs = config.update(**kwargs)
    kwargs |= _custom_method(config)
    # transformers must not see these, or it would fetch code. None would let the model's own defaults in.
    config.penalty_alpha, config.num_beam_groups, config.diversity_penalty = 0.0, 1, 0.0
    config.return_dict_in_generate = False
    return model.generate(input_ids=input_ids, attention_mask=attention_mask, generation_config=config, **kwargs)


def _custom_method(config: GenerationConfig) -> dict[str, Any]:
    """The arguments of `generate` that bring in one of the two methods below, or none; the options are checked."""
    alpha, groups = config.penalty_alpha or 0.0, config.num_beam_groups or 1
    if alpha:
        _check_contrastive(config)
        # transformers warns about top_k where nothing is sampled, so it gets its default.
        top_k, config.top_k = 50 if config.top_k is None else config.top_k, 50
        return {"custom_generate": contrastive_search, "penalty_alpha": alpha, "top_k": top_k}
    if groups > 1:
        _check_groups(config)
        return {"custom_generate": group_beam_search, "num_beam_groups": groups,
                "diversity_penalty": config.diversity_penalty}
    return {}


def _check_contrastive(config: GenerationConfig) -> None:
    alpha = config.penalty_alpha
    _require(0 <= alpha <= 1, f"penalty_alpha is {alpha}, but must be from 0 to 1 (0 turns contrastive search off)")
    _require((config.num_beams or 1) == 1, f"penalty_alpha (contrastive search) cannot go with num_beams "
             f"{config.num_beams}: set num_beams to 1 or penalty_alpha to 0")
    _require(not config.do_sample, "penalty_alpha (contrastive search) cannot go with do_sample: set do_sample to "
             "false or penalty_alpha to 0")
    _require(config.top_k != 0, "penalty_alpha (contrastive search) weighs top_k tokens, but top_k is 0: set it to 1 "
             "or more, such as 4")
    _require(config.use_cache is not False, "penalty_alpha (contrastive search) needs the cache: set use_cache to "
             "true or penalty_alpha to 0")


def _check_groups(config: GenerationConfig) -> None:
    groups, beams = config.num_beam_groups, config.num_beams or 1
    _require(beams % groups == 0, f"num_beams {beams} is not divisible by num_beam_groups {groups}: set num_beams to a "
             f"multiple of {groups}")
    _require(not config.do_sample, f"num_beam_groups {groups} (diverse beam search) cannot go with do_sample: set "
             "do_sample to false or num_beam_groups to 1")
    _require((config.diversity_penalty or 0.0) > 0, f"diversity_penalty is {config.diversity_penalty}, so all "
             f"{groups} beam groups would be the same: set it above 0, such as 1.0, or num_beam_groups to 1")


def _require(holds: bool, message: str) -> None:
    if not holds:
        raise UserError(message)


def contrastive_search(model: nn.Module, input_ids: Tensor, logits_processor: LogitsProcessorList,
                       stopping_criteria: StoppingCriteriaList, generation_config: GenerationConfig,
                       penalty_alpha: float, top_k: int, **model_kwargs: Any) -> Tensor:
    """Contrastive search (Su et al. 2022, "A Contrastive Framework for Neural Text Generation").

    Each step runs the model on the top_k likeliest tokens and takes the one with the best _contrast. [B, T + T_new]
    """
    outputs, model_kwargs = _forward(model, input_ids, model_kwargs | {"output_hidden_states": True}, prompt=True)
    context = _context(outputs.hidden_states[-1], model_kwargs.get("attention_mask"))
    logits, k = outputs.logits[:, -1], min(top_k, outputs.logits.shape[-1])
    rows = torch.arange(len(input_ids), device=input_ids.device)
    origin, finished = rows.repeat_interleave(k), torch.zeros_like(rows, dtype=torch.bool)
    # From here on mask and positions have a row for each candidate; the cache gets them as it is reordered.
    _, model_kwargs = model._expand_inputs_for_generation(expand_size=k, **model_kwargs)
    while not finished.all():
        probs, tokens = logits_processor(input_ids, logits.float()).softmax(-1).topk(k)
        candidates = torch.cat([input_ids.repeat_interleave(k, 0), tokens.view(-1, 1)], 1)
        _reorder_cache(model_kwargs, origin)
        outputs, model_kwargs = _forward(model, candidates, model_kwargs)
        states = F.normalize(outputs.hidden_states[-1][:, -1].float(), dim=-1).unflatten(0, (-1, k))
        best = _contrast(probs, states, context, penalty_alpha).argmax(-1)
        token = tokens[rows, best].masked_fill(finished, _pad_token(generation_config))
        input_ids = torch.cat([input_ids, token[:, None]], 1)
        context = torch.cat([context, states[rows, best][:, None]], 1)
        chosen = rows * k + best
        logits, origin = outputs.logits[chosen, -1], chosen.repeat_interleave(k)
        finished |= stopping_criteria(input_ids, None)
    return input_ids


def _contrast(probs: Tensor, states: Tensor, context: Tensor, alpha: float) -> Tensor:
    """(1 - alpha) p(v | x) - alpha max_j cos(h_v, h_j) of K candidates v [B, K], equation 5 of the paper.

    `probs` [B, K] holds the p(v | x), `states` [B, K, H] the h_v, `context` [B, T, H] the h_j, all h of length 1.
    """
    return (1 - alpha) * probs - alpha * (states @ context.mT).amax(-1)


def _context(hidden: Tensor, mask: Tensor | None) -> Tensor:
    """Hidden states of the prompt [B, T, H] at length 1. Padding becomes the last token, so no maximum changes."""
    states = F.normalize(hidden.float(), dim=-1)
    if mask is None:
        return states
    return torch.where(mask[:, :states.shape[1], None].bool(), states, states[:, -1:])


def group_beam_search(model: nn.Module, input_ids: Tensor, logits_processor: LogitsProcessorList,
                      stopping_criteria: StoppingCriteriaList, generation_config: GenerationConfig,
                      num_beam_groups: int, diversity_penalty: float, **model_kwargs: Any) -> Tensor:
    """Diverse beam search (Vijayakumar et al. 2018) with Hamming diversity; one group is plain beam search.

    `input_ids` is [B * num_beams, T]; the answers are the best of all groups, [B * num_return_sequences, T + T_new].
    """
    config, prompt_length = generation_config, input_ids.shape[1]
    ids = input_ids.unflatten(0, (-1, num_beam_groups, config.num_beams // num_beam_groups))
    groups = [_Group(part, config) for part in ids.unbind(1)]
    while any(group.open.any() for group in groups):
        ids = torch.stack([group.ids for group in groups], 1)
        outputs, model_kwargs = _forward(model, ids.flatten(0, 2), model_kwargs, ids.shape[-1] == prompt_length)
        log_probs = outputs.logits[:, -1].float().log_softmax(-1).unflatten(0, ids.shape[:3])
        _take_turns(groups, ids, log_probs, diversity_penalty, logits_processor, stopping_criteria)
        parents = torch.cat([group.parents + n * group.size for n, group in enumerate(groups)], 1)
        first = torch.arange(len(parents), device=parents.device)[:, None] * config.num_beams
        _reorder_cache(model_kwargs, (first + parents).flatten())
    scores = torch.cat([group.best_scores for group in groups], 1)
    best = _gather(torch.cat([group.best for group in groups], 1), scores.topk(config.num_return_sequences).indices)
    longest = (best != UNUSED).sum(-1).max()
    return best[..., :longest].masked_fill(best[..., :longest] == UNUSED, _pad_token(config)).flatten(0, 1)


def _take_turns(groups: list["_Group"], ids: Tensor, log_probs: Tensor, penalty: float,
                logits_processor: LogitsProcessorList, stopping_criteria: StoppingCriteriaList) -> None:
    """One token for every beam of every group, given the beams' `ids` [B, G, S, T] and `log_probs` [B, G, S, V].

    A token loses `penalty` for each beam of an earlier group that has just taken it. As in transformers 4 the logits
    processors come after, and the loss stays in the sums of the beam.
    """
    taken = torch.zeros_like(log_probs[:, 0, 0])
    for n, group in enumerate(groups):
        # Some processors know the rows by number, so they get all of them.
        scores = (log_probs - penalty * taken[:, None, None]).flatten(0, 2)
        scores = logits_processor(ids.flatten(0, 2), scores).view_as(log_probs)[:, n]
        # Beams of a group that has ended run on beside the others, but their tokens do not count.
        counts = group.open[:, None].to(taken).expand(-1, group.size)
        group.advance(scores, stopping_criteria)
        taken.scatter_add_(1, group.ids[..., -1], counts)


class _Group:
    """A beam search of S beams for each of B prompts.

    Args:
        ids: [B, S, T] running beams.
        config: The options.

    Attributes: scores [B, S] sums of log-probabilities; best [B, S, T] and best_scores [B, S] the finished beams and
    their scores divided by length ** length_penalty; open [B] whether better ones may come; parents [B, S] the beams
    that the running ones continue.
    """

    def __init__(self, ids: Tensor, config: GenerationConfig):
        self.ids, self.best, self.config = ids, ids, config
        self.size, self.prompt_length = ids.shape[1:]
        # All beams start alike, so the first step may use only one of them.
        self.scores = torch.full(ids.shape[:2], LOST, device=ids.device).index_fill_(1, ids.new_zeros(1), 0.0)
        self.best_scores = torch.full_like(self.scores, -torch.inf)
        self.open = torch.ones_like(ids[:, 0, 0], dtype=torch.bool)
        self.eos = ids.new_empty(0) if config._eos_token_tensor is None else config._eos_token_tensor
        # Enough candidates that S of them run on, even if every beam's likeliest tokens are all the end tokens.
        self.candidates = self.size * max(2, 1 + len(self.eos))

    def advance(self, log_probs: Tensor, stopping_criteria: StoppingCriteriaList) -> None:
        """One more token for each beam, given the scores of all tokens [B, S, V]."""
        scores, picked = (self.scores[..., None] + log_probs).flatten(1).topk(self.candidates)
        parents, tokens = picked // log_probs.shape[-1], picked % log_probs.shape[-1]
        ids = torch.cat([_gather(self.ids, parents), tokens[..., None]], -1)
        ended = stopping_criteria(ids.flatten(0, 1), None).view_as(tokens)
        self._keep_finished(ids, scores, ended)
        # Running ones first. If none is left, at the greatest length, later groups shun those that only the length ended.
        kept = (ended.int() + torch.isin(tokens, self.eos)).argsort(dim=1, stable=True)[:, :self.size]
        self.scores, self.parents = (scores + LOST * ended).gather(1, kept), parents.gather(1, kept)
        self.ids = _gather(ids, kept)
        self.open &= self._may_improve() & ~ended.all(1)

    def _keep_finished(self, ids: Tensor, scores: Tensor, ended: Tensor) -> None:
        """Put those of the candidates [B, C, T] that have ended among the best, if they are in the first S."""
        scores = scores / (ids.shape[-1] - self.prompt_length) ** self.config.length_penalty
        won = ended & self.open[:, None]
        won[:, self.size:] = False
        scores = torch.cat([self.best_scores, scores.masked_fill(~won, -torch.inf)], 1)
        self.best_scores, kept = scores.topk(self.size)
        self.best = _gather(torch.cat([F.pad(self.best, (0, 1), value=UNUSED), ids], 1), kept)

    def _may_improve(self) -> Tensor:
        """Whether a running beam may still beat the worst finished one [B], judged as GenerationConfig documents."""
        worst, penalty = self.best_scores[:, -1], self.config.length_penalty
        if self.config.early_stopping is True:
            return worst == -torch.inf
        to_the_end = self.config.early_stopping == "never" and penalty > 0
        length = (self.config.max_length if to_the_end else self.ids.shape[-1]) - self.prompt_length
        return self.scores[:, 0] / length**penalty > worst


def _forward(model: nn.Module, ids: Tensor, model_kwargs: dict[str, Any], prompt: bool = False) -> tuple[Any, dict]:
    """Outputs for the prompts or else for the last token (for all tokens if there is no cache), and new kwargs."""
    length = 1 if model_kwargs["use_cache"] and not prompt else None
    inputs = model.prepare_inputs_for_generation(ids, next_sequence_length=length, is_first_iteration=prompt,
                                                 **model_kwargs)
    outputs = model(**inputs, return_dict=True)
    return outputs, model._update_model_kwargs_for_generation(outputs, model_kwargs)


def _reorder_cache(model_kwargs: dict[str, Any], rows: Tensor) -> None:
    if model_kwargs["use_cache"]:
        model_kwargs["past_key_values"].reorder_cache(rows)


def _gather(beams: Tensor, index: Tensor) -> Tensor:
    """[B, N, T] and [B, M] to [B, M, T]."""
    return beams.take_along_dim(index[..., None], 1)


def _pad_token(config: GenerationConfig) -> int:
    """Without an end token all rows are equally long, so nothing is padded."""
    return 0 if config._pad_token_tensor is None else config._pad_token_tensor.item()
