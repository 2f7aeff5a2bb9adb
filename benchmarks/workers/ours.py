"""Train a recipe with either of our engines, in rounds."""

import sys
from pathlib import Path

from rounds import Rounds, read_check, read_settings


def pace_torch(settings: dict) -> None:
    """Patch Lightning's loop to report rounds."""
    import torch

    from lmmods.torch_engine.callbacks.run_events import RunEvents

    is_gpu, check, is_grpo = torch.cuda.is_available(), read_check(settings["folder"]), settings.get("task") == "grpo"
    rounds = Rounds(settings, peak=(lambda: torch.cuda.max_memory_allocated() / 2**30) if is_gpu else None)
    token_counts = watch_rollouts(rounds) if is_grpo else []
    on_start, on_step_end = RunEvents.on_train_start, RunEvents.on_train_batch_end

    def on_train_start(self, trainer, module):  # noqa: ANN001, ANN202
        rounds.record_ready()
        if is_grpo:
            from lmmods.torch_engine.tasks.grpo import TorchPolicy

            rounds.record_loss(nats_per_token(TorchPolicy(module), check))
            on_start(self, trainer, module)
            return
        batch = {name: torch.tensor(value, device=module.device) for name, value in check.items()}
        with trainer.precision_plugin.forward_context():
            sums = module(module.batch_loss, module.complete(batch))
        total, weight = sums.total, sums.weight
        if "logps/chosen" in getattr(module, "metric_names", ()):  # the loss itself is log 2 at any start
            total, weight = sums.metrics[module.metric_names.index("logps/chosen")]
        rounds.record_loss(abs(total.item()) / weight.item())
        if is_gpu:
            torch.cuda.reset_peak_memory_stats()
        on_start(self, trainer, module)

    def on_train_batch_end(self, trainer, module, outputs, batches, batch_idx):  # noqa: ANN001, ANN202
        on_step_end(self, trainer, module, outputs, batches, batch_idx)
        if is_gpu and rounds.is_last_step:
            torch.cuda.synchronize()
        rounds.record_step(token_counts.pop() if is_grpo else sum(batch["attention_mask"].sum() for batch in batches))

    RunEvents.on_train_start, RunEvents.on_train_batch_end = on_train_start, on_train_batch_end


def watch_rollouts(rounds: Rounds) -> list[int]:
    """Record the parts of each rollout's time, and return a list to which its number of new tokens is appended."""
    from lmmods.rollouts import maker

    token_counts, metrics = [], maker.metrics

    def timed_metrics(rollout):  # noqa: ANN001, ANN202
        for part in ("drawing", "rewards", "scoring"):
            rounds.record_time(part, rollout.seconds[part])
        token_counts.append(sum(len(answer.tokens) for group in rollout.groups for answer in group.answers))
        return metrics(rollout)

    maker.metrics = timed_metrics
    return token_counts


def nats_per_token(policy, check: dict) -> float:  # noqa: ANN001
    """Return the loss per labelled token of the check batch under the policy of the rollouts."""
    import numpy as np

    from lmmods.rollouts.policy import Row

    rows = [Row(*(np.array(check[name][index][:sum(mask)], np.int32) for name in ("input_ids", "labels")))
            for index, mask in enumerate(check["attention_mask"])]
    return -float(np.concatenate(policy.logps(rows, 1.0)).sum()) / sum(int((row.labels >= 0).sum()) for row in rows)


def pace_validation(settings: dict) -> None:
    """Patch torch's validation to repeat and report each pass; the first one is the warm-up."""
    from lmmods.torch_engine.callbacks.run_events import RunEvents

    rounds, tokens, has_started = Rounds(settings), 0, False
    on_end = RunEvents.on_validation_end

    def on_validation_start(self, trainer, module):  # noqa: ANN001, ANN202
        nonlocal tokens
        if not has_started:
            rounds.record_ready()
        tokens = 0

    def on_validation_batch_end(self, trainer, module, outputs, batch, *_):  # noqa: ANN001, ANN002, ANN202
        nonlocal tokens
        tokens += int(batch["attention_mask"].sum())

    def on_validation_end(self, trainer, module):  # noqa: ANN001, ANN202
        nonlocal has_started
        on_end(self, trainer, module)
        if has_started:
            return
        has_started = True
        while True:  # until the driver has enough rounds
            rounds.record_loss(float(trainer.callback_metrics["val/loss"]))
            rounds.record_step(tokens)
            trainer.validate_loop.run()

    RunEvents.on_validation_start = on_validation_start
    RunEvents.on_validation_batch_end, RunEvents.on_validation_end = on_validation_batch_end, on_validation_end


def pace_jax(settings: dict) -> None:
    """Patch our JAX loop to report rounds."""
    import jax
    import numpy as np

    from jax_engine.trainer import Loop

    device, check, is_grpo = jax.local_devices()[0], read_check(settings["folder"]), settings.get("task") == "grpo"
    rounds = Rounds(settings, peak=None if device.platform == "cpu" else
                    lambda: device.memory_stats()["peak_bytes_in_use"] / 2**30)
    token_counts = watch_rollouts(rounds) if is_grpo else []
    original_train, train_step = Loop.train, Loop.train_step

    def train(self, loader, resumed):  # noqa: ANN001, ANN202
        rounds.record_ready()
        if is_grpo:
            from jax_engine.tasks.grpo import JaxPolicy

            rounds.record_loss(nats_per_token(JaxPolicy(self.run), check))
            original_train(self, loader, resumed)
            return
        batch = {name: np.asarray(value, np.int32)[None] for name, value in check.items()}
        run = self.run
        batch = run.parallel.put_batch(batch)
        sums = run.steps.eval_step(run.weights.trainable, run.weights.frozen, batch)
        rounds.record_loss(float(sums["total"]) / float(sums["weight"]))
        original_train(self, loader, resumed)

    def timed_train_step(self, batches, num_batches):  # noqa: ANN001, ANN202
        batches = list(batches)
        train_step(self, iter(batches), num_batches)
        if rounds.is_last_step:
            jax.block_until_ready(self.run.state)
        rounds.record_step(token_counts.pop() if is_grpo else
                           sum(int(batch.host["attention_mask"].sum()) for batch in batches))

    Loop.train, Loop.train_step = train, timed_train_step


def main() -> None:
    settings = read_settings()
    sys.path.insert(0, settings["root"])
    from lmmods.cli import main as run

    command = settings.get("command", "fit")
    (pace_validation if command == "validate" else {"torch": pace_torch, "jax": pace_jax}[settings["engine"]])(settings)
    recipe, out = (Path(settings["folder"]) / name for name in ("recipe.yaml", settings.get("out", settings["engine"])))
    overwrite = ["--overwrite", "true"] if command == "fit" else []
    sys.exit(run([command, "--config", str(recipe), "--engine", settings["engine"], *overwrite,
                  "--trainer.default_root_dir", str(out), *settings.get("options", [])]))


if __name__ == "__main__":
    main()
