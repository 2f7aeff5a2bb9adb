"""Mixing: source shares hold in every part of an epoch, and rows depend only on the position."""

import itertools
import types
from collections import Counter

import datasets
import numpy as np
import pytest

from lmmods.core.errors import UserError
from lmmods.data.batch.stream import StreamSource, shuffle_buffers
from lmmods.data.clm import CLMData
from lmmods.data.grpo import PromptData
from lmmods.data.mlm import MLMData
from lmmods.data.order.mixing import Mixture
from lmmods.data.read.readers import Row
from lmmods.data.sft import SFTData
from lmmods.recipe.mixing import Mixing, MixingPoint
from tests.data.test_mlm import bert_folder  # noqa: F401 - a fixture

HF_RULES = {"exhaust": "first_exhausted", "upsample": "all_exhausted"}


def split_indices(indices, sizes):
    """Return the source, the pass and the item within the source of each index of an epoch."""
    passes, items = np.divmod(indices, sum(sizes))
    source = np.searchsorted(np.cumsum(sizes), items, "right")
    return source, passes, items - np.cumsum([0, *sizes])[source]


# Epochs ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("rule", HF_RULES)
@pytest.mark.parametrize("sizes", [[3, 7], [5, 5, 5], [2, 9, 4]])
def test_equal_shares_give_the_order_of_hugging_face_datasets(rule, sizes):
    """Without shuffling, item by item: LLaMA-Factory's interleave_under and interleave_over call this function."""
    parts = [datasets.Dataset.from_dict({"item": [[source, item] for item in range(size)]})
             for source, size in enumerate(sizes)]
    expected = datasets.interleave_datasets(parts, stopping_strategy=HF_RULES[rule])["item"][:]
    indices = Mixture(Mixing(rule), sizes, [1.0] * len(sizes)).epoch(0, seed=1, shuffle=False)
    source, _, item = split_indices(indices, sizes)
    assert np.stack([source, item], 1).tolist() == expected


@pytest.mark.parametrize(("rule", "temperature", "weights", "counts"), [
    ("upsample", 1.0, [None] * 3, [100, 400, 25]),  # by their rows: each row once
    ("exhaust", 1.0, [None] * 3, [100, 400, 25]),
    ("upsample", 2.0, [None] * 3, [200, 400, 100]),  # roots 10, 20, 5
    ("exhaust", 2.0, [None] * 3, [50, 100, 25]),
    ("upsample", 1.0, [0.2, 0.5, 0.3], [160, 400, 240]),
    ("exhaust", 1.0, [0.2, 0.5, 0.3], [17, 42, 25]),
    ("exhaust", 1.0, [2, 5, 3], [17, 42, 25]),  # only their ratio counts
    ("exhaust", 0.5, [1, 2, 1], [25, 100, 25]),  # squares
    ("upsample", 1e6, [1, 1000, 1], [400, 400, 400]),
])
def test_rows_per_epoch_follow_rule_temperature_and_weights(rule, temperature, weights, counts):
    assert Mixture(Mixing(rule, temperature), [100, 400, 25], weights).counts.tolist() == counts


@pytest.mark.parametrize("shuffle", [True, False])
@pytest.mark.parametrize("rule", HF_RULES)
def test_shares_hold_in_every_part_of_an_epoch(rule, shuffle):
    sizes, weights = [300, 1000, 50], [0.5, 0.3, 0.2]
    mixture = Mixture(Mixing(rule), sizes, weights)
    for epoch in range(3):
        source, _, _ = split_indices(mixture.epoch(epoch, 7, shuffle), sizes)
        assert np.bincount(source).tolist() == mixture.counts.tolist()
        for index, share in enumerate(mixture.shares):
            totals = np.concatenate([[0], np.cumsum(source == index)])
            for size in (10, 64):
                counts = totals[size:] - totals[:-size]
                assert np.abs(counts - share * size).max() <= 2 + 2 * share * len(sizes)


def test_items_are_used_equally_often_and_never_with_equal_seeds():
    sizes = [7, 30, 9]
    mixture = Mixture(Mixing("exhaust"), sizes, [1, 1, 2])
    indices = np.concatenate([mixture.epoch(epoch, 3) for epoch in range(20)])
    assert len(set(indices.tolist())) == len(indices)  # an item and its pass seed its dropout
    for index, size in enumerate(sizes):
        source, passes, items = split_indices(indices, sizes)
        times = np.bincount(items[source == index], minlength=size)
        assert times.max() - times.min() <= 1
        orders = [items[(source == index) & (passes == pass_index)].tolist() for pass_index in range(2)]
        assert sorted(orders[0]) == sorted(orders[1]) == list(range(size)) and orders[0] != orders[1]
    assert mixture.epoch(5, 3).tolist() == Mixture(Mixing("exhaust"), sizes, [1, 1, 2]).epoch(5, 3).tolist()
    assert mixture.epoch(5, 3).tolist() != mixture.epoch(5, 4).tolist()


@pytest.mark.parametrize("interpolation", ["linear", "step"])
@pytest.mark.parametrize("shuffle", [True, False])
def test_a_schedule_gives_the_integral_of_its_shares(interpolation, shuffle):
    sizes, points = [4000, 4000], [(0.0, [1, 0]), (0.25, [1, 1]), (0.75, [1, 3])]
    mixture = Mixture(Mixing("exhaust", schedule=[MixingPoint(*point) for point in points],
                             interpolation=interpolation), sizes, [None, None])
    source, _, items = split_indices(mixture.epoch(0, 1, shuffle), sizes)
    # The shares at many positions between the points, summed.
    positions = (np.arange(100_000) + 0.5) / 100_000
    knots, shares = [0, 0.25, 0.75, 1], [0, 0.5, 0.75, 0.75]
    share = (np.interp(positions, knots, shares) if interpolation == "linear"
             else np.array(shares)[np.searchsorted(knots, positions, "right") - 1])
    expected = np.interp((np.arange(len(source)) + 1) / len(source), positions, np.cumsum(share) / len(positions))
    result = np.cumsum(source == 1) / len(source)
    assert np.abs(result - expected).max() < 3 / len(source)
    assert mixture.shares == pytest.approx([1 - share.mean(), share.mean()], abs=1e-5)
    assert sorted(items[source == int(np.argmax(mixture.shares))]) == list(range(4000))  # `exhaust`


def test_an_empty_source_and_an_endless_epoch_are_rejected():
    with pytest.raises(UserError, match="source 2 has no rows"):
        Mixture(Mixing(), [3, 0], [1, 1])
    with pytest.raises(UserError, match="an epoch would have 1,000,000,000,001,000 rows. Give more weight to source 1"):
        Mixture(Mixing(), [1000, 1000], [1e-12, 1])


# Batches --------------------------------------------------------------------------------------------------------------


@pytest.fixture
def sources(write_jsonl):
    """Two sources of 12 and 29 rows; their texts contain the source."""
    return [write_jsonl([{"instruction": f"Say {name} {n}." + " now" * (n % 5), "output": f"{name}{n}"}
                         for n in range(count)], f"{name}.jsonl") for name, count in (("a", 12), ("b", 29))]


def add_weights(sources, *weights):
    return [{"path": path, "weight": weight} for path, weight in zip(sources, weights, strict=True)]


def build(source, folder, data_class=SFTData, rank=0, world_size=1, accumulate=1, **fields):
    data = data_class(source, tokenizer=folder, **{"batch_size": 3, "max_length": 256, "mixing": Mixing(), **fields})
    data.trainer = types.SimpleNamespace(data_rank=rank, num_data_ranks=world_size, max_steps=99, state=None,
                                         batches_per_step=world_size * accumulate)
    data.prepare_data()
    data.setup("fit")
    return data


def take(data, count):
    """Return `count` batches, across epoch ends."""
    loader = data._loader or data.train_batches()
    batches = []
    while len(batches) < count:
        batches += [{name: batch[name].tolist() for name in ("input_ids", "token_seeds")}
                    for batch in itertools.islice(iter(loader), count - len(batches))]
    return batches


def list_rows(batches):
    """Return the tokens and dropout seeds of each row, without padding rows (which have no token)."""
    return [(tuple(ids), tuple(seeds)) for batch in batches
            for ids, seeds in zip(batch["input_ids"], batch["token_seeds"], strict=True) if any(seeds)]


def decode_response(data, ids):
    return data.tokenizer.decode(ids).split("Response")[-1].split("</s>")[0]


@pytest.mark.parametrize("fields", [{}, {"packing": True}, {"group_by_length": True}], ids=str)
@pytest.mark.parametrize(("batch_size", "world_size", "accumulate"), [(3, 2, 1), (2, 3, 1), (1, 1, 6)])
def test_a_step_has_the_same_rows_for_any_batch_split(batch_size, world_size, accumulate, fields, spm_folder, sources):
    def steps(batch_size, world_size, accumulate):
        ranks = [build(add_weights(sources, 1, 2), spm_folder, rank=rank, world_size=world_size, accumulate=accumulate,
                       batch_size=batch_size, pad_to_multiple_of=256, **fields) for rank in range(world_size)]
        for _ in range(2):  # epochs, each of which ends its last step
            batches = [take(rank, len(rank.train_batches() if rank._loader is None else rank._loader))
                       for rank in ranks]
            for start in range(0, len(batches[0]), accumulate):
                step = [batch for of_rank in batches for batch in of_rank[start : start + accumulate]]
                yield sorted(list_rows(step))

    assert list(steps(batch_size, world_size, accumulate)) == list(steps(6, 1, 1))


@pytest.mark.parametrize("stop", [0, 1, 9, 14, 15, 16, 29])
@pytest.mark.parametrize("rule", HF_RULES)
def test_a_mixed_epoch_resumes_at_any_batch(stop, rule, spm_folder, sources):
    fields = {"mixing": Mixing(rule)}
    full = take(build(add_weights(sources, 1, 2), spm_folder, **fields), stop + 4)
    first = build(add_weights(sources, 1, 2), spm_folder, **fields)
    assert take(first, stop) == full[:stop]
    second = build(add_weights(sources, 1, 2), spm_folder, **fields)
    second.train_batches()
    second.load_state_dict(first.state_dict() if stop else second.state_dict())
    assert take(second, 4) == full[stop:]


def test_an_epoch_has_the_rows_that_the_shares_give(spm_folder, sources):
    data = build(add_weights(sources, 3, 1), spm_folder, batch_size=4)
    data.train_batches()
    assert len(data._loader) == 29  # 87 rows of the first and 29 of the second source
    rows = list_rows(take(data, 29))
    texts = Counter(decode_response(data, ids) for ids, _ in rows)
    from_a = [times for text, times in texts.items() if text.startswith(":a")]
    assert len(from_a) == 12 and set(from_a) == {7, 8} and len(texts) == 12 + 29
    assert len(set(rows)) == 116  # a repeated row has other dropout
    assert data.state_dict()["num_rows"] == 116
    report = data.report["mixing"]
    assert report["rows_per_epoch"] == 116 == data.report["splits"]["train"]["rows"]
    assert [(part["share"], part["rows_per_epoch"], part["passes_per_epoch"]) for part in report["sources"]] == [
        (0.75, 87, 7.25), (0.25, 29, 1)]
    table = data.report_table()
    assert "mixing by the rule upsample: an epoch has 116 rows" in table
    assert "a.jsonl: share 75.0%, 87 rows per epoch, 7.25 times its 12" in table


def test_validation_rows_are_split_off_before_mixing(spm_folder, sources):
    data = build(add_weights(sources, 3, 1), spm_folder, val_size=10)
    trained = {decode_response(data, ids) for ids, _ in list_rows(take(data, 60))}
    held_out = {decode_response(data, row.tolist()) for batch in data.val_dataloader() for row in batch["input_ids"]}
    assert len(trained) == 31 and len(held_out) == 10 and not trained & held_out


@pytest.mark.parametrize("fields", [{}, {"packing": True}, {"join": False}], ids=str)
def test_a_block_contains_tokens_of_one_source(fields, byte_level_folder, tmp_path):
    for name, count in (("a", 9), ("b", 40)):
        (tmp_path / f"{name}.txt").write_text("".join(f"{name * (3 + n % 7)}\n" for n in range(count)))
    data = build([str(tmp_path / "a.txt"), str(tmp_path / "b.txt")], byte_level_folder, CLMData, documents="line",
                 max_length=16, mixing=Mixing(temperature=1e9), shuffle=False, **fields)
    end = data.tokenizer.eos_token_id
    data.train_batches()
    blocks = [{text[0] for text in data.tokenizer.decode([token for token in ids if token != end])
               if text in "ab"} for ids, _ in list_rows(take(data, len(data._loader)))]
    assert all(len(letters) == 1 for letters in blocks)
    assert blocks[::2] == [{"a"}] * (len(blocks) // 2) and blocks[1::2] == [{"b"}] * (len(blocks) // 2)
    sizes = data._built.loaders.mixture._sizes
    assert len(blocks) == 2 * sizes[1] and sizes.sum() == len(data.items("train"))


def test_masks_change_with_the_pass_over_a_source(bert_folder, tmp_path):  # noqa: F811
    """A block that an epoch repeats is masked again, depending only on its position and pass."""
    for name, count in (("a", 4), ("b", 12)):
        (tmp_path / f"{name}.txt").write_text("the quick brown fox jumps over the lazy dog\n" * count)
    fields = {"documents": "line", "max_length": 12, "join": False, "mixing": Mixing(temperature=1e9)}
    data = build([str(tmp_path / "a.txt"), str(tmp_path / "b.txt")], bert_folder, MLMData, **fields)
    items, indices = data.items("train"), data._built.loaders.mixture.epoch(0, data.seed)
    repeats = [index for index in indices.tolist() if index % len(items) == 0]
    assert len(repeats) == 3 == len({index // len(items) for index in repeats})  # b has three times the blocks of a
    assert len({tuple(items[index]["input_ids"].tolist()) for index in repeats}) > 1


def test_overfit_batches_repeats_mixed_batches(spm_folder, sources):
    data = build(add_weights(sources, 3, 1), spm_folder)
    data.trainer.overfit_batches = 2
    batches = take(data, 6)
    ids = [batch["input_ids"] for batch in batches]
    assert ids[:2] == ids[2:4] == ids[4:] and len({str(batch["token_seeds"]) for batch in batches}) == 6


def test_the_rule_concat_equals_no_mixing(spm_folder, sources):
    default, concat = (take(build(add_weights(sources, 2.5, 1), spm_folder, mixing=mixing), 30)
                       for mixing in (None, Mixing("concat")))
    assert default == concat


# Streams --------------------------------------------------------------------------------------------------------------


def make_stream(counts, weights):
    return [StreamSource(lambda name=name, count=count: iter([Row(name, n, {}) for n in range(count)]), None, weight,
                         {}) for name, count, weight in zip("abc", counts, weights, strict=False)]


@pytest.mark.parametrize("rule", HF_RULES)
def test_the_mixing_rule_decides_when_a_pass_over_a_stream_ends(rule):
    counts = {"a": 30, "b": 100, "c": 7}
    for epoch in range(20):
        parts = make_stream(counts.values(), [0.3, 0.5, 0.2])
        rows_taken = []
        # One row in a buffer shows their order.
        for buffer in shuffle_buffers(parts, 1, 5, epoch, rule):
            rows_taken += [row for rows in buffer for row in rows]
        times = Counter(row.file for row in rows_taken)
        for name, count in counts.items():
            lines = [row.line for row in rows_taken if row.file == name]
            assert lines == [n % count for n in range(len(lines))]
        last = rows_taken[-1]
        assert last.line == counts[last.file] - 1
        used_up = [times[name] >= count for name, count in counts.items()]
        assert used_up.count(True) == 1 if rule == "exhaust" else all(used_up) and times[last.file] == counts[last.file]


def test_a_stream_has_its_shares():
    parts = make_stream([2 * 10**4, 4000], [0.25, 0.75])
    counts = Counter(row.file for buffer in shuffle_buffers(parts, 500, 1, 0, "exhaust")
                     for rows in buffer for row in rows)
    assert counts["b"] == 4000 and counts["a"] == pytest.approx(4000 / 3, rel=0.1)


@pytest.mark.parametrize("stop", [1, 8, 21])
def test_a_mixed_stream_resumes_and_is_reported(stop, spm_folder, sources):
    fields = {"streaming": True, "stream_window": 16, "mixing": Mixing("upsample", 2.0)}
    full = take(build(add_weights(sources, 9, 1), spm_folder, **fields), stop + 3)
    first = build(add_weights(sources, 9, 1), spm_folder, **fields)
    assert take(first, stop) == full[:stop]
    second = build(add_weights(sources, 9, 1), spm_folder, **fields)
    second.load_state_dict(first.state_dict())
    assert take(second, 3) == full[stop:]
    assert "a.jsonl: share 75.0%\n" in first.report_table()


# Mistakes -------------------------------------------------------------------------------------------------------------

AT = [MixingPoint(0.0, [1, 0]), MixingPoint(1.0, [0, 1])]


@pytest.mark.parametrize(("weights", "fields", "message"), [
    ([1, None], {}, "some sources have a weight and others do not"),
    ([None, None], {"streaming": True}, "data.mixing of a stream needs a weight for each source"),
    ([None, None], {"streaming": True, "mixing": Mixing(schedule=AT)}, "a stream does not have"),
    ([None, None], {"group_by_length": True, "mixing": Mixing(schedule=AT)}, "group_by_length both decide the order"),
    ([1, 1], {"mixing": Mixing(schedule=AT)}, "schedule and the weight of a source are both set"),
    ([None, None], {"mixing": Mixing(schedule=[MixingPoint(0, [1, 1, 1])])}, "has 3 weights, but data.source has 2"),
    ([None, None], {"mixing": Mixing(schedule=AT, interpolation="step")}, "source 2 has weight 0 throughout"),
])
def test_undefined_shares_are_rejected(weights, fields, message):
    with pytest.raises(UserError, match=message):
        SFTData([{"path": f"{n}.jsonl", "weight": weight} for n, weight in enumerate(weights)],
                **{"mixing": Mixing(), **fields})


@pytest.mark.parametrize(("fields", "message"), [
    ({"temperature": 0}, "temperature is 0, but must be more than 0"),
    ({"rule": "concat", "temperature": 2}, "temperature is 2, but must be 1 with data.mixing.rule concat"),
    ({"rule": "concat", "schedule": AT}, "schedule is set, but must be null"),
    ({"interpolation": "step"}, "interpolation is step, but must be linear without"),
    ({"schedule": []}, "starts at 0.0"),
    ({"schedule": [{"at": 0.5, "weights": [1]}]}, "starts at 0.0"),
    ({"schedule": [{"at": 0, "weights": [1]}, {"at": 0, "weights": [1]}]}, "each later than the one before"),
    ({"schedule": [{"at": 0, "weights": [0, 0]}]}, "not all of them 0"),
    ({"schedule": [{"at": 2, "weights": [1]}]}, "at is 2, but must be a position"),
])
def test_mixing_settings_without_effect_are_rejected(fields, message):
    with pytest.raises(UserError, match=message):
        Mixing(**fields)


def test_mixing_prompts_is_rejected():
    with pytest.raises(UserError, match="data.mixing is not supported for prompts"):
        PromptData("rows.jsonl", mixing=Mixing())
