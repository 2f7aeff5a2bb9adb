"""`dashboard`: set up a project's W&B workspace for our metrics."""

from typing import Any, Literal

from lmmods.core.errors import UserError, first_line
from lmmods.runs.wandb import has_wandb_key

# Section -> panels (title -> metrics); each panel shows all runs.
CURVES = {
    "Loss": {"Training loss": ["train/loss"], "Validation loss": ["val/loss"]},
    "Quality": {"Perplexity": ["val/perplexity"], "Accuracy": ["val/accuracy"],
                "Exact match and F1": ["val/exact_match", "val/f1", "val/f1_macro"]},
    "Preferences": {"Reward margin": ["val/rewards/margin"], "Reward accuracy": ["val/rewards/accuracy"],
                    "Rewards": ["val/rewards/chosen", "val/rewards/rejected"], "Divergence": ["train/kl"]},
    "Answer rewards": {"Reward": ["train/reward", "val/reward"], "First answer correct": ["val/pass@1"],
                       "Answer length (tokens)": ["train/answer_length", "val/answer_length"],
                       "Entropy": ["train/entropy"], "Groups without spread": ["train/groups_without_spread"]},
    "Optimiser": {"Learning rate": ["train/lr"], "Gradient norm": ["train/grad_norm"]},
    "Throughput": {"Tokens per second": ["train/tokens_per_second"], "MFU": ["train/mfu"],
                   "GPU memory (%)": ["system/gpu.0.memoryAllocated"],
                   "Process memory (MB)": ["system/proc.memory.rssMB"]},
}
AXES = {"step": "trainer/global_step", "tokens": "train/tokens"}


def dashboard(project: str = "lmmods", entity: str | None = None, name: str = "lmmods",
              x: Literal["step", "tokens"] = "step") -> None:
    """Set up the W&B workspace of a project: loss, quality, optimiser, throughput, MMLU by subject, samples.

    It shows the runs of both engines, grouped by engine.

    Args:
        project: W&B project, as in WandbLogger's `project`.
        entity: User or team. Default: the account's default entity.
        name: Workspace name.
        x: X axis of the curves: optimiser steps, or training tokens.

    Raises:
        UserError: There is no account, or W&B rejects the request.
    """
    if not has_wandb_key():
        raise UserError("dashboard needs a W&B account, but no API key is set. Run `wandb login` or set WANDB_API_KEY; "
                        "without an account, use python train.py report RUN ...")
    import wandb

    try:
        layout = workspace(project, entity or wandb.Api().default_entity, name, x)
        layout.save()
    except ImportError as error:
        raise UserError(f"dashboard needs wandb-workspaces ({error}). Install it: pip install -e '.[dashboard]'"
                        ) from error
    except (wandb.errors.Error, OSError, ValueError) as error:
        raise UserError(f"dashboard: W&B rejected {project!r}: {first_line(error)}. Check --project and --entity; a "
                        "project exists once a run has logged to it.") from error
    print(f"Wrote the workspace {name}: {layout.url}")


def workspace(project: str, entity: str, name: str, x: str) -> Any:
    """Build the workspace without saving it."""
    import wandb_workspaces.reports.v2 as panels
    import wandb_workspaces.workspaces as workspaces

    def line_plot(title: str, metrics: list[str]) -> Any:
        is_system = metrics[0].startswith("system/")
        return panels.LinePlot(title=title, x="Step" if is_system else AXES[x], y=metrics)

    sections = [workspaces.Section(name=section, is_open=True, panels=[line_plot(*panel) for panel in curves.items()])
                for section, curves in CURVES.items()]
    sections.append(workspaces.Section(name="MMLU", is_open=True, panels=[
        panels.LinePlot(title="Accuracy", x=AXES[x], metric_regex="mmlu/.*/(mean_subject_)?accuracy"),
        panels.LinePlot(title="By subject", x=AXES[x], metric_regex="mmlu/.*")]))
    sections.append(workspaces.Section(name="Samples and predictions", is_open=True, panels=[
        panels.WeavePanelSummaryTable(table_name=table)
        for table in ("samples", "predictions", "rollouts", "val/classes", "val/entities", "val/confusion")]))
    return workspaces.Workspace(
        entity=entity, project=project, name=name, sections=sections,
        settings=workspaces.WorkspaceSettings(x_axis=AXES[x]),
        runset_settings=workspaces.RunsetSettings(groupby=[workspaces.Config("recipe.engine")]))
