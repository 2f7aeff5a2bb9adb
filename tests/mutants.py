"""Break the product on purpose, two ways and more for each promise, and show which quick test notices: `make mutants`.

Each mutant replaces one piece of text in a copy of the working tree and runs the quick tests of a few files there. It
is caught if one of them fails. The exit status is 1 if a mutant survives or its text no longer occurs exactly once.
"""

import argparse
import queue
import re
import shutil
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parent.parent
SECONDS = 600  # for the tests of a mutant


@dataclass(frozen=True)
class Mutant:
    """A change that breaks a promise.

    Args:
        promise: What it breaks, in a few words.
        file: File of the product.
        old, new: Text in it and its replacement.
        tests: Files or node ids of tests, below tests/, one of which must notice.
    """

    promise: str
    file: str
    old: str
    new: str
    tests: str


FAMILIES = "jax_engine/test_jax_families.py::test_a_family_with_a_head_is_the_model_of_transformers"
MUTANTS = [
    # 1x8, 2x4 and 8x1 give the same step, dropout included.
    Mutant("split: gradients are not divided by the weight of the step", "lmmods/torch_engine/tasks/base.py",
           "torch.where(weight > 0, weight, 1)", "len(batches)", "engines/test_exactness.py"),
    Mutant("split: a micro-batch is divided by its own weight", "lmmods/torch_engine/tasks/base.py",
           "backward(loss.total * scale.to(loss.total))",
           "backward(loss.total / loss.weight.clamp(min=1) / len(batches))", "engines/test_exactness.py"),
    Mutant("split: dropout depends on the row's place in the batch", "lmmods/data/batch/collate.py",
           'row_indices = np.array([[0 if row is None else row["row"]] for row in rows], np.int64)',
           "row_indices = np.arange(len(rows))[:, None]", "engines/test_exactness.py"),
    Mutant("split: JAX divides by the number of sums", "jax_engine/distributed/steps.py",
           'g / jnp.where(sums["weight"] > 0, sums["weight"], 1)', "g / len(sums)", "jax_engine/test_steps.py"),
    Mutant("split: JAX counts the rows that fill up a chunk", "jax_engine/distributed/steps.py",
           "spare = jnp.full_like(x[:1], no_label(x.dtype))", "spare = x[:1]", "jax_engine/test_steps.py"),
    Mutant("images: the pixels of padding are images", "lmmods/torch_engine/nn/images.py",
           "values = values[positions < batch[COUNT + name][:, None]]", "values = values.flatten(0, 1)",
           "torch_engine/test_images.py::test_loss_and_gradients_are_those_of_transformers"),
    Mutant("images: chunks truncate pixels like tokens", "lmmods/core/labels.py",
           ' and not name.startswith(PER_ROW)', "",
           "torch_engine/test_images.py::test_loss_and_gradients_are_those_of_transformers"),
    Mutant("images: the answers of a pair share the images of other rows", "lmmods/torch_engine/tasks/preference.py",
           "values.repeat_interleave(shape[1], 0)", "torch.cat([values] * shape[1])",
           "torch_engine/test_image_preferences.py::test_loss_and_gradients_of_pairs_are_those_of_transformers"),
    Mutant("images: positions in a pack ignore images", "lmmods/torch_engine/nn/images.py",
           "if grids is None:", "if True:",
           "torch_engine/test_images.py::test_loss_and_gradients_are_those_of_transformers"),
    Mutant("images: image tokens of packs attend like text", "lmmods/torch_engine/nn/images.py",
           'if "segment_ids" in batch and self._family.in_both_directions:', "if False:",
           "torch_engine/test_images.py::test_loss_and_gradients_are_those_of_transformers"),
    Mutant("images: a pack has the images of its first row", "lmmods/data/batch/packing.py",
           "join_inputs(images)", "join_inputs(images[:1])",
           "torch_engine/test_images.py::test_loss_and_gradients_are_those_of_transformers"),
    Mutant("images: a changed file is not noticed", "lmmods/data/batch/images.py",
           "if [checksum(data)", "if False and [checksum(data)",
           "data/test_images.py::test_a_changed_image_is_an_error"),
    Mutant("images: a path may leave its folder", "lmmods/data/read/images.py",
           "if os.path.isabs(source) or os.path.commonpath([path, root]) != root:", "if False:",
           "data/test_images.py::test_unusable_images_are_counted"),
    # Several processes take the steps of one.
    Mutant("processes: all ranks take the first rank's batches", "lmmods/data/order/sampler.py",
           "index = first + rank", "index = first", "data/test_loader.py"),
    Mutant("processes: the last group has a batch for some ranks only", "lmmods/data/order/sampler.py",
           "yield order[index] if index < len(order) else [PADDING_ROW]",
           "if index < len(order):\n            yield order[index]", "data/test_loader.py"),
    Mutant("processes: sums are those of this process", "lmmods/torch_engine/nn/micro_batches.py",
           "torch.distributed.all_reduce(numbers)", "pass", "torch_engine/test_micro_batching.py"),
    # A step is that of a bare loop with PEFT and bitsandbytes.
    Mutant("bare loop: an adapter's scaling is lost in the backward pass", "lmmods/torch_engine/nn/lora.py",
           "grad_inner = (grad @ b).mul_(ctx.scaling)", "grad_inner = grad @ b", "torch_engine/test_fused_lora.py"),
    Mutant("bare loop: an adapter's scaling is lost in the forward pass", "lmmods/torch_engine/nn/lora.py",
           ".addmm_(inner, low_b.t(), alpha=scaling)", ".addmm_(inner, low_b.t(), alpha=1)",
           "torch_engine/test_fused_lora.py engines/test_exactness.py"),
    # An interrupted or killed run ends with the same bits.
    Mutant("resume: an epoch starts one step late", "lmmods/data/batch/loader.py",
           "left = self.num_batches - self._steps_done() * self._accumulate",
           "left = self.num_batches - (self._steps_done() + 1) * self._accumulate", "data/test_loader.py"),
    Mutant("resume: the epoch is forgotten", "lmmods/data/batch/loader.py",
           'self._epoch = state["epoch"]', "self._epoch = 0", "data/test_loader.py"),
    Mutant("resume: rows that workers read ahead count as handed out", "lmmods/data/batch/loader.py",
           "self._handed_out = min(self._handed_out + world_size, self._num_batches)",
           "self._handed_out = min(self._handed_out + 2 * world_size, self._num_batches)", "data/test_loader.py"),
    Mutant("kill: a file is renamed before it is on disk", "lmmods/runs/run_files.py",
           "            os.fsync(file.fileno())\n", "", "runs/test_durable_writes.py"),
    Mutant("kill: a checkpoint is renamed before it is on disk", "lmmods/runs/run_files.py",
           "    sync(temporary)\n    # A rename cannot", "    # A rename cannot", "runs/test_durable_writes.py"),
    Mutant("kill: a checkpoint is written under its final name", "lmmods/runs/checkpoint.py",
           "    temporary = _temporary(folder)\n    tree, arrays = split(content, library.is_array, library.memory_of)",
           "    temporary = folder\n    tree, arrays = split(content, library.is_array, library.memory_of)",
           "faults/test_checkpoints.py runs/test_checkpoint.py"),
    # A run resumes with another batch size, another number of processes, and from earlier versions.
    Mutant("batch size: a position inside a batch is rounded up", "lmmods/data/order/sampler.py",
           "if rows < num_rows and rows % batch_size:", "if False:", "data/test_loader.py"),
    Mutant("batch size: the run's order follows the new batch size", "lmmods/data/batch/loader.py",
           "self._rule = OrderRule.from_state(state)", "pass", "data/test_loader.py"),
    Mutant("number of processes: a part is written at the wrong offset", "lmmods/runs/checkpoint.py",
           "return (((begin[0] + first, *begin[1:])", "return (((begin[0], *begin[1:])", "runs/test_checkpoint.py"),
    Mutant("number of processes: another split of a step is not noticed", "lmmods/runs/progress.py",
           "return self.at_once * self.accumulated", "return self.rows", "runs/test_identity.py"),
    Mutant("earlier versions: an unfinished step counts as done", "lmmods/runs/progress.py",
           'batches -= window["num_batches"]', "pass", "runs/test_progress.py"),
    Mutant("earlier versions: the order of rows is today's", "lmmods/data/order/sampler.py",
           "return cls(rows, state.get(VERSION, 1))", "return cls(rows, RULE)", "data/test_loader.py"),
    # Every dropped row is counted with the reason.
    Mutant("dropped rows: the reason is lost", "lmmods/data/encode/encoder.py",
           "dropped.append((index, str(problem)))", 'dropped.append((index, "unusable"))',
           "data/test_malformed.py data/test_clm.py"),
    Mutant("dropped rows: they are not counted", "lmmods/data/encode/encoder.py",
           'entry = self._dropped.setdefault(reason, {"rows": 0, "first": []})',
           'entry = {"rows": 0, "first": []}', "data/test_malformed.py"),
    # A misspelt key is refused with the nearest valid name; all mistakes are reported at once.
    Mutant("mistakes: no nearest name", "lmmods/recipe/keys.py",
           "if near := completions[:1] or difflib.get_close_matches(leaf, siblings, 1, 0.7):",
           "if near := completions[:0]:", "faults/test_mistakes.py"),
    Mutant("mistakes: only the first one", "lmmods/recipe/reader.py",
           "if all(f\"{location}{message}\" != str(mistake) for mistake in self.mistakes):",
           "if not self.mistakes:", "faults/test_mistakes.py"),
    # Both engines compute the same losses; every family on JAX is the model of transformers.
    Mutant("engines agree: JAX's targets are one position off", "jax_engine/distributed/loss.py",
           "return jnp.pad(labels[:, 1:], ((0, 0), (0, 1)), constant_values=IGNORED)", "return labels",
           "jax_engine/test_losses.py engines/test_golden.py engines/test_parity.py"),
    Mutant("engines agree: JAX's positions go on through packed documents", "jax_engine/models/network.py",
           'return batch.get("position_ids", jnp.broadcast_to(jnp.arange(ids.shape[1]), ids.shape))',
           "return jnp.broadcast_to(jnp.arange(ids.shape[1]), ids.shape)",
           f"{FAMILIES}[llama-causal]"),
    Mutant("families: JAX's optimiser takes the gradient for its square", "jax_engine/optim.py",
           "(1 - beta2) * gradient * gradient", "(1 - beta2) * gradient", "jax_engine/test_optim.py"),
    # A run may switch engines.
    Mutant("switch: the moments of a parameter change places", "jax_engine/optim.py",
           'return change, {"exp_avg": mean, "exp_avg_sq": square}',
           'return change, {"exp_avg": square, "exp_avg_sq": mean}', "jax_engine/test_optim.py"),
    # The answers in chat are those of predict, and they end.
    Mutant("chat: the tokens that end an answer are forgotten", "lmmods/extras/chat.py",
           "stop_ids = sorted({*data.codec.stop_token_ids, *stop_ids})", "stop_ids = []", "extras/test_chat.py"),
    Mutant("predict: a model's export does not say which tokens end an answer", "lmmods/core/generation_config.py",
           '"eos_token_id": list(dict.fromkeys([*stop_token_ids, *ends]))', '"eos_token_id": ends',
           "core/test_generation_config.py"),
    # No program in an answer reports its own success.
    Mutant("programs: hooks may be set", "lmmods/rollouts/program_child.py",
           'raise RuntimeError(f"{event} is not allowed in programs under test")', "return",
           "rollouts/test_cheating_programs.py"),
    Mutant("programs: they may write everywhere", "lmmods/rollouts/program_child.py",
           "    libc.syscall(RESTRICT_SELF, rules, 0)\n", "", "rollouts/test_cheating_programs.py"),
]


def try_mutant(mutant: Mutant | None, tree: Path, tests: str) -> str:
    """Return the quick test in `tree` that fails with a mutant, "" if none does."""
    original = ""
    if mutant is not None:
        original = (tree / mutant.file).read_text()
        if original.count(mutant.old) != 1:
            raise SystemExit(f"{mutant.file} contains this text {original.count(mutant.old)} times: {mutant.old}")
        (tree / mutant.file).write_text(original.replace(mutant.old, mutant.new))
    try:
        done = subprocess.run(
            [sys.executable, "-m", "pytest", "-q", "-x", "-m", "not slow", "-p", "no:cacheprovider", "--tb=no",
             "--timeout", "120", "--basetemp", str(tree.with_name(f"{tree.name}-tmp")),
             *(f"tests/{name}" for name in tests.split())],
            cwd=tree, capture_output=True, text=True, timeout=SECONDS)
    except subprocess.TimeoutExpired:
        return f"no end within {SECONDS} seconds"
    finally:
        if mutant is not None:
            (tree / mutant.file).write_text(original)
    if done.returncode == 0:
        return ""
    failed = re.search(r"^(?:FAILED|ERROR) tests/(\S+)", done.stdout, re.M)
    if failed is None:
        raise SystemExit(f"pytest ended with status {done.returncode}:\n{done.stdout}{done.stderr}")
    return failed.group(1)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("words", nargs="*", help="Only mutants whose promise contains one of these words.")
    parser.add_argument("--workers", type=int, default=2, help="Number of mutants tried at a time. Default: 2.")
    options = parser.parse_args()
    mutants = [mutant for mutant in MUTANTS
               if not options.words or any(word in mutant.promise for word in options.words)]
    files = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True).stdout.split("\n")
    with tempfile.TemporaryDirectory() as folder:
        trees: queue.Queue[Path] = queue.Queue()
        for index in range(options.workers):
            tree = Path(folder) / f"tree{index}"
            for name in filter(None, files):
                (tree / name).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy2(ROOT / name, tree / name, follow_symlinks=False)
            trees.put(tree)

        def run(mutant: Mutant | None, tests: str) -> str:
            tree = trees.get()
            try:
                return try_mutant(mutant, tree, tests)
            finally:
                trees.put(tree)

        survivors = 0
        with ThreadPoolExecutor(options.workers) as pool:
            if failed := [name for name in pool.map(
                    lambda name: run(None, name), sorted({name for mutant in mutants for name in mutant.tests.split()}))
                    if name]:
                raise SystemExit(f"These tests fail without a mutant: {', '.join(failed)}. Fix them first.")
            catchers = pool.map(lambda mutant: run(mutant, mutant.tests), mutants)
            for mutant, caught in zip(mutants, catchers, strict=True):
                survivors += not caught
                print(f"{'caught  ' if caught else 'SURVIVED'}  {mutant.promise}\n          {caught}", flush=True)
    print(f"{len(mutants) - survivors} of {len(mutants)} mutants are caught by a quick test.")
    return bool(survivors)


if __name__ == "__main__":
    sys.exit(main())
