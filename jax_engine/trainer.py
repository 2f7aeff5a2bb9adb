"""The JAX trainer: fit, validate, test, predict and inspect, with Lightning's keys and this project's run folder."""

import math
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass
from functools import cache
from itertools import islice
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Literal

import jax
from jax import monitoring

from jax_engine.callbacks import EarlyStopping
from jax_engine.checkpoint import Checkpointer, load_weights
from jax_engine.distributed import devices as machines
from jax_engine.distributed.devices import MeshSharding
from jax_engine.distributed.interface import Parallel
from jax_engine.distributed.prefetch import GlobalBatch, choose_padded_lengths, halve_lengths
from jax_engine.distributed.steps import Clipping, Steps
from jax_engine.distributed.target import present_target
from jax_engine.distributed.tree import Tree
from jax_engine.memory import step_memory
from jax_engine.models.experts import check_expert_mesh
from jax_engine.models.generate import generate
from jax_engine.optim import build
from jax_engine.parity import measure
from jax_engine.run import Run, Training
from jax_engine.tasks.base import Task, Weights
from lmmods.core import throughput
from lmmods.core.console import say
from lmmods.core.errors import UserError
from lmmods.core.hardware import peak_flops
from lmmods.core.parity import Row
from lmmods.core.peers import Peers, check_timeout
from lmmods.core.progress_bar import Bar, describe
from lmmods.core.signals import Interruption
from lmmods.core.throughput import Stopwatch
from lmmods.data.base import DataModule
from lmmods.data.batch.loader import SegmentLoader, StatefulLoader
from lmmods.evaluation.mmlu import MMLUEvaluator
from lmmods.evaluation.samples import SampleWriter
from lmmods.recipe.trainer_fields import JaxTrainerFields, check_length
from lmmods.runs.checkpoint import read_plain
from lmmods.runs.checkpoint_policy import CheckpointPolicy
from lmmods.runs.csv_logger import Logger, MetricsCSV
from lmmods.runs.events import Event, Events, RunState
from lmmods.runs.folder import RunFolder, find_checkpoint_to_resume
from lmmods.runs.hub_upload import Publisher
from lmmods.runs.identity import RunIdentity
from lmmods.runs.inspect import show_data, show_recipe
from lmmods.runs.manifest import end_manifest
from lmmods.runs.model_card import complete_model
from lmmods.runs.progress import BatchSplit
from lmmods.runs.schedule import Schedule
from lmmods.runs.start import RunEnd, RunStart, RunSummary, say_engine
from lmmods.runs.step_metrics import StepMetrics, check_evaluated
from lmmods.runs.wandb import log_checkpoint, log_classes, log_predictions

# Training FLOPs that take about as long as compiling a program (seconds), on two CPU cores and on a GPU.
COMPILE_FLOPS = {"cpu": 1e12, "other": 1e15}


@dataclass(kw_only=True, eq=False, repr=False)
class Trainer(JaxTrainerFields):
    """Trainer on JAX, with the arguments of Lightning's Trainer and their meaning."""

    strategy: Literal["auto", "ddp", "fsdp"] | MeshSharding = "auto"
    logger: Logger | list[Logger] | bool | None = None
    callbacks: EarlyStopping | list[EarlyStopping] | None = None

    def __post_init__(self) -> None:
        check_length(self.max_epochs, self.max_steps)
        check_timeout(self.heartbeat_timeout)
        self.limits = {"train": self.limit_train_batches, "val": self.overfit_batches or self.limit_val_batches,
                       "test": self.limit_test_batches, "predict": self.limit_predict_batches}
        self.train_limit = self.limit_train_batches  # data modules read it from either engine's trainer
        self.num_sanity_val_steps = 2 if self.num_sanity_val_steps is None else self.num_sanity_val_steps
        self.log_every_n_steps = 50 if self.log_every_n_steps is None else self.log_every_n_steps
        self.callbacks = [self.callbacks] if isinstance(self.callbacks, EarlyStopping) else self.callbacks or []
        self.checkpoint, self.samples = CheckpointPolicy(), SampleWriter()
        self.mmlu, self.publish = MMLUEvaluator(), Publisher()
        self.run_folder = RunFolder(self.default_root_dir)
        # metrics.csv is always first: at the end, `Exporter.finish` finalizes the others.
        extra = self.logger if isinstance(self.logger, list) else [self.logger]
        self.run_loggers = [MetricsCSV(self.run_folder.metrics_csv),
                            *(logger for logger in extra if isinstance(logger, Logger))]
        self.recipe: dict[str, Any] = {}  # the full configuration, written as config.yaml
        self.identity = RunIdentity()
        self.interruption = Interruption(saves=self.enable_checkpointing)
        self._precision_reason: str | None = None
        # Attributes that the data modules read from a trainer. The data layer sees world size 1, because every process
        # iterates over all micro-batches (see `Prefetcher`).
        self.data_rank, self.num_data_ranks = 0, 1
        self.fed_ranks: tuple[tuple[int, ...], int] | None = None
        self.state = SimpleNamespace(fn=None)

    # Commands --------------------------------------------------------------------------------------------------------

    def fit(self, model: Task, train_dataloaders=None, val_dataloaders=None, datamodule=None,
            ckpt_path: str | None = None, overwrite: bool = False, stop_at: int | None = None) -> None:
        """Train."""
        self.interruption.stop_at = stop_at
        with self._in_run_folder("fit", model,
                                 lambda: self.run_folder.check_fit(ckpt_path, overwrite, self.recipe, stop_at)):
            self._fit(model, datamodule, find_checkpoint_to_resume(self.run_folder, ckpt_path))

    def _fit(self, model: Task, datamodule: DataModule, resumed: Path | None) -> None:
        if self.publish.repo is not None and (problem := self.publish.problem()):
            raise UserError(problem)
        run, loader = self.training_run(model, datamodule, resumed)
        model.begin(run)  # reads the initial weights, so before a checkpoint replaces them
        evaluation = Evaluation(run, self.samples, self.mmlu)
        checkpointer = Checkpointer(run, self.checkpoint, self.callbacks, self.identity)
        events = Events(self.checkpoint if self.enable_checkpointing else None, self.samples, self.mmlu, self.publish,
                        may_stop_early=bool(self.callbacks))
        loop = Loop(run, self.accumulate_grad_batches, events, evaluation, checkpointer, Exporter(run, self.publish),
                    self.callbacks, self.interruption)
        # Restore first: callbacks, `run.is_done` and the summary read what a checkpoint sets.
        if resumed:
            checkpointer.restore(resumed)
        # A list, because every callback must start, even if the first one stops the run.
        stopped = [callback.begin(run.schedule.num_val_batches > 0) for callback in self.callbacks]
        run.should_stop = any(stopped)
        # A run killed after its last step must still export; `was_complete` reports one that has.
        if resumed and run.is_done and self.run_folder.was_complete(run.progress.step, self.max_steps, self.max_epochs,
                                                                    stopped):
            return
        if not resumed and self.num_sanity_val_steps:
            # Before the run folder is prepared, so that an error in the validation data leaves it unchanged.
            evaluation.evaluate("val", limit=self.num_sanity_val_steps, keep=False)
        self._start(run, checkpointer, resumed)
        first_step, start_time = run.progress.step, time.perf_counter()
        try:
            loop.train(loader, resumed is not None)
            loop.finish()
        finally:
            run.bar.close()
            # Even after an error: the last checkpoint must be complete before the process ends.
            checkpointer.wait()
        if run.is_first:
            RunEnd(run.folder, model, datamodule, run.metrics, events.checkpoint, first_step, run.progress.step,
                   time.perf_counter() - start_time, run.loggers).say()

    def validate(self, model: Task = None, dataloaders=None, datamodule=None, ckpt_path: str | None = None) -> None:
        """Evaluate on the validation set."""
        with self._in_run_folder("validate", model):
            self._evaluate("validate", "val", model, datamodule, ckpt_path)

    def test(self, model: Task = None, dataloaders=None, datamodule=None, ckpt_path: str | None = None) -> None:
        """Evaluate on the test set."""
        with self._in_run_folder("test", model):
            self._evaluate("test", "test", model, datamodule, ckpt_path)

    def _evaluate(self, command: str, role: str, model: Task, datamodule: DataModule, ckpt_path: str | None) -> None:
        run = self._evaluated_run(command, model, datamodule, ckpt_path)
        evaluation = Evaluation(run, self.samples, self.mmlu)
        with closing(run.bar):
            run.bar.open(command, 0)
            metrics = evaluation.evaluate(role)
        check_evaluated(metrics)
        if self.mmlu.is_on:
            metrics |= evaluation.ask()
        run.bar.say(describe(metrics, f"{role}/"))
        if run.is_first:
            run.folder.merge_metrics(metrics)

    def predict(self, model: Task = None, dataloaders=None, datamodule=None, ckpt_path: str | None = None) -> None:
        """Write predictions.jsonl."""
        with self._in_run_folder("predict", model, lambda: self.run_folder.check_results(self.recipe)):
            self._predict(self._evaluated_run("predict", model, datamodule, ckpt_path))

    def _predict(self, run: Run) -> None:
        data, loader = run.data, run.data.predict_dataloader()
        num_batches = run.num_batches(loader, "predict")
        outputs: dict[int, Any] = {}
        with closing(run.bar):
            run.bar.open("predict", num_batches)
            for batch in run.batches(loader, data.eval_batch_size, num_batches):
                outputs |= run.task.outputs(run.steps, run.weights, batch, data, data.run_seed)
                run.bar.update()
        # Each process has the outputs of its own ranks.
        outputs = machines.gather(data.complete(outputs))
        if run.is_first:
            predictions = data.predictions(outputs)
            say(run.folder.write_predictions(predictions))
            log_predictions(self.run_loggers, predictions.rows)

    def inspect(self, model: Task = None, datamodule=None, rows: int = 4,
                which: Literal["first", "longest", "most_cut", "most_unknown"] | list[int] = "first",
                recipe: bool = False) -> None:
        """Print the training data and the memory of a training step, without training."""
        self.connect()
        self._say_engine()
        run, loader = self.training_run(model, datamodule, None)
        show_data(datamodule, rows, which)
        print()
        # Only this batch's shapes matter: the step is compiled for rows of maximum length, but does not run.
        batch = next(iter(run.batches(loader, datamodule.batch_size, 1)))
        run.memory = step_memory(run.steps, run.state, run.weights.frozen, batch.arrays, run.scalars(),
                                 datamodule.max_length, self.accumulate_grad_batches > 1, present_target())
        self._summary(run).say(datamodule)
        if recipe:
            show_recipe(self.recipe, datamodule)

    def measure(self, model: Task, datamodule: DataModule, rows: list[Row], folder: Path) -> None:
        """Write loss, logits and gradient of `rows` to `folder`, for comparison with torch. Does not train."""
        self.connect()
        self._say_engine()
        measure(model, datamodule, rows, folder)

    @property
    def batches_per_step(self) -> int:
        """Micro-batches per optimiser step, over all data-parallel ranks."""
        return self.accumulate_grad_batches * self.parallel.data_parallel_size

    def _batch_split(self, data: DataModule) -> BatchSplit:
        """Return how an optimiser step is split into micro-batches."""
        return BatchSplit(data.batch_size, self.accumulate_grad_batches, self.parallel.data_parallel_size)

    @property
    def is_global_zero(self) -> bool:
        """True on the first process, the only one that prints and writes files."""
        return jax.process_index() == 0

    # Start -----------------------------------------------------------------------------------------------------------

    def connect(self) -> None:
        """Set up the devices, connect to the other processes, and resolve `precision: auto`."""
        self.parallel: Parallel = machines.start(self.accelerator, self.devices, self.num_nodes, self.strategy,
                                                self.detect_anomaly, self.heartbeat_timeout)
        # The loader then reads only the rows of this process's ranks (see `Prefetcher`).
        if jax.process_count() > 1:
            self.fed_ranks = self.parallel.local_ranks, self.parallel.data_parallel_size
        if self.precision == "auto":
            self.precision, self._precision_reason = machines.choose_precision()
            if self.recipe:
                self.recipe["trainer"]["precision"] = self.precision
        machines.keep_float32(self.precision, jax.local_devices()[0].platform)

    def _say_engine(self) -> None:
        device = jax.local_devices()[0]
        device_name = "CPU" if device.platform == "cpu" else device.device_kind
        say_engine("jax", self.parallel.num_devices, device_name, self.precision, self._precision_reason)

    @contextmanager
    def _in_run_folder(self, command: str, model: Task, check: Callable[[], None] = lambda: None) -> Iterator[None]:
        """Lock the run folder during a command, then end the model.

        Raises:
            UserError: The first process cannot lock the folder. All processes raise the same error.
        """
        self.connect()
        self._say_engine()
        folder, is_multi_process = self.run_folder, jax.process_count() > 1
        Peers.current().connect_all(jax.process_index(), jax.process_count(), machines.broadcast,
                                    self.heartbeat_timeout)
        with (Peers.current().end_together(),
              folder.lock(command, check, jax.process_index() == 0, stores_error=is_multi_process)):
            if problems := machines.gather({0: str(folder.problem)} if folder.problem else {}):
                raise UserError(problems[0])
            try:
                yield
            finally:
                model.end()

    def _evaluated_run(self, command: str, model: Task, datamodule: DataModule, ckpt_path: str | None) -> Run:
        """Return a run for evaluation, with the parameters of the checkpoint, or the initial ones if there is none."""
        checkpoint = self.run_folder.resolve(ckpt_path) if ckpt_path is not None else None
        run = self._prepare(command, model, datamodule, checkpoint)
        model.begin(run)
        if checkpoint:
            load_weights(run, checkpoint)
        return run

    def training_run(self, model: Task, datamodule: DataModule, checkpoint: Path | None) -> tuple[Training, Any]:
        """Return a run before its first step, and its training loader."""
        run, loader = self._prepare("fit", model, datamodule, checkpoint), datamodule.train_batches()
        schedule = Schedule.from_keys(
            batches_per_epoch=run.num_batches(loader, "train"), batches_per_step=self.accumulate_grad_batches,
            num_val_batches=run.num_batches(datamodule.val_dataloader(), "val"), max_epochs=self.max_epochs,
            max_steps=self.max_steps, val_check_interval=self.val_check_interval,
            val_epochs=self.check_val_every_n_epoch)
        peak, state = peak_flops(present_target().device), run.steps.new_state(run.weights.trainable)
        flops_fraction = run.flops_per_token / (peak * self.parallel.num_devices) if peak else None
        # Bound here and extended in place by `_start`: `run.loggers = ...` would leave `report` with the empty list.
        loggers = run.loggers  # empty until the run folder is ready

        def report(values: dict[str, float], step: int) -> None:
            for logger in loggers:
                logger.log_metrics(values, step=step)

        metrics = StepMetrics(run.stopwatch, self.log_every_n_steps, lambda: flops_fraction, report, run.bar.update)
        # The parameters of `run.weights` were donated to `new_state`: `replace_state` takes the new ones.
        training = Training(**vars(run), schedule=schedule, metrics=metrics, state=state,
                            lengths=self._lengths(loader, run, schedule.num_steps * self.accumulate_grad_batches))
        training.replace_state(state)
        return training, loader

    def _lengths(self, loader: Any, run: Run, num_batches: int) -> tuple[int, ...]:
        """Return the lengths that training batches are padded to; empty for a stream, whose rows are unknown.

        Args:
            num_batches: Micro-batches of each rank in the run.
        """
        if not isinstance(loader, StatefulLoader):
            return ()
        if isinstance(loader, SegmentLoader):  # some rows are not sampled yet
            return halve_lengths(run.data.max_length)
        # The micro-batches of all ranks in a step have one length.
        lengths, ranks = loader.lengths(), self.parallel.data_parallel_size
        lengths = [max(lengths[start:start + ranks]) for start in range(0, len(lengths), ranks)]
        on_cpu = present_target().platform == "cpu"
        rows = run.data.batch_size * run.data.sequences_per_row
        tokens = COMPILE_FLOPS["cpu" if on_cpu else "other"] / (run.flops_per_token * rows)
        return choose_padded_lengths(lengths, run.data.max_length, on_cpu, tokens * len(lengths) / num_batches)

    def _prepare(self, command: str, model: Task, datamodule: DataModule, checkpoint: Path | None) -> Run:
        """Set up the data and the network, and copy the initial parameters to the devices.

        The data module takes settings from `checkpoint`, which must match this run.
        """
        self.state.fn = SimpleNamespace(value=command)
        datamodule.trainer = self
        if checkpoint:
            datamodule.resume_from(read_plain(checkpoint))
        # The first process fills the cache; the others read it afterwards.
        datamodule.adopt_contents(machines.call_on_first(lambda: self._prepare_data(datamodule, checkpoint)))
        datamodule.setup(command)
        model.link(datamodule)
        if command == "fit":
            self.samples.prepare(datamodule, model.max_positions())
        # `choice_ids` become constants of the compiled `predict`: set them before it is traced.
        if command != "predict" and self.mmlu.is_on:
            self.mmlu.prepare(datamodule, model)
            model.choice_ids = self.mmlu.choice_ids
        trainable, frozen = model.build(self.precision, datamodule, datamodule.run_seed)
        check_expert_mesh(self.parallel.expert_size, model.network.config.model_type, model.network.arch.experts)
        optimizer = build(model.optimizer, model.network.decays(trainable), model.network.depths(trainable)
                          ) if command == "fit" else None
        clipping = Clipping(self.gradient_clip_val, self.gradient_clip_algorithm or "norm")
        chunk_tokens = model.chunk_tokens(self.parallel.num_devices)
        memory = model.step_memory(trainable, frozen, self.precision, datamodule, present_target(), chunk_tokens,
                                   self.accumulate_grad_batches > 1)
        bar = Bar(self.enable_progress_bar and jax.process_index() == 0, machines.peak_memory, compile_clock())
        return Run(
            folder=self.run_folder, data=datamodule, task=model, description=model.describe(trainable, frozen),
            memory=memory, flops_per_token=model.flops_per_token(trainable, frozen), parallel=self.parallel,
            steps=Steps(self.parallel, model.batch_loss, optimizer, clipping, model.predict, model.metric_names,
                        model.survey, model.statistic_names, chunk_tokens),
            weights=Weights(self.parallel, self.parallel.put_state(trainable), self.parallel.put_state(frozen)),
            limits=self.limits, bar=bar, stopwatch=Stopwatch(compile_clock()))

    def _prepare_data(self, data: DataModule, checkpoint: Path | None) -> dict[str, Any]:
        """Check the data against the checkpoint, then fill the cache. Return the contents of the sources."""
        is_fit = self.state.fn.value == "fit"
        identity = self.identity
        for line in (identity.resolve(data, checkpoint, self._batch_split(data)) if is_fit
                     else identity.check_evaluation(checkpoint)):
            say(line)
        data.prepare_data()
        return data.sources.contents

    def _start(self, run: Training, checkpointer: Checkpointer, resumed: Path | None) -> None:
        """Prepare the run folder, start the loggers and print the run's summary."""
        # From here on a signal stops the run with a checkpoint; before, it just ends the process.
        self.interruption.listen()
        step = run.progress.step
        start = RunStart(run.folder, self.identity, self.recipe, run.data, machines.describe(self.parallel), resumed,
                         step)
        if run.is_first:
            start.make_folder_ready()
            self.samples.begin(self.run_folder, step if resumed else None)
            if resumed and self.enable_checkpointing:
                checkpointer.resume_from(resumed)
        # No process may write to the folder before it is ready.
        machines.barrier("run folder")
        run.loggers += self.run_loggers if run.is_first else []
        start.begin_logging(run.loggers)
        if run.is_first:
            start.say(self._summary(run))
            if len(run.lengths) > 1:
                lengths = ", ".join(map(str, run.lengths))
                say(f"Lengths: batches are padded to {lengths} tokens, and a program is compiled for each.")

    def _summary(self, run: Training) -> RunSummary:
        """Return the summary that is printed before the first step."""
        return RunSummary(run.task, run.description, run.schedule, self.parallel.data_parallel_size, run.memory)


# ---------------------------------------------------------------------------------------------------------------------
# Evaluation on JAX, during and after training: validation and test sets, multiple-choice questions, samples.

class Evaluation:
    """Evaluation without dropout or side effects on training. All processes must call each method."""

    def __init__(self, run: Run, samples: SampleWriter, mmlu: MMLUEvaluator):
        self._run, self.samples, self.mmlu = run, samples, mmlu

    def evaluate(self, role: str, limit: int | None = None, keep: bool = True) -> dict[str, float]:
        """Return the metrics over a split; empty if there is no such split.

        Args:
            role: `val` or `test`.
            limit: Maximum number of global batches; None or -1 uses all.
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
        weights = run.eval_weights
        for batch in run.batches(loader, data.eval_batch_size, num_batches):
            run.task.evaluate(run.steps, weights, batch)
        metrics, files = run.task.eval_results(role, data)
        if keep and run.is_first:
            run.folder.write_files(files)
            log_classes(run.loggers, files, role, run.progress.step)
        return {f"{role}/{name}": value for name, value in metrics.items()}

    def ask(self) -> dict[str, float]:
        """Return the metrics of the multiple-choice questions."""
        run, data = self._run, self._run.data
        with run.stopwatch.paused():
            batches = self.mmlu.batches(data, rank=0, world_size=1)  # every process reads all (see `Prefetcher`)
            global_batches = run.batches(batches, data.eval_batch_size, math.inf, max_length=self.mmlu.max_length)
            # Each process has the logits of its own rows.
            logits = machines.gather(run.task.choice_logits(run.steps, run.eval_weights, global_batches))
        return self.mmlu.score(run.progress.step, logits)

    def sample(self) -> None:
        """Generate from the fixed prompts."""
        run, tokenizer, step = self._run, self._run.data.tokenizer, self._run.progress.step
        with run.stopwatch.paused():
            # A new Weights object, so that its cached replica is freed afterwards.
            weights = Weights(run.parallel, run.eval_weights.trainable, run.weights.frozen)
            tokens = generate(run.task.network, weights.replica, self.samples.prompt_ids, self.samples.generation,
                              run.data.codec.stop_token_ids, tokenizer.pad_token_id)
            if run.is_first:
                self.samples.write(step, run.data.codec.decode_answers(tokens), run.loggers)
        self.samples.latest_step = step


# ---------------------------------------------------------------------------------------------------------------------
# Results of a JAX run: the model folder with its card, the plot of the loss, and uploads.

class Exporter:
    """Export and upload of the model. All processes must call each method."""

    def __init__(self, run: Training, publish: Publisher):
        self._run, self._publish = run, publish

    def upload(self) -> None:
        """Upload the current model in the background, unless the previous upload is still in progress."""
        run, publish, step = self._run, self._publish, self._run.progress.step
        # All processes must decide the same: fetching the state is a collective call.
        if machines.any_of(publish.is_busy):
            return say(f"The upload to {publish.repo} is still running; step {step} is not uploaded.")
        with run.stopwatch.paused():
            # In the foreground, because the next step reuses the buffers. Only the upload runs during training.
            params = run.task.fetch_export_params(run.eval_weights, run.parallel)
            if run.is_first:
                folder = run.folder.create_upload_folder()
                self._write(params, folder)
                publish.start_upload(folder, step)

    def finish(self) -> None:
        """Write model/ and loss.png and mark the run completed."""
        run, folder, step = self._run, self._run.folder, self._run.progress.step
        # On all processes, although only the first one writes: a collective call.
        params = run.task.fetch_export_params(run.eval_weights, run.parallel)
        if run.is_first:
            folder.merge_metrics(run.metrics.final(step))
            exported = folder.create_model_folder()
            self._write(params, exported)
            # Written to another folder first, so that a failed export keeps the old model.
            folder.replace_model(exported)
            log_checkpoint(run.loggers, folder.find("last"), ends=True)
            end_manifest(folder, step)
            folder.complete()
            say(f"Wrote {folder.model}.")
        for logger in run.loggers[1:]:
            logger.finalize("success")
        machines.barrier("export")

    def publish(self) -> None:
        """Upload model/."""
        if self._run.is_first:
            self._publish.finish(self._run.folder.model, self._run.progress.step)
        machines.barrier("publish")

    def _write(self, params: Tree, path: Path) -> None:
        run, task = self._run, self._run.task
        task.export(params, path)
        complete_model(path, run.folder, task, task.auto_class, run.data)


# ---------------------------------------------------------------------------------------------------------------------
# The training loop. For each step: feed, compute, events (log, sample, validate, save, stop); then the end.

class Loop:
    """Training loop, which runs until the schedule or early stopping ends it.

    Args:
        accumulate: Micro-batches of each rank per optimiser step; the last step of an epoch may have fewer.
        events: Which events follow a step, and in which order.
        interruption: Whether the user has asked to stop.
    """

    def __init__(self, run: Training, accumulate: int, events: Events, evaluation: Evaluation,
                 checkpointer: Checkpointer, exporter: Exporter, callbacks: list[EarlyStopping],
                 interruption: Interruption):
        self.run, self.interruption = run, interruption
        self._accumulate, self._events, self._callbacks = accumulate, events, callbacks
        self._evaluation, self._checkpointer, self._exporter = evaluation, checkpointer, exporter
        self._step_metrics: Any = None  # metrics of the latest optimiser step, still on the devices

    def train(self, loader: Any, resumed: bool) -> None:
        """Train to the last step; `finish` performs what follows."""
        run, progress = self.run, self.run.progress
        self._perform(self._events.at_start(resumed))
        run.bar.open("train", run.schedule.num_steps, progress.step, "compiling", run.schedule.validations_after)
        # Until a step is done, the position is where the loader starts.
        run.data_position = run.data.state_dict()
        run.stopwatch.start()
        while not run.is_done:
            if run.ends_epoch:
                progress.epoch, progress.epoch_step = progress.epoch + 1, 0
                # The prefetcher has read ahead of the last step: rewind the loader to it.
                loader.load_state_dict(run.data_position)
            # A resumed run may start in the middle of an epoch.
            batches_left = run.schedule.batches_per_epoch - progress.epoch_step * self._accumulate
            if isinstance(loader, SegmentLoader):
                batches_left = min(batches_left, self._begin_segment(loader))
            with closing(run.batches(loader, run.data.batch_size, batches_left, lengths=run.lengths)) as batches:
                while batches_left > 0 and not run.is_done:
                    num_batches = min(self._accumulate, batches_left)
                    self.train_step(islice(batches, num_batches), num_batches)
                    batches_left -= num_batches

    def _begin_segment(self, loader: SegmentLoader) -> int:
        """Sample the answers that the next steps train on, unless they exist; return their number of batches.

        The stopwatch runs: sampling is part of training, and counts in its speed.
        """
        run = self.run
        # Fetch the previous steps first: an error in them ends the run here, and their metrics are older.
        run.metrics.fetch()
        run.bar.note("sampling")
        # The loader stops at the end of a segment, so that nothing reads ahead of answers that do not exist yet.
        # Sampling runs in this thread, in which all processes make their collective calls.
        loader.starts_itself = False
        loader.load_state_dict(run.data_position)
        return -(-loader.begin_segment() // run.parallel.data_parallel_size)

    def train_step(self, batches: Iterator[GlobalBatch], num_batches: int) -> None:
        """Take an optimiser step and perform the events that are due after it.

        Args:
            batches: The step's micro-batches, each with one per rank.
        """
        run, steps, frozen = self.run, self.run.steps, self.run.weights.frozen
        run.metrics.look()
        # None of these calls waits for the device, so it computes while the host collates the next batches.
        if num_batches == 1:
            # Without the accumulation, which is as large as the parameters in float32.
            batch = next(batches)
            state, step_metrics = steps.full_step(run.state, frozen, batch.arrays, run.scalars())
        else:
            accumulation = steps.new_accumulation(run.state)
            if steps.surveys:  # the loss needs statistics of the whole step
                batches = list(batches)
                for batch in batches:
                    accumulation = steps.survey(run.state, frozen, accumulation, batch.arrays)
            for batch in batches:
                run.metrics.look()
                # Other processes would continue without this one.
                if jax.process_count() == 1 and self.interruption.is_due:
                    self._perform(self._events.inside_step(self._run_state()))
                accumulation = steps.accumulate(run.state, frozen, accumulation, batch.arrays)
            state, step_metrics = steps.update(run.state, accumulation, run.scalars())
        run.replace_state(state)
        run.progress.epoch_step, run.progress.step = run.progress.epoch_step + 1, run.progress.step + 1
        run.data_position, self._step_metrics = batch.position, step_metrics

        # Events. `--stop_at` the last step of the run interrupts nothing.
        if not run.is_done:
            self.interruption.note_step(run.progress.step)
        # An error of the background writer ends the run here, not at the next checkpoint.
        self._checkpointer.check()
        self._perform(self._events.after_step(self._run_state()))

    def finish(self) -> None:
        """Perform the events at the end of the run; return once everything is on disk."""
        self._perform(self._events.at_end(self._run_state()))

    # Events ----------------------------------------------------------------------------------------------------------

    def _run_state(self) -> RunState:
        run = self.run
        return RunState(
            run.progress.step, run.ends_epoch,
            validates=lambda: run.schedule.num_val_batches > 0 and (
                run.is_done or run.schedule.validates_after(run.progress)),
            run_ends=lambda: run.is_done,
            # Signals reach processes at different times: all stop after the same step.
            is_interrupted=lambda: machines.any_of(self.interruption.is_due),
            is_saved=self._checkpointer.is_saved)

    def _perform(self, events: Iterator[Event]) -> None:
        run, evaluation, checkpointer = self.run, self._evaluation, self._checkpointer
        for event in events:
            if event is not Event.LOG:  # all other events need the metrics of past steps, so wait for the device
                run.metrics.fetch()
            match event:
                case Event.LOG:
                    run.note_step(self._step_metrics)
                case Event.CHECK_EPOCH:
                    self._check(validated=False)
                case Event.SAMPLE:
                    evaluation.sample()
                case Event.ASK:
                    run.metrics.log(evaluation.ask(), run.progress.step)
                case Event.VALIDATE:
                    self._validate()
                case Event.CHECK_VALIDATION:
                    self._check(validated=True)
                case Event.RANK:
                    checkpointer.rank(run.metrics.latest)
                case Event.SAVE:
                    checkpointer.save()
                case Event.STOP:
                    self._stop()
                case Event.UPLOAD:
                    self._exporter.upload()
                case Event.FINISH:
                    # The last checkpoint first: `complete` must not be true of a run without it.
                    checkpointer.wait()
                    self._exporter.finish()
                case Event.PUBLISH:
                    self._exporter.publish()

    def _validate(self) -> None:
        run = self.run
        run.bar.pause()
        with run.stopwatch.paused():
            metrics = self._evaluation.evaluate("val")
        run.bar.resume()
        run.metrics.log(metrics, run.progress.step)
        run.bar.say(describe(metrics, "val/"))

    def _check(self, validated: bool) -> None:
        """Check early stopping, after a validation or at the end of an epoch without one."""
        for callback in self._callbacks:
            if callback.is_due(validated, self.run.ends_epoch) and callback.check(self.run.metrics.latest):
                self.run.should_stop = True

    def _stop(self) -> None:
        # Every process writes part of the checkpoint: none may exit before all parts exist.
        self._checkpointer.wait()
        machines.barrier("checkpoint")
        self.interruption.stop(self.run.progress.step,
                               self._checkpointer.path if self._events.checkpoint is not None else None)


# ---------------------------------------------------------------------------------------------------------------------
# A clock that stops while programs are traced and compiled, so that speeds and remaining times exclude compilation.

# Prefix of JAX's events for tracing, lowering and compiling (or loading from the cache on disk); they may be nested.
COMPILE_EVENTS = "/jax/core/compile/"


class CompileClock:
    """Clock in seconds that excludes the time in which this process traced or compiled programs."""

    def __init__(self) -> None:
        self._spans: list[tuple[float, float]] = [(float("-inf"), 0.0)]  # start, total up to this one

    def __call__(self) -> float:
        return throughput.now() - self._spans[-1][1]

    def note(self, event: str, seconds: float, **_: object) -> None:
        """Record one of JAX's monitoring events when it ends. Nested events end first."""
        if not event.startswith(COMPILE_EVENTS):
            return
        # Drop the spans inside this one: its seconds include theirs.
        start = throughput.now() - seconds
        while self._spans[-1][0] >= start:
            self._spans.pop()
        self._spans.append((start, self._spans[-1][1] + seconds))


@cache
def compile_clock() -> CompileClock:
    """Return this process's clock; the first call registers its listener."""
    clock = CompileClock()
    monitoring.register_event_duration_secs_listener(clock.note)
    return clock
