"""`inspect`: show the training data as the model sees it, or compare both engines on its first rows."""

import os
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from lmmods.core.console import say
from lmmods.core.errors import UserError
from lmmods.core.settings import require
from lmmods.recipe.engines import ENGINES
from lmmods.recipe.files import as_yaml
from lmmods.recipe.reader import Recipe, parse

if TYPE_CHECKING:
    from lmmods.commands.setup import Setup
    from lmmods.core.parity import Row
    from lmmods.data.base import DataModule

# Model keys that do not affect logits, or that one engine lacks. A comparison uses their defaults.
NEUTRAL = ("optimizer", "generation", "piece_tokens", "compile", "max_memory", "quant_storage", "save_dtype")


def inspect(parsed: Recipe, rows: int = 4,
            which: Literal["first", "longest", "most_cut", "most_unknown"] | list[int] = "first",
            recipe: bool = False, parity: bool = False) -> None:
    """Show training rows, loss mask, sizes and memory, without training.

    Args:
        rows: Number of rows to show, or to compare the engines on.
        which: Rows to show: the first, the worst by a measure, or a list of row indices.
        recipe: Also print the recipe with all defaults.
        parity: Instead, load the model in both engines in turn and report differences in logits, loss and gradient on
            the first training rows. The exit status is 1 if they disagree.

    Raises:
        UserError: The recipe cannot be loaded, or an engine does not support it.
        SystemExit: The engines differ; the status is 1.
    """
    from lmmods.commands.setup import Setup

    with Setup(parsed) as setup:
        if not parity:
            return setup.trainer.inspect(setup.model, setup.datamodule, rows, which, recipe)
        if which != "first" or recipe:
            raise UserError("--parity true only compares the engines on the first training rows. Remove --which and "
                            "--recipe.")
        if "LOCAL_RANK" in os.environ:
            raise UserError("--parity true runs in one process. Start it without a launcher.")
        require(rows >= 1, "--rows", rows, "1 or more")
        _compare(setup, rows)


def _compare(setup: "Setup", num_rows: int) -> None:
    """Load the model in both engines, one after the other, and print how far they differ."""
    import tempfile

    from lmmods.core.parity import compare

    # Otherwise JAX preallocates most of the GPU's memory and leaves too little for torch.
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    tree, neutral_keys = setup.recipe.whole(), setup.model.not_compared
    _check_comparable(_build_for_engine(tree, "jax", neutral_keys).model)
    rows = _first_rows(setup.datamodule, num_rows)
    _print_settings(tree, rows)
    with tempfile.TemporaryDirectory() as root:
        folders = [Path(root) / engine for engine in ENGINES]
        for folder in folders:
            folder.mkdir()
            # Built after the data is encoded, as objects that exist by then are exempt from garbage collection.
            engine_setup = _build_for_engine(tree, folder.name, neutral_keys)
            engine_setup.trainer.measure(engine_setup.model, setup.datamodule, rows, folder)
            del engine_setup
            setup.datamodule.trainer = None
            _free_memory()
        differences = compare(*folders)
    for difference in differences:
        say(str(difference))
    if not all(difference.passes for difference in differences):
        say("Parity: FAIL. The engines disagree on these rows. Do not train this model on JAX; torch runs "
            "transformers' own code.")
        raise SystemExit(1)
    say("Parity: pass. Both engines agree on these rows, up to rounding.")


def _build_for_engine(tree: dict[str, Any], engine: str, neutral_keys: tuple[str, ...]) -> "Setup":
    """Build a recipe on one engine, in float32 on one device, with the keys that both engines have.

    Args:
        tree: The recipe as plain values.
        neutral_keys: Further keys that get their defaults.
    """
    from lmmods.commands.setup import dry_setup, short_name

    model, data = ({**tree[part], "class_path": short_name(tree[part]["class_path"])} for part in ("model", "data"))
    fields = dict(model["init_args"])
    is_trusted = fields.pop("trust_remote_code", False)
    for name in (*NEUTRAL, *neutral_keys, *(["reference"] if fields.get("reference") == "cache" else [])):
        fields.pop(name, None)
    fields["gradient_checkpointing"] = bool(fields.get("gradient_checkpointing"))
    if fields.get("attention") not in ("sdpa", "eager"):
        fields.pop("attention", None)
    recipe = {"seed_everything": tree["seed_everything"], "engine": engine, "trainer": {"max_steps": 1},
              "model": {**model, "init_args": fields}, "data": data}
    parsed = parse(["inspect", "--config", as_yaml(recipe),
                    *(["--model.trust_remote_code", "true"] if is_trusted else [])], {})
    return dry_setup(parsed, precision="32-true", devices=1, accelerator=tree["trainer"]["accelerator"],
                     default_root_dir=tree["trainer"]["default_root_dir"])


def _print_settings(tree: dict[str, Any], rows: list[Any]) -> None:
    model, precision = tree["model"]["init_args"], tree["trainer"]["precision"]
    parts = [*([f"quantize: {model['quantize']}"] if model["quantize"] else []),
             *(["adapter"] if model.get("lora") or model.get("adapter") else [])]
    length = rows[0]["input_ids"].shape[-1]
    say(f"Parity: torch and JAX on the first {len(rows)} training rows, {length} tokens each with padding, "
        "without dropout, in 32-true" + (" instead of trainer.precision" if precision != "32-true" else "")
        + (f", with the recipe's {' and '.join(parts)}" if parts else "") + ".")
    if model.get("lora") and model["lora"]["init"] != "pissa":
        say("The B matrices of a new adapter are zero; this comparison sets them to the same small random values.")


def _first_rows(datamodule: "DataModule", num_rows: int) -> "list[Row]":
    """Return the first rows that a run would train on, each as a batch [1, ...], padded to the same length.

    Args:
        datamodule: Connected to its model, but not prepared yet. Its batch size is changed.

    Raises:
        UserError: The data cannot be read.
    """
    import numpy as np

    datamodule.batch_size, datamodule.num_workers = num_rows, 0
    datamodule.prepare_data()
    datamodule.setup("fit")
    batch = {name: np.asarray(values) for name, values in next(iter(datamodule.train_batches())).items()}
    return [{name: values[index : index + 1] for name, values in batch.items()}
            for index in range(len(batch["input_ids"]))]


def _check_comparable(model: Any) -> None:
    """Raise UserError if the engines cannot be compared on a model.

    Args:
        model: The task of the JAX engine.
    """
    from jax_engine.models.hub import find_family
    from lmmods.core.hf_config import load_config

    config = load_config(model.pretrained or model.config, model.overrides, model.revision)
    find_family(config, model.head)


def _free_memory() -> None:
    """Free the memory of a network that is no longer referenced."""
    import ctypes
    import gc
    import platform
    import sys

    gc.collect()
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_available():
        torch.cuda.empty_cache()
    if platform.libc_ver()[0] == "glibc":  # glibc keeps freed memory in fragmented arenas
        ctypes.CDLL(None).malloc_trim(0)
