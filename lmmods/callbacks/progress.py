"""One bar per phase on a terminal, plain lines elsewhere."""

import sys
import time
from typing import Any

import lightning as L
from lightning.pytorch.utilities.rank_zero import rank_zero_only
from tqdm import tqdm


class Progress(L.Callback):
    """Steps, loss, tokens/s and the time left."""

    def __init__(self) -> None:
        self._bar: tqdm | None = None
        self._started = (0, 0.0)  # step, clock

    # Training --------------------------------------------------------------------------------------------------------

    def on_train_start(self, trainer: L.Trainer, *_: Any) -> None:
        self._started = (trainer.global_step, time.perf_counter())
        self._open("train", int(trainer.estimated_stepping_batches), trainer.global_step, unit="step")

    def on_train_batch_end(self, trainer: L.Trainer, module: L.LightningModule, *_: Any) -> None:
        if module.window.is_open:
            return
        is_logged = trainer.global_step % trainer.log_every_n_steps == 0
        text = _describe(trainer.callback_metrics) if is_logged else ""
        if self._bar is not None:
            if text:
                self._bar.set_postfix_str(text, refresh=False)
            self._bar.update(trainer.global_step - self._bar.n)
        elif is_logged:
            self._line(trainer, text)

    @rank_zero_only
    def _line(self, trainer: L.Trainer, text: str) -> None:
        first, since = self._started
        total = int(trainer.estimated_stepping_batches)
        left = (time.perf_counter() - since) / (trainer.global_step - first) * (total - trainer.global_step)
        print(f"step {trainer.global_step}/{total}  {text}  {_clock(left)} left", flush=True)

    def on_train_end(self, *_: Any) -> None:
        self._close()

    def on_exception(self, *_: Any) -> None:
        self._close()

    # Evaluation and prediction ---------------------------------------------------------------------------------------

    def on_validation_start(self, trainer: L.Trainer, *_: Any) -> None:
        if trainer.state.fn == "validate":
            self._open("validate", sum(trainer.num_val_batches))

    def on_test_start(self, trainer: L.Trainer, *_: Any) -> None:
        self._open("test", sum(trainer.num_test_batches))

    def on_predict_start(self, trainer: L.Trainer, *_: Any) -> None:
        self._open("predict", sum(trainer.num_predict_batches))

    def on_validation_batch_end(self, trainer: L.Trainer, *_: Any) -> None:
        if trainer.state.fn == "validate" and self._bar is not None:
            self._bar.update()

    def on_test_batch_end(self, *_: Any) -> None:
        if self._bar is not None:
            self._bar.update()

    on_predict_batch_end = on_test_batch_end

    def on_validation_end(self, trainer: L.Trainer, *_: Any) -> None:
        if trainer.state.fn == "validate":
            self._close()
        if not trainer.sanity_checking:
            self._say(_describe(trainer.callback_metrics, "val/"))

    def on_test_end(self, trainer: L.Trainer, *_: Any) -> None:
        self._close()
        self._say(_describe(trainer.callback_metrics, "test/"))

    def on_predict_end(self, *_: Any) -> None:
        self._close()

    # How -------------------------------------------------------------------------------------------------------------

    @rank_zero_only
    def _open(self, phase: str, total: int, initial: int = 0, unit: str = "batch") -> None:
        if sys.stderr.isatty():
            self._bar = tqdm(total=total, initial=initial, desc=phase, unit=unit, dynamic_ncols=True)

    def _close(self) -> None:
        if self._bar is not None:
            self._bar.close()
            self._bar = None

    @rank_zero_only
    def _say(self, text: str) -> None:
        tqdm.write(text) if self._bar is not None else print(text, flush=True)


def _describe(metrics: dict[str, Any], prefix: str = "train/") -> str:
    shown = ("loss", "lr", "tokens_per_second") if prefix == "train/" else tuple(
        name.removeprefix(prefix) for name in metrics if name.startswith(prefix))
    label = "" if prefix == "train/" else prefix
    return "  ".join(f"{label}{name} {float(metrics[prefix + name]):.4g}" for name in shown if prefix + name in metrics)


def _clock(seconds: float) -> str:
    minutes, seconds = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{seconds:02}"
