"""A Qwen3.5 checkpoint with images: both engines train and export its text model."""

import csv

import numpy as np
import pytest
from peft import PeftModel
from transformers import AutoModelForCausalLM, AutoTokenizer

from lmmods.cli import main
from tests.image_models import save_image_model


@pytest.fixture
def base(tmp_path, tokenizer_folder) -> str:
    tokenizer = AutoTokenizer.from_pretrained(tokenizer_folder)
    save_image_model("qwen3_5", tmp_path / "base", len(tokenizer))
    tokenizer.save_pretrained(tmp_path / "base")
    return str(tmp_path / "base")


@pytest.mark.slow
def test_both_engines_train_and_save_the_text_model(recipe, tmp_path, base):
    """Full fine-tuning with SGD, as AdamW turns rounding errors of small gradients into full steps."""
    losses = {}
    for engine in ("torch", "jax"):
        run = tmp_path / engine
        assert main(["fit", *recipe(engine=engine, trainer__max_steps=2, trainer__limit_val_batches=0,
                                    model__init_args__optimizer={"name": "sgd", "lr": 0.001},
                                    trainer__default_root_dir=str(run), model__init_args__pretrained=base,
                                    model__init_args__quantize=None, model__init_args__lora=None)]) == 0
        with (run / "metrics.csv").open() as metrics:
            losses[engine] = [float(row["train/loss"]) for row in csv.DictReader(metrics) if row["train/loss"]]
        model, loading_info = AutoModelForCausalLM.from_pretrained(run / "model", output_loading_info=True)
        assert not any(loading_info.values()) and type(model).__name__ == "Qwen3_5ForCausalLM"
    assert len(losses["torch"]) == 2
    np.testing.assert_allclose(losses["jax"], losses["torch"], rtol=1e-5)


@pytest.mark.slow
def test_packing_trains_on_jax_only(recipe, tmp_path, base, capsys):
    """With a quantised base and gradient checkpointing; torch reports why it does not support packing."""
    changes = {"trainer__max_steps": 2, "model__init_args__pretrained": base, "trainer__limit_val_batches": 0,
               "model__init_args__gradient_checkpointing": True}
    arguments = recipe(engine="jax", data__init_args__packing=True, **changes)
    assert main(["fit", *arguments]) == 0
    capsys.readouterr()
    assert main(["fit", *arguments, "--engine", "torch", "--overwrite", "true"]) == 2
    assert "data.packing: in this architecture, documents packed" in capsys.readouterr().err
    adapter = str(tmp_path / "run" / "model")
    model = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(base), adapter)
    adapted = {name for name, _ in model.named_modules() if name.endswith("lora_B.default")}
    assert len(adapted) == 3 * 8 + 7 and any("linear_attn.in_proj_a" in name for name in adapted)
    assert main(["predict", "--config", str(tmp_path / "run" / "config.yaml"), "--ckpt_path", "last"]) == 0
