"""A task in its own files is available everywhere, and no other file names it."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from lmmods.recipe.classes import declared
from lmmods.recipe.files import read_recipe

ROOT = Path(__file__).parents[2]
TASKS = ", ".join(sorted([*declared("model"), "Retell"]))
PACKAGES = ("lmmods.recipe.tasks", "lmmods.data", "lmmods.torch_engine.tasks", "jax_engine.tasks")
START = """
import importlib, sys
for package in sys.argv.pop(1).split(","):
    importlib.import_module(package).__path__.append(f"{sys.argv[1]}/{package}")
sys.argv.pop(1)
from lmmods.cli import main
sys.exit(main(sys.argv[1:]))
"""
FILES = {
    "lmmods.recipe.tasks": '''
from dataclasses import dataclass
from typing import ClassVar

from lmmods.core.settings import require
from lmmods.recipe.tasks.base import CausalFields, TextDataFields, Usual


@dataclass(kw_only=True, eq=False, repr=False)
class RetellFields(CausalFields):
    """Train a causal LM to continue a first line.

    Args:
        patience: How long it listens.
        voice: How it speaks.
    """

    takes: ClassVar[str] = "RetellData"
    own_files: ClassVar[tuple[str, ...]] = ("retold.json",)
    usual: ClassVar[Usual] = Usual(epochs=7, rows=8, small_lr=3e-4, prompt="Once")
    may_change: ClassVar[tuple[str, ...]] = ("voice",)

    patience: int = 1
    voice: str = "low"

    def __post_init__(self) -> None:
        super().__post_init__()
        require(self.patience >= 1, "model.patience", self.patience, "1 or more")

    @classmethod
    def method(cls, settings):
        return ["retelling"], f"Retold with patience {settings['patience']}."


@dataclass(kw_only=True, eq=False, repr=False)
class RetellDataFields(TextDataFields):
    """Texts of which all but the first line is learnt.

    Args:
        teller: Whose lines they are.
    """

    kind: ClassVar[str] = "RetellData"
    generality: ClassVar[int] = 0

    teller: str = "nobody"
''',
    "lmmods.data": '''
from lmmods.data.clm import CLMData
from lmmods.recipe.tasks.retell import RetellDataFields


class RetellData(RetellDataFields, CLMData):
    """Rows {text, teller}."""

    join = None

    @classmethod
    def recognise(cls, row):
        return "the rows have a teller" if "teller" in row.values else None
''',
    "lmmods.torch_engine.tasks": '''
from lmmods.recipe.tasks.retell import RetellFields
from lmmods.torch_engine.tasks.causal_task import CausalModule


class Retell(RetellFields, CausalModule):
    """Retelling."""
''',
    "jax_engine.tasks": '''
from jax_engine.tasks.causal_task import CausalTask
from lmmods.recipe.tasks.retell import RetellFields


class Retell(RetellFields, CausalTask):
    """Retelling on JAX."""
''',
}


@pytest.fixture
def run(tmp_path):
    """Return a function that runs a command with this task and returns status and output."""
    for package, text in FILES.items():
        (tmp_path / package).mkdir()
        (tmp_path / package / "retell.py").write_text(text.lstrip())

    def run(*words: str) -> tuple[int, str]:
        done = subprocess.run([sys.executable, "-c", START, ",".join(PACKAGES), str(tmp_path), *words], cwd=tmp_path,
                              capture_output=True, text=True, env={**os.environ, "PYTHONPATH": str(ROOT)}, timeout=300)
        return done.returncode, done.stdout + done.stderr

    return run


def test_help_and_errors_include_a_task_in_its_own_files(run):
    status, output = run("fit", "--help")
    assert status == 0 and f"({TASKS})" in output
    assert "\nmodel, for Retell:\n  --model.patience integer (default: 1)\n" in output
    assert "\ndata, for Retell" in output and "Whose lines they are." in output
    assert run("fit", "--help", "model.voice")[1].startswith("  --model.voice string (default: low)\n")
    assert "Did you mean Retell?" in run("fit", "--model", "Retel", "--data", "RetellData")[1]
    status, output = run("fit", "--model", "Retell", "--model.pretrained", "x", "--data", "RetellData", "--data.source",
                         "y", "--trainer.max_steps", "1", "--model.patience", "0", "--data.telle", "z")
    assert status == 2 and "--model.patience is 0, but must be 1 or more." in output
    assert "--data.telle is not a key. Did you mean data.teller?" in output
    assert f"--task one of {TASKS}, or null" in run("new", "--help")[1]


@pytest.mark.slow
def test_a_task_in_its_own_files_can_be_created_trained_and_resumed(run, tmp_path, llama_folder):
    rows = [{"text": f"Line {n}.\nOne more for {n}.", "teller": "me"} for n in range(300)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    status, output = run("new", "mine", "--model", str(llama_folder), "--data", "rows.jsonl", "--memory", "8")
    assert status == 0, output
    recipe = read_recipe(tmp_path / "mine.yaml")
    assert (recipe["model"]["class_path"], recipe["data"]["class_path"]) == ("Retell", "RetellData")
    assert recipe["trainer"]["max_epochs"] == 7 and recipe["model"]["init_args"]["optimizer"]["lr"] == 3e-4
    assert "prompts: [Once]" in (tmp_path / "mine.yaml").read_text()
    small = ["--config", "mine.yaml", "--trainer.accelerator", "cpu", "--trainer.max_epochs", "null",
             "--trainer.limit_val_batches", "0", "--checkpoint.every_n_steps", "1"]
    for engine in ("torch", "jax"):
        status, output = run("fit", *small, "--engine", engine, "--trainer.default_root_dir", engine,
                             "--trainer.max_steps", "2")
        assert status == 0, output
        assert "Retold with patience 1." in (tmp_path / engine / "model" / "README.md").read_text()
    resumed = [*small, "--trainer.default_root_dir", "torch", "--trainer.max_steps", "3", "--ckpt_path", "last"]
    status, output = run("fit", *resumed, "--model.patience", "2")
    assert status == 2 and "model.patience" in output
    status, output = run("fit", *resumed, "--model.voice", "high")
    assert status == 0 and "model.voice" in output, output
    # A run may not read a file that it overwrites.
    (tmp_path / "third").mkdir()
    (tmp_path / "third" / "retold.json").write_text((tmp_path / "rows.jsonl").read_text())
    status, output = run("fit", *small, "--trainer.max_steps", "2", "--trainer.default_root_dir", "third",
                         "--data.source", "third/retold.json")
    assert status == 2 and "a run in third overwrites retold.json" in output, output
