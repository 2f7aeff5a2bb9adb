"""Shared by all tests: offline, one thread unless told otherwise, compiled programs and a cache kept, a tiny Llama."""

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
# Compiled programs outlive the session; one folder for all workers and what they start.
COMPILED = os.path.join(os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache"), "lmmods", "tests",
                        f"xla-{version('jax')}")
os.environ.setdefault("JAX_COMPILATION_CACHE_DIR", COMPILED)
os.environ.update(JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS="0", JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES="-1",
                  JAX_TRACEBACK_IN_LOCATIONS_LIMIT="0")  # nobody looks up which line an instruction is from

from pathlib import Path  # noqa: E402

import pytest  # noqa: E402
import torch  # noqa: E402
from filelock import FileLock  # noqa: E402

torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))

TEXTS = ["Below is an instruction that describes a task. Write a response.", "### Instruction:\nAdd 1 and 2.\n\n",
         "### Response:\n3", "the quick brown fox jumps over the lazy dog", "0123456789 , . ! ? : ; ' \" ( )"]


LONG = {"benchmarks/test_bench.py", "faults/test_mutations.py", "jax_engine/test_parallel.py",
        "jax_engine/test_trainer.py", "engines/test_engines_agree.py", "commands/test_recipes_agree.py",
        "runs/test_resume.py", "commands/test_startup.py"}
STATM = Path("/proc/self/statm")
LEAST_RESIDENT = 2**30  # bytes of the libraries and what tests share
# When programs were last released: CPU time of this process, and its resident memory after that.
released = {"seconds": 0.0, "bytes": LEAST_RESIDENT}


def pytest_configure(config: pytest.Config) -> None:
    """Of the compiled programs kept by tests, those go that none has used for a month."""
    if not hasattr(config, "workerinput"):
        for path in Path(COMPILED).glob("*-cache"):
            if time.time() - path.stat().st_atime > 30 * 24 * 3600:
                path.unlink(missing_ok=True)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Files with cases of ten seconds and more come first: at the end, short ones keep all workers busy.

    Those that judge float32 results by tests/closeness.py are `numerics`.
    """
    items.sort(key=lambda item: item.nodeid.split("::")[0].removeprefix("tests/") not in LONG)
    for item in items:
        if hasattr(getattr(item, "module", None), "assert_as_close"):
            item.add_marker("numerics")


def pytest_collection_finish(session: pytest.Session) -> None:
    """The garbage collector spares the libraries, which tests have imported by now, and comes less often."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(20_000, 20, 10)


@pytest.fixture(autouse=True)
def little_memory():
    """Release compiled programs and arrays once a worker has grown by half a GiB, or has many memory maps.

    XLA takes about a hundred maps for each program on a CPU and dies of a segmentation fault where Linux gives it no
    more (65,530). To count them takes milliseconds, so they are counted after some work only.
    """
    yield
    if "jax" not in sys.modules or time.process_time() - released["seconds"] < 2 or not STATM.exists():
        return
    if resident() > released["bytes"] + 2**29 or len(Path("/proc/self/maps").read_bytes().splitlines()) > 40_000:
        sys.modules["jax"].clear_caches()
        gc.collect()
        ctypes.CDLL(None).malloc_trim(0)  # freed memory goes back to the system
        released["bytes"] = max(resident(), LEAST_RESIDENT)
    released["seconds"] = time.process_time()


def resident() -> int:
    """Return the resident memory of this process in bytes."""
    return int(STATM.read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


@pytest.fixture(autouse=True)
def no_forks_left():
    """A test that fails must not leave a run behind."""
    yield
    if "tests.forks" in sys.modules:
        sys.modules["tests.forks"].end_all()


@pytest.fixture(autouse=True)
def no_ranks_left():
    """What a strategy of several processes leaves in this one must not reach the processes that later tests start."""
    yield
    for name in ("MASTER_ADDR", "MASTER_PORT", "NODE_RANK", "RANK", "LOCAL_RANK", "WORLD_SIZE",
                 "LMMODS_LAUNCHER"):
        os.environ.pop(name, None)
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


@pytest.fixture(autouse=True)
def no_wandb_run_left():
    """Lightning's logger goes on with a W&B run that is open, in the folder of the test that began it."""
    yield
    if "wandb" in sys.modules and sys.modules["wandb"].run is not None:
        sys.modules["wandb"].finish()


@pytest.fixture(scope="session")
def shared(tmp_path_factory) -> Callable[[str, Callable[[Path], object]], Path]:
    """A function that gives the folder of a name, the same one to all workers; the first that asks for it fills it."""
    root = tmp_path_factory.getbasetemp()
    root = (root.parent if "PYTEST_XDIST_WORKER" in os.environ else root) / "shared"
    root.mkdir(exist_ok=True)

    def folder(name: str, fill: Callable[[Path], object]) -> Path:
        path = root / name
        with FileLock(root / f"{name}.lock"):
            if not (root / f"{name}.made").exists():
                shutil.rmtree(path, ignore_errors=True)  # of one who failed
                path.mkdir()
                fill(path)
                (root / f"{name}.made").touch()
        return path

    return folder


@pytest.fixture(scope="session", autouse=True)
def own_cache(shared) -> Iterator[None]:
    """What tests tokenise is theirs: all workers share it, and the user's cache keeps nothing but compiled programs."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("LMMODS_CACHE", str(shared("cache", lambda folder: None)))
        yield


@pytest.fixture(scope="session")
def tokenizer_folder(shared) -> Path:
    """A byte-level tokenizer of 320 tokens with <s>, </s>, <unk> and no pad token."""
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
    """A function that gives a random Llama of so many layers, not square, with dropout, and the tokenizer beside it."""
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
    """The one of most runs, for which a second layer would be traced, compiled and trained to show nothing more."""
    return llama_of(1)


@pytest.fixture(scope="session")
def instructions(shared) -> Path:
    """36 alpaca rows of unequal length."""
    rows = [{"instruction": f"Add {n} and {n + 1}.", "input": "" if n % 3 else "one " * (n % 7),
             "output": " ".join(str(n + k) for k in range(1 + n % 5))} for n in range(36)]
    text = "".join(json.dumps(row) + "\n" for row in rows)
    return shared("rows", lambda folder: (folder / "rows.jsonl").write_text(text)) / "rows.jsonl"


@pytest.fixture
def pairs(tmp_path) -> str:
    """Eight rows of preferences, their answers of different lengths."""
    path = tmp_path / "pairs.jsonl"
    path.write_text("".join(json.dumps({
        "prompt": f"Add {n} and {n + 1}." + " Please." * (n % 3), "chosen": f"The sum is {2 * n + 1}." * (1 + n % 2),
        "rejected": "No idea." * (1 + n % 4)}) + "\n" for n in range(8)))
    return str(path)


@pytest.fixture
def recipe(tmp_path, llama_folder, instructions):
    """A function that writes the recipe of a tiny QLoRA run, changed by dotted keys, and returns its arguments."""
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
            # batches of one length, as programs are compiled for each
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
    """A function that gives the finished run of a recipe by its changes, trained once for all tests and workers.

    A test may look at it. What would change it works on a copy, in the folder of this name beside the test's own files.
    """
    from lmmods.cli import main
    from lmmods.runs.folder import RunFolder

    def run(copy: str | None = None, **changes) -> RunFolder:
        def train(folder: Path) -> None:
            assert main(["fit", *recipe("finished.yaml", **changes,
                                        trainer__default_root_dir=str(folder / "run"))]) == 0

        key = hashlib.sha256(json.dumps(changes, sort_keys=True).encode()).hexdigest()[:16]
        made = RunFolder(shared(f"run-{key}", train) / "run")
        if copy is None:
            return made
        own = RunFolder(shutil.copytree(made.root, tmp_path / copy, symlinks=True))
        own.config.write_text(own.config.read_text().replace(str(made.root), str(own.root)))
        return own

    return run


@pytest.fixture
def stop_at():
    """Ask for an interruption in the n-th micro-batch of a process, as Ctrl+C would; 0 lets it run to the end."""
    from tests import interruptions

    yield interruptions.stop_at
    interruptions.stop_at(0)
