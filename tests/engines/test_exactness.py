"""An optimiser step is the same under any batch split and equals a bare loop over full logits."""

import csv
import json

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from lmmods.cli import main
from lmmods.runs.folder import RunFolder

PLAIN = {"trainer__max_steps": 3, "trainer__limit_val_batches": 0, "trainer__gradient_clip_val": 0.5,
         "model__init_args__quantize": None, "model__init_args__lora": None, "data__init_args__val_size": 0,
         "model__init_args__optimizer": {"name": "sgd", "lr": 0.1, "momentum": 0.9}}


@pytest.fixture
def no_dropout(llama_folder, tmp_path):
    """Return the tiny Llama without dropout, which a bare loop cannot reproduce and which makes equal rows differ."""
    import shutil

    folder = shutil.copytree(llama_folder, tmp_path / "plain")
    config = (folder / "config.json").read_text().replace('"attention_dropout": 0.1', '"attention_dropout": 0.0')
    (folder / "config.json").write_text(config)
    return folder


def train(recipe, root, **changes) -> tuple[list[dict[str, float]], dict[str, torch.Tensor]]:
    folder = RunFolder(root)
    assert main(["fit", *recipe(**{**PLAIN, **changes}, trainer__default_root_dir=str(root))]) == 0
    with open(folder.metrics_csv, newline="") as file:
        rows = [{key: float(row[key]) for key in ("train/loss", "train/grad_norm")} for row in csv.DictReader(file)
                if row["train/loss"]]
    return rows, load_file(folder.resolve("last") / "model.safetensors")


@pytest.mark.parametrize(("engine", "sizes"), [
    ("torch", (12, 4, 3, 1)), pytest.param("jax", (12, 3), marks=pytest.mark.slow)], ids=["torch", "jax"])
def test_any_batch_split_gives_the_same_steps(recipe, llama_of, tmp_path, engine, sizes):
    """With dropout in attention and adapters, NEFTune noise, label smoothing, z-loss and a teacher."""
    changes = {"model__init_args__lora": {"rank": 4, "dropout": 0.2}, "engine": engine,
               "model__init_args__neftune_alpha": 5.0, "model__init_args__label_smoothing": 0.1,
               "model__init_args__z_loss": 1e-3,
               "model__init_args__teacher": {"pretrained": str(llama_of(2)), "beta": 0.1, "temperature": 2.0}}
    results = [train(recipe, tmp_path / f"split{size}", **changes, data__init_args__batch_size=size,
                     trainer__accumulate_grad_batches=12 // size) for size in sizes]
    for rows, weights in results[1:]:
        for row, expected in zip(rows, results[0][0], strict=True):
            assert row == pytest.approx(expected, rel=1e-5)
        for name, weight in weights.items():
            torch.testing.assert_close(weight, results[0][1][name], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(("engine", "interval"), [
    ("torch", 2), ("torch", 0.4), pytest.param("jax", 0.4, marks=pytest.mark.slow)])
def test_a_run_validates_after_the_same_steps_under_any_batch_split(recipe, tmp_path, engine, interval):
    """An epoch is six steps: 32 rows in steps of 6, the last with 2; 0.4 of an epoch are two steps."""
    losses = []
    for size in (6, 2):
        root = tmp_path / f"split{size}"
        train(recipe, root, engine=engine, data__init_args__batch_size=size, data__init_args__val_size=4,
              data__init_args__eval_batch_size=4, trainer__accumulate_grad_batches=6 // size,
              trainer__limit_val_batches=1.0, trainer__val_check_interval=interval, trainer__max_steps=9)
        with open(RunFolder(root).metrics_csv, newline="") as file:
            losses.append({int(row["step"]): float(row["val/loss"]) for row in csv.DictReader(file) if row["val/loss"]})
    assert list(losses[0]) == [2, 4, 6, 8, 9] and losses[1] == pytest.approx(losses[0], rel=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize(("engine", "accumulate"), [("torch", 1), ("torch", 2), ("jax", 2)])
def test_computing_a_micro_batch_in_chunks_gives_the_same_steps(recipe, tmp_path, engine, accumulate):
    changes = {"engine": engine, "data__init_args__batch_size": 12 // accumulate,
               "model__init_args__gradient_checkpointing": True, "trainer__accumulate_grad_batches": accumulate}
    whole, *others = [train(recipe, tmp_path / f"chunk{size}", **changes, model__init_args__piece_tokens=size)
                      for size in (0, 1, 200)]
    for rows, weights in others:
        for row, expected in zip(rows, whole[0], strict=True):
            assert row == pytest.approx(expected, rel=1e-5)
        for name, weight in weights.items():
            torch.testing.assert_close(weight, whole[1][name], rtol=1e-5, atol=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize("engine", ["torch", "jax"])
def test_a_row_of_weight_n_counts_as_n_rows(recipe, tmp_path, no_dropout, engine):
    """Compare epochs of 36 rows with weights 1 to 3 with epochs of 72 repeated rows in another split; validate both."""
    rows = [json.loads(line) for line in open(_read_source(recipe))]
    files = {"weighted": [{**row, "weight": 1 + n % 3} for n, row in enumerate(rows)],
             "repeated": [row for n, row in enumerate(rows) for _ in range(1 + n % 3)]}
    results = []
    for (name, content), size in zip(files.items(), (12, 36), strict=True):
        path = tmp_path / f"{name}.jsonl"
        path.write_text("".join(json.dumps(row) + "\n" for row in content))
        root = tmp_path / name
        result = train(recipe, root, engine=engine, model__init_args__pretrained=str(no_dropout),
                       data__init_args__source=str(path), data__init_args__val_source=str(path),
                       data__init_args__batch_size=size, trainer__val_check_interval=1,
                       trainer__accumulate_grad_batches=len(content) // size, trainer__limit_val_batches=1.0)
        with open(RunFolder(root).metrics_csv, newline="") as file:
            evaluated = [[float(row[f"val/{key}"]) for key in ("loss", "accuracy")] for row in csv.DictReader(file)
                         if row["val/loss"]]
        results.append((*result, evaluated))
    (rows, weights, evaluated), (expected_rows, expected_weights, expected_evaluated) = results
    for row, expected in zip(rows, expected_rows, strict=True):
        assert row == pytest.approx(expected, rel=1e-5)
    assert len(evaluated) == len(expected_evaluated) > 0
    for values, expected in zip(evaluated, expected_evaluated, strict=True):
        assert values == pytest.approx(expected, rel=1e-5)
    for name, weight in weights.items():
        torch.testing.assert_close(weight, expected_weights[name], rtol=1e-5, atol=1e-6)


def test_the_short_last_step_of_an_epoch_is_averaged_over_its_own_tokens(recipe, tmp_path):
    """36 rows in steps of 16: the third step has 4 rows; micro-batches have 16 or 4 rows."""
    changes = {"trainer__max_steps": 4}
    results = [train(recipe, tmp_path / f"split{size}", **changes, data__init_args__batch_size=size,
                     trainer__accumulate_grad_batches=16 // size) for size in (16, 4)]
    for row, expected in zip(results[1][0], results[0][0], strict=True):
        assert row == pytest.approx(expected, rel=1e-5)


def test_steps_equal_a_bare_loop(recipe, tmp_path, no_dropout):
    from lmmods.data.sft import SFTData

    rows, weights = train(recipe, tmp_path / "run", model__init_args__pretrained=str(no_dropout),
                          data__init_args__batch_size=4, trainer__accumulate_grad_batches=2)
    data = SFTData(str(_read_source(recipe)), template="alpaca", max_length=256, batch_size=8)
    data.connect(pretrained=str(no_dropout), seed=7, max_positions=256)
    data.prepare_data()
    data.setup("fit")
    model = AutoModelForCausalLM.from_pretrained(no_dropout).train()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for batch, row in zip(data.train_batches(), rows, strict=False):
        logits = model(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"]).logits
        loss = torch.nn.functional.cross_entropy(logits[:, :-1].transpose(1, 2), batch["labels"][:, 1:])
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        optimizer.zero_grad()
        assert row == pytest.approx({"train/loss": loss.item(), "train/grad_norm": norm.item()}, rel=1e-5)
    for name, param in model.named_parameters():
        torch.testing.assert_close(weights[f"model.{name}"], param.data, rtol=1e-5, atol=1e-6)


def _read_source(recipe) -> str:
    import yaml

    return yaml.safe_load(open(recipe()[1]))["data"]["init_args"]["source"]


def test_repeated_runs_are_equal_to_the_bit(recipe, tmp_path):
    changes = {"model__init_args__quantize": "nf4", "model__init_args__lora": {"rank": 4, "dropout": 0.2}}
    (first, first_weights), (second, others) = (train(recipe, tmp_path / name, **changes) for name in ("a", "b"))
    assert first == second
    assert all(torch.equal(tensor, others[name]) for name, tensor in first_weights.items())


def test_qlora_equals_peft_and_bitsandbytes_in_a_bare_loop(recipe, tmp_path, no_dropout):
    """Train the same adapter with transformers, PEFT and bitsandbytes alone."""
    import bitsandbytes as bnb
    from peft import LoraConfig, get_peft_model
    from transformers import BitsAndBytesConfig

    from lmmods.core.adapters import saved_name
    from lmmods.core.initialization import draw, lora_a
    from lmmods.data.sft import SFTData

    adam = {"name": "adamw", "lr": 0.01, "weight_decay": 0.1}
    rows, _ = train(recipe, tmp_path / "run", model__init_args__pretrained=str(no_dropout),
                    data__init_args__batch_size=4, trainer__accumulate_grad_batches=2, model__init_args__quantize="nf4",
                    model__init_args__lora={"rank": 4, "alpha": 8}, model__init_args__optimizer=adam)
    data = SFTData(str(_read_source(recipe)), template="alpaca", max_length=256, batch_size=8)
    data.connect(pretrained=str(no_dropout), seed=7, max_positions=256)
    data.prepare_data()
    data.setup("fit")
    quantization = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_use_double_quant=True)
    model = AutoModelForCausalLM.from_pretrained(no_dropout, quantization_config=quantization)
    for module in model.modules():
        if isinstance(module, bnb.nn.Linear4bit):
            module.support_avx512bf16_for_cpu = False
    model = get_peft_model(model, LoraConfig(r=4, lora_alpha=8, target_modules="all-linear")).train()
    for name, param in model.named_parameters():
        if "lora_A" in name:
            param.data = torch.from_numpy(draw(7, saved_name(name), lora_a(param.shape[1]), param.shape))
    params = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(params, lr=0.01, weight_decay=0.1)
    for batch, row in zip(data.train_batches(), rows, strict=False):
        logits = model(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"]).logits
        loss = torch.nn.functional.cross_entropy(logits[:, :-1].transpose(1, 2), batch["labels"][:, 1:])
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(params, 0.5)
        optimizer.step()
        optimizer.zero_grad()
        assert row == pytest.approx({"train/loss": loss.item(), "train/grad_norm": norm.item()}, rel=1e-4)
