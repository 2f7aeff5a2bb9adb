"""The same recipe on both engines: the same losses step by step, the same metrics, the same predictions."""

import json
import re
from pathlib import Path

import pytest
import torch
from safetensors.numpy import load_file
from transformers import (
    CONFIG_MAPPING,
    AutoModelForCausalLM,
    AutoModelForMaskedLM,
    AutoModelForQuestionAnswering,
    AutoTokenizer,
    BitsAndBytesConfig,
)

from lmmods.cli import main
from lmmods.runs.checkpoint import CheckpointContent, read_checkpoint
from lmmods.runs.folder import RunFolder
from tests.data.test_mlm import bert_folder  # noqa: F401 - a fixture
from tests.data.test_qa import squad
from tests.finished_runs import TIMED, paths, rows

# A constant added before a softmax has no effect, so these get no gradient and Adam moves them by rounding errors only.
WITHOUT_GRADIENT = ("key.bias", "c_attn.bias", "layer.1.output.LayerNorm.bias", "qa_outputs.bias")
STEPS = 10
CORPUS = Path(__file__).parents[2] / "demo" / "corpus"
LLAMA = {"model_type": "llama", "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2,
         "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 256, "initializer_range": 0.2,
         "attention_dropout": 0.1}
EXPERTS = {"model_type": "mixtral", "hidden_size": 32, "intermediate_size": 24, "num_hidden_layers": 2,
           "num_attention_heads": 4, "num_key_value_heads": 2, "num_local_experts": 4, "initializer_range": 0.2}
GPT2 = {"model_type": "gpt2", "n_embd": 48, "n_layer": 2, "n_head": 4, "n_positions": 64, "initializer_range": 0.2,
        "resid_pdrop": 0.1, "embd_pdrop": 0.1, "attn_pdrop": 0.1}
BERT = {"model_type": "bert", "hidden_size": 48, "intermediate_size": 64, "num_hidden_layers": 2,
        "num_attention_heads": 4, "max_position_embeddings": 64, "hidden_dropout_prob": 0.1,
        "attention_probs_dropout_prob": 0.1, "initializer_range": 0.2}


@pytest.fixture
def fit_on_both(recipe, tmp_path, tokenizer_folder, bert_folder):  # noqa: F811
    """Return a function that fits a task on each engine from the same weights, predicts, and returns both runs."""
    text = tmp_path / "texts.txt"
    text.write_text("\n\n".join(f"the quick brown fox jumps over {n} lazy dogs" * (1 + n % 3) for n in range(40)))
    gaps = tmp_path / "gaps.txt"
    gaps.write_text("the quick [MASK] fox\n\njumps [MASK] the lazy [MASK]")
    source = squad(tmp_path)
    pairs, judged = tmp_path / "pairs.jsonl", tmp_path / "judged.jsonl"
    answers = [(f"Count from {n}.", f"{n} and {n + 1} " * (1 + n % 3), "dogs " * (1 + n % 4)) for n in range(40)]
    pairs.write_text("".join(json.dumps({"prompt": prompt, "chosen": chosen, "rejected": rejected}) + "\n"
                             for prompt, chosen, rejected in answers))
    judged.write_text("".join(json.dumps({"prompt": prompt, "completion": answer, "label": is_good}) + "\n"
                              for prompt, chosen, rejected in answers
                              for answer, is_good in ((chosen, True), (rejected, False))))
    preferences = {"val_size": 8, "max_length": 64, "template": "alpaca"}
    texts = {"source": str(text), "documents": "paragraph", "val_size": 0.2, "max_length": 48}

    def save_model(auto, config: dict, tokenizer) -> str:
        torch.manual_seed(0)
        fields = {**config, "vocab_size": len(AutoTokenizer.from_pretrained(tokenizer))}
        path = tmp_path / config["model_type"]
        auto.from_config(CONFIG_MAPPING[fields.pop("model_type")](**fields)).save_pretrained(path)
        AutoTokenizer.from_pretrained(tokenizer).save_pretrained(path)
        return str(path)

    def fit(name: str, predicts: bool = True, **changes) -> tuple[RunFolder, RunFolder]:
        auto, config, tokenizer, data = {
            "SFT": (AutoModelForCausalLM, LLAMA, tokenizer_folder, {}),
            "CLM": (AutoModelForCausalLM, GPT2, tokenizer_folder, {"class_path": "CLMData", "init_args": texts}),
            "MLM": (AutoModelForMaskedLM, BERT, bert_folder, {"class_path": "MLMData", "init_args": {
                **texts, "predict_source": str(gaps)}}),
            "Preference": (AutoModelForCausalLM, LLAMA, tokenizer_folder, {
                "class_path": "PreferenceData", "init_args": {**preferences, "source": str(
                    judged if changes.get("model__init_args__loss") == "kto" else pairs)}}),
            "QA": (AutoModelForQuestionAnswering, BERT, bert_folder, {"class_path": "QAData", "init_args": {
                "source": source, "val_source": source, "max_length": 48, "stride": 16, "question_max_length": 16}}),
        }[name]
        max_length = data["init_args"]["max_length"] if data else 192  # JAX compiles a program for each batch length
        runs = []
        for engine in ("torch", "jax"):
            run = RunFolder(tmp_path / engine)
            model = {"pretrained": save_model(auto, config, tokenizer), "optimizer": {
                "lr": 1e-3, "weight_decay": 0.1, "schedule": "linear", "warmup": 4}}
            if name in ("SFT", "CLM", "Preference"):
                model["generation"] = {"max_new_tokens": 8}
            arguments = recipe(f"{engine}.yaml", **{
                "engine": engine, "model": {"class_path": name, "init_args": model}, **({"data": data} if data else {}),
                "data__init_args__batch_size": 3, "data__init_args__pad_to_multiple_of": max_length,
                "data__init_args__tokenizer": str(tokenizer), "trainer__max_steps": STEPS,
                "trainer__gradient_clip_val": 0.5, "trainer__val_check_interval": STEPS,
                "trainer__accumulate_grad_batches": 2,
                "trainer__default_root_dir": str(run.root), **changes})
            assert main(["fit", *arguments]) == 0
            assert not predicts or main(["predict", *arguments, "--ckpt_path", "last"]) == 0
            runs.append(run)
        return tuple(runs)

    return fit


def assert_same_predictions(run: RunFolder, other: RunFolder) -> None:
    """Assert equal texts and tokens; probabilities may differ by rounding."""
    predictions, expected = ([json.loads(line) for line in folder.predictions.read_text().splitlines()]
                             for folder in (run, other))
    probabilities = [[gap.pop("probability") for row in rows for gaps in row.get("fills", []) for gap in gaps]
                     for rows in (predictions, expected)]
    assert predictions == expected and probabilities[0] == pytest.approx(probabilities[1], rel=1e-3)


def assert_same_checkpoint_keys(on_jax: RunFolder, on_torch: RunFolder) -> None:
    """Assert equal checkpoint keys at every level, except the engines' own."""
    jax_content, torch_content = (read_checkpoint(run.resolve("last")) for run in (on_jax, on_torch))
    data = {type_name for type_name in jax_content if type_name.endswith("Data")}
    assert len(data) == 1 and jax_content.keys() - {"engine"} == {*CheckpointContent.__annotations__} | data
    del torch_content["pytorch-lightning_version"], jax_content["engine"]
    for content in (jax_content, torch_content):
        content["identity"]["trainer"] = "of the engine"
    assert set(paths(jax_content)) == set(paths(torch_content))


LORA = {"rank": 4, "alpha": 16, "dropout": 0.1, "targets": "all-linear"}
QLORA = {"model__init_args__lora": LORA, "model__init_args__quantize": "nf4"}


@pytest.mark.slow
@pytest.mark.parametrize(("name", "changes"), [
    ("SFT", {"data__init_args__pad_to_multiple_of": 48}),
    ("SFT", {**QLORA, "data__init_args__packing": True}),
    ("SFT", {"model__init_args__neftune_alpha": 5.0, "model__init_args__dft": True, "data__init_args__packing": True}),
    ("SFT", {"model__init_args__lora": {**LORA, "dora": True}, "data__init_args__group_by_length": True,
             "model__init_args__generation": {"max_new_tokens": 8, "do_sample": True, "top_p": 0.9}}),
    ("CLM", {"model__init_args__lora": {**LORA, "rslora": True, "modules_to_save": ["lm_head"]}}),
    ("CLM", {"model__init_args__pretrained": None, "model__init_args__config": GPT2, "data__init_args__seed": 3}),
    ("MLM", {"model__init_args__label_smoothing": 0.1, "model__init_args__z_loss": 1e-3}),
    ("MLM", {"data__init_args__source": [{"path": f"{CORPUS}/val.txt", "weight": 3}, f"{CORPUS}/train.txt"],
             "data__init_args__val_size": 0, "data__init_args__val_source": {"path": f"{CORPUS}/val.txt", "limit": 9},
             "data__init_args__streaming": True, "data__init_args__stream_window": 24}),
    ("Preference", QLORA),
    ("Preference", {"model__init_args__loss": "kto"}),
    ("QA", {}),
    ("QA", QLORA),
], ids=["sft", "sft-nf4-packed", "sft-noise-dft-packed", "sft-dora-grouped-sampled", "clm-rslora",
        "clm-from-scratch", "mlm-smoothed", "mlm-streams-mixed", "dpo-nf4", "kto", "qa", "qa-nf4"])
def test_both_engines_give_the_same_losses_exports_and_predictions(fit_on_both, name, changes):
    on_torch, on_jax = fit_on_both(name, **changes)
    torch_rows, jax_rows = rows(on_torch), rows(on_jax)
    assert len(torch_rows) == len(jax_rows) == STEPS
    if name == "Preference":  # starts at its reference, without dropout: rewards are rounding errors
        for row in (*torch_rows[:2], *jax_rows[:2]):  # the first step's learning rate is 0
            assert abs(row["train/rewards/chosen"]) < 1e-4
            row.pop("train/rewards/accuracy", None)
    for row, expected in zip(jax_rows, torch_rows):
        assert row.keys() == expected.keys()
        assert row["train/loss"] == pytest.approx(expected["train/loss"], abs=1e-5), row["step"]
        assert row == pytest.approx(expected, rel=1e-4, abs=1e-4 if name == "Preference" else 1e-12)
    metrics, expected = (json.loads(run.metrics_json.read_text()) for run in (on_jax, on_torch))
    assert metrics.keys() == expected.keys()
    assert {k: v for k, v in metrics.items() if k not in TIMED} == pytest.approx(
        {k: v for k, v in expected.items() if k not in TIMED}, rel=1e-4)
    assert_same_checkpoint_keys(on_jax, on_torch)
    report, expected = (json.loads(run.data_report.read_text()) for run in (on_jax, on_torch))
    assert report == expected
    exported, = (path.name for path in on_torch.model.glob("*.safetensors"))
    weights, expected = (load_file(run.model / exported) for run in (on_jax, on_torch))
    assert weights.keys() == expected.keys()
    for key, weight in weights.items():
        if key.endswith(WITHOUT_GRADIENT):
            continue
        torch.testing.assert_close(torch.from_numpy(weight), torch.from_numpy(expected[key]), rtol=1e-3, atol=2e-5)
    assert_same_predictions(on_jax, on_torch)


@pytest.mark.slow
@pytest.mark.parametrize("changes", [{}, {**QLORA, "model__init_args__optimizer": {
    "name": "muon", "lr": 1e-3, "weight_decay": 0.1, "b_lr_ratio": 4.0}}], ids=["full", "muon-qlora"])
def test_a_run_resumes_on_the_other_engine(fit_on_both, changes):
    """The other engine resumes each run halfway and evaluates it."""
    half = str(STEPS // 2)
    runs = fit_on_both("CLM", predicts=False, checkpoint={"every_n_steps": STEPS // 2, "keep_last": 9}, **changes)
    expected = [rows(run) for run in runs]
    for run, other_engine, straight in zip(runs, ("jax", "torch"), reversed(expected), strict=True):
        arguments = ["--config", str(run.config), "--engine", other_engine]
        assert main(["fit", *arguments, "--ckpt_path", half, "--overwrite", "true"]) == 0
        assert json.loads((run.resolve("last") / "state.json").read_text())["global_step"] == STEPS
        for row, expected_row in zip(rows(run), straight, strict=True):
            assert row == pytest.approx(expected_row, rel=1e-4)
        assert main(["validate", *arguments, "--ckpt_path", half]) == 0


@pytest.fixture
def saved_in_nf4(llama_folder, tmp_path) -> str:
    """Save the tiny Llama in 4 bits with bitsandbytes and transformers."""
    model = AutoModelForCausalLM.from_pretrained(llama_folder, device_map="cpu", quantization_config=BitsAndBytesConfig(
        load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_use_double_quant=True))
    model.config.attention_dropout = 0.0
    model.save_pretrained(tmp_path / "nf4")
    AutoTokenizer.from_pretrained(llama_folder).save_pretrained(tmp_path / "nf4")
    return str(tmp_path / "nf4")


@pytest.mark.slow
def test_both_engines_train_alike_on_a_base_saved_in_nf4(recipe, saved_in_nf4, tmp_path, capsys):
    changes = {"model__init_args__pretrained": saved_in_nf4, "model__init_args__quantize": None,
               "model__init_args__lora": LORA}
    runs = [RunFolder(tmp_path / engine) for engine in ("torch", "jax")]
    for run in runs:
        assert main(["fit", *recipe(engine=run.root.name, trainer__default_root_dir=str(run.root), **changes)]) == 0
    for row, expected in zip(*map(rows, runs), strict=True):
        assert row == pytest.approx(expected, rel=1e-4)
    for run in runs:
        assert main(["merge", "--run", str(run.root), "--out", str(tmp_path / "merged" / run.root.name)]) == 0
        assert "original" not in capsys.readouterr().out
        assert main(["merge", "--run", str(run.root), "--out", str(tmp_path / "x"), "--base", "original"]) == 2
        assert "is saved in nf4" in capsys.readouterr().err
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "merged" / "jax")
    assert not hasattr(merged.config, "quantization_config") and merged.lm_head.weight.dtype == torch.float32


@pytest.mark.parametrize("engine", ["torch", "jax"])
@pytest.mark.parametrize(("changes", "message"), [
    ({"model__init_args__quantize": "fp4"}, "model.quantize is fp4, but .* is saved in nf4"),
    ({"model__init_args__quantize": None, "model__init_args__lora": None}, "is saved in nf4.*Set model.lora"),
])
def test_a_base_saved_in_nf4_cannot_be_stored_otherwise(recipe, saved_in_nf4, engine, changes, message, capfd):
    assert main(["fit", *recipe(engine=engine, model__init_args__pretrained=saved_in_nf4, **changes)]) == 2
    assert re.search(message, capfd.readouterr().err)


@pytest.mark.slow
def test_balance_loss_and_expert_load_are_equal_under_any_batch_split(fit_on_both):
    """From scratch, packed, on both engines; losses include the balance loss."""
    changes = {"model__init_args__pretrained": None, "model__init_args__config": EXPERTS,
               "model__init_args__balance_loss": 0.5, "data__init_args__packing": True, "trainer__max_steps": 6,
               "trainer__val_check_interval": 6}
    by_split = [[[{key: value for key, value in row.items() if "train/" in key and "epoch" not in key}
                  for row in rows(run)]
                 for run in fit_on_both("CLM", predicts=False, **changes, **split)] for split in (
        {"data__init_args__batch_size": 2, "trainer__accumulate_grad_batches": 2},
        {"data__init_args__batch_size": 4, "trainer__accumulate_grad_batches": 1, "overwrite": True})]
    first = by_split[0][0]
    assert len(first) == 6 and all(row["train/experts/balance"] >= 2 * 0.999 for row in first)
    assert all(row["train/experts/max_load"] > 1 > row["train/experts/min_load"] >= 0 for row in first)
    for other in (by_split[0][1], *by_split[1]):
        for row, expected in zip(other, first, strict=True):
            assert row == pytest.approx(expected, rel=2e-4, abs=1e-6)
