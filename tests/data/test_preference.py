"""Preferences: pairs, scored lists and labelled answers become batches."""

import json
import re
from pathlib import Path

import numpy as np
import pytest

from lmmods.core.errors import UserError
from lmmods.core.labels import IGNORED
from lmmods.data.preference import PreferenceData
from lmmods.runs.inspect import show_data

PROMPT = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "One?"},
          {"role": "assistant", "content": "1"}, {"role": "user", "content": "Two?"}]
GOOD, BAD = {"role": "assistant", "content": "2"}, {"role": "assistant", "content": "22 is the answer."}
TEXTS = {"prompt": "Two?", "chosen": "2", "rejected": "22 is the answer."}


def build_data(source, folder, answers="pair", **settings) -> PreferenceData:
    data = PreferenceData(source=source, **{"max_length": 400, "pad_to_multiple_of": 1, **settings})
    data.connect(pretrained=folder, seed=7, answers=answers)
    data.prepare_data()
    data.setup("fit")
    return data


def decode_answers(data: PreferenceData) -> list[tuple[str, str]]:
    """Return the prompt and the target text of each answer in the training rows."""
    answers = []
    for row in data.rows_for_inspection(99):
        first = next(position for position, label in enumerate(row["labels"]) if label != IGNORED)
        ids, labels = row["input_ids"], row["labels"]
        decode = data.tokenizer.decode
        targets = [token for token, label in zip(ids, labels, strict=True) if label != IGNORED]
        answers.append((row["name"], decode(ids[:first]), decode(targets)))
    return answers


@pytest.mark.parametrize("row", [
    {"prompt": PROMPT, "chosen": [GOOD], "rejected": [BAD]},
    {"prompt": PROMPT, "chosen": GOOD, "rejected": BAD},
    {"prompt": PROMPT, "chosen": "2", "rejected": "22 is the answer."},
    {"chosen": [*PROMPT, GOOD], "rejected": [*PROMPT, BAD]},
    {"prompt": "Two?", "messages": [*PROMPT, GOOD], "chosen": [*PROMPT, GOOD], "rejected": [*PROMPT, BAD]},
    {"messages": PROMPT, "chosen": GOOD, "rejected": BAD},
    {"conversations": [{"from": "human", "value": "One?"}, {"from": "gpt", "value": "1"},
                       {"from": "human", "value": "Two?"}], "system": "Be brief.",
     "chosen": {"from": "gpt", "value": "2"}, "rejected": {"from": "gpt", "value": "22 is the answer."}},
    {"prompt": PROMPT, "completions": [{"response": "2 or 3", "overall_score": 5},
                                       {"response": "22 is the answer.", "overall_score": 1},
                                       {"response": "2", "overall_score": 9.5}]},
    {"prompt": PROMPT, "answers": [{"answer": "22 is the answer.", "rank": 3}, {"answer": "2", "rank": 1}]},
    {"prompt": PROMPT, "responses": ["22 is the answer.", "2"], "scores": [0.1, 0.2]}])
def test_every_layout_of_a_pair_gives_the_same_pair(row, chat_folder, write_jsonl):
    prompt = ("<s><|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nOne?<|im_end|>\n<|im_start|>assistant\n"
              "1<|im_end|>\n<|im_start|>user\nTwo?<|im_end|>\n<|im_start|>assistant\n")
    assert decode_answers(build_data(write_jsonl([row]), chat_folder)) == [
        ("chosen", prompt, "2<|im_end|>"), ("rejected", prompt, "22 is the answer.<|im_end|>")]


PAGE = Path(__file__).parents[2] / "docs" / "tasks" / "preference.md"


def read_printed_rows(name: str) -> list[dict]:
    """Return the rows of an example on the task's page."""
    [block] = re.findall(rf"<!-- {name} -->\n```json\n(.*?)```", PAGE.read_text(), re.S)
    return [json.loads(line) for line in block.splitlines()]


def test_documented_pairs_give_the_same_pair(byte_level_folder, write_jsonl):
    for index, row in enumerate(rows := read_printed_rows("pairs")):
        data = build_data(write_jsonl([row], f"{index}.jsonl"), byte_level_folder, template="alpaca")
        chosen, rejected = decode_answers(data)
        assert chosen[1] == rejected[1] and (chosen[2], rejected[2]) == ("4<|endoftext|>", "22<|endoftext|>"), row
    assert len(rows) == 9


def test_documented_single_answers_are_read(byte_level_folder, write_jsonl):
    answers = []
    for index, row in enumerate(read_printed_rows("single")):
        data = build_data(write_jsonl([row], f"{index}.jsonl"), byte_level_folder, "single", template="alpaca")
        answers += decode_answers(data)
    assert [(name, text) for name, _, text in answers] == [
        ("wanted", "4<|endoftext|>"), ("not wanted", "22<|endoftext|>")] * 3
    assert len({prompt for _, prompt, _ in answers}) == 1


def test_hh_rlhf_transcripts_are_split_into_prompt_and_answers(byte_level_folder, write_jsonl):
    transcript = "\n\nHuman: One?\n\nAssistant: 1\n\nHuman: Two?\n\nAssistant:"
    row = {"chosen": f"{transcript} 2", "rejected": f"{transcript} 22"}
    chosen, rejected = decode_answers(build_data(write_jsonl([row]), byte_level_folder))
    assert chosen[1] == rejected[1] and chosen[1].count("1<|endoftext|>") == 1
    assert (chosen[2], rejected[2]) == ("2<|endoftext|>", "22<|endoftext|>")


def test_all_turns_of_an_answer_are_targets(chat_folder, write_jsonl):
    tail = [{"role": "user", "content": "Sure?"}, {"role": "assistant", "content": "Yes"}]
    row = {"chosen": [*PROMPT, GOOD, *tail], "rejected": [*PROMPT, BAD]}
    assert [text for *_, text in decode_answers(build_data(write_jsonl([row]), chat_folder))] == [
        "2<|im_end|>Yes<|im_end|>", "22 is the answer.<|im_end|>"]


LABELLED = [{"prompt": "Two?", "completion": "2", "label": True},
            {"prompt": "Two?", "completion": "22", "label": False},
            {"messages": [*PROMPT, GOOD], "label": 1}, {"messages": [*PROMPT, BAD], "kto_tag": "false"}]


@pytest.mark.parametrize("rows", [LABELLED[:2], LABELLED[2:], [TEXTS]], ids=["prompts", "messages", "pairs"])
def test_labelled_answers_and_pairs_become_single_answers(rows, chat_folder, write_jsonl):
    files = [write_jsonl([row], f"{index}.jsonl") for index, row in enumerate(rows)]
    data = build_data(files, chat_folder, "single")
    answers = decode_answers(data)
    assert [name for name, *_ in answers] == ["wanted", "not wanted"]
    assert answers[0][2] == "2<|im_end|>" and answers[1][2].startswith("22")
    batch = build_data(files, chat_folder, "single", batch_size=2, shuffle=False).collator(seeded=True)(
        [data.items("train")[index] for index in (0, 1, -1)])
    assert batch["input_ids"].shape[:2] == (3, 1) and batch["desirable"].tolist() == [1, 0, 0]


def test_a_batch_contains_padded_pairs(chat_folder, write_jsonl):
    rows = [{**TEXTS, "chosen": "2" * n} for n in (1, 2, 30)]
    data = build_data(write_jsonl(rows), chat_folder, batch_size=3, shuffle=False)
    batch = next(iter(data.train_batches()))
    singles = [data.items("train")[index] for index in range(3)]
    max_length = max(len(answer["input_ids"]) for row in singles for answer in row["answers"])
    assert {name: tuple(column.shape) for name, column in batch.items()} == dict.fromkeys(
        ("input_ids", "labels", "attention_mask", "token_seeds"), (3, 2, max_length))
    for row, item in enumerate(singles):
        for side, answer in enumerate(item["answers"]):
            size = len(answer["input_ids"])
            assert batch["input_ids"][row, side, :size].tolist() == answer["input_ids"].tolist()
            assert batch["labels"][row, side, :size].tolist() == answer["labels"].tolist()
            assert batch["attention_mask"][row, side].sum() == size
    real = batch["attention_mask"].bool()
    assert len(batch["token_seeds"][real].unique()) == real.sum()  # no two positions share their dropout
    padding = data.collator()([None])
    assert (padding["labels"] == IGNORED).all() and padding["attention_mask"].sum(-1).tolist() == [[1, 1]]


def test_row_weights_apply_to_both_answers(chat_folder, write_jsonl):
    data = build_data(write_jsonl([{**TEXTS, "weight": 0.5}, TEXTS]), chat_folder, batch_size=2, shuffle=False)
    assert next(iter(data.train_batches()))["loss_weights"][:, :, 0].tolist() == [[0.5, 0.5], [1, 1]]


@pytest.mark.parametrize(("row", "reason"), [
    ({**TEXTS, "rejected": "2 "}, "the two answers are equal"), ({**TEXTS, "rejected": " "}, "empty response"),
    ({**TEXTS, "chosen": None}, "chosen is empty or missing"),
    ({"chosen": [*PROMPT, GOOD], "rejected": [PROMPT[0], {"role": "user", "content": "Else?"}, BAD]},
     "the two conversations differ before the answer"),
    ({"chosen": [*PROMPT, GOOD], "rejected": PROMPT}, "the two conversations differ before the answer"),
    ({"prompt": "a", "completions": [{"response": "b", "score": 1}, {"response": "c", "score": 1}]},
     "all answers have the same score"),
    ({"prompt": "a", "responses": ["b", "c"], "scores": [1]}, "responses does not have one score per answer"),
    ({"prompt": "a", "completion": "b", "label": True}, "a single answer, not a pair"),
    ({**TEXTS, "rejected": {"image": "x.png"}}, None), ({**TEXTS, "chosen": "2", "prompt": ["x"]}, None)])
def test_rows_without_two_comparable_answers_are_dropped_and_counted(row, reason, chat_folder, write_jsonl):
    data = build_data(write_jsonl([TEXTS, row]), chat_folder)
    dropped = next(iter(data.report["sources"].values()))["dropped"]
    assert [entry["rows"] for entry in dropped.values()] == [1] and (reason is None or list(dropped) == [reason])


@pytest.mark.parametrize("row", [{"label": "perhaps"}, {"label": 2}, {"label": [1]}])
def test_a_row_with_a_label_other_than_true_or_false_is_dropped(row, chat_folder, write_jsonl):
    data = build_data(write_jsonl([LABELLED[0], {**LABELLED[0], **row}]), chat_folder, "single")
    assert list(next(iter(data.report["sources"].values()))["dropped"]) == ["label is neither true nor false"]


def test_rows_without_a_preference_are_rejected(chat_folder, write_jsonl):
    with pytest.raises(UserError, match=r"rows.jsonl:1: the columns prompt, completion have no preference"):
        build_data(write_jsonl([{"prompt": "a", "completion": "b"}]), chat_folder)
    with pytest.raises(UserError, match="a single answer, not a pair"):
        build_data(write_jsonl(LABELLED[:2]), chat_folder)


@pytest.mark.parametrize("on_overflow", ["truncate_turns", "truncate_prompt", "truncate_ends"])
def test_both_answers_share_the_truncated_prompt(on_overflow, chat_folder, write_jsonl):
    turns = [{"role": role, "content": f"number {n}"} for n in range(20) for role in ("user", "assistant")][:-1]
    row = {"prompt": turns, "chosen": "yes", "rejected": "no, not at all, by no means whatsoever"}
    data = build_data(write_jsonl([row]), chat_folder, max_length=100, on_overflow=on_overflow, source_max_length=70)
    chosen, rejected = decode_answers(data)
    assert chosen[1] == rejected[1]
    assert chosen[2] == "yes<|im_end|>" and rejected[2].startswith("no, not at all")
    items = data.items("train")
    assert items.lengths.max() <= 100 and items.truncated[0] > 0
    source = next(iter(data.report["sources"].values()))
    assert source["rows_cut"] == 1 and source["tokens_cut"] == items.truncated[0]


def test_answers_that_are_equal_after_truncation_are_dropped(chat_folder, write_jsonl):
    row = {"prompt": "a", "chosen": "long " * 30 + "yes", "rejected": "long " * 30 + "no"}
    data = build_data(write_jsonl([TEXTS, row]), chat_folder, max_length=40, on_overflow="truncate")
    assert list(next(iter(data.report["sources"].values()))["dropped"]) == ["the two answers have the same tokens"]


def test_each_answer_is_the_mismatched_one_of_one_other_prompt(chat_folder, write_jsonl):
    rows = [{"prompt": f"question {n}", "completion": f"answer {n}" * (1 + n // 3), "label": n % 2 == 0}
            for n in range(9)]
    data = build_data(write_jsonl(rows), chat_folder, "mismatched", max_length=60)
    items = data.items("train")
    origins = []
    for index in range(9):
        matched, mismatched = items[index]["answers"]
        prompt = int(items[index]["prompt_length"])
        assert matched["input_ids"][:prompt].tolist() == mismatched["input_ids"][:prompt].tolist()
        assert len(mismatched["input_ids"]) <= 60 and (mismatched["labels"][:prompt] == IGNORED).all()
        is_target = mismatched["labels"] != IGNORED
        assert is_target[prompt] and (mismatched["labels"] == mismatched["input_ids"])[is_target].all()
        assert max(len(matched["input_ids"]), len(mismatched["input_ids"])) == items.lengths[index]
        text = data.tokenizer.decode(mismatched["input_ids"][prompt:])
        origins.append(int(text.split()[1][0]))
        assert origins[-1] != index
    assert sorted(origins) == list(range(9))
    with pytest.raises(UserError, match="only one row"):
        build_data(write_jsonl(rows[:1]), chat_folder, "mismatched").items("train")


def test_mismatched_answers_are_rejected_with_streaming(chat_folder, write_jsonl):
    rows = [{"messages": [*PROMPT, answer], "label": 1} for answer in (GOOD, BAD)]
    data = build_data(write_jsonl(rows), chat_folder, answers="mismatched", streaming=True)
    with pytest.raises(UserError, match="model.loss kto .* data.streaming does not support"):
        data.train_batches()


def test_the_split_and_the_report_count_all_answers(chat_folder, write_jsonl):
    rows = [{**TEXTS, "prompt": f"{n}?", "topic": "numbers"} for n in range(20)]
    data = build_data(write_jsonl(rows), chat_folder, "single", val_size=5)
    train, val = (data.sets[role] for role in ("train", "val"))
    assert (len(train), len(val)) == (30, 10) and not set(train.index) & set(val.index)
    paired = build_data(write_jsonl(rows), chat_folder, batch_size=4)
    split = paired.report["splits"]["train"]
    for module in (data, paired):
        source, = module.report["sources"].values()
        assert source["not_used"] == {"topic": 20}  # once per row, not per answer
    batches = list(zip(range(5), paired.train_batches(), strict=False))
    real = sum(int(batch["attention_mask"].sum()) for _, batch in batches)
    area = sum(batch["attention_mask"].numel() for _, batch in batches)
    assert split["tokens"] == real and np.isclose(split["padding_share"]["shuffled"], 1 - real / area, atol=0.02)


def test_inspect_shows_both_answers(chat_folder, write_jsonl, capsys):
    data = build_data(write_jsonl([TEXTS]), chat_folder)
    show_data(data, 4, "longest")
    output = capsys.readouterr().out
    assert "rows.jsonl:1), chosen: " in output and "rows.jsonl:1), rejected: " in output
    assert "[[22 is the answer.<|im_end|>]]" in output


@pytest.mark.parametrize("row", [TEXTS, {"prompt": "Two?", "completion": "2", "label": True},
                                 {"prompt": "Two?", "responses": ["2", "no"], "scores": [2, 1]}, {"prompt": "Two?"}])
def test_predict_compares_with_the_preferred_answer(row, chat_folder, write_jsonl):
    data = PreferenceData(source=write_jsonl([TEXTS]), predict_source=write_jsonl([row], "asked.jsonl"), max_length=64)
    data.connect(pretrained=chat_folder, seed=7)
    data.prepare_data()
    data.setup("predict")
    batch = next(iter(data.predict_dataloader()))
    assert data.tokenizer.decode(batch["input_ids"][0]).endswith("Two?<|im_end|>\n<|im_start|>assistant\n")
    assert data.codec.score(data.rows("predict"), {0: "2"})[0] == ({"exact_match": 1.0} if len(row) > 1 else {})


def test_packing_is_rejected():
    with pytest.raises(UserError, match="data.packing is not supported for preferences"):
        PreferenceData(source="x", packing=True)


def test_pairs_and_single_answers_are_cached_separately(chat_folder, write_jsonl):
    path = write_jsonl([TEXTS])
    assert [len(build_data(path, chat_folder, answers).rows("train")) for answers in ("pair", "single", "pair")] == [
        1, 2, 1]
    assert json.dumps(build_data(path, chat_folder).report)  # plain JSON
