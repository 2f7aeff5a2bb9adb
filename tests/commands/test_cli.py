"""The commands as a user types them: what they write, and which errors they print."""

import json
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import yaml
from peft import PeftModel
from transformers import AutoModelForCausalLM, AutoTokenizer

from lmmods.cli import main
from lmmods.commands.registry import COMMANDS, GROUPS, RECIPE_COMMANDS, options_of, parse_command
from lmmods.recipe.files import as_yaml, plain, read_value
from lmmods.recipe.reader import parse
from lmmods.runs.folder import RunFolder


@pytest.fixture
def folder(tmp_path) -> RunFolder:
    return RunFolder(tmp_path / "run")


def sample_ids() -> torch.Tensor:
    return torch.randint(3, 300, (2, 20), generator=torch.Generator().manual_seed(1))


# What a run writes ------------------------------------------------------------------------------------------------


def test_fit_writes_the_whole_run_folder(recipe, tmp_path, llama_folder):
    assert main(["fit", *recipe()]) == 0
    folder = RunFolder(tmp_path / "run")
    assert {p.name for p in folder.root.iterdir()} == {
        "config.yaml", "data_report.json", "metrics.csv", "metrics.json", "checkpoints", "model", "loss.png",
        "completed", "manifest.json", ".run-files.json"}
    assert {"adapter_model.safetensors", "adapter_config.json", "tokenizer.json", "README.md"} <= {
        p.name for p in folder.model.iterdir()}
    metrics = json.loads(folder.metrics_json.read_text())
    assert {"train/loss", "train/lr", "train/grad_norm", "train/epoch", "train/tokens_per_second", "val/loss",
            "val/perplexity", "val/accuracy"} <= set(metrics)
    assert metrics["val/perplexity"] == pytest.approx(torch.tensor(metrics["val/loss"]).exp().item(), rel=1e-6)
    assert json.loads(folder.data_report.read_text())
    assert folder.loss_png.read_bytes()[:4] == b"\x89PNG"
    tokenizer = AutoTokenizer.from_pretrained(folder.model)
    base = AutoModelForCausalLM.from_pretrained(llama_folder)
    base.resize_token_embeddings(len(tokenizer))
    assert torch.isfinite(PeftModel.from_pretrained(base, folder.model)(sample_ids()).logits).all()


def test_a_run_of_config_yaml_has_the_same_losses(finished, tmp_path):
    folder = finished()
    again = tmp_path / "again"
    assert main(["fit", "--config", str(folder.config), "--trainer.default_root_dir", str(again)]) == 0
    first, second = (path.read_text().splitlines() for path in (folder.metrics_csv, again / "metrics.csv"))
    column = first[0].split(",").index("train/loss")
    assert [line.split(",")[column] for line in first] == [line.split(",")[column] for line in second]


def test_validate_repeats_the_loss_of_a_run_and_predict_writes_answers(finished):
    folder = finished("run")
    trained = json.loads(folder.metrics_json.read_text())
    config = ["--config", str(folder.config), "--ckpt_path", "last"]
    assert main(["validate", *config]) == 0
    assert json.loads(folder.metrics_json.read_text())["val/loss"] == pytest.approx(trained["val/loss"], rel=1e-6)
    assert main(["predict", *config]) == 0
    rows = [json.loads(line) for line in folder.predictions.read_text().splitlines()]
    assert len(rows) == 4
    assert all(set(row) == {"instruction", "input", "output", "prediction_with_input", "prediction"} for row in rows)
    assert all(row["instruction"] in row["prediction_with_input"] for row in rows)
    assert all(row["prediction_with_input"].strip().endswith(row["prediction"]) for row in rows)
    assert 0 <= json.loads(folder.metrics_json.read_text())["predict/exact_match"] <= 1


@pytest.mark.slow
def test_the_validation_loss_does_not_depend_on_the_batch_size(recipe, folder):
    assert main(["fit", *recipe(trainer__max_steps=2, trainer__val_check_interval=2)]) == 0
    losses = []
    for size in (1, 3, 4):
        assert main(["validate", "--config", str(folder.config), "--ckpt_path", "last",
                     "--data.eval_batch_size", str(size)]) == 0
        losses.append(json.loads(folder.metrics_json.read_text())["val/loss"])
    assert losses == pytest.approx([losses[0]] * 3, rel=1e-6)


def test_greedy_predictions_equal_those_of_transformers(recipe, folder, llama_folder):
    """Batched, left-padded generation gives the answers of one prompt at a time."""
    assert main(["fit", *recipe(model__init_args__quantize=None)]) == 0
    assert main(["predict", "--config", str(folder.config), "--ckpt_path", "last"]) == 0
    tokenizer = AutoTokenizer.from_pretrained(folder.model)
    base = AutoModelForCausalLM.from_pretrained(llama_folder)
    base.resize_token_embeddings(len(tokenizer))
    model = PeftModel.from_pretrained(base, folder.model).eval()
    for line in folder.predictions.read_text().splitlines():
        row = json.loads(line)
        prompt_length = len(row["prediction_with_input"]) - len(row["prediction_with_input"].split("### Response:")[1])
        prompt = tokenizer(row["prediction_with_input"][:prompt_length], return_tensors="pt")
        output = model.generate(**prompt, max_new_tokens=6, do_sample=False)
        answer = tokenizer.decode(output[0, prompt["input_ids"].shape[1]:], skip_special_tokens=True)
        assert row["prediction"] == answer.strip()


@pytest.mark.parametrize("changes", [
    {"model__init_args__quantize": "fp4"},
    {"model__init_args__quantize": "int8"},
    {"model__init_args__quantize": None, "model__init_args__lora": None},
    {"trainer__precision": "bf16-mixed"},
    {"trainer__precision": "bf16-true"},
    {"model__init_args__gradient_checkpointing": True},
    {"model__init_args__lora": {"rank": 4, "dora": True, "rslora": True, "modules_to_save": ["lm_head"]}},
    {"model__init_args__optimizer": {"name": "adafactor", "lr": 0.01, "schedule": "cosine", "warmup": 0.1}},
    {"model__init_args__optimizer": {"name": "paged_adamw_8bit", "lr": 0.01, "schedule": "wsd"}},
    {"model__init_args__optimizer": {"name": "lion", "lr": 0.001}},
], ids=lambda changes: "-".join(str(value)[:24] for value in changes.values()))
def test_every_training_method_lowers_the_loss(recipe, folder, changes):
    assert main(["fit", *recipe(**{"trainer__max_steps": 12, "trainer__limit_val_batches": 0, **changes})]) == 0
    lines = folder.metrics_csv.read_text().splitlines()
    column = lines[0].split(",").index("train/loss")
    losses = [float(line.split(",")[column]) for line in lines[1:]]
    assert sum(losses[-3:]) < sum(losses[:3])
    if (changes.get("model__init_args__lora", 1)) is None:
        model = AutoModelForCausalLM.from_pretrained(folder.model)
        assert torch.isfinite(model(sample_ids()).logits).all()


def test_an_adapter_is_trained_further_in_another_run(recipe, finished, tmp_path):
    folder = finished()
    second = recipe("second.yaml", model__init_args__lora=None, model__init_args__adapter=str(folder.model),
                    trainer__default_root_dir=str(tmp_path / "second"))
    assert main(["fit", *second]) == 0
    losses = [json.loads((root / "metrics.json").read_text())["val/loss"]
              for root in (folder.root, tmp_path / "second")]
    assert losses[1] < losses[0]


@pytest.mark.parametrize("changes", [{}, *(pytest.param({
    "model__init_args__quantize": kind, "model__init_args__lora": {"rank": 4, "dropout": 0.1, "dora": True}},
    marks=pytest.mark.slow) for kind in ("nf4", "int8"))], ids=["nf4", "nf4-dora", "int8-dora"])
def test_a_merged_model_equals_the_adapter_on_its_base(recipe, folder, tmp_path, capsys, changes):
    assert main(["fit", *recipe(**changes, trainer__max_steps=4)]) == 0
    out = tmp_path / "merged"
    assert main(["merge", "--run", str(folder.root), "--out", str(out)]) == 0
    output = capsys.readouterr().out
    assert "dequantized" in output and "original" in output
    assert float(output.split("* dequantized")[1].split()[0]) < 1e-4  # relative to the largest logit
    merged = AutoModelForCausalLM.from_pretrained(out).eval()
    assert not any("lora" in name for name in merged.state_dict())
    assert len(AutoTokenizer.from_pretrained(out)) <= merged.config.vocab_size
    assert main(["merge", "--run", str(folder.root), "--out", str(out)]) == 2
    assert main(["merge", "--run", str(folder.root), "--out", str(tmp_path / "other"), "--base", "original",
                 "--threshold", "1e-9"]) == 2
    assert "Nothing was written" in capsys.readouterr().err and not (tmp_path / "other").exists()


def test_merge_does_not_suffer_from_repacked_weights(finished):
    """Merging after an eval forward of bitsandbytes' 4-bit layers gives garbage; `merge` reads the base afresh."""
    from lmmods.commands.exported_model import FinishedRun
    from lmmods.commands.merge import _compute_reference, _measure_distance, _merge_adapter

    run = FinishedRun.read(str(finished().root), "merge")
    reference = _compute_reference(run)  # many eval forwards of a quantised model in this very process
    assert _measure_distance(_merge_adapter(run, "dequantized", "float32"), reference).largest < 1e-4


def test_inspect_shows_the_loss_mask_sizes_and_memory_without_training(recipe, folder, capsys):
    assert main(["inspect", *recipe(), "--rows", "2"]) == 0
    output = capsys.readouterr().out
    assert output.count("--- row") == 2 and "[[" in output and "</s>]]" in output
    positions = [output.index(part) for part in (
        "rows read", "training rows by length", "--- row", "Parameters:",
        "Trains: a LoRA adapter of rank 4 on all-linear, over ", "Memory: about")]
    assert positions == sorted(positions) and "quantize: nf4" not in output
    assert not folder.root.exists()
    assert output.count("prompt: same tokens as apply_chat_template(add_generation_prompt=True)") == 2
    assert main(["inspect", *recipe(), "--which", "[7, 2]", "--recipe", "true"]) == 0
    output = capsys.readouterr().out
    assert output.count("--- row") == 2
    resolved = yaml.safe_load(output[output.index("engine: torch"):])
    assert resolved["trainer"]["accumulate_grad_batches"] == 1 and resolved["trainer"]["num_sanity_val_steps"] == 0
    data, model = (resolved[block]["init_args"] for block in ("data", "model"))
    assert data["tokenizer"] == model["pretrained"] and (data["seed"], data["eval_batch_size"]) == (7, 4)
    assert model["quantize"] == "nf4" and not resolved.keys() & {"rows", "which", "recipe"}
    assert main(["inspect", *recipe(), "--which", "[99]"]) == 2
    assert "row 99 does not exist" in capsys.readouterr().err


@pytest.mark.parametrize("string", ["12345e67", "1e5", "1.5e3", "-2_0E-7", "0x1f", "12", "true", "1:30"])
def test_strings_that_look_like_numbers_stay_strings(recipe, capsys, string):
    """A commit, a branch or an id may be `12345e67`."""
    assert main(["fit", *recipe(), f"--model.revision={string}", "--print_config"]) == 0
    printed = capsys.readouterr().out
    for read in (yaml.safe_load, lambda written: plain(read_value(written))):
        assert read(printed)["model"]["init_args"]["revision"] == string
        assert read(as_yaml({string: string})) == {string: string}


def test_print_config_prints_the_resolved_recipe(recipe, capsys):
    logger = ["--trainer.logger", "WandbLogger", "--trainer.logger.project", "mine"]
    assert main(["fit", *recipe(), "--trainer.max_steps", "3", *logger, "--print_config"]) == 0
    content = yaml.safe_load(capsys.readouterr().out)
    options = content["trainer"]["logger"]["init_args"]
    assert options["project"] == "mine" and None not in options.values()
    assert content["trainer"]["max_steps"] == 3 and content["model"]["init_args"]["lora"]["rank"] == 4


def test_print_config_skips_defaults_and_nulls_on_request(recipe, capsys):
    assert main(["fit", *recipe(), "--print_config=skip_default,skip_null"]) == 0
    printed = capsys.readouterr().out
    content = yaml.safe_load(printed)
    assert content["checkpoint"] == {"every_n_steps": 2} and "samples" not in content and "null" not in printed
    assert content["model"]["init_args"]["lora"] == {"rank": 4, "alpha": 16.0, "dropout": 0.1, "targets": "all-linear",
                                                     "dora": False, "rslora": False, "init": "kaiming"}
    assert main(["fit", *recipe(), "--print_config=skip_all"]) == 2
    assert "must be skip_null or skip_default" in capsys.readouterr().err


def test_later_files_and_options_override_earlier_ones(recipe, tmp_path, capsys):
    overlay = tmp_path / "overlay.yaml"
    overlay.write_text("trainer: {max_steps: 9}\nmodel: {init_args: {optimizer: {lr: 0.5}}}\n")
    assert main(["fit", *recipe(), "--config", str(overlay), "--model.optimizer.weight_decay", "0.1",
                 "--print_config"]) == 0
    content = yaml.safe_load(capsys.readouterr().out)
    assert content["trainer"]["max_steps"] == 9
    assert content["model"]["init_args"]["optimizer"]["lr"] == 0.5
    assert content["model"]["init_args"]["optimizer"]["weight_decay"] == 0.1
    assert content["model"]["init_args"]["lora"]["rank"] == 4


# Mistakes of a user -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("changes", "extra", "message"), [
    ({"data__init_args__source": "no/such.jsonl"}, [], r"no/such\.jsonl"),
    ({"data__init_args__batch_size": 0}, [], r"batch_size is 0"),
    ({"data__init_args__template": "alpacca"}, [], r"alpacca.*alpaca"),
    ({"model__init_args__pretrained": "no/such/model"}, [], r"model\.pretrained: there is no folder 'no/such/model'"),
    ({"model__init_args__lora": None}, [], r"quantize is nf4.*model\.lora"),
    ({"model__init_args__adapter": "runs/x/model"}, [], r"model\.lora and model\.adapter are both set"),
    ({"model__init_args__pretrained": None, "model__init_args__config": {"model_type": "llama"}}, [],
     r"random weights, which an adapter does not contain"),
    ({"model__init_args__lora": {"targets": ["q_prj"]}}, [], r"lora\.targets: 'q_prj'.*q_proj"),
    ({"model__init_args__lora": {"rank": 0}}, [], r"lora\.rank is 0"),
    ({"model__init_args__lora": {"rnak": 4}}, [], r"rnak.*Did you mean.*rank"),
    ({"model__init_args__learning_rate": 1}, [], r"learning_rate"),
    ({"trainer__max_stepz": 4}, [], r"max_stepz.*Did you mean.*max_steps"),
    ({"trainer__max_steps": "many"}, [], r"trainer\.max_steps.*many"),
    ({"trainer__precision": "bf17"}, [], r"trainer\.precision.*bf17"),
    ({"model__init_args__trust_remote_code": "perhaps"}, [], r"trust_remote_code"),
    ({"model__class_path": "SFFT"}, [], r"SFFT"),
    ({"model__init_args__optimizer": {"name": "adamm"}}, [], r"adamm"),
    ({"checkpoint": {"every_n_steps": 0}}, [], r"every_n_steps"),
    ({"checkpoint": {"monitor": "val/los"}}, [], r"checkpoint\.monitor is 'val/los'.*val/loss"),
    ({"data__init_args__max_length": 10000}, [], r"max_length is 10000.*256"),
    ({"trainer__max_steps": -1}, [], r"trainer\.max_steps or trainer\.max_epochs"),
    *(({f"trainer__{key}": value}, [], rf"trainer\.{key} is .*must be .*(above 0|more than 0|1 or more)")
      for key, value in (("max_steps", 0), ("max_epochs", 0), ("limit_train_batches", 0), ("limit_train_batches", 0.0),
                         ("max_time", "00:00:00:00"), ("max_time", {"seconds": 0}), ("max_time", {"seconds": -5}),
                         ("max_time", "0"), ("max_time", {"weekz": 1}), ("max_time", "1:00"))),
    ({"trainer__max_time": 0}, [], r"trainer\.max_time"),
    ({}, ["--ckpt_path", "last"], r"--ckpt_path last does not exist"),
    ({}, ["--ckpt_path", "no/such/step=3"], r"step=3 does not exist"),
    ({}, ["--engine", "tensorflow"], r"engine is 'tensorflow'"),
    ({}, ["--trainer.max_stepz", "4"], r"max_stepz.*Did you mean.*max_steps"),
    ({}, ["--config", "no/such.yaml"], r"no/such\.yaml"),
])
def test_every_mistake_in_a_recipe_is_one_message(recipe, folder, capsys, changes, extra, message):
    assert main(["fit", *recipe(**changes), *extra]) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: ") and "Traceback" not in error
    assert re.search(message, error, re.DOTALL), error
    assert len(error.strip().splitlines()) <= 3, error
    if "monitor" not in str(changes):
        assert not folder.root.exists()


@pytest.mark.parametrize(("name", "content", "message"), [
    ("empty.jsonl", "", "empty"),
    ("broken.jsonl", '{"instruction": "a", "output": "b"}\n{"instruction": \n', r"broken\.jsonl:2"),
    ("columns.jsonl", '{"text_a": "a", "text_b": "b"}\n', r"text_a"),
    ("quotes.csv", 'instruction,input,output\na,"b,c\nd,e,f\n', r"quotes\.csv:2"),
])
def test_invalid_data_is_reported_with_file_and_line(recipe, folder, tmp_path, capsys, name, content, message):
    (tmp_path / name).write_text(content)
    assert main(["fit", *recipe(data__init_args__source=str(tmp_path / name), data__init_args__val_size=0)]) == 2
    error = capsys.readouterr().err
    assert re.search(message, error), error
    assert not folder.root.exists()


def test_a_model_folder_without_a_tokenizer_is_an_error(recipe, folder, llama_folder, tmp_path, capsys):
    import shutil

    bare = shutil.copytree(llama_folder, tmp_path / "bare")
    for path in bare.glob("tokenizer*"):
        path.unlink()
    assert main(["fit", *recipe(model__init_args__pretrained=str(bare))]) == 2
    assert "tokenizer" in capsys.readouterr().err
    assert not folder.root.exists()


def test_a_damaged_checkpoint_is_an_error_and_changes_nothing(recipe, finished, capsys):
    folder = finished("run", trainer__max_steps=2)
    file = folder.resolve("last") / "optimizer.safetensors"
    file.write_bytes(file.read_bytes()[:-10])
    before = folder.metrics_csv.read_text()
    assert main(["fit", *recipe(), "--ckpt_path", "last"]) == 2
    assert "damaged: optimizer.safetensors" in capsys.readouterr().err
    assert folder.metrics_csv.read_text() == before


def test_a_checkpoint_of_another_adapter_is_rejected(recipe, finished, capsys):
    finished("run", trainer__max_steps=2)
    other = recipe(model__init_args__lora={"rank": 4, "targets": ["q_proj"]})
    assert main(["fit", *other, "--ckpt_path", "last"]) == 2
    error = capsys.readouterr().err
    assert "belongs to another run" in error and "model.lora.targets" in error


def test_a_second_fit_in_a_folder_needs_overwrite_or_resume(recipe, finished, capsys):
    folder = finished("run", trainer__max_steps=2)
    assert main(["fit", *recipe()]) == 2
    assert "--overwrite true" in capsys.readouterr().err
    folder.completed.unlink()
    assert main(["fit", *recipe()]) == 2
    assert "--ckpt_path last" in capsys.readouterr().err
    assert main(["fit", *recipe(trainer__max_steps=3), "--overwrite", "true"]) == 0
    assert json.loads(folder.metrics_json.read_text())["trainer/global_step"] == 3


def test_a_loss_that_is_not_finite_stops_the_run_before_a_checkpoint(recipe, folder, capsys):
    changes = {"model__init_args__optimizer": {"name": "sgd", "lr": 1e30}, "checkpoint": {"every_n_steps": 1},
               "trainer__limit_val_batches": 0}
    assert main(["fit", *recipe(**changes)]) == 2
    error = capsys.readouterr().err
    assert "loss is nan" in error or "loss is inf" in error
    from safetensors.torch import load_file

    for name in folder.names():
        tensors = load_file(folder.checkpoint(name) / "model.safetensors")
        assert all(torch.isfinite(tensor).all() for tensor in tensors.values())
    assert not folder.completed.exists()


def test_help_lists_every_command_with_its_group(capsys):
    for arguments in (["--help"], ["-h"], ["help"]):
        assert main(arguments) == 0
        output = capsys.readouterr().out
        for name, command in COMMANDS.items():
            assert re.search(rf"^{GROUPS[command.group]}:(\n  .*)*\n  {name} +{re.escape(command.line)}$", output, re.M)
    assert main([]) == 2
    assert COMMANDS["fit"].line in capsys.readouterr().err


def assert_error(capsys, arguments: list[str], pattern: str, lines: int | None = 1) -> None:
    assert main(arguments) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: ") and lines in (None, error.count("\n")) and re.search(pattern, error, re.S), error


def test_an_unknown_or_missing_command_is_an_error(capsys):
    assert_error(capsys, ["fitt"], r"Unknown command 'fitt'\. Did you mean fit\?")
    for arguments in (["--"], ["-c"], ["--config", "configs/clm.yaml"], ["--engine", "jax"]):
        assert main(arguments) == 2
        assert capsys.readouterr().err.startswith("error: A command is missing.\n\nusage: ")


@pytest.mark.parametrize("name", sorted(COMMANDS.keys() - {"recipes", "doctor"}))  # these work without options
def test_a_command_without_options_says_what_it_needs(name, capsys, monkeypatch):
    monkeypatch.delenv("WANDB_API_KEY", raising=False)
    example = re.escape(f"For example: python train.py {name} {COMMANDS[name].example}\n")
    missing = rf"^error: ({name} needs a recipe\.|.* is missing[:.] .*)[ \n]+{example}"
    assert_error(capsys, [name], {"chat": "chat needs --run RUN", "dashboard": "dashboard needs a W&B account",
                                  "sweep": "sweep: no key varies"}.get(name, missing), None)


@pytest.mark.parametrize("name", sorted(name for name in COMMANDS if COMMANDS[name].example))
def test_the_example_of_every_command_parses(name, monkeypatch):
    monkeypatch.chdir(Path(__file__).parents[2])
    words = COMMANDS[name].example.split()
    if name in RECIPE_COMMANDS:
        parse([name, *words], options_of(name)[0])
    else:
        parse_command(name, words)


@pytest.mark.parametrize(("words", "pattern"), [
    ("fit --engine jax", r"fit needs a recipe\. For example: python train\.py fit --config "),
    ("plan --config configs/clm.yaml", r"--on is missing\. .* For example: .* --on 8xH100"),
    ("new mine --model x", r"--data is missing\. .* For example: python train\.py new mine"),
    ("fit --config", r"--config has no value"),
    ("inspect --config=", r"--config has no value"),
    ("fit --config --engine jax", r"--config has no value"),
    ("fit configs/clm.yaml", r"Unexpected argument configs/clm\.yaml\. .* use --config configs/clm\.yaml\."),
    ("validate -- --config configs/clm.yaml", r"-- ends the options"),
    ("--config configs/clm.yaml fit", r"The command must come first. Use python train\.py fit …"),
    ("fit --config configs/clm.yaml -- --trainer.max_steps 3", r"-- ends the options"),
])
def test_a_missing_or_misplaced_argument_is_an_error(words, pattern, capsys, monkeypatch):
    monkeypatch.chdir(Path(__file__).parents[2])
    assert_error(capsys, words.split(), pattern)


def test_the_last_value_of_a_repeated_option_counts(recipe, capsys):
    assert main(["fit", *recipe(), "--trainer.max_steps", "3", "--trainer.max_steps=7", "--print_config"]) == 0
    assert yaml.safe_load(capsys.readouterr().out)["trainer"]["max_steps"] == 7


def test_added_tokens_train_with_the_adapter_and_survive_the_merge(recipe, folder, tmp_path, llama_folder):
    rows = tmp_path / "rows.jsonl"
    rows.write_text("".join(json.dumps({"instruction": f"Say {n}.", "output": f"{n} {n}"}) + "\n" for n in range(8)))
    assert main(["fit", *recipe(data__init_args__add_tokens=["<tool>"], data__init_args__source=str(rows),
                                data__init_args__val_size=0, trainer__limit_val_batches=0, trainer__max_steps=3)]) == 0
    tokenizer = AutoTokenizer.from_pretrained(folder.model)
    new = tokenizer.convert_tokens_to_ids("<tool>")
    assert new >= 320
    out = tmp_path / "merged"
    assert main(["merge", "--run", str(folder.root), "--out", str(out)]) == 0
    merged = AutoModelForCausalLM.from_pretrained(out)
    assert merged.get_input_embeddings().weight.shape[0] > new
    original = AutoModelForCausalLM.from_pretrained(llama_folder).get_input_embeddings().weight
    torch.testing.assert_close(merged.get_input_embeddings().weight[:320], original)


@pytest.mark.slow
def test_packing_does_not_change_the_validation_loss(recipe, folder):
    """Packed and padded rows have the same tokens, so the validation loss is the same."""
    changes = {"trainer__max_steps": 2, "trainer__val_check_interval": 2, "data__init_args__val_size": 12}
    assert main(["fit", *recipe(**changes)]) == 0
    losses = []
    for packing in ("false", "true"):
        assert main(["validate", "--config", str(folder.config), "--ckpt_path", "last", "--data.packing", packing]) == 0
        losses.append(json.loads(folder.metrics_json.read_text())["val/loss"])
    assert losses[1] == pytest.approx(losses[0], rel=1e-5)
    packed = RunFolder(folder.root.parent / "packed")
    assert main(["fit", *recipe(data__init_args__packing=True, trainer__default_root_dir=str(packed.root))]) == 0
    assert packed.completed.exists()


def test_a_closed_output_pipe_ends_the_program_silently():
    program = subprocess.Popen([sys.executable, "train.py", "--help"], cwd=Path(__file__).parents[2],
                               stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    program.stdout.close()
    assert program.stderr.read() == ""
    program.stderr.close()
    assert program.wait() == 128 + signal.SIGPIPE
