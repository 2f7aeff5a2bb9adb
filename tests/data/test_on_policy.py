"""Rows whose answers the network draws: which they are, their items, and a loader that draws before each step."""

import json
from itertools import islice
from types import SimpleNamespace

import numpy as np
import pytest

from lmmods.core.errors import UserError
from lmmods.core.generation_config import draws
from lmmods.core.labels import IGNORED
from lmmods.data.batch.loader import Shard
from lmmods.data.on_policy import OnPolicy, OnPolicyLoader, SampledSet
from lmmods.data.order.sampler import training_order
from lmmods.data.sft import SFTData
from lmmods.recipe.tasks.clm import CLMFields
from lmmods.recipe.tasks.mlm import MLMFields
from lmmods.recipe.tasks.sft import SFTDataFields, SFTFields

NUM_ROWS, ROOM, MOST = 11, 12, 3
PROMPTS = [2, 3, 9, 5, 1, 10, 4, 12, 3, 6, 2]  # two leave no room for an answer


class Rows:
    """Numbered items, as of a `NumberedSet`: prompts of `PROMPTS` tokens, whose answers are two tokens 7."""

    lengths = np.array(PROMPTS) + 2

    def __len__(self):
        return NUM_ROWS

    def __getitem__(self, number):
        if number < 0:
            return None
        draw, place = divmod(number, NUM_ROWS)
        ids = np.array([100 + place] * PROMPTS[place] + [7, 7], np.int32)
        return {"input_ids": ids, "labels": ids, "prompt_length": PROMPTS[place], "row": place, "draw": draw}


class Student:
    """Draws one token for each of its numbers, up to one that is under 0.2."""

    def __init__(self):
        self.asked = []

    def __call__(self, prompts, numbers):
        self.asked.append([len(prompt) for prompt in prompts])
        return [np.array([int(1000 * u) for u in row[: 1 + int(np.argmax([*(row < 0.2), True][: len(row)]))]])
                for row in numbers]


def loader_of(batch_size, share=0.5, rank=0, world_size=1, rows_per_step=4, seed=3):
    student = Student()

    def order_of(epoch, rule):
        return training_order(Rows.lengths, batch_size, [5, epoch], rule).shifted(epoch * NUM_ROWS)

    loader = OnPolicyLoader(Rows(), order_of, list, Shard(rank, world_size, 2, rows_per_step // batch_size), batch_size,
                            OnPolicy(share, MOST, ROOM, seed, student), grouped=False)
    return loader, student


def shown(item):
    return None if item is None else (item["row"], item["draw"], item["drawn"], item["input_ids"].tolist(),
                                      item["labels"].tolist())


def rows_of(loader, epochs=1):
    return [[shown(item) for item in batch] for _ in range(epochs) for batch in loader]


def test_the_chosen_share_depends_on_seed_epoch_and_row_alone():
    count, share = 2000, 0.3

    class Many(Rows):
        def __len__(self):
            return count

        def __getitem__(self, number):
            return {**Rows.__getitem__(self, 0), "row": number % count, "draw": number // count}

    def chosen(share, seed=3, order=1):
        rows = SampledSet(Many(), OnPolicy(share, MOST, ROOM, seed, Student()))
        rows.draw(range(2 * count)[::order])
        return np.array([rows[number]["drawn"] for number in range(2 * count)])

    result = chosen(share)
    assert abs(result.sum() - share * 2 * count) < 3 * np.sqrt(2 * count * share * (1 - share))
    assert (result == chosen(share, order=-1)).all() and (result <= chosen(0.6)).all()
    assert (result[:count] != result[count:]).any() and (result != chosen(share, seed=4)).any()
    expected = [draws(3, [place], 1, step=epoch)[0, 0] < share for epoch in range(2) for place in range(count)]
    assert result.tolist() == expected
    assert chosen(1.0).all()


def test_all_of_a_drawn_answer_is_scored_and_nothing_of_its_prompt():
    loader, _ = loader_of(2, share=1.0)
    for item in (item for batch in loader for item in batch if item is not None):
        prompt = PROMPTS[item["row"]]
        assert item["input_ids"][:prompt].tolist() == [100 + item["row"]] * prompt
        if prompt + MOST > ROOM:
            assert not item["drawn"] and item["input_ids"][prompt:].tolist() == [7, 7]
        else:
            # The first number has chosen the row.
            numbers = draws(3, [item["row"]], 1 + MOST, step=item["draw"])[0, 1:]
            [answer] = Student()([[0]], numbers[None])
            assert item["drawn"] and item["input_ids"][prompt:].tolist() == answer.tolist()
            assert item["labels"].tolist() == [IGNORED] * prompt + item["input_ids"][prompt:].tolist()


def test_answers_are_drawn_before_each_step():
    loader, student = loader_of(2, share=1.0)
    iterator = iter(loader)
    for number in range(len(loader)):
        next(iterator)
        assert len(student.asked) == number * 2 // 4 + 1
    loader.starts_itself = False
    assert loader.begin_segment() == 2 and len(list(loader)) == 2


@pytest.mark.parametrize("batch_size", [1, 2])
def test_steps_have_the_same_answers_however_they_are_cut(batch_size):
    def steps(loader):
        rows = [row for batch in rows_of(loader) for row in batch if row]
        return [sorted(rows[start : start + 4]) for start in range(0, NUM_ROWS, 4)]

    (full, student), (cut, other) = loader_of(4), loader_of(batch_size)
    for _ in range(2):  # epochs
        assert steps(cut) == steps(full)
    assert student.asked == other.asked


def test_two_ranks_draw_the_answers_of_one():
    one, student = loader_of(2)
    two = [loader_of(2, rank=rank, world_size=2) for rank in range(2)]
    mixed = [row for pair in zip(*(rows_of(loader) for loader, _ in two), strict=True) for row in pair]
    assert mixed[: len(one)] == rows_of(one) and two[0][1].asked == two[1][1].asked == student.asked


@pytest.mark.parametrize("done", range(1, 10))
def test_a_step_that_goes_on_draws_all_its_answers_again(done):
    straight, student = loader_of(1, share=1.0)
    expected = rows_of(straight, 2)
    loader, _ = loader_of(1, share=1.0)
    for _ in islice(iter(loader), done):
        pass
    again, other = loader_of(1, share=1.0)
    again.load_state_dict(json.loads(json.dumps(loader.state_dict())))
    assert rows_of(again, 2)[: len(expected) - done] == expected[done:]
    assert other.asked[: len(student.asked) - done // 4] == student.asked[done // 4 :]


@pytest.fixture
def data_with(llama_folder, instructions):
    def make(most, longest_first=False, **trainer):
        data = SFTData(source=str(instructions), max_length=96, template="alpaca", batch_size=4)
        data.connect(pretrained=str(llama_folder), seed=7, longest_first=longest_first)
        data.prepare_data()
        data.setup("fit")
        data.take_rows_from(OnPolicy(0.5, most, 96, 7, Student()))
        data.trainer = SimpleNamespace(data_rank=0, num_data_ranks=1, batches_per_step=2, **trainer)
        return data

    return make


def test_rows_without_room_are_counted(data_with, capsys):
    data = data_with(3)
    prompts = data.rows("train").column("prompt_length")
    longest = int(np.sort(prompts)[-5])
    data = data_with(96 - longest)
    count = int((prompts > longest).sum())
    assert 0 < count < len(prompts)
    for _ in range(2):
        loader = data.train_batches()
    output = capsys.readouterr()
    assert (output.out + output.err).count(f"{count} of {len(prompts)} training rows do not have space for") == 1
    batch = next(iter(loader))
    assert batch["drawn"].shape == (4,) and 0 < batch["drawn"].sum() < 4
    with pytest.raises(UserError, match="none of the .* training rows has space for"):
        data_with(95).train_batches()


@pytest.mark.parametrize(("trainer", "words"), [({"overfit_batches": 2}, "overfit_batches is 2"),
                                                ({"train_limit": 0.5}, "limit_train_batches is 0.5")])
def test_parts_of_epochs_are_refused(data_with, trainer, words):
    with pytest.raises(UserError, match=rf"trainer\.{words}"):
        data_with(3, **trainer).train_batches()


def test_to_measure_memory_all_answers_are_of_full_length(data_with):
    data = data_with(3, longest_first=True)
    batch = next(iter(data.train_batches()))
    prompts = np.sort(data.rows("train").column("prompt_length"))
    assert (batch["drawn"] == 1).all()
    assert batch["attention_mask"].sum(1).tolist() == (prompts[prompts <= 93][-4:] + 3)[::-1].tolist()



def test_what_draws_no_answers_refuses_to():
    from lmmods.core.settings import Teacher

    fields = {"pretrained": "demo/llama", "teacher": Teacher("demo/llama", on_policy=0.5)}
    for task in (CLMFields, MLMFields):
        with pytest.raises(UserError, match=r"model\.teacher\.on_policy is 0\.5, but must be 0"):
            task(**fields)
    task = SFTFields(**fields)
    for key in ("packing", "streaming"):
        with pytest.raises(UserError, match=rf"data\.{key} is true, but must be false with model\.teacher\.on_policy"):
            task.check_data(SFTDataFields("rows.jsonl", **{key: True}))
