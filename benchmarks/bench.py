"""Compare our speed and memory with other programs: `make bench`.

    python benchmarks/bench.py                          every comparison, one to two hours on 2 cores
    python benchmarks/bench.py --only qlora-trl clm     comparisons whose names start with one of these
    python benchmarks/bench.py --tuned                  also against each peer as tuned for a CPU
    python benchmarks/bench.py --rows alpaca.json --tokenizer FOLDER    on real instructions
    python benchmarks/bench.py --full                   also sequences of 256, 512 and 1024 tokens

Both sides train the same weights on the same rows, in separate processes that step in turn. Speed is real tokens (no
padding) per CPU-second, and a ratio is the ratio of the medians over the rounds. Before training, both sides must
compute the same loss on the same batch. Environments of peers are created in benchmarks/.environments. README.md in
this folder has the last table.
"""

import argparse
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
import venv
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

import roofline
import startup
import yaml
from pair import Result, Side, compare, evict, ratio
from plans import parse_gibibytes, run_plan
from table import Row, markdown
from work import ANSWER_LENGTH, CONFIGS, NUM_ANSWERS, Work

HERE = Path(__file__).parent
ENVIRONMENTS = HERE / ".environments"
LOSS_TOLERANCE = {"32-true": 1e-4, "bf16-mixed": 3e-2, "auto": 3e-2}  # relative; `auto` may be bfloat16


@dataclass(frozen=True)
class Peer:
    """Program that ours is compared with.

    Args:
        environment: Stem of its requirements file in peers/.
        program: File in workers/.
        peer: Name of the peer within the program.
        tuned: Settings that differ from the peer's defaults; the program documents their names.
    """

    environment: str
    program: str
    peer: str
    tuned: dict[str, Any] = field(default_factory=dict)


# AdamW is fused by default, and attention is torch's.
GROUPED = {"train_sampling_strategy": "group_by_length"}
UNCHECKPOINTED = {"gradient_checkpointing": False}
PEERS = {
    "TRL": Peer("torch", "torch_peers.py", "trl"),
    "TRL tuned": Peer("torch", "torch_peers.py", "trl", {**GROUPED, **UNCHECKPOINTED}),
    "TRL tuned, checkpointing": Peer("torch", "torch_peers.py", "trl", {**GROUPED, "gradient_checkpointing": True}),
    # About as many tokens per step. Without FlashAttention, packed rows attend as one row with a mask.
    "TRL packing": Peer("torch", "torch_peers.py", "trl", {
        "packing": True, "max_length": 512, "per_device_train_batch_size": 2, **UNCHECKPOINTED}),
    "TRL unchecked": Peer("torch", "torch_peers.py", "trl", UNCHECKPOINTED),
    "qlora.py-like loop": Peer("torch", "torch_peers.py", "loop"),
    "qlora.py-like loop tuned": Peer("torch", "torch_peers.py", "loop", {"group_by_length": True, **UNCHECKPOINTED}),
    "bare loop": Peer("torch", "torch_peers.py", "loop"),
    "Trainer": Peer("torch", "torch_peers.py", "trainer"),
    "Trainer grouped": Peer("torch", "torch_peers.py", "trainer", GROUPED),
    "Trainer compiled": Peer("torch", "torch_peers.py", "trainer", {"torch_compile": True}),
    "old Flax loop": Peer("flax", "flax_peer.py", "flax"),
    "Unsloth": Peer("unsloth", "unsloth_peer.py", "unsloth", {**GROUPED, **UNCHECKPOINTED}),
    "Tunix": Peer("tunix", "tunix_peer.py", "tunix"),
    "Tunix tuned": Peer("tunix", "tunix_peer.py", "tunix", {"multiple": 64}),
    "Flax loop scanned": Peer("flax", "flax_peer.py", "flax", {"scan": 4}),
}


@dataclass(frozen=True)
class Comparison:
    """Ours against a peer, or JAX against torch.

    Args:
        name: Name for `--only`.
        work: Work of both sides.
        against: Key of PEERS, or `our torch`.
        target: Minimum ratio of real tokens per CPU-second.
        tuned: Peers that `--tuned` adds, with the minimum ratio to each.
        engine: Our engine.
        precision: Our precision. With `auto`, the peer uses its own default, bfloat16.
        memory: Maximum ratio of peak memory; None for no target.
        steps: Steps per round.
        warm_up: Steps before the first round.
        lengths: Sequence lengths under `--full`.
        rounds: Number of rounds, if `--rounds` would take too long.
        together: True if both sides fit in memory at once.
        start: Maximum ratio of the time to the first step to the time to read the weights, both from a cold file; None
            for no target. With a target, the peak is also compared with `plan`.
        command: Our command. A step of `validate` covers all rows, as does the peer's evaluation, and its result is the
            loss that both must compute.
    """

    name: str
    work: Work
    against: str
    target: float
    tuned: dict[str, float] = field(default_factory=dict)
    engine: str = "torch"
    precision: str = "32-true"
    memory: float | None = None
    steps: int = 8
    warm_up: int = 4
    lengths: tuple[int, ...] = ()
    rounds: int | None = None
    together: bool = True
    start: float | None = None
    command: Literal["fit", "validate"] = "fit"

    @property
    def title(self) -> str:
        work = self.work
        method = {"full": "", "lora": " LoRA", "qlora": " QLoRA"}[work.method]
        command = "evaluation of " if self.command == "validate" else ""
        return f"{command}{work.task}{method}, {work.model}, {work.length} tokens, {self.engine} {self.precision}"

    def list_tuned(self) -> list["Comparison"]:
        """Return comparisons of the same work with each tuned peer, with a target for speed only."""
        return [replace(self, against=peer, target=target, memory=None, start=None)
                for peer, target in self.tuned.items()]


TOY = {**dict.fromkeys(("hidden_size", "n_embd"), 64), **dict.fromkeys(("num_hidden_layers", "n_layer"), 2),
       **dict.fromkeys(("num_attention_heads", "num_key_value_heads", "n_head"), 2), "intermediate_size": 176,
       "vocab_size": 1_000}
EPOCH = 52  # warm-up steps in which the JAX engine compiles every row length
QLORA = Work("sft", "llama-b", 512, method="qlora")
PAIRS, TAGS = Work("sequence_classification", "bert", 128), Work("token_classification", "bert", 128)
CLM, MLM, QA = Work("clm", "gpt2", 512), Work("mlm", "bert", 512), Work("qa", "bert", 384)
SHORT_QA = replace(QA, num_rows=8 * EPOCH)
BLOCKS = (256, 512, 1024)
BIG = Work("sft", "llama-1b", 512, method="qlora", dtype="bfloat16")
FEW = replace(BIG, num_rows=16)  # two batches, so that the JAX engine compiles both lengths in its warm-up
GRPO = Work("grpo", "llama-a", 256, batch_size=64)
TUNED_TRL = {"TRL tuned": 2.5, "TRL packing": 2.5, "Unsloth": 2.5}
COMPARISONS = [
    Comparison("qlora-trl", QLORA, "TRL", 3.5, TUNED_TRL, memory=0.45),
    Comparison("qlora-trl-auto", QLORA, "TRL", 5.0, TUNED_TRL, precision="auto"),
    Comparison("qlora-loop", QLORA, "qlora.py-like loop", 2.5, {"qlora.py-like loop tuned": 1.5}),
    Comparison("dpo-trl", Work("preference", "llama-b", 512, method="qlora"), "TRL", 3.0, {"TRL tuned": 1.5},
               memory=0.5, steps=4),
    Comparison("lora-trl", Work("sft", "llama-a", 512, method="lora"), "TRL", 2.5, {"TRL tuned": 1.5}),
    # TRL at its fastest; its defaults checkpoint gradients.
    Comparison("grpo-trl", GRPO, "TRL unchecked", 2.0, memory=0.5, steps=3, warm_up=2),
    Comparison("grpo-lora-trl", replace(GRPO, method="lora"), "TRL unchecked", 2.0, memory=0.5, steps=3, warm_up=2),
    Comparison("grpo-jax-trl", GRPO, "TRL unchecked", 2.0, engine="jax", memory=0.5, steps=3, warm_up=6),
    Comparison("grpo-jax-lora-trl", replace(GRPO, method="lora"), "TRL unchecked", 2.0, engine="jax", memory=0.5,
               steps=3, warm_up=6),
    Comparison("clm", CLM, "Trainer", 1.25, {"Trainer compiled": 1.4}, steps=4, lengths=BLOCKS),
    Comparison("clm-llama", replace(CLM, model="llama-a"), "Trainer", 1.25, {"Trainer compiled": 1.4}, steps=4,
               lengths=BLOCKS),
    Comparison("mlm", MLM, "Trainer", 1.8, {"Trainer compiled": 2.5}, steps=4, lengths=BLOCKS),
    Comparison("mlm-roberta", replace(MLM, model="roberta"), "Trainer", 1.8, {"Trainer compiled": 2.5}, steps=4,
               lengths=BLOCKS),
    Comparison("qa", QA, "Trainer", 2.0, {"Trainer grouped": 2.2}, steps=16),
    Comparison("classify", PAIRS, "Trainer", 1.8, {"Trainer grouped": 1.8}, steps=32, warm_up=16),
    Comparison("tag", TAGS, "Trainer", 1.8, {"Trainer grouped": 1.8}, steps=32, warm_up=16),
    Comparison("evaluate-clm", replace(CLM, model="llama-a", num_rows=100), "Trainer", 2.0, {"Trainer compiled": 2.0},
               steps=1, warm_up=1, command="validate"),
    Comparison("evaluate-classify", PAIRS, "Trainer", 2.0, {"Trainer grouped": 2.0}, steps=1, warm_up=1,
               command="validate"),
    Comparison("big-trl", BIG, "TRL tuned", 2.0, {"TRL tuned, checkpointing": 2.0, "Unsloth": 2.0}, precision="auto",
               memory=0.4, steps=2, warm_up=1, rounds=3, together=False, start=2.0),
    Comparison("overhead", Work("clm", "tiny", 256), "bare loop", 1 / 1.10, steps=60, warm_up=20),
    Comparison("flax-clm", CLM, "old Flax loop", 1.5, {"Flax loop scanned": 1.5}, engine="jax", steps=4,
               lengths=BLOCKS),
    Comparison("flax-mlm", MLM, "old Flax loop", 2.0, {"Flax loop scanned": 2.0}, engine="jax", steps=4,
               lengths=BLOCKS),
    Comparison("flax-qa", SHORT_QA, "old Flax loop", 2.0, {"Flax loop scanned": 2.0}, engine="jax", steps=16,
               warm_up=EPOCH),
    Comparison("tunix-lora", Work("sft", "llama-a", 512, method="lora", num_rows=8 * EPOCH), "Tunix", 2.0,
               {"Tunix tuned": 1.5}, engine="jax", warm_up=EPOCH),
    Comparison("engines-qlora", replace(QLORA, num_rows=8 * EPOCH), "our torch", 0.85, engine="jax", warm_up=EPOCH),
    Comparison("engines-clm", CLM, "our torch", 0.85, engine="jax", steps=4),
    Comparison("engines-mlm", MLM, "our torch", 0.85, engine="jax", steps=4),
    Comparison("engines-qa", SHORT_QA, "our torch", 0.85, engine="jax", steps=16, warm_up=EPOCH),
    Comparison("engines-big", FEW, "our torch", 0.8, engine="jax", memory=1.3, steps=2, warm_up=2, rounds=2,
               together=False, start=2.0),
    Comparison("engines-big-bf16", FEW, "our torch", 0.8, engine="jax", precision="bf16-mixed", memory=1.3, steps=2,
               warm_up=2, rounds=2, together=False, start=2.0),
]


def make_environment(name: str) -> str:
    """Return the Python of a peer's environment, which is created on first use."""
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
    """Return the table rows of one comparison.

    Raises:
        SystemExit: The losses before training differ.
    """
    work, weights = comparison.work, folder / "model" / "model.safetensors"
    cold = (weights,) if comparison.start else ()
    settings = {"folder": str(folder), "task": work.task, "method": work.method, "length": work.length,
                "batch_size": work.batch_size, "warm_up": comparison.warm_up, "steps": comparison.steps,
                "command": comparison.command, "num_answers": NUM_ANSWERS, "answer_length": ANSWER_LENGTH}
    options = ["--trainer.precision", comparison.precision]
    if work.task == "grpo":  # its reward is a function in workers/
        options += ["--trust_recipe_code", "true"]
    if comparison.command == "validate":
        source = yaml.safe_load((folder / "recipe.yaml").read_text())["data"]["init_args"]["source"]
        options += ["--data.val_source", source]
    our_side = Side(sys.executable, "ours.py", {**settings, "engine": comparison.engine, "options": options}, cold)
    if comparison.against == "our torch":
        peer_side = Side(sys.executable, "ours.py", {**settings, "engine": "torch", "options": options}, cold)
    else:
        peer = PEERS[comparison.against]
        peer_side = Side(make_environment(peer.environment), peer.program,
                         {**settings, "peer": peer.peer, "tuned": peer.tuned,
                          "bf16": comparison.precision == "auto"}, cold)
    our_result, peer_result = compare(our_side, peer_side, comparison.rounds or rounds, comparison.together)
    if abs(our_result.loss - peer_result.loss) > LOSS_TOLERANCE[comparison.precision] * peer_result.loss:
        raise SystemExit(f"{comparison.title} against {comparison.against}: the losses before training differ: "
                         f"{our_result.loss} and {peer_result.loss}.")
    rows = _speed_rows(comparison, our_result, peer_result)
    if comparison.start:
        rows += [_start_row(comparison, our_result, peer_result, weights), _plan_row(comparison, our_result, folder)]
    return rows


def _start_row(comparison: Comparison, ours: Result, peer: Result, weights: Path) -> Row:
    evict(weights)
    start = time.perf_counter()
    with weights.open("rb", buffering=0) as file:
        while file.read(1 << 24):
            pass
    reading = time.perf_counter() - start
    return Row(f"command to the first step, {comparison.title}", "reading the weights", ours.ready / reading,
               f"<= {comparison.start}", f"{ours.ready:.1f} s; {comparison.against} {peer.ready:.1f} s; "
               f"{weights.stat().st_size / 2**30:.2f} GiB read in {reading:.1f} s")


def _plan_row(comparison: Comparison, ours: Result, folder: Path) -> Row:
    """Compare the memory that `plan` counts with the peak, less the memory of the imported libraries."""
    recipe = yaml.safe_load((folder / "recipe.yaml").read_text())
    recipe["trainer"]["precision"], recipe["engine"] = comparison.precision, comparison.engine
    planned = parse_gibibytes(run_plan(recipe, "cpu").lines["memory of each device"])
    measured = ours.peak - ours.libraries
    return Row(f"memory as planned, {comparison.title}", "peak without the libraries", planned / measured,
               "0.90 to 1.10", f"{planned:.2f} / {measured:.2f} GiB; libraries {ours.libraries:.2f} GiB")


def _speed_rows(comparison: Comparison, ours: Result, peer: Result) -> list[Row]:
    speed, wall = ratio(ours.speed, peer.speed), ratio(ours.wall, peer.wall)
    peak = ours.peak / peer.peak
    round_ratios = [a / b for a, b in zip(ours.speed, peer.speed, strict=True)]
    note = (f"rounds {min(round_ratios):.2f} to {max(round_ratios):.2f}; wall {wall:.2f}; "
            f"memory {ours.peak:.2f} / {peer.peak:.2f} GiB; loss {ours.loss:.5f} / {peer.loss:.5f}")
    if ours.spent or peer.spent:
        note += f"; seconds of a step {_format_step(ours)} / {_format_step(peer)}"
    rows = [Row(comparison.title, comparison.against, speed, f">= {comparison.target:.2f}", note)]
    if comparison.memory:
        rows.append(Row(f"peak memory, {comparison.title}", comparison.against, peak, f"<= {comparison.memory}",
                        f"{ours.peak:.2f} / {peer.peak:.2f} GiB"))
    return rows


def _format_step(result: Result) -> str:
    """Return the seconds of a step and the fractions of its parts; the rest is training."""
    parts = {name: statistics.median(fractions) for name, fractions in result.spent.items()}
    text = ", ".join(f"{name} {fraction:.0%}" for name, fraction in {**parts, "rest": 1 - sum(parts.values())}.items())
    return f"{statistics.median(result.step):.2f} ({text})"


def shrink(comparison: Comparison) -> Comparison:
    """Return the comparison with few rows and steps."""
    return replace(comparison, work=replace(comparison.work, num_rows=100), steps=4, warm_up=4, rounds=1)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="*", default=[""], help="name prefixes: "
                        + ", ".join([*(comparison.name for comparison in COMPARISONS), "startup"]))
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--tuned", action="store_true", help="also compare with peers tuned for a CPU")
    parser.add_argument("--full", action="store_true", help="use several sequence lengths")
    parser.add_argument("--rows", help="file of instructions to train on instead of generated ones")
    parser.add_argument("--tokenizer", help="tokenizer for instructions, if the model has an embedding for each "
                        "of its tokens; otherwise one is trained on the text")
    parser.add_argument("--smoke", action="store_true",
                        help="run one round at toy sizes, only to test the program")
    parser.add_argument("--roofline", action="store_true",
                        help="instead, measure which fraction of the machine's peak each step reaches, see roofline.py")
    args = parser.parse_args()
    if args.roofline:
        print(roofline.make_table(roofline.DEFAULT_CASES))
        return
    if args.smoke:
        for fields in CONFIGS.values():
            fields |= {name: value for name, value in TOY.items() if name in fields}
    rows: list[Row] = []
    with tempfile.TemporaryDirectory() as temporary:
        for index, comparison in enumerate(COMPARISONS):
            if not comparison.name.startswith(tuple(args.only)):
                continue
            if args.smoke:
                comparison = shrink(comparison)
            if comparison.work.task == "sft":
                work = replace(comparison.work, rows=args.rows, tokenizer=args.tokenizer)
                comparison = replace(comparison, work=work)
            lengths = comparison.lengths if args.full and comparison.lengths else (comparison.work.length,)
            for length in lengths:
                sized = replace(comparison, work=replace(comparison.work, length=length))
                folder = Path(temporary) / f"{index}-{length}"
                sized.work.write(folder)
                for variant in [sized, *(sized.list_tuned() if args.tuned else [])]:
                    new_rows = measure(variant, folder, args.rounds)
                    print("\n".join(markdown(new_rows).splitlines()[2:]), flush=True)
                    rows += new_rows
                shutil.rmtree(folder)
    if "startup".startswith(tuple(args.only)):
        rows += startup.measure(args.rounds)
    print(markdown(rows))


if __name__ == "__main__":
    main()
