"""Files for serving a merged model: Ollama's Modelfile, rendered here as Ollama does, and command lines."""

import json
import re

import pytest
from transformers import AutoTokenizer
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES as CAUSAL_LM
from transformers.models.auto.modeling_auto import MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES as IMAGES

from lmmods.cli import main
from lmmods.commands.merge import PROGRAMS, find_layout, modelfile, serving_lines
from lmmods.core.image_models import IMAGE_FAMILIES
from lmmods.data.encode.chat_template import ChatTemplate
from lmmods.data.encode.encoder import TextEncoder
from lmmods.data.encode.templates import TEMPLATES, TemplateRenderer, template_jinja
from lmmods.data.encode.tokenizer import TokenizerOptions, load_tokenizer
from tests.data.conftest import CHAT_TEMPLATE
from tests.jax_engine.tested import CAUSAL

CHATS = [["Hello?"], ["Hello?", "Hi!", "How\nare {{ you }}?"], ["1", "2", "3", "4", "5", "6", '"7"']]
SYSTEMS = [None, "Be brief.\n\nAnd kind."]


def build_messages(system: str | None, texts: list[str]) -> list[dict[str, str]]:
    turns = [{"role": ("user", "assistant")[index % 2], "content": text} for index, text in enumerate(texts)]
    return turns if system is None else [{"role": "system", "content": system}, *turns]


def render_go(template: str, messages: list[dict[str, str]]) -> str:
    """Render a subset of Go's text/template: if, else, else if, range, eq, gt, len, slice."""
    tokens = [token for token in re.split(r"(\{\{.*?\}\})", template) if token]
    scope = {".System": "\n\n".join(m["content"] for m in messages if m["role"] == "system")}
    words = re.compile(r'"(?:[^"]*)"|[()]|[^\s()]+')

    def value(expression: list[str]):
        if expression[0] == "(":
            depth, parts = 0, [[]]
            for word in expression:
                depth += (word == "(") - (word == ")")
                parts[-1].append(word)
            return value(parts[0][1:-1])
        arguments, at = [], 1
        while at < len(expression):
            end, depth = at, 0
            while True:
                depth += (expression[end] == "(") - (expression[end] == ")")
                end += 1
                if not depth:
                    break
            arguments.append(value(expression[at:end]))
            at = end
        word = expression[0]
        functions = {"eq": lambda a, b: a == b, "gt": lambda a, b: a > b, "len": len, "slice": lambda a, i: a[i:]}
        if word in functions:
            return functions[word](*arguments)
        if word.startswith('"'):
            return word[1:-1]
        if word.startswith("$turn."):
            return scope["$turn"][word.removeprefix("$turn.").lower()]
        known = {"$.Messages": messages, ".Messages": messages}
        return known[word] if word in known else scope[word] if word in scope else int(word)

    def run(at: int, writes: bool) -> tuple[str, int]:
        """Return the text up to this block's `else` or `end`, and the index of that token."""
        text = ""
        while at < len(tokens):
            token = tokens[at]
            if not token.startswith("{{"):
                text, at = text + token * writes, at + 1
                continue
            action = words.findall(token[2:-2])
            if action[0] in ("else", "end"):
                return text, at
            if action[0] == "if":
                part, at = branch(action[1:], at, writes)
                text += part
            elif action[0] == "range":
                start = at + 1
                for index, turn in enumerate(messages if writes else messages[:1]):
                    scope.update({"$i": index, "$turn": turn})
                    part, at = run(start, writes)
                    text += part
                at += 1
            else:
                text, at = text + (str(value(action)) if writes else ""), at + 1
        return text, at

    def branch(condition: list[str], at: int, writes: bool) -> tuple[str, int]:
        is_true = bool(value(condition)) if writes else False
        text, at = run(at + 1, writes and is_true)
        action = words.findall(tokens[at][2:-2])
        if action == ["end"]:
            return text, at + 1
        if action[:2] == ["else", "if"]:
            part, at = branch(action[2:], at, writes and not is_true)
            return text + part, at
        part, at = run(at + 1, writes and not is_true)
        return text + part, at + 1

    return run(0, True)[0]


@pytest.mark.parametrize("name", TEMPLATES)
def test_ollama_renders_the_prompts_of_named_templates(name, llama_folder):
    tokenizer = load_tokenizer(TokenizerOptions(str(llama_folder), add_tokens=["<|im_end|>", "<|eot_id|>"])).tokenizer
    renderer = TemplateRenderer(name, TextEncoder(tokenizer), tokenizer.eos_token, tokenizer.bos_token)
    template = ChatTemplate(template_jinja(renderer), tokenizer.special_tokens_map)
    translated = find_layout(lambda messages: template.render(messages, True)).go_template()
    for system in SYSTEMS:
        for texts in CHATS:
            messages = build_messages(system, texts)
            assert render_go(translated, messages) == template.render(messages, True)


JINJA = {
    "trims": (CHAT_TEMPLATE, True),
    "default system": ("{% if messages[0]['role'] != 'system' %}<|s|>You help.{{ '{{' }}<|e|>{% endif %}"
                       "{% for m in messages %}<{{ m['role'] }}>{{ m['content'] }}<|e|>{% endfor %}<assistant>", True),
    "refuses system": ("{% for m in messages %}{% if m['role'] == 'system' %}{{ raise_exception('no') }}{% endif %}"
                       "<{{ m['role'] }}>{{ m['content'] }}{% endfor %}<assistant>", True),
    "counts turns": ("{% for m in messages %}[{{ loop.index }}]{{ m['content'] }}{% endfor %}", False),
    "shows the last only": ("{{ messages[-1]['content'] }}", False),
    "system at the end": ("{% for m in messages if m['role'] != 'system' %}{{ m['content'] }};{% endfor %}"
                          "{% if messages[0]['role'] == 'system' %}{{ messages[0]['content'] }}{% endif %}", False),
    "first turn apart": ("{% for m in messages %}{{ m['content'] }}{{ ';' if loop.length == 1 else ',' }}{% endfor %}",
                         False),
}


@pytest.mark.parametrize("name", JINJA)
def test_chat_templates_that_fit_a_layout_are_translated(name):
    source, is_translatable = JINJA[name]
    template = ChatTemplate(source, {"bos_token": "<s>"})
    layout = find_layout(lambda messages: template.render(messages, True))
    assert (layout is not None) == is_translatable
    for system in SYSTEMS if is_translatable and layout.before_system is not None else SYSTEMS[:is_translatable]:
        for texts in CHATS:
            messages = build_messages(system, texts)
            assert render_go(layout.go_template(), messages) == template.render(messages, True)


def test_an_answer_to_continue_is_left_open():
    template = ChatTemplate(CHAT_TEMPLATE, {"bos_token": "<s>"})
    translated = find_layout(lambda messages: template.render(messages, True)).go_template()
    assert render_go(translated, build_messages(None, ["Count.", "1, 2,"])).endswith("<|im_start|>assistant\n1, 2,")


def save_folder(path, tokenizer, architecture="LlamaForCausalLM", **settings):
    tokenizer.save_pretrained(path)
    saved = json.loads((path / "tokenizer_config.json").read_text())
    (path / "tokenizer_config.json").write_text(json.dumps(saved | settings))
    (path / "config.json").write_text(json.dumps({"architectures": [architecture]}))
    (path / "generation_config.json").write_text('{"eos_token_id": [2, 0]}')
    return path


def test_the_modelfile_has_template_system_prompt_and_stop_tokens(tmp_path, tokenizer_folder):
    tokenizer = AutoTokenizer.from_pretrained(tokenizer_folder)
    tokenizer.chat_template = CHAT_TEMPLATE
    text = modelfile(save_folder(tmp_path, tokenizer), tokenizer, 'Say "yes".\nOr no.', None)
    start, *lines = text.split("TEMPLATE ")
    assert start == "FROM .\n"
    template, rest = re.fullmatch(r'"""(.*)"""\n(SYSTEM .*)', lines[0], re.DOTALL).groups()
    assert template.startswith("{{ if .System }}<s><|im_start|>system\n")
    assert rest == 'SYSTEM """Say "yes".\nOr no."""\nPARAMETER stop "</s>"\nPARAMETER stop "<unk>"\n'
    # If the tokenizer adds the begin token, Ollama does too.
    added = modelfile(save_folder(tmp_path, tokenizer, add_bos_token=True), tokenizer, None, None)
    assert "<s>" not in added and "<|im_start|>" in added
    mistral = modelfile(save_folder(tmp_path, tokenizer, "MistralForCausalLM"), tokenizer, None, None)
    assert mistral.startswith("FROM ./model.gguf\n")
    assert modelfile(save_folder(tmp_path, tokenizer, "BertForMaskedLM"), tokenizer, None, None) is None


@pytest.mark.parametrize(("template", "comment"), [
    ("{{ strftime_now('%Y') }}{% for m in messages %}{{ m['content'] }};{% endfor %}", "cannot express"),
    ("{% for m in messages %}{% for n in range(99999999) %}{{ n }}{% endfor %}{% endfor %}", "cannot express"),
    ('{% for m in messages %}""" {{ m["content"] }}{% endfor %}', "cannot express"),
    ("{% for", "cannot express"), (None, "continues texts")])
def test_a_template_without_a_go_equivalent_is_left_to_the_user(template, comment, tmp_path, tokenizer_folder):
    tokenizer = AutoTokenizer.from_pretrained(tokenizer_folder)
    tokenizer.chat_template = template
    text = modelfile(save_folder(tmp_path, tokenizer), tokenizer, None, None)
    assert comment in text and "\nTEMPLATE" not in text and text.endswith('PARAMETER stop "<unk>"\n')


@pytest.mark.parametrize(("family", "programs"), [
    ("llama", ["vLLM", "SGLang", "llama.cpp", "Ollama"]), ("qwen3_moe", ["vLLM", "SGLang", "llama.cpp", "Ollama"]),
    ("gpt_oss", ["vLLM", "SGLang", "llama.cpp", "Ollama"]), ("opt", ["vLLM", "SGLang"]), ("ctrl", []), ("bert", [])])
def test_command_lines_name_the_programs_that_support_the_model(family, programs, tmp_path, tokenizer_folder):
    folder = save_folder(tmp_path / "My model", AutoTokenizer.from_pretrained(tokenizer_folder), CAUSAL_LM[family])
    if text := modelfile(folder, AutoTokenizer.from_pretrained(folder), None, None):
        (folder / "Modelfile").write_text(text)
    lines = serving_lines(folder)
    assert re.findall(r"^  (\S+)", lines, re.M) == ["chat", "transformers", *programs]
    if "Ollama" in programs:
        assert f"ollama create my-model -f '{folder}/Modelfile'" in lines
        assert ("(after llama.cpp's converter)" in lines) == (family != "llama") == ("FROM ./model.gguf" in text)


@pytest.mark.parametrize("family", CAUSAL)
def test_every_causal_family_is_in_the_table_of_programs(family):
    assert CAUSAL_LM[family] in PROGRAMS


@pytest.mark.parametrize("family", IMAGE_FAMILIES)
def test_vllm_serves_every_family_with_images(family):
    assert "vLLM" in PROGRAMS[IMAGES[family]]


@pytest.mark.slow
def test_merge_writes_a_modelfile_that_renders_like_transformers(finished, tmp_path, capsys):
    """A real merge's Modelfile renders the same prompts as transformers."""
    run = finished(model__init_args__quantize=None, model__init_args__lora={"rank": 4})
    assert main(["merge", "--run", str(run.root), "--out", str(tmp_path / "out")]) == 0
    assert f"vllm serve {tmp_path}/out" in capsys.readouterr().out
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "out")
    text = (tmp_path / "out" / "Modelfile").read_text()
    template = re.search(r'TEMPLATE """(.*?)"""', text, re.DOTALL)[1]
    for texts in CHATS:
        messages = build_messages(None, texts)
        assert render_go(template, messages) == tokenizer.apply_chat_template(messages, tokenize=False,
                                                                              add_generation_prompt=True)
    ends = json.loads((tmp_path / "out" / "generation_config.json").read_text())["eos_token_id"]
    assert re.findall(r'PARAMETER stop "(.*)"', text) == tokenizer.convert_ids_to_tokens(ends)
