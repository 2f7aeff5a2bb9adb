"""What lmmods/torch_engine/strategies/deepspeed.py needs of deepspeed, read from its classes: no run, no processes."""

import inspect

import pytest

from lmmods.torch_engine.strategies import deepspeed as compat
from tests.compat.contract import mend

pytest.importorskip("deepspeed")


@pytest.fixture(scope="module")
def stages():
    from deepspeed.runtime.zero.stage3 import DeepSpeedZeroOptimizer_Stage3
    from deepspeed.runtime.zero.stage_1_and_2 import DeepSpeedZeroOptimizer

    return {2: DeepSpeedZeroOptimizer, 3: DeepSpeedZeroOptimizer_Stage3}


@pytest.mark.parametrize(("stage", "name"), [(2, "single_partition_of_fp32_groups"),
                                             (3, "fp32_partitioned_groups_flat")])
def test_flat_vectors(stages, stage, name):
    assert f"self.{name} = []" in inspect.getsource(stages[stage].__init__), mend("deepspeed", compat.flat_vectors)


def test_states_are_linked():
    from deepspeed.utils import lazy_init_hp_params_optimizer_state

    found = list(inspect.signature(lazy_init_hp_params_optimizer_state).parameters)
    assert found == ["lp_param_list", "flat_hp_partition", "optimizer_state"], mend("deepspeed", compat.link_states)


def test_the_shard_of_a_parameter():
    from deepspeed.runtime.zero import partition_parameters

    assert "param.ds_tensor = " in inspect.getsource(partition_parameters), mend("deepspeed", compat.shard_size)
