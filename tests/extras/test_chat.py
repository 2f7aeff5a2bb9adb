"""`chat`: the prompts and answers of predict, a conversation on a terminal and over a pipe, and rejected options."""

import io
import json
import math
import os
import re
import signal
import sys
import threading
import time
from contextlib import suppress

import pytest
import yaml
from transformers import AutoTokenizer, BertConfig

from lmmods.cli import main
from lmmods.core.errors import UserError
from lmmods.core.settings import Generation
from lmmods.extras.chat import Detokenizer, Session, answer_lines, converse, read_model, read_run

FULL = {"model__init_args__quantize": None, "model__init_args__lora": None}
SAMPLED = {"max_new_tokens": 12, "do_sample": True, "temperature": 1.5, "top_k": 0}
OPTIONS = [word for key, value in SAMPLED.items() for word in (f"--generation.{key}", json.dumps(value))]
TEXT = "Add 5 and 6,\nplease."


def run_chat(capsys, *arguments: str) -> str:
    """Run chat and return its stdout."""
    capsys.readouterr()
    assert main(["chat", *arguments]) == 0, capsys.readouterr().err
    return capsys.readouterr().out


def get_error(capsys, *arguments: str) -> str:
    """Run chat with options it rejects and return its stderr."""
    capsys.readouterr()
    assert main(["chat", *arguments]) == 2
    out, err = capsys.readouterr()
    assert not out
    return err


# Answers of both engines --------------------------------------------------------------------------------------------


def predict(run, tmp_path, *arguments: str) -> str:
    """Return predict's answer to TEXT."""
    (tmp_path / "prompts.jsonl").write_text(json.dumps({"instruction": TEXT, "input": "", "output": ""}))
    assert main(["predict", "--config", str(run.config), "--data.predict_source", str(tmp_path / "prompts.jsonl"),
                 *(f"--model.{word[2:]}" if word.startswith("--") else word for word in OPTIONS), *arguments]) == 0
    return json.loads(run.predictions.read_text())["prediction"]


@pytest.mark.slow
def test_a_run_answers_as_predict_does(finished, tmp_path, capsys):
    """Test an adapter on a 4-bit base with sampling, from model/ and from the last checkpoint."""
    run = finished("copy")
    expected = predict(run, tmp_path, "--ckpt_path", "last")
    arguments = ["--run", str(run.root), "--prompt", TEXT, *OPTIONS]
    assert run_chat(capsys, *arguments).strip() == expected
    assert run_chat(capsys, *arguments, "--ckpt_path", "last").strip() == expected


@pytest.mark.slow
def test_a_jax_run_answers_the_same_on_both_engines_and_next_to_its_base(finished, tmp_path, capsys):
    run = finished("copy", engine="jax")
    expected = predict(run, tmp_path, "--ckpt_path", "last")
    arguments = ["--run", str(run.root), "--prompt", TEXT, *OPTIONS]
    assert run_chat(capsys, *arguments, "--ckpt_path", "last").strip() == expected
    assert run_chat(capsys, *arguments, "--engine", "torch").strip() == expected
    untrained = predict(run, tmp_path)
    output = run_chat(capsys, *arguments, "--compare_base", "true")
    answers = re.fullmatch("base: (.*)\ntuned: (.*)\n", output, re.DOTALL)
    assert untrained != expected and [text.strip() for text in answers.groups()] == [untrained, expected]


@pytest.mark.slow
@pytest.mark.parametrize("engine", ["torch", "jax"])
def test_a_fully_tuned_run_and_its_model_folder_answer_the_same(engine, finished, tmp_path, capsys):
    run = finished("copy", engine=engine, **FULL)
    expected = predict(run, tmp_path, "--ckpt_path", "last")
    for source in (["--run", str(run.root)], ["--model", str(run.model), "--engine", engine, "--seed", "7"]):
        assert run_chat(capsys, *source, "--prompt", TEXT, *OPTIONS).strip() == expected


@pytest.mark.slow
def test_an_adapter_folder_answers_on_a_4_bit_base(finished, capsys):
    """The folder does not record how its base was stored, so --quantize sets it. Beam search needs no streaming."""
    run = finished()
    arguments = ["--prompt", TEXT, "--generation.num_beams", "2"]
    expected = run_chat(capsys, "--run", str(run.root), "--compare_base", "true", *arguments)
    folder = ["--model", str(run.model), "--generation.max_new_tokens", "6"]
    assert run_chat(capsys, *folder, "--quantize", "nf4", "--compare_base", "true", *arguments) == expected


# Streaming ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", ["byte", "sentencepiece"])
def test_streamed_text_equals_the_decoded_answer(family, tokenizer_folder):
    """Test bytes that only form characters together, invalid bytes, and words with leading spaces."""
    if family == "byte":
        tokenizer = AutoTokenizer.from_pretrained(tokenizer_folder)
        answers = [tokenizer.encode("数字 and 🦊🦊 naïve, too", add_special_tokens=False), [200, 201, 65, 200]]
    else:
        from tests.data.conftest import train_sentencepiece_like

        tokenizer = train_sentencepiece_like()
        answers = [tokenizer.encode(text, add_special_tokens=False).ids
                   for text in ("The quick brown fox 数字 🦊", " two  spaces ")]
    for tokens in answers:
        text = Detokenizer(tokenizer.decode)
        parts = [text.add(token) for token in tokens]
        assert "".join([*parts, text.end()]) == tokenizer.decode(tokens) == text.text
        assert not any(part.endswith("\ufffd") for part in parts) and sum(map(bool, parts)) > 1 or tokens[0] == 200


# A conversation -----------------------------------------------------------------------------------------------------


class Parrot:
    """Model that answers with the given texts in turn, token by token."""

    def __init__(self, tokenizer, *texts: str):
        self.tokenizer, self.texts = tokenizer, list(texts)
        self.prompts: list[str] = []
        self.rows: list[int] = []
        self.on_token = lambda token: None

    def answer(self, prompt, settings, stop_token_ids, seed, row, on_token):
        assert set(stop_token_ids) == {2}
        self.prompts.append(self.tokenizer.decode(prompt))
        self.rows.append(row)
        tokens = self.tokenizer.encode(self.texts[(len(self.prompts) - 1) % len(self.texts)], add_special_tokens=False)
        for token in tokens[:settings.max_new_tokens]:
            self.on_token(token)
            if not on_token(token):
                return False
        return len(tokens) <= settings.max_new_tokens


ASK = "### Instruction:\n{}\n\n### Response:"
START = ("<s>Below is an instruction that describes a task. Write a response that appropriately completes the "
         "request.\n\n")


@pytest.fixture
def session(llama_folder):
    """Return a function that creates a session with a parrot."""
    def make(*texts: str, limit: int | None = None, system: str | None = None, template: str | None = "alpaca",
             **settings) -> Session:
        source = read_model(str(llama_folder), template, None, None)
        parrot = Parrot(source.data.tokenizer, *texts)
        return Session(source, {"tuned": parrot}, Generation(**settings), 0, limit, system)

    return make


def test_turns_are_rendered_as_training_rows_are(session, capsys):
    talk = session("3", "7 and 8", "")
    for text in ("Add 1 and 2.", "And </s>?", "Then?"):
        talk.ask(text)
    first = START + ASK.format("Add 1 and 2.")
    second = f"{first}3</s>\n\n" + ASK.format("And </s>?")
    parrot = talk.models["tuned"]
    assert parrot.prompts == [first, second, f"{second}7 and 8</s>\n\n" + ASK.format("Then?")]
    assert parrot.rows == [0, 1, 2]
    typed = talk.source.encode([{"role": "user", "content": "</s>"}])
    assert typed.count(2) == 0  # typed text is never the end token
    out, err = capsys.readouterr()
    assert out == "3\n7 and 8\n\n" and err == "(empty answer)\n"
    talk.turns, talk.system = {}, "Be brief."
    talk.ask("Hello?")
    assert parrot.prompts[-1] == "<s>Be brief.\n\n" + ASK.format("Hello?")


def test_a_model_without_a_template_continues_each_text_alone(session, capsys):
    talk = session(" jumps", template=None)
    assert not talk.source.is_chat
    talk.ask("the quick brown fox")
    talk.ask("the lazy dog")
    assert talk.models["tuned"].prompts == ["<s>the quick brown fox", "<s>the lazy dog"]


def test_a_full_context_is_reported_and_drops_the_oldest_turns(session, capsys):
    talk = session("fox", max_new_tokens=8)
    talk.ask("one")
    length = len(talk.source.encode([{"role": "user", "content": "one"}]))
    talk.limit = length + 30
    for text in ("two", "three"):
        talk.ask(text)
    assert talk.models["tuned"].prompts[2].count("### Instruction") < 3 and "three" in talk.models["tuned"].prompts[2]
    assert f"exceed the model's {length + 30} positions" in capsys.readouterr().err
    talk.turns = {}
    talk.limit = length + 3
    talk.ask("one")
    assert "so the answer is limited to 3 tokens" in capsys.readouterr().err
    talk.limit = length
    talk.turns = {}
    with pytest.raises(UserError, match=f"no space for an answer in the model's {length} positions"):
        talk.ask("one")
    assert not talk.turns


def test_a_truncated_answer_is_reported(session, capsys):
    session("the quick brown fox", max_new_tokens=2).ask("Go.")
    assert "(truncated after 2 tokens; raise --generation.max_new_tokens)" in capsys.readouterr().err


def test_each_model_has_its_own_conversation(session, capsys):
    talk = session("B")
    talk.models = {"base": Parrot(talk.source.data.tokenizer, "A"), **talk.models}
    talk.ask("x")
    talk.ask("y")
    assert capsys.readouterr().out == "base: A\ntuned: B\n" * 2
    assert "Response:A</s>" in talk.models["base"].prompts[1] and "Response:B</s>" in talk.models["tuned"].prompts[1]


def set_stdin(monkeypatch, content: bytes) -> None:
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(content)))


def test_each_line_of_a_pipe_is_a_turn(session, monkeypatch, capsys):
    set_stdin(monkeypatch, "Größe?\r\n\n/new\n".encode())
    talk = session("a\nb", "c")
    answer_lines(talk)
    assert capsys.readouterr() == ("a\nb\nc\n", "line 2 is empty; skipping it\n")
    assert "Größe?\n\n### Response:a\nb</s>" in talk.models["tuned"].prompts[1]
    for content, message in ((b"", "stdin is empty"), (b"ok\n\xff\n", "line 2 of stdin is not UTF-8")):
        set_stdin(monkeypatch, content)
        with pytest.raises(UserError, match=message):
            answer_lines(talk)


@pytest.fixture
def terminal(monkeypatch):
    """Replace stdin and stdout by a pseudo-terminal; return a function that types after the given texts appear."""
    user_end, program_end = os.openpty()
    shown = bytearray()

    def read() -> None:
        with suppress(OSError):  # how Linux reports that the other end is closed
            while part := os.read(user_end, 4096):
                shown.extend(part)

    reader = threading.Thread(target=read, daemon=True)
    reader.start()
    missing: list[tuple[str, bytes]] = []

    def type_when_shown(steps: tuple[tuple[str, str], ...]) -> None:
        at, end, again = 0, time.monotonic() + 30, math.inf
        for text, keys in steps:
            while (start := shown.find(text.encode(), at)) < 0:
                if time.monotonic() > again:  # the first came just before the prompt waited
                    again = math.inf
                    os.kill(os.getpid(), signal.SIGINT)
                if time.monotonic() > end:
                    missing.append((text, bytes(shown[at:])))
                    os.write(user_end, b"\n\x04\x04")  # end the prompt, which would wait forever
                    return
                time.sleep(0.002)
            at, again = start + len(text.encode()), math.inf
            if keys == "^C":
                again = time.monotonic() + 5
                os.kill(os.getpid(), signal.SIGINT)
            else:
                os.write(user_end, keys.encode())

    def play(talk: Session, *steps: tuple[str, str]) -> bytes:
        monkeypatch.setattr(sys, "stdin", open(program_end, encoding="utf-8", closefd=False))
        for name in ("stdout", "stderr"):
            monkeypatch.setattr(sys, name, open(program_end, "w", encoding="utf-8", closefd=False))
        typing = threading.Thread(target=type_when_shown, args=(steps,), daemon=True)
        typing.start()
        converse(talk)
        typing.join(30)
        assert not missing and not typing.is_alive()
        return bytes(shown)

    yield play
    os.close(program_end)
    reader.join(5)
    os.close(user_end)


def test_a_conversation_on_a_terminal(session, terminal):
    talk = session("\x1b[2Jyes", "the quick brown fox jumps", "dog")
    parrot, before = talk.models["tuned"], signal.getsignal(signal.SIGINT)

    parrot.on_token = lambda token: wait_for_the_stop(token) if len(parrot.prompts) == 2 else None
    tokens: list[int] = []

    def wait_for_the_stop(token: int) -> None:
        tokens.append(token)
        end = time.monotonic() + 10
        while parrot.tokenizer.decode(tokens).endswith("fox") and not talk.is_stopped and time.monotonic() < end:
            time.sleep(0.002)

    shown = terminal(
        talk, (">>> ", "\n"), (">>> ", "Hello there?\n"), ("\\x1b[2Jyes", ""),
        (">>> ", "Go on.\n"), ("quick", "^C"), ("(stopped)", ""), (">>> ", "^C"), ("Ctrl+D exits", ""),
        (">>> ", "/new\n"), ("Started a new conversation.", ""), (">>> ", "/etc/hosts?\n"), ("dog", ""),
        (">>> ", "\x04"))
    assert signal.getsignal(signal.SIGINT) is before
    assert "Hello there?" in parrot.prompts[0] and len(parrot.prompts) == 3
    assert parrot.prompts[1].endswith(ASK.format("Go on.")) and b"jumps" not in shown
    assert parrot.prompts[2] == START + ASK.format("/etc/hosts?")


def test_a_message_that_is_too_long_does_not_end_the_conversation(session, terminal):
    talk = session("fox", limit=120, max_new_tokens=4)
    terminal(talk, (">>> ", "x" * 200 + "\n"), ("Shorten it", ""), (">>> ", "Hello?\n"), ("fox", ""),
             (">>> ", "\x04"))
    assert len(talk.models["tuned"].prompts) == 1


# Models to chat with ------------------------------------------------------------------------------------------------


def test_invalid_options_are_rejected_before_anything_is_loaded(finished, llama_folder, tmp_path, capsys):
    run, model = str(finished().root), str(llama_folder)
    (tmp_path / "empty").mkdir()
    for arguments, message in {
        (): "chat needs --run RUN",
        ("--run", run, "--model", model): "both are set",
        ("--run", ""): "--run is empty",
        ("--run", run, "--prompt", " "): "--prompt is ' '",
        ("--run", str(tmp_path / "none")): "has no config.yaml",
        ("--run", model): f"so it is not a run folder. Use --model {model}",
        ("--model", run): f"is a run folder. Use --run {run}",
        ("--model", model, "--ckpt_path", "last"): "Use --run instead of --model",
        ("--run", run, "--template", "chatml"): "--template applies only to --model",
        ("--run", run, "--ckpt_path", "77"): "77 does not exist",
        ("--model", str(tmp_path / "empty"), "--prompt", "x"): "has no config.json",
        ("--model", model, "--system", "x", "--prompt", "x"): "--system: this model continues texts",
        ("--model", model, "--compare_base", "true", "--prompt", "x"): "this model's base is unknown",
        ("--model", model, "--chat_template_kwargs", "{a: 1}"): "has no chat template",
        ("--model", model, "--template", "alpacca"): "data.template 'alpacca' is unknown",
        ("--run", run, "--generation.temperature", "0.5", "--prompt", "x"): "while generation.do_sample is false",
        ("--run", run, "--seed", "-1"): "--seed is -1",
        ("--run", run, "--generation.temprature", "0.5"): "Did you mean --generation.temperature?",
        ("--run", run, "--device", "cuda:77", "--prompt", "x"): "torch has no such device here",
    }.items():
        assert message in get_error(capsys, *arguments), arguments


def test_a_run_that_cannot_answer_is_rejected(finished, tmp_path, llama_folder, capsys):
    run = finished("copy")
    text = run.config.read_text()
    for old, new, message in (("class_path: SFT\n", "class_path: QA\n",
                               "chat does not support. Use a run of CLM, GRPO, Preference or SFT"),
                              ("class_path: SFTData", "class_path: os.system", "os.system"),
                              ("trust_remote_code: false", "trust_remote_code: true", "merge, evaluate and chat: "),
                              ("rank: 4", "rank: four", "rank")):
        assert old in text
        run.config.write_text(text.replace(old, new))
        assert message in get_error(capsys, "--run", str(run.root), "--prompt", "x")
    run.config.write_text(text)
    run.model.rename(tmp_path / "elsewhere")
    assert f"has no model in {run.model}. Use a checkpoint: --ckpt_path last" in get_error(
        capsys, "--run", str(run.root), "--prompt", "x")
    BertConfig(architectures=["BertForMaskedLM"]).save_pretrained(tmp_path / "bert")
    assert "is a BertForMaskedLM. Use a causal language model" in get_error(capsys, "--model", str(tmp_path / "bert"))


def test_a_run_answers_without_its_data(finished, monkeypatch, capsys):
    """The data may be gone; template, system turn and settings come from the run's recipe."""
    source = read_run(str(finished().root), None)
    assert source.is_chat and source.generation == Generation(max_new_tokens=6) and source.seed == 7
    assert source.precision == "32-true" and source.model.quantize == source.base.quantize == "nf4"
    assert source.model.adapter and source.base.lora is source.base.adapter is None
    ids = source.encode([{"role": "user", "content": "Add 1."}])
    assert source.data.tokenizer.decode(ids) == START + ASK.format("Add 1.")


@pytest.mark.parametrize(("task", "layout"), [("CLM", None), ("SFT", "text"), ("SFT", None)])
def test_a_run_trained_on_plain_texts_continues_texts(task, layout, tmp_path, llama_folder):
    """Test CLM, an SFT run whose report has the layout `text`, and an SFT run without a report, which has turns."""
    folder = tmp_path / "run"
    (folder / "model").mkdir(parents=True)
    for file in llama_folder.iterdir():
        (folder / "model" / file.name).symlink_to(file)
    (folder / "config.yaml").write_text(yaml.safe_dump({
        "trainer": {"precision": "bf16-mixed"},
        "model": {"class_path": task, "init_args": {"config": {"model_type": "llama"}}},
        "data": {"class_path": f"{task}Data", "init_args": {"source": "gone", "tokenizer": "gone"}}}))
    (folder / "data_report.json").write_text(json.dumps({"sources": {"gone": {"format": layout}}} if layout else {}))
    source = read_run(str(folder), None)
    assert source.is_chat == (task == "SFT" and not layout) and source.precision == "bf16-mixed"
    rendered = source.data.tokenizer.decode(source.encode([{"role": "user", "content": "the quick brown"}]))
    assert rendered == (START + ASK.format("the quick brown") if source.is_chat else "<s>the quick brown")
    assert source.base is None and source.model.pretrained == str(folder / "model") and not source.model.config


def test_a_model_folder_uses_its_own_generation_settings(llama_folder, tmp_path, capsys):
    for name in ("config.json", "tokenizer.json", "tokenizer_config.json"):
        (tmp_path / name).write_bytes((llama_folder / name).read_bytes())
    file = tmp_path / "generation_config.json"
    file.write_text('{"do_sample": true, "temperature": 0.6, "min_p": 0.1, "eos_token_id": [2, 7], "max_length": 99}')
    source = read_model(str(tmp_path), None, None, None)
    assert source.generation == Generation(do_sample=True, temperature=0.6) and source.stop_token_ids == [2, 7]
    assert "sets min_p; chat does not support this" in capsys.readouterr().err
    file.write_text('{"temperature": 0.6, "num_beams": 3}')  # greedy search ignores the temperature
    assert read_model(str(tmp_path), None, None, None).generation == Generation(num_beams=3)
    for name in ("generation_config.json", "adapter_config.json"):
        (tmp_path / name).write_text("{")
        assert f"{name} cannot be read" in get_error(capsys, "--model", str(tmp_path))
        (tmp_path / name).write_text("{}")
    assert "adapter_config.json has no peft_type" in get_error(capsys, "--model", str(tmp_path))
    (tmp_path / "adapter_config.json").write_text('{"peft_type": "LORA"}')
    assert "has no base_model_name_or_path. Add the adapter's base model" in get_error(capsys, "--model", str(tmp_path))
