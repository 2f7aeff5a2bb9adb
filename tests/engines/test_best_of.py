"""Best of n in predict: a reward model that scores digits chooses among sampled answers, on both engines."""

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

DIGIT = re.compile("[5-9]")
TEMPLATE = ("{{ bos_token }}{% for m in messages %}### {{ m['role'] }}:\n{{ m['content'] }}\n"
            "{% if m['role'] == 'assistant' %}{{ eos_token }}{% endif %}{% endfor %}"
            "{% if add_generation_prompt %}### assistant:\n{% endif %}")
QUESTIONS = ["Tell a story.", "Sing.", "What is the number?", "Say it again, please, and once more."]
ENGINES = pytest.mark.parametrize("engine", ["torch", pytest.param("jax", marks=pytest.mark.slow)])
KEY = "model.best_of.reward"


@pytest.fixture(scope="session")
def judge(shared, tokenizer_folder) -> Path:
    """Return a Llama that gives a high score to texts with a digit that DIGIT matches, and 0 to others.

    Its only layer attends to tokens with such a digit and copies a 1 from them.
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
            model.model.embed_tokens.weight[:, 1] = torch.tensor([float(bool(DIGIT.search(word))) for word in words])
            # The last dimension rotates slowest with the position, so distance does not matter.
            layer.self_attn.q_proj.weight[31, 0], layer.self_attn.k_proj.weight[31, 1] = 10, 1
            layer.self_attn.v_proj.weight[2, 1], layer.self_attn.o_proj.weight[2, 2] = 1, 1
            model.score.weight[0, 2] = 1
        model.save_pretrained(folder)
        tokenizer.save_pretrained(folder)

    return shared("judge", fill)


@pytest.fixture
def predict(recipe, tmp_path):
    """Return a function that samples answers to QUESTIONS and returns the rows of predictions.jsonl and the metrics."""
    (tmp_path / "ask.jsonl").write_text("".join(json.dumps({"instruction": text, "output": "7"}) + "\n"
                                                for text in QUESTIONS))

    def run_predict(reward: str | Path, engine: str = "torch", size: int = 4, answers: int = 5, run: Any = main,
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

    return run_predict


def train_reward_run(recipe, tmp_path: Path, judge: Path, lora: dict[str, Any] | None = None, **data: Any) -> RunFolder:
    """Run Reward with a learning rate of 0, so the model stays the judge."""
    (tmp_path / "short.jsonl").write_text(json.dumps({"prompt": "Six?", "chosen": "6", "rejected": "4"}) + "\n")
    run = RunFolder(tmp_path / "reward")
    assert main(["fit", *recipe("reward.yaml", **{
        "model": {"class_path": "Reward", "init_args": {"pretrained": str(judge), "lora": lora,
                                                        "optimizer": {"lr": 0.0}}},
        "data": {"class_path": "RewardData", "init_args": {"source": str(tmp_path / "short.jsonl"), **data}},
        "trainer__max_steps": 1, "trainer__default_root_dir": str(run.root)})]) == 0
    return run


def score_bare(judge: Path, question: str, answer: str) -> float:
    """Return the score computed by transformers alone."""
    tokenizer, model = AutoTokenizer.from_pretrained(judge), AutoModelForSequenceClassification.from_pretrained(judge)
    chat = [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]
    ids = tokenizer(tokenizer.apply_chat_template(chat, tokenize=False), add_special_tokens=False, return_tensors="pt")
    with torch.no_grad():
        return model(**ids).logits.item()


@ENGINES
def test_the_answer_with_the_highest_score_is_chosen(predict, judge, engine):
    rows, metrics = predict(judge, engine)
    assert [row["instruction"] for row in rows] == QUESTIONS
    all_scores, best, has_digit = [], [], []
    for row in rows:
        scores = [answer["score"] for answer in row["answers"]]
        texts = [answer["text"] for answer in row["answers"]]
        assert len(set(texts)) == len(texts) == 5
        assert scores == pytest.approx([score_bare(judge, row["instruction"], text) for text in texts], abs=1e-4)
        assert [score > 1 for score in scores] == [bool(DIGIT.search(text)) for text in texts]
        assert row["prediction"] == texts[scores.index(max(scores))]
        assert row["prediction_with_input"].rstrip().endswith(row["prediction"])
        all_scores += scores
        best.append(max(scores))
        has_digit.append(bool(DIGIT.search(row["prediction"])))
    assert any(has_digit) and len({score > 1 for score in all_scores}) == 2  # answers differ in score
    assert metrics["predict/reward_mean"] == pytest.approx(sum(all_scores) / len(all_scores))
    assert metrics["predict/reward_best"] == pytest.approx(sum(best) / len(best))
    assert "predict/exact_match" in metrics and "predict/answers_without_score" not in metrics


@pytest.mark.slow
def test_answers_do_not_depend_on_engine_batch_size_or_number_of_answers(predict, judge):
    rows, metrics = predict(judge)
    for engine in ("torch", "jax"):
        for size in (1, 3):
            other_rows, other_metrics = predict(judge, engine, size)
            assert [row["prediction"] for row in other_rows] == [row["prediction"] for row in rows]
            for row, expected in zip(other_rows, rows, strict=True):
                assert [item["text"] for item in row["answers"]] == [item["text"] for item in expected["answers"]]
                assert [item["score"] for item in row["answers"]] == pytest.approx(
                    [item["score"] for item in expected["answers"]], abs=1e-5)
            assert other_metrics == pytest.approx(metrics, abs=1e-5)
    more, _ = predict(judge, answers=7)
    assert [row["answers"][:5] for row in more] == [row["answers"] for row in rows]


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_each_process_scores_the_answers_to_its_own_prompts(predict, judge, strategy):
    def on_two(arguments: list[str]) -> int:
        together(arguments)
        return 0

    rows, metrics = predict(judge, size=1)
    other_rows, other_metrics = predict(judge, size=1, run=on_two, trainer__devices=2, trainer__strategy=strategy)
    assert [row["prediction"] for row in other_rows] == [row["prediction"] for row in rows]
    assert other_metrics == pytest.approx(metrics, abs=1e-5)


def test_the_first_answer_equals_the_one_without_best_of(predict, judge):
    rows, _ = predict(judge)
    alone, _ = predict(judge, model__init_args__best_of=None)
    assert [row["prediction"] for row in alone] == [row["answers"][0]["text"] for row in rows]


@pytest.mark.parametrize("lora", [None, pytest.param({"rank": 2}, marks=pytest.mark.slow)], ids=["full", "adapter"])
def test_a_reward_run_scores_as_its_exported_model(predict, judge, recipe, tmp_path, lora):
    """Compare the initial model with the run folder, its model/ and a copy of model/; the run learns nothing."""
    run = train_reward_run(recipe, tmp_path, judge, lora)
    copied = shutil.copytree(run.model, tmp_path / "copy" / "judge")
    rows, metrics = predict(judge)
    for reward in (run.root, run.model, copied):
        other_rows, other_metrics = predict(reward)
        assert [[answer["score"] for answer in row["answers"]] for row in other_rows] == [
            pytest.approx([answer["score"] for answer in row["answers"]], abs=1e-5) for row in rows]
        assert other_metrics == pytest.approx(metrics, abs=1e-5)


@ENGINES
def test_a_continuation_is_scored_with_its_prompt(predict, judge, tmp_path, engine):
    (tmp_path / "texts.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in ("the fox", "the 7")))
    rows, _ = predict(judge, engine, data={"class_path": "CLMData", "init_args": {
        "source": str(tmp_path / "texts.jsonl"), "predict_source": str(tmp_path / "texts.jsonl"), "max_length": 64}},
        model__class_path="CLM")
    assert all(answer["score"] > 1 for answer in rows[1]["answers"])
    assert [answer["score"] > 1 for answer in rows[0]["answers"]] == [
        bool(DIGIT.search(answer["text"])) for answer in rows[0]["answers"]]


@ENGINES
def test_prompts_of_preference_data_are_answered_and_scored(predict, judge, pairs, engine):
    rows, metrics = predict(judge, engine, model__class_path="Preference", data={
        "class_path": "PreferenceData", "init_args": {"source": pairs, "predict_source": pairs, "template": "alpaca",
                                                    "max_length": 128}})
    for row in rows:
        for answer in row["answers"][:2]:
            assert answer["score"] == pytest.approx(score_bare(judge, row["prompt"], answer["text"]), abs=1e-4)
    assert {"predict/exact_match", "predict/reward_best", "predict/reward_mean"} <= metrics.keys()


def test_answers_without_a_score_are_counted_and_not_chosen(predict, judge, recipe, tmp_path):
    run = train_reward_run(recipe, tmp_path, judge, target_max_length=14, on_overflow="skip")
    rows, metrics = predict(run.root)
    scores = [[answer["score"] for answer in row["answers"]] for row in rows]
    assert metrics["predict/answers_without_score"] == sum(row_scores.count(None) for row_scores in scores) > 0
    for row, row_scores in zip(rows, scores, strict=True):
        known = [score for score in row_scores if score is not None]
        assert row["prediction"] == row["answers"][row_scores.index(max(known)) if known else 0]["text"]


def test_an_answer_that_is_too_long_is_an_error_with_on_overflow_error(predict, judge, recipe, tmp_path, capsys):
    run = train_reward_run(recipe, tmp_path, judge, target_max_length=14, on_overflow="error")
    with pytest.raises(AssertionError):
        predict(run.root)
    assert "error: an answer cannot be encoded for scoring" in capsys.readouterr().err


@pytest.mark.parametrize(("changes", "message"), [
    ({"model__init_args__generation": {"do_sample": False}}, "model.best_of needs sampled answers"),
    ({"model__init_args__generation": {"do_sample": True, "num_beams": 2}}, "num_beams to 1"),
    ({"model__init_args__best_of": {"reward": "x", "answers": 1}}, "best_of.answers is 1, but must be 2 or more"),
    ({"model__init_args__best_of": {"answers": 4}}, "best_of.reward is null, but must be a folder or hub id"),
])
def test_best_of_without_a_choice_is_rejected(predict, judge, capsys, changes, message):
    with pytest.raises(AssertionError):
        predict(judge, **changes)
    assert message in capsys.readouterr().err


def _copy_with_changes(judge: Path, folder: Path, file: str = "config.json", **fields: Any) -> Path:
    shutil.copytree(judge, folder)
    content = json.loads((folder / file).read_text())
    (folder / file).write_text(json.dumps({**content, **fields}))
    return folder


def test_a_model_without_a_reward_head_is_rejected_by_name(predict, judge, llama_folder, finished, tmp_path, capsys):
    three = _copy_with_changes(judge, tmp_path / "three", id2label={str(n): f"L{n}" for n in range(3)})
    without_template = shutil.copytree(judge, tmp_path / "unwritten")
    (without_template / "chat_template.jinja").unlink()
    empty = tmp_path / "empty"
    empty.mkdir()
    cases = [(llama_folder, f"{KEY} {llama_folder} is a LlamaForCausalLM, not a reward model"),
             (three, f"{KEY} {three} has 3 labels, but a reward model must have one"),
             (without_template, f"{KEY} {without_template} has no chat template"),
             (empty, "has no config.json"), ("no/such-model", "no/such-model")]
    sft = finished()
    cases += [(sft.root, f"{KEY} {sft.root}: this run's task is SFT, but must be Reward"),
              (sft.model, f"{KEY} {sft.model}: this run's task is SFT"),
              (shutil.copytree(sft.model, tmp_path / "adapter"), "is an adapter for CAUSAL_LM")]
    for reward, message in cases:
        with pytest.raises(AssertionError):
            predict(reward)
        error = capsys.readouterr().err
        assert message in error and "Traceback" not in error, (reward, error)
