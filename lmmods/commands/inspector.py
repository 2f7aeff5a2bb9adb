"""`inspect`: show the training data as the model sees it, or compare both engines on its first rows."""

import ctypes
import gc
import os
import platform
import sys
import tempfile
from pathlib import Path
from typing import Any, Literal

from lmmods.commands.early_check import check_early
from lmmods.commands.engine_cli import EngineCLI, short_name, types_of
from lmmods.core.console import say
from lmmods.core.errors import UserError
from lmmods.core.hf_config import load_config
from lmmods.core.parity import Row, compare, first_rows
from lmmods.core.settings import require
from lmmods.recipe.engines import ENGINES
from lmmods.recipe.files import as_yaml

# Model keys that do not affect logits or that one engine lacks; a comparison uses their defaults.
NEUTRAL = ("optimizer", "generation", "piece_tokens", "compile", "max_memory", "quant_storage", "save_dtype")


class Inspector(EngineCLI):
    """Engine command line with `inspect`; for a comparison it builds the other engine's classes too."""

    def inspect(self, model: Any, datamodule: Any, rows: int = 4,
                which: Literal["first", "longest", "most_cut", "most_unknown"] | list[int] = "first",
                recipe: bool = False, parity: bool = False) -> None:
        """Perform `inspect`; arguments as of `EngineCommands.inspect`.

        Raises:
            UserError: The recipe cannot be loaded, or one of the engines does not have what it asks for.
            SystemExit: The engines differ; the status is 1.
        """
        if not parity:
            return self.trainer.inspect(model, datamodule, rows, which, recipe)
        if which != "first" or recipe:
            raise UserError("--parity true compares the engines on the first rows of training and shows nothing else: "
                            "leave --which and --recipe out.")
        if "LOCAL_RANK" in os.environ:
            raise UserError("--parity true runs in one process: start it without a launcher.")
        require(rows >= 1, "--rows", rows, "1 or more")
        self._compare(datamodule, rows)

    def _compare(self, datamodule: Any, num_rows: int) -> None:
        # JAX would preallocate most of the GPU's memory and leave too little for torch.
        os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
        _check_comparable(Measuring.of(self, "jax").model)
        rows = first_rows(datamodule, num_rows)
        self._say_settings(rows)
        with tempfile.TemporaryDirectory() as root:
            folders = [Path(root) / engine for engine in ENGINES]
            for folder in folders:
                folder.mkdir()
                # Built only now: objects that exist while data are encoded are exempt from garbage collection.
                Measuring.of(self, folder.name).measure(datamodule, rows, folder)
                datamodule.trainer = None
                _give_memory_back()
            found = compare(*folders)
        for difference in found:
            say(str(difference))
        if not all(difference.passes for difference in found):
            say("Parity: FAIL. On these rows the engines do not compute the same with this model: do not train it on "
                "JAX. torch runs transformers' own code of it.")
            raise SystemExit(1)
        say("Parity: pass. On these rows both engines compute the same with this model, up to rounding.")

    def _say_settings(self, rows: list[Row]) -> None:
        model, precision = self.recipe.model.init_args, self.recipe.trainer.precision
        kept = [*([f"quantize: {model.quantize}"] if model.quantize else []),
                *(["the adapter"] if model.get("lora") or model.get("adapter") else [])]
        length = rows[0]["input_ids"].shape[-1]
        say(f"Parity: torch and JAX on the first {len(rows)} rows of training, {length} tokens each with padding, "
            "without dropout, in 32-true" + (", whatever trainer.precision says" if precision != "32-true" else "")
            + (f", with {' and '.join(kept)} of the recipe" if kept else "") + ".")
        if model.get("lora"):
            say("The B of a new adapter is zero; here it gets the same small random values in both engines.")


class Measuring(EngineCLI):
    """One engine's classes for the model of a recipe, in float32 on one device; runs only when `measure` is called."""

    @classmethod
    def of(cls, cli: EngineCLI, engine: str) -> "Measuring":
        """Build it from another command line's recipe, restricted to keys that both engines have."""
        whole = cli.whole_recipe()
        model, data = whole["model"], whole["data"]
        for part in (model, data):
            part["class_path"] = short_name(part["class_path"])
        fields = model["init_args"]
        trusts = fields.pop("trust_remote_code", False)
        for name in (*NEUTRAL, *(["reference"] if fields.get("reference") == "cache" else [])):
            fields.pop(name, None)
        fields["gradient_checkpointing"] = bool(fields.get("gradient_checkpointing"))
        if fields.get("attention") not in ("sdpa", "eager"):
            fields.pop("attention", None)
        trainer = {"precision": "32-true", "devices": 1, "accelerator": whole["trainer"]["accelerator"], "max_steps": 1,
                   "enable_checkpointing": False, "enable_progress_bar": False,
                   "default_root_dir": whole["trainer"]["default_root_dir"]}
        recipe = {"seed_everything": whole["seed_everything"], "engine": engine, "trainer": trainer, "model": model,
                  "data": data}
        arguments = ["inspect", "--config", as_yaml(recipe),
                     *(["--model.trust_remote_code", "true"] if trusts else [])]
        check_early(arguments, engine)
        return cls(types_of(engine), engine, arguments)

    def inspect(self, **_: Any) -> None:
        """Do nothing: the work is done by `measure`."""

    def measure(self, datamodule: Any, rows: list[Row], folder: Path) -> None:
        """Load the network and write its outputs for these rows."""
        self.trainer.measure(self.model, datamodule, rows, folder)


def _check_comparable(model: Any) -> None:
    """Raise UserError if the engines cannot be compared on a model.

    Args:
        model: The task of the JAX engine.
    """
    from jax_engine.models.hub import family_of

    config = load_config(model.pretrained or model.config, model.overrides, model.revision)
    family_of(config, model.head)


def _give_memory_back() -> None:
    """Free the memory of a network that is no longer referenced."""
    gc.collect()
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_available():
        torch.cuda.empty_cache()
    if platform.libc_ver()[0] == "glibc":  # glibc keeps freed memory in fragmented arenas
        ctypes.CDLL(None).malloc_trim(0)
