"""XLA's memory pool on a GPU: its size, and the largest block that fits after the arrays."""

import math
import os

import pytest

from jax_engine.distributed.pool import ALLOCATOR, FRACTIONS, PREALLOCATE, Pool, larger_pool, largest_gap
from lmmods.core.errors import UserError
from lmmods.core.hardware import USABLE, target_named
from lmmods.core.memory import GIB, StepMemory

NEW, OLD = FRACTIONS


@pytest.fixture(autouse=True)
def clear_environment(monkeypatch):
    for name in (*FRACTIONS, PREALLOCATE, ALLOCATOR):
        monkeypatch.delenv(name, raising=False)


def test_the_pool_is_larger_only_at_the_start():
    with larger_pool():
        assert os.environ[NEW] == str(USABLE) and Pool.from_environment().fraction == USABLE > 0.75
    assert NEW not in os.environ and Pool.from_environment() == Pool(USABLE)


@pytest.mark.parametrize(("name", "value", "pool"), [
    (NEW, "0.5", Pool(0.5)), (OLD, "0.95", Pool(0.95)), (PREALLOCATE, "false", Pool(0.75, grows=True)),
    (PREALLOCATE, "true", Pool(0.75)), (ALLOCATOR, "platform", Pool(0.75, has_regions=False)),
    (ALLOCATOR, "BFC", Pool(0.75))])
def test_environment_variables_set_the_pool(monkeypatch, name, value, pool):
    monkeypatch.setenv(name, value)
    before = dict(os.environ)
    with larger_pool():
        assert dict(os.environ) == before and Pool.from_environment() == pool


def test_a_fraction_that_is_not_a_number_is_an_error(monkeypatch):
    monkeypatch.setenv(NEW, "most")
    with pytest.raises(UserError, match=f"{NEW} is 'most'"):
        Pool.from_environment()


# LoRA 8B, in GiB: adapters; embedding, norms, head; attention's and the MLP's matrices of 32 layers; moments.
MODEL = [0.08, 0.98, 0.98, 1, 0.25, 0.25, 1, 3.5, 3.5, 3.5, 0.16]


@pytest.mark.parametrize(("grows", "fraction", "gap"), [
    (False, 0.75, 44.2), (False, 0.9, 56.1), (True, 0.75, 27.3), (True, 0.9, 39.2)])
def test_the_largest_gap_after_the_arrays_of_an_8b_model(grows, fraction, gap):
    """On an H100 with 79.2 GiB. A growing pool then has regions of 32 GiB, and a last one of 16 GiB."""
    sizes = [int(size * GIB) for size in MODEL]
    assert Pool(fraction, grows).largest_gap(fraction * 79.2 * GIB, sizes) / GIB == pytest.approx(gap, abs=0.1)


def test_regions_double_and_are_not_joined():
    mib = 2**20
    pool = Pool(0.9, grows=True)
    assert pool.largest_gap(64 * mib, []) == 64 * mib
    assert pool.largest_gap(64 * mib, [mib]) == 62 * mib  # a region of 2 MiB
    assert pool.largest_gap(64 * mib, [mib, mib, 3 * mib]) == 58 * mib  # the first one is full; one of 4 MiB
    assert pool.largest_gap(12 * mib, [mib, 3 * mib, 5 * mib]) == mib  # the last one is in the remaining 6 MiB
    assert pool.largest_gap(8 * mib, [mib, 3 * mib, 5 * mib]) == 0
    assert Pool(0.9).largest_gap(8 * mib, [5 * mib, 5 * mib]) == 0


def test_gaps_matter_only_on_gpus_with_regions(monkeypatch):
    gaps = {name: largest_gap(target_named(name), 2**20, [2**19]) for name in ("cpu", "v5e-8", "H100")}
    assert gaps == {"cpu": math.inf, "v5e-8": math.inf, "H100": 2**19}
    monkeypatch.setenv(ALLOCATOR, "cuda_async")
    assert largest_gap(target_named("H100"), 2**20, [2**19]) == math.inf


@pytest.mark.parametrize(("grows", "fraction", "verdict"), [
    (False, 0.75, "tight"), (False, 0.9, "fits"), (True, 0.75, "does not fit"), (True, 0.9, "tight")])
def test_the_verdict_on_8b_lora_depends_on_its_block_of_temporaries(grows, fraction, verdict):
    """With three quarters of an H100, a run needed 38.5 GiB of temporaries (37.6 were planned) and failed."""
    available, sizes = fraction * 79.2 * GIB, [int(size * GIB) for size in MODEL]
    for temporaries in (37.6 * GIB, 38.5 * GIB):
        memory = StepMemory({"parameters": sum(sizes), "temporaries": temporaries}, available, "compiled by XLA",
                            block=temporaries, gap=Pool(fraction, grows).largest_gap(available, sizes))
        assert memory.needed < available
        assert ("tight" if memory.is_tight else "fits" if memory.fits else "does not fit") == verdict
        assert ("must be one block" in str(memory)) is (verdict != "fits")
