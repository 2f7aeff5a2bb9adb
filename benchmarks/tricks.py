"""What each training trick costs: a step with it compared with the same step without, on both engines.

    python benchmarks/tricks.py                         every one, about half an hour on 2 cores
    python benchmarks/tricks.py --only neftune muon     those whose names begin so
    python benchmarks/tricks.py --engines jax

Two processes with the same weights and rows step in turn; a cost is the ratio of their CPU-seconds per token, medians
over the rounds. README.md beside this file has the last table.
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
    """Keys of a recipe that change a step.

    Args:
        name: For `--only`.
        options: As on the command line; `{folder}` is that of the work.
        work: What is trained.
        limit: Largest cost; None where the trick is more arithmetic by nature.
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
    # The teacher is as large as the student; its forward pass is half of what a step without costs by arithmetic.
    Trick("distillation", {"model.teacher": "{{pretrained: {folder}/model}}"}, limit=None),
]


def measure(trick: Trick, engine: str, folder: Path, rounds: int, steps: int, warm_up: int) -> Row:
    """The cost of a trick on an engine; its work lies in a folder."""
    asked = {"folder": str(folder), "warm_up": warm_up, "steps": steps, "engine": engine}
    options = [part for key, value in trick.options.items() for part in (f"--{key}", value.format(folder=folder))]
    fixed = ["--trainer.precision", "32-true"]
    # Each has a run folder of its own: ours.py names it by the engine.
    with_it, without = (
        Side(sys.executable, "ours.py", {**asked, "out": name, "options": [*fixed, *more]})
        for name, more in (("with", options), ("without", [])))
    trick_side, plain = compare(with_it, without, rounds)
    each = [b / a for a, b in zip(trick_side.speed, plain.speed, strict=True)]
    return Row(f"{trick.name}, {trick.work.task} {trick.work.method}, {engine}", "the step without",
               ratio(plain.speed, trick_side.speed), "" if trick.limit is None else f"<= {trick.limit}",
               f"rounds {min(each):.2f} to {max(each):.2f}; memory {trick_side.peak:.2f} / {plain.peak:.2f} GiB")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="*", default=[""], help="beginnings of names: "
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
                    # The JAX engine compiles each length of row when it first meets it, within the warm-up.
                    replace(trick.work, num_rows=400).write(folder)
                rows.append(measure(trick, engine, folder, args.rounds, 6, 30 if engine == "jax" else 6))
                print(markdown(rows[-1:]).splitlines()[-1], flush=True)
    print(markdown(rows))


if __name__ == "__main__":
    main()
