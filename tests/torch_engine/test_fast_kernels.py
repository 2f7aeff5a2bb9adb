"""A run logs the same metrics with `model.fast_kernels: false`."""

import csv

import pytest

from lmmods.cli import main


@pytest.mark.parametrize("engine", ["torch", pytest.param("jax", marks=pytest.mark.slow)])
@pytest.mark.parametrize("task", ["sft", "mlm"])
def test_a_run_has_the_same_metrics_without_fast_kernels(recipe, engine, task, tmp_path, llama_folder, instructions):
    changes = {"engine": engine, "trainer__max_steps": 3}
    if task == "mlm":
        from transformers import AutoTokenizer

        tokenizer = AutoTokenizer.from_pretrained(llama_folder)
        tokenizer.add_special_tokens({"mask_token": "[MASK]", "pad_token": "[PAD]"})
        tokenizer.save_pretrained(tmp_path / "tokenizer")
        bert = {"model_type": "bert", "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
                "intermediate_size": 128, "hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
        (tmp_path / "corpus.txt").write_text(instructions.read_text())
        changes |= {"model": {"class_path": "MLM", "init_args": {"config": bert, "optimizer": {"lr": 1e-3}}},
                    "data": {"class_path": "MLMData", "init_args": {
                        "tokenizer": str(tmp_path / "tokenizer"), "source": str(tmp_path / "corpus.txt"), "val_size": 4,
                        "documents": "line", "max_length": 64, "pad_to_multiple_of": 64, "batch_size": 4}}}
    metrics = []
    for fast in ("true", "false"):
        folder = tmp_path / fast
        assert main(["fit", *recipe(**changes), "--model.fast_kernels", fast,
                     "--trainer.default_root_dir", str(folder)]) == 0
        with open(folder / "metrics.csv", newline="") as file:
            metrics.append([{name: float(value) for name, value in row.items()
                             if value and name in ("train/loss", "train/grad_norm", "val/loss", "val/accuracy")}
                            for row in csv.DictReader(file)])
    assert len(metrics[0]) == 3 and "val/loss" in metrics[0][-1]
    for fast, plain in zip(*metrics, strict=True):
        assert fast == pytest.approx(plain, rel=1e-4)
