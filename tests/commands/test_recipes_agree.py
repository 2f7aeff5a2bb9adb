"""Every shipped recipe on both engines: the same losses, metrics, samples and outputs."""

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
STEPS = 4
FEWER = {"grpo": 2}  # its steps take longest


def read_lines(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def fit_and_predict(*arguments: str) -> None:
    assert main(["fit", *arguments]) == 0
    assert main(["predict", *arguments, "--ckpt_path", "last"]) == 0


@pytest.mark.slow
@pytest.mark.parametrize("name", RECIPES)
def test_both_engines_give_the_same_results_on_a_recipe(name, tmp_path, monkeypatch):
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
    # Rollouts are logged before their first step, also at step 0.
    torch_rows, jax_rows = ([row for row in rows(run) if "train/loss" in row] for run in runs)
    assert len(torch_rows) == len(jax_rows) == steps
    for row, expected in zip(jax_rows, torch_rows, strict=True):
        assert row["train/loss"] == pytest.approx(expected["train/loss"], abs=1e-4), row["step"]
    final, expected = jax_rows[-1], torch_rows[-1]
    names = {key for key in expected if key.startswith("val/")}
    assert names and {key for key in final if key.startswith("val/")} == names
    for key in names:
        assert final[key] == pytest.approx(expected[key], rel=1e-4, abs=1e-4), key
    assert [run.samples.exists() for run in runs] == [recipe.get("samples") is not None] * 2
    if runs[0].samples.exists():
        assert read_lines(runs[1].samples) == read_lines(runs[0].samples)
    predictions = [read_lines(run.predictions) for run in runs]
    assert len(predictions[0]) > 0
    for row, other in zip(*predictions, strict=True):
        for fill, other_fill in zip(row.pop("fills", []), other.pop("fills", []), strict=True):
            assert [gap["token"] for gap in fill] == [gap["token"] for gap in other_fill]
        assert alike(row, other)
