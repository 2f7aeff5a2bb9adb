"""Adapters of strangers, damaged ones and those of another model: one message from every command, on both engines."""

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

pytestmark = pytest.mark.timeout(60)  # what would wait for a pipe fails here
ENGINES = pytest.mark.parametrize("engine", ["torch", "jax"])
PLAIN = {"model__init_args__quantize": None, "model__init_args__lora": {"rank": 2, "targets": ["q_proj", "v_proj"]},
         "trainer__max_steps": 1, "trainer__limit_val_batches": 0}
LAYER = "base_model.model.model.layers.0.self_attn.q_proj.lora_{}.weight"


def settings(**changes):
    """Damage: other settings; those of None are taken out."""
    def damage(folder):
        found = json.loads((folder / SETTINGS).read_text()) | changes
        (folder / SETTINGS).write_text(json.dumps({key: value for key, value in found.items() if value != "gone"}))
    return damage


def written(name, content):
    """Damage: a file with other content, or without it a pipe."""
    def damage(folder):
        (folder / name).unlink()
        if content is None:
            os.mkfifo(folder / name)
        else:
            (folder / name).write_bytes(content)
    return damage


def weights(change):
    """Damage: what `change` makes of the tensors."""
    def damage(folder):
        tensors = load_file(folder / WEIGHTS)
        change(tensors)
        save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, folder / WEIGHTS)
    return damage


UNREADABLE = {
    "no JSON": (written(SETTINGS, b"{"), "cannot be read"),
    "no UTF-8": (written(SETTINGS, b"\xff"), "cannot be read"),
    "deep": (written(SETTINGS, b"[" * 100_000), "cannot be read"),
    "a list": (written(SETTINGS, b"[]"), "has no peft_type"),
    "a pipe": (written(SETTINGS, None), "is not a regular file"),
    "huge": (lambda folder: os.truncate(folder / SETTINGS, 2**30), "more than 16 MiB"),
    "a folder": (lambda folder: ((folder / SETTINGS).unlink(), (folder / SETTINGS).mkdir()), "is not a regular file"),
    "alpha": (settings(lora_alpha="x"), "lora_alpha: 'x', which must be a number"),
    "alpha is no number": (settings(lora_alpha=float("nan")), "lora_alpha: nan"),
    "alpha overflows": (settings(lora_alpha=10**400), "lora_alpha: 1000"),
    "rank": (settings(r=True), "r: True, which must be an integer"),
    "rank of terabytes": (settings(r=10**12), "r: 1000000000000, which must be an integer from 1 to"),
    "dropout": (settings(lora_dropout=2), "lora_dropout: 2"),
    "targets": (settings(target_modules=[1]), "target_modules: [1]"),
    "saved": (settings(modules_to_save="lm_head"), "modules_to_save: 'lm_head'"),
    "bias": (settings(bias=[]), "bias: [], which must be none, all or lora_only"),
    "dora": (settings(use_dora="no"), "use_dora: 'no', which must be true or false"),
    "ranks": (settings(rank_pattern={"q_proj": 0}), "rank_pattern: {'q_proj': 0}"),
    "alphas": (settings(alpha_pattern=["q_proj"]), "alpha_pattern: ['q_proj']"),
    "tokens": (settings(trainable_token_indices={"embed_tokens": ["a"]}), "trainable_token_indices"),
    "kind": (settings(peft_type={}), "peft_type: {}, which must be a string"),
    "base": (settings(base_model_name_or_path=3), "base_model_name_or_path: 3"),
}


@pytest.fixture
def adapter(finished, tmp_path):
    return shutil.copytree(finished(**PLAIN).model, tmp_path / "adapter")


def one_error(capsys) -> str:
    said = capsys.readouterr().err
    assert said.startswith("error: ") and said.count("\n") == 1 and "Traceback" not in said, said
    return said


@pytest.mark.parametrize("kind", UNREADABLE)
def test_settings_are_of_the_types_that_peft_gives_them(adapter, kind):
    damage, message = UNREADABLE[kind]
    assert adapter_config(adapter)["r"] == 2
    damage(adapter)
    with pytest.raises(UserError) as caught:
        adapter_config(adapter, "--run x")
    said = str(caught.value)
    assert said.startswith(f"--run x: {adapter}") and message in said and len(said) < 500, said


REFUSED = {
    "settings": (settings(lora_alpha="x"), "lora_alpha: 'x'"),
    "a pipe": (written(SETTINGS, None), "is not a regular file"),
    "kind": (settings(peft_type="NEW"), "NEW"),
    "targets": (settings(target_modules=["nothing"]), "nothing"),
    "pattern": (settings(target_modules="(", exclude_modules=None), "does not fit|has a pattern"),
    "rank": (settings(r=3), "does not fit"),
    "other targets": (settings(target_modules=["q_proj", "k_proj"]), "Missing: .*k_proj.* Not expected: .*v_proj"),
    "lost": (lambda folder: (folder / WEIGHTS).unlink(), f"has no {WEIGHTS}"),
    "weights are a pipe": (written(WEIGHTS, None), "is not a regular file"),
    "empty": (written(WEIGHTS, b""), "is empty"),
    "pointer": (written(WEIGHTS, b"version https://git-lfs.github.com/spec/v1\n"), "Git LFS pointer"),
    "half": (lambda folder: os.truncate(folder / WEIGHTS, 300), "does not fit the base model: SafetensorError"),
    "missing": (weights(lambda tensors: tensors.pop(LAYER.format("A"))), "Missing: .*q_proj.lora_A"),
    "extra": (weights(lambda tensors: tensors.update({LAYER.format("A").replace("layers.0", "layers.1"):
                                                      tensors[LAYER.format("B")] + 1})), "Not expected: .*layers.1"),
    "shape": (weights(lambda tensors: tensors.update({LAYER.format("B"): tensors[LAYER.format("B")][:9]})),
              "does not fit"),
    "no numbers": (weights(lambda tensors: tensors[LAYER.format("B")].fill_(float("nan"))), "lora_B.* not finite"),
}


@ENGINES
@pytest.mark.parametrize("kind", REFUSED)
def test_an_adapter_that_does_not_fit_is_one_message(adapter, recipe, engine, kind, capsys):
    damage, message = REFUSED[kind]
    damage(adapter)
    changes = PLAIN | {"model__init_args__lora": None, "model__init_args__adapter": str(adapter), "engine": engine}
    assert main(["fit", *recipe(**changes)]) == 2
    said = one_error(capsys)
    assert str(adapter) in said and re.search(message, said), said


@pytest.mark.parametrize(("command", "kind"), [
    *((command, kind) for command in ("merge", "chat") for kind in ("settings", "a pipe", "lost", "no numbers")),
    *(pytest.param("evaluate", kind, marks=pytest.mark.slow) for kind in ("settings", "shape"))])
def test_a_run_with_such_an_adapter_is_one_message(finished, tmp_path, task_folder, command, kind, capsys):  # noqa: F811
    run = finished("copy", **PLAIN)
    damage, message = REFUSED[kind]
    damage(run.model)
    more = {"merge": ["--out", str(tmp_path / "merged")], "chat": ["--prompt", "Hello."],
            "evaluate": ["--tasks", "guess", "--task_folder", task_folder]}[command]
    capsys.readouterr()
    assert main([command, "--run", str(run.root), *more]) == 2
    said = one_error(capsys)
    assert str(run.model) in said and re.search(message, said), said
    assert not (tmp_path / "merged").exists()
