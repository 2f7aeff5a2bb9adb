"""Chat templates as models have them: which tokens are targets, and that a response follows the inference prompt.

The oracle is transformers: `apply_chat_template`, and its assistant mask from {% generation %} marks. The templates are
short ones written here, each with one habit of a published family.
"""

import json

import pytest
from transformers import AutoTokenizer

from lmmods.core.errors import UserError
from lmmods.data.encode.chat_renderer import ChatTemplateRenderer
from lmmods.data.encode.encoder import TextEncoder
from lmmods.data.read.conversation import Conversation, RowProblem
from lmmods.data.sft import SFTData
from lmmods.runs.inspect import compare_prompt
from tests.data.test_sft import build

TURN = "<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n"
CALLS = ("{% for c in m.tool_calls or [] %}<call>{{ c.function.name }} {{ c.function.arguments | tojson }}</call>"
         "{% endfor %}")
TOOLS = "{% if tools %}<|im_start|>tools\n{{ tools | tojson }}<|im_end|>\n{% endif %}"
OPEN = "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
ANSWER = "{% generation %}{{ m.content }}" + CALLS + "<|im_end|>{% endgeneration %}{{ '\n' }}"
MARKED = (TOOLS + "{% for m in messages %}<|im_start|>{{ m.role }}\n{% if m.role == 'assistant' %}" + ANSWER
          + "{% else %}{{ m.content }}<|im_end|>\n{% endif %}{% endfor %}" + OPEN)
THINKS = "<think>\n{{ m.reasoning_content or '' }}\n</think>\n\n"
TEMPLATES = {
    # chatml, Qwen 2.5: nothing changes after a turn
    "steady": MARKED.replace("{% generation %}", "").replace("{% endgeneration %}", ""),
    "marked": MARKED,
    "marked text alone": MARKED.replace("<|im_end|>{% endgeneration %}", "{% endgeneration %}<|im_end|>"),
    # Qwen 3, GLM, gpt-oss: the reasoning of earlier turns is removed
    "forgets": (TOOLS + "{% for m in messages %}<|im_start|>{{ m.role }}\n{% if m.role == 'assistant' and loop.last %}"
                + THINKS + "{% endif %}{{ m.content }}" + CALLS + "<|im_end|>\n{% endfor %}" + OPEN
                + "{% if add_generation_prompt and thinking is defined and not thinking %}<think>\n\n</think>\n\n"
                "{% endif %}"),
    # Mistral: the system turn comes before the last question, until that is answered
    "moves": ("{% for m in messages %}{% if m.role == 'user' %}{% if loop.last and messages[0].role == 'system' %}"
              "<s>{{ messages[0].content }} {% endif %}<|im_start|>{{ m.content }}<|im_end|>"
              "{% elif m.role != 'system' %}{{ m.content }}" + CALLS + "</s>{% endif %}{% endfor %}"),
    # Phi 3: an end token after each text, whoever had the last word
    "closes": "{% for m in messages %}" + TURN + "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n"
              "{% else %}{{ eos_token }}{% endif %}",
    # GLM: a turn has no terminator
    "open": "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}{% endfor %}" + OPEN,
    # DeepSeek: the prompt opens <think>, answers do not; arguments are strings
    "opens": ("{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}{% for c in m.tool_calls or [] %}"
              "{{ '<call>' + c.function.arguments }}{% endfor %}<|im_end|>\n{% endfor %}" + OPEN
              + "{% if add_generation_prompt %}<think>\n{% endif %}"),
    # Command A: an answer is opened after each text, whoever had the last word
    "always opens": "{% for m in messages %}" + TURN + "{% endfor %}<|im_start|>assistant\n",
    # Gemma 4: the prompt closes the reasoning, which turns do not have
    "closed thought": ("{% for m in messages %}" + TURN.replace("{{ m.content }}", "{{ m.content }}" + CALLS)
                       + "{% endfor %}" + OPEN + "{% if add_generation_prompt %}<think>\n</think>{% endif %}"),
    # Solar: a turn ends only with the text that opens the next
    "no end": "{% for m in messages %}\n{{ m.role }}: {{ m.content }}{% endfor %}{% if add_generation_prompt %}\n"
              "assistant: {% endif %}",
}
SYSTEM, TOOL = {"role": "system", "content": "Be kind."}, {"role": "tool", "content": "3", "tool_call_id": "1"}
SPEC = {"type": "function", "function": {"name": "add", "description": "a sum", "parameters": {"type": "object"}}}


def user(text):
    return {"role": "user", "content": text}


def answer(text="", **more):
    return {"role": "assistant", "content": text, **more}


CALL = answer(tool_calls=[{"type": "function", "function": {"name": "add", "arguments": {"a": 1, "b": 2}}}] * 2)
CHATS = {
    "one turn": ([user("hello"), answer("how are you?")], []),
    "many turns": ([user("hello"), answer("how are you?"), user("again"), answer("The sum."), user("a"), answer("b")],
                   []),
    "system": ([SYSTEM, user("hello"), answer("how are you?"), user("again"), answer("The sum is 42.")], []),
    "tools": ([SYSTEM, user("Add 1 and 2."), CALL, TOOL, answer("The sum is 3."), user("again"), CALL, TOOL,
               answer("3")], [SPEC]),
    "reasoning": ([user("hello"), answer("Hi.", reasoning_content="A greeting."), user("again"),
                   answer("Hi again.", reasoning_content="Another one.")], []),
}


@pytest.fixture
def renderer(chat_folder):
    """A function that returns the tokenizer of a template and its renderer."""
    def make(source, **kwargs):
        tokenizer = AutoTokenizer.from_pretrained(chat_folder)
        tokenizer.chat_template = TEMPLATES.get(source, source)
        return tokenizer, ChatTemplateRenderer(tokenizer, TextEncoder(tokenizer), tokenizer.eos_token, kwargs)

    return make


def join_texts(segments):
    return "".join(segment.text for segment in segments)


def response_texts(row):
    indices = sorted({segment.response for segment in row.segments} - {-1})
    return [join_texts([segment for segment in row.segments if segment.response == index]) for index in indices]


WITHOUT_TOOLS = ("closes", "open", "opens", "moves", "always opens", "no end")  # without tool calls at inference


@pytest.mark.parametrize(("name", "chat"), [(name, chat) for name in TEMPLATES for chat in CHATS
                                            if chat != "tools" or name not in WITHOUT_TOOLS])
def test_each_response_follows_the_inference_prompt(renderer, name, chat):
    tokenizer, chat_renderer = renderer(name)
    messages, tools = CHATS[chat]
    positions = [position for position, message in enumerate(messages) if message["role"] == "assistant"]
    for turns in ("all", "split", "last"):
        rows = chat_renderer.rows(Conversation(messages, tools), turns)
        result = [(row, response) for row in rows for response in response_texts(row)]
        assert len(result) == (1 if turns == "last" else len(positions))
        assert turns == "all" or len(rows) == len(result)
        for position, (row, response) in zip(positions[-len(result):], result, strict=True):
            prompt = tokenizer.apply_chat_template(messages[:position], tools=tools or None, tokenize=False,
                                                   add_generation_prompt=True)
            assert join_texts(chat_renderer.prompt(Conversation(messages[:position], tools))) == prompt
            visible_prompt = prompt.removesuffix("<think>\n") if name == "opens" else prompt
            text = join_texts(row.segments)
            assert text.startswith(visible_prompt) and text[len(visible_prompt):].startswith(response)
            assert messages[position]["content"] in response and "<|im_start|>assistant" not in response
            assert all(call["function"]["name"] in response for call in messages[position].get("tool_calls", []))
            end = {"moves": "</s>", "open": "<|im_start|>"}.get(name, "<|im_end|>")
            assert response.endswith(end) and response.count(end) == 1
            if name == "forgets":
                assert messages[position].get("reasoning_content", "<think>") in response
    is_one_row = len(chat_renderer.rows(Conversation(messages, tools), "all")) == 1
    assert is_one_row == (len(positions) == 1 or name not in ("forgets", "closed thought", "no end")
                          and not (name == "moves" and chat == "system"))
    assert chat_renderer.ends() == {"moves": ["</s>"], "open": ["<|im_start|>"]}.get(name, ["<|im_end|>"])


@pytest.mark.parametrize("chat", CHATS)
def test_generation_marks_give_the_targets_of_transformers(renderer, chat):
    tokenizer, chat_renderer = renderer("marked")
    messages, tools = CHATS[chat]
    encoding = tokenizer.apply_chat_template(messages, tools=tools or None, tokenize=True, return_dict=True,
                                             return_assistant_tokens_mask=True)
    expected = [token for token, mask in zip(encoding["input_ids"], encoding["assistant_masks"], strict=True) if mask]
    row, = chat_renderer.rows(Conversation(messages, tools), "all")
    assert "".join(response_texts(row)) == tokenizer.decode(expected)
    unmarked_rows = renderer("steady")[1].rows(Conversation(messages, tools), "all")  # the same template without marks
    assert [response_texts(unmarked_row) for unmarked_row in unmarked_rows] == [response_texts(row)]
    assert [join_texts(unmarked_row.segments) for unmarked_row in unmarked_rows] == [join_texts(row.segments)]


def test_a_turn_with_scored_false_is_not_a_target(renderer):
    messages = [user("hello"), answer("no", scored=False), user("again"), answer("yes"), user("x"), answer("y")]
    for name in ("steady", "marked", "forgets"):
        rows = renderer(name)[1].rows(Conversation(messages), "all")
        targets = [response for row in rows for response in response_texts(row)]
        assert [text.removesuffix("<|im_end|>").split("\n")[-1] for text in targets] == ["yes", "y"]


def test_template_variables_and_documents_are_rendered_or_reported(renderer):
    tokenizer, chat_renderer = renderer("forgets", thinking=False)
    messages = [user("hello")]
    prompt = join_texts(chat_renderer.prompt(Conversation(messages)))
    assert prompt == tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True,
                                                   thinking=False)
    assert prompt.endswith("</think>\n\n")
    thinking = Conversation(messages, template_kwargs={"thinking": True})
    assert join_texts(chat_renderer.prompt(thinking)).endswith("assistant\n")
    with pytest.raises(RowProblem, match="sets tools, which"):
        chat_renderer.prompt(Conversation(messages, template_kwargs={"tools": []}))
    with pytest.raises(UserError, match="sets messages, which each row sets itself"):
        renderer("steady", messages=[])
    chat = Conversation([user("a"), answer("b", reasoning_content="because")], documents=[{"text": "c"}])
    assert renderer("steady")[1].rows(chat, "all")[0].unshown == ["messages.reasoning_content", "documents"]
    with_documents = renderer("{{ documents | tojson }}" + TEMPLATES["steady"])[1]
    row, = with_documents.rows(chat, "all")
    assert '[{"text": "c"}]' in join_texts(row.segments) and row.unshown == ["messages.reasoning_content"]
    for name in ("closes", "open"):
        with pytest.raises(RowProblem, match="does not render tool calls"):
            renderer(name)[1].rows(Conversation(*CHATS["tools"]), "all")
    assert renderer("opens")[1].rows(Conversation([user("a"), answer("b")]), "all")[0].unlike_inference == 1


def test_a_tag_is_never_split_between_prompt_and_response(renderer):
    """The prompt opens <think>, the answer <tool_call>: they differ from the tag on, not within it."""
    template = TEMPLATES["opens"].replace("{{ '<call>' + c.function.arguments }}", CALLS.replace("call>", "tool_call>"))
    row, = renderer(template)[1].rows(Conversation([user("x"), CALL], [SPEC]), "all")
    assert response_texts(row)[0].startswith("<tool_call>add") and row.unlike_inference == 1


def test_tool_arguments_are_objects_or_strings_as_the_template_needs(renderer):
    for name, expected in (("steady", 'add {"a": 1, "b": 2}</call>'), ("opens", '<call>{"a": 1, "b": 2}')):
        row, = renderer(name)[1].rows(Conversation([user("x"), {**CALL, "content": "add"}], [SPEC]), "all")
        assert expected in response_texts(row)[0]


def test_control_tokens_typed_in_a_text_stay_text(renderer):
    tokenizer, chat_renderer = renderer("steady")
    typed = "<|im_end|>"
    spec = json.loads(json.dumps(SPEC).replace("a sum", typed))
    call = {"type": "function", "function": {"name": "add", "arguments": {typed: typed}}}
    turns = [user(typed), answer(typed, tool_calls=[call]), TOOL, answer("b")]
    row, = chat_renderer.rows(Conversation(turns, [spec]), "all")
    assert join_texts(row.segments).count(typed) == 10
    assert sum(segment.template and segment.text == typed for segment in row.segments) == 5
    ids = TextEncoder(tokenizer).encode_rows([TextEncoder(tokenizer).runs(row.segments)])[0][0]
    assert (ids == tokenizer.convert_tokens_to_ids(typed)).sum() == 5


# Through the data module ---------------------------------------------------------------------------------------------


def decode_rows(data):
    """Return the text and the target text of each row."""
    decode = data.tokenizer.decode
    return [(decode(row["input_ids"]), decode([token for token in row["labels"] if token != -100]))
            for row in data.rows_for_inspection(99)]


@pytest.fixture
def jinja(tmp_path):
    """A function that writes one of the templates to a file."""
    def write(name):
        path = tmp_path / f"{name}.jinja"
        path.write_text(TEMPLATES[name])
        return str(path)

    return write


ROWS = [{"messages": messages} for messages, tools in CHATS.values() if not tools]


@pytest.mark.parametrize("name", ["steady", "forgets", "closes", "open", "opens"])
def test_no_conversation_is_dropped(name, jinja, chat_folder, write_jsonl):
    data = build(write_jsonl(ROWS), chat_folder, template=jinja(name))
    source, = data.report["sources"].values()
    num_responses = sum(message["role"] == "assistant" for row in ROWS for message in row["messages"])
    assert source["rows_dropped"] == 0 and source["rows_read"] == len(ROWS)
    assert source["rows_kept"] == (num_responses if name == "forgets" else len(ROWS))
    assert source["conversations_split"] == (3 if name == "forgets" else 0)
    assert ("became one row for each response" in data.report_table()) == (name == "forgets")
    assert ("opens these answers differently" in data.report_table()) == (name == "opens")
    assert source["terminators_labelled"] == num_responses


@pytest.mark.parametrize("name", ["steady", "marked"])
def test_a_row_that_contains_generation_marks_is_counted(name, jinja, chat_folder, write_jsonl):
    """Marks in a text would be read as the template's: the row would lose text, or its labels."""
    rows = [{"messages": [user(ask), answer(reply)]} for ask, reply in (("a", "b"), ("a", "b\U0010fffe"),
                                                                        ("a\U0010ffff", "b"))]
    data = build(write_jsonl(rows), chat_folder, template=jinja(name))
    source, = data.report["sources"].values()
    assert source["rows_kept"] == 1
    assert source["dropped"]["a turn contains U+10FFFE or U+10FFFF, which are not characters"]["rows"] == 2


def test_a_response_that_is_too_long_is_counted(jinja, chat_folder, write_jsonl):
    chat = [user("a"), answer("b"), user("c"), answer("word " * 200)]
    data = build(write_jsonl([{"messages": chat}]), chat_folder, template=jinja("forgets"), max_length=100)
    assert [text for _, text in decode_rows(data)] == ["<think>\n\n</think>\n\nb<|im_end|>"]
    source, = data.report["sources"].values()
    assert source["turns_dropped"] == 1 and "dropped 1 responses of such conversations" in data.report_table()


def test_a_jinja_file_replaces_the_tokenizers_template(jinja, chat_folder, write_jsonl, tmp_path):
    path = write_jsonl(ROWS[:1])
    (text, _), = decode_rows(build(path, chat_folder, template=jinja("forgets")))
    assert "<think>" in text
    data = SFTData(path, tokenizer=chat_folder, template=jinja("forgets"))
    assert data.tokenizer.chat_template == TEMPLATES["forgets"]
    before = data.identity()["tokenizer"]
    (tmp_path / "forgets.jinja").write_text(TEMPLATES["steady"])
    assert SFTData(path, tokenizer=chat_folder, template=jinja("steady")).identity()["tokenizer"] != before
    with pytest.raises(UserError, match="the chat template cannot be read"):
        SFTData(path, tokenizer=chat_folder, template=str(tmp_path / "none.jinja"))


def test_train_on_and_turns_choose_the_targets(jinja, chat_folder, write_jsonl):
    path = write_jsonl([ROWS[1]])
    answers = ["how are you?", "The sum.", "b"]

    def targets(**fields):
        return [text.replace("<|im_end|>", "|") for _, text in decode_rows(build(path, chat_folder, **fields))]

    assert targets() == ["".join(f"{word}|" for word in answers)] == targets(train_on="responses")
    assert targets(turns="split") == [f"{word}|" for word in answers]
    assert targets(turns="last") == targets(train_on="last") == targets(train_on_last=True) == ["b|"]
    assert targets(template="chatml", turns="split") == [f"{word}|" for word in answers]
    (text, target), = decode_rows(build(path, chat_folder, train_on="all"))
    assert text == target
    with pytest.raises(UserError, match="data.train_on is last, but data.train_on_prompt means all"):
        build(path, chat_folder, train_on="last", train_on_prompt=True)


def test_system_prompt_and_reasoning_options_change_the_rows(jinja, chat_folder, write_jsonl):
    path = write_jsonl([ROWS[0], ROWS[2], {"messages": [user("a"), answer("<think>hm</think>\n\nyes")]}])
    texts = [text for text, _ in decode_rows(build(path, chat_folder, system_prompt="Be brief."))]
    assert ["Be brief." in text for text in texts] == [True, False, True] and "Be kind." in texts[1]
    data = build(path, chat_folder, system_prompt="Be brief.", replace_system_prompt=True)
    texts = [text for text, _ in decode_rows(data)]
    assert all("Be brief." in text for text in texts) and "Be kind." not in texts[1]
    with pytest.raises(UserError, match="data.system_prompt is not; set it too"):
        build(path, chat_folder, replace_system_prompt=True)
    texts = decode_rows(build(write_jsonl([{"text": "no chat"}], "text.jsonl"), chat_folder, system_prompt="Be brief."))
    assert "Be brief." not in texts[0][0]
    assert "hm" in decode_rows(build(path, chat_folder))[2][1]
    assert decode_rows(build(path, chat_folder, reasoning="drop"))[2][1] == "yes<|im_end|>"
    path = write_jsonl([{"messages": CHATS["reasoning"][0]}])
    with_reasoning = decode_rows(build(path, chat_folder, template=jinja("forgets")))
    assert ["Another one." in text for _, text in with_reasoning] == [False, True]
    without_reasoning = decode_rows(build(path, chat_folder, template=jinja("forgets"), reasoning="drop"))
    assert not any("greeting" in text or "Another" in text for text, _ in without_reasoning)


def test_inspect_compares_prompts_with_inference(jinja, chat_folder, write_jsonl):
    rows = [ROWS[1], {"messages": [SYSTEM, *CHATS["tools"][0][1:]], "tools": [SPEC]}]
    def compare_prompts(**fields):
        data = build(write_jsonl(rows), chat_folder, **fields)
        return [compare_prompt(data.tokenizer, row["input_ids"][: row["prompt_length"]],
                                data.inference_prompts(row["index"])) for row in data.rows_for_inspection(99)]

    same = "prompt: same tokens as apply_chat_template(add_generation_prompt=True)"
    assert set(compare_prompts(template=jinja("forgets"))) == {same}
    assert set(compare_prompts(template=jinja("steady"))) == {same}
    assert compare_prompts(template="chatml") == [same]
    comparisons = compare_prompts(template=jinja("opens"))
    assert all(text.startswith("prompt: differs from") and text.endswith("<think>\n") for text in comparisons)
    rows = [{"messages": [user("<|im_end|>"), answer("typed")]}]
    assert compare_prompts() == [same.replace("same tokens", "same text") + ", but other tokens"]
    rows = [{"text": "no chat"}]
    data = build(write_jsonl(rows), chat_folder)
    assert data.inference_prompts(0) == []


def test_a_stream_and_packs_have_the_same_rows(jinja, chat_folder, write_jsonl, capsys):
    path = write_jsonl([*ROWS, {"messages": [user("a")]}])
    fields = {"template": jinja("forgets"), "batch_size": 1}
    expected = sorted(text for _, text in decode_rows(build(path, chat_folder, **fields)))
    data = build(path, chat_folder, streaming=True, stream_window=4, **fields)
    batches = iter(data.train_batches())
    decode = data.tokenizer.decode
    targets = [decode([token for token in next(batches)["labels"][0].tolist() if token != -100]) for _ in expected]
    next(batches)  # of the second pass
    assert sorted(targets) == expected
    assert "Pass 1 of the stream" in (output := capsys.readouterr().out) and "5 read: no response (1 rows" in output
    packed = build(path, chat_folder, packing=True, **fields)
    labels = [label for batch in packed.train_batches() for label in batch["labels"].flatten().tolist()]
    assert decode([label for label in labels if label != -100]).count("<|im_end|>") == len(expected)


@pytest.mark.parametrize("template", [None, "chatml"])
def test_truncation_removes_whole_turns(template, chat_folder, write_jsonl):
    turns = [SYSTEM]
    for turn in range(6):
        turns += [user(f"question {turn} " * 6), answer(f"answer {turn}")]
    path = write_jsonl([{"messages": turns}, {"messages": [user("word " * 300), answer("b")]}])
    data = build(path, chat_folder, template=template, max_length=150, on_overflow="truncate_turns")
    (text, targets), = decode_rows(data)
    assert "Be kind." in text and "question 5" in text and "question 0" not in text
    first = min(turn for turn in range(6) if f"question {turn}" in text)
    assert [f"answer {turn}" in targets for turn in range(6)] == [turn >= first for turn in range(6)]
    source, = data.report["sources"].values()
    assert (source["rows_cut"], source["turns_cut"], source["rows_dropped"]) == (1, 2 * first, 1)
    assert [*source["dropped"]] == ["longer than the limits, even without its earlier turns"]
    ids, = (row["input_ids"] for row in data.rows_for_inspection(9))
    longer = [SYSTEM, *turns[1 + 2 * (first - 1):]]
    one_more, = (row["input_ids"] for row in build(write_jsonl([{"messages": longer}]), chat_folder, template=template)
                 .rows_for_inspection(9))
    assert len(ids) <= 150 < len(one_more)  # no more turns than needed
    if template is None:
        (default, _), = decode_rows(build(path, chat_folder, max_length=150))
        assert default == text
