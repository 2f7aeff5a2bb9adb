"""GRPO prompts, and how epochs are divided into rollouts."""

import json
from dataclasses import replace
from functools import partial
from itertools import islice

import numpy as np
import pytest
import torch

from lmmods.core.errors import UserError
from lmmods.core.labels import IGNORED
from lmmods.data.batch.loader import Shard
from lmmods.data.batch.rollouts import RolloutLoader, RolloutPlan
from lmmods.data.grpo import PromptData, RolloutCollator
from lmmods.recipe.rewards import read_rewards
from lmmods.rollouts.rewards import check_prompts

ROWS = [{"instruction": "Say one.", "input": "", "output": "one", "level": 1},
        {"instruction": "Say a much longer thing than the others, please.", "input": "", "output": "thing", "level": 2},
        {"instruction": "Say two.", "input": "", "output": "two", "level": 3}]


def build_data(folder, path, rows=ROWS, new_tokens=4, **settings) -> PromptData:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    data = PromptData(source=str(path), **{"max_length": 256, "template": "alpaca", **settings})
    data.connect(pretrained=str(folder), seed=7, new_tokens=new_tokens)
    data.prepare_data()
    data.setup("fit")
    return data


def test_prompts_are_checked_against_the_rewards_in_setup(llama_folder, tmp_path):
    rewards = read_rewards([{"name": "exact_match", "column": "levle"}])
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    data = PromptData(source=str(path), max_length=256, template="alpaca")
    data.connect(pretrained=str(llama_folder), seed=7, new_tokens=4, check_prompts=partial(check_prompts, rewards))
    data.prepare_data()
    with pytest.raises(UserError, match=r"any of the 3 rows of data.source: the row has no column levle.*mean level\?"):
        data.setup("fit")


# Prompts --------------------------------------------------------------------------------------------------------------

def test_a_prompt_has_the_row_and_reference_for_the_rewards(llama_folder, tmp_path):
    data = build_data(llama_folder, tmp_path / "rows.jsonl")
    prompt = data.prompt("train", 2)
    assert prompt.reference == "two" and prompt.row["level"] == 3 and prompt.row_index == 2
    assert [message["role"] for message in prompt.conversation.messages] == ["user"]
    assert data.tokenizer.decode(prompt.ids).endswith("### Response:")  # as at inference, without the answer


def test_a_row_without_a_response_is_a_prompt(llama_folder, tmp_path):
    data = build_data(llama_folder, tmp_path / "rows.jsonl", [{"prompt": "One?", "answer": "1"},
                                                          {"prompt": "Two?", "answer": "2"}])
    assert data.prompt("train", 0).reference is None and data.prompt("train", 0).row["answer"] == "1"


def test_a_prompt_without_space_for_an_answer_is_dropped(llama_folder, tmp_path):
    path = tmp_path / "rows.jsonl"
    lengths = [len(build_data(llama_folder, path).prompt("train", index).ids) for index in range(3)]
    max_prompt = max(lengths)
    data = build_data(llama_folder, path, max_length=max_prompt + 4, on_overflow="skip")
    assert data.num_prompts("train") == 3
    data = build_data(llama_folder, path, max_length=max_prompt + 3, on_overflow="skip")
    assert data.num_prompts("train") == 2
    assert sum(source["rows_dropped"] for source in data.report["sources"].values()) == 1


@pytest.mark.parametrize(("key", "value"), [("packing", True), ("streaming", True), ("group_by_length", True)])
def test_options_that_need_answers_in_advance_are_rejected(key, value):
    with pytest.raises(UserError, match=f"data.{key}"):
        PromptData(source="rows.jsonl", **{key: value})


# Plans ----------------------------------------------------------------------------------------------------------------

@pytest.mark.parametrize(("prompts", "size", "per_step", "steps", "iterations"), [
    (7, 4, 2, 1, 1), (7, 4, 2, 2, 2), (8, 2, 4, 1, 3), (3, 8, 4, 1, 1), (3, 8, 4, 2, 2), (12, 3, 2, 3, 1)])
def test_each_iteration_trains_on_each_answer_once(prompts, size, per_step, steps, iterations):
    plan = RolloutPlan(prompts, size, per_step, steps, iterations, seed=3)
    counts, rollouts = {}, {}
    for row in range(plan.num_rows):
        rollout = plan.find(5, row)
        assert rollout.start <= row < rollout.stop and rollout.epoch == 5
        rollouts[rollout.rollout] = rollout
        answer = plan.answer_of(rollout, row)
        if answer >= 0:
            counts[rollout.rollout, answer] = counts.get((rollout.rollout, answer), 0) + 1
    assert len(rollouts) == plan.num_rollouts
    assert sorted(np.concatenate([rollout.prompts for rollout in rollouts.values()])) == list(range(prompts))
    assert counts.keys() == {(index, answer) for index, rollout in rollouts.items()
                             for answer in range(len(rollout.prompts) * size)}
    assert set(counts.values()) == {iterations}
    # Rollouts and iterations start with a step, so that no step mixes weights or iterations.
    if iterations > 1:
        assert all(rollout.start % plan.rows_per_step == rollout.stop % plan.rows_per_step == 0
                   for rollout in rollouts.values())


def test_prompts_are_shuffled_for_each_epoch():
    plan = RolloutPlan(50, 2, 50, seed=1)
    first, second = (plan.find(epoch, 0).prompts.tolist() for epoch in (0, 1))
    assert first != second and sorted(first) == sorted(second) == list(range(50))
    assert RolloutPlan(50, 2, 50).find(1, 0).prompts.tolist() == list(range(50))


# The loader -----------------------------------------------------------------------------------------------------------

class RolloutMaker:
    """A stand-in that makes rollouts: items contain the prompt and the sample index."""

    def __init__(self, plan: RolloutPlan) -> None:
        self.plan, self.requests, self.names = plan, [], []

    def __call__(self, rollout, name):
        self.requests.append((rollout.epoch, rollout.rollout))
        self.names.append(name)
        items = [{"input_ids": np.full(1 + (prompt + sample) % 3, prompt), "sample": sample,
                  "row": int(prompt) * self.plan.num_generations + sample}
                 for prompt in rollout.prompts for sample in range(self.plan.num_generations)]
        return f"e{rollout.epoch}r{rollout.rollout}", items


def make_loader(plan, batch_size, rank=0, world_size=1, accumulated=None):
    maker = RolloutMaker(plan)
    steps = accumulated or plan.rows_per_step // (batch_size * world_size)
    return RolloutLoader(plan, list, Shard(rank, world_size, 0, steps * world_size), batch_size, maker), maker


def read_rows(loader, epochs):
    return [[None if item is None else item["row"] for item in batch] for _ in range(epochs) for batch in loader]


def test_a_rollout_is_made_when_its_first_batch_is_read():
    plan = RolloutPlan(5, 2, 2, 1, 2, seed=0)
    loader, maker = make_loader(plan, 2)
    iterator = iter(loader)
    for batch in range(len(loader)):
        next(iterator)
        assert len(maker.requests) == batch * 2 // 8 + 1
    assert maker.requests == [(0, 0), (0, 1), (0, 2)] and maker.names == [None] * 3
    next(iter(loader))
    assert maker.requests[-1] == (1, 0)


@pytest.mark.parametrize("batch_size", [1, 2, 4])
def test_a_step_has_the_same_rows_for_any_batch_split(batch_size):
    plan = RolloutPlan(5, 2, 2, 1, 2, seed=0)
    unsplit, _ = make_loader(plan, 4)
    split, _ = make_loader(plan, batch_size)

    def steps(loader):
        rows = [row for batch in read_rows(loader, 2) for row in batch]
        return [sorted(rows[start : start + 4], key=str) for start in range(0, len(rows), 4)]

    assert steps(split) == steps(unsplit)


def test_two_ranks_share_the_rows_of_a_single_one():
    plan = RolloutPlan(5, 2, 2, 2, 1, seed=0)
    single, _ = make_loader(plan, 1)
    ranks = [make_loader(plan, 1, rank, 2) for rank in range(2)]
    mixed = [row for pair in zip(*(read_rows(loader, 2) for loader, _ in ranks), strict=True) for row in pair]
    assert [row for row in mixed if row != [None]] == read_rows(single, 2)
    assert ranks[0][1].requests == ranks[1][1].requests


@pytest.mark.parametrize("done", range(1, 12))
def test_a_resumed_loader_continues_inside_its_rollout(done):
    plan = RolloutPlan(5, 2, 2, 1, 2, seed=0)
    uninterrupted, _ = make_loader(plan, 2)
    expected = read_rows(uninterrupted, 2)
    loader, _ = make_loader(plan, 2)
    for _ in islice(iter(loader), done):
        pass
    state = json.loads(json.dumps(loader.state_dict()))
    resumed, maker = make_loader(plan, 2)
    resumed.load_state_dict(state)
    assert read_rows(resumed, 2)[: len(expected) - done] == expected[done:]
    # A rollout that was trained on is read by its name; otherwise it is made.
    assert maker.names[0] == (state["rollout"] if done % 4 else None)


def test_a_segment_ends_with_its_rollout():
    plan = RolloutPlan(5, 2, 2, 1, 2, seed=0)
    loader, maker = make_loader(plan, 2)
    loader.starts_itself = False
    assert loader.begin_segment() == 4
    assert len(list(loader)) == 4 and maker.requests == [(0, 0)]


def test_a_resume_with_another_number_of_answers_per_step_is_rejected():
    loader, _ = make_loader(RolloutPlan(5, 2, 2, seed=0), 2)
    other, _ = make_loader(RolloutPlan(5, 2, 4, seed=0), 2)
    with pytest.raises(UserError, match="have 4 answers, but .* give 8"):
        other.load_state_dict(loader.state_dict())


def test_a_batch_of_answers_has_padded_columns(llama_folder, tmp_path):
    data = build_data(llama_folder, tmp_path / "rows.jsonl", pad_to_multiple_of=4)
    collate = RolloutCollator(replace(data.collator(), keys=("input_ids", "labels"), side="right"),
                              ("old_logps",))
    item = {"input_ids": np.arange(5), "labels": np.array([IGNORED, IGNORED, 2, 3, 4]), "advantages": -1.5,
            "idle_weight": 0.0, "row": 3, "draw": 0, "old_logps": np.float32([0, 0, -1, -2, -3])}
    batch = collate([item, None])
    assert batch["advantages"].tolist() == [-1.5, 0] and batch["idle_weight"].tolist() == [0, 0]
    assert batch["old_logps"].tolist() == [[0, 0, -1, -2, -3, 0, 0, 0], [0.0] * 8]
    assert batch["old_logps"].dtype == batch["advantages"].dtype == torch.float32
    assert batch["labels"][1].tolist() == [IGNORED] * 8
