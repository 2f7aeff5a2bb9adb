"""What lmmods/torch_engine/compat/torch.py needs of torch."""

import copy
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from lmmods.torch_engine.compat import torch as compat
from tests.compat.contract import mend


def test_instructions_of_the_cpu():
    info = Path("/proc/cpuinfo")
    if not info.exists():
        pytest.skip("only Linux lists them")
    flags = set(next((line for line in info.read_text().splitlines() if line.startswith("flags")), "").split())
    assert compat.cpu_multiplies_bfloat16() == bool(flags & {"avx512_bf16", "amx_tile"}), mend(
        "torch", compat.cpu_multiplies_bfloat16)


def test_lists_of_tensors_change_in_place():
    tensors = [torch.ones(2), torch.ones(3, 2)]
    compat.add_to_all(tensors, [torch.ones(2), torch.ones(3, 2)])
    assert all((tensor == 2).all() for tensor in tensors), mend("torch", compat.add_to_all)


def test_hooks_are_seen():
    for register in ("register_forward_hook", "register_forward_pre_hook"):
        layer = nn.Linear(2, 2)
        assert not compat.has_forward_hooks(layer)
        handle = getattr(layer, register)(lambda *_: None)
        assert compat.has_forward_hooks(layer), mend("torch", compat.has_forward_hooks)
        handle.remove()
        assert not compat.has_forward_hooks(layer)


def test_checkpointing_hides_what_autograd_saves():
    seen = []

    def block(x):
        seen.append(compat.hides_saved_tensors())
        return x * x

    x = torch.ones(2, requires_grad=True)
    block(x)
    torch.utils.checkpoint.checkpoint(block, x, use_reentrant=False).sum().backward()
    assert seen == [False, True, True], mend("torch", compat.hides_saved_tensors)


def test_a_model_stays_where_it_is():
    layer = nn.Linear(2, 2)
    compat.disable_moving(layer)
    for move in (lambda: layer.to("meta"), lambda: layer.double(), lambda: layer.to(torch.bfloat16)):
        assert move() is layer and layer.weight.dtype == torch.float32 and layer.weight.device.type == "cpu", mend(
            "torch", compat.disable_moving)


def test_every_operation_is_seen():
    class Seen(compat.DispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            names.append(func)
            return func(*args, **kwargs or {})

    names, aten = [], torch.ops.aten
    x = torch.ones(2, requires_grad=True)
    with Seen():
        assert bool(x.sum() > 1)
        x[x > 0].sum().backward()
    assert compat.READING in names and sum(func in compat.INDEXING for func in names) == 2, mend(
        "torch", compat.count_flops)
    names.clear()
    with Seen():
        layer = nn.Embedding(3, 2, padding_idx=0)
        with torch.no_grad():
            nn.init.kaiming_uniform_(layer.weight)
            layer.weight.data.normal_(0.0, 0.1)
            layer.weight.zero_()
    drawn = [aten.normal_.default, aten.select.int, aten.fill_.Scalar, aten.uniform_.default, aten.normal_.default,
             aten.zero_.default]
    assert [func for func in names if func in drawn] == drawn, mend("torch", compat.tensors_in)
    assert aten.select.int.is_view and not aten.fill_.Scalar.is_view, mend("torch", compat.tensors_in)
    one, two = torch.ones(1), torch.ones(2)
    assert compat.tensors_in((one, [two, 3], {"a": "b"})) == [one, two], mend("torch", compat.tensors_in)


def test_tensors_without_values():
    with (no_values := compat.without_values()):
        layer = nn.Linear(4, 8)
        assert not compat.has_values(layer.weight) and compat.is_plain(layer.weight.data)
    with no_values:  # entered again, also with tensors that have values
        assert not compat.has_values(layer(torch.ones(2, 4))), mend("torch", compat.without_values)
        copied = copy.deepcopy(layer)
        assert copied.weight.fake_mode is no_values and copied.weight is not layer.weight, mend(
            "torch", compat.without_values)
    assert not compat.has_values(nn.Linear(1, 1, device="meta").weight)
    assert compat.has_values(torch.ones(2)) and not compat.is_plain(nn.Parameter(torch.ones(2)))


def test_arithmetic_of_operations():
    aten, x = torch.ops.aten, torch.ones(2, 3, 4, 8)
    assert compat.count_flops(aten.mm.default, (x[0, 0], x[0, 0].t()), {}, torch.ones(4, 4)) == 2 * 4 * 4 * 8, mend(
        "torch", compat.count_flops)
    attend = aten._scaled_dot_product_flash_attention_for_cpu
    assert compat.count_flops(attend.default, (x, x, x), {}, attend(x, x, x)) == 4 * 2 * 3 * 4 * 4 * 8, mend(
        "torch", compat.count_flops)
    assert compat.count_flops(aten.add.Tensor, (x, x), {}, x) == 0


def test_products_of_groups():
    rows, matrices, ends = torch.ones(6, 8), torch.ones(3, 8, 4), torch.tensor([1, 4, 6], dtype=torch.int32)
    seen = []

    class Watch(compat.DispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            result = func(*args, **kwargs or {})
            if func is compat.GROUPED:
                seen.append((compat.grouped_product(*args).shape, result.shape,
                             compat.count_flops(func, args, {}, result)))
            return result

    with Watch():
        found = torch.nn.functional.grouped_mm(rows.requires_grad_(), matrices.requires_grad_(), offs=ends)
        found.square().sum().backward()
    assert len(seen) == 3 and all(shape == wanted and count == 2 * 6 * 8 * 4 for shape, wanted, count in seen), mend(
        "torch", compat.grouped_product)


def test_resized_memory_is_told():
    seen, x = [], torch.ones(4)
    with compat.watch_resizes(lambda storage, size: seen.append((storage.nbytes(), size))):
        x.untyped_storage().resize_(0)
    x.untyped_storage().resize_(16)
    assert seen == [(16, 0)], mend("torch", compat.watch_resizes)


def test_processes_can_be_imagined():
    with compat.simulate_processes(8):
        assert torch.distributed.get_world_size() == 8, mend("torch", compat.simulate_processes)
        x = torch.ones(8)
        torch.distributed.all_gather_into_tensor(x, torch.ones(1))
        mesh, seen = init_device_mesh("cpu", (4, 2), mesh_dim_names=("data", "tensor")), []
        groups = [mesh[name].get_group() for name in ("data", "tensor")]

        class Watch(compat.DispatchMode):
            def __torch_dispatch__(self, func, types, args=(), kwargs=None):
                seen.append(compat.process_group_ranks(args))
                return func(*args, **kwargs or {})

        with Watch():
            torch.distributed.all_reduce(x, group=groups[0])
            summed = torch.ops._c10d_functional.all_reduce(x, "sum", groups[1].group_name)
        torch.ops._c10d_functional.wait_tensor(summed)
        assert seen == [[0, 2, 4, 6], [0, 1]], mend("torch", compat.process_group_ranks)
    assert not torch.distributed.is_initialized()


def test_views_share_a_storage():
    first, second = torch.ones(2, 3), torch.ones(2, 3)
    assert compat.storage_of(first[1].t()) == compat.storage_of(first) != compat.storage_of(second), mend(
        "torch", compat.storage_of)


def test_a_tensor_counts_its_changes_in_place():
    x = torch.ones(2)
    before = compat.version_of(x)
    x.mul_(2)
    assert compat.version_of(x) == before + 1, mend("torch", compat.version_of)
