"""On-policy distillation (GKD, Agarwal et al. 2024): the student samples answers to the prompts of training rows."""

from collections.abc import Callable
from functools import partial

import numpy as np

from lmmods.data.on_policy import OnPolicy, make_stand_ins
from lmmods.data.sft import SFTData
from lmmods.recipe.tasks.sft import SFTFields
from lmmods.rollouts.policy import Sampler


def make_on_policy(task: SFTFields, data: SFTData, get_sampler: Callable[[], Sampler | None] = lambda: None
                   ) -> OnPolicy | None:
    """Return which answers of a task's rows are sampled, and how; None if none are.

    Args:
        data: Data module, set up.
        get_sampler: Returns the network in training; None if nothing trains, as in `inspect`, where stand-ins replace
            the answers.
    """
    if not task.on_policy:
        return None
    return OnPolicy(task.on_policy, task.teacher.max_new_tokens, data.max_length, data.run_seed,
                    partial(sample_answers, task, data, get_sampler))


def sample_answers(task: SFTFields, data: SFTData, get_sampler: Callable[[], Sampler | None], prompts: list[np.ndarray],
                   uniforms: np.ndarray) -> list[np.ndarray]:
    """Return the tokens of answers as in `Draw`; each process samples a part of them."""
    if (sampler := get_sampler()) is None:
        return make_stand_ins(prompts, uniforms)
    local = list(range(sampler.rank, len(prompts), sampler.num_ranks))
    sampled = sampler.draw([prompts[index].tolist() for index in local], uniforms[local],
                           task.teacher.sampling_temperature, uniforms.shape[1], data.codec.stop_token_ids)
    answers = sampler.gather({index: answer.tokens for index, answer in zip(local, sampled, strict=True)})
    return [answers[index] for index in range(len(prompts))]
