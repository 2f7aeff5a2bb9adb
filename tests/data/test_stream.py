"""Streaming: windows that lose no row, continue anywhere, and do not depend on the number of ranks."""

import itertools
import types

import pytest

from lmmods.data.clm import CLMData
from lmmods.data.sft import SFTData
from lmmods.errors import UserError


def build(path, folder, rank=0, world_size=1, **fields):
    data = SFTData(
        path, tokenizer=folder, **{"batch_size": 3, "streaming": True, "stream_window": 16, "max_length": 512, **fields}
    )
    data.trainer = types.SimpleNamespace(global_rank=rank, world_size=world_size, max_steps=9, state=None)
    data.prepare_data()
    data.setup("fit")
    return data


def take(data, count):
    loader = data._loader or data.train_dataloader()
    return [batch["input_ids"].tolist() for batch in itertools.islice(iter(loader), count)]


def test_each_row_once_per_epoch_and_other_orders_later(spm_folder, write_jsonl, alpaca_rows):
    path = write_jsonl(alpaca_rows)
    whole = SFTData(path, tokenizer=spm_folder, max_length=512)
    whole.setup("fit")
    wanted = sorted(row["input_ids"] for row in whole.rows_for_inspection(99))
    batches = take(build(path, spm_folder), 30)  # windows of 16, 16 and 8 rows: 6 + 6 + 3 batches
    epochs = [
        [[token for token in row if token != whole.tokenizer.pad_token_id] for batch in part for row in batch]
        for part in (batches[:15], batches[15:])
    ]
    assert [sorted(epoch) for epoch in epochs] == [wanted] * 2 and epochs[0] != epochs[1]


@pytest.mark.parametrize("stop", [0, 1, 5, 6, 7, 14, 15, 20])
@pytest.mark.parametrize("packing", [False, True])
def test_resume_anywhere(stop, packing, spm_folder, write_jsonl, alpaca_rows):
    fields = {"packing": packing, "group_by_length": not packing}
    path = write_jsonl(alpaca_rows)
    whole = take(build(path, spm_folder, **fields), stop + 4)
    first = build(path, spm_folder, **fields)
    assert take(first, stop) == whole[:stop]
    second = build(path, spm_folder, **fields)
    second.load_state_dict(first.state_dict())
    assert take(second, 4) == whole[stop:]


def test_ranks_share_the_batches(spm_folder, write_jsonl, alpaca_rows):
    path = write_jsonl(alpaca_rows)
    alone = take(build(path, spm_folder), 6)
    ranks = [take(build(path, spm_folder, rank, 2), 3) for rank in range(2)]
    assert [batch for round_ in zip(*ranks, strict=False) for batch in round_] == alone


def test_sources_come_in_proportion(spm_folder, write_jsonl):
    rare = write_jsonl([{"instruction": "ask", "output": "rare"}] * 100, "a.jsonl")
    often = write_jsonl([{"prompt": "ask", "completion": "often"}] * 100, "b.jsonl")
    data = build([{"path": rare, "weight": 0.2}, {"path": often, "weight": 0.8}], spm_folder, stream_window=100)
    rows = data._rows("train")
    counts = [len(store) for store in rows.stores]
    assert 8 <= counts[0] <= 32 and sum(counts) == 100


def test_text_streams_in_blocks(byte_level_folder, tmp_path):
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
    batch = next(iter(data.train_dataloader()))
    assert batch["input_ids"].shape == (4, 16) and len(data.train_dataloader()) > 10**9


def test_what_streaming_cannot_do_is_told(spm_folder, write_jsonl, alpaca_rows):
    path = write_jsonl(alpaca_rows)
    with pytest.raises(UserError, match="val_source"):
        SFTData(path, streaming=True, val_size=3)
    data = build(path, spm_folder)
    data.trainer.max_steps = -1
    with pytest.raises(UserError, match="max_steps"):
        data.train_dataloader()
    state = build(path, spm_folder)
    state.train_dataloader()
    other = build(path, spm_folder, batch_size=2)
    other.load_state_dict(state.state_dict())
    with pytest.raises(UserError, match="batch_size 3, now it is 2"):
        other.train_dataloader()
