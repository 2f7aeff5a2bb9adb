"""Best of n in predict: a reward model that looks for digits chooses among sampled answers, on both engines alike."""

import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForSequenceClassification, AutoTokenizer, LlamaConfig, LlamaForSequenceClassification

from lmmods.cli import main
from lmmods.runs.folder import RunFolder
from tests.forks import together

WANTED = re.compile("[5-9]")
TEMPLATE = ("{{ bos_token }}{% for m in messages %}### {{ m['role'] }}:\n{{ m['content'] }}\n"
            "{% if m['role'] == 'assistant' %}{{ eos_token }}{% endif %}{% endfor %}"
            "{% if add_generation_prompt %}### assistant:\n{% endif %}")
QUESTIONS = ["Tell a story.", "Sing.", "What is the number?", "Say it again, please, and once more."]
ENGINES = pytest.mark.parametrize("engine", ["torch", pytest.param("jax", marks=pytest.mark.slow)])
KEY = "model.best_of.reward"


@pytest.fixture(scope="session")
def judge(shared, tokenizer_folder) -> Path:
    """A Llama whose score is high if the text has one of the wanted digits, and 0 otherwise.

    Its one layer attends to tokens with such a digit, if there are any, and copies a 1 from these.
    """
    def fill(folder: Path) -> None:
        tokenizer = AutoTokenizer.from_pretrained(tokenizer_folder)
        tokenizer.chat_template = TEMPLATE
        config = LlamaConfig(vocab_size=len(tokenizer), hidden_size=32, intermediate_size=8, num_hidden_layers=1,
                             num_attention_heads=1, max_position_embeddings=512, num_labels=1, bos_token_id=1,
                             eos_token_id=2, pad_token_id=0)
        model = LlamaForSequenceClassification(config)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.zero_()
            layer = model.model.layers[0]
            for norm in (layer.input_layernorm, layer.post_attention_layernorm, model.model.norm):
                norm.weight.fill_(1)
            words = tokenizer.convert_ids_to_tokens(range(len(tokenizer)))
            model.model.embed_tokens.weight[:, 0] = 1
            model.model.embed_tokens.weight[:, 1] = torch.tensor([float(bool(WANTED.search(word))) for word in words])
            # The last dimension turns slowest with the position, so that distance does not matter.
            layer.self_attn.q_proj.weight[31, 0], layer.self_attn.k_proj.weight[31, 1] = 10, 1
            layer.self_attn.v_proj.weight[2, 1], layer.self_attn.o_proj.weight[2, 2] = 1, 1
            model.score.weight[0, 2] = 1
        model.save_pretrained(folder)
        tokenizer.save_pretrained(folder)

    return shared("judge", fill)


@pytest.fixture
def predict(recipe, tmp_path):
    """A function that samples answers to the questions and returns the rows of predictions.jsonl and the metrics."""
    (tmp_path / "ask.jsonl").write_text("".join(json.dumps({"instruction": text, "output": "7"}) + "\n"
                                                for text in QUESTIONS))

    def predicted(reward: str | Path, engine: str = "torch", size: int = 4, answers: int = 5, run: Any = main,
                  **changes: Any) -> tuple[list[dict[str, Any]], dict[str, float]]:
        arguments = recipe(**{
            "engine": engine, "model__init_args__quantize": None, "model__init_args__lora": None,
            "model__init_args__generation": {"max_new_tokens": 12, "do_sample": True, "top_k": 0, "temperature": 2.0},
            "model__init_args__best_of": {"reward": str(reward), "answers": answers},
            "data__init_args__predict_source": str(tmp_path / "ask.jsonl"), "data__init_args__eval_batch_size": size,
            **changes})
        assert run(["predict", *arguments]) == 0
        folder = RunFolder(tmp_path / "run")
        return ([json.loads(line) for line in folder.predictions.read_text().splitlines()],
                json.loads(folder.metrics_json.read_text()))

    return predicted


def reward_run(recipe, tmp_path: Path, judge: Path, lora: dict[str, Any] | None = None, **data: Any) -> RunFolder:
    """A run that leaves the judge as it is."""
    (tmp_path / "short.jsonl").write_text(json.dumps({"prompt": "Six?", "chosen": "6", "rejected": "4"}) + "\n")
    run = RunFolder(tmp_path / "reward")
    assert main(["fit", *recipe("reward.yaml", **{
        "model": {"class_path": "Reward", "init_args": {"pretrained": str(judge), "lora": lora,
                                                        "optimizer": {"lr": 0.0}}},
        "data": {"class_path": "RewardData", "init_args": {"source": str(tmp_path / "short.jsonl"), **data}},
        "trainer__max_steps": 1, "trainer__default_root_dir": str(run.root)})]) == 0
    return run


def oracle(judge: Path, question: str, answer: str) -> float:
    """The score by transformers alone."""
    tokenizer, model = AutoTokenizer.from_pretrained(judge), AutoModelForSequenceClassification.from_pretrained(judge)
    chat = [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]
    ids = tokenizer(tokenizer.apply_chat_template(chat, tokenize=False), add_special_tokens=False, return_tensors="pt")
    with torch.no_grad():
        return model(**ids).logits.item()


@ENGINES
def test_the_best_answer_is_the_one_with_the_wanted_digit(predict, judge, engine):
    rows, metrics = predict(judge, engine)
    assert [row["instruction"] for row in rows] == QUESTIONS
    everything, best, has = [], [], []
    for row in rows:
        scores = [answer["score"] for answer in row["answers"]]
        texts = [answer["text"] for answer in row["answers"]]
        assert len(set(texts)) == len(texts) == 5
        assert scores == pytest.approx([oracle(judge, row["instruction"], text) for text in texts], abs=1e-4)
        assert [score > 1 for score in scores] == [bool(WANTED.search(text)) for text in texts]
        assert row["prediction"] == texts[scores.index(max(scores))]
        assert row["prediction_with_input"].rstrip().endswith(row["prediction"])
        everything += scores
        best.append(max(scores))
        has.append(bool(WANTED.search(row["prediction"])))
    assert any(has) and len({score > 1 for score in everything}) == 2  # there was something to choose
    assert metrics["predict/reward_mean"] == pytest.approx(sum(everything) / len(everything))
    assert metrics["predict/reward_best"] == pytest.approx(sum(best) / len(best))
    assert "predict/exact_match" in metrics and "predict/answers_without_score" not in metrics


@pytest.mark.slow
def test_answers_depend_neither_on_the_engine_nor_on_the_batch_nor_on_how_many_there_are(predict, judge):
    rows, metrics = predict(judge)
    for engine in ("torch", "jax"):
        for size in (1, 3):
            found, others = predict(judge, engine, size)
            assert [row["prediction"] for row in found] == [row["prediction"] for row in rows]
            for row, wanted in zip(found, rows, strict=True):
                assert [each["text"] for each in row["answers"]] == [each["text"] for each in wanted["answers"]]
                assert [each["score"] for each in row["answers"]] == pytest.approx(
                    [each["score"] for each in wanted["answers"]], abs=1e-5)
            assert others == pytest.approx(metrics, abs=1e-5)
    more, _ = predict(judge, answers=7)
    assert [row["answers"][:5] for row in more] == [row["answers"] for row in rows]


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_each_process_scores_the_answers_to_its_own_prompts(predict, judge, strategy):
    def on_two(arguments: list[str]) -> int:
        together(arguments)
        return 0

    rows, metrics = predict(judge, size=1)
    found, others = predict(judge, size=1, run=on_two, trainer__devices=2, trainer__strategy=strategy)
    assert [row["prediction"] for row in found] == [row["prediction"] for row in rows]
    assert others == pytest.approx(metrics, abs=1e-5)


def test_the_first_answer_is_that_of_a_run_without_reward_model(predict, judge):
    rows, _ = predict(judge)
    alone, _ = predict(judge, model__init_args__best_of=None)
    assert [row["prediction"] for row in alone] == [row["answers"][0]["text"] for row in rows]


@pytest.mark.parametrize("lora", [None, pytest.param({"rank": 2}, marks=pytest.mark.slow)], ids=["full", "adapter"])
def test_a_run_scores_as_the_model_that_it_leaves(predict, judge, recipe, tmp_path, lora):
    """A run that learns nothing: its folder, its model/, a copy of that, and the model that it started from."""
    run = reward_run(recipe, tmp_path, judge, lora)
    copied = shutil.copytree(run.model, tmp_path / "copied" / "judge")
    rows, metrics = predict(judge)
    for name in (run.root, run.model, copied):
        found, others = predict(name)
        assert [[each["score"] for each in row["answers"]] for row in found] == [
            pytest.approx([each["score"] for each in row["answers"]], abs=1e-5) for row in rows]
        assert others == pytest.approx(metrics, abs=1e-5)


@ENGINES
def test_texts_are_scored_with_what_they_go_on_from(predict, judge, tmp_path, engine):
    (tmp_path / "texts.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in ("the fox", "the 7")))
    rows, _ = predict(judge, engine, data={"class_path": "CLMData", "init_args": {
        "source": str(tmp_path / "texts.jsonl"), "predict_source": str(tmp_path / "texts.jsonl"), "max_length": 64}},
        model__class_path="CLM")
    assert all(each["score"] > 1 for each in rows[1]["answers"])
    assert [each["score"] > 1 for each in rows[0]["answers"]] == [
        bool(WANTED.search(each["text"])) for each in rows[0]["answers"]]


@ENGINES
def test_prompts_of_preferences_are_answered_and_scored(predict, judge, pairs, engine):
    rows, metrics = predict(judge, engine, model__class_path="Preference", data={
        "class_path": "PreferenceData", "init_args": {"source": pairs, "predict_source": pairs, "template": "alpaca",
                                                    "max_length": 128}})
    for row in rows:
        for answer in row["answers"][:2]:
            assert answer["score"] == pytest.approx(oracle(judge, row["prompt"], answer["text"]), abs=1e-4)
    assert {"predict/exact_match", "predict/reward_best", "predict/reward_mean"} <= metrics.keys()


def test_answers_that_cannot_be_scored_are_counted_and_not_chosen(predict, judge, recipe, tmp_path):
    run = reward_run(recipe, tmp_path, judge, target_max_length=14, on_overflow="skip")
    rows, metrics = predict(run.root)
    scores = [[answer["score"] for answer in row["answers"]] for row in rows]
    assert metrics["predict/answers_without_score"] == sum(each.count(None) for each in scores) > 0
    for row, own in zip(rows, scores, strict=True):
        known = [score for score in own if score is not None]
        assert row["prediction"] == row["answers"][own.index(max(known)) if known else 0]["text"]


def test_an_answer_that_is_too_long_stops_where_the_reward_model_says_so(predict, judge, recipe, tmp_path, capsys):
    run = reward_run(recipe, tmp_path, judge, target_max_length=14, on_overflow="error")
    with pytest.raises(AssertionError):
        predict(run.root)
    assert "error: an answer cannot be encoded for scoring" in capsys.readouterr().err


@pytest.mark.parametrize(("changes", "says"), [
    ({"model__init_args__generation": {"do_sample": False}}, "model.best_of needs sampled answers"),
    ({"model__init_args__generation": {"do_sample": True, "num_beams": 2}}, "num_beams to 1"),
    ({"model__init_args__best_of": {"reward": "x", "answers": 1}}, "best_of.answers is 1, but must be 2 or more"),
    ({"model__init_args__best_of": {"answers": 4}}, "best_of.reward is null, but must be a folder or hub id"),
])
def test_a_recipe_that_leaves_nothing_to_choose_is_refused(predict, judge, capsys, changes, says):
    with pytest.raises(AssertionError):
        predict(judge, **changes)
    assert says in capsys.readouterr().err


def _changed(judge: Path, folder: Path, file: str = "config.json", **fields: Any) -> Path:
    shutil.copytree(judge, folder)
    content = json.loads((folder / file).read_text())
    (folder / file).write_text(json.dumps({**content, **fields}))
    return folder


def test_what_is_no_reward_model_is_refused_by_name(predict, judge, llama_folder, finished, tmp_path, capsys):
    three = _changed(judge, tmp_path / "three", id2label={str(n): f"L{n}" for n in range(3)})
    unwritten = shutil.copytree(judge, tmp_path / "unwritten")
    (unwritten / "chat_template.jinja").unlink()
    empty = tmp_path / "empty"
    empty.mkdir()
    cases = [(llama_folder, f"{KEY} {llama_folder} is a LlamaForCausalLM, not a reward model"),
             (three, f"{KEY} {three} has 3 labels, but a reward model must have one"),
             (unwritten, f"{KEY} {unwritten} has no chat template"),
             (empty, "has no config.json"), ("no/such-model", "no/such-model")]
    sft = finished()
    cases += [(sft.root, f"{KEY} {sft.root}: this run's task is SFT, but must be Reward"),
              (sft.model, f"{KEY} {sft.model}: this run's task is SFT"),
              (shutil.copytree(sft.model, tmp_path / "adapter"), "is an adapter for CAUSAL_LM")]
    for reward, says in cases:
        with pytest.raises(AssertionError):
            predict(reward)
        error = capsys.readouterr().err
        assert says in error and "Traceback" not in error, (reward, error)
