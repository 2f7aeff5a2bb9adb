"""Each layout is detected from its columns and converted to the right conversation."""

import json

import pytest

from lmmods.core.errors import UserError
from lmmods.data.read.conversation import RowProblem
from lmmods.data.read.formats import FORMATS, detect_format, find_format, read_conversation
from lmmods.data.read.readers import Row
from lmmods.data.sft import SFTData

EXCHANGE = [("user", "ask"), ("assistant", "reply")]
TWO_TURNS = [*EXCHANGE, ("user", "more"), ("assistant", "end")]
TURNS = [{"from": "human", "value": "ask"}, {"from": "gpt", "value": "reply"}]
ROWS = {
    "alpaca": ({"instruction": "ask", "input": "", "output": "reply"}, EXCHANGE),
    "messages": (
        {"messages": [{"role": "user", "content": "ask"}, {"role": "assistant", "content": "reply"}]},
        EXCHANGE,
    ),
    "sharegpt": ({"conversations": TURNS, "system": "sys"}, [("system", "sys"), *EXCHANGE]),
    "oasst1": ({"text": "### Human: ask ### Assistant: reply### Human: more### Assistant: end"}, TWO_TURNS),
    "chip2": ({"text": "<human>: ask\n<bot>: reply\n<human>: more\n<bot>: end", "metadata": {}}, TWO_TURNS),
    "text-pair": ({"chosen": "reply", "rejected": "x"}, [("assistant", "reply")]),
    "hh-rlhf": ({"chosen": "\n\nHuman: ask\n\nAssistant: reply", "rejected": "x"}, EXCHANGE),
    "dolly": ({"instruction": "ask", "context": "", "response": "reply", "category": "x"}, EXCHANGE),
    "instruction-response": ({"instruction": "ask", "input": "", "response": "reply"}, EXCHANGE),
    "self-instruct": ({"prompt": "ask", "completion": "reply<|endoftext|>"}, EXCHANGE),
    "prompt-completion": ({"prompt": "ask", "completion": "reply"}, EXCHANGE),
    "prompt-response": ({"prompt": "ask", "response": "reply"}, EXCHANGE),
    "question-answer": ({"question": "ask", "answer": "reply"}, EXCHANGE),
    "input-output": ({"input": "ask", "output": "reply", "source": "x"}, EXCHANGE),
    "text": ({"text": "reply"}, [("assistant", "reply")]),
    "self-instruct-nested": ({"instruction": "ask", "instances": [{"input": "", "output": "reply"}]}, EXCHANGE),
    "unnatural-instructions": (
        {"instruction": "x", "instances": [{"instruction_with_input": "ask", "output": "reply"}], "reformulations": []},
        EXCHANGE,
    ),
    "conversation": (
        {
            "conversation": [
                {"system": "sys", "input": "ask", "output": "reply"},
                {"input": "more", "output": "end"},
            ]
        },
        [("system", "sys"), *TWO_TURNS],
    ),
    "moss": (
        {
            "conversation_id": "7",
            "meta_instruction": "sys\n",
            "num_turns": 2,
            "chat": {
                "turn_2": {"Human": "<|Human|>: more<eoh>\n", "MOSS": "<|MOSS|>: end<eom>\n"},
                "turn_1": {
                    "Human": "<|Human|>: ask<eoh>\n",
                    "Inner Thoughts": "<|Inner Thoughts|>: None<eot>\n",
                    "Commands": "<|Commands|>: None<eoc>\n",
                    "Tool Responses": "<|Results|>: None<eor>\n",
                    "MOSS": "<|MOSS|>: reply<eom>\n",
                },
            },
        },
        [("system", "sys"), *TWO_TURNS],
    ),
    "moss-text": (
        {
            "prefix": "sys\n",
            "plain_text": "[Human]: ask<eoh> [MOSS]: reply<eoa>\n[Human]: more<eoh> [MOSS]: end<eoa>\n",
            "num_turns": 2,
        },
        [("system", "sys"), *TWO_TURNS],
    ),
    "openai-batch": (
        {
            "custom_id": "request-1",
            "method": "POST",
            "url": "/v1/chat/completions",
            "body": {
                "model": "gpt-4o-mini",
                "messages": [{"role": "developer", "content": "sys"}, {"role": "user", "content": "ask"}],
            },
            "response": {
                "status_code": 200,
                "request_id": "x",
                "body": {
                    "choices": [
                        {"index": 0, "message": {"role": "assistant", "content": "reply", "refusal": None}}
                    ]
                },
            },
            "error": None,
        },
        [("system", "sys"), *EXCHANGE],
    ),
    "oasst1-trees": (
        {
            "message_tree_id": "1",
            "prompt": {
                "text": "ask",
                "role": "prompter",
                "replies": [
                    {"text": "worse", "role": "assistant", "rank": 1, "replies": []},
                    {"text": "reply", "role": "assistant", "rank": 0, "replies": []},
                ],
            },
        },
        EXCHANGE,
    ),
}


def conversations(name, *rows):
    layout = find_format(name)
    regrouped = layout.regroup([Row("f", n, row) for n, row in enumerate(rows, 1)])
    return [[(m["role"], m["content"]) for m in read_conversation(name, row.values, {}).messages] for row in regrouped]


@pytest.mark.parametrize("name", ROWS)
def test_each_layout_is_detected_and_converted(name):
    row, expected = ROWS[name]
    assert detect_format(row, "f:1") == name
    assert conversations(name, row) == [expected]


@pytest.mark.parametrize(("columns", "layout"), [
    ("instruction input solution", "alpaca"), ("instruction context solution", "dolly"),
    ("instruction solution", "alpaca"), ("prompt answer", "prompt-completion"), ("prompt", "prompt-completion"),
    ("question context", "question-answer"), ("input target", "input-output"),
    ("instruction_with_input input", "input-output")])
def test_prompts_get_the_layout_that_reads_most_of_their_columns(columns, layout):
    row = {name: f"the {name}" for name in columns.split()}
    assert detect_format(row, "f:1", prompts_only=True) == layout
    [message] = read_conversation(layout, row, {}).messages
    read = {message["content"], message.get("input")} - {None}
    context = {"input", "context"} & row.keys() if layout != "input-output" else set()
    assert read == {row[name] for name in context | {find_format(layout).convert.prompt}}


@pytest.mark.parametrize("columns", ["problem solution", "context answer", "chosen_answer", "custom_id", "message_id"])
def test_prompts_that_fit_no_layout_are_rejected(columns):
    with pytest.raises(UserError, match="fit no known format, also without the column of the response .*alpaca: "):
        detect_format(dict.fromkeys(columns.split(), "x"), "f:1", prompts_only=True)


def test_every_layout_is_tested():
    assert set(FORMATS) == {*ROWS, "oasst1-messages"}


def test_oasst_conversations_follow_the_best_reply_and_keep_orphans():
    rows = [
        {"message_id": "c", "parent_id": "b", "text": "more", "role": "prompter", "rank": None},
        {"message_id": "x", "parent_id": "a", "text": "worse", "role": "assistant", "rank": 1},
        {"message_id": "b", "parent_id": "a", "text": "reply", "role": "assistant", "rank": 0},
        {"message_id": "a", "parent_id": None, "text": "ask", "role": "prompter", "rank": None},
        {"message_id": "d", "parent_id": "c", "text": "end", "role": "assistant", "rank": 0},
        {"message_id": "z", "parent_id": "lost", "text": "alone", "role": "prompter", "rank": 0},
    ]
    assert detect_format(rows[0], "f:1") == "oasst1-messages"
    assert conversations("oasst1-messages", *rows) == [TWO_TURNS, [("user", "alone")]]


def test_each_instance_and_reformulation_becomes_a_row():
    item = {"instruction_with_input": "ask", "output": "reply"}
    assert (
        conversations("unnatural-instructions", {"instances": [item, item], "reformulations": [item]}) == [EXCHANGE] * 3
    )


def test_the_alpaca_input_stays_separate_from_the_instruction():
    row = {"instruction": "a", "input": "b", "output": "c"}
    assert read_conversation("alpaca", row, {}).messages[0] == {"role": "user", "content": "a", "input": "b"}


@pytest.mark.parametrize(
    "turns,reason",
    [
        ([{"role": "narrator", "content": "x"}], "unknown role 'narrator'"),
        (["x"], "not an object"),
        ([], "empty or missing"),
        ([{"role": "user"}], "without role or content"),
        ([{"role": "user", "content": None}], "is null"),
        ({"a": 1}, "not a list"),
    ],
)
def test_a_damaged_turn_drops_the_row_with_a_reason(turns, reason):
    with pytest.raises(RowProblem, match=reason):
        read_conversation("messages", {"messages": turns}, {})


def test_data_roles_maps_role_names(spm_folder, write_jsonl):
    rows = [{"conversations": [{"from": "Kunde", "value": "hello"}, {"from": "Hilfe", "value": "again"}]}]
    data = SFTData(write_jsonl(rows), tokenizer=spm_folder, roles={"Kunde": "user", "Hilfe": "assistant"})
    data.setup("fit")
    assert data.report["splits"]["train"]["rows"] == 1


def test_columns_that_fit_no_layout_are_listed_in_the_error(spm_folder, write_jsonl):
    with pytest.raises(
        UserError, match=r"rows.jsonl:1: the columns a, b fit no known format .*alpaca: instruction, output"
    ):
        SFTData(write_jsonl([{"a": 1, "b": 2}]), tokenizer=spm_folder).setup("fit")


def test_sources_with_different_layouts_and_weights_mix(spm_folder, write_jsonl):
    alpaca = write_jsonl([{"instruction": "ask", "output": f"a{n}"} for n in range(10)], "a.jsonl")
    chat = write_jsonl([{"prompt": "ask", "completion": f"b{n}"} for n in range(10)], "b.jsonl")
    data = SFTData([{"path": alpaca, "weight": 2}, {"path": chat, "weight": 0.5, "limit": 4}], tokenizer=spm_folder)
    data.setup("fit")
    assert {s["format"] for s in data.report["sources"].values()} == {"alpaca", "prompt-completion"}
    texts = [json.dumps(data.rows("train").source_row(row["index"])) for row in data.rows_for_inspection(99)]
    assert len(texts) == 22 and sum('"output": "a' in text for text in texts) == 20
