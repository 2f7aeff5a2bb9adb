"""Samples during training: text generated from fixed prompts at intervals, for both engines."""

import json
from typing import Any

from lmmods.core.console import say, warn
from lmmods.core.errors import UserError
from lmmods.core.markdown import indent
from lmmods.core.settings import Generation
from lmmods.data.base import DataModule
from lmmods.recipe.block_fields import SampleFields
from lmmods.runs.folder import RunFolder, write_text
from lmmods.runs.repair import repair_samples

PROMPT_WIDTH, OUTPUT_WIDTH = 40, 70  # characters shown on the console


class SampleWriter(SampleFields):
    """Writer of a run's samples."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.generation = Generation(max_new_tokens=self.max_new_tokens)
        self.prompt_ids: list[list[int]] = []
        self.latest_step: int | None = None  # step of the last samples of this process
        self._base: dict[str, str] = {}  # prompt -> answer before training

    def prepare(self, datamodule: DataModule, max_positions: int | None) -> None:
        """Encode the prompts.

        Args:
            max_positions: Maximum sequence length of the model, if limited.

        Raises:
            UserError: The task cannot generate, or a prompt with its answer is too long for the model.
        """
        if self.prompts is None:
            return
        self.prompt_ids = datamodule.encode_prompts(self.prompts)
        max_new_tokens = self.generation.max_new_tokens
        for prompt, ids in zip(self.prompts, self.prompt_ids, strict=True):
            if max_positions is not None and len(ids) + max_new_tokens > max_positions:
                raise UserError(f"samples.prompts: {_shorten(prompt, PROMPT_WIDTH)!r} has {len(ids)} tokens, which "
                                f"with samples.max_new_tokens {max_new_tokens} are more than this model's "
                                f"{max_positions} positions. Shorten it, or lower samples.max_new_tokens.")

    def begin(self, folder: RunFolder, resumed_step: int | None) -> None:
        """Set the run folder; drop rows after `resumed_step`, which the resumed run rewrites."""
        self._path = folder.samples
        if self.prompts is not None:
            folder.files.claim(self._path.name)
        if resumed_step is None:
            return
        # A killed run may have left a half-written line.
        rows = [row for row in repair_samples(self._path) if row["step"] <= resumed_step]
        if self._path.exists():
            self._rewrite(rows)
        # The untrained model no longer exists, so read its answers from the file.
        self._base = {row["prompt"]: row["output"] for row in rows if row["step"] == 0}
        if self.prompts and self.compare_base and not self._base.keys() >= set(self.prompts):
            warn(f"{self._path} does not contain the untrained model's answers to all prompts. Where one is missing, "
                 "base is null.")

    @property
    def wants_base(self) -> bool:
        """True if the untrained model is sampled too."""
        return self.prompts is not None and self.compare_base

    def is_due(self, step: int, ends: bool = False) -> bool:
        """Return True if samples are due after optimiser step `step`; `ends`: last step of the run."""
        return self.prompts is not None and step != self.latest_step and (ends or step % self.every_n_steps == 0)

    def write(self, step: int, outputs: list[str], loggers: list[Any]) -> None:
        """Write, print and log the answers after `step` optimiser steps. Called by the first process only."""
        if step == 0:
            self._base = dict(zip(self.prompts, outputs, strict=True))
        base = self._base if self.compare_base else {}
        rows = [{"step": step, "prompt": prompt, "base": base.get(prompt), "output": output}
                for prompt, output in zip(self.prompts, outputs, strict=True)]
        # Rewrite the whole file instead of appending, so that a repeated step is not written twice.
        self._rewrite([row for row in repair_samples(self._path) if row["step"] < step] + rows)
        for row in rows:
            prompt, output = _shorten(row["prompt"], PROMPT_WIDTH), _shorten(row["output"], OUTPUT_WIDTH)
            say(f"sample at step {step}: {prompt} -> {output}")
        for logger in loggers:
            _log(logger, rows, step)

    def _rewrite(self, rows: list[dict[str, Any]]) -> None:
        write_text(self._path, "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows))


def _log(logger: Any, rows: list[dict[str, Any]], step: int) -> None:
    """Log the rows as a table (W&B) or as text (TensorBoard); other loggers are skipped."""
    if hasattr(logger, "log_table"):
        logger.log_table("samples", columns=list(rows[0]), data=[list(row.values()) for row in rows], step=step)
    elif hasattr(experiment := getattr(logger, "experiment", None), "add_text"):
        experiment.add_text("samples", "\n\n".join(_markdown(row) for row in rows), step)


def _markdown(row: dict[str, Any]) -> str:
    """Format a row with its texts as code blocks, so that markup is not interpreted."""
    return "\n\n".join(f"{name}:\n\n{indent(row[name])}" for name in ("prompt", "base", "output")
                       if row[name] is not None)


def _shorten(text: str, width: int) -> str:
    text = " ".join(text.split())
    return text if len(text) <= width else f"{text[:width - 1]}…"
