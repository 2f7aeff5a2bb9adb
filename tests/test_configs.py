"""Every shipped recipe parses, says how it is run, and names files that exist."""

from pathlib import Path

import pytest
import yaml

from lmmods.cli import main

ROOT = Path(__file__).parent.parent
OVERLAYS = {"smoke"}
RECIPES = [path for path in sorted((ROOT / "configs").rglob("*.yaml")) if path.stem not in OVERLAYS]


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.stem)
def test_recipe_is_complete(path, monkeypatch, capsys):
    monkeypatch.chdir(ROOT)
    text = path.read_text()
    assert text.startswith("#") and f"python train.py fit --config {path.relative_to(ROOT)}" in text.split("engine:")[0]
    assert main(["fit", "--config", str(path), "--print_config"]) == 0
    content = yaml.safe_load(capsys.readouterr().out)
    assert content["trainer"]["default_root_dir"] == f"runs/{path.stem}"
    assert any(logger["class_path"].endswith("WandbLogger") for logger in content["trainer"]["logger"])


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.stem)
def test_recipe_takes_the_smoke_overlay(path, monkeypatch, capsys):
    monkeypatch.chdir(ROOT)
    assert main(["fit", "--config", str(path), "--config", "configs/smoke.yaml", "--print_config"]) == 0
    assert yaml.safe_load(capsys.readouterr().out)["trainer"]["max_steps"] == 4
