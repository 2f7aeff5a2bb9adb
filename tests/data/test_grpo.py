"""Prompts of reinforcement learning, and the division of epochs into rollouts."""

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


def data_of(folder, path, rows=ROWS, new_tokens=4, **settings) -> PromptData:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    data = PromptData(source=str(path), **{"max_length": 256, "template": "alpaca", **settings})
    data.connect(pretrained=str(folder), seed=7, new_tokens=new_tokens)
    data.prepare_data()
    data.setup("fit")
    return data


def test_prompts_are_checked_as_soon_as_they_are_there(llama_folder, tmp_path):
    rewards = read_rewards([{"name": "exact_match", "column": "levle"}])
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    data = PromptData(source=str(path), max_length=256, template="alpaca")
    data.connect(pretrained=str(llama_folder), seed=7, new_tokens=4, check_prompts=partial(check_prompts, rewards))
    data.prepare_data()
    with pytest.raises(UserError, match=r"any of the 3 rows of data.source: the row has no column levle.*mean level\?"):
        data.setup("fit")


# Prompts --------------------------------------------------------------------------------------------------------------

def test_a_prompt_has_what_rewards_see(llama_folder, tmp_path):
    data = data_of(llama_folder, tmp_path / "rows.jsonl")
    prompt = data.prompt("train", 2)
    assert prompt.reference == "two" and prompt.row["level"] == 3 and prompt.row_index == 2
    assert [message["role"] for message in prompt.conversation.messages] == ["user"]
    assert data.tokenizer.decode(prompt.ids).endswith("### Response:")  # as at inference, with nothing of the answer


def test_rows_without_a_response_are_prompts_too(llama_folder, tmp_path):
    data = data_of(llama_folder, tmp_path / "rows.jsonl", [{"prompt": "One?", "answer": "1"},
                                                          {"prompt": "Two?", "answer": "2"}])
    assert data.prompt("train", 0).reference is None and data.prompt("train", 0).row["answer"] == "1"


def test_a_prompt_leaves_room_for_an_answer(llama_folder, tmp_path):
    path = tmp_path / "rows.jsonl"
    lengths = [len(data_of(llama_folder, path).prompt("train", place).ids) for place in range(3)]
    longest = max(lengths)
    data = data_of(llama_folder, path, max_length=longest + 4, on_overflow="skip")
    assert data.num_prompts("train") == 3
    data = data_of(llama_folder, path, max_length=longest + 3, on_overflow="skip")
    assert data.num_prompts("train") == 2
    assert sum(source["rows_dropped"] for source in data.report["sources"].values()) == 1


@pytest.mark.parametrize(("key", "value"), [("packing", True), ("streaming", True), ("group_by_length", True)])
def test_what_needs_answers_beforehand_is_refused(key, value):
    with pytest.raises(UserError, match=f"data.{key}"):
        PromptData(source="rows.jsonl", **{key: value})


# Plans ----------------------------------------------------------------------------------------------------------------

@pytest.mark.parametrize(("prompts", "size", "per_step", "steps", "iterations"), [
    (7, 4, 2, 1, 1), (7, 4, 2, 2, 2), (8, 2, 4, 1, 3), (3, 8, 4, 1, 1), (3, 8, 4, 2, 2), (12, 3, 2, 3, 1)])
def test_each_iteration_takes_each_answer_once(prompts, size, per_step, steps, iterations):
    plan = RolloutPlan(prompts, size, per_step, steps, iterations, seed=3)
    taken, places = {}, {}
    for row in range(plan.num_rows):
        place = plan.find(5, row)
        assert place.start <= row < place.stop and place.epoch == 5
        places[place.rollout] = place
        answer = plan.answer_of(place, row)
        if answer >= 0:
            taken[place.rollout, answer] = taken.get((place.rollout, answer), 0) + 1
    assert len(places) == plan.num_rollouts
    assert sorted(np.concatenate([place.prompts for place in places.values()])) == list(range(prompts))
    assert taken.keys() == {(number, answer) for number, place in places.items()
                            for answer in range(len(place.prompts) * size)}
    assert set(taken.values()) == {iterations}
    # Rollouts and iterations begin with a step, so that no step mixes weights or iterations.
    if iterations > 1:
        assert all(place.start % plan.rows_per_step == place.stop % plan.rows_per_step == 0
                   for place in places.values())


def test_the_order_of_prompts_is_drawn_for_each_epoch():
    plan = RolloutPlan(50, 2, 50, seed=1)
    first, second = (plan.find(epoch, 0).prompts.tolist() for epoch in (0, 1))
    assert first != second and sorted(first) == sorted(second) == list(range(50))
    assert RolloutPlan(50, 2, 50).find(1, 0).prompts.tolist() == list(range(50))


# The loader -----------------------------------------------------------------------------------------------------------

class Begun:
    """Stands in for what makes rollouts: items that tell the rollout, the prompt and the sample."""

    def __init__(self, plan: RolloutPlan) -> None:
        self.plan, self.places, self.names = plan, [], []

    def __call__(self, place, name):
        self.places.append((place.epoch, place.rollout))
        self.names.append(name)
        items = [{"input_ids": np.full(1 + (prompt + sample) % 3, prompt), "sample": sample,
                  "row": int(prompt) * self.plan.num_generations + sample}
                 for prompt in place.prompts for sample in range(self.plan.num_generations)]
        return f"e{place.epoch}r{place.rollout}", items


def loader_of(plan, batch_size, rank=0, world_size=1, accumulated=None):
    begun = Begun(plan)
    steps = accumulated or plan.rows_per_step // (batch_size * world_size)
    return RolloutLoader(plan, list, Shard(rank, world_size, 0, steps * world_size), batch_size, begun), begun


def rows_of(loader, epochs):
    return [[None if item is None else item["row"] for item in batch] for _ in range(epochs) for batch in loader]


def test_rollouts_begin_where_their_first_batch_is_read():
    plan = RolloutPlan(5, 2, 2, 1, 2, seed=0)
    loader, begun = loader_of(plan, 2)
    iterator = iter(loader)
    for number in range(len(loader)):
        next(iterator)
        assert len(begun.places) == number * 2 // 8 + 1
    assert begun.places == [(0, 0), (0, 1), (0, 2)] and begun.names == [None] * 3
    next(iter(loader))
    assert begun.places[-1] == (1, 0)


@pytest.mark.parametrize("batch_size", [1, 2, 4])
def test_steps_have_the_same_rows_however_they_are_cut(batch_size):
    plan = RolloutPlan(5, 2, 2, 1, 2, seed=0)
    full, _ = loader_of(plan, 4)
    cut, _ = loader_of(plan, batch_size)

    def steps(loader):
        rows = [row for batch in rows_of(loader, 2) for row in batch]
        return [sorted(rows[start : start + 4], key=str) for start in range(0, len(rows), 4)]

    assert steps(cut) == steps(full)


def test_two_ranks_share_the_rows_of_one():
    plan = RolloutPlan(5, 2, 2, 2, 1, seed=0)
    one, _ = loader_of(plan, 1)
    two = [loader_of(plan, 1, rank, 2) for rank in range(2)]
    mixed = [row for pair in zip(*(rows_of(loader, 2) for loader, _ in two), strict=True) for row in pair]
    assert [row for row in mixed if row != [None]] == rows_of(one, 2)
    assert two[0][1].places == two[1][1].places


@pytest.mark.parametrize("done", range(1, 12))
def test_a_position_is_in_a_rollout(done):
    plan = RolloutPlan(5, 2, 2, 1, 2, seed=0)
    straight, _ = loader_of(plan, 2)
    expected = rows_of(straight, 2)
    loader, _ = loader_of(plan, 2)
    for _ in islice(iter(loader), done):
        pass
    state = json.loads(json.dumps(loader.state_dict()))
    again, begun = loader_of(plan, 2)
    again.load_state_dict(state)
    assert rows_of(again, 2)[: len(expected) - done] == expected[done:]
    # A rollout that has been trained on is read by its name; one that has not is made.
    assert begun.names[0] == (state["rollout"] if done % 4 else None)


def test_a_segment_ends_with_its_rollout():
    plan = RolloutPlan(5, 2, 2, 1, 2, seed=0)
    loader, begun = loader_of(plan, 2)
    loader.starts_itself = False
    assert loader.begin_segment() == 4
    assert len(list(loader)) == 4 and begun.places == [(0, 0)]


def test_another_number_of_answers_in_a_step_is_refused():
    loader, _ = loader_of(RolloutPlan(5, 2, 2, seed=0), 2)
    other, _ = loader_of(RolloutPlan(5, 2, 4, seed=0), 2)
    with pytest.raises(UserError, match="have 4 answers, but .* give 8"):
        other.load_state_dict(loader.state_dict())


def test_columns_of_answers(llama_folder, tmp_path):
    data = data_of(llama_folder, tmp_path / "rows.jsonl", pad_to_multiple_of=4)
    collate = RolloutCollator(replace(data.collator(), keys=("input_ids", "labels"), side="right"),
                              ("old_logps",))
    item = {"input_ids": np.arange(5), "labels": np.array([IGNORED, IGNORED, 2, 3, 4]), "advantages": -1.5,
            "idle_weight": 0.0, "row": 3, "draw": 0, "old_logps": np.float32([0, 0, -1, -2, -3])}
    batch = collate([item, None])
    assert batch["advantages"].tolist() == [-1.5, 0] and batch["idle_weight"].tolist() == [0, 0]
    assert batch["old_logps"].tolist() == [[0, 0, -1, -2, -3, 0, 0, 0], [0.0] * 8]
    assert batch["old_logps"].dtype == batch["advantages"].dtype == torch.float32
    assert batch["labels"][1].tolist() == [IGNORED] * 8
