"""Our trainer, either engine, on a recipe."""

import sys
from pathlib import Path

from rounds import Rounds, read_check, settings


def pace_torch(asked: dict) -> None:
    """Report from within Lightning's loop."""
    import torch

    from lmmods.torch_engine.callbacks.run_events import RunEvents

    rounds, check, draws = Rounds(asked), read_check(asked["folder"]), asked.get("task") == "grpo"
    drawn = watch_rollouts(rounds) if draws else []
    begin, end = RunEvents.on_train_start, RunEvents.on_train_batch_end

    def on_train_start(self, trainer, module):  # noqa: ANN001, ANN202
        rounds.ready()
        if draws:
            from lmmods.torch_engine.tasks.grpo import TorchPolicy

            rounds.start_loss(nats_per_token(TorchPolicy(module), check))
            begin(self, trainer, module)
            return
        batch = {name: torch.tensor(value) for name, value in check.items()}
        with trainer.precision_plugin.forward_context():
            sums = module(module.batch_loss, module.complete(batch))
        total, weight = sums.total, sums.weight
        if "logps/chosen" in getattr(module, "metric_names", ()):  # the loss itself is log 2 wherever a run begins
            total, weight = sums.metrics[module.metric_names.index("logps/chosen")]
        rounds.start_loss(abs(total.item()) / weight.item())
        begin(self, trainer, module)

    def on_train_batch_end(self, trainer, module, outputs, batches, batch_idx):  # noqa: ANN001, ANN202
        end(self, trainer, module, outputs, batches, batch_idx)
        rounds.step(drawn.pop() if draws else sum(int(batch["attention_mask"].sum()) for batch in batches))

    RunEvents.on_train_start, RunEvents.on_train_batch_end = on_train_start, on_train_batch_end


def watch_rollouts(rounds: Rounds) -> list[int]:
    """Note the parts of each rollout's time; returns a list that gets the number of its new tokens."""
    from lmmods.rollouts import maker

    drawn, metrics = [], maker.metrics

    def watched(rollout):  # noqa: ANN001, ANN202
        for part in ("drawing", "rewards", "scoring"):
            rounds.spend(part, rollout.seconds[part])
        drawn.append(sum(len(answer.tokens) for group in rollout.groups for answer in group.answers))
        return metrics(rollout)

    maker.metrics = watched
    return drawn


def nats_per_token(policy, check: dict) -> float:  # noqa: ANN001
    """Loss of the check batch's labelled tokens under the policy that rollouts ask."""
    import numpy as np

    from lmmods.rollouts.policy import Row

    rows = [Row(*(np.array(check[name][place][:sum(mask)], np.int32) for name in ("input_ids", "labels")))
            for place, mask in enumerate(check["attention_mask"])]
    return -float(np.concatenate(policy.logps(rows, 1.0)).sum()) / sum(int((row.labels >= 0).sum()) for row in rows)


def pace_validation(asked: dict) -> None:
    """Validate again and again, and report each time; the first one is the warm-up. On torch alone."""
    from lmmods.torch_engine.callbacks.run_events import RunEvents

    rounds, tokens, began = Rounds(asked), 0, False
    end = RunEvents.on_validation_end

    def on_validation_start(self, trainer, module):  # noqa: ANN001, ANN202
        nonlocal tokens
        if not began:
            rounds.ready()
        tokens = 0

    def on_validation_batch_end(self, trainer, module, outputs, batch, *_):  # noqa: ANN001, ANN002, ANN202
        nonlocal tokens
        tokens += int(batch["attention_mask"].sum())

    def on_validation_end(self, trainer, module):  # noqa: ANN001, ANN202
        nonlocal began
        end(self, trainer, module)
        if began:
            return
        began = True
        while True:  # until the driver has enough rounds
            rounds.start_loss(float(trainer.callback_metrics["val/loss"]))
            rounds.step(tokens)
            trainer.validate_loop.run()

    RunEvents.on_validation_start = on_validation_start
    RunEvents.on_validation_batch_end, RunEvents.on_validation_end = on_validation_batch_end, on_validation_end


def pace_jax(asked: dict) -> None:
    """Report from within our loop."""
    import jax
    import numpy as np

    from jax_engine.trainer import Loop

    rounds, check, draws = Rounds(asked), read_check(asked["folder"]), asked.get("task") == "grpo"
    drawn = watch_rollouts(rounds) if draws else []
    begin, train_step = Loop.train, Loop.train_step

    def train(self, loader, resumed):  # noqa: ANN001, ANN202
        rounds.ready()
        if draws:
            from jax_engine.tasks.grpo import JaxPolicy

            rounds.start_loss(nats_per_token(JaxPolicy(self.run), check))
            begin(self, loader, resumed)
            return
        batch = {name: np.asarray(value, np.int32)[None] for name, value in check.items()}
        run = self.run
        batch = run.parallel.put_batch(batch)
        figures = run.steps.eval_step(run.weights.trainable, run.weights.frozen, batch)
        rounds.start_loss(float(figures["total"]) / float(figures["weight"]))
        begin(self, loader, resumed)

    def counted(self, batches, num_batches):  # noqa: ANN001, ANN202
        batches = list(batches)
        train_step(self, iter(batches), num_batches)
        if rounds.closing:
            jax.block_until_ready(self.run.state)
        rounds.step(drawn.pop() if draws else sum(int(batch.host["attention_mask"].sum()) for batch in batches))

    Loop.train, Loop.train_step = train, counted


def main() -> None:
    asked = settings()
    sys.path.insert(0, asked["root"])
    from lmmods.cli import main as run

    command = asked.get("command", "fit")
    (pace_validation if command == "validate" else {"torch": pace_torch, "jax": pace_jax}[asked["engine"]])(asked)
    recipe, out = (Path(asked["folder"]) / name for name in ("recipe.yaml", asked.get("out", asked["engine"])))
    overwrite = ["--overwrite", "true"] if command == "fit" else []
    sys.exit(run([command, "--config", str(recipe), "--engine", asked["engine"], *overwrite,
                  "--trainer.default_root_dir", str(out), *asked.get("options", [])]))


if __name__ == "__main__":
    main()
