"""Turns and rows in other trainers' layouts: tool calls, reasoning, content parts, targets and unused keys."""

import copy
import json

import pytest

from lmmods.core.errors import UserError
from lmmods.data.read.conversation import Conversation, RowProblem
from lmmods.data.read.formats import detect_format, read_conversation
from lmmods.data.read.readers import read_file
from lmmods.data.report import render_table
from lmmods.data.sft import SFTData

WEATHER = {"name": "get_weather", "description": "Weather of a city", "parameters": {
    "type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}}
TOOL = {"type": "function", "function": WEATHER}
CALL = {"name": "get_weather", "arguments": {"city": "Paris"}}
CALLED = {"type": "function", "function": CALL}
USER, REPLY = {"role": "user", "content": "ask"}, {"role": "assistant", "content": "reply"}
PARALLEL = {
    "messages": [
        {"role": "developer", "content": "sys"},
        {"role": "user", "content": "Paris or Rome?", "name": "Ann"},
        {"role": "assistant", "content": None, "tool_calls": [
            {"id": f"c{n}", "type": "function",
             "function": {"name": "get_weather", "arguments": f'{{"city": "{city}"}}'}}
            for n, city in enumerate(("Paris", "Rome"))]},
        {"role": "tool", "tool_call_id": "c0", "name": "get_weather", "content": "rain"},
        {"role": "tool", "tool_call_id": "c1", "name": "get_weather", "content": "sun"},
        {"role": "assistant", "content": "Rome.", "reasoning_content": "Sun is better.", "refusal": None},
    ],
    "tools": [TOOL], "parallel_tool_calls": True,
}
LLAMA_FACTORY = {
    "conversations": [
        {"from": "human", "value": "Weather?"},
        {"from": "function_call", "value": json.dumps(CALL)},
        {"from": "observation", "value": '{"sky": "grey"}'},
        {"from": "gpt", "value": "Grey."},
    ],
    "system": "sys", "tools": json.dumps([WEATHER]),
}
PLUGINS = {"chat": {
    f"turn_{n}": {
        "Human": f"<|Human|>: ask {n}<eoh>\n",
        "Inner Thoughts": "<|Inner Thoughts|>: I look it up.<eot>\n",
        "Commands": '<|Commands|>: Search("a (b), c"), Calculate("1+1")<eoc>\n',
        "Tool Responses": "<|Results|>:\nSearch => x<eor>\n",
        "MOSS": f"<|MOSS|>: reply {n}<eom>\n",
    } for n in (10, 2, 1)}}


def read(layout: str, row: dict, roles: dict | None = None, turn_fields: dict | None = None) -> Conversation:
    before = copy.deepcopy(row)
    conversation = read_conversation(layout, row, roles or {}, turn_fields)
    assert row == before  # the original row is stored after the conversion
    return conversation


def read_turns(*messages: dict) -> list[dict]:
    return read("messages", {"messages": list(messages)}).messages


# Turns


def test_openai_tool_calls_keep_order_ids_and_results():
    conversation = read("messages", PARALLEL)
    calls = [{**CALLED, "function": {**CALL, "arguments": {"city": city}}, "id": f"c{n}"}
             for n, city in enumerate(("Paris", "Rome"))]
    assert conversation.messages == [
        {"role": "system", "content": "sys"},
        {"role": "user", "content": "Paris or Rome?", "name": "Ann"},
        {"role": "assistant", "content": "", "tool_calls": calls},
        {"role": "tool", "content": "rain", "tool_call_id": "c0", "name": "get_weather"},
        {"role": "tool", "content": "sun", "tool_call_id": "c1", "name": "get_weather"},
        {"role": "assistant", "content": "Rome.", "reasoning_content": "Sun is better."},
    ]
    assert conversation.tools == [TOOL] and conversation.unused == ("parallel_tool_calls",)


def test_llama_factory_tool_calls_and_observations_are_read():
    conversation = read("sharegpt", LLAMA_FACTORY)
    assert conversation.messages == [
        {"role": "system", "content": "sys"},
        {"role": "user", "content": "Weather?"},
        {"role": "assistant", "content": "", "tool_calls": [CALLED]},
        {"role": "tool", "content": '{"sky": "grey"}'},
        {"role": "assistant", "content": "Grey."},
    ]
    assert conversation.tools == [TOOL] and not conversation.unused


@pytest.mark.parametrize("turn,expected", [
    ({"from": "function_call", "value": json.dumps([CALL, CALL])}, {"content": "", "tool_calls": [CALLED, CALLED]}),
    ({"from": "function_call", "value": "get_weather(Paris)"}, {"content": "get_weather(Paris)"}),
    ({"from": "function_call", "value": '{"city": "Paris"}'}, {"content": '{"city": "Paris"}'}),
    ({"role": "assistant", "content": None, "function_call": {**CALL, "arguments": '{"city": "Paris"}'}},
     {"content": "", "tool_calls": [CALLED]}),
    ({"role": "assistant", "content": "I look.", "tool_calls": [CALL]}, {"content": "I look.", "tool_calls": [CALLED]}),
    ({"role": "assistant", "tool_calls": json.dumps([CALL])}, {"content": "", "tool_calls": [CALLED]}),
    ({"role": "assistant", "tool_calls": [{"name": "f", "arguments": "x = 1"}]},
     {"content": "", "tool_calls": [{"type": "function", "function": {"name": "f", "arguments": "x = 1"}}]}),
    ({"role": "assistant", "tool_calls": [{"name": "f", "arguments": ""}]},
     {"content": "", "tool_calls": [{"type": "function", "function": {"name": "f", "arguments": {}}}]}),
    ({"role": "assistant", "content": "x", "tool_calls": []}, {"content": "x"}),
    ({"role": "assistant", "content": "x", "thinking": "y"}, {"content": "x", "reasoning_content": "y"}),
    ({"role": "assistant", "content": [{"type": "thinking", "thinking": "y"}, {"type": "text", "text": "x"}, "z"]},
     {"content": "xz", "reasoning_content": "y"}),
    ({"author": "chatgpt", "message": "x"}, {"content": "x"}),
    ({"speaker": "Model", "text": 7}, {"content": "7"}),
    ({"role": "assistant", "content": "x", "weight": 0}, {"content": "x", "scored": False}),
    ({"role": "assistant", "content": "x", "weight": 1}, {"content": "x", "scored": True}),
    ({"role": "assistant", "content": "x", "train": False}, {"content": "x", "scored": False}),
    ({"role": "assistant", "content": "x", "loss": True, "trainable": False}, {"content": "x", "scored": False}),
    ({"role": "assistant", "content": "x", "masked": True}, {"content": "x", "scored": False}),
    ({"role": "assistant", "content": "x", "train": None}, {"content": "x"}),
])
def test_assistant_turns_of_any_layout_are_read(turn, expected):
    assert read_turns(turn) == [{"role": "assistant", **expected}]


@pytest.mark.parametrize("name,role", [
    ("developer", "system"), ("Human", "user"), ("observation", "tool"), ("function", "tool"), ("ipython", "tool"),
    ("function_response", "tool")])
def test_role_names_map_to_the_four_roles(name, role):
    assert read_turns({"role": name, "content": "x"}) == [{"role": role, "content": "x"}]


@pytest.mark.parametrize("turn,reason", [
    ({"role": "assistant", "content": "x", "weight": 0.5}, r"messages.weight is neither 0 nor 1"),
    ({"role": "assistant", "content": "x", "loss": "no"}, r"messages.loss is neither 0 nor 1"),
    ({"role": "assistant", "content": "x", "train_detail": [{"begin_offset": 0}]}, "detail selects parts of a turn"),
    ({"role": "assistant", "content": None, "tool_calls": None}, "messages.content is null"),
    ({"role": "assistant", "tool_calls": "f(x)"}, "tool_calls is text, but not JSON"),
    ({"role": "assistant", "tool_calls": [3]}, "has a call that is not an object"),
    ({"role": "assistant", "tool_calls": [{"id": "c"}]}, "has a call without a name"),
    ({"role": "assistant", "tool_calls": [{"name": "f", "arguments": [1]}]}, "arguments that are neither"),
    ({"role": "user", "content": [{"type": "text", "text": "x"}, {"type": "image_url", "image_url": {"url": "y"}}]},
     "a turn has an image, which only SFT and Preference read, with model.images"),
    ({"role": "user", "content": [{"image": "y.png"}]}, "a turn has an image"),
    ({"role": "user", "content": [{"type": "input_audio", "input_audio": {}}]}, "a turn has audio"),
    ({"role": "user", "content": [{"type": "video", "video": "y"}]}, "a turn has a video"),
    ({"role": "user", "content": [{"type": "file", "file": {}}]}, "a turn has a file"),
    ({"role": "user", "content": [{"type": "point"}]}, "a turn has a part of type 'point'"),
    ({"role": "user", "content": [3]}, "a part that is neither text nor an object"),
    ({"content": "x", "model": "gpt"}, "without role or content"),
])
def test_an_unusable_turn_gives_a_reason(turn, reason):
    with pytest.raises(RowProblem, match=reason):
        read_turns(turn)


def test_turns_may_be_an_object_or_json_text():
    numbered = {f"turn_{n}": {"role": role, "content": str(n)} for n, role in ((10, "assistant"), (9, "user"))}
    for value in (numbered, json.dumps(numbered), json.dumps([numbered["turn_9"], numbered["turn_10"]])):
        assert [m["content"] for m in read("messages", {"messages": value}).messages] == ["9", "10"]


def test_an_object_with_several_speakers_becomes_several_turns():
    row = {"messages": [{"human": "a", "assistant": "b", "weight": 0, "id": 3}, {"Kunde": "c", "gpt": None}]}
    parsed = read("messages", row, {"Kunde": "human"})
    assert parsed.messages == [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b", "scored": False},
                               {"role": "user", "content": "c"}]
    assert parsed.unused == ("messages.id",)


def test_data_turn_fields_names_the_keys_of_turns():
    row = {"messages": [{"who": "Kunde", "said": "a"},
                        {"who": "gpt", "said": "b", "thoughts": "c", "calls": [CALL], "counts": 0}]}
    parsed = read("messages", row, {"Kunde": "user"}, {"role": "who", "content": "said", "tool_calls": "calls",
                                                       "reasoning_content": "thoughts", "scored": "counts"})
    assert parsed.messages == [{"role": "user", "content": "a"},
                               {"role": "assistant", "content": "b", "tool_calls": [CALLED], "reasoning_content": "c",
                                "scored": False}]
    with pytest.raises(UserError, match=r"data.turn_fields: 'roles' is not a part of a turn \(role, content"):
        SFTData("x", turn_fields={"roles": "who"})


# Rows


@pytest.mark.parametrize("tools", [
    [TOOL], [WEATHER], {"type": "function", **WEATHER}, json.dumps([WEATHER]), json.dumps(TOOL), [json.dumps(WEATHER)],
    [{"type": None, "function": WEATHER}]])
@pytest.mark.parametrize("column", ["tools", "functions"])
def test_tools_are_read_in_any_layout(tools, column):
    conversation = read("messages", {"messages": [USER, REPLY], column: tools})
    assert conversation.tools == [TOOL] and conversation.messages == [USER, REPLY]


def test_columns_next_to_the_turns_are_read():
    row = {"messages": [USER, REPLY], "documents": [{"title": "t", "text": "x"}], "weight": 2,
           "chat_template_kwargs": {"enable_thinking": False}, "tools": "", "functions": None, "system": "sys"}
    assert read("messages", row) == Conversation(
        [{"role": "system", "content": "sys"}, USER, REPLY], [], [{"title": "t", "text": "x"}],
        {"enable_thinking": False}, 2.0)


@pytest.mark.parametrize("extra,reason", [
    ({"tools": "none of them"}, "tools is text, but not JSON"),
    ({"tools": [3]}, "tools has a tool that is not an object"),
    ({"functions": [{"description": "x"}]}, "functions has a tool without a name"),
    ({"tools": [{**WEATHER, "description": "\ud83d"}]}, "lone surrogate"),
    ({"weight": -1}, "weight is not a number of 0 or more"),
    ({"weight": "heavy"}, "weight is not a number of 0 or more"),
    ({"weight": float("nan")}, "weight is not a number of 0 or more"),
    ({"weight": 10**400}, "weight is not a number of 0 or more"),
    ({"chat_template_kwargs": [1]}, "chat_template_kwargs is not an object"),
    ({"chat_template_kwargs": {"x": float("inf")}}, "a nested number that is NaN or too large"),
    ({"chat_template_kwargs": {"x": b""}}, "a nested value of type bytes, which JSON does not have"),
    ({"tools": "[" * 99_999}, "tools is text, but not JSON"),
    ({"tools": "[" * 500 + "]" * 500}, "tools has lists and objects nested more than 100 deep"),
    ({"images": ["a.png"]}, "the row has images, which only SFT and Preference read, with model.images"),
    ({"videos": ["a.mp4"]}, "the row has videos"),
    ({"audios": "a.wav"}, "the row has audios"),
    ({"messages": [{**USER, "content": "<image>\nask"}, REPLY], "image": "a.png"}, "the row has images"),
    ({"kto_tag": False}, "kto_tag is false"),
])
def test_an_unusable_row_gives_a_reason(extra, reason):
    with pytest.raises(RowProblem, match=reason):
        read("messages", {"messages": [USER, REPLY], **extra})


def test_empty_media_columns_do_not_drop_a_text_row():
    row = {"messages": [{**USER, "content": "What is <image>?"}, REPLY], "images": [], "videos": None, "kto_tag": True}
    assert not read("messages", row).unused
    assert read("messages", {**row, "messages": [USER, REPLY], "image": "a.png"}).unused == ("image",)


def test_unused_keys_of_rows_and_turns_are_listed():
    row = {"instruction": "ask", "input": "", "output": "reply", "category": "x", "id": 0, "note": "", "tags": []}
    assert read("alpaca", row).unused == ("category", "id")
    row = {"conversations": [{"from": "human", "value": "a", "lang": "en"}, {"from": "gpt", "value": "b", "lang": "de"}]
           }
    assert read("sharegpt", row).unused == ("conversations.lang",)
    assert read("text", {"text": "a", "system": "b", "weight": 3}) == Conversation(
        [{"role": "assistant", "content": "a"}], weight=3.0, unused=("system",))


# Layouts


EXCHANGE = ["user: ask", "assistant: reply"]


@pytest.mark.parametrize("row,layout,expected", [
    # LLaMA-Factory
    ({"instruction": "more", "input": "", "output": "end", "history": [["ask", "reply"]], "system": "sys"}, "alpaca",
     ["system: sys", "user: ask", "assistant: reply", "user: more", "assistant: end"]),
    ({"instruction": "ask", "input": "", "chosen": "reply", "rejected": "x"}, "hh-rlhf", EXCHANGE),
    ({"conversations": [{"from": "human", "value": "ask"}], "chosen": {"from": "gpt", "value": "reply"},
      "rejected": {"from": "gpt", "value": "x"}}, "sharegpt", EXCHANGE),
    ({"conversations": [{"from": "human", "value": "ask"}], "chosen": "reply", "rejected": "x"}, "sharegpt",
     EXCHANGE),
    # TRL
    ({"prompt": [USER], "completion": [REPLY]}, "prompt-completion", EXCHANGE),
    ({"prompt": [USER], "completion": []}, "prompt-completion", None),
    ({"prompt": [USER], "chosen": [REPLY], "rejected": [REPLY]}, "hh-rlhf", EXCHANGE),
    ({"prompt": "ask", "chosen": [USER, REPLY], "rejected": [USER, REPLY]}, "hh-rlhf", EXCHANGE),
    ({"prompt": [USER], "chosen": [USER, REPLY]}, "hh-rlhf", EXCHANGE),
    ({"prompt": [{"role": "system", "content": "sys"}], "chosen": [USER, REPLY]}, "hh-rlhf",
     ["system: sys", "user: ask", "assistant: reply"]),
    ({"question": "ask", "system": "sys", "chosen": "reply", "rejected": "x"}, "hh-rlhf",
     ["system: sys", "user: ask", "assistant: reply"]),
    # transcripts
    ({"chosen": "\n\nHuman: a\n\nAssistant: b\n\nHuman: c\n\nAssistant: d", "rejected": ""}, "hh-rlhf",
     ["user: a", "assistant: b", "user: c", "assistant: d"]),
    ({"prompt": "\n\nHuman: a\n\nAssistant: b\n\nHuman: c\n\nAssistant:", "chosen": " d", "rejected": ""}, "hh-rlhf",
     ["user: a", "assistant: b", "user: c", "assistant: d"]),
    # lmsys-chat-1m
    ({"conversation_id": "x", "conversation": [USER, REPLY]}, "conversation", EXCHANGE),
])
def test_rows_of_other_trainers_are_detected_and_read(row, layout, expected):
    assert detect_format(row, "f:1") == layout
    if expected is None:
        with pytest.raises(RowProblem):
            read(layout, row)
    else:
        assert [f"{m['role']}: {m['content']}" for m in read(layout, row).messages] == expected


def test_moss_tool_calls_and_thoughts_are_read():
    messages = read("moss", PLUGINS).messages
    assert [m["content"] for m in messages if m["role"] == "user"] == ["ask 1", "ask 2", "ask 10"]
    assert messages[1:4] == [
        {"role": "assistant", "content": "", "reasoning_content": "I look it up.", "tool_calls": [
            {"type": "function", "function": {"name": "Search", "arguments": '"a (b), c"'}},
            {"type": "function", "function": {"name": "Calculate", "arguments": '"1+1"'}}]},
        {"role": "tool", "content": "Search => x"},
        {"role": "assistant", "content": "reply 1"},
    ]


def test_xtuner_output_with_loss_chooses_the_targets():
    row = {"conversation": [{"system": "", "input": "a", "output": "b", "output_with_loss": False}]}
    assert read("conversation", row).messages == [
        {"role": "user", "content": "a"}, {"role": "assistant", "content": "b", "scored": False}]


def test_openai_batch_rows_are_joined_with_their_response():
    body = {"model": "m", "messages": [USER], "tools": [TOOL]}
    answer = {"role": "assistant", "content": None, "tool_calls": [CALL]}
    row = {"custom_id": "1", "body": body, "response": {"status_code": 200, "body": {"choices": [{"message": answer}]}}}
    conversation = read("openai-batch", row)
    assert conversation.messages == [USER, {"role": "assistant", "content": "", "tool_calls": [CALLED]}]
    assert conversation.tools == [TOOL] and conversation.unused == ("body.model",)
    assert read("openai-batch", {"custom_id": "1", "body": json.dumps(body)}).messages == [USER]
    with pytest.raises(RowProblem, match="response has no answer"):
        read("openai-batch", {**row, "response": {"status_code": 400, "body": {"error": {"message": "x"}}}})


def test_a_bare_list_of_turns_is_a_row(tmp_path):
    (tmp_path / "a.jsonl").write_text(json.dumps([USER, REPLY]) + "\n[]\n")
    (tmp_path / "a.json").write_text(json.dumps([[USER, REPLY], []]))
    (tmp_path / "b.json").write_text(json.dumps({"data": [[USER, REPLY], []]}))
    for name in ("a.jsonl", "a.json", "b.json"):
        rows = [row.values for row in read_file(str(tmp_path / name))]
        assert rows == [{"messages": [USER, REPLY]}, {"messages": []}]
    (tmp_path / "one.json").write_text(json.dumps([USER, REPLY]))  # one conversation is not a list of conversations
    assert [row.values for row in read_file(str(tmp_path / "one.json"))] == [USER, REPLY]


# Whole datasets


def test_the_report_lists_unused_columns(spm_folder, write_jsonl):
    rows = [{"instruction": f"ask {n}", "output": f"reply {n}", "category": "x", **({"id": n} if n % 2 else {})}
            for n in range(12)]
    data = SFTData(write_jsonl(rows), tokenizer=spm_folder)
    data.setup("fit")
    source = next(iter(data.report["sources"].values()))
    assert source["not_used"] == {"category": 12, "id": 6}
    assert "  not used: category (12 rows), id (6 rows)\n" in render_table(data.report)
    assert not any(key.startswith("unused") for key in source)


def test_data_columns_reads_items_of_lists(spm_folder, write_jsonl):
    """As HuggingFaceM4/ChartQA and other datasets of questions with a list of answers have them."""
    path = write_jsonl([{"query": "ask", "label": ["reply"]}, {"query": "ask", "label": ["reply", "other"]}])
    fields = {"tokenizer": spm_folder, "shuffle": False}
    data = SFTData(path, columns={"query": "prompt", "label.0": "completion"}, **fields)
    data.setup("fit")
    source = next(iter(data.report["sources"].values()))
    assert source["format"] == "prompt-completion" and source["not_used"] == {"label": 1}
    first, second = (data.items("train")[index] for index in (0, 1))
    plain = SFTData(write_jsonl([{"prompt": "ask", "completion": "reply"}], "plain.jsonl"), **fields)
    plain.setup("fit")
    assert first["input_ids"].tolist() == second["input_ids"].tolist() == plain.items("train")[0]["input_ids"].tolist()
    with pytest.raises(UserError, match="no column 'label.1', which `columns` renames to 'completion'"):
        SFTData(path, columns={"query": "prompt", "label.1": "completion"}, **fields).setup("fit")


def test_data_columns_reads_nested_objects(spm_folder, write_jsonl):
    turns = {"turn_1": {"who": "Kunde", "said": "ask"}, "turn_2": {"who": "gpt", "said": "reply"}}
    rows = [{"chat": {"messages": turns, "lang": "de"}, "meta": {"sys": "sys"}}] * 3
    path = write_jsonl(rows)
    fields = {"tokenizer": spm_folder, "turn_fields": {"role": "who", "content": "said"}, "roles": {"Kunde": "user"}}
    data = SFTData(path, columns={"chat.messages": "messages", "meta.sys": "system"}, **fields)
    data.setup("fit")
    source = next(iter(data.report["sources"].values()))
    assert source["format"] == "messages" and source["rows_kept"] == 3 and source["not_used"] == {"chat": 3}
    with pytest.raises(UserError, match="no column 'chat.turns', which `columns` renames to '.*'; .* are chat, meta"):
        SFTData(path, columns={"chat.turns": "messages"}, **fields).setup("fit")
