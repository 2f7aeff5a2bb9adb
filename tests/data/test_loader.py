"""Order and position of batches: every row once per epoch, sharded over ranks, continued exactly."""

import itertools

import numpy as np
import pytest
import torch
from torch.utils.data import Dataset

from lmmods.core.errors import UserError
from lmmods.data.batches.loader import EvaluationLoader, Shard, StatefulLoader
from lmmods.data.batches.sampler import evaluation_order, training_order

NUM_ROWS, BATCH_SIZE = 23, 3
LENGTHS = np.random.default_rng(0).integers(1, 90, NUM_ROWS)


class Numbers(Dataset):
    """Rows that are their own numbers. At module level: workers pickle it."""

    def __len__(self):
        return NUM_ROWS

    def __getitem__(self, number):
        return number


def collate(rows):
    return {"index": torch.tensor(rows)}


def make(rank=0, world_size=1, num_workers=0, batch_size=BATCH_SIZE, group=True):
    def order_of(epoch):
        return training_order(LENGTHS, batch_size, [5, epoch], group_by_length=group)

    return StatefulLoader(Numbers(), order_of, collate, Shard(rank, world_size, num_workers), batch_size)


def take(loader, count):
    """`count` batches, over epoch ends."""
    batches = itertools.chain.from_iterable(iter(loader) for _ in itertools.count())
    return [batch["index"].tolist() for batch in itertools.islice(batches, count)]


def together(loaders, rounds):
    """Global batches in order, as ranks get them round by round."""
    return [batch for round_ in zip(*(take(loader, rounds) for loader in loaders), strict=False) for batch in round_]


@pytest.mark.parametrize("group", [False, True])
@pytest.mark.parametrize("shuffle", [False, True])
def test_every_row_once_per_epoch_and_a_new_order_in_each(group, shuffle):
    orders = [training_order(LENGTHS, BATCH_SIZE, [5, epoch], shuffle, group) for epoch in range(3)]
    rows = [list(itertools.chain.from_iterable(order[n] for n in range(len(order)))) for order in orders]
    assert all(sorted(row) == list(range(NUM_ROWS)) for row in rows)
    assert (rows[0] != rows[1]) is shuffle


@pytest.mark.parametrize("world_size", [1, 2, 3, 5, 11])
def test_ranks_share_the_same_global_batches(world_size):
    alone = take(make(), 8)
    loaders = [make(rank, world_size) for rank in range(world_size)]
    assert len({len(loader) for loader in loaders}) == 1
    shared = together(loaders, len(loaders[0]))
    assert shared[:8] == alone and all(batch == [-1] for batch in shared[8:])


@pytest.mark.parametrize("stop", range(0, 20))
def test_resume_at_any_batch_also_twice(stop):
    whole = take(make(), 24)
    first = make()
    seen = take(first, stop)
    for extra in (2, 3):
        state = first.state_dict()
        first = make()
        first.load_state_dict(state)
        seen += take(first, extra)
    assert seen == whole[: stop + 5]


@pytest.mark.parametrize("before,after", [(1, 2), (2, 1), (2, 3), (4, 1)])
def test_resume_on_another_world_size(before, after):
    alone = take(make(), 8)
    loaders = [make(rank, before) for rank in range(before)]
    seen = together(loaders, 1)
    states = [loader.state_dict() for loader in loaders]
    assert all(state == states[0] for state in states)
    loaders = [make(rank, after) for rank in range(after)]
    for loader in loaders:
        loader.load_state_dict(states[0])
    rest = together(loaders, -(-(8 - len(seen)) // after))
    assert (seen + rest)[:8] == alone


@pytest.mark.slow
def test_workers_change_nothing_and_resume():
    whole = take(make(), 12)
    loader = make(num_workers=2)
    assert take(loader, 5) == whole[:5]
    state = loader.state_dict()
    assert state["batches"] == 5
    resumed = make(num_workers=1)
    resumed.load_state_dict(state)
    assert take(resumed, 5) == whole[5:10]


def test_iter_alone_moves_nothing():
    loader = make()
    iter(loader), iter(loader)
    first = next(iter(loader))["index"].tolist()
    assert [first] == take(make(), 1) and len(loader) == 8


def test_state_of_other_data_or_batch_size_is_refused():
    state = make().state_dict()
    with pytest.raises(UserError, match="batch_size"):
        make(batch_size=4).load_state_dict(state)


@pytest.mark.parametrize("world_size", [1, 3])
def test_evaluation_sees_each_row_once_at_each_pass(world_size):
    order = evaluation_order(LENGTHS, 4)
    loaders = [EvaluationLoader(Numbers(), order, collate, Shard(rank, world_size)) for rank in range(world_size)]
    for _ in range(2):
        rows = [number for loader in loaders for batch in loader for number in batch["index"].tolist()]
        assert sorted(number for number in rows if number >= 0) == list(range(NUM_ROWS))
    assert not hasattr(loaders[0], "state_dict")
