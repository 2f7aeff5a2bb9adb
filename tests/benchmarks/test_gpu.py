"""The benchmark on a GPU, run at toy sizes on the CPU: profiles of both engines, and peers on the same rows."""

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent.parent


@pytest.fixture(autouse=True)
def programs(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks" / "workers"))
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    # pytest may have imported other modules with these names
    for name in ("data", "work", "pair", "table", "plans", "startup", "roofline", "rounds", "profiled", "xla_trace",
                 "step_time", "bench", "gpu"):
        monkeypatch.delitem(sys.modules, name, raising=False)


@pytest.fixture(scope="module")
def training(tmp_path_factory):
    """Folder with what a toy QLoRA training needs in `qlora`."""
    folder = tmp_path_factory.mktemp("training")
    (folder / "qlora").mkdir()
    program = str(ROOT / "benchmarks" / "gpu.py")
    subprocess.run([sys.executable, program, "--smoke", "--part", "write-qlora", "--folder", str(folder)], check=True,
                   env={**os.environ, "PYTHONPATH": str(ROOT), "LMMODS_CACHE": str(folder / "cache")}, timeout=240)
    return folder


def test_each_instant_of_a_profile_counts_once():
    from step_time import Span, divide

    spans = [Span("thread", 1.0, 5.0, "aten::linear", "linear"), Span("thread", 2.0, 4.0, "aten::mm [rank]", "mm"),
             Span("stream", 3.0, 6.0, "? > new_kernel", "new_kernel"), Span("stream", 8.0, 99.0, "> memcpy", "copy")]
    result = divide(spans, 0.0, 10.0)
    parts = {group: seconds for group, seconds in result["parts"].items() if seconds}
    # Two lanes run at once from 3 to 5.
    assert parts == {"products": 1.5, "adapters": 1.5, "other": 2.0, "copies": 2.0, "host": 3.0}
    assert result["other"] == {"new_kernel": 2.0}


def event(cat, name, ts, dur, tid=1, **args):
    return {"ph": "X", "cat": cat, "name": name, "ts": ts, "dur": dur, "pid": 0, "tid": tid, "args": args}


def test_kernels_on_a_gpu_belong_to_the_callers_of_their_launch(tmp_path):
    from profiled import read_torch_trace

    def launch(number, ts, thread=1):
        return event("cuda_runtime", "cudaLaunchKernel", ts, 1, thread, correlation=number)

    def kernel(name, number, ts, dur, stream=7):
        return event("kernel", name, ts, dur, stream, correlation=number)

    shapes = [[[16, 64], [64, 64]], [[16, 64], [64, 8]], [[16, 64], [64, 500]]]
    nvjet = "nvjet_tst_128x256_64x4"
    events = [
        event("user_annotation", "profiled steps", 0, 1000),
        event("cpu_op", "_AdaptedProduct", 10, 50),
        event("cpu_op", "bitsandbytes::dequantize_4bit", 11, 5), launch(1, 12), kernel("kDequantize", 1, 100, 40),
        event("cpu_op", "aten::mm", 20, 10, **{"Input Dims": shapes[0]}), launch(2, 21), kernel(nvjet, 2, 140, 200),
        event("cpu_op", "aten::mm", 40, 10, **{"Input Dims": shapes[1]}), launch(3, 41), kernel(nvjet, 3, 340, 30),
        event("cpu_op", "_ChunkedSumsBackward", 70, 50, 2), launch(4, 75, 2),
        event("cpu_op", "aten::mm", 80, 10, 2, **{"Input Dims": shapes[2]}), launch(5, 81, 2),
        kernel("vectorized_elementwise_kernel", 4, 400, 20), kernel(nvjet, 5, 420, 80),
        event("user_annotation", "Optimizer.step#AdamW.step", 150, 60), launch(6, 170),
        kernel("multi_tensor_apply_kernel", 6, 500, 10),
        event("cpu_op", "triton_red_fused_mul_0", 220, 9),
        event("cuda_driver", "cuLaunchKernel", 222, 1, correlation=7),
        kernel("triton_red_fused_mul_0", 7, 520, 60), kernel("pytorch_flash::flash_fwd_kernel", 8, 600, 70),
        event("gpu_memcpy", "Memcpy HtoD (Pinned -> Device)", 700, 5, 7, correlation=9),
        kernel("unheard_of", 10, 600, 70, stream=8)]
    (tmp_path / "trace.json").write_text(json.dumps({"traceEvents": events}))
    result = read_torch_trace(tmp_path / "trace.json", 500, 8)
    microseconds = {group: round(1e6 * seconds) for group, seconds in result["parts"].items()}
    assert microseconds == {
        "dequantisation": 40, "products": 200, "adapters": 30, "head and loss": 100, "optimiser": 10,
        "norms and activations": 60, "attention": 35, "copies": 5, "other": 35, "host": 485}
    assert list(result["other"]) == ["unheard_of"]
    assert result["products"] == {"16 64 64": 1, "16 64 8": 1, "16 64 500": 1}


PROGRAM = """HloModule jit__fun

FileNames
1 "/x/jax_engine/models/linear.py"
2 "/x/jax_engine/distributed/loss.py"
3 "/x/jax_engine/models/attention.py"
4 "/x/jax_engine/distributed/steps.py"

FunctionNames
1 "Linear._product"
2 "cross_entropies"
3 "Attention._attend"
4 "Linear._adapter"
5 "Steps._full_step"

FileLocations
1 {file_name_id=1 function_name_id=1 line=5}
2 {file_name_id=2 function_name_id=2 line=5}
3 {file_name_id=3 function_name_id=3 line=5}
4 {file_name_id=1 function_name_id=4 line=5}
5 {file_name_id=4 function_name_id=5 line=5}

StackFrames
1 {file_location_id=1 parent_frame_id=3}
2 {file_location_id=2 parent_frame_id=5}
3 {file_location_id=3 parent_frame_id=5}
4 {file_location_id=1 parent_frame_id=2}
5 {file_location_id=5 parent_frame_id=5}
6 {file_location_id=4 parent_frame_id=3}

%fused (a: f32[4,8], b: f32[50,8]) -> f32[4,50] {
  %a = f32[4,8]{1,0} parameter(0)
  %b = f32[50,8]{1,0} parameter(1)
  ROOT %dot.1 = f32[4,50]{1,0} dot(%a, %b), metadata={stack_frame_id=1}
}

ENTRY %main (x: f32[4,8], w: f32[8,8]) -> f32[4,8] {
  %x = f32[4,8]{1,0} parameter(0)
  %w = f32[8,8]{1,0} parameter(1)
  %a = f32[2,8]{1,0} parameter(2)
  %codes = u8[8,4]{1,0} parameter(3)
  %matrix = f32[8,8]{1,0} multiply(%codes, %codes), metadata={stack_frame_id=1}
  %layer = f32[4,8]{1,0} dot(%x, %w), metadata={stack_frame_id=1}
  %low = f32[4,2]{1,0} dot(%x, %a)
  %scale = f32[4,2]{1,0} multiply(%low, %low), metadata={stack_frame_id=6}
  %scores = f32[2,4,4]{2,1,0} dot(%x, %x), lhs_batch_dims={0}, rhs_batch_dims={0}
  %softmax = f32[4,8]{1,0} exponential(%layer), metadata={stack_frame_id=3}
  %logits = f32[4,50]{1,0} fusion(%x, %w), kind=kLoop, calls=%fused, metadata={stack_frame_id=1}
  %chunk = f32[4,8]{1,0} multiply(%layer, %x), metadata={stack_frame_id=4}
  %norm = f32[4,8]{1,0} multiply(%layer, %x), metadata={stack_frame_id=1}
  %moved = f32[4,8]{0,1} copy(%layer)
  %cublas-gemm.1 = (f32[4,8]{1,0}, s8[64]{0}) custom-call(%x, %w), custom_call_target="__cublas$gemm", metadata={stack_frame_id=3}, backend_config={"gemm_backend_config":{"dot_dimension_numbers":{"lhs_batch_dimensions":[]}}}
  %cublas-gemm.2 = (f32[2,4,4]{2,1,0}, s8[64]{0}) custom-call(%x, %x), custom_call_target="__cublas$gemm", backend_config={"gemm_backend_config":{"dot_dimension_numbers":{"lhs_batch_dimensions":["0"]}}}
  %cudnn-fmha.3 = (f32[4,8]{1,0}, u8[0]{0}) custom-call(%x, %x, %x), custom_call_target="__cudnn$fmhaSoftmax"
  ROOT %sum = f32[4,8]{1,0} add(%layer, %x)
}
"""  # noqa: E501


def test_xla_operations_are_grouped_by_source_and_shape(tmp_path):
    from step_time import find_group
    from xla_trace import find_origins, read_program

    (tmp_path / "program.txt").write_text(PROGRAM)
    origins = find_origins(read_program(tmp_path / "program.txt"), "50", "2")
    groups = {"matrix": "dequantisation", "layer": "products", "low": "adapters", "scale": "adapters",
              "scores": "attention", "softmax": "attention", "logits": "head and loss", "chunk": "head and loss",
              "norm": "norms and activations", "moved": "copies", "cublas-gemm.2": "attention",
              "cudnn-fmha.3": "attention", "sum": "other"}
    assert {name: find_group(origins[name]) for name in groups} == groups
    assert "[product]" in origins["cublas-gemm.1"]


def test_a_trace_of_xla_on_a_gpu_counts_its_streams_alone(tmp_path):
    from jax.profiler import ProfileData
    from xla_trace import read_jax_trace

    kernels = [("nvjet_tst_64x8", "layer", 10, 20), ("flash_fprop_sm90", "cudnn-fmha.3", 40, 10),
               ("MemcpyD2D", None, 55, 5), ("input_add_fusion", "sum", 60, 4)]  # name, operation, start and duration
    names = ["profiled steps", "Thunk", *(name for name, *_ in kernels)]

    def plane(name, line, events):
        lines = "".join(
            f'events {{ metadata_id: {names.index(name) + 1} offset_ps: {start}000000 duration_ps: {duration}000000 '
            + (f'stats {{ metadata_id: 1 str_value: "{operation}" }} ' if operation else "") + "}"
            for name, operation, start, duration in events)
        metadata = "".join(f'event_metadata {{ key: {index} value {{ id: {index} name: "{name}" }} }}'
                           for index, name in enumerate(names, 1))
        return (f'planes {{ name: "{name}" lines {{ name: "{line}" {lines} }} {metadata} '
                'stat_metadata { key: 1 value { id: 1 name: "hlo_op" } } }')

    space = (plane("/host:CPU", "python", [("profiled steps", None, 0, 100), ("Thunk", "layer", 70, 9)])
             + plane("/device:GPU:0", "Stream #7(Kernel)", kernels))
    (tmp_path / "t.xplane.pb").write_bytes(ProfileData.text_proto_to_serialized_xspace(space))
    (tmp_path / "step.gpu_after_optimizations.txt").write_text(PROGRAM)
    result = read_jax_trace(tmp_path, tmp_path, 50, 2)
    microseconds = {group: round(1e6 * seconds) for group, seconds in result["parts"].items() if seconds > 1e-9}
    assert microseconds == {"products": 20, "attention": 10, "copies": 5, "other": 4, "host": 61}
    assert list(result["other"]) == ["input_add_fusion"]


@pytest.mark.slow
@pytest.mark.parametrize("engine", ["torch", "jax"])
def test_a_profile_of_a_step_adds_up(training, engine):
    import gpu

    report = gpu.profile_side(gpu.SMOKE, "qlora", engine, training, 240)
    assert "error" not in report, report
    parts = report["parts"]
    # By the clock of the steps, which the trace does not know.
    assert sum(parts.values()) == pytest.approx(report["traced"], rel=gpu.SUM_TOLERANCE)
    assert all(seconds > 0 for group, seconds in parts.items() if group != "other"), parts
    assert parts["other"] < 0.2 * report["traced"], report["other"]
    lines = gpu.make_profile_table({"qlora": report, "lora": {"error": "out of memory"}}).splitlines()
    assert len(lines) == 2 + len(parts) + 3 + 1 + 2 and lines[-1] == "lora: out of memory"


def test_a_profile_that_does_not_add_up_is_an_error(tmp_path, monkeypatch):
    import gpu

    (tmp_path / "clm").mkdir()
    report = {"parts": {"products": 0.9, "host": 0.05}, "traced": 1.0, "wall": 1.0}
    (tmp_path / "clm" / "torch.json").write_text(json.dumps(report))
    monkeypatch.setattr(gpu, "run_worker", lambda *_: "")
    figures = gpu.profile_side(gpu.SMOKE, "clm", "torch", tmp_path, 9)
    assert figures["error"] == "groups and gaps make 0.950 s of 1.000 s"
    report["parts"]["host"] = 0.099
    (tmp_path / "clm" / "torch.json").write_text(json.dumps(report))
    assert "error" not in gpu.profile_side(gpu.SMOKE, "clm", "torch", tmp_path, 9)


def test_peers_on_a_gpu_have_environments_and_programs():
    import gpu

    for training in gpu.TRAININGS.values():
        for peer in training.peers.values():
            assert (ROOT / "benchmarks" / "peers" / f"{peer.environment}.txt").exists()
            assert (ROOT / "benchmarks" / "workers" / peer.program).exists()
            assert "quantization_config" not in peer.tuned and peer.tuned.get("gradient_checkpointing") is not True


@pytest.mark.slow
def test_peers_train_the_same_rows_from_the_same_loss_and_failures_are_rows(training):
    pytest.importorskip("trl")
    import gpu

    results = {("qlora", side): gpu.run_side(gpu.SMOKE, "qlora", side, training, 240)
               for side in ("torch", "TRL + Liger, grouped", "TRL + Liger, packed")}
    assert all(result["speed"] > 0 and result["peak"] > 0 for result in results.values()), results
    assert len({round(result["loss"], 2) for result in results.values()}) == 1
    peers = gpu.SMOKE.trainings["qlora"].peers | {"broken": replace(gpu.TRL, program="no_such_peer.py"),
                                                  "slow": replace(gpu.TRL)}
    sizes = replace(gpu.SMOKE, trainings={"qlora": replace(gpu.SMOKE.trainings["qlora"], peers=peers)})
    results["qlora", "broken"] = gpu.run_side(sizes, "qlora", "broken", training, 60)
    results["qlora", "slow"] = gpu.run_side(sizes, "qlora", "slow", training, 0.1)
    results["qlora", "other model"] = results["qlora", "torch"] | {"loss": 9.0}
    notes = [line.split("|")[-2].strip() for line in gpu.make_table(results, sizes, {}).splitlines()[2:]]
    assert notes[:3] == [""] * 3 and "No such file" in notes[3] and notes[4] == "no report within 0.1 s"
    assert notes[5].startswith("another loss before training: 9.0000")


def test_a_peer_that_cannot_be_installed_is_a_row(tmp_path, monkeypatch):
    import gpu

    def fail(environment):
        subprocess.run([sys.executable, "-c", "raise SystemExit(3)"], check=True)

    monkeypatch.setattr(gpu, "make_environment", fail)
    figures = gpu.run_side(gpu.Sizes(), "qlora", "Unsloth, grouped", tmp_path, 9)
    assert figures["error"].endswith("returned non-zero exit status 3.")
