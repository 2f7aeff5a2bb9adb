"""Predict fills masks like transformers' fill-mask pipeline; adapters train."""

import json
from pathlib import Path

import pytest
from transformers import AutoModelForMaskedLM, AutoTokenizer, pipeline

from lmmods.cli import main
from tests.data.conftest import CORPUS
from tests.data.test_mlm import bert_folder  # noqa: F401 - a fixture

BERT = {"model_type": "bert", "hidden_size": 48, "intermediate_size": 64, "num_hidden_layers": 2,
        "num_attention_heads": 4, "max_position_embeddings": 64}
TEXTS = ["the quick [MASK] fox jumps over", "[MASK] and [MASK]", "the sum is 42", "[MASK]"]


@pytest.fixture
def mlm(recipe, bert_folder, tmp_path):  # noqa: F811
    """Return a function that writes a tiny MLM recipe with four texts to fill."""
    (tmp_path / "text.txt").write_text("\n".join(line.replace("\n", " ") for line in CORPUS * 4))
    (tmp_path / "gaps.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in TEXTS))

    def write(name="recipe.yaml", **changes):
        return recipe(name, **{
            "model": {"class_path": "MLM", "init_args": {"config": BERT, "top_k": 3, "optimizer": {"lr": 3e-3}}},
            "data": {"class_path": "MLMData", "init_args": {
                "tokenizer": str(bert_folder), "source": str(tmp_path / "text.txt"), "val_size": 0.1,
                "documents": "line", "predict_source": str(tmp_path / "gaps.jsonl"), "max_length": 32,
                "batch_size": 4}},
            "trainer__max_steps": 20, "trainer__val_check_interval": 20, **changes})

    return write


def test_masks_are_filled_like_the_fill_mask_pipeline(mlm, tmp_path):
    run = tmp_path / "run"
    assert main(["fit", *mlm()]) == 0
    assert main(["predict", "--config", str(run / "config.yaml"), "--ckpt_path", "last"]) == 0
    rows = [json.loads(line) for line in (run / "predictions.jsonl").read_text().splitlines()]
    assert [row["text"] for row in rows] == TEXTS
    assert [len(row["fills"]) for row in rows] == [1, 2, 0, 1]
    tokenizer = AutoTokenizer.from_pretrained(run / "model")
    fill = pipeline("fill-mask", model=AutoModelForMaskedLM.from_pretrained(run / "model"), tokenizer=tokenizer,
                    top_k=3, device="cpu")
    for row in rows:
        if not row["fills"]:
            assert row["prediction"] == row["text"]
            continue
        expected = fill(row["text"])
        if len(row["fills"]) == 1:
            assert row["prediction"] == expected[0]["sequence"]
            expected = [expected]
        for candidates, pipeline_candidates in zip(row["fills"], expected, strict=True):
            assert [c["token"] for c in candidates] == [c["token_str"] for c in pipeline_candidates]
            assert [c["probability"] for c in candidates] == pytest.approx(
                [c["score"] for c in pipeline_candidates], rel=1e-4)


def test_predicting_texts_without_a_mask_is_an_error(mlm, tmp_path, capsys):
    (tmp_path / "gaps.jsonl").write_text('{"text": "no gap at all"}\n')
    assert main(["fit", *mlm(trainer__max_steps=2)]) == 0
    assert main(["predict", "--config", str(tmp_path / "run" / "config.yaml"), "--ckpt_path", "last"]) == 2
    assert "[MASK]" in capsys.readouterr().err


@pytest.mark.slow
def test_an_adapter_learns_and_loads(mlm, tmp_path):
    from peft import PeftModel

    # Not a tokenizer trained here: WordPieceTrainer's vocabulary differs from process to process, which changes the
    # loss by as much as an adapter gains.
    tokenizer = {"data__init_args__tokenizer": str(Path(__file__).parents[2] / "demo" / "bert")}
    assert main(["fit", *mlm(**tokenizer, trainer__default_root_dir=str(tmp_path / "base"))]) == 0
    base = tmp_path / "base" / "model"
    adapter = {"pretrained": str(base), "lora": {"rank": 8}, "optimizer": {"lr": 3e-3}}
    assert main(["fit", *mlm("adapter.yaml", **tokenizer, model__init_args=adapter, trainer__max_steps=80)]) == 0
    metrics = [json.loads((root / "metrics.json").read_text()) for root in (tmp_path / "base", tmp_path / "run")]
    assert metrics[1]["val/loss"] < metrics[0]["val/loss"]
    model = PeftModel.from_pretrained(AutoModelForMaskedLM.from_pretrained(base), tmp_path / "run" / "model")
    assert any("lora_B" in name and param.abs().max() > 0 for name, param in model.named_parameters())
