"""On-policy distillation (GKD, Agarwal et al. 2024): answers that the student draws to the prompts of training rows."""

from collections.abc import Callable
from functools import partial

import numpy as np

from lmmods.data.on_policy import OnPolicy, stand_ins
from lmmods.data.sft import SFTData
from lmmods.recipe.tasks.sft import SFTFields
from lmmods.rollouts.policy import Sampler


def on_policy_of(task: SFTFields, data: SFTData, sampler: Callable[[], Sampler | None] = lambda: None
                 ) -> OnPolicy | None:
    """Return which answers of a task's rows are drawn, and by what; None if none are.

    Args:
        data: Set up.
        sampler: Returns the network in training; None where nothing trains, so that stand-ins take the place of
            answers.
    """
    if not task.on_policy:
        return None
    return OnPolicy(task.on_policy, task.teacher.max_new_tokens, data.max_length, data.run_seed,
                    partial(draw_answers, task, data, sampler))


def draw_answers(task: SFTFields, data: SFTData, sampler_of: Callable[[], Sampler | None], prompts: list[np.ndarray],
                 numbers: np.ndarray) -> list[np.ndarray]:
    """Return the tokens of answers, as of `Draw`; each process draws a share of them."""
    if (sampler := sampler_of()) is None:
        return stand_ins(prompts, numbers)
    own = list(range(sampler.rank, len(prompts), sampler.num_ranks))
    drawn = sampler.draw([prompts[place].tolist() for place in own], numbers[own], task.teacher.sampling_temperature,
                         numbers.shape[1], data.codec.stop_token_ids)
    parts = sampler.gather({place: answer.tokens for place, answer in zip(own, drawn, strict=True)})
    return [parts[place] for place in range(len(prompts))]
