"""Extractive question answering end to end; its loss equals transformers'."""

import json

import pytest
import torch
from transformers import BertConfig, BertForQuestionAnswering

from lmmods.cli import main
from lmmods.core.text_metrics import squad_scores
from lmmods.torch_engine.tasks.qa import span_loss
from tests.data.test_mlm import bert_folder  # noqa: F401 - a fixture
from tests.data.test_qa import squad

BERT = {"model_type": "bert", "hidden_size": 48, "intermediate_size": 64, "num_hidden_layers": 2,
        "num_attention_heads": 4, "max_position_embeddings": 64, "hidden_dropout_prob": 0.0,
        "attention_probs_dropout_prob": 0.0}


def test_the_loss_equals_transformers():
    torch.manual_seed(0)
    model = BertForQuestionAnswering(BertConfig(**{k: v for k, v in BERT.items() if k != "model_type"}, vocab_size=50))
    ids, start, end = torch.randint(0, 50, (3, 9)), torch.tensor([1, 4, 0]), torch.tensor([2, 4, 0])
    output = model.eval()(input_ids=ids, start_positions=start, end_positions=end)
    batch = {"start_positions": start, "end_positions": end, "attention_mask": torch.ones_like(ids)}
    sums = span_loss(output.start_logits, output.end_logits, batch)
    torch.testing.assert_close(sums.total / sums.weight, output.loss)


@pytest.mark.parametrize("added", [1, 50])
def test_padding_changes_neither_loss_nor_gradient(added):
    torch.manual_seed(0)
    start, end = torch.randn(2, 3, 9)
    batch = {"start_positions": torch.tensor([1, 4, -100]), "end_positions": torch.tensor([2, 4, -100]),
             "attention_mask": torch.ones(3, 9, dtype=torch.long)}
    results = []
    for padding in (0, added):
        logits = torch.nn.functional.pad(torch.stack([start, end]), (0, padding), value=3.0).requires_grad_()
        mask = torch.nn.functional.pad(batch["attention_mask"], (0, padding))
        mask[2, 1:] = 0
        sums = span_loss(*logits, {**batch, "attention_mask": mask})
        sums.total.backward()
        results.append((sums.total.detach(), logits.grad[..., :9]))
    torch.testing.assert_close(*results)


@pytest.fixture
def qa(recipe, bert_folder, tmp_path):  # noqa: F811
    def write(**changes):
        source = squad(tmp_path)
        return recipe(**{
            "model": {"class_path": "QA", "init_args": {"config": BERT, "optimizer": {"lr": 3e-3}}},
            "data": {"class_path": "QAData", "init_args": {
                "tokenizer": str(bert_folder), "source": source, "val_source": source, "max_length": 64, "stride": 16,
                "question_max_length": 16, "batch_size": 4, "version_2_with_negative": True}},
            "trainer__max_steps": 40, "trainer__val_check_interval": 20, "checkpoint__monitor": "val/f1",
            "checkpoint__mode": "max", **changes})

    return write


def test_a_model_learns_its_answers_and_writes_the_squad_files(qa, tmp_path):
    arguments = qa()
    assert main(["fit", *arguments]) == 0
    run = tmp_path / "run"
    assert "AutoModelForQuestionAnswering.from_pretrained" in (run / "model" / "README.md").read_text()
    metrics = json.loads((run / "metrics.json").read_text())
    assert {"val/loss", "val/exact_match", "val/f1", "val/HasAns_f1", "val/NoAns_f1", "val/best_f1",
            "val/best_f1_threshold"} <= set(metrics)
    assert metrics["val/loss"] < 3.0 and metrics["val/best_f1"] >= metrics["val/f1"]
    assert main(["predict", "--config", str(run / "config.yaml"), "--ckpt_path", "last"]) == 0
    predictions = json.loads((run / "predictions.json").read_text())
    source = json.loads((tmp_path / "squad.json").read_text())
    golds = {question["id"]: [answer["text"] for answer in question["answers"]]
             for question in source["data"][0]["paragraphs"][0]["qas"]}
    assert set(predictions) == set(golds) == set(json.loads((run / "null_odds.json").read_text()))
    metrics_after_predict = json.loads((run / "metrics.json").read_text())
    assert metrics_after_predict["predict/f1"] == squad_scores(predictions, golds, version_2=True)["f1"]
    assert metrics_after_predict["predict/f1"] == pytest.approx(metrics_after_predict["val/f1"])
    rows = [json.loads(line) for line in (run / "predictions.jsonl").read_text().splitlines()]
    assert [row["prediction"] for row in rows] == [predictions[row["id"]] for row in rows]
    nbest = json.loads((run / "nbest_predictions.json").read_text())
    assert all(abs(sum(entry["probability"] for entry in entries) - 1) < 1e-6 for entries in nbest.values())


def test_unlabelled_questions_are_answered_without_scores(qa, tmp_path):
    assert main(["fit", *qa(trainer__max_steps=2, trainer__val_check_interval=2)]) == 0
    source = json.loads((tmp_path / "squad.json").read_text())
    for question in source["data"][0]["paragraphs"][0]["qas"]:
        question.pop("answers"), question.pop("is_impossible", None)
    bare = tmp_path / "bare.json"
    bare.write_text(json.dumps(source))
    assert main(["predict", "--config", str(tmp_path / "run" / "config.yaml"), "--ckpt_path", "last",
                 "--data.predict_source", str(bare)]) == 0
    assert len(json.loads((tmp_path / "run" / "predictions.json").read_text())) == 4
    assert not any(name.startswith("predict/") for name in json.loads((tmp_path / "run" / "metrics.json").read_text()))
