"""Measure the cost of each training technique: a step with it compared with the same step without, on both engines.

    python benchmarks/tricks.py                         all techniques, about half an hour on 2 cores
    python benchmarks/tricks.py --only neftune muon     techniques whose names start with one of these
    python benchmarks/tricks.py --engines jax

Two processes with the same weights and rows step in turn. A cost is the ratio of their CPU-seconds per token, by the
medians over the rounds. README.md in this folder has the last table.
"""

import argparse
import sys
import tempfile
from dataclasses import dataclass, replace
from pathlib import Path

from pair import Side, compare, ratio
from table import Row, markdown
from work import Work

FULL, LORA = Work("clm", "llama-a", 512), Work("sft", "llama-a", 512, method="lora")
LIMIT = 1.05


@dataclass(frozen=True)
class Trick:
    """Recipe keys that change a step.

    Args:
        name: Name for `--only`.
        options: Options as on the command line; `{folder}` is the folder of the work.
        work: Model and task to train.
        limit: Maximum cost; None if the technique needs more arithmetic.
    """

    name: str
    options: dict[str, str]
    work: Work = FULL
    limit: float | None = LIMIT


TRICKS = [
    Trick("lora+", {"model.optimizer.b_lr_ratio": "16"}, LORA),
    Trick("neftune", {"model.neftune_alpha": "5"}, LORA),
    Trick("dft", {"model.dft": "true"}, LORA),
    Trick("label-smoothing", {"model.label_smoothing": "0.1"}),
    Trick("z-loss", {"model.z_loss": "1e-4"}),
    Trick("layer-decay", {"model.optimizer.layer_decay": "0.9"}),
    Trick("frozen-embeddings", {"model.frozen_parameters": "[model.embed_tokens.weight]"}),
    Trick("muon", {"model.optimizer.name": "muon"}, limit=None),
    Trick("ema", {"model.optimizer.ema_decay": "0.999"}, limit=None),
    # The teacher is as large as the student, so its forward pass needs half the arithmetic of a step without it.
    Trick("distillation", {"model.teacher": "{{pretrained: {folder}/model}}"}, limit=None),
]


def measure(trick: Trick, engine: str, folder: Path, rounds: int, steps: int, warm_up: int) -> Row:
    """Measure the cost of a technique on an engine, on the work in `folder`."""
    settings = {"folder": str(folder), "warm_up": warm_up, "steps": steps, "engine": engine}
    options = [part for key, value in trick.options.items() for part in (f"--{key}", value.format(folder=folder))]
    fixed = ["--trainer.precision", "32-true"]
    # Separate run folders: by default, ours.py names them after the engine.
    with_side, without_side = (
        Side(sys.executable, "ours.py", {**settings, "out": name, "options": [*fixed, *more]})
        for name, more in (("with", options), ("without", [])))
    trick_result, plain_result = compare(with_side, without_side, rounds)
    round_ratios = [b / a for a, b in zip(trick_result.speed, plain_result.speed, strict=True)]
    return Row(f"{trick.name}, {trick.work.task} {trick.work.method}, {engine}", "the step without",
               ratio(plain_result.speed, trick_result.speed), "" if trick.limit is None else f"<= {trick.limit}",
               f"rounds {min(round_ratios):.2f} to {max(round_ratios):.2f}; "
               f"memory {trick_result.peak:.2f} / {plain_result.peak:.2f} GiB")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="*", default=[""], help="name prefixes: "
                        + ", ".join(trick.name for trick in TRICKS))
    parser.add_argument("--engines", nargs="*", choices=["torch", "jax"], default=["torch", "jax"])
    parser.add_argument("--rounds", type=int, default=5)
    args = parser.parse_args()
    rows = []
    with tempfile.TemporaryDirectory() as temporary:
        for trick in TRICKS:
            if not trick.name.startswith(tuple(args.only)):
                continue
            for engine in args.engines:
                folder = Path(temporary) / f"{trick.work.task}-{engine}"
                if not folder.exists():
                    # Few rows, so that the JAX engine compiles every row length within the warm-up.
                    replace(trick.work, num_rows=400).write(folder)
                rows.append(measure(trick, engine, folder, args.rounds, 6, 30 if engine == "jax" else 6))
                print(markdown(rows[-1:]).splitlines()[-1], flush=True)
    print(markdown(rows))


if __name__ == "__main__":
    main()
