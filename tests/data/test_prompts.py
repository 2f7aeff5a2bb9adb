"""GRPO prompts: what the model and the rewards get from rows, and what `inspect` shows."""

import pytest

from lmmods.core.errors import UserError
from lmmods.data.grpo import PromptData
from lmmods.data.sft import SFTData

TURNS = [{"role": "user", "content": "One?"}, {"role": "assistant", "content": "1"},
         {"role": "user", "content": "Two?"}]
LAST = "<|im_start|>user\nTwo?<|im_end|>\n<|im_start|>assistant\n"
PROMPT = f"<s><|im_start|>user\nOne?<|im_end|>\n<|im_start|>assistant\n1<|im_end|>\n{LAST}"


def build_data(source, folder, data_class=PromptData, stage="fit", **settings) -> PromptData:
    data = data_class(source=source, **{"max_length": 400, "batch_size": 4, **settings})
    data.connect(pretrained=folder, seed=7)
    data.prepare_data()
    data.setup(stage)
    return data


@pytest.mark.parametrize(("row", "reference", "turns"), [
    ({"messages": [*TURNS, {"role": "assistant", "content": "2"}], "level": 3}, "2", TURNS),
    ({"messages": TURNS}, None, TURNS),
    ({"prompt": "Two?", "completion": "2"}, "2", TURNS[2:]),
    ({"prompt": "Two?", "tests": ["x"]}, None, TURNS[2:])], ids=["chat", "open chat", "pair", "prompt"])
def test_the_response_in_the_data_is_the_reference(row, reference, turns, chat_folder, write_jsonl):
    data = build_data(write_jsonl([row]), chat_folder)
    prompt = data.prompt("train", 0)
    assert (prompt.row, prompt.reference) == (row, reference)
    assert [(turn["role"], turn["content"]) for turn in prompt.conversation.messages] == [
        (turn["role"], turn["content"]) for turn in turns]
    assert data.tokenizer.decode(prompt.ids) == (PROMPT if turns is TURNS else f"<s>{LAST}")


def test_the_recipes_system_prompt_is_part_of_the_prompt(chat_folder, write_jsonl):
    """Also of the conversation that rewards get."""
    data = build_data(write_jsonl([{"prompt": "Two?", "completion": "2"}]), chat_folder, system_prompt="Be brief.")
    prompt = data.prompt("train", 0)
    assert [(turn["role"], turn["content"]) for turn in prompt.conversation.messages] == [
        ("system", "Be brief."), ("user", "Two?")]
    assert data.tokenizer.decode(prompt.ids) == (
        f"<s><|im_start|>system\nBe brief.<|im_end|>\n{LAST}")


def test_a_plain_text_is_a_prompt_to_continue(chat_folder, write_jsonl):
    rows = [{"text": "the quick brown"}, {"text": "the lazy dog\n"}]
    data = build_data(write_jsonl(rows), chat_folder)
    for index, row in enumerate(rows):
        prompt = data.prompt("train", index)
        assert data.tokenizer.decode(prompt.ids) == f"<s>{row['text']}"
        assert prompt.conversation is None and prompt.reference is None and prompt.row == row
    predicted = build_data(write_jsonl(rows, "train.jsonl"), chat_folder, SFTData, "predict",
                           predict_source=write_jsonl(rows, "predict.jsonl"))
    batches = [ids for batch in predicted.predict_dataloader() for ids in batch["input_ids"]]
    assert sorted(predicted.tokenizer.decode(ids, skip_special_tokens=True) for ids in batches) == sorted(
        row["text"] for row in rows)
    assert predicted.codec.score(predicted.rows("predict"), {0: "x", 1: "y"}) == ({}, ())


def test_rows_without_a_prompt_are_dropped(chat_folder, write_jsonl):
    rows = [{"messages": [{"role": "assistant", "content": "2"}]}, {"messages": TURNS}]
    data = build_data(write_jsonl(rows), chat_folder)
    [source] = data.report["sources"].values()
    assert {reason: entry["rows"] for reason, entry in source["dropped"].items()} == {"no prompt": 1}
    assert data.num_prompts("train") == 1 and data.prompt("train", 0).row == rows[1]
    with pytest.raises(UserError, match="no prompt"):
        build_data(write_jsonl(rows[:1], "bad.jsonl"), chat_folder)


def test_inspect_shows_prompts_and_references(chat_folder, write_jsonl):
    """No token has a label; the other columns are for the rewards."""
    rows = [{"prompt": "Two?", "completion": "2", "level": 1}, {"prompt": "Two and many more?", "completion": "\n3"}]
    data = build_data(write_jsonl(rows), chat_folder)
    inspected = data.rows_for_inspection(2)
    assert [row["scored"] for row in inspected] == ["the answer, by rewards; the reference answer is: 2",
                                                    "the answer, by rewards; the reference answer is: \n3"]
    assert not any("labels" in row for row in inspected)
    for which, indices in (("longest", [1, 0]), ("most_cut", [0, 1]), ("most_unknown", [0, 1]), ([1], [1])):
        assert [row["index"] for row in data.rows_for_inspection(2, which)] == indices
    [source] = data.report["sources"].values()
    assert source["for_rewards"] == {"level": 1} and "not_used" not in source
    assert "only for rewards: level (1 rows)" in data.report_table()
