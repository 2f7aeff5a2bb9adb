"""Private API of torch that lmmods/torch_engine/compat/torch.py uses."""

import copy
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from lmmods.torch_engine.compat import torch as compat
from tests.compat.contract import fix


def test_bfloat16_instructions_of_the_cpu_are_detected():
    info = Path("/proc/cpuinfo")
    if not info.exists():
        pytest.skip("needs /proc/cpuinfo")
    flags = set(next((line for line in info.read_text().splitlines() if line.startswith("flags")), "").split())
    assert compat.cpu_multiplies_bfloat16() == bool(flags & {"avx512_bf16", "amx_tile"}), fix(
        "torch", compat.cpu_multiplies_bfloat16)


def test_lists_of_tensors_are_added_in_place():
    tensors = [torch.ones(2), torch.ones(3, 2)]
    compat.add_to_all(tensors, [torch.ones(2), torch.ones(3, 2)])
    assert all((tensor == 2).all() for tensor in tensors), fix("torch", compat.add_to_all)


def test_forward_hooks_are_detected():
    for register in ("register_forward_hook", "register_forward_pre_hook"):
        layer = nn.Linear(2, 2)
        assert not compat.has_forward_hooks(layer)
        handle = getattr(layer, register)(lambda *_: None)
        assert compat.has_forward_hooks(layer), fix("torch", compat.has_forward_hooks)
        handle.remove()
        assert not compat.has_forward_hooks(layer)


def test_checkpointing_hides_saved_tensors():
    is_hidden = []

    def block(x):
        is_hidden.append(compat.hides_saved_tensors())
        return x * x

    x = torch.ones(2, requires_grad=True)
    block(x)
    torch.utils.checkpoint.checkpoint(block, x, use_reentrant=False).sum().backward()
    assert is_hidden == [False, True, True], fix("torch", compat.hides_saved_tensors)


def test_a_model_that_may_not_move_keeps_device_and_dtype():
    layer = nn.Linear(2, 2)
    compat.disable_moving(layer)
    for move in (lambda: layer.to("meta"), lambda: layer.double(), lambda: layer.to(torch.bfloat16)):
        assert move() is layer and layer.weight.dtype == torch.float32 and layer.weight.device.type == "cpu", fix(
            "torch", compat.disable_moving)


def test_a_dispatch_mode_sees_every_operation():
    class Recorder(compat.DispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            names.append(func)
            return func(*args, **kwargs or {})

    names, aten = [], torch.ops.aten
    x = torch.ones(2, requires_grad=True)
    with Recorder():
        assert bool(x.sum() > 1)
        x[x > 0].sum().backward()
    assert compat.READING in names and sum(func in compat.INDEXING for func in names) == 2, fix(
        "torch", compat.count_flops)
    names.clear()
    with Recorder():
        layer = nn.Embedding(3, 2, padding_idx=0)
        with torch.no_grad():
            nn.init.kaiming_uniform_(layer.weight)
            layer.weight.data.normal_(0.0, 0.1)
            layer.weight.zero_()
    expected = [aten.normal_.default, aten.select.int, aten.fill_.Scalar, aten.uniform_.default, aten.normal_.default,
                aten.zero_.default]
    assert [func for func in names if func in expected] == expected, fix("torch", compat.tensors_in)
    assert aten.select.int.is_view and not aten.fill_.Scalar.is_view, fix("torch", compat.tensors_in)
    one, two = torch.ones(1), torch.ones(2)
    assert compat.tensors_in((one, [two, 3], {"a": "b"})) == [one, two], fix("torch", compat.tensors_in)


def test_tensors_can_be_made_without_values():
    with (no_values := compat.without_values()):
        layer = nn.Linear(4, 8)
        assert not compat.has_values(layer.weight) and compat.is_plain(layer.weight.data)
    with no_values:  # entered again, now also with a tensor that has values
        assert not compat.has_values(layer(torch.ones(2, 4))), fix("torch", compat.without_values)
        copied = copy.deepcopy(layer)
        assert copied.weight.fake_mode is no_values and copied.weight is not layer.weight, fix(
            "torch", compat.without_values)
        with compat.keep_values():
            assert compat.has_values(torch.ones(2).cumsum(0)), fix("torch", compat.keep_values)
        assert not compat.has_values(torch.ones(2)), fix("torch", compat.keep_values)
    assert not compat.has_values(nn.Linear(1, 1, device="meta").weight)
    assert compat.has_values(torch.ones(2)) and not compat.is_plain(nn.Parameter(torch.ones(2)))


def test_flops_of_operations_are_counted():
    aten, x = torch.ops.aten, torch.ones(2, 3, 4, 8)
    assert compat.count_flops(aten.mm.default, (x[0, 0], x[0, 0].t()), {}, torch.ones(4, 4)) == 2 * 4 * 4 * 8, fix(
        "torch", compat.count_flops)
    attend = aten._scaled_dot_product_flash_attention_for_cpu
    assert compat.count_flops(attend.default, (x, x, x), {}, attend(x, x, x)) == 4 * 2 * 3 * 4 * 4 * 8, fix(
        "torch", compat.count_flops)
    assert compat.count_flops(aten.add.Tensor, (x, x), {}, x) == 0


def test_flops_of_grouped_products_are_counted():
    rows, matrices, ends = torch.ones(6, 8), torch.ones(3, 8, 4), torch.tensor([1, 4, 6], dtype=torch.int32)
    products = []

    class Recorder(compat.DispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            result = func(*args, **kwargs or {})
            if func is compat.GROUPED:
                products.append((compat.grouped_product(*args).shape, result.shape,
                                 compat.count_flops(func, args, {}, result)))
            return result

    with Recorder():
        output = torch.nn.functional.grouped_mm(rows.requires_grad_(), matrices.requires_grad_(), offs=ends)
        output.square().sum().backward()
    is_right = [shape == expected and count == 2 * 6 * 8 * 4 for shape, expected, count in products]
    assert is_right == [True] * 3, fix("torch", compat.grouped_product)


def test_resizes_of_storages_are_reported():
    resizes, x = [], torch.ones(4)
    with compat.watch_resizes(lambda storage, size: resizes.append((storage.nbytes(), size))):
        x.untyped_storage().resize_(0)
    x.untyped_storage().resize_(16)
    assert resizes == [(16, 0)], fix("torch", compat.watch_resizes)


def test_processes_can_be_simulated():
    with compat.simulate_processes(8):
        assert torch.distributed.get_world_size() == 8, fix("torch", compat.simulate_processes)
        x = torch.ones(8)
        torch.distributed.all_gather_into_tensor(x, torch.ones(1))
        mesh, ranks = init_device_mesh("cpu", (4, 2), mesh_dim_names=("data", "tensor")), []
        groups = [mesh[name].get_group() for name in ("data", "tensor")]

        class Recorder(compat.DispatchMode):
            def __torch_dispatch__(self, func, types, args=(), kwargs=None):
                ranks.append(compat.process_group_ranks(args))
                return func(*args, **kwargs or {})

        with Recorder():
            torch.distributed.all_reduce(x, group=groups[0])
            summed = torch.ops._c10d_functional.all_reduce(x, "sum", groups[1].group_name)
        torch.ops._c10d_functional.wait_tensor(summed)
        assert ranks == [[0, 2, 4, 6], [0, 1]], fix("torch", compat.process_group_ranks)
    assert not torch.distributed.is_initialized()


def test_views_share_a_storage():
    first, second = torch.ones(2, 3), torch.ones(2, 3)
    assert compat.storage_of(first[1].t()) == compat.storage_of(first) != compat.storage_of(second), fix(
        "torch", compat.storage_of)


def test_a_tensor_counts_its_changes_in_place():
    x = torch.ones(2)
    before = compat.version_of(x)
    x.mul_(2)
    assert compat.version_of(x) == before + 1, fix("torch", compat.version_of)
