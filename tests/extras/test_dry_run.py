"""A dry run computes as training does, and writes nothing."""

import pytest

from lmmods.commands.setup import Setup
from lmmods.extras.dry_run import dry_run
from lmmods.recipe.reader import parse
from lmmods.torch_engine.nn.cpu_kernels import stays_float32, uses_onednn


@pytest.mark.parametrize("fast", [True, False])
def test_a_dry_run_uses_the_kernels_of_training_and_writes_nothing(recipe, tmp_path, fast):
    onednn_states = []

    def watch(metrics: dict[str, float]) -> bool:
        onednn_states.append(uses_onednn())
        return True

    with Setup(parse(["fit", *recipe(model__init_args__fast_kernels=fast)], {})) as setup:
        dry_run(setup, watch)
    assert onednn_states == [fast and stays_float32()] and not uses_onednn()
    assert not (tmp_path / "run").exists()
