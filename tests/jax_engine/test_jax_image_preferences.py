"""Preference optimisation with images on JAX, against torch."""


import numpy as np
import pytest

from tests.data.test_images import write_rows
from tests.jax_engine.test_jax_images import exported
from tests.torch_engine.test_image_preferences import LABELLED, ROWS
from tests.torch_engine.test_images import losses, run
from tests.vision_models import make_arguments, save_vision_model


@pytest.fixture
def fit(shared, tmp_path):
    """Return a function that trains and returns losses and exported weights; keys replace those of the recipe."""

    def train(name, family, rows=ROWS, **changes):
        folder = shared(f"vision_{family}", lambda folder: save_vision_model(family, folder))
        source = write_rows(tmp_path / f"rows{len(rows[0])}", rows)
        run("fit", *make_arguments("Preference", folder, source, tmp_path / name, **changes))
        return losses(tmp_path / name), exported(tmp_path / name)

    return train


@pytest.mark.parametrize(("family", "rows", "changes"), [
    pytest.param("idefics3", ROWS, {"model.trainable_parameters": [""]}, id="all"),
    pytest.param("gemma3", ROWS, {"model.lora": {"rank": 4}, "model.optimizer.lr": 1.0}, id="lora",
                 marks=pytest.mark.slow),
    pytest.param("qwen3_vl", ROWS, {"model.trainable_parameters": [""]}, id="qwen3_vl", marks=pytest.mark.slow),
    pytest.param("idefics3", ROWS, {"model.reference": "cache"}, id="cache", marks=pytest.mark.slow),
    pytest.param("idefics3", LABELLED, {"model.loss": "kto"}, id="kto", marks=pytest.mark.slow)])
def test_both_engines_train_and_save_the_same(fit, family, rows, changes):
    ours, expected = (fit(engine, family, rows, engine=engine, **changes) for engine in ("jax", "torch"))
    assert len(set(expected[0])) == 3
    np.testing.assert_allclose(ours[0], expected[0], rtol=1e-4)
    assert ours[1].keys() == expected[1].keys()
    for name, value in expected[1].items():
        np.testing.assert_allclose(ours[1][name], value, rtol=1e-2, atol=2e-3, err_msg=name)


@pytest.mark.slow
def test_any_split_gives_the_same_steps(fit):
    whole = {"engine": "jax", "model.trainable_parameters": [""]}
    expected = fit("whole", "idefics3", **whole, **{"data.batch_size": 8})
    for name, split in (("split", {"data.batch_size": 4, "trainer.accumulate_grad_batches": 2}),
                        ("devices", {"data.batch_size": 4, "trainer.devices": 2})):
        split_losses, weights = fit(name, "idefics3", **whole, **split)
        assert split_losses == pytest.approx(expected[0], rel=1e-5), name
        for key, weight in weights.items():
            np.testing.assert_allclose(weight, expected[1][key], rtol=1e-3, atol=1e-4, err_msg=f"{name} {key}")
