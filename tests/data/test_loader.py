"""Order and position of batches: every row once per epoch, sharded over ranks, resumed exactly."""

import itertools

import numpy as np
import pytest
import torch
from torch.utils.data import Dataset

from lmmods.core.errors import UserError
from lmmods.data.batch.loader import EvaluationLoader, Shard, StatefulLoader, StepLoader
from lmmods.data.order.sampler import OrderRule, evaluation_order, training_order

NUM_ROWS, BATCH_SIZE = 23, 3
LENGTHS = np.random.default_rng(0).integers(1, 90, NUM_ROWS)


class Indices(Dataset):
    """Rows that equal their index. At module level: workers pickle it."""

    def __len__(self):
        return NUM_ROWS

    def __getitem__(self, index):
        return index


def collate(rows):
    return {"index": torch.tensor(rows)}


def make_loader(rank=0, world_size=1, num_workers=0, batch_size=BATCH_SIZE, group=True, batches_per_step=1):
    def order_of(epoch, rule):
        return training_order(LENGTHS, batch_size, [5, epoch], rule, group_by_length=group)

    return StatefulLoader(Indices(), order_of, collate, Shard(rank, world_size, num_workers, batches_per_step),
                          batch_size, grouped=group)


def take(loader, count):
    """Return `count` batches, across epoch ends."""
    batches = itertools.chain.from_iterable(iter(loader) for _ in itertools.count())
    return [batch["index"].tolist() for batch in itertools.islice(batches, count)]


def interleave(loaders, rounds):
    """Return the global batches in order, as ranks get them round by round."""
    return [batch for round_ in zip(*(take(loader, rounds) for loader in loaders), strict=False) for batch in round_]


@pytest.mark.parametrize("group", [False, True])
@pytest.mark.parametrize("shuffle", [False, True])
def test_each_epoch_has_every_row_once_in_a_new_order(group, shuffle):
    rule = OrderRule(2 * BATCH_SIZE)
    orders = [training_order(LENGTHS, BATCH_SIZE, [5, epoch], rule, shuffle, group) for epoch in range(3)]
    rows = [list(itertools.chain.from_iterable(order[n] for n in range(len(order)))) for order in orders]
    assert all(sorted(row) == list(range(NUM_ROWS)) for row in rows)
    assert (rows[0] != rows[1]) is shuffle


@pytest.mark.parametrize("world_size", [1, 2, 3, 5, 11])
def test_ranks_share_the_same_global_batches(world_size):
    expected = take(make_loader(), 8)
    loaders = [make_loader(rank, world_size) for rank in range(world_size)]
    assert len({len(loader) for loader in loaders}) == 1
    shared = interleave(loaders, len(loaders[0]))
    assert shared[:8] == expected and all(batch == [-1] for batch in shared[8:])


@pytest.mark.parametrize("stop", range(0, 20))
def test_a_run_resumes_at_any_batch_and_again(stop):
    full = take(make_loader(), 24)
    loader = make_loader()
    batches = take(loader, stop)
    for extra in (2, 3):
        state = loader.state_dict()
        loader = make_loader()
        loader.load_state_dict(state)
        batches += take(loader, extra)
    assert batches == full[: stop + 5]


@pytest.mark.parametrize("before,after", [(1, 2), (2, 1), (2, 3), (4, 1)])
def test_a_run_resumes_on_another_world_size(before, after):
    expected = take(make_loader(), 8)
    loaders = [make_loader(rank, before) for rank in range(before)]
    batches = interleave(loaders, 1)
    states = [loader.state_dict() for loader in loaders]
    assert all(state == states[0] for state in states)
    loaders = [make_loader(rank, after) for rank in range(after)]
    for loader in loaders:
        loader.load_state_dict(states[0])
    remaining = interleave(loaders, -(-(8 - len(batches)) // after))
    assert (batches + remaining)[:8] == expected


@pytest.mark.slow
def test_workers_give_the_same_batches_and_resume():
    full = take(make_loader(), 12)
    loader = make_loader(num_workers=2)
    assert take(loader, 5) == full[:5]
    state = loader.state_dict()
    assert state["rows"] == 5 * BATCH_SIZE
    resumed = make_loader(num_workers=1)
    resumed.load_state_dict(state)
    assert take(resumed, 5) == full[5:10]


def test_iter_without_next_does_not_advance():
    loader = make_loader()
    iter(loader), iter(loader)
    first = next(iter(loader))["index"].tolist()
    assert [first] == take(make_loader(), 1) and len(loader) == 8


@pytest.mark.parametrize("group", [False, True])
@pytest.mark.parametrize(("batch_size", "world_size", "accumulate"), [(8, 1, 1), (4, 1, 2), (2, 1, 4), (1, 1, 8),
                                                                     (2, 2, 2), (1, 4, 2), (2, 4, 1)])
def test_a_step_has_the_same_rows_for_any_batch_split(group, batch_size, world_size, accumulate):
    """Over two epochs; the last step of an epoch has the remaining rows."""
    def steps(batch_size, world_size, accumulate):
        loaders = [make_loader(rank, world_size, 0, batch_size, group, world_size * accumulate)
                   for rank in range(world_size)]
        for _ in range(2):
            batches = [batch for round_ in zip(*(iter(loader) for loader in loaders), strict=True) for batch in round_]
            rows = [[index for index in batch["index"].tolist() if index >= 0] for batch in batches]
            for start in range(0, len(rows), world_size * accumulate):
                yield sorted(itertools.chain.from_iterable(rows[start : start + world_size * accumulate]))

    rows_of_steps, expected = list(steps(batch_size, world_size, accumulate)), list(steps(8, 1, 1))
    assert rows_of_steps == expected
    assert sorted(itertools.chain.from_iterable(rows_of_steps[: len(rows_of_steps) // 2])) == list(range(NUM_ROWS))


@pytest.mark.parametrize(("batch_size", "batches"), [(1, 12), (2, 6), (4, 3), (12, 1)])
def test_a_run_resumes_with_another_batch_split(batch_size, batches):
    """After 12 rows, the same rows follow in the same steps of 12."""
    first = make_loader(batch_size=3, batches_per_step=4)
    batches_before = take(first, 4)
    resumed = make_loader(batch_size=batch_size, batches_per_step=12 // batch_size)
    resumed.load_state_dict(first.state_dict())
    remaining = list(itertools.chain.from_iterable(take(resumed, -(-(NUM_ROWS - 12) // batch_size))))
    uninterrupted = make_loader(batch_size=3, batches_per_step=4)
    full = list(itertools.chain.from_iterable(take(uninterrupted, len(make_loader()) + 9)))
    assert remaining == full[12 : NUM_ROWS] and len(batches_before) == 4


def test_a_resume_inside_a_batch_is_rejected():
    loader = make_loader(batch_size=3, batches_per_step=4)
    take(loader, 1)
    with pytest.raises(UserError, match="after row 3 of an epoch, which is inside a batch of 4 rows.*batch_size 3"):
        make_loader(batch_size=4, batches_per_step=3).load_state_dict(loader.state_dict())


def test_a_checkpoint_of_an_earlier_version_keeps_its_order():
    """It grouped the rows of a micro-batch, and resumes only with the same batch size."""
    state = {"epoch": 0, "rows": 2 * BATCH_SIZE, "batch_size": BATCH_SIZE, "num_rows": NUM_ROWS}
    loader = make_loader(batches_per_step=4)
    loader.load_state_dict(state)
    random = np.random.default_rng([5, 0])
    order = random.permutation(NUM_ROWS)
    order = order[np.lexsort((-LENGTHS[order], np.arange(NUM_ROWS) // (50 * BATCH_SIZE)))]
    chunks = random.permutation(-(-NUM_ROWS // BATCH_SIZE))
    expected = [order[chunk * BATCH_SIZE : (chunk + 1) * BATCH_SIZE].tolist() for chunk in chunks]
    assert take(loader, len(expected) - 2) == expected[2:]
    assert loader.state_dict()["order"] == 1
    with pytest.raises(UserError, match="started by an earlier version.*with 4 instead of 3.*Set data.batch_size 3"):
        make_loader(batch_size=4).load_state_dict(state)


def test_an_ungrouped_order_of_an_earlier_version_resumes_with_any_split():
    loader = make_loader(group=False, batch_size=2)
    loader.load_state_dict({"epoch": 0, "rows": 6, "batch_size": 3, "num_rows": NUM_ROWS})
    full = list(itertools.chain.from_iterable(take(make_loader(group=False), 8)))
    assert list(itertools.chain.from_iterable(take(loader, 9))) == full[6:]


@pytest.mark.parametrize(("limit", "lengths"), [(8, [3, 3, 2]), (4, [3, 1]), (3, [3])])
def test_a_step_is_a_list_of_micro_batches(limit, lengths):
    """A pass ends at its limit; the next one continues with the rows that follow, and ends with the epoch."""
    loader = StepLoader(make_loader(), 3, limit)
    full = take(make_loader(), 8)
    first, second = list(loader), list(loader)
    assert len(loader) == len(lengths) and [len(step) for step in first] == lengths
    batches = [batch["index"].tolist() for step in first + (second if limit < 8 else []) for batch in step]
    assert batches == full[:len(batches)] and len(second) == (3 if limit == 8 else len(lengths))


def test_a_pass_resumes_after_its_finished_steps():
    batches = make_loader()
    take(batches, 3)
    assert [len(step) for step in StepLoader(batches, 3, 7, steps_done=lambda: 1)] == [3, 1]


def test_the_state_of_other_data_is_rejected():
    with pytest.raises(UserError, match="num_rows"):
        make_loader().load_state_dict({**make_loader().state_dict(), "num_rows": 7})


@pytest.mark.parametrize("world_size", [1, 3])
def test_each_evaluation_pass_has_each_row_once(world_size):
    order = evaluation_order(LENGTHS, 4)
    loaders = [EvaluationLoader(Indices(), order, collate, Shard(rank, world_size)) for rank in range(world_size)]
    for _ in range(2):
        rows = [index for loader in loaders for batch in loader for index in batch["index"].tolist()]
        assert sorted(index for index in rows if index >= 0) == list(range(NUM_ROWS))
    assert not hasattr(loaders[0], "state_dict")
