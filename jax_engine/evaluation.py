"""Evaluation on JAX, during and after training: validation and test sets, multiple-choice questions, samples."""

import math

from jax_engine.distributed import devices as machines
from jax_engine.models.generate import generate
from jax_engine.run import Run
from jax_engine.tasks.base import Weights
from lmmods.evaluation.mmlu import MMLUEvaluator
from lmmods.evaluation.samples import SampleWriter


class Evaluation:
    """Evaluate without dropout or side effects on training. All processes must call each method."""

    def __init__(self, run: Run, samples: SampleWriter, mmlu: MMLUEvaluator):
        self._run, self.samples, self.mmlu = run, samples, mmlu

    def evaluate(self, role: str, limit: int | None = None, keep: bool = True) -> dict[str, float]:
        """Return the metrics over a split; empty if there is no such split.

        Args:
            role: `val` or `test`.
            limit: Maximum number of global batches; None or -1 takes all.
            keep: Write the task's result files.
        """
        run, data = self._run, self._run.data
        loader = data.val_dataloader() if role == "val" else data.test_dataloader()
        if not loader:
            return {}
        num_batches = run.num_batches(loader, role)
        num_batches = num_batches if limit in (None, -1) else min(num_batches, limit)
        if not num_batches:
            return {}
        for batch in run.batches(loader, data.eval_batch_size, num_batches):
            run.task.evaluate(run.steps, run.weights, batch)
        found, files = run.task.eval_results(role, data)
        if keep and run.is_first:
            run.folder.write_files(files)
        return {f"{role}/{name}": value for name, value in found.items()}

    def ask(self) -> dict[str, float]:
        """Return the metrics of the multiple-choice questions."""
        run, data = self._run, self._run.data
        with run.stopwatch.paused():
            batches = self.mmlu.batches(data, rank=0, world_size=1)  # every process reads all, see `Prefetcher`
            global_batches = run.batches(batches, data.eval_batch_size, math.inf, max_length=self.mmlu.max_length)
            logits = machines.gather(run.task.choice_logits(run.steps, run.weights, global_batches))
        return self.mmlu.score(run.progress.step, logits)

    def sample(self) -> None:
        """Generate from the fixed prompts."""
        run, tokenizer, step = self._run, self._run.data.tokenizer, self._run.progress.step
        with run.stopwatch.paused():
            # A new Weights object, so that its cached replica is freed afterwards.
            weights = Weights(run.parallel, run.weights.trainable, run.weights.frozen)
            tokens = generate(run.task.network, weights.replica, self.samples.prompt_ids, self.samples.generation,
                              run.data.stop_token_ids, tokenizer.pad_token_id)
            if run.is_first:
                self.samples.write(step, tokenizer.batch_decode(tokens, skip_special_tokens=True), run.loggers)
        self.samples.latest_step = step
