"""Order and position of batches: every row once per epoch, sharded over ranks, continued exactly."""

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


class Numbers(Dataset):
    """Rows that are their own numbers. At module level: workers pickle it."""

    def __len__(self):
        return NUM_ROWS

    def __getitem__(self, number):
        return number


def collate(rows):
    return {"index": torch.tensor(rows)}


def make(rank=0, world_size=1, num_workers=0, batch_size=BATCH_SIZE, group=True, batches_per_step=1):
    def order_of(epoch, rule):
        return training_order(LENGTHS, batch_size, [5, epoch], rule, group_by_length=group)

    return StatefulLoader(Numbers(), order_of, collate, Shard(rank, world_size, num_workers, batches_per_step),
                          batch_size, grouped=group)


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
    rule = OrderRule(2 * BATCH_SIZE)
    orders = [training_order(LENGTHS, BATCH_SIZE, [5, epoch], rule, shuffle, group) for epoch in range(3)]
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
    full = take(make(), 24)
    first = make()
    seen = take(first, stop)
    for extra in (2, 3):
        state = first.state_dict()
        first = make()
        first.load_state_dict(state)
        seen += take(first, extra)
    assert seen == full[: stop + 5]


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
    full = take(make(), 12)
    loader = make(num_workers=2)
    assert take(loader, 5) == full[:5]
    state = loader.state_dict()
    assert state["rows"] == 5 * BATCH_SIZE
    resumed = make(num_workers=1)
    resumed.load_state_dict(state)
    assert take(resumed, 5) == full[5:10]


def test_iter_alone_moves_nothing():
    loader = make()
    iter(loader), iter(loader)
    first = next(iter(loader))["index"].tolist()
    assert [first] == take(make(), 1) and len(loader) == 8


@pytest.mark.parametrize("group", [False, True])
@pytest.mark.parametrize(("batch_size", "world_size", "accumulate"), [(8, 1, 1), (4, 1, 2), (2, 1, 4), (1, 1, 8),
                                                                     (2, 2, 2), (1, 4, 2), (2, 4, 1)])
def test_a_step_has_the_same_rows_however_it_is_cut(group, batch_size, world_size, accumulate):
    """Two epochs: each step's rows, as a set; the last one of an epoch has what is left."""
    def steps(batch_size, world_size, accumulate):
        loaders = [make(rank, world_size, 0, batch_size, group, world_size * accumulate) for rank in range(world_size)]
        for _ in range(2):
            batches = [batch for round_ in zip(*(iter(loader) for loader in loaders), strict=True) for batch in round_]
            rows = [[number for number in batch["index"].tolist() if number >= 0] for batch in batches]
            for start in range(0, len(rows), world_size * accumulate):
                yield sorted(itertools.chain.from_iterable(rows[start : start + world_size * accumulate]))

    result, expected = list(steps(batch_size, world_size, accumulate)), list(steps(8, 1, 1))
    assert result == expected
    assert sorted(itertools.chain.from_iterable(result[: len(result) // 2])) == list(range(NUM_ROWS))


@pytest.mark.parametrize(("batch_size", "batches"), [(1, 12), (2, 6), (4, 3), (12, 1)])
def test_a_run_goes_on_in_another_cut(batch_size, batches):
    """Behind 12 rows: the same rows follow in the same steps of 12."""
    first = make(batch_size=3, batches_per_step=4)
    begun = take(first, 4)
    other = make(batch_size=batch_size, batches_per_step=12 // batch_size)
    other.load_state_dict(first.state_dict())
    rest = list(itertools.chain.from_iterable(take(other, -(-(NUM_ROWS - 12) // batch_size))))
    full = list(itertools.chain.from_iterable(take(make(batch_size=3, batches_per_step=4), len(make()) + 9)))
    assert rest == full[12 : NUM_ROWS] and len(begun) == 4


def test_a_position_inside_a_batch_is_refused():
    loader = make(batch_size=3, batches_per_step=4)
    take(loader, 1)
    with pytest.raises(UserError, match="after row 3 of an epoch, which is inside a batch of 4 rows.*batch_size 3"):
        make(batch_size=4, batches_per_step=3).load_state_dict(loader.state_dict())


def test_a_position_of_an_earlier_version_keeps_its_order():
    """It grouped the rows of a micro-batch, and goes on only with the same size of these."""
    state = {"epoch": 0, "rows": 2 * BATCH_SIZE, "batch_size": BATCH_SIZE, "num_rows": NUM_ROWS}
    loader = make(batches_per_step=4)
    loader.load_state_dict(state)
    random = np.random.default_rng([5, 0])
    order = random.permutation(NUM_ROWS)
    order = order[np.lexsort((-LENGTHS[order], np.arange(NUM_ROWS) // (50 * BATCH_SIZE)))]
    chunks = random.permutation(-(-NUM_ROWS // BATCH_SIZE))
    expected = [order[chunk * BATCH_SIZE : (chunk + 1) * BATCH_SIZE].tolist() for chunk in chunks]
    assert take(loader, len(expected) - 2) == expected[2:]
    assert loader.state_dict()["order"] == 1
    with pytest.raises(UserError, match="started by an earlier version.*with 4 instead of 3.*Set data.batch_size 3"):
        make(batch_size=4).load_state_dict(state)


def test_an_order_of_an_earlier_version_that_groups_nothing_may_be_cut_otherwise():
    loader = make(group=False, batch_size=2)
    loader.load_state_dict({"epoch": 0, "rows": 6, "batch_size": 3, "num_rows": NUM_ROWS})
    full = list(itertools.chain.from_iterable(take(make(group=False), 8)))
    assert list(itertools.chain.from_iterable(take(loader, 9))) == full[6:]


@pytest.mark.parametrize(("limit", "lengths"), [(8, [3, 3, 2]), (4, [3, 1]), (3, [3])])
def test_steps_are_lists_of_micro_batches(limit, lengths):
    """A pass ends at its limit; the next one goes on with the rows that follow, and ends with the epoch."""
    loader = StepLoader(make(), 3, limit)
    full = take(make(), 8)
    first, second = list(loader), list(loader)
    assert len(loader) == len(lengths) and [len(step) for step in first] == lengths
    result = [batch["index"].tolist() for step in first + (second if limit < 8 else []) for batch in step]
    assert result == full[:len(result)] and len(second) == (3 if limit == 8 else len(lengths))


def test_a_pass_resumes_after_the_steps_done():
    batches = make()
    take(batches, 3)
    assert [len(step) for step in StepLoader(batches, 3, 7, steps_done=lambda: 1)] == [3, 1]


def test_state_of_other_data_is_refused():
    with pytest.raises(UserError, match="num_rows"):
        make().load_state_dict({**make().state_dict(), "num_rows": 7})


@pytest.mark.parametrize("world_size", [1, 3])
def test_evaluation_sees_each_row_once_at_each_pass(world_size):
    order = evaluation_order(LENGTHS, 4)
    loaders = [EvaluationLoader(Numbers(), order, collate, Shard(rank, world_size)) for rank in range(world_size)]
    for _ in range(2):
        rows = [number for loader in loaders for batch in loader for number in batch["index"].tolist()]
        assert sorted(number for number in rows if number >= 0) == list(range(NUM_ROWS))
    assert not hasattr(loaders[0], "state_dict")
