"""Answers of several turns: ids are only appended, tool results have no label, and a failure affects one answer."""

import json
from typing import Any, NamedTuple

import numpy as np
import pytest
from transformers.utils import get_json_schema

from lmmods.core.errors import UserError
from lmmods.core.generation_config import sampling_uniforms
from lmmods.core.labels import IGNORED
from lmmods.data.grpo import Prompt
from lmmods.recipe.tasks.grpo import GRPOFields
from lmmods.recipe.trust import trusting
from lmmods.rollouts.maker import metrics
from lmmods.rollouts.rollout import Answer, Group, Rollout, read_rollout
from lmmods.rollouts.turns import FORM, UNKNOWN, Call, Turns, read_calls, read_environment_facts
from tests.rollouts import hostile_environments as hostile
from tests.rollouts.chats_with_tools import END, TEMPLATE, ScriptedPolicy, prompts, with_tools

PATH = "tests.rollouts.hostile_environments.Counter"
COUNTER = hostile.Counter()
TOOLS = [get_json_schema(tool) for tool in (COUNTER.add, COUNTER.later, COUNTER.misbehave)]


def call(name: str = "add", **arguments: Any) -> str:
    return f"<tool_call>{json.dumps({'name': name, 'arguments': arguments or {'number': 2}})}</tool_call>"


# ---------------------------------------------------------------------------------------------------------------------
# Calls

ARGUMENTS = {"word": "a", "n": [1]}
HERMES = '<tool_call>\n{"name": "f", "arguments": {"word": "a", "n": [1]}}\n</tool_call>'


@pytest.mark.parametrize(("text", "calls"), [
    (HERMES, [Call("f", ARGUMENTS)]),
    (f"I look. {HERMES}\n{HERMES}", [Call("f", ARGUMENTS)] * 2),
    (f"<think>{HERMES}</think> Nothing.", []),
    (f"<think>a</think>{HERMES}", [Call("f", ARGUMENTS)]),
    ('{"name": "f", "parameters": {"word": "a", "n": [1]}}', [Call("f", ARGUMENTS)]),
    ('<|python_tag|>{"name": "f", "parameters": {"word": "a", "n": [1]}}', [Call("f", ARGUMENTS)]),
    ('[TOOL_CALLS][{"name": "f", "arguments": {}}, {"name": "g", "arguments": {"n": 1}}]',
     [Call("f", {}), Call("g", {"n": 1})]),
    ('{"name": "f", "arguments": "{\\"n\\": 1}"}', [Call("f", {"n": 1})]),
    # answers
    ("Nothing.", []), ("", []), ('{"name": "Ada", "age": 36}', []), ("[1, 2]", []), ("[]", []), ("{broken", []),
    # calls that cannot be made
    ("<tool_call>[1]</tool_call>", [Call(UNKNOWN, {}, FORM)]),
    ('<tool_call>{"name": 3, "arguments": {}}</tool_call>', [Call(UNKNOWN, {}, FORM)]),
    ('<tool_call>{"name": "f", "arguments": 3}</tool_call>', [Call("f", {}, FORM)]),
    ('<tool_call>{"name": "f", "arguments": "{"}</tool_call>', [Call("f", {}, f"{FORM}, in JSON: Expecting property "
     "name enclosed in double quotes: line 1 column 2 (char 1)")]),
    ("<tool_call>{</tool_call>", [Call(UNKNOWN, {}, f"{FORM}, in JSON: Expecting property name enclosed in double "
     "quotes: line 1 column 2 (char 1)")]),
    ("[TOOL_CALLS]f", [Call(UNKNOWN, {}, FORM)]), ("[TOOL_CALLS][]", [Call(UNKNOWN, {}, FORM)])])
def test_tool_calls_are_parsed_from_any_template(text, calls):
    assert read_calls(text) == calls


def test_deeply_nested_json_is_an_unreadable_call():
    [parsed] = read_calls(f"<tool_call>{'[' * 100_000}</tool_call>")
    assert parsed.name == UNKNOWN and parsed.problem.startswith(FORM)


# ---------------------------------------------------------------------------------------------------------------------
# Conversations


class Conversation(NamedTuple):
    prompts: list[Prompt]
    answers: list[Answer]
    policy: ScriptedPolicy
    data: Any

    def ids(self, index: int, size: int = 1) -> list[int]:
        return [*self.prompts[index // size].ids, *self.answers[index].tokens.tolist()]

    def text(self, index: int) -> str:
        return self.data.tokenizer.decode(self.answers[index].tokens)


@pytest.fixture(scope="module")
def folder(tokenizer_folder, tmp_path_factory):
    return with_tools(tokenizer_folder, tmp_path_factory.mktemp("tokenizer"))


@pytest.fixture
def talk(folder, tmp_path):
    """Return a function that answers prompts with a script."""

    def run(say, rows=({},), size: int = 1, seed: int | None = None, limit: int = 400, tools=TOOLS, scored: bool = True,
            timeout: float = 20.0, max_turns: int = 8, **fields: Any) -> Conversation:
        task = GRPOFields(config={"model_type": "llama"}, environment=PATH, max_new_tokens=limit,
                          reward_timeout=timeout, max_turns=max_turns)
        data = prompts(folder, tmp_path, list(rows), tools, limit, scored, **fields)
        policy = ScriptedPolicy(data.tokenizer, say)
        data_prompts = [data.prompt("train", index) for index in range(len(rows))]
        uniforms = None if seed is None else sampling_uniforms(seed, range(len(rows)), limit, size)
        with trusting(True):
            turns = Turns(task, data, policy)
        try:
            return Conversation(*turns.answer(data_prompts, size, uniforms, {"drawing": 0.0}), policy, data)
        finally:
            turns.close()

    return run


def counts(turns: int, calls: int, failures: int = 0, cut: int = 0) -> dict[str, int]:
    return {"turns": turns, "calls": calls, "failures": failures, "cut": cut}


def test_a_conversation_has_the_ids_of_the_chat_template(talk):
    turns = [f"First. {call(number=2)}", f"{call(number=3)}{call('later', number=4, times=[2])}", "It is 13."]
    chat = talk(lambda turn, _: turns[turn], [{"target": 13}])
    [answer] = chat.answers
    messages = [{"role": "user", "content": "Go."},
                {"role": "assistant", "content": turns[0]}, {"role": "tool", "content": "2"},
                {"role": "assistant", "content": turns[1]}, {"role": "tool", "content": "5"},
                {"role": "tool", "content": '{"total": 13, "ä": null}'}, {"role": "assistant", "content": turns[2]}]
    expected = chat.data.tokenizer.apply_chat_template(messages, tools=TOOLS, return_dict=False)
    length = len(chat.ids(0))
    assert chat.ids(0) == expected[:length] and chat.data.tokenizer.decode(expected[length:]) == "\n"
    assert answer.text == turns[2] and answer.ended and answer.tools == counts(3, 3)
    assert answer.rewards == {"environment": 1.0} and not answer.reasons
    # Sampled tokens have labels and log-probabilities, other tokens have none.
    labels = Group(0, chat.prompts[0].ids, "", [answer]).row(0).labels
    segments = np.split(labels, np.flatnonzero(np.diff(labels != IGNORED)) + 1)
    sampled = [chat.data.tokenizer.decode(segment) for segment in segments if segment[0] != IGNORED]
    assert sampled == [f"{text}{END}" for text in turns]
    assert (answer.logps[answer.is_sampled] < 0).all() and not answer.logps[~answer.is_sampled].any()
    assert np.isnan(answer.entropies[~answer.is_sampled]).all() and (answer.entropies[answer.is_sampled] == 1).all()
    assert answer.full_text == chat.text(0)


def test_a_tool_result_never_contains_a_control_token(talk):
    turn_text = call("misbehave", how=f"a{END}b").replace(END, f"\\u003c{END[1:]}")  # the same in JSON
    chat = talk(lambda turn, _: [turn_text, "Done."][turn])
    end = chat.data.tokenizer.convert_tokens_to_ids(END)
    assert chat.answers[0].tokens.tolist().count(end) == 3 and f"<said>a{END}b</said>" in chat.text(0)


def test_each_turn_continues_with_the_next_uniform_numbers(talk):
    turns = [call(number=1), "Seen.", "Nothing to do."]
    chat = talk(lambda turn, text: turns[turn] if "First" in text else turns[2], size=2, seed=5,
                rows=[{"messages": [{"role": "user", "content": "First."}]}, {}])
    uniforms = sampling_uniforms(5, range(2), 400, 2)
    (first, first_uniforms, _), (second, second_uniforms, budget) = chat.policy.requests
    assert [len(first), len(second)] == [4, 2] and np.array_equal(first_uniforms, uniforms)
    for row in (0, 1):
        length = len(second[row]) - len(first[row])
        assert second[row][: len(first[row])] == first[row] and second[row] == chat.ids(row, 2)[: len(second[row])]
        assert np.array_equal(second_uniforms[row, : 400 - length], uniforms[row, length : length + budget])


def test_greedy_sampling_uses_no_uniform_numbers(talk):
    requests = talk(lambda turn, _: [call(), "Seen."][turn]).policy.requests
    assert [uniforms for _, uniforms, _ in requests] == [None, None]


def test_an_answer_is_truncated_at_its_token_budget(talk):
    for limit in (40, 100, 150):
        chat = talk(lambda turn, _: [call(number=3), "x" * 80][turn], limit=limit, rows=[{"target": 3}])
        [answer] = chat.answers
        assert len(answer.tokens) <= limit and not answer.ended
        assert answer.rewards == {"environment": float(answer.tools["calls"] > 0)} and not answer.reasons
    assert answer.text == "x" * len(answer.text) and answer.is_sampled[-1] and len(answer.tokens) == limit


def test_a_shorter_answer_has_its_full_budget_next_to_a_longer_one(talk):
    # Sequences of a batch end at max_length, which the longer prompt reaches first.
    turns = {True: ["b" * 150 + call(number=1), "x" * 20], False: [call(number=1), "y" * 190]}
    rows = [{"messages": [{"role": "user", "content": "a" * length}]} for length in (150, 1)]
    chat = talk(lambda turn, text: turns["aa" in text][turn], rows, seed=1, limit=300, max_length=500)
    assert [answer.tools for answer in chat.answers] == [counts(2, 1)] * 2
    assert [answer.text for answer in chat.answers] == ["x" * 20, "y" * 190]
    uniforms = sampling_uniforms(1, range(2), 300)[1]
    (_, first_uniforms, _), *later_requests = [(len(batch[-1]) - len(chat.prompts[1].ids), row[-1], budget)
                                               for batch, row, budget in chat.policy.requests]
    assert np.array_equal(first_uniforms, uniforms) and len(later_requests) > 1
    assert all(np.array_equal(row[: 300 - num_used], uniforms[num_used : num_used + budget])
               for num_used, row, budget in later_requests)
    assert all(len(prompt) + budget <= 500 for batch, _, budget in chat.policy.requests for prompt in batch)


def test_max_turns_limits_the_turns(talk):
    chat = talk(lambda turn, _: call(number=1), rows=[{"target": 2}], max_turns=3)
    [answer] = chat.answers
    assert answer.tools == counts(3, 2) and not answer.ended and answer.rewards == {"environment": 1.0}
    assert answer.text == call(number=1)


@pytest.mark.parametrize(("first_turn", "error"), [
    ("<tool_call>{</tool_call>", FORM), (call("subtract"), "there is no tool subtract, only add, later, misbehave"),
    (call("reset", target=2), "there is no tool reset"), (call("_private"), "there is no tool _private"),
    (call("misbehave", how="raises"), "ValueError: no"), (call(numbers=2), "TypeError: Counter.add()")])
def test_a_failed_call_is_reported_to_the_model(talk, first_turn, error):
    chat = talk(lambda turn, _: [first_turn, "So be it."][turn])
    [answer] = chat.answers
    assert answer.tools == counts(2, 1, 1) and answer.ended and not answer.reasons
    report = json.loads(chat.text(0).partition("<said>")[2].partition("</said>")[0])
    assert list(report) == ["error"] and report["error"].startswith(error)


@pytest.mark.parametrize(("how", "reason"), [("sleeps", "took longer than 1 s"),
                                             ("exits", "ended its process with status 3")])
def test_a_tool_that_hangs_or_crashes_ends_its_answer(talk, how, reason):
    first_turn = call(number=1) + call("misbehave", how=how) + call(number=1)
    chat = talk(lambda turn, text: [first_turn if "bad" in text else call(number=1), "Done."][turn], timeout=1.0,
                rows=[{"messages": [{"role": "user", "content": word}], "target": 1} for word in ("bad", "good")])
    bad, good = chat.answers
    assert bad.tools == counts(1, 2, 1) and bad.reasons == {"environment": f"misbehave: {reason}"} and not bad.ended
    assert bad.rewards == {"environment": None} and bad.text == first_turn
    assert good.rewards == {"environment": 1.0} and good.ended and not good.reasons


def test_a_long_result_is_truncated_to_half_of_the_tokens_left(talk):
    chat = talk(lambda turn, _: [call("misbehave", how="floods") + call(number=1), "Done."][turn], limit=500)
    [answer] = chat.answers
    assert answer.tools == counts(2, 2, cut=1) and answer.ended
    flood, one = (part.partition("</said>")[0] for part in chat.text(0).split("<said>")[1:])
    start, _, note = flood.rpartition("\n")
    assert start and ("flood " * 99).startswith(start) and one == "1"
    assert note == f"[{600_000 - len(start)} characters left out]"
    num_added, before = (~answer.is_sampled).sum(), answer.is_sampled.argmin()
    assert (500 - before) // 2 - 3 <= num_added <= (500 - before) // 2


def test_the_text_of_reset_follows_the_prompt(talk):
    chat = talk(lambda turn, _: "Yes.", [{"hint": " Be brief."}, {}], size=2)
    template = chat.data.tokenizer.apply_chat_template
    for prompt, content in zip(chat.prompts, ("Go. Be brief.", "Go."), strict=True):
        messages = [{"role": "user", "content": content}]
        assert prompt.ids == template(messages, tools=TOOLS, add_generation_prompt=True, return_dict=False)
        assert prompt.conversation.messages == messages
    assert [prompt for prompt, _, _ in chat.policy.requests] == [[chat.prompts[n // 2].ids for n in range(4)]]


@pytest.mark.parametrize(("hint", "reason"), [
    ("raises", "LookupError: no such hint"),
    ("x" * 2000, "the prompt has 2050 tokens with the added text, which leaves no space for an answer"),
    ("\U0010ffff", "a turn contains U+10FFFE or U+10FFFF, which are not characters")])
def test_an_answer_whose_reset_fails_has_no_reward(talk, hint, reason):
    chat = talk(lambda turn, _: "Yes.", [{"hint": hint}, {"target": 0}])
    bad, good = chat.answers
    assert bad.reasons == {"environment": f"reset: {reason}"} and not len(bad.tokens) and not bad.ended
    assert good.rewards == {"environment": 1.0} and chat.prompts[0].ids == chat.prompts[1].ids


def test_all_answers_to_a_prompt_must_have_the_same_prompt(talk):
    chat = talk(lambda turn, _: "Yes.", [{"hint": "pid"}], size=3)
    other_text = {"environment": "reset returned another text than for an earlier answer to the prompt"}
    assert [answer.reasons for answer in chat.answers] == [{}, other_text, other_text]
    assert " Pid: " in chat.prompts[0].conversation.messages[-1]["content"]


@pytest.mark.parametrize(("total", "reason"), [(666, "returned nan"), (667, "RuntimeError: no reward"), (668, None)])
def test_a_failed_environment_reward_has_a_reason(talk, total, reason):
    [answer] = talk(lambda turn, _: [call(number=total), "Done."][turn]).answers
    assert answer.rewards == {"environment": None}
    assert answer.reasons == ({} if reason is None else {"environment": reason})


def test_an_environment_may_have_no_reward(talk):
    [answer] = talk(lambda turn, _: [call(number=666), "Done."][turn], scored=False).answers
    assert answer.rewards == {} and answer.reasons == {}


def test_without_tools_nothing_is_a_call(talk):
    chat = talk(lambda turn, _: call(), tools=[])
    assert chat.answers[0].ended and chat.answers[0].tools == counts(1, 0)


# ---------------------------------------------------------------------------------------------------------------------
# At the start, and in files


def test_a_template_with_an_unsupported_call_format_is_rejected(tokenizer_folder, tmp_path):
    other = TEMPLATE.replace("<tool_call>", "<call>").replace("</tool_call>", "</call>")
    data = prompts(with_tools(tokenizer_folder, tmp_path / "tokenizer", other), tmp_path, [{}], TOOLS, 100)
    task = GRPOFields(config={"model_type": "llama"}, environment=PATH)
    with pytest.raises(UserError, match=r"writes a tool call as '<call>\{.*which is not supported"):
        Turns(task, data, ScriptedPolicy(data.tokenizer, lambda *_: ""))


@pytest.mark.parametrize(("old", "new", "message"), [
    ("{% for tool in tools %}[{{ tool.function.name }}]{% endfor %}", "", "the chat template does not render them"),
    ("message.tool_calls or []", "[]", "the chat template does not render tool calls"),
    ("{{ message.content }}</said>", "{{ raise_exception('no tools') }}", "the chat template rejects")])
def test_a_template_that_does_not_render_tools_is_rejected(tokenizer_folder, tmp_path, old, new, message):
    assert old in TEMPLATE
    with pytest.raises(UserError, match=f"^model.environment has tools, but {message}"):
        prompts(with_tools(tokenizer_folder, tmp_path / "tokenizer", TEMPLATE.replace(old, new)), tmp_path, [{}], TOOLS,
                100)


def test_a_named_template_is_rejected_with_tools(folder, tmp_path):
    with pytest.raises(UserError, match=r"^model\.environment has tools, but template chatml does not support tools"):
        prompts(folder, tmp_path, [{}], TOOLS, 100, template="chatml")


def test_tools_are_part_of_the_rows_identity(folder, tmp_path):
    first, second, third = (prompts(folder, tmp_path, [{}], tools, 100) for tools in (TOOLS, TOOLS[:1], []))
    assert first.identity()["environment"] != second.identity()["environment"] and "environment" not in third.identity()
    texts = [data.tokenizer.decode(data.prompt("train", 0).ids) for data in (first, second, third)]
    assert "[add][later][misbehave]" in texts[0] and "[add]<" in texts[1] and "system" not in texts[2]


def test_rows_with_their_own_tools_are_dropped(folder, tmp_path):
    data = prompts(folder, tmp_path, [{"tools": TOOLS[:1]}, {}], TOOLS, 100)
    assert data.num_prompts("train") == 1 and "the row has its own tools" in str(data.report)


@pytest.mark.slow
def test_a_run_without_any_reward_is_rejected():
    task = GRPOFields(config={"model_type": "llama"}, environment="tests.rollouts.hostile_environments.Silent")
    with trusting(True), pytest.raises(UserError, match="Silent has no method get_reward, and model.rewards is empty"):
        read_environment_facts(task)
    task = GRPOFields(config={"model_type": "llama"}, environment=PATH,
                      rewards=[{"name": "exact_match", "label": "environment"}])
    with trusting(True), pytest.raises(UserError, match=r"model\.rewards\[0\] is named environment"):
        read_environment_facts(task)


def test_turns_are_stored_in_rollout_files_and_metrics(talk, tmp_path):
    chat = talk(lambda turn, _: [call(number=1) + call("nothing"), "Seen."][turn], [{}, {}])
    groups = [Group(index, prompt.ids, "a", [answer, answer], np.zeros(2, np.float32))
              for index, (prompt, answer) in enumerate(zip(chat.prompts, chat.answers, strict=True))]
    rollout = Rollout(3, groups)
    rollout.write(tmp_path)
    loaded = read_rollout(tmp_path, rollout.name)
    for group, expected_group in zip(loaded.groups, groups, strict=True):
        for answer, expected in zip(group.answers, expected_group.answers, strict=True):
            assert (answer.tools, answer.full_text, answer.text) == (expected.tools, expected.full_text, "Seen.")
            assert np.array_equal(answer.is_sampled, expected.is_sampled)
            assert np.array_equal(answer.tokens, expected.tokens)
    line = json.loads((tmp_path / "step=3.jsonl").read_text().splitlines()[0])
    assert line["calls"] == 2 and line["failures"] == 1 and line["conversation"] == chat.text(0)
    values = metrics(loaded)
    assert (values["turns"], values["tool_calls"], values["tool_failures"], values["tool_cuts"]) == (2, 2, 0.5, 0)
