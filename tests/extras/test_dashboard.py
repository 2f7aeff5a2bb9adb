"""The W&B workspace: its metrics, the error without an API key, and what is saved with one."""

import json
import re

import pytest

from lmmods.cli import main
from lmmods.extras.dashboard import workspace

pytest.importorskip("wandb_workspaces")


@pytest.mark.parametrize(("x", "axis"), [("step", "trainer/global_step"), ("tokens", "train/tokens")])
def test_the_workspace_shows_every_metric_over_the_chosen_axis(x, axis):
    content = json.loads(workspace("project", "me", "runs", x)._to_model().model_dump_json())
    text = json.dumps(content)
    for metric in ("train/loss", "val/loss", "val/perplexity", "val/accuracy", "val/exact_match", "val/f1", "train/lr",
                   "train/grad_norm", "train/tokens_per_second", "train/mfu", "recipe.value.engine", "train/reward",
                   "val/reward", "val/pass@1"):
        assert f'"{metric}"' in text, metric
    assert re.search(r"mmlu/\.\*", text) and '"samples"' in text and '"predictions"' in text and '"rollouts"' in text
    sections = content["spec"]["section"]["panel_bank_config"]["sections"]
    assert [section["name"] for section in sections][:2] == ["Loss", "Quality"]
    assert axis in text


def test_without_an_api_key_the_error_names_report(tmp_path, monkeypatch, capsys):
    monkeypatch.delenv("WANDB_API_KEY", raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    assert main(["dashboard"]) == 2
    assert "no API key is set" in (error := capsys.readouterr().err) and "train.py report" in error


def test_with_an_api_key_the_workspace_is_saved_to_wandb(monkeypatch, capsys):
    import wandb
    import wandb_workspaces.workspaces as workspaces

    saved = []
    monkeypatch.setenv("WANDB_API_KEY", "0" * 40)
    monkeypatch.setattr(workspaces.Workspace, "save", lambda layout: saved.append(layout))
    monkeypatch.setattr(workspaces.Workspace, "url", "https://example.org/view")
    assert main(["dashboard", "--project", "x", "--entity", "me", "--x", "tokens"]) == 0
    assert (saved[0].project, saved[0].entity, saved[0].settings.x_axis) == ("x", "me", "train/tokens")
    assert "https://example.org/view" in capsys.readouterr().out

    def reject(_):
        raise wandb.errors.CommError("project not found")

    monkeypatch.setattr(workspaces.Workspace, "save", reject)
    assert main(["dashboard", "--entity", "me"]) == 2
    assert "W&B rejected" in capsys.readouterr().err
