"""Rows with answers sampled from the student: which rows, their items, and a loader that samples before each step."""

import json
from itertools import islice
from types import SimpleNamespace

import numpy as np
import pytest

from lmmods.core.errors import UserError
from lmmods.core.generation_config import sampling_uniforms
from lmmods.core.labels import IGNORED
from lmmods.data.batch.loader import Shard
from lmmods.data.on_policy import OnPolicy, OnPolicyLoader, SampledSet
from lmmods.data.order.sampler import training_order
from lmmods.data.sft import SFTData
from lmmods.recipe.tasks.clm import CLMFields
from lmmods.recipe.tasks.mlm import MLMFields
from lmmods.recipe.tasks.sft import SFTDataFields, SFTFields

NUM_ROWS, MAX_LENGTH, MAX_NEW_TOKENS = 11, 12, 3
PROMPTS = [2, 3, 9, 5, 1, 10, 4, 12, 3, 6, 2]  # two leave no space for an answer


class Rows:
    """Items by index, as in a `NumberedSet`: prompts of `PROMPTS` tokens; the answers are two tokens 7."""

    lengths = np.array(PROMPTS) + 2

    def __len__(self):
        return NUM_ROWS

    def __getitem__(self, index):
        if index < 0:
            return None
        epoch, row = divmod(index, NUM_ROWS)
        ids = np.array([100 + row] * PROMPTS[row] + [7, 7], np.int32)
        return {"input_ids": ids, "labels": ids, "prompt_length": PROMPTS[row], "row": row, "draw": epoch}


class Student:
    """Samples one token for each uniform number, up to the first below 0.2."""

    def __init__(self):
        self.requests = []

    def __call__(self, prompts, uniforms):
        self.requests.append([len(prompt) for prompt in prompts])
        return [np.array([int(1000 * u) for u in row[: 1 + int(np.argmax([*(row < 0.2), True][: len(row)]))]])
                for row in uniforms]


def make_loader(batch_size, fraction=0.5, rank=0, world_size=1, rows_per_step=4, seed=3):
    student = Student()

    def order_of(epoch, rule):
        return training_order(Rows.lengths, batch_size, [5, epoch], rule).shifted(epoch * NUM_ROWS)

    loader = OnPolicyLoader(Rows(), order_of, list, Shard(rank, world_size, 2, rows_per_step // batch_size), batch_size,
                            OnPolicy(fraction, MAX_NEW_TOKENS, MAX_LENGTH, seed, student), grouped=False)
    return loader, student


def summarise(item):
    return None if item is None else (item["row"], item["draw"], item["drawn"], item["input_ids"].tolist(),
                                      item["labels"].tolist())


def list_rows(loader, epochs=1):
    return [[summarise(item) for item in batch] for _ in range(epochs) for batch in loader]


def test_the_sampled_rows_depend_only_on_seed_epoch_and_row():
    count, fraction = 2000, 0.3

    class Many(Rows):
        def __len__(self):
            return count

        def __getitem__(self, index):
            return {**Rows.__getitem__(self, 0), "row": index % count, "draw": index // count}

    def choose(fraction, seed=3, order=1):
        rows = SampledSet(Many(), OnPolicy(fraction, MAX_NEW_TOKENS, MAX_LENGTH, seed, Student()))
        rows.draw(range(2 * count)[::order])
        return np.array([rows[index]["drawn"] for index in range(2 * count)])

    chosen = choose(fraction)
    assert abs(chosen.sum() - fraction * 2 * count) < 3 * np.sqrt(2 * count * fraction * (1 - fraction))
    assert (chosen == choose(fraction, order=-1)).all() and (chosen <= choose(0.6)).all()
    assert (chosen[:count] != chosen[count:]).any() and (chosen != choose(fraction, seed=4)).any()
    expected = [sampling_uniforms(3, [row], 1, step=epoch)[0, 0] < fraction
                for epoch in range(2) for row in range(count)]
    assert chosen.tolist() == expected
    assert choose(1.0).all()


def test_a_sampled_answer_is_all_target_and_its_prompt_is_not():
    loader, _ = make_loader(2, fraction=1.0)
    for item in (item for batch in loader for item in batch if item is not None):
        prompt_length = PROMPTS[item["row"]]
        assert item["input_ids"][:prompt_length].tolist() == [100 + item["row"]] * prompt_length
        if prompt_length + MAX_NEW_TOKENS > MAX_LENGTH:
            assert not item["drawn"] and item["input_ids"][prompt_length:].tolist() == [7, 7]
        else:
            # The first uniform number has chosen the row.
            uniforms = sampling_uniforms(3, [item["row"]], 1 + MAX_NEW_TOKENS, step=item["draw"])[0, 1:]
            [answer] = Student()([[0]], uniforms[None])
            assert item["drawn"] and item["input_ids"][prompt_length:].tolist() == answer.tolist()
            assert item["labels"].tolist() == [IGNORED] * prompt_length + item["input_ids"][prompt_length:].tolist()


def test_answers_are_sampled_before_each_step():
    loader, student = make_loader(2, fraction=1.0)
    iterator = iter(loader)
    for batch in range(len(loader)):
        next(iterator)
        assert len(student.requests) == batch * 2 // 4 + 1
    loader.starts_itself = False
    assert loader.begin_segment() == 2 and len(list(loader)) == 2


@pytest.mark.parametrize("batch_size", [1, 2])
def test_a_step_has_the_same_answers_for_any_batch_split(batch_size):
    def steps(loader):
        rows = [row for batch in list_rows(loader) for row in batch if row]
        return [sorted(rows[start : start + 4]) for start in range(0, NUM_ROWS, 4)]

    (unsplit, student), (split, split_student) = make_loader(4), make_loader(batch_size)
    for _ in range(2):  # epochs
        assert steps(split) == steps(unsplit)
    assert student.requests == split_student.requests


def test_two_ranks_sample_the_answers_of_a_single_one():
    single, student = make_loader(2)
    ranks = [make_loader(2, rank=rank, world_size=2) for rank in range(2)]
    mixed = [row for pair in zip(*(list_rows(loader) for loader, _ in ranks), strict=True) for row in pair]
    assert mixed[: len(single)] == list_rows(single)
    assert ranks[0][1].requests == ranks[1][1].requests == student.requests


@pytest.mark.parametrize("done", range(1, 10))
def test_a_resumed_step_samples_all_its_answers_again(done):
    uninterrupted, student = make_loader(1, fraction=1.0)
    expected = list_rows(uninterrupted, 2)
    loader, _ = make_loader(1, fraction=1.0)
    for _ in islice(iter(loader), done):
        pass
    resumed, resumed_student = make_loader(1, fraction=1.0)
    resumed.load_state_dict(json.loads(json.dumps(loader.state_dict())))
    assert list_rows(resumed, 2)[: len(expected) - done] == expected[done:]
    assert resumed_student.requests[: len(student.requests) - done // 4] == student.requests[done // 4 :]


@pytest.fixture
def data_with(llama_folder, instructions):
    def make(max_new_tokens, longest_first=False, **trainer):
        data = SFTData(source=str(instructions), max_length=96, template="alpaca", batch_size=4)
        data.connect(pretrained=str(llama_folder), seed=7, longest_first=longest_first)
        data.prepare_data()
        data.setup("fit")
        data.take_rows_from(OnPolicy(0.5, max_new_tokens, 96, 7, Student()))
        data.trainer = SimpleNamespace(data_rank=0, num_data_ranks=1, batches_per_step=2, **trainer)
        return data

    return make


def test_rows_without_space_for_an_answer_are_counted(data_with, capsys):
    data = data_with(3)
    prompts = data.rows("train").column("prompt_length")
    max_prompt = int(np.sort(prompts)[-5])
    data = data_with(96 - max_prompt)
    count = int((prompts > max_prompt).sum())
    assert 0 < count < len(prompts)
    for _ in range(2):
        loader = data.train_batches()
    output = capsys.readouterr()
    assert (output.out + output.err).count(f"{count} of {len(prompts)} training rows do not have space for") == 1
    batch = next(iter(loader))
    assert batch["drawn"].shape == (4,) and 0 < batch["drawn"].sum() < 4
    with pytest.raises(UserError, match="none of the .* training rows has space for"):
        data_with(95).train_batches()


@pytest.mark.parametrize(("trainer", "message"), [({"overfit_batches": 2}, "overfit_batches is 2"),
                                                  ({"train_limit": 0.5}, "limit_train_batches is 0.5")])
def test_training_on_parts_of_epochs_is_rejected(data_with, trainer, message):
    with pytest.raises(UserError, match=rf"trainer\.{message}"):
        data_with(3, **trainer).train_batches()


def test_all_answers_have_full_length_when_memory_is_measured(data_with):
    data = data_with(3, longest_first=True)
    batch = next(iter(data.train_batches()))
    prompts = np.sort(data.rows("train").column("prompt_length"))
    assert (batch["drawn"] == 1).all()
    assert batch["attention_mask"].sum(1).tolist() == (prompts[prompts <= 93][-4:] + 3)[::-1].tolist()



def test_tasks_and_options_that_cannot_sample_are_rejected():
    from lmmods.core.settings import Teacher

    fields = {"pretrained": "demo/llama", "teacher": Teacher("demo/llama", on_policy=0.5)}
    for task in (CLMFields, MLMFields):
        with pytest.raises(UserError, match=r"model\.teacher\.on_policy is 0\.5, but must be 0"):
            task(**fields)
    task = SFTFields(**fields)
    for key in ("packing", "streaming"):
        with pytest.raises(UserError, match=rf"data\.{key} is true, but must be false with model\.teacher\.on_policy"):
            task.check_data(SFTDataFields("rows.jsonl", **{key: True}))
