"""Setup and fixtures shared by all tests: no network, one thread by default, caches and a tiny Llama."""

import ctypes
import gc
import hashlib
import json
import os
import shutil
import sys
import time
from collections.abc import Callable, Iterator
from importlib.metadata import version

os.environ.update(HF_HUB_OFFLINE="1", WANDB_MODE="offline", WANDB_SILENT="true", TOKENIZERS_PARALLELISM="false",
                  HF_HUB_DISABLE_PROGRESS_BARS="1")
os.environ.setdefault("OMP_NUM_THREADS", "1")
# Compiled programs outlive the session; all workers and the processes they start share one folder.
COMPILED = os.path.join(os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache"), "lmmods", "tests",
                        f"xla-{version('jax')}")
os.environ.setdefault("JAX_COMPILATION_CACHE_DIR", COMPILED)
os.environ.update(JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS="0", JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES="-1",
                  JAX_TRACEBACK_IN_LOCATIONS_LIMIT="0")  # source lines of instructions are not needed

from pathlib import Path  # noqa: E402

import pytest  # noqa: E402
import torch  # noqa: E402
from filelock import FileLock  # noqa: E402

torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))

TEXTS = ["Below is an instruction that describes a task. Write a response.", "### Instruction:\nAdd 1 and 2.\n\n",
         "### Response:\n3", "the quick brown fox jumps over the lazy dog", "0123456789 , . ! ? : ; ' \" ( )"]


LONG = {"benchmarks/test_bench.py", "benchmarks/test_gpu.py", "faults/test_mutations.py", "jax_engine/test_parallel.py",
        "jax_engine/test_trainer.py", "engines/test_engines_agree.py", "commands/test_recipes_agree.py",
        "runs/test_resume.py", "commands/test_startup.py"}
STATM = Path("/proc/self/statm")
LEAST_RESIDENT = 2**30  # bytes of the libraries and of what tests share
# CPU time of this process when programs were last released, and its resident memory after that.
released = {"seconds": 0.0, "bytes": LEAST_RESIDENT}


def pytest_configure(config: pytest.Config) -> None:
    """Delete cached compiled programs that were not used for a month."""
    if not hasattr(config, "workerinput"):
        for path in Path(COMPILED).glob("*-cache"):
            if time.time() - path.stat().st_atime > 30 * 24 * 3600:
                path.unlink(missing_ok=True)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Run files with cases of ten seconds and more first, so that short ones keep all workers busy at the end.

    Mark tests of float32 results by tests/closeness.py as `numerics`.
    """
    items.sort(key=lambda item: item.nodeid.split("::")[0].removeprefix("tests/") not in LONG)
    for item in items:
        if hasattr(getattr(item, "module", None), "assert_as_close"):
            item.add_marker("numerics")


def pytest_collection_finish(session: pytest.Session) -> None:
    """Exclude the libraries, imported by now, from garbage collection, and collect less often."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(20_000, 20, 10)


@pytest.fixture(autouse=True)
def little_memory():
    """Release compiled programs and arrays once a worker has grown by half a GiB or has many memory maps.

    On CPUs, XLA uses about a hundred maps per program, and crashes at Linux's limit of 65,530. Counting them takes
    milliseconds, so they are counted only after two seconds of CPU time.
    """
    yield
    if "jax" not in sys.modules or time.process_time() - released["seconds"] < 2 or not STATM.exists():
        return
    if resident() > released["bytes"] + 2**29 or len(Path("/proc/self/maps").read_bytes().splitlines()) > 40_000:
        sys.modules["jax"].clear_caches()
        gc.collect()
        ctypes.CDLL(None).malloc_trim(0)  # return freed memory to the system
        released["bytes"] = max(resident(), LEAST_RESIDENT)
    released["seconds"] = time.process_time()


def resident() -> int:
    """Return the resident memory of this process in bytes."""
    return int(STATM.read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


@pytest.fixture(autouse=True)
def no_forks_left():
    """End the runs that a failed test leaves behind."""
    yield
    if "tests.forks" in sys.modules:
        sys.modules["tests.forks"].end_all()


@pytest.fixture(autouse=True)
def no_ranks_left():
    """Remove what a multi-process strategy leaves here, so that processes of later tests do not inherit it."""
    yield
    for name in ("MASTER_ADDR", "MASTER_PORT", "NODE_RANK", "RANK", "LOCAL_RANK", "WORLD_SIZE",
                 "LMMODS_LAUNCHER"):
        os.environ.pop(name, None)
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


@pytest.fixture(autouse=True)
def no_wandb_run_left():
    """Finish an open W&B run: Lightning's logger would continue it in the folder of the test that started it."""
    yield
    if "wandb" in sys.modules and sys.modules["wandb"].run is not None:
        sys.modules["wandb"].finish()


@pytest.fixture(scope="session")
def shared(tmp_path_factory) -> Callable[[str, Callable[[Path], object]], Path]:
    """Return a function that returns a named folder shared by all workers. The first to request it fills it."""
    root = tmp_path_factory.getbasetemp()
    root = (root.parent if "PYTEST_XDIST_WORKER" in os.environ else root) / "shared"
    root.mkdir(exist_ok=True)

    def folder(name: str, fill: Callable[[Path], object]) -> Path:
        path = root / name
        with FileLock(root / f"{name}.lock"):
            if not (root / f"{name}.made").exists():
                shutil.rmtree(path, ignore_errors=True)  # left by a failed attempt
                path.mkdir()
                fill(path)
                (root / f"{name}.made").touch()
        return path

    return folder


@pytest.fixture(scope="session", autouse=True)
def own_cache(shared) -> Iterator[None]:
    """Give all workers one cache of tokenised data, separate from the user's."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("LMMODS_CACHE", str(shared("cache", lambda folder: None)))
        yield


@pytest.fixture(scope="session")
def tokenizer_folder(shared) -> Path:
    """Byte-level tokenizer of 320 tokens with <s>, </s> and <unk>, without a padding token."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(vocab_size=320, special_tokens=["<unk>", "<s>", "</s>"], show_progress=False,
                                  initial_alphabet=pre_tokenizers.ByteLevel.alphabet())
    tokenizer.train_from_iterator(TEXTS * 5, trainer)
    tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    whole = PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>", unk_token="<unk>")
    return shared("tokenizer", whole.save_pretrained)


@pytest.fixture(scope="session")
def llama_of(shared, tokenizer_folder) -> Callable[[int], Path]:
    """Return a function that returns the folder of a random Llama with N layers, dropout and the tokenizer."""
    from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM

    def folder(num_layers: int) -> Path:
        def fill(folder: Path) -> None:
            tokenizer = AutoTokenizer.from_pretrained(tokenizer_folder)
            torch.manual_seed(0)
            config = LlamaConfig(
                vocab_size=len(tokenizer), hidden_size=64, intermediate_size=96, num_hidden_layers=num_layers,
                num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=256, attention_dropout=0.1,
                bos_token_id=1, eos_token_id=2, initializer_range=0.2)
            LlamaForCausalLM(config).save_pretrained(folder)
            tokenizer.save_pretrained(folder)

        return shared(f"llama-{num_layers}", fill)

    return folder


@pytest.fixture(scope="session")
def llama_folder(llama_of) -> Path:
    """One-layer Llama, used by most runs: a second layer would take time and test nothing more."""
    return llama_of(1)


@pytest.fixture(scope="session")
def instructions(shared) -> Path:
    """36 alpaca rows of different lengths."""
    rows = [{"instruction": f"Add {n} and {n + 1}.", "input": "" if n % 3 else "one " * (n % 7),
             "output": " ".join(str(n + k) for k in range(1 + n % 5))} for n in range(36)]
    text = "".join(json.dumps(row) + "\n" for row in rows)
    return shared("rows", lambda folder: (folder / "rows.jsonl").write_text(text)) / "rows.jsonl"


@pytest.fixture
def pairs(tmp_path) -> str:
    """Eight preference rows with answers of different lengths."""
    path = tmp_path / "pairs.jsonl"
    path.write_text("".join(json.dumps({
        "prompt": f"Add {n} and {n + 1}." + " Please." * (n % 3), "chosen": f"The sum is {2 * n + 1}." * (1 + n % 2),
        "rejected": "No idea." * (1 + n % 4)}) + "\n" for n in range(8)))
    return str(path)


@pytest.fixture
def recipe(tmp_path, llama_folder, instructions):
    """Return a function that writes a tiny QLoRA recipe, changed by dotted keys, and returns its arguments."""
    import copy

    import yaml

    base = {
        "seed_everything": 7,
        "trainer": {"max_steps": 6, "accelerator": "cpu", "devices": 1, "precision": "32-true", "log_every_n_steps": 1,
                    "num_sanity_val_steps": 0, "enable_progress_bar": False, "val_check_interval": 4,
                    "default_root_dir": str(tmp_path / "run")},
        "model": {"class_path": "SFT", "init_args": {
            "pretrained": str(llama_folder), "quantize": "nf4", "lora": {"rank": 4, "dropout": 0.1},
            "generation": {"max_new_tokens": 6},
            "optimizer": {"lr": 0.01, "schedule": "linear", "warmup": 2}}},
        "data": {"class_path": "SFTData", "init_args": {
            "source": str(instructions), "val_size": 4, "template": "alpaca", "max_length": 256, "batch_size": 4}},
        "checkpoint": {"every_n_steps": 2},
    }

    def write(name: str = "recipe.yaml", **changes) -> list[str]:
        content = copy.deepcopy(base)
        if changes.get("engine") == "jax":
            # one length for all batches, as every length compiles a program
            content["data"]["init_args"]["pad_to_multiple_of"] = 192
        for key, value in changes.items():
            *parents, leaf = key.split("__")
            node = content
            for parent in parents:
                node = node.setdefault(parent, {})
            node[leaf] = value
        path = tmp_path / name
        path.write_text(yaml.dump(content, Dumper=yaml.CSafeDumper))
        return ["--config", str(path)]

    return write


@pytest.fixture
def finished(recipe, shared, tmp_path):
    """Return a function that returns the finished run of a changed recipe, trained once for all tests and workers.

    Tests may only read it. With `copy`, they get a copy of this name in their own folder, which they may change.
    """
    from lmmods.cli import main
    from lmmods.runs.folder import RunFolder

    def run(copy: str | None = None, **changes) -> RunFolder:
        def train(folder: Path) -> None:
            assert main(["fit", *recipe("finished.yaml", **changes,
                                        trainer__default_root_dir=str(folder / "run"))]) == 0

        key = hashlib.sha256(json.dumps(changes, sort_keys=True).encode()).hexdigest()[:16]
        original = RunFolder(shared(f"run-{key}", train) / "run")
        if copy is None:
            return original
        copied = RunFolder(shutil.copytree(original.root, tmp_path / copy, symlinks=True))
        copied.config.write_text(copied.config.read_text().replace(str(original.root), str(copied.root)))
        return copied

    return run


@pytest.fixture
def stop_at():
    """Return a function that requests an interruption in the n-th micro-batch, as Ctrl+C would; 0 requests none."""
    from tests import interruptions

    yield interruptions.stop_at
    interruptions.stop_at(0)
