"""Prefetching: shapes, padding and positions of stacked micro-batches, and the thread that stacks them."""

import threading
from itertools import combinations
from types import SimpleNamespace

import jax
import numpy as np
import pytest
import torch

from jax_engine.distributed.devices import Replicas
from jax_engine.distributed.mesh import ShardedMesh
from jax_engine.distributed.prefetch import Prefetcher, choose_padded_lengths, round_up
from lmmods.data.batch.collate import Collator
from lmmods.data.batch.loader import EvaluationLoader, Shard, StatefulLoader, Widths
from lmmods.data.order.sampler import evaluation_order, training_order

LENGTHS = np.array([3, 9, 5, 2, 7, 4, 6, 8, 1, 5, 3])
PAD = 63
B = 2


class Rows:
    def __len__(self):
        return len(LENGTHS)

    def __getitem__(self, index):
        if index < 0:
            return None
        index %= len(LENGTHS)
        ids = np.arange(LENGTHS[index]) + 5 * index
        return {"input_ids": ids, "labels": ids, "segment_ids": np.ones_like(ids), "position_ids": np.arange(len(ids)),
                "index": index, "start_positions": 0, "end_positions": len(ids) - 1}


class RecordingRows(Rows):
    def __init__(self):
        self.read = []

    def __getitem__(self, index):
        self.read.append(index)
        return super().__getitem__(index)


KEYS = ("input_ids", "labels", "segment_ids", "position_ids")


def make_collator(keys=KEYS):
    return Collator(keys, PAD, 2, 16)


def make_training_loader():
    def order_of(epoch, rule):
        return training_order(LENGTHS, B, [7, epoch], rule)

    return StatefulLoader(Rows(), order_of, make_collator(), Shard(), B, Widths(LENGTHS, make_collator().pad_length))


def make_replicas():
    return Replicas(jax.devices()[:4])


def to_arrays(loader):
    return [{name: tensor.numpy() for name, tensor in batch.items()} for batch in loader]


@pytest.mark.parametrize("parallel", [make_replicas, lambda: ShardedMesh(devices=jax.devices()[:4]),
                                      lambda: Replicas(jax.devices()[:1])])
def test_every_rank_gets_the_next_micro_batch(parallel):
    parallel = parallel()
    expected, groups = to_arrays(make_training_loader()), list(Prefetcher(make_training_loader(), parallel, B, PAD))
    count = parallel.data_parallel_size
    assert [group.num_batches for group in groups] == [min(count, 6 - start) for start in range(0, 6, count)]
    for index, group in enumerate(groups):
        length = group.host["input_ids"].shape[2]
        members = expected[index * count : (index + 1) * count]
        assert length == max(batch["input_ids"].shape[1] for batch in members)
        for rank, batch in enumerate(members):
            rows, width = batch["input_ids"].shape
            for name, x in batch.items():
                assert np.array_equal(group.host[name][rank, :rows, :width], x), name
        for name, x in group.arrays.items():
            assert x.dtype == np.int32 and np.array_equal(parallel.fetch_rows(x), group.host[name]), name


def outline(batch):
    """Return the column of rows that `add_per_row` adds, without values; as of images, it may be missing."""
    counts = [sum(LENGTHS[index] % 3 for index in rows) for rows in batch]
    return {"per_row/x": np.zeros((len(batch), max(counts), 2), np.float32)} if any(counts) else {}


def add_per_row(rows):
    """Collate rows with up to two vectors each."""
    batch = make_collator()(rows)
    counts = [0 if row is None else len(row["input_ids"]) % 3 for row in rows]
    values = torch.zeros(len(rows), max(counts), 2)
    for row, count, line in zip(rows, counts, values):
        line[:count] = 0 if row is None else row["index"] + 1
    return {**batch, "per_row/x": values} if any(counts) else batch


@pytest.mark.parametrize("local_ranks", [(0, 1), (2, 3), (3,), (1, 2)])
@pytest.mark.parametrize("skipped", [0, 1])
def test_a_process_reads_only_the_rows_of_its_ranks(local_ranks, skipped):
    """Compared with a process that reads all rows; the last group has two micro-batches, or one after a skip."""
    parallel = SimpleNamespace(data_parallel_size=4, local_ranks=local_ranks, context_parallel_size=1,
                               put_batch=lambda batch: batch)
    rows = RecordingRows()

    def prefetch(shard, read):
        def order_of(epoch, rule):
            return training_order(LENGTHS, B, [7, epoch], rule).shifted(epoch * len(LENGTHS))

        loader = StatefulLoader(read, order_of, add_per_row, shard, B,
                                Widths(LENGTHS, make_collator().pad_length, outline))
        loader.load_state_dict({"epoch": 2, "rows": skipped * B, "batch_size": B, "num_rows": len(LENGTHS)})
        return list(Prefetcher(loader, parallel, B, PAD, max_length=64))

    expected, actual = prefetch(Shard(), Rows()), prefetch(Shard(fed=(local_ranks, 4)), rows)
    assert any("per_row/x" in group.host for group in actual)
    for group, other in zip(expected, actual, strict=True):
        assert group.num_batches == other.num_batches and group.position == other.position
        assert group.host.keys() == other.host.keys()
        assert all(np.array_equal(group.host[name], x) for name, x in other.host.items())
    fed = [batch for index, batch in enumerate(range(skipped, 6)) if index % 4 in local_ranks]
    # An example for the last group, if none of its micro-batches is for this process.
    reads_example = min(local_ranks) >= (6 - skipped) % 4
    assert len(rows.read) <= B * (len(fed) + reads_example) and len(rows.read) < len(LENGTHS) - 2


def test_wrong_lengths_and_shapes_of_rows_are_an_error():
    for collate, lengths, message in ((make_collator(), LENGTHS - 2, "padded to .* tokens, but its lengths give"),
                                      (add_per_row, LENGTHS, "has the shapes .*, but its rows give {}")):
        loader = EvaluationLoader(Rows(), evaluation_order(LENGTHS, B), collate, Shard(fed=((0,), 2)),
                                  Widths(lengths, make_collator().pad_length))
        with pytest.raises(RuntimeError, match=message):
            list(loader)


def test_padding_carries_no_weight():
    last = list(Prefetcher(make_training_loader(), make_replicas(), B, PAD))[-1].host  # 11 rows: the last has one
    real = sum(int((batch["labels"] != -100).any(1).sum()) for batch in to_arrays(make_training_loader())[4:])
    assert real == (last["labels"] != -100).any(2).sum() < last["labels"].shape[0] * B
    empty = (last["labels"] == -100).all(2)
    assert (last["input_ids"][empty] == PAD).all() and (last["attention_mask"][empty].sum(1) == 1).all()
    assert (last["segment_ids"][empty].sum(1) == 1).all() and not last["position_ids"][empty].any()
    assert (last["attention_mask"].sum(2) >= 1).all()


def test_padding_rows_have_index_minus_one_and_no_answer_span():
    keys = ("input_ids", "index", "start_positions", "end_positions")
    loader = EvaluationLoader(Rows(), evaluation_order(LENGTHS, B), make_collator(keys), Shard())
    groups = list(Prefetcher(loader, make_replicas(), B, PAD))
    assert all(group.position is None for group in groups)
    index = np.concatenate([group.host["index"].ravel() for group in groups])
    assert sorted(index[index >= 0]) == list(range(11)) and (index == -1).sum() == 16 - 11
    for group in groups:
        padding = group.host["index"] == -1
        assert (group.host["start_positions"][padding] == -100).all()
        assert (group.host["end_positions"][padding] == -100).all()


def test_a_resumed_pass_continues_with_the_same_groups():
    groups = list(Prefetcher(make_training_loader(), make_replicas(), B, PAD))
    resumed = make_training_loader()
    resumed.load_state_dict(groups[0].position)
    (group,) = Prefetcher(resumed, make_replicas(), B, PAD)
    assert all(np.array_equal(group.host[name], x) for name, x in groups[1].host.items())


def test_the_position_of_a_group_excludes_rows_read_ahead():
    loader, read_ahead = make_training_loader(), threading.Event()
    position = loader.state_dict

    def state_dict():
        state = position()
        if state["rows"] == 4 * B:
            read_ahead.set()
        return state

    loader.state_dict = state_dict
    with Prefetcher(loader, Replicas(jax.devices()[:1]), B, PAD, ahead=3) as prefetcher:
        iterator = iter(prefetcher)
        first = next(iterator)
        assert read_ahead.wait(60)
        assert first.position["rows"] == B and next(iterator).position["rows"] == 2 * B


def test_an_error_in_the_loader_reaches_the_consumer():
    def fail_after_one_batch():
        yield {"input_ids": torch.ones(1, 3, dtype=torch.long), "attention_mask": torch.ones(1, 3, dtype=torch.long)}
        raise ValueError("row 17")

    received = []
    with pytest.raises(ValueError, match="row 17"):
        for group in Prefetcher(fail_after_one_batch(), Replicas(jax.devices()[:1]), B, PAD):
            received.append(group)
    assert len(received) == 1 and not list_prefetch_threads()


@pytest.mark.parametrize("num_read", [0, 1, 3])
def test_closing_ends_the_thread(num_read):
    def yield_forever():
        while True:
            yield {"input_ids": torch.ones(1, 3, dtype=torch.long)}

    with Prefetcher(yield_forever(), Replicas(jax.devices()[:1]), B, PAD) as prefetcher:
        iterator = iter(prefetcher)
        for _ in range(num_read):
            next(iterator)
    assert not list_prefetch_threads()


def test_leaving_a_loop_ends_the_thread():
    for _ in Prefetcher(make_training_loader(), make_replicas(), B, PAD):
        break
    assert not list_prefetch_threads()


def list_prefetch_threads():
    return [thread for thread in threading.enumerate() if thread.name == "prefetch"]


@pytest.mark.parametrize(("max_length", "length"), [(512, 32), (16, 16), (None, 10)])
def test_lengths_are_rounded_up_to_few_values(max_length, length):
    groups = list(Prefetcher(make_training_loader(), make_replicas(), B, PAD, max_length=max_length))
    assert max(group.host["input_ids"].shape[2] for group in groups) == length
    assert len({round_up(n) for n in range(1, 4097)}) <= 36 and all(n <= round_up(n) for n in range(1, 4097))
    assert all(round_up(n) <= 1.25 * n for n in range(128, 4097))


@pytest.mark.parametrize(("is_fine", "cost"), [(True, 0), (False, 0), (True, 150)])
def test_the_chosen_lengths_minimise_the_cost(is_fine, cost):
    """Compared with every other choice of padded lengths; the longest batch always fits."""
    random = np.random.default_rng(0)
    for _ in range(100):
        lengths, max_lengths = random.integers(1, 400, random.integers(1, 12)).tolist(), int(random.integers(1, 5))
        sizes = sorted({min(-(-n // 16) * 16 if is_fine else round_up(n), 384) if n <= 384 else n for n in lengths})

        def total(chosen, lengths=lengths):
            return sum(min(size for size in chosen if size >= n) for n in lengths) + cost * len(chosen)

        chosen = choose_padded_lengths(lengths, 384, is_fine, cost, max_lengths)
        others = [(*shorter, sizes[-1]) for count in range(max_lengths) for shorter in combinations(sizes[:-1], count)]
        assert len(chosen) <= max_lengths and set(chosen) <= set(sizes) and total(chosen) == min(map(total, others))


@pytest.mark.parametrize(("lengths", "padded"), [((11, 20), 11), ((1,), 32)], ids=["next", "longer than all chosen"])
def test_batches_are_padded_to_the_next_chosen_length(lengths, padded):
    groups = Prefetcher(make_training_loader(), make_replicas(), B, PAD, max_length=512, lengths=lengths)
    assert {group.host["input_ids"].shape[2] for group in groups} == {padded}


def test_a_loader_reports_the_lengths_of_its_batches():
    loader = make_training_loader()
    lengths = [batch["input_ids"].shape[1] for batch in loader]
    assert loader.lengths() == [*lengths, make_collator().pad_length(max(LENGTHS))]
