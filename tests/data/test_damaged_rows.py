"""A value of the wrong type anywhere in a row gives a conversation or one reason, never a traceback."""

import copy
from itertools import pairwise

import pytest

from lmmods.data.read.conversation import Conversation, RowProblem
from lmmods.data.read.formats import read_conversation
from tests.data.test_turns import LLAMA_FACTORY, PARALLEL, PLUGINS, REPLY, TOOL, USER, WEATHER, read

WRONG = [None, True, 0, -1.5, float("nan"), 10**30, "", "x", "\ud83d", "[]", '{"a": 1}', "[" * 5000, [], [None], [[1]],
         ["x"], {}, {"a": None}, {"role": "user"}, [{"role": "user", "content": "x"}]]


def list_paths(node: object, path: tuple = ()):
    yield path
    for key, value in node.items() if isinstance(node, dict) else enumerate(node) if isinstance(node, list) else ():
        yield from list_paths(value, (*path, key))


def replace_value(row: dict, path: tuple, value: object) -> dict:
    row = copy.deepcopy(row)
    node = row
    for key in path[:-1]:
        node = node[key]
    node[path[-1]] = copy.deepcopy(value)
    return row


def assert_well_formed(conversation: Conversation) -> None:
    assert conversation.messages
    for message in conversation.messages:
        assert message["role"] in ("system", "user", "assistant", "tool")
        for key, value in message.items():
            expected = {"tool_calls": list, "scored": bool}.get(key, str)
            assert isinstance(value, expected), (key, value)
        for call in message.get("tool_calls", []):
            assert call["type"] == "function" and isinstance(call["function"]["name"], str)
            assert isinstance(call["function"]["arguments"], dict | str)
    assert all(isinstance(tool["function"]["name"], str) for tool in conversation.tools)
    assert isinstance(conversation.template_kwargs, dict) and conversation.weight >= 0
    assert all(isinstance(document, dict) for document in conversation.documents)


@pytest.mark.parametrize("layout,row", [
    ("messages", {**PARALLEL, "documents": [{"text": "x"}], "chat_template_kwargs": {"a": 1}, "weight": 1.0}),
    ("sharegpt", {**LLAMA_FACTORY, "chosen": {"from": "gpt", "value": "x"}, "images": [], "image": "", "kto_tag": 1}),
    ("messages", {"messages": [{"human": "a", "gpt": "b", "thought": "c", "weight": 1, "masked": False},
                               {"role": "user", "content": [{"type": "text", "text": "x"}]}]}),
    ("alpaca", {"instruction": "a", "input": "b", "output": "c", "history": [["d", "e"]], "functions": [WEATHER]}),
    ("prompt-completion", {"prompt": [USER], "completion": [REPLY]}),
    ("hh-rlhf", {"prompt": [USER], "chosen": [USER, REPLY], "rejected": [REPLY]}),
    ("hh-rlhf", {"prompt": "\n\nHuman: a\n\nAssistant:", "chosen": "b", "instruction": "x"}),
    ("moss", {**PLUGINS, "meta_instruction": "x"}),
    ("moss-text", {"plain_text": "[Human]: ask<eoh> [MOSS]: reply<eoa>", "prefix": "sys"}),
    ("conversation", {"conversation": [{"system": "a", "input": "b", "output": "c", "output_with_loss": True}]}),
    ("openai-batch", {"custom_id": "1", "body": {"messages": [USER], "tools": [TOOL]},
                      "response": {"body": {"choices": [{"message": REPLY}]}}}),
])
def test_a_wrong_value_anywhere_gives_a_conversation_or_a_reason(layout, row):
    assert_well_formed(read(layout, row))
    paths = [path for path in list_paths(row) if path]
    for path, value in ((path, value) for path in paths for value in WRONG):
        damaged = replace_value(row, path, value)
        try:
            assert_well_formed(read_conversation(layout, damaged, {}))
        except RowProblem as problem:
            assert str(problem) and len(str(problem)) < 200
    for first, second in pairwise(paths):
        if second[: len(first)] != first:
            damaged = replace_value(replace_value(row, first, None), second, [[1]])
            try:
                assert_well_formed(read_conversation(layout, damaged, {}))
            except RowProblem:
                pass
