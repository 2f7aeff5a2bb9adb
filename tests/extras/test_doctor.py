"""`doctor`: findings on simulated machines, wrong kernels, engines that hang, and the report on this machine."""

import pytest
import torch

from lmmods.cli import main
from lmmods.core.versions import Dependency, Project
from lmmods.extras import doctor
from lmmods.extras.doctor import Findings
from lmmods.torch_engine import probe

TORCH = {"version": "2.13.0", "cuda": None, "threads": 4, "nccl": False, "met": "", "gpus": [],
         "precision": ["32-true", "so"], "kernels": {"cpu": {"nf4": "", "fp4": "", "int8": ""}}}
JAX = {"version": "0.10", "flax": "0.12", "platform": "cpu", "devices": ["cpu"] * 2, "precision": ["32-true", "so"],
       "products": {"cpu:0": ""}}


def run_check(check, *args) -> tuple[list[str], Findings]:
    findings = Findings(width=10_000)
    check(*args, findings)
    return findings.problems, findings


def test_libraries_outside_the_tested_versions_are_reported(capsys):
    present = Dependency("torch", ">=2", None)
    problems, _ = run_check(doctor.check_versions, Project("1", ">=3.11", (
        present, Dependency("numpy", "<1", None), Dependency("no-such-library", ">=1", None),
        Dependency("no-such-extra", "", "eval"), Dependency("pytest", "<1", "dev"))))
    assert problems == ["no-such-library is not installed"]
    output = capsys.readouterr().out
    assert "pip install 'numpy<1'" in output and "1 of 3 libraries" in output and f"torch {present.installed}" in output
    assert "extras not installed: eval" in output and "pytest" not in output
    problems, _ = run_check(doctor.check_versions, Project("1", ">=4", (present,)))
    assert len(problems) == 1 and problems[0].startswith("Python 3.")


@pytest.mark.parametrize(("check", "answer", "expected"), [
    (doctor.check_torch, TORCH, []), (doctor.check_jax, JAX, []),
    (doctor.check_torch, "it hangs", ["engine torch: it hangs"]), (doctor.check_jax, "no", ["engine jax: no"]),
    (doctor.check_torch, {**TORCH, "met": "refused"},
     ["two processes on this machine cannot connect over a port: refused"]),
    (doctor.check_torch, {**TORCH, "kernels": {"cpu": {"nf4": "", "fp4": "", "int8": ""},
                                               "cuda:0": {"nf4": "no kernel", "fp4": "", "int8": ""}}},
     ["bitsandbytes on cuda:0: nf4 does not work: no kernel"]),
    (doctor.check_jax, {**JAX, "products": {"cuda:0": "off"}}, ["jax on cuda:0: off"])])
def test_problems_of_an_engine_are_reported(check, answer, expected, capsys):
    assert run_check(check, answer)[0] == expected
    output = capsys.readouterr().out
    assert ("-> " in output) == bool(expected) and ("2 x cpu" in output) == (answer is JAX or "products" in answer)


def test_a_gpu_that_the_libraries_cannot_use_is_reported(monkeypatch, capsys):
    monkeypatch.setattr(doctor.Path, "exists", lambda path: str(path) == "/dev/nvidia0")
    assert run_check(doctor.check_torch, TORCH)[0] == ["there is an NVIDIA GPU, but this torch is built for CPUs"]
    assert "CUDA 13" in run_check(doctor.check_torch, {**TORCH, "cuda": "13"})[0][0]
    assert not run_check(doctor.check_jax, JAX)[0] and "JAX does not use" in capsys.readouterr().out


def test_a_kernel_with_wrong_products_is_reported(monkeypatch):
    import bitsandbytes as bnb

    cpu = torch.device("cpu")
    assert probe.kernels(cpu) == {"nf4": "", "fp4": "", "int8": ""}
    exact = bnb.matmul_4bit
    monkeypatch.setattr(bnb, "matmul_4bit", lambda *args, **options: exact(*args, **options) * 1.01)
    assert "a matrix product is off by 0.01 of its scale" in probe.kernels(cpu)["nf4"]

    def fail(*_, **__):
        raise RuntimeError("no kernel image")

    monkeypatch.setattr(bnb, "matmul_4bit", fail)
    assert probe.kernels(cpu) == {"nf4": "RuntimeError: no kernel image", "fp4": "RuntimeError: no kernel image",
                                  "int8": ""}


def test_an_engine_that_hangs_or_crashes_is_reported(monkeypatch, tmp_path):
    (tmp_path / "hangs.py").write_text("import time; time.sleep(60)")
    (tmp_path / "crashes.py").write_text("import os, sys; print('why', file=sys.stderr, flush=True); os.abort()")
    (tmp_path / "works.py").write_text("print('noise'); print('{\"a\": 1}')")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    probes = [doctor._Probe(name) for name in ("crashes", "works", "no_such_module", "hangs")]
    assert probes[0].answer() == "why (status -6)"
    assert probes[1].answer() == {"a": 1} and "No module named no_such_module" in probes[2].answer()
    monkeypatch.setattr(doctor, "PROBE_SECONDS", 0.1)
    assert probes[3].answer() == "no answer within 0.1 seconds"


@pytest.mark.slow
def test_the_report_on_this_machine_shows_no_secrets(monkeypatch, tmp_path, capsys):
    secret = "planted-" + "s3cret"
    for name in ("HF_TOKEN", "WANDB_API_KEY"):
        monkeypatch.setenv(name, secret)
    cache = tmp_path / "cache"
    (cache / "sftdata-1").mkdir(parents=True)
    (cache / "sftdata-1" / "manifest.json").write_text("x" * 5000)
    (cache / "reference-1").mkdir()
    (cache / "reference-1" / "manifest.json").write_text("x" * 7000)
    (cache / "mine-1").mkdir()
    (cache / "mine-1" / "manifest.json").write_text("x" * 9000)  # not created by lmmods: neither counted nor cleared
    monkeypatch.setenv("LMMODS_CACHE", str(cache))
    monkeypatch.setenv("MASTER_ADDR", "elsewhere")
    assert main(["doctor"]) == 0
    output = capsys.readouterr()
    text = " ".join(output.out.split())
    for part in ("; a token is set", "an API key is set", "the cache has 12 KiB",
                 f"rm -r {cache}/reference-* {cache}/sftdata-*",
                 "bitsandbytes on cpu: nf4, fp4, int8 multiply", "two processes on this machine connect", "jax 0.",
                 "MASTER_ADDR=elsewhere"):
        assert part in text, (part, output.out)
    assert "mine" not in output.out and secret not in output.out + output.err and len(output.out.splitlines()) < 60
    monkeypatch.setattr(doctor, "PROBES", {"torch": "no_such_module", "jax": "no_such_module"})
    assert main(["doctor"]) == 2 and "error: 2 problems, see above." in capsys.readouterr().err
