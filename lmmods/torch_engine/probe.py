"""Report torch's devices and working kernels as JSON, for `doctor`: `python -m lmmods.torch_engine.probe`.

Run it in a separate process, so that a hanging driver or a crashing kernel does not affect the caller.
"""

import json
import multiprocessing
import socket
import sys
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from lmmods.torch_engine.precision import choose_precision

SECONDS = 10  # timeout for two processes to connect


def probe() -> dict[str, Any]:
    """Return devices, precision, and problems of kernels and of communication between two processes."""
    problem = connect_processes()  # first, as forking is only safe before devices and threads are in use
    devices = [torch.device("cpu"), *(torch.device("cuda", index) for index in range(torch.cuda.device_count()))]
    return {
        "version": torch.__version__, "cuda": torch.version.cuda, "threads": torch.get_num_threads(),
        "nccl": dist.is_available() and dist.is_nccl_available(), "met": problem,
        "gpus": [_gpu(device) for device in devices[1:]], "precision": choose_precision("auto"),
        "kernels": {str(device): kernels(device) for device in devices}}


def _gpu(device: torch.device) -> dict[str, Any]:
    free, total = torch.cuda.mem_get_info(device)
    return {"name": torch.cuda.get_device_name(device), "free": free, "total": total}


def kernels(device: torch.device) -> dict[str, str]:
    """Return the problem of each quantisation of bitsandbytes on a device; empty for those that work."""
    try:
        import bitsandbytes  # noqa: F401
    except Exception as error:  # usually a CUDA library that cannot be loaded
        return dict.fromkeys(("nf4", "fp4", "int8"), f"bitsandbytes cannot be imported: {error}")
    return {name: _find_problem(name, device) for name in ("nf4", "fp4", "int8")}


def _find_problem(name: str, device: torch.device) -> str:
    """Compare products with a quantised matrix and with its dequantised matrix; return the problem, if any."""
    import bitsandbytes as bnb

    random = torch.Generator().manual_seed(0)
    weight, inputs = torch.randn(96, 128, generator=random), torch.randn(8, 128, generator=random)
    try:
        if name == "int8":
            layer = bnb.nn.Linear8bitLt(128, 96, bias=False, has_fp16_weights=False)
            layer.weight = bnb.nn.Int8Params(weight, requires_grad=False, has_fp16_weights=False)
            layer, max_error = layer.to(device).eval(), 0.03  # inputs are also rounded to 8 bits
            dequantized = layer.weight.CB.float() * layer.weight.SCB.float().unsqueeze(1) / 127
        else:
            packed, state = bnb.functional.quantize_4bit(weight.to(device), quant_type=name)
            # The product is compared with its own dequantised matrix, so only float32 rounding may differ.
            layer, max_error = (lambda x: bnb.matmul_4bit(x, packed.t(), quant_state=state)), 1e-4
            dequantized = bnb.functional.dequantize_4bit(packed, state)
        product, expected = layer(inputs.to(device)).float(), inputs.to(device) @ dequantized.float().t()
        weight_error = (dequantized.cpu() - weight).abs().mean() / weight.abs().mean()
        product_error = ((product - expected).abs().max() / expected.abs().max()).item()
    except Exception as error:  # report any exception of a kernel
        return f"{type(error).__name__}: {error}"
    if weight_error > 0.2:
        return f"quantised weights are {weight_error:.0%} off"
    return "" if product_error < max_error else f"a matrix product is off by {product_error:.2g} of its scale"


def connect_processes() -> str:
    """Return why two processes on this machine cannot all-reduce a number over a port; empty if they can."""
    if sys.platform != "linux" or not dist.is_available():
        return ""
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))  # port 0: the system picks a free one
        port = sock.getsockname()[1]
    context = multiprocessing.get_context("fork")
    errors = context.SimpleQueue()
    ranks = [context.Process(target=_all_reduce, args=(rank, port, errors), daemon=True) for rank in range(2)]
    for process in ranks:
        process.start()
    for process in ranks:
        process.join(SECONDS + 5)
    if not all(process.exitcode == 0 for process in ranks):
        return errors.get() if not errors.empty() else f"they could not connect within {SECONDS} seconds"
    return ""


def _all_reduce(rank: int, port: int, errors: Any) -> None:
    try:
        dist.init_process_group("gloo", f"tcp://127.0.0.1:{port}", timedelta(seconds=SECONDS), 2, rank)
        total = torch.ones(1)
        dist.all_reduce(total)
        if total.item() != 2:
            raise ValueError(f"1 + 1 is {total.item()}")
    except Exception as error:  # report any failure to the parent process
        errors.put(f"{type(error).__name__}: {error}")
        raise SystemExit(1) from error


if __name__ == "__main__":
    print(json.dumps(probe()))
