"""Batches of answers: which prompts a rollout contains, its answers as rows, and a loader that stops where it ends.

Every position of a run belongs to a rollout by numbers alone, so that a resumed run continues in the same one.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from torch.utils.data import Dataset

from lmmods.core.errors import UserError
from lmmods.data.batch.loader import Batch, SegmentLoader, Shard
from lmmods.data.order.sampler import GROUPED, PADDING_ROW, BatchOrder, batches_per_rank, shuffle_rows


class PlannedRollout(NamedTuple):
    """A rollout of a run, before its answers exist.

    Args:
        epoch: Index of the epoch.
        rollout: Index of the rollout in the epoch.
        start: Its first row in the epoch.
        stop: The row after its last.
        prompts: [P] int64, indices of its prompts among the training rows.
    """

    epoch: int
    rollout: int
    start: int
    stop: int
    prompts: np.ndarray


@dataclass(frozen=True)
class RolloutPlan:
    """Division of epochs into rollouts.

    An epoch takes each prompt once. The rows of a rollout are its answers, prompt by prompt, repeated for each
    iteration. In the last rollout of an epoch, which may have fewer prompts, padding rows complete the last step of
    each iteration, unless there is only one.

    Args:
        num_prompts: Prompts of an epoch.
        num_generations: Answers to each.
        prompts_per_step: Prompts of an optimiser step.
        steps_per_rollout: Steps of an iteration.
        num_iterations: How often a rollout is trained on.
        seed: Seed of the order of the prompts; None takes them as they come.
    """

    num_prompts: int
    num_generations: int
    prompts_per_step: int
    steps_per_rollout: int = 1
    num_iterations: int = 1
    seed: int | None = None

    @property
    def rows_per_step(self) -> int:
        """Answers of an optimiser step."""
        return self.prompts_per_step * self.num_generations

    @property
    def prompts_per_rollout(self) -> int:
        """Prompts of every rollout but an epoch's last."""
        return self.prompts_per_step * self.steps_per_rollout

    @property
    def num_rollouts(self) -> int:
        """Rollouts of an epoch."""
        return -(-self.num_prompts // self.prompts_per_rollout)

    @property
    def num_rows(self) -> int:
        """Rows of an epoch, with those of all iterations and padding rows."""
        num_full, remainder = divmod(self.num_prompts, self.prompts_per_rollout)
        rows = num_full * self.prompts_per_rollout * self.num_generations * self.num_iterations
        return rows + (self._padded(remainder) * self.num_iterations if remainder else 0)

    def _padded(self, num_prompts: int) -> int:
        """Return the number of rows of an iteration over this many prompts."""
        rows = num_prompts * self.num_generations
        return rows if self.num_iterations == 1 else -(-rows // self.rows_per_step) * self.rows_per_step

    def find(self, epoch: int, row: int) -> PlannedRollout:
        """Return the rollout of a row of an epoch."""
        full = self.prompts_per_rollout * self.num_generations * self.num_iterations
        index = row // full
        order = np.arange(self.num_prompts) if self.seed is None else shuffle_rows(
            self.num_prompts, np.random.default_rng([self.seed, epoch]))
        prompts = order[index * self.prompts_per_rollout : (index + 1) * self.prompts_per_rollout].astype(np.int64)
        return PlannedRollout(epoch, index, index * full, min((index + 1) * full, self.num_rows), prompts)

    def answer_of(self, planned: PlannedRollout, row: int) -> int:
        """Return the index in the rollout of the answer that a row of the epoch contains; PADDING_ROW for none."""
        answer = (row - planned.start) % self._padded(len(planned.prompts))
        return answer if answer < len(planned.prompts) * self.num_generations else PADDING_ROW


class RolloutSet(Dataset):
    """The answers of the current rollout as rows; number `row` + `len` * epoch is a row of an epoch.

    Attributes:
        current: The current rollout; None before the first.
    """

    def __init__(self, plan: RolloutPlan) -> None:
        self._plan = plan
        self.current: PlannedRollout | None = None
        self._answers: list[dict[str, Any]] = []

    def set_current(self, planned: PlannedRollout, answers: list[dict[str, Any]]) -> None:
        """Make the answers of a rollout the current ones.

        Args:
            answers: Its items, prompt by prompt: `input_ids`, `labels` [T] int32, `row`, and further columns.
        """
        self.current, size = planned, self._plan.rows_per_step
        # Longest first within each step, as micro-batches of similar rows have less padding. A step is a sum over its
        # rows, in whatever order.
        self._answers = [item for start in range(0, len(answers), size)
                         for item in sorted(answers[start : start + size], key=lambda item: -len(item["input_ids"]))]

    def __len__(self) -> int:
        return self._plan.num_rows

    def __getitem__(self, index: int) -> dict[str, Any] | None:
        if index < 0:
            return None
        assert self.current is not None
        epoch, row = divmod(index, len(self))
        if (answer := self._plan.answer_of(self.current, row)) == PADDING_ROW:
            return None
        if epoch != self.current.epoch or not self.current.start <= row < self.current.stop:
            raise IndexError(f"row {row} of epoch {epoch} does not belong to rollout {self.current.rollout}")
        # `row` and `draw` seed dropout: the same masks in each iteration.
        return {**self._answers[answer], "draw": epoch}


class RolloutLoader(SegmentLoader):
    """Training batches of answers, read up to the end of a rollout.

    Args:
        make_or_read: Makes a rollout, or reads it by its name in the checkpoint if that is not None; returns its name
            and the items of its answers. A collective call.
    """

    def __init__(self, plan: RolloutPlan, collate: Callable[[list], Batch], shard: Shard, batch_size: int,
                 make_or_read: Callable[[PlannedRollout, str | None], tuple[str, list[dict[str, Any]]]]) -> None:
        self._plan, self._make_or_read, self._items = plan, make_or_read, RolloutSet(plan)
        self._name: str | None = None  # of the current rollout
        rows = np.arange(plan.num_rows)
        super().__init__(self._items, lambda epoch, rule: BatchOrder(rows, batch_size, offset=epoch * plan.num_rows),
                         collate, shard, batch_size, grouped=False)

    def begin_segment(self) -> int:
        """Make or read the rollout at the current position; as in `SegmentLoader`."""
        self._begin_epoch()
        row = self._handed_out * self._batch_size
        planned = self._plan.find(self._epoch, row)
        current = self._items.current
        if current is None or planned[:2] != current[:2]:
            # At its first row a rollout has not been trained on: what a file contains may be of another policy.
            self._name, answers = self._make_or_read(planned, self._name if row > planned.start else None)
            self._items.set_current(planned, answers)
        num_batches = -(-planned.stop // self._batch_size) - self._handed_out
        return batches_per_rank(num_batches, self._shard.world_size)

    def state_dict(self) -> dict[str, Any]:
        """As in `StatefulLoader`, with the name of the rollout that the position is in."""
        return {**super().state_dict(), "rollout": self._name}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """See `StatefulLoader`. Raises UserError if the steps had other numbers of answers."""
        if state.get(GROUPED) != self._plan.rows_per_step:
            raise UserError(f"cannot resume: the steps of this run have {state.get(GROUPED)} answers, but "
                            "model.prompts_per_step, or data.batch_size, trainer.accumulate_grad_batches and devices, "
                            f"now give {self._plan.rows_per_step}. Restore them.")
        super().load_state_dict(state)
        self._name = state.get("rollout")
