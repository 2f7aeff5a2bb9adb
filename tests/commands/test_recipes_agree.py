"""Every shipped recipe on both engines, as it stands: the same losses, metrics, samples, outputs."""

import json
from pathlib import Path

import pytest
import yaml

from lmmods.cli import main
from lmmods.runs.folder import RunFolder
from tests.finished_runs import alike, rows
from tests.forks import together

ROOT = Path(__file__).parents[2]
RECIPES = sorted(path.stem for path in (ROOT / "configs").glob("*.yaml") if path.stem != "smoke")
PROMPTS = {"CLM": "The capital of Norland is\n\nA hammer is\n", "MLM": "The capital of Norland is [MASK] .\n"}
STEPS = 8
FEWER = {"grpo": 3, "preference": 4}  # whose steps take longest


def lines(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def fit_and_predict(*arguments: str) -> None:
    assert main(["fit", *arguments]) == 0
    assert main(["predict", *arguments, "--ckpt_path", "last"]) == 0


@pytest.mark.slow
@pytest.mark.parametrize("name", RECIPES)
def test_both_engines_run_the_recipe_alike(name, tmp_path, monkeypatch):
    monkeypatch.chdir(ROOT)
    recipe = yaml.safe_load((ROOT / "configs" / f"{name}.yaml").read_text())
    task, model = recipe["model"]["class_path"], {}
    if task in ("CLM", "SFT", "Preference"):
        model["generation"] = {"max_new_tokens": 16}
    steps = FEWER.get(name, STEPS)
    changes = {"trainer": {"max_steps": steps, "log_every_n_steps": 1, "precision": "32-true", "logger": None,
                           "limit_val_batches": 2, "limit_predict_batches": 1, "num_sanity_val_steps": 0,
                           "enable_progress_bar": False}, "model": {"init_args": model}}
    if task in PROMPTS:
        (tmp_path / "prompts.txt").write_text(PROMPTS[task])
        changes["data"] = {"init_args": {"predict_source": str(tmp_path / "prompts.txt")}}
    (tmp_path / "changes.yaml").write_text(yaml.safe_dump(changes))
    runs = [RunFolder(tmp_path / engine) for engine in ("torch", "jax")]
    for run in runs:
        together(["--config", f"configs/{name}.yaml", "--config", str(tmp_path / "changes.yaml"), "--engine",
                  run.root.name, "--trainer.default_root_dir", str(run.root)], program=fit_and_predict)
    # Rollouts are logged before their first step, at step 0 too.
    expected, found = ([row for row in rows(run) if "train/loss" in row] for run in runs)
    assert len(expected) == len(found) == steps
    for row, wanted in zip(found, expected, strict=True):
        assert row["train/loss"] == pytest.approx(wanted["train/loss"], abs=1e-4), row["step"]
    final, wanted = found[-1], expected[-1]
    names = {key for key in wanted if key.startswith("val/")}
    assert names and {key for key in final if key.startswith("val/")} == names
    for key in names:
        assert final[key] == pytest.approx(wanted[key], rel=1e-4, abs=1e-4), key
    assert [run.samples.exists() for run in runs] == [recipe.get("samples") is not None] * 2
    if runs[0].samples.exists():
        assert lines(runs[1].samples) == lines(runs[0].samples)
    predictions = [lines(run.predictions) for run in runs]
    assert len(predictions[0]) > 0
    for row, other in zip(*predictions, strict=True):
        for fill, theirs in zip(row.pop("fills", []), other.pop("fills", []), strict=True):
            assert [gap["token"] for gap in fill] == [gap["token"] for gap in theirs]
        assert alike(row, other)
