"""Rows as qlora.py writes them, token for token: compared with a copy of its preprocessing."""

import copy

import pytest

from lmmods.core.errors import UserError
from lmmods.data.sft import SFTData

START = "Below is an instruction that describes a task"
END = "Write a response that appropriately completes the request.\n\n### Instruction:\n{instruction}\n\n"
WITH_INPUT = (f"{START}, paired with an input that provides further context. {END}"
              "### Input:\n{input}\n\n### Response: ")
WITHOUT_INPUT = f"{START}. {END}### Response: "


def make_qlora_rows(tokenizer, rows, source_max_len, target_max_len, train_on_source=False):
    """Return (input_ids, labels) of each row by qlora.py's `extract_alpaca_dataset` and `DataCollatorForCausalLM`."""
    tokenizer = copy.deepcopy(tokenizer)
    if "instruction" in rows[0]:
        rows = [{"input": (WITH_INPUT if row.get("input", "") != "" else WITHOUT_INPUT).format(**row),
                 "output": row["output"]} for row in rows]
    sources = tokenizer([f"{tokenizer.bos_token}{row['input']}" for row in rows], max_length=source_max_len,
                        truncation=True, add_special_tokens=False)["input_ids"]
    targets = tokenizer([f"{row['output']}{tokenizer.eos_token}" for row in rows], max_length=target_max_len,
                        truncation=True, add_special_tokens=False)["input_ids"]
    return [(source + target, source + target if train_on_source else [-100] * len(source) + target)
            for source, target in zip(sources, targets, strict=True)]


def build(path, folder, template, **fields):
    data = SFTData(path, tokenizer=folder, template=template, **{"on_overflow": "truncate_ends", "max_length": 2048,
                                                                 **fields})
    data.setup("fit")
    return data


@pytest.mark.parametrize("limits", [(1024, 256), (70, 9), (40, 300)])
@pytest.mark.parametrize("train_on_source", [False, True])
def test_alpaca_rows_match_qlora_py(limits, train_on_source, any_folder, write_jsonl, alpaca_rows):
    rows = [*alpaca_rows, {"instruction": "Größe?\n", "input": " 東京 ", "output": "  numbers\n\n 1"}]
    data = build(write_jsonl(rows), any_folder, "qlora-alpaca", source_max_length=limits[0],
                 target_max_length=limits[1], train_on_prompt=train_on_source)
    result = [(row["input_ids"], row["labels"]) for row in data.rows_for_inspection(99)]
    assert result == make_qlora_rows(data.tokenizer, rows, *limits, train_on_source)
    counts = data.report["sources"][next(iter(data.report["sources"]))]
    assert (counts.get("rows_cut", 0) > 0) is (limits != (1024, 256)) and counts["rows_dropped"] == 0


def test_input_output_rows_match_qlora_py(any_folder, write_jsonl):
    rows = [{"input": f"### Human: add {n}\n### Assistant:", "output": f" The sum is {n}."} for n in range(5)]
    data = build(write_jsonl(rows), any_folder, "qlora-plain", source_max_length=12, target_max_length=5)
    assert [(row["input_ids"], row["labels"]) for row in data.rows_for_inspection(9)] == make_qlora_rows(
        data.tokenizer, rows, 12, 5)


def test_predict_prompts_match_the_sources_of_qlora_py(any_folder, write_jsonl, alpaca_rows):
    path = write_jsonl(alpaca_rows)
    data = build(path, any_folder, "qlora-alpaca", predict_source=path, source_max_length=60, eval_batch_size=4)
    data.setup("predict")
    prompts = {int(index): ids[mask.bool()].tolist() for batch in data.predict_dataloader()
               for index, ids, mask in zip(batch["index"], batch["input_ids"], batch["attention_mask"], strict=True)}
    rows = make_qlora_rows(data.tokenizer, alpaca_rows, 60, 1)
    assert [prompts[index] for index in range(len(rows))] == [ids[:-1] for ids, _ in rows]


def test_only_the_documented_differences_from_qlora_py_remain(spm_folder, write_jsonl):
    """The documented differences: rows without a response, and control tokens typed in a text."""
    rows = [{"instruction": "a", "output": ""}, {"instruction": "end with </s>", "output": "b"}]
    data = build(write_jsonl(rows), spm_folder, "qlora-alpaca")
    assert next(iter(data.report["sources"].values()))["dropped"]["empty response"]["rows"] == 1
    (row,) = data.rows_for_inspection(9)
    eos = data.tokenizer.eos_token_id
    assert row["input_ids"].count(eos) == 1 and make_qlora_rows(data.tokenizer, rows, 999, 99)[1][0].count(eos) == 2


def test_a_prompt_without_space_for_a_target_is_dropped(spm_folder, write_jsonl):
    rows = [{"instruction": "numbers " * 40, "output": "42"}]
    with pytest.raises(UserError, match="no target tokens left after truncation"):
        build(write_jsonl(rows), spm_folder, "qlora-alpaca", max_length=40)
