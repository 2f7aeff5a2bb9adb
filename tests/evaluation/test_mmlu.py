"""MMLU during training: the letters' tokens, answers compared with a bare loop, no effect on training.

Everything is tiny and offline; slow tests start several processes or compile many programs.
"""

import csv
import json
import random
from pathlib import Path

import numpy as np
import pytest
import torch
from peft import PeftModel
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerFast

from lmmods.cli import main
from lmmods.core.errors import UserError
from lmmods.core.text_metrics import choice_scores
from lmmods.data.encode.encoder import TextEncoder
from lmmods.data.sft import SFTData
from lmmods.evaluation.mmlu import MMLUEvaluator, find_choice_tokens
from lmmods.runs.folder import RunFolder
from lmmods.torch_engine.callbacks import evaluation as torch_side
from lmmods.torch_engine.nn.lm_head import LMHead, choice_logits
from tests.data.test_mlm import bert_folder  # noqa: F401 - a fixture
from tests.data.test_qa import squad
from tests.evaluation.test_samples import block, plain, samples  # noqa: F401 - a fixture among them
from tests.finished_runs import assert_same_checkpoint, seconds_of_steps

ROOT = Path(__file__).parents[2]
LORA = {"model__init_args__quantize": None, "model__init_args__lora": {"rank": 4, "alpha": 16}}
ENGINES = pytest.mark.parametrize("engine", ["torch", "jax"])
SLOW_ON_JAX = pytest.mark.parametrize("engine", ["torch", pytest.param("jax", marks=pytest.mark.slow)])
UNEVEN = [2, 7, 14]  # questions of each subject


def write(path: Path, rows: list[dict]) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


@pytest.fixture
def rows() -> list[dict]:
    """Return 23 questions with different lengths and ends, in three subjects of different sizes, with five letters."""
    dice = random.Random(3)
    return [{"subject": subject, "input": f"Count {'one ' * dice.randint(1, 30)}or {index}.\n"
             + "".join(f"{letter}. {dice.randint(1, 99)}\n" for letter in "ABCDE")
             + dice.choice(["Answer:", "I say", "So?", "It is (", "\n", "Response:\n0"]),
             "output": dice.choice("ABCDE")}
            for subject, count in zip(("adding", "counting", "naming"), UNEVEN) for index in range(count)]


@pytest.fixture
def questions(tmp_path, rows) -> str:
    return write(tmp_path / "questions.jsonl", rows)


@pytest.fixture
def folder(tmp_path) -> RunFolder:
    return RunFolder(tmp_path / "run")


@pytest.fixture
def rounds(monkeypatch) -> list[dict[int, np.ndarray]]:
    """Record the letters' logits of each round of questions, by row index."""
    rounds: list[dict[int, np.ndarray]] = []
    score = MMLUEvaluator.score

    def score_and_record(self, step, logits):
        rounds.append({row: logits[row][self._columns[row]] for row in sorted(logits)})
        return score(self, step, logits)

    monkeypatch.setattr(MMLUEvaluator, "score", score_and_record)
    return rounds


def read_logged(folder: RunFolder) -> list[dict[str, float]]:
    with open(folder.metrics_csv, newline="") as file:
        return [{key: float(value) for key, value in row.items() if value and key != "train/tokens_per_second"}
                for row in csv.DictReader(file)]


def read_final_scores(folder: RunFolder) -> dict[str, float]:
    metrics = json.loads(folder.metrics_json.read_text())
    return {name: value for name, value in metrics.items() if name.startswith("mmlu/")}


def read_question_steps(folder: RunFolder) -> list[int]:
    return [row["step"] for row in read_logged(folder) if "mmlu/eval/accuracy" in row]


# The letters' tokens -------------------------------------------------------------------------------------------------


def make_metaspace_tokenizer(merges: list[tuple[str, str]], letters: str = "ABCD") -> PreTrainedTokenizerFast:
    """Return a tokenizer that prepends ▁ to each text, like Llama's."""
    vocabulary = ["<unk>", "<s>", "</s>", "▁", ":", *letters, *("".join(pair) for pair in merges)]
    tokenizer = Tokenizer(models.BPE({token: n for n, token in enumerate(vocabulary)}, merges, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(split=False)
    tokenizer.decoder = decoders.Metaspace()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>", unk_token="<unk>")


@pytest.mark.parametrize(("prompt", "expected"), [
    ("Answer:", "Ġ{}"), ("Answer", "Ġ{}"), ("Answer:\n", "{}"), ("(", "Ġ{}"), ("Answer:\n\n", "{}"),
])
def test_a_letters_token_is_the_one_that_follows_the_prompt(prompt, expected):
    tokenizer = AutoTokenizer.from_pretrained(ROOT / "demo" / "llama")
    tokens = find_choice_tokens(tokenizer, TextEncoder(tokenizer), prompt, "ABCD")
    assert tokenizer.convert_ids_to_tokens(tokens) == [expected.format(letter) for letter in "ABCD"]
    space = " " if "Ġ" in expected else ""
    for letter, token in zip("ABCD", tokens):
        assert tokenizer.encode(prompt + space + letter, add_special_tokens=False)[-1] == token


@pytest.mark.parametrize(("merges", "expected"), [
    ([("▁", letter) for letter in "ABCD"], "▁{}"), ([], "{}"), ([("▁", "A")], "{}"),
], ids=["a space in the token", "a space alone", "a space in one token only"])
def test_all_letters_have_the_same_form(merges, expected):
    tokenizer = make_metaspace_tokenizer(merges)
    tokens = find_choice_tokens(tokenizer, TextEncoder(tokenizer), "A:", "ABCD")
    assert tokenizer.convert_ids_to_tokens(tokens) == [expected.format(letter) for letter in "ABCD"]


@pytest.mark.parametrize(("letters", "merges"), [("AB", []), ("ABCD", [(":", "A"), ("▁", "A")])],
                         ids=["unknown letters", "a letter that grows into the prompt"])
def test_letters_without_their_own_token_are_an_error(letters, merges):
    tokenizer = make_metaspace_tokenizer(merges, letters)
    with pytest.raises(UserError, match="does not encode each of the letters A, B, C, D as one token"):
        find_choice_tokens(tokenizer, TextEncoder(tokenizer), "A:", "ABCD")


# Questions -----------------------------------------------------------------------------------------------------------


class Model:
    """Task as the evaluator sees it."""

    auto_class = "AutoModelForCausalLM"

    def __init__(self, num_positions: int | None = None):
        self.num_positions = num_positions

    def max_positions(self) -> int | None:
        return self.num_positions


@pytest.fixture
def data(llama_folder, instructions) -> SFTData:
    module = SFTData(str(instructions), batch_size=4)
    module.connect(pretrained=str(llama_folder))
    return module


def prepare(data, source: str, num_positions: int | None = None, **settings) -> MMLUEvaluator:
    evaluator = MMLUEvaluator(source, **settings)
    evaluator.prepare(data, Model(num_positions))
    return evaluator


def test_a_prompt_is_the_unchanged_row(data, rows, questions):
    evaluator = prepare(data, questions)
    assert [ids.tolist() for ids in evaluator.prompt_ids] == [data.tokenizer.encode(row["input"]) for row in rows]
    assert ["ABCDE"[answer] for answer in evaluator._answers] == [row["output"] for row in rows]
    batches = list(evaluator.batches(data, 0, 1))
    assert sorted(index for batch in batches for index in batch["index"].tolist()) == list(range(len(rows)))
    by_rank = [list(evaluator.batches(data, rank, 4)) for rank in range(4)]
    # The same number on each process: sharded forward passes wait for each other.
    assert {len(batches) for batches in by_rank} == {2}
    indices = [index for batches in by_rank for batch in batches for index in batch["index"].tolist() if index >= 0]
    assert sorted(indices) == list(range(len(rows)))


def test_a_space_at_the_end_belongs_to_the_answer(tmp_path, data, rows):
    plain_rows, spaced = prepare(data, write(tmp_path / "plain.jsonl", rows)), prepare(
        data, write(tmp_path / "spaced.jsonl", [{**row, "input": row["input"] + " "} for row in rows]))
    assert [ids.tolist() for ids in plain_rows.prompt_ids] == [ids.tolist() for ids in spaced.prompt_ids]


def test_the_letters_tokens_depend_on_the_end_of_the_prompt(tmp_path, data):
    data._tokenizer.loaded.tokenizer = AutoTokenizer.from_pretrained(ROOT / "demo" / "llama")
    rows = [{"input": f"Choose.{end}", "output": letter} for end in ("\nAnswer:", "\n") for letter in "ABC"]
    evaluator = prepare(data, write(tmp_path / "rows.jsonl", rows))
    names = data.tokenizer.convert_ids_to_tokens(evaluator.choice_ids.tolist())
    letters = [[names[column] for column in row] for row in evaluator._columns]
    assert letters == [["ĠA", "ĠB", "ĠC"]] * 3 + [list("ABC")] * 3


def test_a_long_prompt_is_truncated_on_the_left_and_reported(data, rows, questions, capsys):
    whole = [data.tokenizer.encode(row["input"]) for row in rows]
    max_tokens = sorted(len(ids) for ids in whole)[10]
    for settings in ({"max_length": max_tokens}, {"num_positions": max_tokens}):
        evaluator = prepare(data, questions, **settings)
        assert [ids.tolist() for ids in evaluator.prompt_ids] == [
            ids if len(ids) <= max_tokens else [1, *ids[1 - max_tokens:]] for ids in whole]
        num_truncated = sum(len(ids) > max_tokens for ids in whole)
        assert capsys.readouterr().out.count(f"{num_truncated} of 23 prompts have more than {max_tokens} tokens") == 1


def test_a_limit_takes_rows_from_the_whole_file(data, rows, questions):
    evaluator = prepare(data, questions, limit=5)
    assert [ids.tolist() for ids in evaluator.prompt_ids] == [
        data.tokenizer.encode(rows[index]["input"]) for index in (0, 4, 9, 13, 18)]
    assert len(evaluator._columns[0]) == 5  # the letters are those of all rows
    assert len(prepare(data, questions, limit=99).prompt_ids) == 23


def test_several_files_and_mapped_columns_are_read(tmp_path, data, rows):
    from lmmods.recipe.source import Source

    first = write(tmp_path / "first.jsonl", rows[:3])
    second = write(tmp_path / "second.jsonl", [{"question": row["input"], "right": row["output"]} for row in rows[3:]])
    evaluator = prepare(data, [first, Source(second, columns={"question": "input", "right": "output"}, limit=4)])
    assert len(evaluator.prompt_ids) == 7 and evaluator._subjects == ["adding"] * 2 + ["counting"] + ["all"] * 4


def test_without_subjects_there_is_one_accuracy(tmp_path, data):
    evaluator = prepare(data, write(tmp_path / "rows.jsonl", [{"input": "Q:", "output": letter} for letter in "AJ"]))
    scores = evaluator.score(3, {row: np.arange(10.0) for row in range(2)})
    expected = np.log(np.exp(np.arange(10)).sum()) - 4.5
    assert scores == pytest.approx({"mmlu/eval/accuracy": 0.5, "mmlu/eval/mean_subject_accuracy": 0.5,
                                    "mmlu/eval/loss": expected})
    assert evaluator.latest_step == 3


def test_scores_equal_values_computed_by_hand():
    logits = np.log([[0.7, 0.2, 0.1], [0.1, 0.6, 0.3], [0.2, 0.3, 0.5], [0.4, 0.5, 0.1]])
    scores = choice_scores(logits, np.array([0, 2, 2, 1]), ["x", "y", "y", "y"])
    assert scores == pytest.approx({"accuracy": 3 / 4, "mean_subject_accuracy": (1 + 2 / 3) / 2, "x": 1.0, "y": 2 / 3,
                                    "loss": -np.log([0.7, 0.3, 0.5, 0.5]).mean()})


GOOD = {"input": "Q:", "output": "B"}


@pytest.mark.parametrize(("rows", "message"), [
    ([GOOD, {"output": "A"}], ":2: input is missing"),
    ([GOOD, {"input": " ", "output": "A"}], ":2: input is ' '"),
    ([GOOD, {"input": "Q:", "output": "AB"}], ":2: output is 'AB'"),
    ([GOOD, {"input": "Q:", "output": "K"}], ":2: output is 'K'"),
    ([GOOD, {"input": "Q:", "output": 1}], ":2: output is 1"),
    ([GOOD, {"input": "Q:"}], ":2: output is missing"),
    ([GOOD, {**GOOD, "subject": 5}], ":2: subject is 5"),
    ([GOOD, {**GOOD, "subject": "loss"}], ":2: subject is 'loss'"),
    ([{"input": "Q:", "output": "A"}] * 2, "every answer is A"),
    ([], "there are no rows"),
])
def test_a_row_that_is_not_a_question_is_rejected(tmp_path, data, rows, message):
    with pytest.raises(UserError, match="mmlu.source") as error:
        prepare(data, write(tmp_path / "rows.jsonl", rows))
    assert message in str(error.value)


@pytest.mark.parametrize(("settings", "message"), [
    ({"every_n_steps": 0}, "mmlu.every_n_steps is 0"), ({"limit": 0}, "mmlu.limit is 0"),
    ({"max_length": 1}, "mmlu.max_length is 1"), ({"source": []}, "mmlu.source"), ({"name": "a/b"}, "mmlu.name"),
])
def test_invalid_settings_are_rejected(settings, message):
    with pytest.raises(UserError, match=message):
        MMLUEvaluator(**settings)


# Compared with a bare loop -------------------------------------------------------------------------------------------


def answer_with_bare_loop(model, tokenizer, rows: list[dict]) -> tuple[np.ndarray, float]:
    """Return (picked letters, mean loss), one prompt at a time; after these prompts, letters are single tokens."""
    letters = tokenizer.convert_tokens_to_ids(list("ABCDE"))
    picked, losses = [], []
    for row in rows:
        with torch.no_grad():
            logits = model(torch.tensor([tokenizer.encode(row["input"])])).logits[0, -1, letters].double()
        picked.append(logits.argmax().item())
        losses.append(torch.nn.functional.cross_entropy(logits, torch.tensor("ABCDE".index(row["output"]))).item())
    return np.array(picked), float(np.mean(losses))


@SLOW_ON_JAX
def test_answers_equal_those_of_the_saved_model(recipe, folder, plain, questions, rows, rounds,  # noqa: F811
                                                engine):
    changes = {**LORA, "model__init_args__pretrained": plain, "engine": engine, "mmlu": {"source": questions},
               "data__init_args__eval_batch_size": 12}
    assert main(["fit", *recipe(**changes)]) == 0
    assert read_question_steps(folder) == [4, 6]
    tokenizer = AutoTokenizer.from_pretrained(folder.model)
    model = AutoModelForCausalLM.from_pretrained(plain).eval()
    model.resize_token_embeddings(len(tokenizer), mean_resizing=False)
    _, untrained = answer_with_bare_loop(model, tokenizer, rows)
    picked, loss = answer_with_bare_loop(PeftModel.from_pretrained(model, folder.model).eval(), tokenizer, rows)
    assert [rounds[-1][row].argmax() for row in range(23)] == picked.tolist() and len(set(picked)) > 2
    hits = picked == ["ABCDE".index(row["output"]) for row in rows]
    parts = np.split(hits, np.cumsum(UNEVEN)[:-1])
    metrics = read_final_scores(folder)
    assert metrics.pop("mmlu/eval/loss") == pytest.approx(loss, abs=1e-5) and abs(loss - untrained) > 1e-3
    assert metrics == pytest.approx({
        "mmlu/eval/accuracy": hits.mean(), "mmlu/eval/mean_subject_accuracy": np.mean([p.mean() for p in parts]),
        **{f"mmlu/eval/{name}": p.mean() for name, p in zip(("adding", "counting", "naming"), parts)}})
    last, = (row for row in read_logged(folder) if row["step"] == 6)
    assert {name: value for name, value in last.items() if name.startswith("mmlu/")} == read_final_scores(folder)


def test_a_model_without_a_separate_head_gives_the_same_logits(plain, data, questions):  # noqa: F811
    model = AutoModelForCausalLM.from_pretrained(plain).eval()
    model.resize_token_embeddings(len(data.tokenizer), mean_resizing=False)  # one to pad with
    evaluator = prepare(data, questions)
    batch = next(evaluator.batches(data, 0, 1))
    choices = torch.from_numpy(evaluator.choice_ids)
    with torch.no_grad():
        whole, part = (choice_logits(model, head, batch, choices) for head in (None, LMHead.from_model(model)))
    assert whole.shape == (4, 5)
    torch.testing.assert_close(part, whole, rtol=0, atol=1e-5)


@SLOW_ON_JAX
def test_the_batch_size_changes_nothing(recipe, folder, questions, rounds, engine):
    for size in (1, 5, 40):
        arguments = recipe(**LORA, engine=engine, mmlu={"source": questions}, data__init_args__eval_batch_size=size)
        assert main(["validate", *arguments]) == 0
    for other in rounds[1:]:
        assert all(other[row].argmax() == rounds[0][row].argmax() for row in range(23))
        assert np.stack(list(other.values())) == pytest.approx(np.stack(list(rounds[0].values())), abs=2e-5)


@pytest.mark.slow
def test_both_engines_give_the_same_answers(recipe, tmp_path, questions, plain):  # noqa: F811
    """From the same weights, after the same six LoRA steps; and the same samples."""
    by_engine, sampled = [], []
    for engine in ("torch", "jax"):
        run = RunFolder(tmp_path / engine)
        assert main(["fit", *recipe(
            **LORA, engine=engine, mmlu={"source": questions}, **block(max_new_tokens=12),
            model__init_args__pretrained=plain, trainer__default_root_dir=str(run.root),
            data__init_args__eval_batch_size=12)]) == 0
        sampled.append(samples(run))
        by_engine.append([{name: value for name, value in row.items() if name.startswith("mmlu/")}
                          for row in read_logged(run)] + [read_final_scores(run)])
    assert [len(row) for row in by_engine[0]] == [0, 0, 0, 6, 0, 6, 6]
    for row, expected in zip(*by_engine, strict=True):
        losses = [part.pop("mmlu/eval/loss", 0.0) for part in (row, expected)]
        assert losses[0] == pytest.approx(losses[1], abs=1e-4) and row == expected
    assert sampled[0] == sampled[1] and len({row["output"] for row in sampled[0]}) > 2


# No effect on training -----------------------------------------------------------------------------------------------


@pytest.fixture
def noisy_questions(monkeypatch):
    """Make questions use every random state."""
    quiet = torch_side.choice_logits

    def noisy(*args):
        torch.rand(3), np.random.rand(3), random.random()
        return quiet(*args)

    monkeypatch.setattr(torch_side, "choice_logits", noisy)


@pytest.mark.slow
@pytest.mark.parametrize(("engine", "every", "changes"), [
    ("torch", 1, {"model__init_args__lora": {"rank": 4, "dropout": 0.2}, "trainer__accumulate_grad_batches": 3,
                  "model__init_args__gradient_checkpointing": True}),
    ("torch", None, {"model__init_args__lora": {"rank": 4, "dropout": 0.2}, "trainer__accumulate_grad_batches": 3}),
    pytest.param("jax", 1, {"model__init_args__lora": {"rank": 4, "dropout": 0.2},
                            "trainer__accumulate_grad_batches": 3}, marks=pytest.mark.slow),
], ids=["qlora-by-steps", "qlora-by-validations", "jax"])
def test_a_run_with_questions_equals_one_without(recipe, tmp_path, questions, noisy_questions, engine, every, changes):
    without, asking = RunFolder(tmp_path / "without"), RunFolder(tmp_path / "asking")
    states = []
    for run, extra in ((without, {}), (asking, {"mmlu": {"source": questions, "every_n_steps": every}})):
        changes = {**changes, "engine": engine, "trainer__default_root_dir": str(run.root)}
        assert main(["fit", *recipe(**changes, **extra)]) == 0
        states.append((torch.get_rng_state().tolist(), np.random.get_state()[1:3], random.getstate()))
    assert str(states[0]) == str(states[1])
    rows = read_logged(asking)
    # An epoch of 8 micro-batches has steps of 3, 3 and 2; validation is after every fourth step and at the end.
    assert read_question_steps(asking) == ([1, 2, 3, 4, 5, 6] if every else [4, 6])
    assert [{name: value for name, value in row.items() if not name.startswith("mmlu/")} for row in rows
            ] == read_logged(without)
    assert_same_checkpoint(asking, without)


@SLOW_ON_JAX
def test_measured_speed_excludes_questions(recipe, folder, questions, engine, monkeypatch, clock):
    batches = MMLUEvaluator.batches

    def slow(self, *args, **options):
        clock.now += 1000
        return batches(self, *args, **options)

    monkeypatch.setattr(MMLUEvaluator, "batches", slow)
    assert main(["fit", *recipe(**LORA, engine=engine, mmlu={"source": questions, "every_n_steps": 5})]) == 0
    assert clock.now > 1000 and 0 < max(seconds_of_steps(folder)) < 1


@pytest.mark.slow
@pytest.mark.parametrize("every", [None, 2])
@pytest.mark.parametrize("batch", [4, 6, 12])
def test_an_interrupted_run_resumes_with_the_same_scores(recipe, finished, tmp_path, rows, shared, stop_at, batch,
                                                         every):
    """In the middle of a step, in a step with questions, and in one with questions and validation."""
    questions = shared("questions", lambda folder: write(folder / "questions.jsonl", rows)) / "questions.jsonl"
    changes = {"mmlu": {"source": str(questions), "every_n_steps": every}, "trainer__accumulate_grad_batches": 3}
    straight, broken = finished(**changes), RunFolder(tmp_path / "broken")
    stop_at(batch)
    arguments = recipe(**changes, trainer__default_root_dir=str(broken.root))
    assert main(["fit", *arguments]) == 130
    assert main(["fit", *arguments, "--ckpt_path", "last"]) == 0
    assert read_logged(broken) == read_logged(straight) and read_final_scores(broken) == read_final_scores(straight)


# When ----------------------------------------------------------------------------------------------------------------


@SLOW_ON_JAX
@pytest.mark.parametrize(("every", "validations", "steps"), [
    (None, 2, [2, 4, 6]), (4, 2, [4, 6]), (None, None, [6]), (None, 4, [4, 6]),
])
def test_questions_are_asked_at_validations_or_by_steps_and_at_the_end(recipe, folder, questions, engine, every,
                                                                       validations, steps):
    changes = {"trainer__val_check_interval": validations or 2, "mmlu": {"source": questions, "every_n_steps": every}}
    if validations is None:
        changes["data__init_args__val_size"] = 0
        changes["checkpoint"] = {"keep_best": 0}
    assert main(["fit", *recipe(**LORA, **changes, engine=engine)]) == 0
    assert read_question_steps(folder) == steps
    assert len(read_final_scores(folder)) == 6


@SLOW_ON_JAX
def test_a_run_stopped_early_is_evaluated_at_its_end(recipe, folder, questions, engine):
    stopping = [{"class_path": "EarlyStopping", "init_args": {"monitor": "val/loss", "patience": 1,
                                                              "divergence_threshold": 0.0}}]
    assert main(["fit", *recipe(**LORA, mmlu={"source": questions, "every_n_steps": 50}, engine=engine,
                                trainer__callbacks=stopping)]) == 0
    assert read_question_steps(folder) == [4] and len(read_final_scores(folder)) == 6 and folder.completed.exists()


@SLOW_ON_JAX
def test_checkpoints_and_early_stopping_can_use_the_answers(recipe, folder, questions, engine):
    stopping = [{"class_path": "EarlyStopping", "init_args": {"monitor": "mmlu/eval/loss", "patience": 1}}]
    assert main(["fit", *recipe(
        **LORA, mmlu={"source": questions}, engine=engine, trainer__callbacks=stopping, trainer__max_steps=12,
        trainer__val_check_interval=2, model__init_args__optimizer={"lr": 0.05},
        checkpoint={"monitor": "mmlu/eval/loss", "mode": "min"})]) == 0
    rows = {int(row["step"]): row["mmlu/eval/loss"] for row in read_logged(folder) if "mmlu/eval/loss" in row}
    *before, last = rows.values()
    assert before == sorted(before, reverse=True) and last >= before[-1] and max(rows) < 12
    assert folder.resolve("best").name == f"step={min(rows, key=rows.get)}"


@pytest.mark.slow
@SLOW_ON_JAX
def test_validate_and_test_evaluate_too(recipe, folder, questions, instructions, engine):
    changes = {**LORA, "engine": engine, "mmlu": {"source": questions, "every_n_steps": 3, "name": "test"},
               "data__init_args__test_source": {"path": str(instructions), "limit": 4}}
    assert main(["fit", *recipe(**changes)]) == 0
    expected = read_final_scores(folder)
    for command in ("validate", "test"):
        folder.metrics_json.unlink()
        assert main([command, *recipe(**changes), "--ckpt_path", "last"]) == 0
        assert read_final_scores(folder) == pytest.approx(expected, abs=1e-6)
    assert len(expected) == 6 and all(name.startswith("mmlu/test/") for name in expected)


@pytest.mark.slow
@pytest.mark.parametrize(("engine", "strategy", "changes", "processes"), [
    ("torch", "ddp", {}, 1), ("torch", "fsdp", {**LORA, "model__init_args__lora": None}, 1),
    ("jax", "fsdp", {**LORA, "model__init_args__lora": None}, 1), ("jax", "fsdp", LORA, 2),
], ids=["ddp-qlora", "fsdp-full", "jax-fsdp-full", "jax-processes"])
def test_two_devices_answer_and_sample_as_one(on_one_and_two, plain, questions, strategy, engine, changes,  # noqa: F811
                                   processes):
    """Lightning starts its second process itself; JAX has one process with two devices, or two with one each."""
    single, two, output = on_one_and_two(strategy, processes, **changes, mmlu={"source": questions}, **block(),
                                         engine=engine, model__init_args__pretrained=plain)
    assert read_question_steps(single)[-1] == read_question_steps(two)[-1] == 6
    assert output.count("23 questions") == len(read_question_steps(two))
    assert read_final_scores(two) == pytest.approx(read_final_scores(single), abs=1e-4)
    assert samples(two) == samples(single) and output.count("sample at step 6") == 2


# Errors --------------------------------------------------------------------------------------------------------------


@ENGINES
def test_a_bad_row_stops_the_run_before_anything_is_written(recipe, tmp_path, folder, engine, capsys):
    source = write(tmp_path / "bad.jsonl", [GOOD, {"input": "Q:", "output": "yes"}])
    assert main(["fit", *recipe(**LORA, mmlu={"source": source}, engine=engine)]) == 2
    errors = capsys.readouterr().err
    assert f"{source}:2: output is 'yes'" in errors and not folder.root.exists()


@ENGINES
def test_a_task_without_next_tokens_is_rejected(recipe, folder, tmp_path, bert_folder, questions, engine, capsys):  # noqa: F811
    config = {"model_type": "bert", "hidden_size": 48, "intermediate_size": 64, "num_hidden_layers": 1,
              "num_attention_heads": 4, "max_position_embeddings": 64}
    data = {"source": squad(tmp_path), "tokenizer": str(bert_folder), "max_length": 48, "stride": 16,
            "question_max_length": 16}
    assert main(["fit", *recipe(mmlu={"source": questions}, engine=engine,
                                model={"class_path": "QA", "init_args": {"config": config}},
                                data={"class_path": "QAData", "init_args": data})]) == 2
    errors = capsys.readouterr().err
    assert errors.startswith("error: mmlu.source: QA") and "null" in errors and not folder.root.exists()


def test_a_misspelt_key_is_an_error(recipe, capsys):
    assert main(["fit", *recipe(mmlu__every_n_step=3)]) == 2
    assert "Did you mean mmlu.every_n_steps?" in capsys.readouterr().err


def test_the_demo_file_is_what_its_generator_writes(monkeypatch):
    monkeypatch.syspath_prepend(ROOT / "demo")
    from questions import make_questions

    rows = [json.loads(line) for line in (ROOT / "demo" / "mmlu.jsonl").read_text().splitlines()]
    assert make_questions() == rows and len(rows) == 40
    for row in rows:
        choices = [line[3:] for line in row["input"].split("\n") if line[1:3] == ". "]
        assert len(set(choices)) == 4
