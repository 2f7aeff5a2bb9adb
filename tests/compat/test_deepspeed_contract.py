"""Private API of DeepSpeed that lmmods/torch_engine/strategies/deepspeed.py uses, checked without a run."""

import inspect

import pytest

from lmmods.torch_engine.strategies import deepspeed as compat
from tests.compat.contract import fix

pytest.importorskip("deepspeed")


@pytest.fixture(scope="module")
def stages():
    from deepspeed.runtime.zero.stage3 import DeepSpeedZeroOptimizer_Stage3
    from deepspeed.runtime.zero.stage_1_and_2 import DeepSpeedZeroOptimizer

    return {2: DeepSpeedZeroOptimizer, 3: DeepSpeedZeroOptimizer_Stage3}


@pytest.mark.parametrize(("stage", "name"), [(2, "single_partition_of_fp32_groups"),
                                             (3, "fp32_partitioned_groups_flat")])
def test_stages_have_their_flat_vectors(stages, stage, name):
    assert f"self.{name} = []" in inspect.getsource(stages[stage].__init__), fix("deepspeed", compat.flat_vectors)


def test_linking_optimiser_states_takes_these_arguments():
    from deepspeed.utils import lazy_init_hp_params_optimizer_state

    parameters = list(inspect.signature(lazy_init_hp_params_optimizer_state).parameters)
    assert parameters == ["lp_param_list", "flat_hp_partition", "optimizer_state"], fix("deepspeed", compat.link_states)


def test_a_partitioned_parameter_has_its_shard():
    from deepspeed.runtime.zero import partition_parameters

    assert "param.ds_tensor = " in inspect.getsource(partition_parameters), fix("deepspeed", compat.shard_size)
