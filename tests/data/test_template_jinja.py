"""Named templates as Jinja: transformers writes with them what the renderer writes, and marks what is scored."""

import jinja2
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from lmmods.data.encode.encoder import TextEncoder
from lmmods.data.encode.templates import TEMPLATES, TemplateRenderer, template_jinja
from lmmods.data.encode.tokenizer import TokenizerOptions, load_tokenizer
from lmmods.data.read.conversation import Conversation, RowProblem
from lmmods.data.sft import SFTData
from lmmods.runs.model_card import save_tokenizer
from tests.data.conftest import CHAT_TEMPLATE
from tests.data.test_properties import QUICK, TEXT

ROLES = st.sampled_from(["user", "assistant", "system", "tool"])


def conversations(texts: st.SearchStrategy) -> st.SearchStrategy:
    """Any order of roles, and oftener what chats are like: perhaps a system turn, then questions and answers."""
    turns = st.lists(texts, min_size=1, max_size=6)
    alternating = st.builds(
        lambda system, chat: ([{"role": "system", "content": system}] if system is not None else [])
        + [{"role": ("user", "assistant")[place % 2], "content": text} for place, text in enumerate(chat)],
        st.none() | texts, turns)
    return alternating | st.lists(st.builds(lambda role, text: {"role": role, "content": text}, ROLES, texts),
                                  min_size=1, max_size=5)


def renderer_of(name: str, tokenizer) -> TemplateRenderer:
    return TemplateRenderer(name, TextEncoder(tokenizer), tokenizer.eos_token, tokenizer.bos_token)


@pytest.mark.parametrize("name", TEMPLATES)
@pytest.mark.parametrize("kind", ["byte_level", "spm", "chat"])
def test_transformers_writes_what_the_renderer_writes(kind, name, request):
    tokenizer = load_tokenizer(TokenizerOptions(request.getfixturevalue(f"{kind}_folder"))).tokenizer
    renderer = renderer_of(name, tokenizer)
    source = template_jinja(renderer)

    @QUICK
    @given(conversations(TEXT), st.booleans())
    def check(messages, open_response):
        def written() -> str:
            return tokenizer.apply_chat_template(messages, chat_template=source, tokenize=False,
                                                 add_generation_prompt=open_response)

        try:
            requested = Conversation(messages)
            segments = renderer.prompt(requested) if open_response else renderer.rows(requested, "all")[0].segments
        except RowProblem:
            with pytest.raises(jinja2.TemplateError):
                written()
        else:
            assert written() == "".join(segment.text for segment in segments)

    check()


@pytest.fixture(scope="module")
def bytes_folder(tmp_path_factory):
    """A token for each byte, so that no token spans two stretches however a text is cut."""
    names = ["<s>", "</s>", "<|im_start|>", "<|im_end|>", *sorted(pre_tokenizers.ByteLevel.alphabet())]
    backend = Tokenizer(models.BPE({name: number for number, name in enumerate(names)}, []))
    backend.pre_tokenizer, backend.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, bos_token="<s>", eos_token="</s>")
    tokenizer.add_special_tokens({"additional_special_tokens": ["<|im_start|>", "<|im_end|>"]})
    tokenizer.save_pretrained(folder := tmp_path_factory.mktemp("bytes"))
    return folder


@pytest.mark.parametrize("name", TEMPLATES)
def test_the_assistant_mask_of_transformers_is_what_is_scored(name, bytes_folder):
    tokenizer = AutoTokenizer.from_pretrained(bytes_folder)
    renderer, encoder = renderer_of(name, tokenizer), TextEncoder(tokenizer)
    source = template_jinja(renderer)

    @QUICK
    @given(conversations(st.text(st.characters(codec="utf-8", exclude_characters="<"), max_size=12)))
    def check(messages):
        try:
            runs = encoder.runs(renderer.rows(Conversation(messages), "all")[0].segments)
        except RowProblem:
            return
        [(ids, response)] = encoder.encode_rows([runs])
        result = tokenizer.apply_chat_template(messages, chat_template=source, return_dict=True,
                                               return_assistant_tokens_mask=True)
        assert result["input_ids"] == ids.tolist()
        assert result["assistant_masks"] == (response >= 0).astype(int).tolist()
        assert np.isin(tokenizer.convert_tokens_to_ids(renderer.end), ids[response >= 0]) or (response < 0).all()

    check()


@pytest.mark.parametrize(("message", "tools", "problem"), [
    ({"role": "user", "content": [{"type": "image"}]}, None, "not text"), ({"role": "user"}, None, "not text"),
    ({"role": "critic", "content": "bad"}, None, "critic"),
    ({"role": "assistant", "content": "", "tool_calls": [{"function": {"name": "f"}}]}, None, "no place for tools"),
    ({"role": "user", "content": "a"}, [{"type": "function", "function": {"name": "f"}}], "no place for tools"),
])
def test_what_a_template_has_no_place_for_is_refused(message, tools, problem, bytes_folder):
    tokenizer = AutoTokenizer.from_pretrained(bytes_folder)
    source = template_jinja(renderer_of("chatml", tokenizer))
    with pytest.raises(jinja2.TemplateError, match=problem):
        tokenizer.apply_chat_template([message], tools=tools, chat_template=source)


def test_what_a_run_leaves_is_the_template_of_its_rows(chat_folder, byte_level_folder, write_jsonl, tmp_path):
    chats = write_jsonl([{"prompt": "a", "completion": "b"}] * 2)
    texts = write_jsonl([{"text": "a"}] * 2, "texts.jsonl")
    file = tmp_path / "mine.jinja"
    file.write_text("{% for message in messages %}{{ message['content'] }}<|im_end|>{% endfor %}")

    def left(source, folder: str, **fields) -> tuple[str | None, str | None]:
        data = SFTData(source, tokenizer=folder, max_length=64, **fields)
        data.setup("fit")
        own = data.tokenizer.chat_template
        save_tokenizer(data.tokenizer, data.chat_template, tmp_path / "left")
        assert data.tokenizer.chat_template == own  # it counts in the identity of the run
        return data.chat_template, AutoTokenizer.from_pretrained(tmp_path / "left").chat_template

    def named(name: str, folder: str) -> str:
        return template_jinja(renderer_of(name, load_tokenizer(TokenizerOptions(folder)).tokenizer))

    alpaca, zephyr = named("alpaca", byte_level_folder), named("zephyr", chat_folder)
    assert left(chats, byte_level_folder) == (alpaca, alpaca)
    assert left([chats, texts], byte_level_folder) == (alpaca, alpaca)
    assert left(chats, chat_folder) == (CHAT_TEMPLATE, CHAT_TEMPLATE)
    assert left(chats, chat_folder, template="zephyr") == (zephyr, zephyr)
    assert left(chats, chat_folder, template=str(file)) == (file.read_text(), file.read_text())
    assert left(texts, chat_folder) == (None, CHAT_TEMPLATE)
    (tmp_path / "left" / "chat_template.jinja").unlink()
    assert left(texts, byte_level_folder) == (None, None)


@pytest.mark.parametrize("name", TEMPLATES)
def test_who_trains_on_with_what_was_left_has_the_same_rows(name, chat_folder, write_jsonl, tmp_path):
    question = {"role": "user", "content": "hello 1"}
    answers = [{"role": "assistant", "content": text} for text in (" The sum\n", "42.")]
    system = {"role": "system", "content": "Add."}
    rows = write_jsonl([{"messages": [question, answers[0]]},
                        {"messages": [system, question, answers[1], question, answers[0]]}])

    def data_of(template: str) -> SFTData:
        data = SFTData(rows, tokenizer=chat_folder, template=template, max_length=256)
        data.setup("fit")
        return data

    first = data_of(name)
    (tmp_path / "left.jinja").write_text(first.chat_template)
    second = data_of(str(tmp_path / "left.jinja"))
    for ours, theirs in zip(first.rows_for_inspection(2), second.rows_for_inspection(2), strict=True):
        assert (list(ours["input_ids"]), list(ours["labels"])) == (list(theirs["input_ids"]), list(theirs["labels"]))
    assert first.codec.stop_token_ids == second.codec.stop_token_ids
    assert first.encode_prompts(["Why?"]) == second.encode_prompts(["Why?"])
