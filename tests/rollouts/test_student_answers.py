"""On-policy answers: each process samples a part of them, and stand-ins replace them without training."""

from types import SimpleNamespace

import numpy as np
import pytest

from lmmods.core.settings import Teacher
from lmmods.recipe.tasks.sft import SFTFields
from lmmods.rollouts.on_policy import make_on_policy
from lmmods.rollouts.policy import SampledAnswer

DATA = SimpleNamespace(max_length=50, run_seed=7, codec=SimpleNamespace(stop_token_ids=[2]))
PROMPTS = [np.arange(1, length) for length in (3, 5, 2, 4, 7)]
UNIFORMS = np.random.default_rng(0).random((5, 4), np.float32)


class Sampler:
    """Repeats a prompt's last token, depending on its first uniform number; `gathered` has all ranks' answers."""

    num_ranks = 2

    def __init__(self, rank: int, gathered: dict) -> None:
        self.rank, self.gathered = rank, gathered

    def draw(self, prompts, uniforms, temperature, max_new_tokens, ends):
        self.request = len(prompts), temperature, max_new_tokens, ends
        return [SampledAnswer(np.full(int(1 + row[0] * max_new_tokens), prompt[-1], np.int32), None, None, True)
                for prompt, row in zip(prompts, uniforms, strict=True)]

    def gather(self, parts):
        self.gathered.update(parts)
        return self.gathered


def make_task(**teacher):
    return SFTFields(pretrained="demo/llama", teacher=Teacher("demo/llama", **teacher))


def test_each_process_samples_a_part_of_the_answers():
    task, gathered = make_task(on_policy=0.5, max_new_tokens=4, sampling_temperature=0.7), {}
    samplers = [Sampler(rank, gathered) for rank in (0, 1)]
    first, second = (make_on_policy(task, DATA, lambda sampler=sampler: sampler) for sampler in samplers)
    assert first[:4] == (0.5, 4, 50, 7)
    with pytest.raises(KeyError):  # the other process's are missing
        first.draw(PROMPTS, UNIFORMS)
    for answer, prompt, row in zip(second.draw(PROMPTS, UNIFORMS), PROMPTS, UNIFORMS, strict=True):
        assert answer.tolist() == [prompt[-1]] * int(1 + row[0] * 4)
    assert [sampler.request for sampler in samplers] == [(3, 0.7, 4, [2]), (2, 0.7, 4, [2])]


def test_prompt_tokens_replace_answers_without_training():
    draw = make_on_policy(make_task(on_policy=1.0), DATA).draw
    assert [answer.tolist() for answer in draw(PROMPTS[:2], UNIFORMS[:2])] == [[1, 2, 1, 2], [1, 2, 3, 4]]
    assert make_on_policy(make_task(), DATA) is None


def test_a_run_is_described_with_its_sampled_rows():
    task = make_task(on_policy=0.25, max_new_tokens=9)
    assert task.sampling_load(10, 4) == (3, 4, 1, 9) and make_task().sampling_load(10, 4) is None
    [line] = task.describe_training(10, None)
    assert "25% of the rows" in line and "2.5 of 10, with at most 9 tokens" in line
    assert make_task().describe_training(10, None) == []
    tags, words = SFTFields.method({"teacher": {"pretrained": "big", "on_policy": 0.25}})
    assert tags == ["distillation"] and "on 25% of the rows with its own answers" in words
