"""Text generation: greedy search, sampling by uniform numbers, contrastive and diverse beam search.

transformers 5 lacks the last two and would download their code from the hub. Its sampling uses one generator for all
rows. Its greedy search recomputes a prompt for every answer, and continues rows that have ended. So all four are
implemented here and run through `generate(..., custom_generate=function)`: transformers prepares masks, positions,
cache, logits processors and stopping criteria, then calls the function with them. Other methods are transformers' own.

B: prompts, padded on the left. T: tokens. K: candidates. G: groups of S beams. H: hidden size. V: vocabulary.
"""

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import (
    GenerationConfig,
    LogitsProcessorList,
    MinLengthLogitsProcessor,
    MinNewTokensLengthLogitsProcessor,
    NoRepeatNGramLogitsProcessor,
    RepetitionPenaltyLogitsProcessor,
    StoppingCriteriaList,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
    TypicalLogitsWarper,
)

from lmmods.core.console import say
from lmmods.core.errors import UserError
from lmmods.core.generation_config import UNIT
from lmmods.core.settings import check_beam_groups
from lmmods.torch_engine.compat.transformers import decoding_experts, has_separable_rows, preallocate_cache
from lmmods.torch_engine.nn.capturing import Capture, CapturedSteps, uncapturable_reason

# Logits processors that process rows separately. The repetition penalty stores a number per row.
BY_ROW = (MinLengthLogitsProcessor, MinNewTokensLengthLogitsProcessor, NoRepeatNGramLogitsProcessor,
          RepetitionPenaltyLogitsProcessor, TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper,
          TypicalLogitsWarper)
reported: WeakKeyDictionary[nn.Module, set[str]] = WeakKeyDictionary()  # messages of `_say_once` by model
BLOCK = 256  # number of tokens per block in `sample_tokens`
UNUSED = -1  # Fills positions after the end of finished beams until the maximum length is known; not a token id.
LOST = -1e9  # Score of a discarded beam; not -inf, so that sums with it stay finite.
# Outputs of a step that are inputs of the next: the cache (`past_key_values` before transformers 5.24), and states of
# RWKV and XLNet.
CARRIED = ("cache", "past_key_values", "state", "mems")
# Images that `generate` has encoded before its first step. Rows of the same tokens may have different ones.
ENCODED = "mm_encoder_outputs"
# Inputs with a column per token, and functions from the last column to a new token's column.
COLUMNS: dict[str, Callable[[Tensor], Tensor]] = {
    "attention_mask": torch.ones_like, "position_ids": lambda last: last + 1, "token_type_ids": torch.clone,
    "mm_token_type_ids": torch.zeros_like}


class Record:
    """Log-probabilities and entropies of the tokens that a search chose.

    Args:
        num_rows: Number of prompts, B.
        num_tokens: Maximum number of new tokens.

    Attributes:
        logps: [B, num_tokens] float32, log-probabilities; values after the end of an answer are meaningless.
        entropies: [B, num_tokens] float32, entropies of the distributions in nats; likewise.
    """

    def __init__(self, num_rows: int, num_tokens: int, device: torch.device) -> None:
        self.logps, self.entropies = torch.zeros(2, num_rows, num_tokens, device=device)

    def add(self, rows: Tensor, position: int, scores: Tensor, tokens: Tensor) -> None:
        """Record the tokens [N] chosen at a position in some rows, from logits [N, V]."""
        log_probs = scores.log_softmax(-1)
        self.logps[rows, position] = log_probs.gather(-1, tokens[:, None]).squeeze(-1)
        # 0 log 0 is 0: tokens that a processor excludes have -inf.
        self.entropies[rows, position] = -(log_probs.exp() * log_probs.clamp(min=torch.finfo(scores.dtype).min)).sum(-1)


def generate(model: nn.Module, input_ids: Tensor, attention_mask: Tensor, generation_config: GenerationConfig,
             synced: bool = False, uniforms: Tensor | None = None, record: Record | None = None,
             capture: Capture | None = None, **kwargs: Any) -> Tensor:
    """Continue the prompts with the method that the options select.

    Args:
        model: A causal LM of transformers, with or without PEFT's wrapper.
        input_ids: [B, T] prompts, padded on the left.
        attention_mask: [B, T], 0 on padding.
        synced: Continue until all processes are done, as each step gathers sharded parameters from all processes.
        uniforms: [B, max_new_tokens] float32 in [0, 1), for sampling with `do_sample` without beams. Default: torch's
            generator, which beam sampling always uses.
        record: Filled by greedy search and by sampling with `uniforms`.
        capture: Captures the steps of greedy search and of sampling with `uniforms`, if the model supports it.
        kwargs: Options that override those of `generation_config`; others are passed to the model's `generate`.

    Returns:
        [B * num_return_sequences, T + T_new] prompts and answers, padded after the end of an answer.
    """
    config = copy.deepcopy(generation_config)  # `update` and the settings below change it
    kwargs = config.update(**kwargs)
    kwargs |= _custom_method(config, model.generation_config, synced, uniforms, record, capture)
    # Hide these from transformers, which would download code. Not None, which the model's own defaults replace.
    config.penalty_alpha, config.num_beam_groups, config.diversity_penalty = 0.0, 1, 0.0
    config.return_dict_in_generate = False
    with _without_cudnn():
        return model.generate(input_ids=input_ids, attention_mask=attention_mask, generation_config=config,
                              synced_gpus=synced, **kwargs)


@contextmanager
def _without_cudnn() -> Iterator[None]:
    """Disable cuDNN attention, which makes a new plan for each shape, and each token has a new shape.

    On an H100, 64 answers of a model of 1.2 billion parameters took 80 ms per token with cuDNN, and 18 ms without.
    """
    was_enabled = torch.backends.cuda.cudnn_sdp_enabled()
    torch.backends.cuda.enable_cudnn_sdp(False)
    try:
        yield
    finally:
        torch.backends.cuda.enable_cudnn_sdp(was_enabled)


def _reject(is_wrong: bool | None, message: str) -> None:
    if is_wrong:
        raise UserError(message)


def _custom_method(config: GenerationConfig, defaults: GenerationConfig, synced: bool, uniforms: Tensor | None,
                   record: Record | None, capture: Capture | None) -> dict[str, Any]:
    """Check the options, and return the arguments of `generate` that select a method of this file, if any.

    Args:
        defaults: The model's own options, which apply where `config` has None.
    """
    alpha, groups, beams = config.penalty_alpha or 0.0, config.num_beam_groups or 1, config.num_beams or 1
    if alpha:
        _reject(not 0 < alpha <= 1, f"penalty_alpha is {alpha}, but must be from 0 to 1. Set it to 0 for no "
                                    "contrastive search.")
        _reject(beams > 1, f"penalty_alpha cannot be combined with num_beams {beams}. Set num_beams to 1 or "
                           "penalty_alpha to 0.")
        _reject(config.do_sample, "penalty_alpha cannot be combined with do_sample. Set do_sample to false or "
                                  "penalty_alpha to 0.")
        _reject(config.top_k == 0, "penalty_alpha selects among the top_k tokens, but top_k is 0. Set top_k, for "
                                   "example to 4.")
        _reject(config.use_cache is False, "penalty_alpha needs the cache. Set use_cache to true or penalty_alpha to "
                                           "0.")
        # Not None, as above. With 50, its default, transformers does not warn that top_k is unused.
        top_k, config.top_k = 50 if config.top_k is None else config.top_k, 50
        config.do_sample, config.num_beams, config.use_cache = False, 1, True
        return {"custom_generate": contrastive_search, "penalty_alpha": alpha, "top_k": top_k, "synced": synced}
    if groups > 1:
        penalty = config.diversity_penalty or 0.0
        check_beam_groups(beams, groups, penalty, config.do_sample)
        config.do_sample = False
        return {"custom_generate": group_beam_search, "num_beam_groups": groups, "diversity_penalty": penalty,
                "synced": synced}
    do_sample, beams = (value if value is not None else getattr(defaults, name) for name, value in (
        ("do_sample", config.do_sample), ("num_beams", config.num_beams)))
    if (beams or 1) == 1 and (uniforms is not None or not do_sample):
        return {"custom_generate": single_search, "uniforms": uniforms if do_sample else None, "synced": synced,
                **({} if record is None else {"record": record}), **({} if capture is None else {"capture": capture})}
    return {}


def single_search(model: nn.Module, input_ids: Tensor, logits_processor: LogitsProcessorList,
                  stopping_criteria: StoppingCriteriaList, generation_config: GenerationConfig,
                  uniforms: Tensor | None = None, synced: bool = False, record: Record | None = None,
                  capture: Capture | None = None, **model_kwargs: Any) -> Tensor:
    """Search greedily, or sample by uniform numbers; see `generate`. Returns [B, T + T_new].

    Rows with the same prompt compute it once, and ended rows are removed from the batch; answers only change by
    rounding. Reports if the model does not support this.
    """
    size, prompt_length = input_ids.shape
    problem = "processes wait for each other" if synced else _shared_rows_reason(
        model, size, logits_processor, model_kwargs)
    is_separable = size > 1 and problem is None
    if size > 1 and problem and not synced:
        _say_once(model, "Generation is slower: finished sequences stay in the batch, and every answer recomputes its "
                         f"prompt ({problem}).")
    rows = torch.arange(size, device=input_ids.device)  # indices of the rows that are still in `input_ids`
    is_finished, removed = torch.zeros_like(rows, dtype=torch.bool), []
    prefill = _forward_distinct if is_separable else _forward
    outputs, model_kwargs = prefill(model, input_ids, model_kwargs, prompt=True)
    logits, steps = outputs.logits[:, -1], _choose_steps(model, model_kwargs, capture, problem)  # [B, V]
    del outputs  # may have the logits of all prompts' tokens
    with decoding_experts(model):
        while True:
            logits = logits_processor(input_ids, logits.float())
            step = input_ids.shape[1] - prompt_length
            # A process that waits for others may run out of numbers; its further tokens are masked.
            token = logits.argmax(-1) if uniforms is None else sample_tokens(
                logits, uniforms[rows, min(step, uniforms.shape[1] - 1)])
            if record is not None and step < record.logps.shape[1]:
                record.add(rows, step, logits, token)
            token = token.masked_fill(is_finished, _pad_token(generation_config))
            input_ids = torch.cat([input_ids, token[:, None]], 1)
            is_finished |= stopping_criteria(input_ids, None)
            if not _must_continue(bool(is_finished.all()), synced, input_ids.device):
                break
            if is_separable and is_finished.sum() >= steps.ended_fraction * len(rows):
                removed.append((rows[is_finished], input_ids[is_finished]))
                unfinished = (~is_finished).nonzero().squeeze(1)
                rows, input_ids, is_finished = rows[unfinished], input_ids[unfinished], is_finished[unfinished]
                steps.select(unfinished)
                logits_processor = _select_processor_rows(logits_processor, unfinished)
            logits = steps(input_ids)
    result = input_ids.new_full((size, input_ids.shape[1]), _pad_token(generation_config))
    for row_indices, tokens in (*removed, (rows, input_ids)):
        result[row_indices, :tokens.shape[1]] = tokens
    return result


class _Steps:
    """Decoding steps whose shapes grow with the tokens; as `CapturedSteps`."""

    # Remove ended rows once they are this fraction of the batch: each time, the other rows' cache is copied.
    ended_fraction = 0.25

    def __init__(self, model: nn.Module, kwargs: dict[str, Any]) -> None:
        self._model, self._kwargs = model, kwargs

    def __call__(self, input_ids: Tensor) -> Tensor:
        outputs, self._kwargs = _forward(self._model, input_ids, self._kwargs)
        return outputs.logits[:, -1]

    def select(self, rows: Tensor) -> None:
        self._kwargs = _select_rows(self._kwargs, rows)


def _choose_steps(model: nn.Module, kwargs: dict[str, Any], capture: Capture | None, problem: str | None
                  ) -> _Steps | CapturedSteps:
    """Return the steps after the prompts, captured if that is wanted and possible; report why it is not possible.

    Args:
        problem: Reason why rows cannot be removed from the batch, if any.
    """
    if capture is None:
        return _Steps(model, kwargs)
    cache = next((name for name in CARRIED if kwargs.get(name) is not None), "")
    if problem := problem or uncapturable_reason(model, kwargs, cache):
        _say_once(model, f"Generation without CUDA graphs, in spite of model.cuda_graphs: {problem}.")
        return _Steps(model, kwargs)
    return CapturedSteps(model, kwargs, cache, capture)


def _shared_rows_reason(model: nn.Module, size: int, processors: LogitsProcessorList, kwargs: dict[str, Any]
                        ) -> str | None:
    """Return why rows cannot be shared and removed from the batch; None if they can."""
    carried = [kwargs[name] for name in CARRIED if kwargs.get(name) is not None]
    if not all(map(has_separable_rows, carried)) or kwargs["use_cache"] and not carried:
        return "this model's state has an unknown form"
    if unknown := [type(processor).__name__ for processor in processors if type(processor) not in BY_ROW]:
        return f"{', '.join(unknown)} may need all rows"
    if kwargs.get(ENCODED) or any(
            torch.is_tensor(value) and (name not in COLUMNS or value.shape[0] != size or value.ndim != 2)
            for name, value in kwargs.items()):
        return "this model has inputs that do not belong to rows"
    return None


def _say_once(model: nn.Module, message: str) -> None:
    messages = reported.setdefault(model, set())
    if message not in messages:
        messages.add(message)
        say(message)


def _forward_distinct(model: nn.Module, ids: Tensor, kwargs: dict[str, Any], prompt: bool
                      ) -> tuple[Any, dict[str, Any]]:
    """Run `_forward` once for rows with the same inputs."""
    inputs = [ids, *(value for value in kwargs.values() if torch.is_tensor(value))]
    _, copies = torch.cat(inputs, 1).unique(dim=0, return_inverse=True)  # [B] indices of distinct rows
    row_indices = torch.arange(len(ids), device=ids.device)
    num_distinct = int(copies.max()) + 1
    for cache in (kwargs[name] for name in CARRIED if name in kwargs):
        preallocate_cache(cache)
    if num_distinct == len(ids):
        return _forward(model, ids, kwargs, prompt)
    firsts = row_indices.new_empty(num_distinct).scatter_reduce_(0, copies, row_indices, "amin", include_self=False)
    outputs, kwargs = _forward(model, ids[firsts], _select_rows(kwargs, firsts), prompt)
    outputs.logits = outputs.logits[:, -1:][copies]
    return outputs, _select_rows(kwargs, copies)


def _select_rows(kwargs: dict[str, Any], rows: Tensor) -> dict[str, Any]:
    """Return the inputs of `rows`, in this order; rows may repeat. Changes the cache in place."""
    for name in CARRIED:
        if kwargs.get(name) is not None:
            kwargs[name].reorder_cache(rows)
    return {name: value[rows] if torch.is_tensor(value) else value for name, value in kwargs.items()}


def _select_processor_rows(processors: LogitsProcessorList, rows: Tensor) -> LogitsProcessorList:
    def select(processor: Any) -> Any:
        if type(processor) is RepetitionPenaltyLogitsProcessor and torch.is_tensor(processor.prompt_ignore_length):
            return RepetitionPenaltyLogitsProcessor(processor.penalty, processor.prompt_ignore_length[rows])
        return processor

    return LogitsProcessorList(map(select, processors))


def sample_tokens(logits: Tensor, uniforms: Tensor) -> Tensor:
    """Return for each row the first token [B] at which the cumulative probability exceeds its uniform number.

    Probabilities are summed as integers, so that the result does not depend on the order of a device's sums.

    Args:
        logits: [B, V] logits.
        uniforms: [B] in [0, 1).
    """
    # [B, V] int32 multiples of UNIT, in blocks: only the selected block is summed token by token.
    units = F.pad((logits.softmax(-1) / UNIT).round_().int(), (0, -logits.shape[-1] % BLOCK))
    units = units.view(len(units), -1, BLOCK)
    sums = units.sum(-1, dtype=torch.int32).cumsum(-1)  # [B, V / BLOCK] int64, at the end of each block
    # Scale by the actual total, as it differs from 1 by rounding, and stay below it.
    target = (uniforms * sums[:, -1]).long().minimum(sums[:, -1] - 1)[:, None]
    block = (sums <= target).sum(-1, keepdim=True)
    earlier = F.pad(sums, (1, 0)).gather(1, block)  # sum of the earlier blocks, [B, 1]
    within = units.take_along_dim(block[..., None], 1).squeeze(1).cumsum(-1)
    # The number of tokens whose cumulative probability does not exceed the target is the id of the first that does.
    return (block * BLOCK + (within <= target - earlier).sum(-1, keepdim=True)).squeeze(1)


def contrastive_search(model: nn.Module, input_ids: Tensor, logits_processor: LogitsProcessorList,
                       stopping_criteria: StoppingCriteriaList, generation_config: GenerationConfig,
                       penalty_alpha: float, top_k: int, synced: bool = False, **model_kwargs: Any) -> Tensor:
    """Contrastive search (Su et al. 2022, "A Contrastive Framework for Neural Text Generation"), [B, T + T_new].

    Each step runs the model on the top_k tokens v and selects the one with the highest
    (1 - alpha) p(v | x) - alpha max_j cos(h_v, h_j), where h_j are the hidden states of the tokens so far.
    """
    outputs, model_kwargs = _forward(model, input_ids, model_kwargs | {"output_hidden_states": True}, prompt=True)
    # The states h_j of the last layer, [B, T, H].
    context = _context(outputs.hidden_states[-1], model_kwargs.get("attention_mask"))
    logits, k = outputs.logits[:, -1], min(top_k, outputs.logits.shape[-1])
    rows = torch.arange(len(input_ids), device=input_ids.device)
    # Rows of the cache that the candidates continue: at first each prompt's own row, K times.
    origin, is_finished = rows.repeat_interleave(k), torch.zeros_like(rows, dtype=torch.bool)
    # From here on masks and positions have a row per candidate; `reorder_cache` expands the cache in the same way.
    model_kwargs |= {name: value.repeat_interleave(k, 0) for name, value in model_kwargs.items()
                     if torch.is_tensor(value)}
    while _must_continue(bool(is_finished.all()), synced, input_ids.device):
        probs, tokens = logits_processor(input_ids, logits.float()).softmax(-1).topk(k)  # [B, K]
        candidates = torch.cat([input_ids.repeat_interleave(k, 0), tokens.view(-1, 1)], 1)  # [B * K, T + 1]
        _reorder_cache(model_kwargs, origin)
        outputs, model_kwargs = _forward(model, candidates, model_kwargs)
        # [B * K, T, H] -> last position [B * K, H] -> [B, K, H]
        states = F.normalize(outputs.hidden_states[-1][:, -1].float(), dim=-1).unflatten(0, (-1, k))
        # Cosines [B, K, H] [B, H, T] -> [B, K, T]; their maximum over the context is the penalty.
        best = ((1 - penalty_alpha) * probs - penalty_alpha * (states @ context.mT).amax(-1)).argmax(-1)
        token = tokens[rows, best].masked_fill(is_finished, _pad_token(generation_config))
        input_ids = torch.cat([input_ids, token[:, None]], 1)
        context = torch.cat([context, states[rows, best][:, None]], 1)
        # The selected candidate's pass already has the next logits [B, V] and cache, so a step runs the model once.
        logits, origin = outputs.logits[rows * k + best, -1], (rows * k + best).repeat_interleave(k)
        is_finished |= stopping_criteria(input_ids, None)
    return input_ids


def _context(hidden: Tensor, mask: Tensor | None) -> Tensor:
    """Return the normalised hidden states of the prompt [B, T, H], with padding replaced by the last token.

    Duplicates do not change the maximum over the context.
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
    while _must_continue(not any(group.is_open.any() for group in groups), synced, input_ids.device):
        ids = torch.stack([group.ids for group in groups], 1)
        outputs, model_kwargs = _forward(model, ids.flatten(0, 2), model_kwargs, ids.shape[-1] == prompt_length)
        log_probs = outputs.logits[:, -1].float().log_softmax(-1).unflatten(0, ids.shape[:3])  # [B, G, S, V]
        # [B, V], number of beams of earlier groups that chose each token in this step.
        token_counts = torch.zeros_like(log_probs[:, 0, 0])
        for index, group in enumerate(groups):
            # As in transformers 4, processors follow the penalty. Some identify rows by index, so they get all rows.
            scores = (log_probs - diversity_penalty * token_counts[:, None, None]).flatten(0, 2)
            scores = logits_processor(ids.flatten(0, 2), scores).view_as(log_probs)[:, index]
            token_counts += group.advance(scores, stopping_criteria)
        # Rows of the cache [B, G * S]: indices of beams within a prompt, plus the prompt's offset.
        cache_rows = torch.cat([group.parents + index * group.size for index, group in enumerate(groups)], 1)
        offsets = torch.arange(len(cache_rows), device=cache_rows.device)[:, None] * config.num_beams
        if model_kwargs["use_cache"]:
            _reorder_cache(model_kwargs, (offsets + cache_rows).flatten())
    # Return the best answers of all groups.
    scores = torch.cat([group.best_scores for group in groups], 1)
    top = scores.topk(config.num_return_sequences).indices[..., None]
    best = torch.cat([group.best for group in groups], 1).take_along_dim(top, 1)
    best = best[..., :(best != UNUSED).sum(-1).max()].flatten(0, 1)  # truncate after the longest answer
    return best.masked_fill(best == UNUSED, _pad_token(config))


class _Group:
    """Beam search with S beams for each of B prompts, from `ids` [B, S, T]; rules as in transformers 5."""

    def __init__(self, ids: Tensor, config: GenerationConfig):
        self.config, (self.size, self.prompt_length) = config, ids.shape[1:]
        self.eos = ids.new_tensor(_end_tokens(config))
        # Running beams and their summed log-probabilities [B, S]: all start equal, so only the first may continue.
        self.ids, self.scores = ids, torch.full(ids.shape[:2], LOST, device=ids.device)
        self.scores[:, 0] = 0.0
        # The best finished beams, and their sums divided by length ** length_penalty [B, S], best first.
        self.best, self.best_scores = ids, torch.full_like(self.scores, -torch.inf)
        self.is_open = torch.ones_like(ids[:, 0, 0], dtype=torch.bool)  # [B], True if better beams may still finish.

    def advance(self, log_probs: Tensor, stopping_criteria: StoppingCriteriaList) -> Tensor:
        """Extend each beam by a token, given scores [B, S, V]; return how many beams chose each token, [B, V]."""
        # Enough candidates that S of them continue, even if every beam's top tokens are end tokens.
        num_candidates, was_open = self.size * max(2, 1 + len(self.eos)), self.is_open[:, None]
        # [B, S, V] -> [B, S * V] -> [B, num_candidates]
        scores, flat_indices = (self.scores[..., None] + log_probs).flatten(1).topk(num_candidates)
        parents, tokens = flat_indices // log_probs.shape[-1], flat_indices % log_probs.shape[-1]
        ids = torch.cat([self.ids.take_along_dim(parents[..., None], 1), tokens[..., None]], -1)
        is_ended = stopping_criteria(ids.flatten(0, 1), None).view_as(tokens)
        self._keep_finished(ids, scores, is_ended)
        # Running beams first, then beams ended by length: other groups are penalised for these, not for end tokens.
        selected = (is_ended.int() + torch.isin(tokens, self.eos)).argsort(dim=1, stable=True)[:, :self.size]  # [B, S]
        self.scores, self.parents = scores.masked_fill(is_ended, LOST).gather(1, selected), parents.gather(1, selected)
        self.ids = ids.take_along_dim(selected[..., None], 1)
        self.is_open = self.is_open & self._may_improve() & ~is_ended.all(1)
        # Beams of finished prompts continue with the others, but their tokens do not count.
        counts = was_open.expand(-1, self.size).to(scores)
        return torch.zeros_like(log_probs[:, 0]).scatter_add_(1, self.ids[..., -1], counts)

    def _keep_finished(self, ids: Tensor, scores: Tensor, is_ended: Tensor) -> None:
        """Add ended candidates [B, K, T] among the first S to the finished beams."""
        is_new = is_ended & self.is_open[:, None]
        # Candidates are sorted by score; ended candidates after the first S are dropped.
        is_new[:, self.size:] = False
        scores = scores / (ids.shape[-1] - self.prompt_length) ** self.config.length_penalty
        scores = torch.cat([self.best_scores, scores.masked_fill(~is_new, -torch.inf)], 1)
        self.best_scores, selected = scores.topk(self.size)
        beams = torch.cat([F.pad(self.best, (0, 1), value=UNUSED), ids], 1)
        self.best = beams.take_along_dim(selected[..., None], 1)

    def _may_improve(self) -> Tensor:
        """Return [B], True if a running beam may still beat the worst finished beam; see `early_stopping`."""
        worst, penalty, early = self.best_scores[:, -1], self.config.length_penalty, self.config.early_stopping
        # Under "never" with a positive penalty, a running beam's best score is reached at the maximum length.
        length = self.config.max_length if early == "never" and penalty > 0 else self.ids.shape[-1]
        best = self.scores[:, 0] / (length - self.prompt_length) ** penalty
        return worst == -torch.inf if early is True else best > worst


def _forward(model: nn.Module, ids: Tensor, kwargs: dict[str, Any], prompt: bool = False) -> tuple[Any, dict[str, Any]]:
    """Run the model on prompts, or on the last tokens (on all without cache); return outputs and new kwargs."""
    length = 1 if kwargs["use_cache"] and not prompt else None
    inputs = model.prepare_inputs_for_generation(ids, next_sequence_length=length, is_first_iteration=prompt, **kwargs)
    outputs = model(**inputs, return_dict=True)
    carried = {name: value for name, value in outputs.items() if name in CARRIED}
    # Each input gains the column of the new token: [B, T] -> [B, T + 1].
    grown = {name: torch.cat([kwargs[name], column(kwargs[name][..., -1:])], -1) for name, column in COLUMNS.items()
             if kwargs.get(name) is not None}
    return outputs, kwargs | grown | carried


def _reorder_cache(kwargs: dict[str, Any], rows: Tensor) -> None:
    """Replace the cache's rows by these rows, in this order; rows may repeat."""
    next(kwargs[name] for name in CARRIED if name in kwargs).reorder_cache(rows)


def _pad_token(config: GenerationConfig) -> int:
    """Return the padding token, or the end token as in transformers, or 0 if no row ends early."""
    return next(token for token in (config.pad_token_id, *_end_tokens(config), 0) if token is not None)


def _end_tokens(config: GenerationConfig) -> list[int]:
    tokens = config.eos_token_id
    return [] if tokens is None else tokens if isinstance(tokens, list) else [tokens]


def _must_continue(is_done: bool, synced: bool, device: torch.device) -> bool:
    """True if this process, or any process if `synced`, needs another step."""
    if not synced:
        return not is_done
    # A collective call: all processes take part in every step, even finished ones.
    waiting = torch.tensor(float(not is_done), device=device)
    torch.distributed.all_reduce(waiting)
    return waiting.item() > 0
