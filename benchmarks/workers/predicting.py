"""Run our `predict` on torch, and print the CPU time after loading and the part of it within the network."""

import contextlib
import json
import sys
import time
from pathlib import Path

from rounds import read_settings


class Clock:
    """Clock of the CPU time within the network's forward pass and since prediction started."""

    def __init__(self):
        self.inside, self.calls = 0.0, 0

    def begin(self, network) -> None:  # noqa: ANN001
        """Start once everything is loaded."""
        network.register_forward_pre_hook(lambda *_: self._enter())
        network.register_forward_hook(lambda *_: self._leave())
        self._start_time = time.process_time()

    def end(self) -> None:
        """Stop once the predictions are written."""
        self.total = time.process_time() - self._start_time

    def _enter(self) -> None:
        self._enter_time = time.process_time()

    def _leave(self) -> None:
        self.inside += time.process_time() - self._enter_time
        self.calls += 1


def main() -> None:
    settings = read_settings()
    sys.path.insert(0, settings["root"])
    from lmmods.cli import main as run
    from lmmods.torch_engine.callbacks.evaluation import PredictionWriter

    clock = Clock()
    end = PredictionWriter.on_predict_end

    def on_predict_start(self, trainer, module) -> None:  # noqa: ANN001
        model = module.model
        clock.begin(model.get_base_model() if hasattr(model, "get_base_model") else model)

    def on_predict_end(self, trainer, module) -> None:  # noqa: ANN001
        end(self, trainer, module)
        clock.end()

    PredictionWriter.on_predict_start, PredictionWriter.on_predict_end = on_predict_start, on_predict_end
    with contextlib.redirect_stdout(sys.stderr):
        status = run(["predict", *settings["options"], "--engine", "torch", "--trainer.default_root_dir",
                      str(Path(settings["folder"]) / "predict")])
    if status:
        sys.exit(status)
    print(json.dumps({"inside": clock.inside, "total": clock.total, "calls": clock.calls}))


if __name__ == "__main__":
    main()
