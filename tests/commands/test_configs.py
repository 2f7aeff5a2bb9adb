"""Every shipped recipe parses, documents its command, and is listed by `recipes`."""

import shutil
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest
import yaml

from lmmods.cli import main
from lmmods.commands.recipes import COLUMNS, describe
from lmmods.commands.registry import options_of
from lmmods.recipe.files import header_of, shipped_recipes
from lmmods.recipe.reader import parse
from lmmods.runs.folder import RunFolder

ROOT = Path(__file__).parents[2]
OVERLAYS = {"smoke"}
RECIPES = [path for path in sorted((ROOT / "configs").rglob("*.yaml")) if path.stem not in OVERLAYS]


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.stem)
def test_every_recipe_has_a_command_a_run_folder_and_a_wandb_logger(path, monkeypatch, capsys):
    monkeypatch.chdir(ROOT)
    comment = path.read_text().split("engine:")[0]
    assert comment.startswith("#") and f"python train.py fit --config {path.relative_to(ROOT)}\n" in comment
    assert main(["fit", "--config", str(path), "--print_config"]) == 0
    content = yaml.safe_load(capsys.readouterr().out)
    assert content["trainer"]["default_root_dir"] == f"runs/{path.stem}"
    assert any(logger["class_path"].endswith("WandbLogger") for logger in content["trainer"]["logger"])


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.stem)
def test_every_recipe_works_with_the_smoke_overlay(path, monkeypatch, capsys):
    monkeypatch.chdir(ROOT)
    assert main(["fit", "--config", str(path), "--config", "configs/smoke.yaml", "--print_config"]) == 0
    assert yaml.safe_load(capsys.readouterr().out)["trainer"]["max_steps"] == 4


# The list of recipes ------------------------------------------------------------------------------------------------


def test_every_recipe_is_listed_with_all_columns(capsys):
    assert main(["recipes"]) == 0
    lines = capsys.readouterr().out.split("\n")
    assert shipped_recipes().keys() == {path.stem for path in (ROOT / "configs").rglob("*.yaml")}
    for name, path in shipped_recipes().items():
        row = describe(path)
        assert row.keys() == set(COLUMNS) and all(row.values())
        [line] = [line for line in lines if line.startswith(f"{name} ")]
        assert [" ".join(part.split()) for part in line.split("  ") if part] == [row[column] for column in COLUMNS]
    assert describe(ROOT / "configs/recipes/sft_guanaco_7b.yaml") == {
        "recipe": "sft_guanaco_7b", "task": "SFT", "training": "QLoRA", "model": "huggyllama/llama-7b",
        "hardware": "GPU with 16 GB", "time": "4 to 8 hours (estimate)"}


@pytest.mark.parametrize("part", ["# Hardware: ", "# Time: "])
def test_a_recipe_header_without_hardware_or_time_is_an_error(tmp_path, part):
    path = tmp_path / "some.yaml"
    path.write_text((ROOT / "configs/clm.yaml").read_text().replace(part, "..."))
    with pytest.raises(Exception, match="the comment at its top has no"):
        header_of(path)


def test_a_file_takes_precedence_over_a_shipped_recipe_of_that_name(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    for name in ("clm", "configs/clm.yaml"):
        assert main(["inspect", "--config", name]) == 2
        assert "data.tokenizer is demo/llama, but" in (error := capsys.readouterr().err), error
    assert main(["recipes", "--show", "clm"]) == 0
    assert capsys.readouterr().out == (ROOT / "configs/clm.yaml").read_text()
    (tmp_path / "clm").write_text("data: 1")
    for arguments in (["--config", "clm"], ["--config=clm"]):
        assert main(["fit", *arguments]) == 2 and "demo" not in capsys.readouterr().err
    assert main(["recipes", "--show", "clmm"]) == 2 and "Did you mean clm?" in capsys.readouterr().err
    assert main(["fit", "--config", "clmm"]) == 2 and "train.py recipes lists" in capsys.readouterr().err


# The smoke overlay --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("words", "folder", "expected"), [
    (["--config", "smoke.yaml"], "runs/smoke", True), (["--config", "smoke.yaml"], "runs/mine", False),
    (["-c=smoke.yaml", "--overwrite=true"], "runs/mine", True),
    (["--config", "smoke.yaml", "--overwrite", "false"], "runs/smoke", False),
    (["--config", "smoke.yaml", "--config", "{overwrite: false}"], "runs/smoke", False),
    (["--config", "{overwrite: true}"], None, False)])
def test_overwrite_in_a_file_applies_to_the_folder_of_that_file_only(monkeypatch, words, folder, expected):
    monkeypatch.chdir(ROOT / "configs")
    folder_options = ["--trainer.default_root_dir", folder] if folder else []
    assert parse(["fit", *words, *folder_options], options_of("fit")[0], checked=False).options["overwrite"] is expected


@pytest.mark.slow
def test_the_smoke_overlay_overwrites_its_own_folder_only(recipe, finished, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    smoke = ["--config", str(ROOT / "configs/smoke.yaml")]
    other_run, short = finished("mine"), {"trainer__val_check_interval": 1}
    arguments = [*recipe(**short), *smoke, *smoke, "--trainer.max_steps", "1", "--model.quantize", "null"]
    for _ in range(2):
        assert main(["fit", *arguments]) == 0
        assert yaml.safe_load(RunFolder("runs/smoke").config.read_text())["trainer"]["max_steps"] == 1
    before = other_run.config.read_text()
    capsys.readouterr()
    assert main(["fit", *arguments, "--trainer.default_root_dir", str(other_run.root)]) == 2
    assert "contains a finished run" in capsys.readouterr().err and other_run.config.read_text() == before
    assert main(["fit", *arguments, "--overwrite", "false"]) == 2


def test_overwrite_in_a_file_applies_to_fit_only(recipe, capsys):
    smoke = ["--config", str(ROOT / "configs/smoke.yaml")]
    assert main(["inspect", *recipe(), *smoke, "--rows", "0"]) == 0
    assert main(["validate", *recipe(), *smoke, "--overwrite", "true"]) == 2
    assert "--overwrite applies only to fit" in capsys.readouterr().err


# As installed -------------------------------------------------------------------------------------------------------


def test_the_console_script_is_train_py():
    script = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["scripts"]["lmmods"]
    assert script == "lmmods.cli:program" and "import program" in (ROOT / "train.py").read_text()


@pytest.mark.slow
def test_the_wheel_contains_the_recipes(tmp_path):
    pytest.importorskip("setuptools")
    for name in ("pyproject.toml", "setup.py", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, tmp_path)
    for name in ("configs", "lmmods/core", "lmmods/recipe", "lmmods/commands"):
        shutil.copytree(ROOT / name, tmp_path / name)
    for name in ("lmmods/__init__.py", "lmmods/cli.py"):
        shutil.copy(ROOT / name, tmp_path / name)
    subprocess.run([sys.executable, "-c", "from setuptools.build_meta import build_wheel; build_wheel('wheel')"],
                   cwd=tmp_path, check=True, capture_output=True)
    with zipfile.ZipFile(next((tmp_path / "wheel").glob("*.whl"))) as wheel:
        wheel.extractall(tmp_path / "installed")
    (tmp_path / "empty").mkdir()
    output = subprocess.run([sys.executable, "-c", "from lmmods.cli import program; program()", "recipes"],
                            cwd=tmp_path / "empty", env={"PYTHONPATH": str(tmp_path / "installed")}, check=True,
                            capture_output=True, text=True).stdout
    assert str(tmp_path / "installed/lmmods/configs") in " ".join(output.split())
    assert all(f"\n{name} " in output for name in shipped_recipes())
