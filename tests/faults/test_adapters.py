"""Damaged and untrusted adapters, and adapters of another model: one message from every command, on both engines."""

import json
import os
import re
import shutil

import pytest
from safetensors.torch import load_file, save_file

from lmmods.cli import main
from lmmods.core.adapters import SETTINGS, WEIGHTS, adapter_config
from lmmods.core.errors import UserError
from tests.commands.test_evaluate import task_folder  # noqa: F401 - a fixture

pytestmark = pytest.mark.timeout(60)  # so that a read that blocks on a pipe fails
ENGINES = pytest.mark.parametrize("engine", ["torch", "jax"])
PLAIN = {"model__init_args__quantize": None, "model__init_args__lora": {"rank": 2, "targets": ["q_proj", "v_proj"]},
         "trainer__max_steps": 1, "trainer__limit_val_batches": 0}
LAYER = "base_model.model.model.layers.0.self_attn.q_proj.lora_{}.weight"


def change_settings(**changes):
    """Return a damage that changes settings."""
    def damage(folder):
        content = json.loads((folder / SETTINGS).read_text()) | changes
        (folder / SETTINGS).write_text(json.dumps({key: value for key, value in content.items() if value != "gone"}))
    return damage


def rewrite(name, content):
    """Return a damage that gives a file other content, or replaces it by a pipe if content is None."""
    def damage(folder):
        (folder / name).unlink()
        if content is None:
            os.mkfifo(folder / name)
        else:
            (folder / name).write_bytes(content)
    return damage


def change_weights(change):
    """Return a damage that applies `change` to the tensors."""
    def damage(folder):
        tensors = load_file(folder / WEIGHTS)
        change(tensors)
        save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, folder / WEIGHTS)
    return damage


UNREADABLE = {
    "not JSON": (rewrite(SETTINGS, b"{"), "cannot be read"),
    "not UTF-8": (rewrite(SETTINGS, b"\xff"), "cannot be read"),
    "deep nesting": (rewrite(SETTINGS, b"[" * 100_000), "cannot be read"),
    "a list": (rewrite(SETTINGS, b"[]"), "has no peft_type"),
    "a pipe": (rewrite(SETTINGS, None), "is not a regular file"),
    "huge": (lambda folder: os.truncate(folder / SETTINGS, 2**30), "more than 16 MiB"),
    "a folder": (lambda folder: ((folder / SETTINGS).unlink(), (folder / SETTINGS).mkdir()), "is not a regular file"),
    "alpha": (change_settings(lora_alpha="x"), "lora_alpha: 'x', which must be a number"),
    "alpha is NaN": (change_settings(lora_alpha=float("nan")), "lora_alpha: nan"),
    "alpha overflows": (change_settings(lora_alpha=10**400), "lora_alpha: 1000"),
    "rank": (change_settings(r=True), "r: True, which must be an integer"),
    "rank of terabytes": (change_settings(r=10**12), "r: 1000000000000, which must be an integer from 1 to"),
    "dropout": (change_settings(lora_dropout=2), "lora_dropout: 2"),
    "targets": (change_settings(target_modules=[1]), "target_modules: [1]"),
    "saved": (change_settings(modules_to_save="lm_head"), "modules_to_save: 'lm_head'"),
    "bias": (change_settings(bias=[]), "bias: [], which must be none, all or lora_only"),
    "dora": (change_settings(use_dora="no"), "use_dora: 'no', which must be true or false"),
    "ranks": (change_settings(rank_pattern={"q_proj": 0}), "rank_pattern: {'q_proj': 0}"),
    "alphas": (change_settings(alpha_pattern=["q_proj"]), "alpha_pattern: ['q_proj']"),
    "tokens": (change_settings(trainable_token_indices={"embed_tokens": ["a"]}), "trainable_token_indices"),
    "kind": (change_settings(peft_type={}), "peft_type: {}, which must be a string"),
    "base": (change_settings(base_model_name_or_path=3), "base_model_name_or_path: 3"),
}


@pytest.fixture
def adapter(finished, tmp_path):
    return shutil.copytree(finished(**PLAIN).model, tmp_path / "adapter")


def read_error(capsys) -> str:
    message = capsys.readouterr().err
    assert message.startswith("error: ") and message.count("\n") == 1 and "Traceback" not in message, message
    return message


@pytest.mark.parametrize("kind", UNREADABLE)
def test_adapter_settings_of_a_wrong_type_are_rejected(adapter, kind):
    damage, message = UNREADABLE[kind]
    assert adapter_config(adapter)["r"] == 2
    damage(adapter)
    with pytest.raises(UserError) as caught:
        adapter_config(adapter, "--run x")
    text = str(caught.value)
    assert text.startswith(f"--run x: {adapter}") and message in text and len(text) < 500, text


UNUSABLE = {
    "settings": (change_settings(lora_alpha="x"), "lora_alpha: 'x'"),
    "a pipe": (rewrite(SETTINGS, None), "is not a regular file"),
    "kind": (change_settings(peft_type="NEW"), "NEW"),
    "targets": (change_settings(target_modules=["nothing"]), "nothing"),
    "pattern": (change_settings(target_modules="(", exclude_modules=None), "does not fit|has a pattern"),
    "rank": (change_settings(r=3), "does not fit"),
    "other targets": (change_settings(target_modules=["q_proj", "k_proj"]),
                      "Missing: .*k_proj.* Not expected: .*v_proj"),
    "no weights": (lambda folder: (folder / WEIGHTS).unlink(), f"has no {WEIGHTS}"),
    "weights are a pipe": (rewrite(WEIGHTS, None), "is not a regular file"),
    "empty": (rewrite(WEIGHTS, b""), "is empty"),
    "pointer": (rewrite(WEIGHTS, b"version https://git-lfs.github.com/spec/v1\n"), "Git LFS pointer"),
    "half a file": (lambda folder: os.truncate(folder / WEIGHTS, 300), "does not fit the base model: SafetensorError"),
    "missing tensor": (change_weights(lambda tensors: tensors.pop(LAYER.format("A"))), "Missing: .*q_proj.lora_A"),
    "extra tensor": (change_weights(lambda tensors: tensors.update({
        LAYER.format("A").replace("layers.0", "layers.1"): tensors[LAYER.format("B")] + 1})),
                     "Not expected: .*layers.1"),
    "shape": (change_weights(lambda tensors: tensors.update({LAYER.format("B"): tensors[LAYER.format("B")][:9]})),
              "does not fit"),
    "NaN weights": (change_weights(lambda tensors: tensors[LAYER.format("B")].fill_(float("nan"))),
                    "lora_B.* not finite"),
}


@ENGINES
@pytest.mark.parametrize("kind", UNUSABLE)
def test_fit_rejects_an_unusable_adapter_in_one_message(adapter, recipe, engine, kind, capsys):
    damage, message = UNUSABLE[kind]
    damage(adapter)
    changes = PLAIN | {"model__init_args__lora": None, "model__init_args__adapter": str(adapter), "engine": engine}
    assert main(["fit", *recipe(**changes)]) == 2
    error = read_error(capsys)
    assert str(adapter) in error and re.search(message, error), error


@pytest.mark.parametrize(("command", "kind"), [
    *((command, kind) for command in ("merge", "chat") for kind in ("settings", "a pipe", "no weights", "NaN weights")),
    *(pytest.param("evaluate", kind, marks=pytest.mark.slow) for kind in ("settings", "shape"))])
def test_commands_reject_a_run_with_a_damaged_adapter_in_one_message(
        finished, tmp_path, task_folder, command, kind, capsys):  # noqa: F811
    run = finished("copy", **PLAIN)
    damage, message = UNUSABLE[kind]
    damage(run.model)
    options = {"merge": ["--out", str(tmp_path / "merged")], "chat": ["--prompt", "Hello."],
               "evaluate": ["--tasks", "guess", "--task_folder", task_folder]}[command]
    capsys.readouterr()
    assert main([command, "--run", str(run.root), *options]) == 2
    error = read_error(capsys)
    assert str(run.model) in error and re.search(message, error), error
    assert not (tmp_path / "merged").exists()
