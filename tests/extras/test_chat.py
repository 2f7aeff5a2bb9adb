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


def said(capsys, *arguments: str) -> str:
    """What a command writes to stdout."""
    capsys.readouterr()
    assert main(["chat", *arguments]) == 0, capsys.readouterr().err
    return capsys.readouterr().out


def refused(capsys, *arguments: str) -> str:
    """What a command says that it refuses."""
    capsys.readouterr()
    assert main(["chat", *arguments]) == 2
    out, err = capsys.readouterr()
    assert not out
    return err


# Answers of both engines --------------------------------------------------------------------------------------------


def predicted(run, tmp_path, *arguments: str) -> str:
    """What predict says to the text as its only row."""
    (tmp_path / "asked.jsonl").write_text(json.dumps({"instruction": TEXT, "input": "", "output": ""}))
    assert main(["predict", "--config", str(run.config), "--data.predict_source", str(tmp_path / "asked.jsonl"),
                 *(f"--model.{word[2:]}" if word.startswith("--") else word for word in OPTIONS), *arguments]) == 0
    return json.loads(run.predictions.read_text())["prediction"]


@pytest.mark.slow
def test_a_run_says_what_predict_says(finished, tmp_path, capsys):
    """An adapter on a 4-bit base, sampled, from model/ and from its last checkpoint."""
    run = finished("copy")
    wanted = predicted(run, tmp_path, "--ckpt_path", "last")
    asked = ["--run", str(run.root), "--prompt", TEXT, *OPTIONS]
    assert said(capsys, *asked).strip() == wanted
    assert said(capsys, *asked, "--ckpt_path", "last").strip() == wanted


@pytest.mark.slow
def test_a_run_on_jax_says_the_same_on_both_engines_and_beside_its_base(finished, tmp_path, capsys):
    run = finished("copy", engine="jax")
    wanted = predicted(run, tmp_path, "--ckpt_path", "last")
    asked = ["--run", str(run.root), "--prompt", TEXT, *OPTIONS]
    assert said(capsys, *asked, "--ckpt_path", "last").strip() == wanted
    assert said(capsys, *asked, "--engine", "torch").strip() == wanted
    untrained = predicted(run, tmp_path)
    compared = re.fullmatch("base: (.*)\ntuned: (.*)\n", said(capsys, *asked, "--compare_base", "true"), re.DOTALL)
    assert untrained != wanted and [text.strip() for text in compared.groups()] == [untrained, wanted]


@pytest.mark.slow
@pytest.mark.parametrize("engine", ["torch", "jax"])
def test_a_fully_tuned_run_and_its_folder_are_the_same_model(engine, finished, tmp_path, capsys):
    run = finished("copy", engine=engine, **FULL)
    wanted = predicted(run, tmp_path, "--ckpt_path", "last")
    for source in (["--run", str(run.root)], ["--model", str(run.model), "--engine", engine, "--seed", "7"]):
        assert said(capsys, *source, "--prompt", TEXT, *OPTIONS).strip() == wanted


@pytest.mark.slow
def test_an_adapter_by_itself_on_a_base_in_4_bits(finished, capsys):
    """The folder does not say how its base was stored, so --quantize does. Beams are searched to their end."""
    run = finished()
    asked = ["--prompt", TEXT, "--generation.num_beams", "2"]
    compared = said(capsys, "--run", str(run.root), "--compare_base", "true", *asked)
    folder = ["--model", str(run.model), "--generation.max_new_tokens", "6"]
    assert said(capsys, *folder, "--quantize", "nf4", "--compare_base", "true", *asked) == compared


# Text as it comes ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["byte", "piece"])
def test_streamed_text_is_the_text_of_all_tokens(kind, tokenizer_folder):
    """Of bytes that are characters only together, of none at all, and of words with spaces in front."""
    if kind == "byte":
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
    """Answers with the texts it is given, one after the other, a token at a time."""

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
    """A function that gives a session with a parrot; settings, limit and system turn as given."""
    def make(*texts: str, limit: int | None = None, system: str | None = None, template: str | None = "alpaca",
             **settings) -> Session:
        source = read_model(str(llama_folder), template, None, None)
        parrot = Parrot(source.data.tokenizer, *texts)
        return Session(source, {"tuned": parrot}, Generation(**settings), 0, limit, system)

    return make


def test_turns_are_written_as_rows_of_training_are(session, capsys):
    talk = session("3", "7 and 8", "")
    for text in ("Add 1 and 2.", "And </s>?", "Then?"):
        talk.ask(text)
    first = START + ASK.format("Add 1 and 2.")
    second = f"{first}3</s>\n\n" + ASK.format("And </s>?")
    parrot = talk.models["tuned"]
    assert parrot.prompts == [first, second, f"{second}7 and 8</s>\n\n" + ASK.format("Then?")]
    assert parrot.rows == [0, 1, 2]
    typed = talk.source.encode([{"role": "user", "content": "</s>"}])
    assert typed.count(2) == 0  # a text, not the end token
    out, err = capsys.readouterr()
    assert out == "3\n7 and 8\n\n" and err == "(empty answer)\n"
    talk.turns, talk.system = {}, "Be brief."
    talk.ask("Hello?")
    assert parrot.prompts[-1] == "<s>Be brief.\n\n" + ASK.format("Hello?")


def test_texts_are_gone_on_with_one_by_one(session, capsys):
    talk = session(" jumps", template=None)
    assert not talk.source.is_chat
    talk.ask("the quick brown fox")
    talk.ask("the lazy dog")
    assert talk.models["tuned"].prompts == ["<s>the quick brown fox", "<s>the lazy dog"]


def test_a_full_context_is_told_and_forgets_the_oldest(session, capsys):
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


def test_an_answer_that_is_cut_off_is_told(session, capsys):
    session("the quick brown fox", max_new_tokens=2).ask("Go.")
    assert "(truncated after 2 tokens; raise --generation.max_new_tokens)" in capsys.readouterr().err


def test_each_model_has_its_own_conversation(session, capsys):
    talk = session("B")
    talk.models = {"base": Parrot(talk.source.data.tokenizer, "A"), **talk.models}
    talk.ask("x")
    talk.ask("y")
    assert capsys.readouterr().out == "base: A\ntuned: B\n" * 2
    assert "Response:A</s>" in talk.models["base"].prompts[1] and "Response:B</s>" in talk.models["tuned"].prompts[1]


def pipe(monkeypatch, content: bytes) -> None:
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(content)))


def test_lines_of_a_pipe_are_turns(session, monkeypatch, capsys):
    pipe(monkeypatch, "Größe?\r\n\n/new\n".encode())
    talk = session("a\nb", "c")
    answer_lines(talk)
    assert capsys.readouterr() == ("a\nb\nc\n", "line 2 is empty; skipping it\n")
    assert "Größe?\n\n### Response:a\nb</s>" in talk.models["tuned"].prompts[1]
    for content, message in ((b"", "stdin is empty"), (b"ok\n\xff\n", "line 2 of stdin is not UTF-8")):
        pipe(monkeypatch, content)
        with pytest.raises(UserError, match=message):
            answer_lines(talk)


@pytest.fixture
def terminal(monkeypatch):
    """A pseudo-terminal in the place of stdin and stdout: a function that types once a text has been shown."""
    ours, theirs = os.openpty()
    shown = bytearray()

    def read() -> None:
        with suppress(OSError):  # Linux's way to say that the other end is closed
            while part := os.read(ours, 4096):
                shown.extend(part)

    reader = threading.Thread(target=read, daemon=True)
    reader.start()
    missing: list[tuple[str, bytes]] = []

    def type_when_shown(steps: tuple[tuple[str, str], ...]) -> None:
        at, end, again = 0, time.monotonic() + 30, math.inf
        for text, keys in steps:
            while (found := shown.find(text.encode(), at)) < 0:
                if time.monotonic() > again:  # it came just before the wait for a line; people press it twice
                    again = math.inf
                    os.kill(os.getpid(), signal.SIGINT)
                if time.monotonic() > end:
                    missing.append((text, bytes(shown[at:])))
                    os.write(ours, b"\n\x04\x04")  # what waits for a line must not wait for ever
                    return
                time.sleep(0.002)
            at, again = found + len(text.encode()), math.inf
            if keys == "^C":
                again = time.monotonic() + 5
                os.kill(os.getpid(), signal.SIGINT)
            else:
                os.write(ours, keys.encode())

    def play(talk: Session, *steps: tuple[str, str]) -> bytes:
        monkeypatch.setattr(sys, "stdin", open(theirs, encoding="utf-8", closefd=False))
        for name in ("stdout", "stderr"):
            monkeypatch.setattr(sys, name, open(theirs, "w", encoding="utf-8", closefd=False))
        typing = threading.Thread(target=type_when_shown, args=(steps,), daemon=True)
        typing.start()
        converse(talk)
        typing.join(30)
        assert not missing and not typing.is_alive()
        return bytes(shown)

    yield play
    os.close(theirs)
    reader.join(5)
    os.close(ours)


def test_a_conversation_at_a_terminal(session, terminal):
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


def test_a_mistake_in_a_conversation_costs_its_question_alone(session, terminal):
    talk = session("fox", limit=120, max_new_tokens=4)
    terminal(talk, (">>> ", "x" * 200 + "\n"), ("Shorten it", ""), (">>> ", "Hello?\n"), ("fox", ""),
             (">>> ", "\x04"))
    assert len(talk.models["tuned"].prompts) == 1


# What is talked to --------------------------------------------------------------------------------------------------


def test_mistakes_are_told_before_anything_is_loaded(finished, llama_folder, tmp_path, capsys):
    run, model = str(finished().root), str(llama_folder)
    (tmp_path / "empty").mkdir()
    for arguments, message in {
        (): "chat needs --run RUN",
        ("--run", run, "--model", model): "both are set",
        ("--run", ""): "--run is empty",
        ("--run", run, "--prompt", " "): "--prompt is ' '",
        ("--run", str(tmp_path / "none")): "has no config.yaml",
        ("--run", model): f"It is a model folder; use --model {model}",
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
        assert message in refused(capsys, *arguments), arguments


def test_runs_that_cannot_answer(finished, tmp_path, llama_folder, capsys):
    run = finished("copy")
    text = run.config.read_text()
    for old, new, message in (("class_path: SFT\n", "class_path: QA\n",
                               "chat does not support. Use a run of CLM, GRPO, Preference or SFT"),
                              ("class_path: SFTData", "class_path: os.system", "os.system"),
                              ("trust_remote_code: false", "trust_remote_code: true", "merge, evaluate and chat: "),
                              ("rank: 4", "rank: four", "rank")):
        assert old in text
        run.config.write_text(text.replace(old, new))
        assert message in refused(capsys, "--run", str(run.root), "--prompt", "x")
    run.config.write_text(text)
    run.model.rename(tmp_path / "elsewhere")
    assert "contains no model. Use a checkpoint: --ckpt_path last" in refused(capsys, "--run", str(run.root),
                                                                              "--prompt", "x")
    BertConfig(architectures=["BertForMaskedLM"]).save_pretrained(tmp_path / "bert")
    assert "is a BertForMaskedLM. Use a causal language model" in refused(capsys, "--model", str(tmp_path / "bert"))


def test_a_run_is_asked_without_its_rows(finished, monkeypatch, capsys):
    """Its data may be gone; its template, system turn and settings are those of its recipe."""
    source = read_run(str(finished().root), None)
    assert source.is_chat and source.generation == Generation(max_new_tokens=6) and source.seed == 7
    assert source.precision == "32-true" and source.model.quantize == source.base.quantize == "nf4"
    assert source.model.adapter and source.base.lora is source.base.adapter is None
    ids = source.encode([{"role": "user", "content": "Add 1."}])
    assert source.data.tokenizer.decode(ids) == START + ASK.format("Add 1.")


@pytest.mark.parametrize(("task", "layout"), [("CLM", None), ("SFT", "text"), ("SFT", None)])
def test_a_run_on_whole_texts_goes_on_with_texts(task, layout, tmp_path, llama_folder):
    """Of language modelling, or of rows that are whole texts by the report; where there is none, of turns."""
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
    written = source.data.tokenizer.decode(source.encode([{"role": "user", "content": "the quick brown"}]))
    assert written == (START + ASK.format("the quick brown") if source.is_chat else "<s>the quick brown")
    assert source.base is None and source.model.pretrained == str(folder / "model") and not source.model.config


def test_a_models_own_settings(llama_folder, tmp_path, capsys):
    for name in ("config.json", "tokenizer.json", "tokenizer_config.json"):
        (tmp_path / name).write_bytes((llama_folder / name).read_bytes())
    file = tmp_path / "generation_config.json"
    file.write_text('{"do_sample": true, "temperature": 0.6, "min_p": 0.1, "eos_token_id": [2, 7], "max_length": 99}')
    source = read_model(str(tmp_path), None, None, None)
    assert source.generation == Generation(do_sample=True, temperature=0.6) and source.stop_token_ids == [2, 7]
    assert "sets min_p; chat does not support this" in capsys.readouterr().err
    file.write_text('{"temperature": 0.6, "num_beams": 3}')  # which greedy search does not use
    assert read_model(str(tmp_path), None, None, None).generation == Generation(num_beams=3)
    for name in ("generation_config.json", "adapter_config.json"):
        (tmp_path / name).write_text("{")
        assert f"{name} cannot be read" in refused(capsys, "--model", str(tmp_path))
        (tmp_path / name).write_text("{}")
    assert "adapter_config.json has no peft_type" in refused(capsys, "--model", str(tmp_path))
    (tmp_path / "adapter_config.json").write_text('{"peft_type": "LORA"}')
    assert "does not name the adapter's base model" in refused(capsys, "--model", str(tmp_path))
