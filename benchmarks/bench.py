"""Our speed and memory beside what people would use instead: `make bench`.

    python benchmarks/bench.py                          every comparison, about an hour on 2 cores
    python benchmarks/bench.py --only qlora-trl clm     those whose names begin so
    python benchmarks/bench.py --rows alpaca.json --tokenizer FOLDER    on real instructions
    python benchmarks/bench.py --full                   sequences of 256, 512 and 1024 as well

Ours and a peer train the same weights on the same rows, in processes of their own that step in turn; a speed is real
tokens (no padding) per CPU-second, and a ratio is one of medians over the rounds. Before training both must find the
same loss on the same batch. Peers live in environments that are made here, in benchmarks/.environments. README.md
beside this file has the last table.
"""

import argparse
import shutil
import subprocess
import sys
import tempfile
import venv
from dataclasses import dataclass, replace
from pathlib import Path

import startup
from pair import Result, Side, compare, ratio
from table import Row, markdown
from work import Work

HERE = Path(__file__).parent
ENVIRONMENTS = HERE / ".environments"
LOSS_TOLERANCE = {"32-true": 1e-4, "auto": 3e-2}  # relative; `auto` may be bfloat16
PEERS = {
    "TRL": ("torch", "torch_peers.py", "trl"),
    "qlora.py-like loop": ("torch", "torch_peers.py", "loop"),
    "bare loop": ("torch", "torch_peers.py", "loop"),
    "Trainer": ("torch", "torch_peers.py", "trainer"),
    "old Flax loop": ("flax", "flax_peer.py", "flax"),
}


@dataclass(frozen=True)
class Comparison:
    """Ours against a peer, or JAX against torch.

    Args:
        name: For `--only`.
        work: What both do.
        against: A key of PEERS, or `our torch`.
        target: Least ratio of real tokens per CPU-second.
        engine: Ours.
        precision: Ours; under `auto` the peer takes its own default, bfloat16.
        memory: Largest ratio of peak memory, where there is a target.
        steps: Steps of a round.
        warm_up: Steps before the first.
        lengths: Sequence lengths under `--full`.
    """

    name: str
    work: Work
    against: str
    target: float
    engine: str = "torch"
    precision: str = "32-true"
    memory: float | None = None
    steps: int = 8
    warm_up: int = 4
    lengths: tuple[int, ...] = ()

    @property
    def title(self) -> str:
        work = self.work
        method = {"full": "", "lora": " LoRA", "qlora": " QLoRA"}[work.method]
        return f"{work.task}{method}, {work.model}, {work.length} tokens, {self.engine} {self.precision}"


EPOCH = 50  # steps of warm-up in which the JAX engine meets, and compiles, every length of row
QLORA = Work("sft", "llama-b", 512, method="qlora")
CLM, MLM, QA = Work("clm", "gpt2", 512), Work("mlm", "bert", 512), Work("qa", "bert", 384)
SHORT_QA = replace(QA, num_rows=8 * EPOCH)
BLOCKS = (256, 512, 1024)
COMPARISONS = [
    Comparison("qlora-trl", QLORA, "TRL", 3.5, memory=0.45),
    Comparison("qlora-trl-auto", QLORA, "TRL", 5.0, precision="auto"),
    Comparison("qlora-loop", QLORA, "qlora.py-like loop", 2.5),
    Comparison("dpo-trl", Work("preference", "llama-b", 512, method="qlora"), "TRL", 3.0, memory=0.5, steps=4),
    Comparison("lora-trl", Work("sft", "llama-a", 512, method="lora"), "TRL", 2.5),
    Comparison("clm", CLM, "Trainer", 1.25, steps=4, lengths=BLOCKS),
    Comparison("clm-llama", replace(CLM, model="llama-a"), "Trainer", 1.25, steps=4, lengths=BLOCKS),
    Comparison("mlm", MLM, "Trainer", 1.8, steps=4, lengths=BLOCKS),
    Comparison("mlm-roberta", replace(MLM, model="roberta"), "Trainer", 1.8, steps=4, lengths=BLOCKS),
    Comparison("qa", QA, "Trainer", 2.0, steps=16),
    Comparison("overhead", Work("clm", "tiny", 256), "bare loop", 1 / 1.10, steps=60, warm_up=20),
    Comparison("flax-clm", CLM, "old Flax loop", 1.5, engine="jax", steps=2, warm_up=3, lengths=BLOCKS),
    Comparison("flax-mlm", MLM, "old Flax loop", 2.0, engine="jax", steps=3, warm_up=3, lengths=BLOCKS),
    Comparison("flax-qa", SHORT_QA, "old Flax loop", 2.0, engine="jax", steps=16, warm_up=EPOCH),
    Comparison("engines-qlora", replace(QLORA, num_rows=8 * EPOCH), "our torch", 0.85, engine="jax", warm_up=EPOCH),
    Comparison("engines-clm", CLM, "our torch", 0.85, engine="jax", steps=4),
    Comparison("engines-mlm", MLM, "our torch", 0.85, engine="jax", steps=4),
    Comparison("engines-qa", SHORT_QA, "our torch", 0.85, engine="jax", steps=16, warm_up=EPOCH),
]


def environment(name: str) -> str:
    """The Python of a peer's environment, made when it is first needed."""
    folder = ENVIRONMENTS / name
    python = folder / "bin" / "python"
    if not (folder / "ready").exists():
        print(f"installing {HERE.name}/peers/{name}.txt ...", flush=True)
        shutil.rmtree(folder, ignore_errors=True)
        venv.create(folder, with_pip=True)
        subprocess.run([python, "-m", "pip", "install", "-q", "-r", HERE / "peers" / f"{name}.txt"], check=True)
        (folder / "ready").touch()
    return str(python)


def measure(comparison: Comparison, folder: Path, rounds: int) -> list[Row]:
    """The rows of one comparison.

    Raises:
        SystemExit: The two do not start from the same loss.
    """
    work = comparison.work
    asked = {"folder": str(folder), "task": work.task, "method": work.method, "length": work.length,
             "batch_size": work.batch_size, "warm_up": comparison.warm_up, "steps": comparison.steps}
    options = ["--trainer.precision", comparison.precision]
    ours = Side(sys.executable, "ours.py", {**asked, "engine": comparison.engine, "options": options})
    if comparison.against == "our torch":
        theirs = Side(sys.executable, "ours.py", {**asked, "engine": "torch", "options": options})
    else:
        name, program, peer = PEERS[comparison.against]
        theirs = Side(environment(name), program, {**asked, "peer": peer, "bf16": comparison.precision == "auto"})
    mine, other = compare(ours, theirs, rounds)
    if abs(mine.loss - other.loss) > LOSS_TOLERANCE[comparison.precision] * other.loss:
        raise SystemExit(f"{comparison.title} against {comparison.against}: losses are {mine.loss} and {other.loss}")
    return _rows(comparison, mine, other)


def _rows(comparison: Comparison, mine: Result, other: Result) -> list[Row]:
    speed, wall = ratio(mine.speed, other.speed), ratio(mine.wall, other.wall)
    peak = mine.peak / other.peak
    each = [a / b for a, b in zip(mine.speed, other.speed, strict=True)]
    note = (f"rounds {min(each):.2f} to {max(each):.2f}; wall {wall:.2f}; "
            f"memory {mine.peak:.2f} / {other.peak:.2f} GiB; loss {mine.loss:.5f} / {other.loss:.5f}")
    rows = [Row(comparison.title, comparison.against, speed, f">= {comparison.target:.2f}", note)]
    if comparison.memory:
        rows.append(Row(f"peak memory, {comparison.title}", comparison.against, peak, f"<= {comparison.memory}",
                        f"{mine.peak:.2f} / {other.peak:.2f} GiB"))
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="*", default=[""], help="beginnings of names: "
                        + ", ".join([*(each.name for each in COMPARISONS), "startup"]))
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--full", action="store_true", help="several sequence lengths")
    parser.add_argument("--rows", help="instructions to train on instead of generated ones")
    parser.add_argument("--tokenizer", help="tokenizer of the instruction tasks, instead of one made for their text, "
                        "where the model has a row for each of its tokens")
    args = parser.parse_args()
    rows: list[Row] = []
    with tempfile.TemporaryDirectory() as temporary:
        for number, comparison in enumerate(COMPARISONS):
            if not comparison.name.startswith(tuple(args.only)):
                continue
            if comparison.work.task == "sft":
                work = replace(comparison.work, rows=args.rows, tokenizer=args.tokenizer)
                comparison = replace(comparison, work=work)
            lengths = comparison.lengths if args.full and comparison.lengths else (comparison.work.length,)
            for length in lengths:
                of_length = replace(comparison, work=replace(comparison.work, length=length))
                folder = Path(temporary) / f"{number}-{length}"
                of_length.work.write(folder)
                found = measure(of_length, folder, args.rounds)
                print("\n".join(markdown(found).splitlines()[2:]), flush=True)
                rows += found
                shutil.rmtree(folder)
    if "startup".startswith(tuple(args.only)):
        rows += startup.measure(args.rounds)
    print(markdown(rows))


if __name__ == "__main__":
    main()
