"""The table of devices: driver names, target names and data sheet figures."""

import pytest

from lmmods.core.errors import UserError
from lmmods.core.hardware import KINDS, kind_of, peak_flops, target_named


@pytest.mark.parametrize(("driver", "name"), [
    ("NVIDIA H100 80GB HBM3", "H100"), ("NVIDIA H100 PCIe", "H100-PCIe"), ("NVIDIA H200", "H200"),
    ("NVIDIA A100-SXM4-80GB", "A100-80GB"), ("NVIDIA A100-SXM4-40GB", "A100"), ("NVIDIA L40S", "L40S"),
    ("NVIDIA L4", "L4"), ("NVIDIA A10G", "A10"), ("NVIDIA GeForce RTX 4090", "RTX4090"), ("Tesla T4", "T4"),
    ("TPU v4", "v4"), ("TPU v5 lite", "v5e"), ("TPU v5", "v5p"), ("TPU v6 lite", "v6e"),
    ("NVIDIA L40", None), ("NVIDIA T400 4GB", None), ("NVIDIA A1000", None), ("cpu", None)])
def test_devices_are_recognised_by_their_driver_names(driver, name):
    kind = kind_of(driver)
    assert (kind and kind.name) == name and (name is None) == (peak_flops(driver) is None)


def test_figures_agree_with_the_data_sheets():
    """Ratios between products hold, and memory fills within a second."""
    flops = {kind.name: kind.flops / 1e12 for kind in KINDS}
    assert (flops["A100"], flops["v5e"], flops["v5p"], flops["v6e"]) == (312, 197, 459, 918)
    assert flops["H200"] == flops["H100"] and all(kind.memory < kind.bandwidth for kind in KINDS)
    assert all("bfloat16" in kind.peak for kind in KINDS if kind.name not in ("V100", "T4"))


@pytest.mark.parametrize(("name", "count", "platform", "gibibytes"), [
    ("8xH100", 8, "gpu", 74.5), ("l4", 1, "gpu", 22.4), ("v5e-16", 16, "tpu", 16), ("v5p-64", 32, "tpu", 95)])
def test_a_target_name_sets_devices_platform_and_memory(name, count, platform, gibibytes):
    target = target_named(name)
    assert (target.num_devices, target.platform, target.is_here) == (count, platform, False)
    assert target.memory / 2**30 == pytest.approx(gibibytes, abs=0.1)


def test_link_bandwidth_across_machines_is_their_network():
    target = target_named("64xH100")
    assert target.link(8) == 450e9 and target.link(64) == 50e9 and target_named("v5e-64").link(64) == 200e9


@pytest.mark.parametrize("name", ["H100x8", "8xH99", "0xH100", "8xv5e", "v5p-3", "", "L4-8", "0xcpu"])
def test_invalid_target_names_are_rejected(name):
    with pytest.raises(UserError, match="is not a target.*H100.*v5e"):
        target_named(name)


def test_cpu_devices_share_the_memory_of_the_machine():
    alone, four, gpu, tpu = (target_named(name) for name in ("cpu", "4xcpu", "8xH100", "v5e-16"))
    assert four.usable_bytes(0.5) == alone.usable_bytes(0.5) / 4 == alone.memory / 4
    assert (gpu.usable_bytes(0.5), tpu.usable_bytes(0.5)) == (gpu.memory / 2, tpu.memory)
