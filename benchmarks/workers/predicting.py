"""Our `predict` on torch: which share of its CPU time after loading is spent within the network."""

import contextlib
import json
import sys
import time
from pathlib import Path

from rounds import settings


class Clock:
    """CPU-seconds within the network's forward, and since prediction began."""

    def __init__(self):
        self.inside, self.calls = 0.0, 0

    def begin(self, network) -> None:  # noqa: ANN001
        """Start once everything is loaded."""
        network.register_forward_pre_hook(lambda *_: self._enter())
        network.register_forward_hook(lambda *_: self._leave())
        self._began = time.process_time()

    def end(self) -> None:
        """Stop once the predictions are written."""
        self.total = time.process_time() - self._began

    def _enter(self) -> None:
        self._entered = time.process_time()

    def _leave(self) -> None:
        self.inside += time.process_time() - self._entered
        self.calls += 1


def main() -> None:
    asked = settings()
    sys.path.insert(0, asked["root"])
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
        status = run(["predict", *asked["options"], "--engine", "torch", "--trainer.default_root_dir",
                      str(Path(asked["folder"]) / "predict")])
    if status:
        sys.exit(status)
    print(json.dumps({"inside": clock.inside, "total": clock.total, "calls": clock.calls}))


if __name__ == "__main__":
    main()
