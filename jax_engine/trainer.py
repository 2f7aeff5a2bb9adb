"""The loop of a run on JAX: fit, validate, test, predict, with Lightning's keys and this project's run folder."""

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Literal

import jax

from jax_engine import checkpoint as checkpoints
from jax_engine.callbacks import Callback
from jax_engine.distributed import devices as machines
from jax_engine.distributed.devices import MeshSharding
from jax_engine.distributed.interface import Parallel
from jax_engine.distributed.prefetch import Feed, Group
from jax_engine.distributed.steps import Clipping, Steps
from jax_engine.distributed.tree import Tree
from jax_engine.distributed.weights import Weights
from jax_engine.metrics import Metrics
from jax_engine.models.generate import generate
from jax_engine.optim import build, step_scalars
from jax_engine.progress import Position, read_position
from jax_engine.schedule import limited, make_plan
from jax_engine.tasks.base import Task
from lmmods.core.console import say
from lmmods.core.errors import UserError
from lmmods.core.progress_bar import Bar, describe
from lmmods.core.run_length import check_length
from lmmods.core.signals import Interruption, stop
from lmmods.core.throughput import Stopwatch, peak_flops
from lmmods.evaluation.mmlu import Questionnaire
from lmmods.evaluation.samples import SampleWriter
from lmmods.runs.checkpoint_format import read_plain
from lmmods.runs.checkpoint_policy import KeepRules, Kept
from lmmods.runs.csv_logger import Logger, MetricsCSV, log_checkpoint, log_recipe
from lmmods.runs.folder import RunFolder, checkpoint_name
from lmmods.runs.hub_upload import Publisher
from lmmods.runs.identity import RunIdentity
from lmmods.runs.loss_plot import draw_curves
from lmmods.runs.model_card import model_card
from lmmods.runs.wandb_runs import log_predictions


class Trainer:
    """Train, evaluate and predict on JAX; names and meanings of Lightning's Trainer.

    Args:
        accelerator: Platform: cpu, gpu, tpu; `auto` takes the best there is.
        devices: How many devices of this machine; `auto` takes all (on a CPU one).
        num_nodes: Machines of the run, each running one process; see docs/cluster.md.
        strategy: `ddp` keeps everything on every device (pmap); `fsdp` cuts parameters, gradients and optimiser state
            over all of them (jit on a mesh); `auto` takes ddp. MeshSharding with its sizes for other meshes.
        precision: Arithmetic: float32; bfloat16 throughout; or mixed, with float32 master weights. `auto` is bf16-mixed
            where the hardware multiplies bfloat16 and 32-true elsewhere; config.yaml names what it was.
        logger: Loggers beside metrics.csv, which is always written. True or false add none.
        callbacks: EarlyStopping.
        max_epochs: Epochs to train; a fraction is allowed.
        max_steps: Optimiser steps to train; -1 leaves it to max_epochs.
        accumulate_grad_batches: Micro-batches of each device that make an optimiser step.
        gradient_clip_val: Largest norm (or value) of the averaged gradient; null does not clip.
        gradient_clip_algorithm: What gradient_clip_val bounds.
        val_check_interval: Micro-batches of each device (an integer, over the whole run) or share of an epoch between
            validations; null is once an epoch.
        check_val_every_n_epoch: Epochs between validations where val_check_interval is no integer.
        limit_train_batches: How much of an epoch: micro-batches of each device, or a share.
        limit_val_batches: The same of the validation set.
        limit_test_batches: The same of the test set.
        limit_predict_batches: The same of the rows to predict.
        overfit_batches: Train and validate on the same few micro-batches (a number or a share), unshuffled.
        num_sanity_val_steps: Validation batches tried before training; -1 tries all.
        log_every_n_steps: Optimiser steps between logged rows.
        enable_checkpointing: False writes no checkpoint.
        enable_progress_bar: False shows no bar and no lines in its place.
        default_root_dir: The run folder.
        detect_anomaly: Stop at the operation that makes a NaN; slow.
    """

    def __init__(
        self,
        *,
        accelerator: Literal["auto", "cpu", "gpu", "cuda", "tpu"] = "auto",
        devices: int | Literal["auto"] = "auto",
        num_nodes: int = 1,
        strategy: Literal["auto", "ddp", "fsdp"] | MeshSharding = "auto",
        precision: Literal["auto", "32-true", "bf16-true", "bf16-mixed"] = "auto",
        logger: Logger | list[Logger] | bool | None = None,
        callbacks: Callback | list[Callback] | None = None,
        max_epochs: int | float | None = None,
        max_steps: int = -1,
        accumulate_grad_batches: int = 1,
        gradient_clip_val: int | float | None = None,
        gradient_clip_algorithm: Literal["norm", "value"] | None = None,
        val_check_interval: int | float | None = None,
        check_val_every_n_epoch: int | None = 1,
        limit_train_batches: int | float | None = None,
        limit_val_batches: int | float | None = None,
        limit_test_batches: int | float | None = None,
        limit_predict_batches: int | float | None = None,
        overfit_batches: int | float = 0.0,
        num_sanity_val_steps: int | None = None,
        log_every_n_steps: int | None = None,
        enable_checkpointing: bool = True,
        enable_progress_bar: bool = True,
        default_root_dir: str = "runs/default",
        detect_anomaly: bool = False,
    ):
        check_length(max_epochs, max_steps)
        for name, value in (("accumulate_grad_batches", accumulate_grad_batches), ("num_nodes", num_nodes)):
            if value < 1:
                raise UserError(f"trainer.{name} is {value}, but must be 1 or more.")
        self.max_epochs, self.max_steps = max_epochs, max_steps
        self.precision, self.accumulate = precision, accumulate_grad_batches
        self.clipping = Clipping(gradient_clip_val, gradient_clip_algorithm or "norm")
        self.val_check_interval, self.check_val_every_n_epoch = val_check_interval, check_val_every_n_epoch
        self.limits = {"train": limit_train_batches, "val": limit_val_batches, "test": limit_test_batches,
                       "predict": limit_predict_batches}
        if overfit_batches:
            self.limits["val"] = overfit_batches
        self.overfit_batches = overfit_batches
        self.num_sanity_val_steps = 2 if num_sanity_val_steps is None else num_sanity_val_steps
        self.log_every_n_steps = 50 if log_every_n_steps is None else log_every_n_steps
        self.callbacks = [callbacks] if isinstance(callbacks, Callback) else callbacks or []
        self.checkpoint, self.samples, self.mmlu, self.publish = (
            KeepRules(), SampleWriter(), Questionnaire(), Publisher())
        self.enable_checkpointing, self.enable_progress_bar = enable_checkpointing, enable_progress_bar
        self.run_folder = RunFolder(default_root_dir)
        extra = logger if isinstance(logger, list) else [logger] if isinstance(logger, Logger) else []
        self.run_loggers = [MetricsCSV(self.run_folder.metrics_csv), *extra]
        self.recipe: dict[str, Any] = {}  # everything, written as config.yaml
        self.identity = RunIdentity()
        self.interruption, self.stopwatch = Interruption(saves=enable_checkpointing), Stopwatch()
        self.bar = Bar(enable_progress_bar)
        self.position, self.should_stop = Position(), False
        self._machine = (accelerator, devices, num_nodes, strategy, detect_anomaly)
        self._writer = checkpoints.Writer()
        # What the data modules ask of a trainer: every process reads all micro-batches, see `feed`.
        self.global_rank, self.world_size = 0, 1
        self.state = SimpleNamespace(fn=None)

    # Commands --------------------------------------------------------------------------------------------------------

    def fit(self, model: Task, train_dataloaders=None, val_dataloaders=None, datamodule=None,
            ckpt_path: str | None = None, overwrite: bool = False) -> None:
        """Train.

        Args:
            ckpt_path: Go on from a checkpoint: `last`, `best`, a step number or a path.
            overwrite: Delete what an earlier run left in the run folder.
        """
        with self._in_run_folder("fit", lambda: self.run_folder.check_fit(ckpt_path, overwrite, self.recipe)):
            self._fit(model, datamodule, self.run_folder.resolve(ckpt_path) if ckpt_path else None)

    def _fit(self, model: Task, datamodule: Any, resumed: Path | None) -> None:
        if self.publish.repo is not None and (problem := self.publish.problem()):
            raise UserError(problem)
        self._prepare("fit", model, datamodule, resumed)
        loader = datamodule.train_dataloader()
        self._make_plan(loader)
        self._compile(build(model.optimizer_settings, self._decays))
        self._take(self.steps.new_state(self.weights.trainable))
        self.window, self.open_batches = None, 0
        if resumed:
            self._restore(resumed)
        stopped = [callback.on_train_start(self) for callback in self.callbacks]
        self.should_stop = any(stopped)
        if resumed and self._is_done() and self._was_complete(stopped):
            return
        if not resumed and self.num_sanity_val_steps:
            self._evaluate("val", limit=self.num_sanity_val_steps, keep=False)
        self._start(resumed)
        try:
            if self.samples.wants_base and not resumed:
                self._sample()
            self._train(loader)
            self._finish()
        finally:
            self.bar.close()
            self._writer.wait()

    def _was_complete(self, stopped: list[str]) -> bool:
        told, was_complete = self.run_folder.nothing_left(self.position.step, self.max_steps, self.max_epochs, stopped)
        say(told)
        return was_complete

    def validate(self, model: Task = None, dataloaders=None, datamodule=None, ckpt_path: str | None = None) -> None:
        """Evaluate on the validation set.

        Args:
            ckpt_path: Checkpoint to evaluate: `last`, `best`, a step number or a path; null is the untrained start.
        """
        with self._in_run_folder("validate"):
            self._evaluate_only("validate", "val", model, datamodule, ckpt_path)

    def test(self, model: Task = None, dataloaders=None, datamodule=None, ckpt_path: str | None = None) -> None:
        """Evaluate on the test set.

        Args:
            ckpt_path: Checkpoint to evaluate: `last`, `best`, a step number or a path; null is the untrained start.
        """
        with self._in_run_folder("test"):
            self._evaluate_only("test", "test", model, datamodule, ckpt_path)

    def predict(self, model: Task = None, dataloaders=None, datamodule=None, ckpt_path: str | None = None) -> None:
        """Write predictions.jsonl.

        Args:
            ckpt_path: Checkpoint to use: `last`, `best`, a step number or a path; null is the untrained start.
        """
        with self._in_run_folder("predict", lambda: self.run_folder.check_results(self.recipe)):
            self._predict(model, datamodule, self.run_folder.resolve(ckpt_path) if ckpt_path else None)

    def _predict(self, model: Task, datamodule: Any, checkpoint: Path | None) -> None:
        self._prepare("predict", model, datamodule, checkpoint)
        self._compile(None)
        self._load_weights(checkpoint)
        loader = datamodule.predict_dataloader()
        outputs: dict[int, Any] = {}
        self.bar.open("predict", self._num_rounds(loader, "predict"))
        for group in self._groups(loader, datamodule.eval_batch_size, self._num_rounds(loader, "predict")):
            outputs |= model.outputs(self.steps, self.weights, group, datamodule, self._seed)
            self.bar.update()
        self.bar.close()
        outputs = machines.gather(outputs)
        if self._is_first:
            found = datamodule.predictions(outputs)
            say(self.run_folder.write_predictions(found))
            log_predictions(self.run_loggers, found.rows)

    def inspect(self, model: Task = None, datamodule=None, rows: int = 4,
                which: Literal["first", "longest", "most_cut", "most_unknown"] | list[int] = "first") -> None:
        """Show what would be trained on and what a step needs, and train nothing.

        Args:
            rows: How many rows to show with their loss mask.
            which: Which rows: the first, the worst by a measure, or these numbers of training rows.
        """
        from lmmods.runs.inspect import show_data

        self._connect()
        self._prepare("fit", model, datamodule)
        loader = datamodule.train_dataloader()
        self._make_plan(loader)
        show_data(self.recipe, datamodule, rows, which)
        print(f"\n{self._description}")
        self._compile(build(model.optimizer_settings, self._decays))
        state = self.steps.new_state(self.weights.trainable)
        group = next(iter(self._groups(loader, datamodule.batch_size, 1)))
        memory = self.steps.memory(state, self.weights.frozen, group.batch, self._scalars(0))
        parts = ", ".join(f"{name} {size / 2**30:.2f} GiB" for name, size in memory.items())
        print(f"Memory of a compiled step on each device, for the first batch: {parts}.")

    # Start -----------------------------------------------------------------------------------------------------------

    def _connect(self) -> None:
        """Devices and the other processes."""
        self.parallel: Parallel = machines.start(*self._machine)
        self._is_first = jax.process_index() == 0

    @contextmanager
    def _in_run_folder(self, command: str, check: Callable[[], None] = lambda: None) -> Iterator[None]:
        """The run folder is this command's alone. The first process takes it; where it may not, all end alike."""
        self._connect()
        folder, several = self.run_folder, jax.process_count() > 1
        with folder.taken(command, check, self._is_first, tells_later=several):
            if problems := machines.gather({0: str(folder.problem)} if folder.problem else {}):
                raise UserError(problems[0])
            yield

    def _prepare(self, command: str, model: Task, datamodule: Any, checkpoint: Path | None = None) -> None:
        """Data, network, first parameters on the devices; `checkpoint` must fit them, and shapes them."""
        if self.precision == "auto":
            self.precision, reason = machines.choose_precision()
            say(f"precision {self.precision}: {reason}. Another one is set with trainer.precision.")
            if self.recipe:
                self.recipe["trainer"]["precision"] = self.precision
        self.bar = Bar(self.enable_progress_bar and self._is_first, machines.peak_memory)
        self.state.fn = SimpleNamespace(value=command)
        self.task, self.datamodule = model, datamodule
        datamodule.trainer = self
        if checkpoint:
            datamodule.go_on_from(read_plain(checkpoint))
        self._seed = datamodule.seed
        datamodule.adopt_contents(machines.on_first(lambda: self._prepare_data(checkpoint)))
        datamodule.setup(command)
        if command == "fit":
            self.samples.prepare(datamodule, model.max_positions())
        if command != "predict" and self.mmlu.is_on:
            self.mmlu.prepare(datamodule, model)
            model.choice_ids = self.mmlu.choice_ids
        trainable, frozen = model.build(self.precision, datamodule, self._seed)
        self._decays = model.network.decays(trainable)
        self._description = model.describe(trainable, frozen)
        self._flops = model.flops_per_token(trainable, frozen)
        self.weights = Weights(self.parallel, self.parallel.put_state(trainable), self.parallel.put_state(frozen))

    def _prepare_data(self, checkpoint: Path | None) -> dict[str, Any]:
        """Compare with the checkpoint, then build what the cache lacks; returns what the sources hold."""
        data, fits = self.datamodule, self.state.fn.value == "fit"
        for line in self.identity.settle(data, checkpoint) if fits else self.identity.check_evaluation(checkpoint):
            say(line)
        data.prepare_data()
        return data.contents

    def _make_plan(self, loader: Any) -> None:
        """How long the run is, and what is measured on the way."""
        settings = self.task.optimizer_settings
        self.plan = make_plan(
            rounds_per_epoch=self._num_rounds(loader, "train"),
            rounds_per_step=self.accumulate,
            num_val_rounds=self._num_rounds(self.datamodule.val_dataloader(), "val"),
            max_epochs=self.max_epochs,
            max_steps=self.max_steps,
            val_check_interval=self.val_check_interval,
            val_epochs=self.check_val_every_n_epoch)
        peak = peak_flops(jax.devices()[0].device_kind)
        self.metrics = Metrics(
            self.log_every_n_steps, self.stopwatch, self.bar, lambda step: settings.lr_at(step, self.plan.num_steps),
            self._flops / (peak * self.parallel.num_devices) if peak else None)

    def _num_rounds(self, loader: Any, role: str) -> int:
        """Rounds of a pass over a loader."""
        return limited(-(-len(loader) // self.parallel.num_shares), self.limits[role], role)

    def _compile(self, optimizer: Any) -> None:
        self.steps = Steps(self.parallel, self.task.loss, optimizer, self._seed, self.clipping, self.task.predict)

    def _restore(self, checkpoint: Path) -> None:
        """Everything as it was when `checkpoint` was written, by either engine."""
        content, network = checkpoints.read(checkpoint), self.task.network
        key = type(self.datamodule).__qualname__
        self.position = read_position(content, key, self.parallel.num_shares)
        host = checkpoints.unpack(content, self.parallel.shapes(self.train_state), network.to_torch, network.from_torch)
        self._take(self.parallel.put_state(host))
        if content["window"]:
            self.open_batches = content["window"]["num_batches"]
            window = checkpoints.unpack_window(content["window"], network.from_torch)
            self.metrics.laps.leave_out(int(window["sums"]["num_tokens"]))
            self.window = self.parallel.put_sums(window)
        self.metrics.load_state_dict(content["callbacks"]["Metrics"])
        self.checkpoint.load_state_dict(content["callbacks"]["Checkpoint"])
        for callback in self.callbacks:
            if callback.state_key in content["callbacks"]:
                callback.load_state_dict(content["callbacks"][callback.state_key])
        self.datamodule.load_state_dict(content[key])

    def _load_weights(self, checkpoint: Path | None) -> None:
        """Parameters of a checkpoint instead of the first ones."""
        if checkpoint is None:
            return
        network = self.task.network
        content = checkpoints.read(checkpoint)
        like = self.parallel.shapes(self.weights.trainable)
        trainable = checkpoints.unpack_trainable(content, like, network.to_torch, network.from_torch)
        self.weights = Weights(self.parallel, self.parallel.put_state(trainable), self.weights.frozen)

    def _start(self, resumed: Path | None) -> None:
        """Say what will happen, then make the run folder ready. A failed start leaves no trace."""
        self.interruption.listen()
        if self._is_first:
            self.run_folder.begin(resumed)
            self.run_folder.write_start(self.recipe, self.datamodule.report)
            if resumed:
                self.identity.note_resume(self.run_folder, resumed, self.position.step)
            self.samples.begin(self.run_folder, self.position.step if resumed else None)
            if resumed and self.enable_checkpointing:
                self.checkpoint.take_up(self.run_folder, resumed)
        machines.barrier("run folder")
        self.loggers = self.metrics.loggers = self.run_loggers if self._is_first else []
        if resumed and self.loggers:
            self.loggers[0].rewind(self.position.step)
        log_recipe(self.loggers[1:], self.recipe, self.datamodule.report)
        say(self.datamodule.report_table())
        say(self._description)
        if resumed:
            say(f"Resumed at step {self.position.step} from {resumed}.")

    # The loop --------------------------------------------------------------------------------------------------------

    def _train(self, loader: Any) -> None:
        self.bar.open("train", self.plan.num_steps, self.position.step, unit="step", first="compiling")
        self._data_position = self.datamodule.state_dict()
        self.stopwatch.start()
        while not self._is_done():
            if self.plan.ends_epoch(self.position):
                self.position.epoch, self.position.rounds = self.position.epoch + 1, 0
                loader.load_state_dict(self._data_position)  # of what was read ahead nothing was used
            rounds = self.plan.rounds_per_epoch - self.position.rounds
            for group in self._groups(loader, self.datamodule.batch_size, rounds, self.position.epoch,
                                      self.position.rounds * self.parallel.num_shares):
                self._train_round(group)
                if self._is_done():
                    break
        self.metrics.fetch()

    def _is_done(self) -> bool:
        return self.should_stop or self.position.step >= self.plan.num_steps

    def _train_round(self, group: Group) -> None:
        """One micro-batch on each share, and the step that it may complete."""
        self.metrics.look()
        position = self.position
        position.rounds, position.total_rounds = position.rounds + 1, position.total_rounds + 1
        self._data_position = group.position
        closes = self.open_batches + 1 == self.accumulate or self.plan.ends_epoch(position)
        frozen, state = self.weights.frozen, self.train_state
        if closes and not self.open_batches:
            state, figures = self.steps.full_step(state, frozen, group.batch, self._scalars(position.step))
        else:
            if not self.open_batches:
                self.window = self.steps.open_window(state)
            self.window = self.steps.micro_step(state, frozen, self.window, group.batch)
            self.open_batches += 1
            if closes:
                state, figures = self.steps.update(state, self.window, self._scalars(position.step))
                self.window, self.open_batches = None, 0
        self._take(state)
        if closes:
            position.step += 1
            self.metrics.add(position.step, position.epoch + position.rounds / self.plan.rounds_per_epoch, figures)
        self._after_round(closes)

    def _take(self, state: Tree) -> None:
        """The state before it has been consumed."""
        self.train_state = state
        self.weights = Weights(self.parallel, state["trainable"], self.weights.frozen)

    def _scalars(self, step: int) -> Any:
        return self.parallel.put_scalars(step_scalars(self.task.optimizer_settings, step, self.plan.num_steps))

    def _after_round(self, step_done: bool) -> None:
        """Sample, ask, validate and save when it is time."""
        self._writer.check()
        position, validates = self.position, self.plan.validates_after(self.position)
        if self.plan.ends_epoch(position) and not validates:
            self._check(validated=False)
        ends = self._is_done()
        validates = validates or ends and self.plan.num_val_rounds
        if step_done and self.samples.is_due(position.step, ends):
            self.metrics.fetch()
            self._sample()
        if step_done and not (validates and self.mmlu.at_validation) and self.mmlu.is_due(position.step, ends):
            self.metrics.fetch()
            self.metrics.log(self._ask(), position.step)
        if validates:
            return self._validate()
        due = step_done and self.checkpoint.is_due(position.step)
        # Several processes agree on an interruption once a step: asking each other makes them wait.
        inside = jax.process_count() == 1 and self.enable_checkpointing  # what is not saved ends with a whole step
        may_stop = (step_done or inside) and machines.any_of(self.interruption.requested)
        if due or ends or may_stop:
            self._save()

    def _validate(self) -> None:
        """Evaluate, and save what has been evaluated."""
        self.metrics.fetch()
        with self.stopwatch.paused():
            metrics = self._evaluate("val")
        if self.mmlu.at_validation:
            metrics |= self._ask()
        self.metrics.log(metrics, self.position.step)
        self.bar.say(describe(metrics, "val/"))
        self._check(validated=True)
        self.checkpoint.rank(self.metrics.latest, self._checkpoint_path().name)
        self._save()

    def _check(self, validated: bool) -> None:
        """Let the callbacks look at the metrics."""
        if self.callbacks:
            self.metrics.fetch()
        for callback in self.callbacks:
            callback.on_check(self, self.metrics.latest, validated, self.plan.ends_epoch(self.position))

    # Evaluation ------------------------------------------------------------------------------------------------------

    def _evaluate_only(self, command: str, role: str, model: Task, datamodule: Any, ckpt_path: str | None) -> None:
        checkpoint = self.run_folder.resolve(ckpt_path) if ckpt_path else None
        self._prepare(command, model, datamodule, checkpoint)
        self._compile(None)
        self._load_weights(checkpoint)
        self.bar.open(command, 0)
        metrics = self._evaluate(role)
        self.bar.close()
        if not metrics:
            raise UserError("There is no validation set: set data.val_source or data.val_size.")
        if self.mmlu.is_on:
            metrics |= self._ask()
        self.bar.say(describe(metrics, f"{role}/"))
        if self._is_first:
            self.run_folder.merge_metrics(metrics)

    def _evaluate(self, role: str, limit: int | None = None, keep: bool = True) -> dict[str, float]:
        """Metrics over a whole set, without dropout; none where there is no such set."""
        data = self.datamodule
        loader = data.val_dataloader() if role == "val" else data.test_dataloader()
        if not loader:
            return {}
        rounds = self._num_rounds(loader, role)
        rounds = rounds if limit in (None, -1) else min(rounds, limit)
        if not rounds:
            return {}
        for group in self._groups(loader, data.eval_batch_size, rounds):
            self.task.evaluate(self.steps, self.weights, group)
        found, files = self.task.eval_results(role, data)
        if keep and self._is_first:
            self.run_folder.write_files(files)
        return {f"{role}/{name}": value for name, value in found.items()}

    def _groups(self, loader: Any, batch_size: int, rounds: int | float, epoch: int = 0, start: int = 0,
                max_length: int | None = None):
        """At most so many groups of a pass over a loader."""
        data = self.datamodule
        feed = Feed(loader, self.parallel, batch_size, data.tokenizer.pad_token_id, epoch, start,
                    max_length or data.max_length)
        with feed:
            for number, group in enumerate(feed, start=1):
                yield group
                if number == rounds:
                    return

    def _sample(self) -> None:
        """Generate from the fixed prompts. All processes must call this."""
        tokenizer, step = self.datamodule.tokenizer, self.position.step
        with self.stopwatch.paused():
            # Of weights of its own, so that the replica does not outlive this.
            weights = Weights(self.parallel, self.weights.trainable, self.weights.frozen)
            tokens = generate(self.task.network, weights.replica, self.samples.prompt_ids, self.samples.generation,
                              self.datamodule.stop_token_ids, tokenizer.pad_token_id)
            if self._is_first:
                self.samples.write(step, tokenizer.batch_decode(tokens, skip_special_tokens=True), self.loggers)
        self.samples.latest_step = step

    def _ask(self) -> dict[str, float]:
        """Metrics of the multiple-choice questions. All processes must call this."""
        data = self.datamodule
        with self.stopwatch.paused():
            batches = self.mmlu.batches(data, self.global_rank, self.world_size)
            groups = self._groups(batches, data.eval_batch_size, math.inf, max_length=self.mmlu.max_length)
            logits = machines.gather(self.task.choice_logits(self.steps, self.weights, groups))
        return self.mmlu.grade(self.position.step, logits)

    # Checkpoints -----------------------------------------------------------------------------------------------------

    def _checkpoint_path(self) -> Path:
        return self.run_folder.checkpoint(checkpoint_name(self.position.step, self.open_batches))

    def _save(self) -> None:
        """Write a checkpoint of this very moment in the background; stop where that has been asked for."""
        self.metrics.fetch()
        path = self._checkpoint_path()
        if self.enable_checkpointing:
            with self.stopwatch.paused():
                content = self._content()
                kept = self.checkpoint.kept_with(path.name)
                if self._is_first:
                    self._writer.save(path, content, lambda: self._settle(path, kept))
        if machines.any_of(self.interruption.requested):
            self._writer.wait()
            machines.barrier("checkpoint")
            stop(self.position.step, path if self.enable_checkpointing else None)
        if self.publish.repo is not None and self.publish.when == "save":
            with self.stopwatch.paused():
                self._publish_aside()

    def _settle(self, path: Path, kept: Kept) -> None:
        """Called when a checkpoint stands, by the thread that wrote it."""
        kept.settle(self.run_folder)
        log_checkpoint(self.loggers, path)

    def _publish_aside(self) -> None:
        if machines.any_of(self.publish.is_busy):
            return say(f"The upload to {self.publish.repo} is still under way: step {self.position.step} is left out.")
        trainable = self.parallel.fetch_state(self.train_state["trainable"])
        if self._is_first:
            folder = self.run_folder.room_for_upload()
            self._export(trainable, folder)
            self.publish.upload_aside(folder, self.position.step)

    def _content(self) -> dict[str, Any]:
        """A checkpoint, laid out as Lightning's. All processes must call this."""
        position, network = self.position, self.task.network
        state = self.parallel.fetch_state(self.train_state)
        packed = checkpoints.pack(state, self.task.optimizer_settings, position.step, self.plan.num_steps,
                                  network.to_torch)
        window: dict[str, Any] = {}
        if self.open_batches:
            window = checkpoints.pack_window(self.parallel.fetch_sums(self.window), self.open_batches, network.to_torch)
        return {
            "epoch": position.epoch,
            "global_step": position.step,
            "engine": "jax",
            "identity": self.identity.tree,
            **packed,
            "loops": position.loops(self.plan.ends_epoch(position)),
            "callbacks": {
                "Metrics": self.metrics.state_dict(),
                "Checkpoint": self.checkpoint.state_dict(),
                **{callback.state_key: callback.state_dict() for callback in self.callbacks},
            },
            "lr_schedulers": [checkpoints.schedule_state(
                self.task.optimizer_settings, len(packed["optimizer_states"][0]["param_groups"]), position.step,
                self.plan.num_steps)],
            type(self.datamodule).__qualname__: self.datamodule.state_at(self._data_position),
            "world_size": self.parallel.num_shares,
            "window": window,
        }

    # The end ---------------------------------------------------------------------------------------------------------

    def _finish(self) -> None:
        """Write model/ and loss.png and mark the run completed."""
        if self.samples.is_due(self.position.step, ends=True):  # stopped by a callback
            self._sample()
        if self.mmlu.is_due(self.position.step, ends=True):
            self.metrics.log(self._ask(), self.position.step)
        self._writer.wait()
        trainable = self.parallel.fetch_state(self.train_state["trainable"])
        folder = self.run_folder
        if self._is_first:
            folder.merge_metrics(self.metrics.final(self.position.step))
            exported = folder.room_for_model()
            self._export(trainable, exported)
            folder.put_model(exported)
            log_checkpoint(self.loggers, folder.find("last"), ends=True)
            folder.complete()
            say(f"Wrote {folder.model}.")
        for logger in self.loggers[1:]:
            logger.finalize("success")
        if self._is_first and self.publish.repo is not None:
            self.publish.finish(folder.model, self.position.step)
        machines.barrier("export")

    def _export(self, trainable: Tree, path: Path) -> None:
        self.task.export(trainable, path)
        self.datamodule.tokenizer.save_pretrained(path)
        card = model_card(self.run_folder, self.task.pretrained, self.task.trains_adapter, self.task.auto_class)
        (path / "README.md").write_text(card, encoding="utf-8")
        draw_curves(self.run_folder.metrics_csv, path / "loss.png")
