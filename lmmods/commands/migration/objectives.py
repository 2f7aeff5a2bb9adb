"""Objectives of other programs that no task here has yet."""

from lmmods.commands.migration.detection import PROGRAMS
from lmmods.commands.migration.draft import Draft
from lmmods.core.errors import UserError

# What programs call them -> in words. An objective that gets a task here leaves this table.
WITHOUT_TASK = {
    **dict.fromkeys(("rm", "reward_model", "process_reward_model", "num_labels"), "a reward model"),
    **dict.fromkeys(("ppo", "grpo", "gdpo", "rloo"), "rewards"),
    "diffusion": "diffusion", "ebft": "features of its own answers"}


def refuse_objective(draft: Draft, name: str | None) -> None:
    """Raise UserError for an objective that there is no task for; None is one that there is."""
    if name is None:
        return
    raise UserError(f"This configuration of {PROGRAMS[draft.program]} trains on {WITHOUT_TASK.get(name, name)} "
                    f"({name}), which has no counterpart yet: there are SFT, CLM, MLM, QA and Preference. Nothing was "
                    "written.")
