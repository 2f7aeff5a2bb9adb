"""Named templates as Jinja: transformers renders the same text from them and marks the same targets."""

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
    """Return a strategy for roles in any order, and for usual chats: an optional system turn, questions and answers."""
    turns = st.lists(texts, min_size=1, max_size=6)
    alternating = st.builds(
        lambda system, chat: ([{"role": "system", "content": system}] if system is not None else [])
        + [{"role": ("user", "assistant")[index % 2], "content": text} for index, text in enumerate(chat)],
        st.none() | texts, turns)
    return alternating | st.lists(st.builds(lambda role, text: {"role": role, "content": text}, ROLES, texts),
                                  min_size=1, max_size=5)


def make_renderer(name: str, tokenizer) -> TemplateRenderer:
    return TemplateRenderer(name, TextEncoder(tokenizer), tokenizer.eos_token, tokenizer.bos_token)


@pytest.mark.parametrize("name", TEMPLATES)
@pytest.mark.parametrize("tokenizer_name", ["byte_level", "spm", "chat"])
def test_transformers_renders_the_same_text(tokenizer_name, name, request):
    tokenizer = load_tokenizer(TokenizerOptions(request.getfixturevalue(f"{tokenizer_name}_folder"))).tokenizer
    renderer = make_renderer(name, tokenizer)
    source = template_jinja(renderer)

    @QUICK
    @given(conversations(TEXT), st.booleans())
    def check(messages, open_response):
        def render() -> str:
            return tokenizer.apply_chat_template(messages, chat_template=source, tokenize=False,
                                                 add_generation_prompt=open_response)

        try:
            conversation = Conversation(messages)
            segments = (renderer.prompt(conversation) if open_response
                        else renderer.rows(conversation, "all")[0].segments)
        except RowProblem:
            with pytest.raises(jinja2.TemplateError):
                render()
        else:
            assert render() == "".join(segment.text for segment in segments)

    check()


@pytest.fixture(scope="module")
def bytes_folder(tmp_path_factory):
    """A tokenizer with a token per byte, so that no token crosses the border of a target."""
    names = ["<s>", "</s>", "<|im_start|>", "<|im_end|>", *sorted(pre_tokenizers.ByteLevel.alphabet())]
    backend = Tokenizer(models.BPE({name: index for index, name in enumerate(names)}, []))
    backend.pre_tokenizer, backend.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, bos_token="<s>", eos_token="</s>")
    tokenizer.add_special_tokens({"additional_special_tokens": ["<|im_start|>", "<|im_end|>"]})
    tokenizer.save_pretrained(folder := tmp_path_factory.mktemp("bytes"))
    return folder


@pytest.mark.parametrize("name", TEMPLATES)
def test_the_assistant_mask_of_transformers_equals_the_targets(name, bytes_folder):
    tokenizer = AutoTokenizer.from_pretrained(bytes_folder)
    renderer, encoder = make_renderer(name, tokenizer), TextEncoder(tokenizer)
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
def test_content_that_a_template_cannot_render_is_rejected(message, tools, problem, bytes_folder):
    tokenizer = AutoTokenizer.from_pretrained(bytes_folder)
    source = template_jinja(make_renderer("chatml", tokenizer))
    with pytest.raises(jinja2.TemplateError, match=problem):
        tokenizer.apply_chat_template([message], tools=tools, chat_template=source)


def test_a_run_saves_the_template_of_its_rows(chat_folder, byte_level_folder, write_jsonl, tmp_path):
    chats = write_jsonl([{"prompt": "a", "completion": "b"}] * 2)
    texts = write_jsonl([{"text": "a"}] * 2, "texts.jsonl")
    file = tmp_path / "mine.jinja"
    file.write_text("{% for message in messages %}{{ message['content'] }}<|im_end|>{% endfor %}")

    def save(source, folder: str, **fields) -> tuple[str | None, str | None]:
        data = SFTData(source, tokenizer=folder, max_length=64, **fields)
        data.setup("fit")
        chat_template = data.tokenizer.chat_template
        save_tokenizer(data.tokenizer, data.chat_template, tmp_path / "left")
        assert data.tokenizer.chat_template == chat_template  # it is part of the run's identity
        return data.chat_template, AutoTokenizer.from_pretrained(tmp_path / "left").chat_template

    def make_jinja(name: str, folder: str) -> str:
        return template_jinja(make_renderer(name, load_tokenizer(TokenizerOptions(folder)).tokenizer))

    alpaca, zephyr = make_jinja("alpaca", byte_level_folder), make_jinja("zephyr", chat_folder)
    assert save(chats, byte_level_folder) == (alpaca, alpaca)
    assert save([chats, texts], byte_level_folder) == (alpaca, alpaca)
    assert save(chats, chat_folder) == (CHAT_TEMPLATE, CHAT_TEMPLATE)
    assert save(chats, chat_folder, template="zephyr") == (zephyr, zephyr)
    assert save(chats, chat_folder, template=str(file)) == (file.read_text(), file.read_text())
    assert save(texts, chat_folder) == (None, CHAT_TEMPLATE)
    (tmp_path / "left" / "chat_template.jinja").unlink()
    assert save(texts, byte_level_folder) == (None, None)


@pytest.mark.parametrize("name", TEMPLATES)
def test_training_with_a_saved_template_gives_the_same_rows(name, chat_folder, write_jsonl, tmp_path):
    question = {"role": "user", "content": "hello 1"}
    answers = [{"role": "assistant", "content": text} for text in (" The sum\n", "42.")]
    system = {"role": "system", "content": "Add."}
    rows = write_jsonl([{"messages": [question, answers[0]]},
                        {"messages": [system, question, answers[1], question, answers[0]]}])

    def build(template: str) -> SFTData:
        data = SFTData(rows, tokenizer=chat_folder, template=template, max_length=256)
        data.setup("fit")
        return data

    first = build(name)
    (tmp_path / "left.jinja").write_text(first.chat_template)
    second = build(str(tmp_path / "left.jinja"))
    for original, reloaded in zip(first.rows_for_inspection(2), second.rows_for_inspection(2), strict=True):
        assert (list(original["input_ids"]), list(original["labels"])) == (
            list(reloaded["input_ids"]), list(reloaded["labels"]))
    assert first.codec.stop_token_ids == second.codec.stop_token_ids
    assert first.encode_prompts(["Why?"]) == second.encode_prompts(["Why?"])
