"""Weights that cannot be read, attention that is not installed, memory that runs out: one message, on both engines."""

import os
import shutil

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from lmmods.cli import main
from lmmods.core.errors import is_out_of_memory
from lmmods.runs.folder import RunFolder

ENGINES = ("torch", "jax")
SMALL = {"model__init_args__quantize": None, "trainer__max_steps": 1, "trainer__limit_val_batches": 0}


class Code:
    """Pickled, it makes a folder when it is read."""

    def __init__(self, mark):
        self.mark = mark

    def __reduce__(self):
        return os.mkdir, (self.mark,)


@pytest.fixture
def folder_of(llama_folder, tmp_path):
    """A function that makes a copy of the model folder with a pytorch_model.bin in place of its safetensors."""
    def make(content: bytes | dict, name: str = "pytorch_model.bin", **options):
        folder = tmp_path / "base"
        shutil.copytree(llama_folder, folder, ignore=shutil.ignore_patterns("model.safetensors"))
        if isinstance(content, bytes):
            (folder / name).write_bytes(content)
        else:
            torch.save(content, folder / name, **options)
        return folder

    return make


@pytest.mark.slow
@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("zipped", [True, False])
def test_a_folder_of_torch_files_trains_as_its_safetensors(engine, zipped, recipe, llama_folder, folder_of, tmp_path):
    weights = load_file(llama_folder / "model.safetensors")
    folder = folder_of(weights, _use_new_zipfile_serialization=zipped)
    losses = []
    for name, base in (("bin", folder), ("safetensors", llama_folder)):
        changes = {"model__init_args__pretrained": str(base), "trainer__default_root_dir": str(tmp_path / name)}
        assert main(["fit", *recipe(engine=engine, **SMALL, **changes)]) == 0
        losses.append(RunFolder(tmp_path / name).metrics_csv.read_text().splitlines()[1].split(",")[1])
    assert losses[0] == losses[1]


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize(("damage", "message"), [
    ("code", "contains more than tensors. It is not loaded"), ("half", "cannot load"), ("empty", "is empty"),
    ("text", "not a torch file"), ("pointer", "Git LFS pointer"), ("safetensors", "cannot load"),
])
def test_weights_that_cannot_be_read(engine, damage, message, recipe, llama_folder, folder_of, tmp_path, capsys):
    weights = load_file(llama_folder / "model.safetensors")
    torch.save(weights, tmp_path / "whole.bin")
    whole = (tmp_path / "whole.bin").read_bytes()
    content = {"code": {**weights, "x": Code(str(tmp_path / "ran"))}, "half": whole[:len(whole) // 2], "empty": b"",
               "text": b"hello world", "pointer": b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 1\n",
               "safetensors": b"\x08\0\0\0\0\0\0\0{}"}[damage]
    name = "model.safetensors" if damage == "safetensors" else "pytorch_model.bin"
    folder = folder_of(content, name)
    assert main(["fit", *recipe(engine=engine, **SMALL, model__init_args__pretrained=str(folder))]) == 2
    said = capsys.readouterr().err
    assert message in said and said.startswith("error: model.pretrained") and said.count("\n") == 1
    assert not (tmp_path / "ran").exists() and not (tmp_path / "run").exists()


@pytest.mark.parametrize("name", ["flash_attention_2", "flash_attention_3", "no_such_kernel"])
@pytest.mark.parametrize("scratch", [False, True])
def test_attention_that_is_not_there(name, scratch, recipe, llama_folder, capsys):
    changes = {**SMALL, "model__init_args__attention": name}
    if scratch:
        changes |= {"model__init_args__pretrained": None, "model__init_args__lora": None,
                    "model__init_args__config": str(llama_folder), "data__init_args__tokenizer": str(llama_folder)}
    assert main(["fit", *recipe(**changes)]) == 2
    said = capsys.readouterr().err
    assert f"model.attention is '{name}', which does not work here" in said and "sdpa, eager or null" in said
    assert ("Install the package flash-attn" in said) == name.startswith("flash")
    assert main(["fit", *recipe(engine="jax", **changes)]) == 2
    assert "model.attention" in capsys.readouterr().err


def asks_torch(*_args, **_kwargs):
    return torch.empty(10**15)


def asks_cuda(*_args, **_kwargs):
    raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of ...")


def asks_jax(*_args, **_kwargs):
    import jax.numpy as jnp

    return jnp.zeros(10**15)


def asks_jax_again(*_args, **_kwargs):
    raise ValueError("RESOURCE_EXHAUSTED: Out of memory allocating 4000000000000000 bytes.")


def asks_numpy(*_args, **_kwargs):
    return np.empty(10**15)


def after(count, function, fails):
    """`function` so many times, then `fails`."""
    calls = {"left": count}

    def run(*args, **kwargs):
        calls["left"] -= 1
        return function(*args, **kwargs) if calls["left"] >= 0 else fails()

    return run


@pytest.mark.parametrize(("engine", "fails"), [("torch", asks_torch), ("torch", asks_cuda), ("torch", asks_numpy),
                                               ("jax", asks_jax), ("jax", asks_jax_again)])
def test_out_of_memory_says_what_to_lower_and_where_to_go_on(engine, fails, recipe, tmp_path, monkeypatch, capsys):
    changes = {"engine": engine, "trainer__max_steps": 4, "trainer__limit_val_batches": 0,
               "model__init_args__quantize": None}
    if engine == "torch":
        from lmmods.torch_engine.tasks.base import TaskModule

        owner, name = TaskModule, "training_step"
    else:
        from jax_engine.trainer import Loop

        owner, name = Loop, "train_step"
    whole = getattr(owner, name)
    with monkeypatch.context() as patch:
        patch.setattr(owner, name, after(3, whole, fails))
        assert main(["fit", *recipe(**changes)]) == 2
    said = capsys.readouterr().err
    assert said.startswith("error: Out of memory (") and said.count("\n") == 1, said
    assert all(key in said for key in ("data.batch_size", "data.max_length", "model.gradient_checkpointing",
                                       "model.lora", "model.quantize", "trainer.accumulate_grad_batches"))
    assert "Resume from the last checkpoint, step=2, with --ckpt_path last" in said
    assert main(["fit", *recipe(**changes), "--ckpt_path", "last"]) == 0  # which is true
    assert (tmp_path / "run" / "completed").exists()


@pytest.mark.parametrize("fails", [asks_torch, asks_cuda, asks_jax, asks_jax_again, asks_numpy])
def test_what_is_out_of_memory(fails):
    with pytest.raises((RuntimeError, MemoryError, ValueError)) as caught:
        fails()
    assert is_out_of_memory(caught.value)
    assert not is_out_of_memory(RuntimeError("mat1 and mat2 shapes cannot be multiplied"))
    assert not is_out_of_memory(ValueError("out of memory"))
    assert is_out_of_memory(ValueError("RESOURCE_EXHAUSTED: Out of memory allocating 8 bytes."))


def test_out_of_memory_while_loading_is_no_damaged_folder(recipe, monkeypatch, capsys):
    import transformers

    monkeypatch.setattr(transformers.AutoModelForCausalLM, "from_pretrained", asks_cuda)
    assert main(["fit", *recipe(**SMALL)]) == 2
    assert "error: Out of memory (CUDA out of memory." in capsys.readouterr().err


def test_a_damaged_file_beside_safetensors_is_none_of_ours(recipe, llama_folder, folder_of):
    folder = folder_of(b"", "pytorch_model.bin")
    save_file(load_file(llama_folder / "model.safetensors"), folder / "model.safetensors", {"format": "pt"})
    assert main(["inspect", *recipe(**SMALL, model__init_args__pretrained=str(folder))]) == 0
