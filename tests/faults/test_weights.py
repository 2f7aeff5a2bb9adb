"""Unreadable weights, missing attention kernels and out of memory are one message, on both engines."""

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
    """When it is unpickled, it makes a folder."""

    def __init__(self, mark):
        self.mark = mark

    def __reduce__(self):
        return os.mkdir, (self.mark,)


@pytest.fixture
def folder_of(llama_folder, tmp_path):
    """Return a function that copies the model folder with this file instead of its safetensors."""
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
def test_a_folder_of_torch_files_trains_like_its_safetensors(engine, zipped, recipe, llama_folder, folder_of, tmp_path):
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
def test_unreadable_weights_are_one_message_and_run_no_code(engine, damage, message, recipe, llama_folder, folder_of,
                                                            tmp_path, capsys):
    weights = load_file(llama_folder / "model.safetensors")
    torch.save(weights, tmp_path / "whole.bin")
    valid = (tmp_path / "whole.bin").read_bytes()
    content = {"code": {**weights, "x": Code(str(tmp_path / "ran"))}, "half": valid[:len(valid) // 2], "empty": b"",
               "text": b"hello world", "pointer": b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 1\n",
               "safetensors": b"\x08\0\0\0\0\0\0\0{}"}[damage]
    name = "model.safetensors" if damage == "safetensors" else "pytorch_model.bin"
    folder = folder_of(content, name)
    assert main(["fit", *recipe(engine=engine, **SMALL, model__init_args__pretrained=str(folder))]) == 2
    error = capsys.readouterr().err
    assert message in error and error.startswith("error: model.pretrained") and error.count("\n") == 1
    assert not (tmp_path / "ran").exists() and not (tmp_path / "run").exists()


@pytest.mark.parametrize("name", ["flash_attention_2", "flash_attention_3", "no_such_kernel"])
@pytest.mark.parametrize("scratch", [False, True])
def test_an_attention_kernel_that_is_not_installed_is_an_error(name, scratch, recipe, llama_folder, capsys):
    changes = {**SMALL, "model__init_args__attention": name}
    if scratch:
        changes |= {"model__init_args__pretrained": None, "model__init_args__lora": None,
                    "model__init_args__config": str(llama_folder), "data__init_args__tokenizer": str(llama_folder)}
    assert main(["fit", *recipe(**changes)]) == 2
    error = capsys.readouterr().err
    assert f"model.attention is '{name}', which does not work here" in error and "sdpa, eager or null" in error
    assert ("Install the package flash-attn" in error) == name.startswith("flash")
    assert main(["fit", *recipe(engine="jax", **changes)]) == 2
    assert "model.attention" in capsys.readouterr().err


def exhaust_torch(*_args, **_kwargs):
    return torch.empty(10**15)


def exhaust_cuda(*_args, **_kwargs):
    raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of ...")


def exhaust_jax(*_args, **_kwargs):
    import jax.numpy as jnp

    return jnp.zeros(10**15)


def fail_jax_allocation(*_args, **_kwargs):
    raise ValueError("RESOURCE_EXHAUSTED: Out of memory allocating 4000000000000000 bytes.")


def exhaust_numpy(*_args, **_kwargs):
    return np.empty(10**15)


def fail_after(count, function, fails):
    """Return a function that calls `function` `count` times, then `fails`."""
    calls = {"left": count}

    def run(*args, **kwargs):
        calls["left"] -= 1
        return function(*args, **kwargs) if calls["left"] >= 0 else fails()

    return run


@pytest.mark.parametrize(("engine", "fails"), [
    ("torch", exhaust_torch), ("torch", exhaust_cuda), ("torch", exhaust_numpy), ("jax", exhaust_jax),
    ("jax", fail_jax_allocation)])
def test_out_of_memory_reports_what_to_lower_and_how_to_resume(engine, fails, recipe, tmp_path, monkeypatch, capsys):
    changes = {"engine": engine, "trainer__max_steps": 4, "trainer__limit_val_batches": 0,
               "model__init_args__quantize": None}
    if engine == "torch":
        from lmmods.torch_engine.tasks.base import TaskModule

        owner, name = TaskModule, "training_step"
    else:
        from jax_engine.trainer import Loop

        owner, name = Loop, "train_step"
    step = getattr(owner, name)
    with monkeypatch.context() as patch:
        patch.setattr(owner, name, fail_after(3, step, fails))
        assert main(["fit", *recipe(**changes)]) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: Out of memory (") and error.count("\n") == 1, error
    assert all(key in error for key in ("data.batch_size", "data.max_length", "model.gradient_checkpointing",
                                        "model.lora", "model.quantize", "trainer.accumulate_grad_batches"))
    assert "Resume from the last checkpoint, step=2, with --ckpt_path last" in error
    assert main(["fit", *recipe(**changes), "--ckpt_path", "last"]) == 0  # as the message says
    assert (tmp_path / "run" / "completed").exists()


@pytest.mark.parametrize("fails", [exhaust_torch, exhaust_cuda, exhaust_jax, fail_jax_allocation, exhaust_numpy])
def test_errors_of_all_libraries_are_recognised_as_out_of_memory(fails):
    with pytest.raises((RuntimeError, MemoryError, ValueError)) as caught:
        fails()
    assert is_out_of_memory(caught.value)
    assert not is_out_of_memory(RuntimeError("mat1 and mat2 shapes cannot be multiplied"))
    assert not is_out_of_memory(ValueError("out of memory"))
    assert is_out_of_memory(ValueError("RESOURCE_EXHAUSTED: Out of memory allocating 8 bytes."))


def test_out_of_memory_while_loading_is_reported_as_such(recipe, monkeypatch, capsys):
    import transformers

    monkeypatch.setattr(transformers.AutoModelForCausalLM, "from_pretrained", exhaust_cuda)
    assert main(["fit", *recipe(**SMALL)]) == 2
    assert "error: Out of memory (CUDA out of memory." in capsys.readouterr().err


def test_a_damaged_torch_file_next_to_safetensors_is_ignored(recipe, llama_folder, folder_of):
    folder = folder_of(b"", "pytorch_model.bin")
    save_file(load_file(llama_folder / "model.safetensors"), folder / "model.safetensors", {"format": "pt"})
    assert main(["inspect", *recipe(**SMALL, model__init_args__pretrained=str(folder))]) == 0
