"""Keys of other programs: the tables, the migration page, hints in error messages, and `migrate`."""

import json
import re
from pathlib import Path
from typing import get_args

import pytest
import yaml

from lmmods.cli import main
from lmmods.core.errors import UserError
from lmmods.core.image_models import LANGUAGE
from lmmods.core.preference_losses import PreferenceLoss
from lmmods.core.settings import Optimizer, OptimizerName
from lmmods.data.encode.templates import TEMPLATES as OUR_TEMPLATES
from lmmods.extras.migration import axolotl, llamafactory, training, trl
from lmmods.extras.migration.command import as_draft, check_recipe_text
from lmmods.extras.migration.draft import Draft
from lmmods.extras.migration.training import zero_stage
from lmmods.recipe.foreign_keys import (
    MARKS,
    NO_KEY,
    OPTIMIZERS,
    PRECISIONS,
    SCHEDULES,
    TABLES,
    TEMPLATES,
    Row,
    counterparts,
    hint_for,
    read_rows,
    rows_of,
)
from lmmods.recipe.trainer_fields import TrainerFields

PAGE = Path(__file__).parents[2] / "docs" / "migration.md"
HEADER = "| theirs | ours | what changes |\n|---|---|---|\n"


# The tables -------------------------------------------------------------------------------------------------------


def format_cell(cell: str, separator: str = ", ") -> str:
    """Format a table cell of the page: keys in backticks, words unchanged."""
    if cell in NO_KEY or "`" in cell or " " in cell.replace(separator, "").replace(": ", ""):
        return cell
    return separator.join(f"`{name}`" for name in cell.split(separator)) if ":" not in cell else f"`{cell}`"


def split_rows() -> tuple[list[Row], list[Row]]:
    """Split the rows into those marked with * in the file, which the page shows, and the others."""
    lines = [line for line in TABLES.read_text().splitlines() if line and line[0] not in "#["]
    marked = [(row, line.startswith("* ")) for row, line in zip(read_rows(), lines, strict=True)]
    return [row for row, is_marked in marked if is_marked], [row for row, is_marked in marked if not is_marked]


def build_tables() -> list[str]:
    """Build the page's tables from the marked rows of each program."""
    rows, _ = split_rows()
    programs = list(dict.fromkeys(row.program for row in rows))
    return [HEADER + "".join(f"| {format_cell(foreign)} | {format_cell(native)} | {note} |\n".replace("|  |", "| |")
                             for foreign, native, note in (row.cells for row in rows if row.program == program))
            for program in programs]


def test_the_migration_page_has_the_generated_tables():
    """To write them again: python tests/extras/test_migration.py"""
    page_tables = re.findall(rf"{re.escape(HEADER)}(?:\|.*\n)+", PAGE.read_text())
    assert page_tables == build_tables() and len(page_tables) == 6


def test_errors_name_every_key_that_the_page_omits():
    """Exclude keys of list items, such as axolotl's datasets, which only `migrate` converts."""
    omitted = [pair for row in split_rows()[1] for pair in row.pairs if "[]" not in pair[0]]
    assert len(omitted) > 400
    for name, keys in omitted:
        hint = hint_for(name)
        assert hint and (any(key in hint for key in keys) or not keys), name


def test_no_table_contains_a_key_twice():
    for program in {row.program for row in read_rows()}:
        names = [name for row in read_rows() if row.program == program for name, _ in row.pairs
                 if not re.search(r": ", row.cells[0])]
        assert len(names) == len(set(names)), [name for name in names if names.count(name) > 1]


def test_every_key_that_migrate_reads_is_in_a_table():
    shared = rows_of("transformers") | rows_of("libraries")
    for module in (axolotl, llamafactory, trl, training):
        requested = set(re.findall(r"""draft\.(?:get|put_value)\("(\w+)\"""", Path(module.__file__).read_text()))
        assert len(requested) > 15
        known = shared | rows_of(module.__name__.rsplit(".", 1)[-1])
        if module is training:
            known |= rows_of("axolotl") | rows_of("trl")
        assert not {key for key in requested if key not in known}, module.__name__
    for program, marks in MARKS.items():
        second_layout = {"model_class", "train_dataset", "dist_config"}
        assert marks <= rows_of(program).keys() | shared.keys() | second_layout


def test_converted_values_are_valid_here():
    assert set(OPTIMIZERS.values()) <= set(get_args(OptimizerName))
    assert set(SCHEDULES.values()) <= set(get_args(Optimizer.__annotations__["schedule"]))
    assert set(PRECISIONS.values()) <= set(get_args(TrainerFields.__annotations__["precision"]))
    assert set(TEMPLATES) <= set(OUR_TEMPLATES)


def test_the_tables_are_packaged():
    declared = re.search(r'"lmmods.recipe": \["(.*?)"\]', (PAGE.parents[1] / "setup.py").read_text())
    assert TABLES.name == declared[1]


# Errors -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("key", "value", "message"), [
    ("model.lr", 1, "model.lr is not a key. Here: model.optimizer.lr."),
    ("model.init_args.lora.r", 8, "model.lora.r is not a key. Here: model.lora.rank."),
    ("optim", "adamw_torch", "optim is not a key. Here: model.optimizer.name: adamw."),
    ("optim", "muon", "optim is not a key. Here: model.optimizer.name: muon."),
    ("use_muon", True, "use_muon is not a key. Here: model.optimizer.name: muon."),
    ("optim", "apollo", "optim is not a key. Here: model.optimizer.name"),
    ("bf16", True, "bf16 is not a key. Here: trainer.precision: bf16-mixed."),
    ("load_in_4bit", True, "load_in_4bit is not a key. Here: model.quantize: nf4."),
    ("lr_scheduler_type", "cosine", "lr_scheduler_type is not a key. Here: model.optimizer.schedule: cosine."),
    ("flash_attention", True, "flash_attention is not a key. Here: model.attention: flash_attention_2."),
    ("deepspeed", "ds_z3.json", "deepspeed is not a key. Here: trainer.strategy"),
    ("use_fast_tokenizer", False, "use_fast_tokenizer is not a key, and has no counterpart: fast tokenizers only."),
    ("datasets", None, "datasets is not a key. Here: data.source"),
])
def test_an_error_names_the_key_here(key, value, message):
    assert hint_for(key, value).startswith(message)


def test_an_unknown_key_gets_no_hint():
    assert hint_for("model.lora.rnak") is None and counterparts("max_stepz") == []


@pytest.mark.parametrize(("changes", "extra", "message"), [
    ({}, ["--learning_rate=1e-3"], "error: --learning_rate is not a key. Here: model.optimizer.lr"),
    ({}, ["--model.lora.r", "8"], "error: --model.lora.r is not a key. Here: model.lora.rank."),
    ({}, ["--bf16", "--trainer.max_stepz", "3"],
     "error: 2 mistakes:\n  --bf16 is not a key. Here: trainer.precision: bf16-mixed.\n"
     "  --trainer.max_stepz is not a key. Did you mean trainer.max_steps?"),
    ({}, ["--trainer.precision", "bf16"], "error: --trainer.precision is bf16, but must be one of auto, 32-true, "
     "bf16-true, bf16-mixed, 16-mixed. Other programs' bf16 is bf16-mixed here."),
    ({"model__init_args__optimizer": {"learning_rate": 1}}, [],
     "error: recipe.yaml: model.optimizer.learning_rate is not a key. Here: model.optimizer.lr"),
    ({"data__init_args__sequence_len": 512}, [],
     "error: recipe.yaml: data.sequence_len is not a key. Here: data.max_length."),
    ({"per_device_train_batch_size": 4}, [],
     "error: recipe.yaml: per_device_train_batch_size is not a key. Here: data.batch_size"),
])
def test_another_programs_key_is_an_error_that_names_the_key_here(recipe, tmp_path, capsys, changes, extra, message):
    assert main(["fit", *recipe(**changes), *extra]) == 2
    error = re.sub(rf"{tmp_path}/(recipe.yaml):\d+: ", r"\1: ", capsys.readouterr().err)
    assert error.startswith(message)


# migrate ----------------------------------------------------------------------------------------------------------

AXOLOTL = """
base_model: some/llama
adapter: qlora
lora_r: 32
lora_alpha: 16
lora_target_linear: true
datasets:
  - {path: some/chats, type: chat_template, split: "train[:5%]", train_on_eos: turn, field_messages: talk,
     message_property_mappings: {role: who, content: said}, roles: {user: [human], assistant: [bot]}}
  - {path: json, type: alpaca, data_files: [a.jsonl, b.jsonl]}
val_set_size: 0.1
sequence_len: 4096
sample_packing: true
micro_batch_size: 2
gradient_accumulation_steps: 4
num_epochs: 3
optimizer: paged_adamw_8bit
learning_rate: 2e-4
evals_per_epoch: 4
saves_per_epoch: 1
bf16: auto
gradient_checkpointing: true
activation_offloading: true
wandb_project: mine
early_stopping_patience: 2
special_tokens: {pad_token: <pad>}
plugins: [axolotl.integrations.liger.LigerPlugin]
liger_rope: true
loss_watchdog_threshold: 5.0
loss_watchdog_patience: 3
neftune_noise_alpha: 5
trust_remote_code: true
no_such_option: 7
"""
LLAMAFACTORY = """
model_name_or_path: some/qwen
stage: sft
finetuning_type: lora
lora_target: q_proj,v_proj
lora_rank: 8
quantization_bit: 4
dataset: mine, other
dataset_dir: sets
template: qwen3_nothink
cutoff_len: 1024
max_samples: 1000
mask_history: true
eval_strategy: steps
eval_steps: 50
val_size: 0.1
gradient_accumulation_steps: 8
lr_scheduler_type: cosine_with_restarts
warmup_steps: 20
num_train_epochs: 2.0
pure_bf16: true
plot_loss: true
deepspeed: ds_z2_offload_config.json
"""
TRL = """
model_name_or_path: some/model
dataset_name: some/rows
dataset_config: en
eval_strategy: epoch
learning_rate: 1.0e-5
lr_scheduler_type: constant
warmup_ratio: 0.1
use_peft: true
lora_target_modules: all-linear
load_in_4bit: true
packing: true
assistant_only_loss: true
max_length: 2048
save_strategy: epoch
report_to: [tensorboard]
"""


@pytest.fixture
def migrate(tmp_path, monkeypatch, capsys):
    """Return a function that converts a YAML text and returns the recipe and the messages."""
    monkeypatch.chdir(tmp_path)

    def run(text: str, *options: str) -> tuple[dict, str]:
        (tmp_path / "theirs.yaml").write_text(text)
        status = main(["migrate", "theirs.yaml", "--out", "recipe.yaml", *options])
        messages = capsys.readouterr().err
        assert status == 0, messages
        return yaml.safe_load((tmp_path / "recipe.yaml").read_text()), messages

    return run


def test_an_axolotl_config_becomes_a_recipe(migrate, tmp_path):
    recipe, messages = migrate(AXOLOTL)
    assert recipe["trainer"] == {
        "precision": "auto", "max_epochs": 3, "accumulate_grad_batches": 4, "val_check_interval": 0.25,
        "gradient_clip_val": 1.0, "log_every_n_steps": 10, "default_root_dir": "runs/migrated",
        "logger": [{"class_path": "WandbLogger", "init_args": {"project": "mine"}}],
        "callbacks": [{"class_path": "EarlyStopping", "init_args": {"monitor": "val/loss", "patience": 2}}]}
    assert recipe["model"] == {"class_path": "SFT", "init_args": {
        "pretrained": "some/llama", "quantize": "nf4", "double_quant": True, "gradient_checkpointing": "offload",
        "lora": {"rank": 32, "alpha": 16, "dropout": 0.0, "targets": "all-linear"},
        "optimizer": {"name": "paged_adamw_8bit", "lr": 2e-4, "schedule": "cosine", "warmup": 0.03},
        "neftune_alpha": 5}}
    assert recipe["data"] == {"class_path": "SFTData", "init_args": {
        "source": [{"path": "some/chats", "split": "train[:5%]", "columns": {"talk": "messages"}},
                   {"path": "a.jsonl", "format": "alpaca"}, {"path": "b.jsonl", "format": "alpaca"}],
        "max_length": 4096, "packing": True, "on_overflow": "skip", "val_size": 0.1, "pad_token": "<pad>",
        "batch_size": 2, "turn_fields": {"role": "who", "content": "said"},
        "roles": {"human": "user", "bot": "assistant"}}}
    assert recipe["checkpoint"] == {"every_n_steps": None}
    text = (tmp_path / "recipe.yaml").read_text()
    assert "lr: 0.0002  # learning_rate: 0.0002" in text and "schedule: cosine  # default of lr_scheduler" in text
    for note in ("no_such_option: unknown key", "trust_remote_code: set it on the command line",
                 "at most 100 steps", "loss_watchdog_threshold: a loss that is not a number stops the run, a high loss",
                 "val_set_size: data.seed selects the held-out rows"):
        assert note in messages and note in " ".join(text.replace("\n#", "").split()), note
    kernels = "(model.fast_kernels is on by default: the same functions, faster)"
    for unneeded in (f"plugins: [axolotl.integrations.liger.LigerPlugin], liger_rope: true {kernels}",
                     "datasets[].train_on_eos: turn (the end token of a target turn is a target"):
        assert unneeded in messages and unneeded in " ".join(text.replace("\n#", "").split()), unneeded
    assert messages.index("Not needed here:") > messages.index("No counterpart:")
    _, messages = migrate(AXOLOTL.replace("liger.LigerPlugin", "spectrum.SpectrumPlugin"), "--overwrite", "true")
    assert "plugins: axolotl.integrations.spectrum.SpectrumPlugin: axolotl's code does not run here" in messages


@pytest.mark.parametrize("key", ["train_on_eos", "train_on_eot"])
@pytest.mark.parametrize("value", ["none", "last", "all"])
def test_axolotls_end_token_settings_are_reported(key, value):
    """Here `none` is a choice, not a disabled feature; validation datasets have these keys too."""
    chats = f"[{{path: some/chats, type: chat_template, {key}: {value}, shards: 7}}]"
    draft = as_draft(yaml.safe_load(f"{{base_model: a/b, datasets: {chats}, test_datasets: {chats}}}"), Path("a.yaml"))
    for name in ("datasets", "test_datasets"):
        assert draft.lost[f"{name}[].{key}"].startswith(f"{value}: the end token of a target turn is a target")
        assert draft.lost[f"{name}[].shards"] == "rows are used unchanged"
    assert not draft.unneeded


def test_axolotls_offloading_to_disk_is_reported():
    for line in ("gradient_checkpointing: offload_disk", "activation_offloading: disk"):
        content = yaml.safe_load(f"{{base_model: a/b, datasets: [{{path: x, type: alpaca}}], {line}}}")
        draft = as_draft(content, Path("a.yaml"))
        assert draft.settings["model.gradient_checkpointing"][0] == "offload"
        assert draft.lost[line.split(":")[0]] == "inputs of layers are kept in the host's memory, not on disk"


def test_a_llamafactory_config_becomes_a_recipe(migrate, tmp_path):
    (tmp_path / "sets").mkdir()
    (tmp_path / "sets" / "dataset_info.json").write_text(json.dumps({
        "mine": {"file_name": "mine.json", "columns": {"prompt": "ask", "response": "answer"}},
        "other": {"hf_hub_url": "some/other", "subset": "en", "formatting": "sharegpt",
                  "columns": {"messages": "talk"}, "tags": {"role_tag": "who", "user_tag": "human"}}}))
    recipe, messages = migrate(LLAMAFACTORY)
    assert recipe["data"]["init_args"] == {
        "source": [{"path": "sets/mine.json", "columns": {"ask": "instruction", "answer": "output"}, "limit": 1000},
                   {"path": "some/other", "name": "en", "columns": {"talk": "messages"}, "limit": 1000}],
        "turn_fields": {"role": "who"}, "val_size": 0.1, "max_length": 1024, "train_on": "last", "batch_size": 8,
        "chat_template_kwargs": {"enable_thinking": False}}
    assert recipe["model"]["init_args"] == {
        "pretrained": "some/qwen", "lora": {"rank": 8, "alpha": 16, "dropout": 0.0, "targets": ["q_proj", "v_proj"]},
        "quantize": "nf4", "double_quant": True, "gradient_checkpointing": True,
        "optimizer": {"name": "adamw", "lr": 5e-5, "schedule": "cosine", "warmup": 20}}
    trainer = recipe["trainer"]
    assert trainer["val_check_interval"] == 50 and trainer["precision"] == "bf16-true"
    assert trainer["strategy"] == {"class_path": "lmmods.strategies.DeepSpeed",
                                   "init_args": {"stage": 2, "offload_optimizer": True}}
    assert "cosine_with_restarts is not supported; cosine is used instead" in messages
    assert "Not needed here:\n  - plot_loss: true (loss.png is always plotted)\n" in messages


def test_axolotls_images_are_converted(migrate):
    """As in its example for SmolVLM2."""
    text = """{base_model: some/vlm, processor_type: AutoProcessor, skip_prepare_dataset: true, sample_packing: true,
        datasets: [{path: some/pictures, type: chat_template}], excess_length_strategy: truncate, image_size: 512}"""
    recipe, messages = migrate(text)
    assert recipe["model"]["init_args"]["images"] is True
    assert recipe["model"]["init_args"]["trainable_parameters"] == [""]
    data = recipe["data"]["init_args"]
    assert data["on_overflow"] == "truncate_turns" and data["packing"] is True
    assert "image_size: see data.image_options" in messages
    for line, key in (("freeze_mm_modules: true", "trainable_parameters"), ("adapter: lora", "lora")):
        model = migrate(f"{text[:-1]}, {line}}}", "--overwrite", "true")[0]["model"]["init_args"]
        assert model["images"] and ("trainable_parameters" in model, "lora" in model) == (False, key == "lora")


@pytest.mark.parametrize(("changes", "model", "lost"), [
    ("finetuning_type: full", {}, False),
    ("finetuning_type: full, freeze_vision_tower: false, freeze_multi_modal_projector: false",
     {"trainable_parameters": [""]}, False),
    ("finetuning_type: full, freeze_multi_modal_projector: false", {"trainable_parameters": [
        LANGUAGE, "multi_modal_projector|connector|merger|embed_vision"]}, False),
    ("finetuning_type: full, freeze_multi_modal_projector: false, freeze_language_model: true", {}, True),
    ("lora_rank: 8", {"lora": {"rank": 8, "alpha": 16, "dropout": 0.0, "targets": "all-linear"}}, False)])
def test_llamafactorys_images_are_converted(migrate, tmp_path, changes, model, lost):
    """A dataset with images, which its keys do not mention."""
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "dataset_info.json").write_text(json.dumps({"mine": {
        "file_name": "mine.json", "formatting": "sharegpt", "columns": {"messages": "talk", "images": "pictures"}}}))
    recipe, messages = migrate("{model_name_or_path: Qwen/Qwen3-VL-4B-Instruct, dataset: mine, stage: sft, "
                               f"cutoff_len: 2048, image_max_pixels: 262144, {changes}}}")
    assert recipe["data"]["init_args"]["source"] == {
        "path": "data/mine.json", "columns": {"talk": "messages", "pictures": "images"}}
    assert recipe["data"]["init_args"]["image_options"] == {"max_pixels": 262144, "min_pixels": 1024}
    values = recipe["model"]["init_args"]
    assert values["images"] is True and values.items() >= model.items() and ("trainable_parameters" in values) == (
        "trainable_parameters" in model)
    assert ("freeze_vision_tower: name the parts" in messages) == lost


def test_images_that_no_task_reads_are_reported(migrate):
    recipe, messages = migrate("{model_name_or_path: a/b, dataset: x, stage: rm, freeze_vision_tower: true}")
    assert "images" not in recipe["model"]["init_args"]
    assert "freeze_vision_tower: only SFT and Preference read images" in messages
    _, messages = migrate("{model_name_or_path: Qwen/Qwen3-VL-4B-Instruct, dataset_name: x, use_peft: false}",
                          "--overwrite", "true")
    assert "For such rows set model.images: true" in messages


def test_a_trl_config_becomes_a_recipe(migrate):
    recipe, messages = migrate(TRL)
    assert recipe["data"]["init_args"] == {
        "source": {"path": "some/rows", "name": "en"}, "train_on": "responses", "packing": True, "batch_size": 8,
        "val_source": {"path": "some/rows", "name": "en", "split": "test"}, "max_length": 2048,
        "on_overflow": "truncate"}
    assert recipe["model"]["init_args"]["lora"] == {"rank": 16, "alpha": 32, "dropout": 0.05, "targets": "all-linear"}
    assert recipe["model"]["init_args"]["double_quant"] is False
    assert recipe["model"]["init_args"]["optimizer"] == {"name": "adamw", "lr": 1e-5, "schedule": "constant"}
    assert recipe["trainer"]["precision"] == "bf16-mixed" and recipe["trainer"]["log_every_n_steps"] == 10
    assert "has no warmup" in messages


def test_a_pretraining_config_becomes_the_task_clm():
    draft = as_draft(yaml.safe_load("{base_model: x, sequence_len: 512, max_steps: 9, "
                                    "pretraining_dataset: [{path: some/texts, text_column: body}]}"), Path("x.yaml"))
    settings = {key: value for key, (value, _) in draft.settings.items()}
    assert settings["model"] == "CLM" and settings["data"] == "CLMData" and settings["data.streaming"] is True
    assert settings["data.source"] == [{"path": "some/texts", "columns": {"body": "text"}}]
    assert settings["trainer.max_steps"] == 9 and "trainer.max_epochs" not in settings
    assert settings["trainer.precision"] == "bf16-true" and "model.lora.rank" not in settings


def convert(text: str) -> tuple[dict, Draft]:
    """Convert a YAML text; return the recipe's keys without the blocks common to all, and the draft."""
    draft = as_draft(yaml.safe_load(text), Path("x.yaml"))
    return {key: value for key, (value, _) in draft.settings.items()}, draft


def test_axolotls_exact_deduplication_is_converted():
    settings, draft = convert("{base_model: x, datasets: [{path: a, type: alpaca}], "
                              "dataset_exact_deduplication: true}")
    assert settings["data.deduplicate"] == "exact" and not draft.lost


def test_llamafactorys_dataset_mixing_is_converted():
    text = "{model_name_or_path: x, stage: sft, finetuning_type: full, dataset: 'a,b', mix_strategy: %s}"
    settings, draft = convert(text % "interleave_under, interleave_probs: '0.7,0.3'")
    assert settings["data.mixing"] == {"rule": "exhaust"} and not draft.lost
    assert settings["data.source"] == [{"path": "a", "weight": 0.7}, {"path": "b", "weight": 0.3}]
    settings, _ = convert(text % "interleave_over")
    assert settings["data.mixing"] == {"rule": "upsample"} and settings["data.source"][1]["weight"] == 1
    settings, _ = convert(text % "concat")
    assert "data.mixing" not in settings and settings["data.source"] == ["a", "b"]
    settings, draft = convert(text % "interleave_once")
    assert "data.mixing" not in settings and "interleave_once is not supported" in draft.lost["mix_strategy"]


def test_trls_dynamic_fine_tuning_is_converted():
    text = "{model_name_or_path: x, dataset_name: y, dataset_text_field: text, packing: false, loss_type: %s}"
    settings, draft = convert(text % "dft")
    assert settings["model.dft"] is True and "loss_type" not in draft.lost
    settings, draft = convert(text % "nll")
    assert "model.dft" not in settings and "loss_type" not in draft.lost


def test_trls_gkd_becomes_sft_with_a_teacher():
    text = "{model_name_or_path: x, dataset_name: y, teacher_model_name_or_path: z, %s}"
    settings, draft = convert(text % "lmbda: 0.7, beta: 0.1, temperature: 0.8, max_new_tokens: 64, seq_kd: true")
    assert settings["model"] == "SFT" and "seq_kd" in draft.lost
    assert {key: value for key, value in settings.items() if key.startswith("model.teacher.")} == {
        "model.teacher.pretrained": "z", "model.teacher.ratio": 1.0, "model.teacher.beta": 0.1,
        "model.teacher.on_policy": 0.7, "model.teacher.max_new_tokens": 64, "model.teacher.sampling_temperature": 0.8}
    settings, _ = convert(text % "lmbda: 0")
    assert settings["model.teacher.beta"] == 0.5 and "model.teacher.max_new_tokens" not in settings


@pytest.mark.parametrize(("text", "expected"), [
    ("{model_name_or_path: x, dataset_name: y, beta: 0.2}", {"loss": "sigmoid", "beta": 0.2, "optimizer.lr": 1e-6}),
    ("{model_name_or_path: x, dataset_name: y, loss_type: [apo_zero, sft], loss_weights: [0.5, 1.0]}",
     {"loss": "apo_zero", "sft_weight": 2.0}),
    ("{model_name_or_path: x, dataset_name: y, loss_type: robust, label_smoothing: 0.1}",
     {"loss": "robust", "label_smoothing": 0.1}),
    ("{model_name_or_path: x, dataset_name: y, loss_type: simpo, simpo_gamma: 0.9}",
     {"loss": "simpo", "gamma": 0.9, "sft_weight": 1.0}),
    ("{model_name_or_path: x, dataset_name: y, cpo_alpha: 0.5}", {"loss": "cpo", "sft_weight": 0.5}),
    ("{model_name_or_path: x, dataset_name: y, undesirable_weight: 1.3}",
     {"loss": "kto", "desirable_weight": 1.0, "undesirable_weight": 1.3}),
    ("{model_name_or_path: x, dataset: y, stage: dpo, finetuning_type: lora, pref_loss: orpo, pref_ftx: 0.5}",
     {"loss": "orpo", "beta": 0.1, "sft_weight": 1.5, "optimizer.lr": 5e-5}),
    ("{model_name_or_path: x, dataset: y, stage: kto, finetuning_type: lora, kto_chosen_weight: 2}",
     {"loss": "kto", "desirable_weight": 2.0}),
    ("{model_name_or_path: x, dataset_name: y, beta: 0.2, precompute_ref_log_probs: true}",
     {"loss": "sigmoid", "reference": "cache"}),
    ("{base_model: x, rl: dpo, rl_beta: 0.3, rpo_alpha: 0.2, precompute_ref_log_probs: true, datasets: []}",
     {"loss": "sigmoid", "beta": 0.3, "sft_weight": 0.2, "reference": "cache"}),
    ("{base_model: x, rl: orpo, orpo_alpha: 0.2, precompute_ref_log_probs: true, datasets: []}",
     {"loss": "orpo", "beta": 0.2}),
])
def test_preference_losses_are_converted(text, expected):
    settings, _ = convert(text)
    assert settings["model"] == "Preference" and settings["data"] == "PreferenceData"
    assert expected.items() <= {key.removeprefix("model."): value for key, value in settings.items()}.items()
    options = {key: settings[f"model.{key}"] for key in PreferenceLoss.__dataclass_fields__
               if f"model.{key}" in settings}
    assert PreferenceLoss(**options).loss == expected["loss"]
    assert settings.get("model.reference") == expected.get("reference")


def test_options_that_pairs_do_not_support_are_reported():
    settings, draft = convert("{model_name_or_path: x, dataset_name: y, loss_type: [aot], packing: true, "
                              "label_smoothing: 0.1}")
    assert settings["model.loss"] == "sigmoid" and "data.packing" not in settings
    assert "sorts the scores" in draft.lost["loss_type"] and "stay together" in draft.lost["packing"]
    assert "does not use it" in draft.lost["label_smoothing"]


@pytest.mark.parametrize(("text", "expected"), [
    ("{model_name_or_path: x, dataset_name: y, center_rewards_coefficient: 0.01, max_length: 512, packing: true, "
     "use_peft: true, lora_task_type: SEQ_CLS, lora_modules_to_save: [score]}",
     {"model.center_rewards_coefficient": 0.01, "data.max_length": 512, "data.on_overflow": "skip",
      "model.lora.rank": 16, "model.lora.modules_to_save": ["score"], "model.optimizer.lr": 1e-4}),
    ("{model_name_or_path: x, dataset_name: y, use_peft: true, lora_task_type: SEQ_CLS}",
     {"model.lora.rank": 16, "trainer.log_every_n_steps": 10}),
    ("{model_name_or_path: x, stage: rm, finetuning_type: lora, dataset: y, cutoff_len: 900, temperature: 0.5}",
     {"data.max_length": 900, "model.lora.rank": 8, "model.optimizer.lr": 5e-5}),
    ("{base_model: x, reward_model: true, num_labels: 1, model_type: AutoModelForSequenceClassification, "
     "center_rewards_coefficient: 0.02, sequence_len: 800, sample_packing: true, chat_template: gemma, datasets: "
     "[{path: a, type: bradley_terry.chat_template}]}",
     {"model.center_rewards_coefficient": 0.02, "data.max_length": 800,
      "data.source": [{"path": "a", "columns": {"input": "prompt"}}]})])
def test_reward_model_configs_become_valid_recipes(text, expected):
    """Keys without a use there are reported."""
    settings, draft = convert(text)
    assert settings["model"] == "Reward" and settings["data"] == "RewardData"
    assert expected.items() <= settings.items()
    assert "data.packing" not in settings and "data.train_on" not in settings
    assert draft.lost.keys() <= {"packing", "sample_packing", "temperature"}
    check_recipe_text(draft.as_yaml("x"))


@pytest.mark.parametrize(("text", "expected"), [
    ("{model_name_or_path: x, dataset_name: y, reward_funcs: [accuracy_reward, my.rewards.fn], num_generations: 16, "
     "reward_weights: [1.0, 0.5], max_completion_length: 1024, steps_per_generation: 8, "
     "gradient_accumulation_steps: 4, beta: 0.001, loss_type: bnpo, scale_rewards: false, epsilon_high: 0.28, "
     "importance_sampling_level: sequence, num_iterations: 2, temperature: 0.9, mask_truncated_completions: true, "
     "use_vllm: true, top_p: 0.9, top_k: 0}",
     {"rewards": [{"name": "math", "column": "solution", "weight": 1.0}, {"function": "my.rewards.fn", "weight": 0.5}],
      "num_generations": 16, "max_new_tokens": 1024, "steps_per_rollout": 2, "beta": 0.001, "loss": "dapo",
      "scale_rewards": "none", "ratio": "sequence", "epsilon_high": 0.28, "num_iterations": 2, "temperature": 0.9,
      "mask_truncated": True, "optimizer.lr": 1e-6}),
    ("{model_name_or_path: x, dataset_name: y, reward_model_name_or_path: a/b, max_prompt_length: 100, "
     "loss_type: sapo, steps_per_generation: 3, gradient_accumulation_steps: 2, scale_rewards: batch}",
     {"rewards": [{"model": "a/b"}], "scale_rewards": "batch"}),
    ("{base_model: x, rl: grpo, sequence_len: 300, trl: {reward_funcs: [mine.fn], beta: 1e-3, "
     "max_completion_length: 64, loss_type: dr_grpo, scale_rewards: true}, learning_rate: 2e-6, "
     "datasets: [{path: a, type: mine.transform}]}",
     {"rewards": [{"function": "mine.fn"}], "beta": 0.001, "max_new_tokens": 64, "loss": "dr_grpo",
      "scale_rewards": "group", "optimizer.lr": 2e-6}),
])
def test_grpo_configs_become_valid_recipes(text, expected):
    """Options without a counterpart are reported."""
    settings, draft = convert(text)
    assert settings["model"] == "GRPO" and settings["data"] == "PromptData"
    assert {f"model.{key}": value for key, value in expected.items()}.items() <= {
        key: value for key, value in settings.items() if not isinstance(value, list) or key == "model.rewards"}.items()
    lost = draft.lost.keys()
    if "use_vllm" in text:
        assert lost == {"use_vllm", "top_p"} and settings["data.max_length"] == 1024 + 512
        assert any("--trust_recipe_code" in note for note in draft.notes)
    elif "rl: grpo" in text:
        assert not lost and settings["data.max_length"] == 300 + 64
    else:
        assert lost == {"loss_type", "steps_per_generation"} and settings["data.max_length"] == 100 + 512
    check_recipe_text(draft.as_yaml("x"))


def test_rewards_that_cannot_be_converted_are_reported():
    settings, draft = convert("{model_name_or_path: x, dataset_name: y, reward_funcs: [fn], "
                              "reward_weights: [1, 2]}")
    assert settings["model.rewards"] == [{"function": "WRITE.HERE.fn"}]
    assert "2 weights for 1" in draft.lost["reward_weights"]
    settings, draft = convert("{model_name_or_path: x, dataset_name: y, num_generations: 8}")
    assert settings["model.rewards"] == [{"name": "exact_match"}] and any("No rewards" in note for note in draft.notes)


def test_columns_of_pairs_are_converted(tmp_path):
    settings, _ = convert("{base_model: x, rl: dpo, datasets: [{path: a, type: chat_template.default, "
                          "field_chosen: good, field_rejected: bad, field_messages: talk}]}")
    assert settings["data.source"] == [{"path": "a", "columns": {"good": "chosen", "bad": "rejected",
                                                                 "talk": "messages"}}]
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "dataset_info.json").write_text(json.dumps({"mine": {
        "file_name": "a.json", "ranking": True, "columns": {"prompt": "ask", "chosen": "good", "rejected": "bad"}}}))
    draft = as_draft(yaml.safe_load("{model_name_or_path: x, stage: dpo, finetuning_type: lora, dataset: mine}"),
                     tmp_path / "x.yaml")
    assert draft.settings["data.source"][0]["columns"] == {"ask": "instruction", "good": "chosen", "bad": "rejected"}


@pytest.mark.parametrize(("text", "message"), [
    ("{base_model: x, rl: gdpo}", "trains on rewards (gdpo)"),
    ("{model_name_or_path: x, stage: ppo, finetuning_type: lora}", "trains on rewards (ppo)"),
    ("{base_model: x, process_reward_model: true}", "(process_reward_model)"),
    ("{base_model: x, num_labels: 3}", "trains on labels of texts (num_labels), which is not supported"),
    ("{base_model: x, reward_model: true, num_labels: 3}", "(num_labels)"),
    ("{model_name_or_path: x, dataset_name: y, beta: 0.1, num_generations: 8, normalize_advantages: true}",
     "trains on rewards (rloo)"),
    ("{model: x, model_class: llm, train_dataset: y}", "second layout"),
    ("{learning_rate: 3}", "its keys do not show"),
    ("{trainer: {max_steps: 3}}", "is already a recipe"),
    ("{base_model: x, sequence_len: many, datasets: 3}", "a value has a type"),
])
def test_a_config_that_cannot_become_a_recipe_is_rejected(text, message):
    with pytest.raises(UserError, match=re.escape(message)):
        as_draft(yaml.safe_load(text), Path("theirs.yaml"))


def test_fit_on_another_programs_config_suggests_migrate(migrate, tmp_path, capsys):
    migrate(TRL)
    assert main(["fit", "--config", "theirs.yaml"]) == 2
    assert "theirs.yaml is a configuration of TRL, not a recipe. Convert it: python train.py migrate theirs.yaml" \
        in capsys.readouterr().err
    assert main(["migrate", "theirs.yaml", "--out", "recipe.yaml"]) == 2
    assert "--overwrite true" in capsys.readouterr().err
    before = (tmp_path / "recipe.yaml").read_text()
    assert main(["migrate", "theirs.yaml"]) == 0
    assert capsys.readouterr().out == before
    assert main(["migrate", "none.yaml"]) == 2
    assert capsys.readouterr().err.startswith("error: none.yaml: no such file")


@pytest.mark.parametrize(("config", "stage"), [
    ("configs/zero3_bf16.json", (3, False)), ("ds_z2_offload_config.json", (2, True)), ("mine.json", (None, False)),
    ({"zero_optimization": {"stage": 1, "offload_optimizer": {"device": "cpu"}}}, (1, True)),
    ({"zero_optimization": {"stage": 3, "offload_param": {"device": "none"}}}, (3, False))])
def test_deepspeed_configs_give_stage_and_offload(config, stage):
    assert zero_stage(config) == stage


if __name__ == "__main__":
    new_tables = iter(build_tables())
    PAGE.write_text(re.sub(rf"{re.escape(HEADER)}(?:\|.*\n)+", lambda _: next(new_tables), PAGE.read_text()))
