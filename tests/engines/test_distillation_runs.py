"""Runs with a teacher: both engines agree, resume, and reject another teacher; parity for a masked LM."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from lmmods.cli import main
from lmmods.runs.folder import RunFolder
from tests.finished_runs import assert_same_run, rows

ROOT = Path(__file__).parents[2]
BERT = {"model_type": "bert", "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1,
        "num_attention_heads": 2, "max_position_embeddings": 64, "initializer_range": 0.2}


@pytest.fixture
def distillation_run(recipe, llama_of, tmp_path):
    """Return a function that writes a packed QLoRA recipe with a 4-bit teacher; it returns arguments and run folder."""
    def write(name: str, **changes) -> tuple[list[str], RunFolder]:
        run = RunFolder(tmp_path / name)
        model = {"teacher": {"pretrained": str(llama_of(2)), "quantize": "nf4", "beta": 0.3, "temperature": 1.5}}
        changes = {"engine": "torch", "data__init_args__packing": True, "data__init_args__max_length": 192,
                   "trainer__accumulate_grad_batches": 2, "data__init_args__batch_size": 1, **changes}
        return recipe(f"{name}.yaml", **{f"model__init_args__{key}": value for key, value in model.items()}, **changes,
                      trainer__default_root_dir=str(run.root)), run

    return write


@pytest.mark.slow
def test_both_engines_distil_alike_and_resume_with_the_same_teacher_only(distillation_run, llama_of, tmp_path, stop_at,
                                                                         capsys):
    runs = []
    for engine in ("torch", "jax"):
        arguments, run = distillation_run(engine, engine=engine)
        assert main(["fit", *arguments]) == 0
        runs.append(run)
    torch_rows, jax_rows = map(rows, runs)
    assert len(torch_rows) == len(jax_rows) == 6
    for row, expected in zip(jax_rows, torch_rows, strict=True):
        assert row == pytest.approx(expected, rel=1e-4)
        assert row["train/loss"] == pytest.approx((row["train/divergence"] + row["train/cross_entropy"]) / 2)
    metrics = json.loads(runs[0].metrics_json.read_text())
    assert metrics["val/divergence"] > 0
    names = {*load_file(runs[0].model / "adapter_model.safetensors")}
    assert names == {*load_file(runs[1].model / "adapter_model.safetensors")}
    assert not any("teacher" in name for name in {*names, *load_file(runs[0].resolve("last") / "model.safetensors")})
    # Interrupted in the middle of a step.
    arguments, broken = distillation_run("broken")
    stop_at(5)
    assert main(["fit", *arguments]) == 130
    stop_at(0)
    other = shutil.copytree(llama_of(2), tmp_path / "other")
    weights = load_file(other / "model.safetensors")
    weights["model.norm.weight"] *= 2
    save_file(weights, other / "model.safetensors", {"format": "pt"})
    capsys.readouterr()
    assert main(["fit", *arguments, "--ckpt_path", "last", "--model.teacher.pretrained", str(other)]) == 2
    assert "model.teacher.pretrained" in capsys.readouterr().err
    assert main(["fit", *arguments, "--ckpt_path", "last"]) == 0
    assert_same_run(runs[0], broken)


@pytest.mark.slow
def test_both_engines_train_from_one_top_k_cache(recipe, llama_of, tmp_path, own_cache, capsys):
    """With packing, which does not change the cache."""
    runs = []
    for engine in ("torch", "jax"):
        run = RunFolder(tmp_path / engine)
        arguments = recipe(f"{engine}.yaml", engine=engine, model__init_args__teacher={
            "pretrained": str(llama_of(2)), "top_k": 5}, data__init_args__packing=True,
            data__init_args__max_length=192, trainer__default_root_dir=str(run.root))
        assert main(["fit", *arguments]) == 0
        output = capsys.readouterr()
        assert (output.out + output.err).count("Computing the 5 most likely") == (2 if engine == "torch" else 0)
        runs.append(run)
    for row, expected in zip(*map(rows, reversed(runs)), strict=True):
        assert row == pytest.approx(expected, rel=1e-4)
    assert main(["fit", *arguments, "--data.streaming", "true", "--data.val_size", "0", "--overwrite", "true"]) == 2
    assert "model.teacher.top_k needs a pass over all rows" in capsys.readouterr().err


@pytest.mark.slow
def test_engines_agree_on_a_masked_lm_with_a_teacher(recipe, tmp_path, capsys):
    from transformers import AutoTokenizer, BertConfig, BertForMaskedLM

    text = tmp_path / "texts.txt"
    text.write_text("\n\n".join(f"the quick brown fox jumps over {n} lazy dogs" for n in range(12)))
    tokenizer, folder = AutoTokenizer.from_pretrained("demo/bert"), tmp_path / "teacher"
    torch.manual_seed(0)
    # The teacher's embedding has rows beyond the tokens, which the student's has not.
    BertForMaskedLM(BertConfig(**{**BERT, "hidden_size": 24}, vocab_size=len(tokenizer) + 3)).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    assert main(["inspect", *recipe(
        model={"class_path": "MLM", "init_args": {"config": BERT, "label_smoothing": 0.1, "teacher": {
            "pretrained": str(folder), "beta": 1.0}}},
        data={"class_path": "MLMData", "init_args": {"source": str(text), "documents": "paragraph", "max_length": 48,
                                                     "tokenizer": "demo/bert"}}), "--parity", "true"]) == 0
    output = capsys.readouterr().out
    assert "Parity: pass" in output and output.count(": pass, tolerance") == 3


@pytest.mark.slow
def test_both_engines_quantise_a_teacher_with_an_adapter_alike(tmp_path, monkeypatch):
    monkeypatch.chdir(ROOT)
    adapter = ["--model.teacher.adapter", "demo/llama_sft"]
    divergences = {}
    for name, options in (("torch", adapter), ("jax", ["--engine", "jax", *adapter]), ("without", [])):
        run = RunFolder(tmp_path / name)
        assert main(["fit", "--config", "configs/distill.yaml", *options, "--model.teacher.quantize", "nf4",
                     "--trainer.logger", "null", "--trainer.max_steps", "2", "--trainer.log_every_n_steps", "1",
                     "--trainer.limit_val_batches", "1", "--trainer.default_root_dir", str(run.root)]) == 0
        divergences[name] = [row["train/divergence"] for row in rows(run)]
    assert divergences["jax"] == pytest.approx(divergences["torch"], rel=1e-4)
    assert divergences["torch"][0] != pytest.approx(divergences["without"][0], rel=1e-2)
