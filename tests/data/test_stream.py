"""Streaming: shuffle buffers lose no row, resume anywhere, and do not depend on the number of ranks."""

import itertools
import types

import datasets
import pytest

from lmmods.core.errors import UserError
from lmmods.data.batch.stream import draw_number
from lmmods.data.clm import CLMData
from lmmods.data.mlm import MLMData
from lmmods.data.sft import SFTData
from tests.data.test_mlm import bert_folder  # noqa: F401 - a fixture

PAD = 0  # of `spm_folder`


def build(path, folder, rank=0, world_size=1, accumulate=1, **fields):
    data = SFTData(
        path, tokenizer=folder, **{"batch_size": 3, "streaming": True, "stream_window": 16, "max_length": 512, **fields}
    )
    data.trainer = types.SimpleNamespace(data_rank=rank, num_data_ranks=world_size, max_steps=9, state=None,
                                         batches_per_step=world_size * accumulate)
    data.prepare_data()
    data.setup("fit")
    return data


def take(data, count):
    loader = data._loader or data.train_batches()
    return [batch["input_ids"].tolist() for batch in itertools.islice(iter(loader), count)]


def test_each_pass_over_a_stream_has_every_row_in_a_new_order(spm_folder, write_jsonl, alpaca_rows):
    path = write_jsonl(alpaca_rows)
    full = SFTData(path, tokenizer=spm_folder, max_length=512)
    full.setup("fit")
    expected = sorted(row["input_ids"] for row in full.rows_for_inspection(99))
    batches = take(build(path, spm_folder), 27)  # buffers of 16, 16 and 8 rows, without a gap
    rows = [[token for token in row if token != full.tokenizer.pad_token_id] for batch in batches for row in batch]
    epochs = [rows[: len(expected)], rows[len(expected) : 2 * len(expected)]]
    assert [sorted(epoch) for epoch in epochs] == [expected] * 2 and epochs[0] != epochs[1]


@pytest.mark.parametrize("stop", [0, 1, 5, 6, 7, 14, 15, 20])
@pytest.mark.parametrize("packing", [False, True])
def test_a_stream_resumes_at_any_batch(stop, packing, spm_folder, write_jsonl, alpaca_rows):
    fields = {"packing": packing, "group_by_length": not packing}
    path = write_jsonl(alpaca_rows)
    full = take(build(path, spm_folder, **fields), stop + 4)
    first = build(path, spm_folder, **fields)
    assert take(first, stop) == full[:stop]
    second = build(path, spm_folder, **fields)
    second.load_state_dict(first.state_dict())
    assert take(second, 4) == full[stop:]


@pytest.mark.parametrize("packing", [False, True])
@pytest.mark.parametrize(("batch_size", "world_size", "accumulate"), [(3, 2, 1), (1, 1, 6), (1, 3, 2)])
def test_a_step_has_the_same_rows_for_any_batch_split(batch_size, world_size, accumulate, packing, spm_folder,
                                                    write_jsonl, alpaca_rows):
    """Across the ends of buffers and of an epoch."""
    def steps(batch_size, world_size, accumulate):
        ranks = [take(build(write_jsonl(alpaca_rows), spm_folder, rank, world_size, accumulate, batch_size=batch_size,
                            packing=packing, group_by_length=not packing), 9 * accumulate)
                 for rank in range(world_size)]
        for start in range(0, 9 * accumulate, accumulate):
            rows = [row for batches in ranks for batch in batches[start : start + accumulate] for row in batch]
            yield sorted(tuple(token for token in row if token != PAD) for row in rows)

    assert list(steps(batch_size, world_size, accumulate)) == list(steps(6, 1, 1))


def test_ranks_share_the_batches_of_a_stream(spm_folder, write_jsonl, alpaca_rows):
    path = write_jsonl(alpaca_rows)
    expected = take(build(path, spm_folder), 6)
    ranks = [take(build(path, spm_folder, rank, 2), 3) for rank in range(2)]
    assert [batch for round_ in zip(*ranks, strict=False) for batch in round_] == expected


def test_a_stream_mixes_sources_by_weight(spm_folder, write_jsonl):
    rare = write_jsonl([{"instruction": "ask", "output": "rare"}] * 100, "a.jsonl")
    often = write_jsonl([{"prompt": "ask", "completion": "often"}] * 100, "b.jsonl")
    data = build([{"path": rare, "weight": 0.2}, {"path": often, "weight": 0.8}], spm_folder, stream_window=100)
    rows = data.rows("train")
    counts = [len(store) for store in rows.stores]
    assert 8 <= counts[0] <= 32 and sum(counts) == 100


def test_streamed_text_is_joined_into_blocks(byte_level_folder, tmp_path):
    (tmp_path / "a.txt").write_text("The quick brown fox.\n" * 200)
    data = CLMData(
        str(tmp_path / "a.txt"),
        tokenizer=byte_level_folder,
        documents="line",
        streaming=True,
        stream_window=50,
        max_length=16,
        batch_size=4,
    )
    data.setup("fit")
    batch = next(iter(data.train_batches()))
    assert batch["input_ids"].shape == (4, 16) and len(data.train_batches()) > 10**9


def test_unsupported_settings_with_streaming_are_rejected(spm_folder, write_jsonl, alpaca_rows):
    path = write_jsonl(alpaca_rows)
    with pytest.raises(UserError, match="val_source"):
        SFTData(path, streaming=True, val_size=3)
    data = build(path, spm_folder)
    data.trainer.max_steps = -1
    with pytest.raises(UserError, match="max_steps"):
        data.train_batches()
    first = build(path, spm_folder)
    first.train_batches()
    other = build(path, spm_folder, batch_size=2)
    old_state = {name: value for name, value in first.state_dict().items() if name not in ("order", "rows_per_step")}
    other.load_state_dict(old_state)  # of an earlier version, where no batch crossed the end of a buffer
    with pytest.raises(UserError, match="started by an earlier version.*Set data.batch_size 3"):
        other.train_batches()


def empty_rows(count):
    return [{"instruction": f"ask {n}", "output": ""} for n in range(count)]


def test_a_hub_validation_set_is_read_whole_during_streaming(spm_folder, alpaca_rows, monkeypatch):
    """With a stand-in for `load_dataset`, with and without streaming."""
    def load(path, name, split, streaming, **_):
        rows = datasets.Dataset.from_list(alpaca_rows if split == "train" else alpaca_rows[:7])
        return rows.to_iterable_dataset() if streaming else rows

    monkeypatch.setattr(datasets, "load_dataset", load)
    data = build("org/set", spm_folder, val_source={"path": "org/set", "split": "test"}, eval_batch_size=4)
    assert sum(int((batch["attention_mask"].sum(1) > 1).sum()) for batch in data.val_dataloader()) == 7
    assert len(take(data, 5)) == 5


def test_a_stream_with_unusable_first_rows_continues_and_counts_them(spm_folder, write_jsonl, alpaca_rows, capsys):
    path = write_jsonl(empty_rows(2500) + alpaca_rows)
    data = build(path, spm_folder, stream_window=1000)
    source = data.report["sources"][path]
    assert (source["rows_read"], source["rows_kept"]) == (2540, 40)
    assert source["dropped"]["empty response"]["rows"] == 2500
    assert any(note.startswith("a stream") for note in source["notes"])
    full = SFTData(path, tokenizer=spm_folder, max_length=512)
    full.setup("fit")
    batches = take(data, 27)  # two passes of 40 rows, and one row
    rows = [[token for token in row if token != data.tokenizer.pad_token_id] for batch in batches for row in batch]
    assert sorted(rows[:-1]) == sorted([row["input_ids"] for row in full.rows_for_inspection(99)] * 2)
    output = capsys.readouterr().out
    assert output.count(f"drops rows: empty response (first {path}:1)") == 1
    assert f"Pass 1 of the stream {path}: 2540 read: empty response (2500 rows, first {path}:1)." in output


def test_a_stream_resumes_after_unusable_first_rows(spm_folder, write_jsonl, alpaca_rows):
    path = write_jsonl(empty_rows(40) + alpaca_rows + empty_rows(40))
    full = take(build(path, spm_folder), 40)
    for stop in (3, 16, 20):
        first = build(path, spm_folder)
        take(first, stop)
        second = build(path, spm_folder)
        second.load_state_dict(first.state_dict())
        assert take(second, 40 - stop) == full[stop:]


def test_a_stream_without_a_usable_row_is_rejected_with_counts(spm_folder, write_jsonl, alpaca_rows):
    path = write_jsonl(empty_rows(50))
    with pytest.raises(UserError, match=r"no usable row .*rows.jsonl: 50 read: empty response \(50 rows, first .*:1\)"):
        build(path, spm_folder)
    path = write_jsonl(alpaca_rows)
    data = build(path, spm_folder)
    write_jsonl(empty_rows(50))  # while the run is in progress
    with pytest.raises(UserError, match="the whole stream has no usable row"):
        take(data, 99)


def test_a_streamed_source_without_a_usable_row_is_counted(spm_folder, write_jsonl, alpaca_rows):
    useless, useful = write_jsonl(empty_rows(30), "a.jsonl"), write_jsonl(alpaca_rows, "b.jsonl")
    data = build([{"path": useless, "weight": 99.0}, {"path": useful, "weight": 1.0}], spm_folder, stream_window=15)
    sources = data.report["sources"]
    assert sources[useless]["rows_kept"] == 0 and sources[useless]["rows_dropped"] >= 15
    assert sources[useful]["rows_kept"] > 0


def test_masks_are_new_in_each_buffer_and_epoch(bert_folder, tmp_path):  # noqa: F811
    """With the same line repeated, so that rows differ only in their masks."""
    (tmp_path / "a.txt").write_text("The quick brown fox jumps over the lazy dog again.\n" * 24)

    def make_stream():
        data = MLMData(str(tmp_path / "a.txt"), tokenizer=bert_folder, documents="line", join=False, streaming=True,
                       stream_window=8, max_length=64, batch_size=8, shuffle=False, mlm_probability=0.3,
                       val_source=str(tmp_path / "a.txt"))
        data.setup("fit")
        return data

    data = make_stream()
    loader = data.train_batches()
    buffers = [tuple((batch["labels"] != -100).flatten().tolist()) for batch in itertools.islice(iter(loader), 6)]
    assert len(set(buffers)) == 6  # three buffers in each of two epochs
    resumed_data = make_stream()
    resumed_data.load_state_dict({**loader.state_dict(), "epoch": 1, "window": 0, "rows": 0})
    resumed = itertools.islice(iter(resumed_data.train_batches()), 3)
    assert [tuple((batch["labels"] != -100).flatten().tolist()) for batch in resumed] == buffers[3:]
    first, second = ([batch["input_ids"].tolist() for batch in data.val_dataloader()] for _ in range(2))
    assert first == second


def test_each_epoch_and_buffer_has_a_different_seed():
    assert len({draw_number(epoch, buffer) for epoch in range(50) for buffer in range(50)}) == 2500
