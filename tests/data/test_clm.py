"""CLMData: no token lost or added, EOS between documents, short documents train."""

import json

import pytest

from lmmods.core.errors import UserError
from lmmods.data.clm import CLMData


def tokens_in_order(data):
    items = data.items("train")
    return [token for index in range(len(items)) for token in items[index]["input_ids"].tolist()]


@pytest.mark.parametrize("documents,count", [("file", 1), ("paragraph", 3), ("line", 4)])
def test_blocks_contain_every_token(documents, count, any_folder, tmp_path):
    path = tmp_path / "a.txt"
    path.write_text("The quick brown fox\njumps over the lazy dog.\n\nhello, how are you?\n\n\nagain\n")
    data = CLMData(str(path), tokenizer=any_folder, documents=documents, max_length=8)
    data.setup("fit")
    ids = tokens_in_order(data)
    tokenizer = data.tokenizer
    assert sum(token == tokenizer.eos_token_id for token in ids) == count
    text = tokenizer.decode([t for t in ids if t not in (tokenizer.eos_token_id, tokenizer.bos_token_id)])
    assert text.split() == path.read_text().split() or count > 1
    lengths = data.items("train").lengths
    assert (lengths[:-1] == 8).all() and lengths.sum() == len(ids)


def test_a_long_document_read_in_parts_gives_the_same_tokens(any_folder, tmp_path, monkeypatch):
    path = tmp_path / "a.txt"
    path.write_text("".join(f"The quick brown fox {n} jumps\n" for n in range(60)))
    full = CLMData(str(path), tokenizer=any_folder, max_length=32)
    full.setup("fit")
    monkeypatch.setattr("lmmods.data.read.readers.TEXT_PART", 100)
    in_parts = CLMData(str(path), tokenizer=any_folder, max_length=32, rebuild_cache=True)
    in_parts.setup("fit")
    assert next(iter(in_parts.report["sources"].values()))["rows_read"] > 5
    assert tokens_in_order(in_parts) == tokens_in_order(full)


def test_a_corpus_shorter_than_a_block_trains(any_folder, tmp_path):
    (tmp_path / "a.txt").write_text("hello")
    data = CLMData(str(tmp_path / "a.txt"), tokenizer=any_folder, max_length=512)
    data.setup("fit")
    batch = next(iter(data.train_batches()))
    assert batch["input_ids"].shape[0] == 1 and (batch["labels"] != -100).sum() == batch["attention_mask"].sum()


def test_documents_are_not_joined_with_join_false(byte_level_folder, tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_text("".join(json.dumps({"body": "hello " * n}) + "\n" for n in (1, 30, 3)))
    data = CLMData(str(path), tokenizer=byte_level_folder, text_column="body", max_length=16, join=False)
    data.setup("fit")
    items = data.items("train")
    assert [items[n]["index"] for n in range(len(items))][0] == 0 and items[len(items) - 1]["index"] == 2
    assert items.lengths.max() <= 16 and items.lengths.sum() == data.rows("train").lengths.sum()


def test_a_wrong_column_and_an_empty_corpus_are_rejected(byte_level_folder, tmp_path):
    (tmp_path / "a.jsonl").write_text('{"body": "x"}\n')
    with pytest.raises(UserError, match=r"a.jsonl:1: no column 'text'; the columns are body"):
        CLMData(str(tmp_path / "a.jsonl"), tokenizer=byte_level_folder).setup("fit")
    (tmp_path / "b.txt").write_text("\n\n")
    with pytest.raises(UserError, match="empty"):
        CLMData(str(tmp_path / "b.txt"), tokenizer=byte_level_folder).setup("fit")


def test_validation_blocks_come_from_other_documents(byte_level_folder, tmp_path):
    (tmp_path / "a.txt").write_text("".join(f"number {n}\n" for n in range(50)))
    data = CLMData(str(tmp_path / "a.txt"), tokenizer=byte_level_folder, documents="line", val_size=0.2, max_length=16)
    data.setup("fit")
    text = [
        data.tokenizer.decode([t for n in range(len(i)) for t in i[n]["input_ids"]])
        for i in (data.items("train"), data.items("val"))
    ]
    documents = [{line for line in part.split("<|endoftext|>") if line} for part in text]
    assert len(documents[1]) == 10 and not documents[0] & documents[1] and len(documents[0] | documents[1]) == 50


def test_columns_named_starts_and_ends_change_nothing(byte_level_folder, write_jsonl):
    rows = [{"text": "the quick brown fox", "starts": 0, "ends": False}, {"text": "jumps", "starts": 3, "ends": None}]
    plain = [{"text": row["text"]} for row in rows]
    inspected = [CLMData(write_jsonl(variant, f"{len(variant[0])}.jsonl"), tokenizer=byte_level_folder, max_length=16,
                         batch_size=1).rows_for_inspection(9) for variant in (rows, plain)]
    assert [row["input_ids"] for row in inspected[0]] == [row["input_ids"] for row in inspected[1]]


def test_the_report_counts_replaced_columns(byte_level_folder, write_jsonl):
    path = write_jsonl([{"a": "the fox", "text": "x"}, {"a": "the dog", "text": None}, {"a": "again"}])
    data = CLMData({"path": path, "columns": {"a": "text"}}, tokenizer=byte_level_folder, max_length=16, batch_size=1)
    data.setup("fit")
    (source,) = data.report["sources"].values()
    assert source["rows_kept"] == 3
    assert source["notes"] == ["column 'text' of 2 rows was replaced by the one that data.columns renames to it"]
    assert "column 'text' of 2 rows was replaced" in data.report_table()
