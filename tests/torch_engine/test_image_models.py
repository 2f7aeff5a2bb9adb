"""Image-and-text checkpoints are loaded, trained and saved as their text models alone."""

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoModelForImageTextToText, BitsAndBytesConfig

from lmmods.torch_engine.nn import loading
from lmmods.torch_engine.nn.export import save
from tests.image_models import save_image_model, text_logits

IDS = torch.randint(3, 60, (2, 12), generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize(("model_type", "text_type"), [
    ("gemma3", "gemma3_text"), ("gemma4", "gemma4_text"), ("qwen3_5", "qwen3_5_text"), ("mistral3", "mistral")])
def test_only_the_text_model_is_loaded_and_saved(model_type, text_type, tmp_path, capsys):
    expected = text_logits(save_image_model(model_type, tmp_path / "whole"), IDS)
    model = loading.load_pretrained(AutoModelForCausalLM, str(tmp_path / "whole")).eval()
    lines = capsys.readouterr()
    messages = [line for line in (lines.out + lines.err).splitlines() if str(tmp_path) in line]
    assert messages == [f"{tmp_path / 'whole'} has parts other than text (vision): only its text model ({text_type}) "
                        "is loaded and saved, without them."]
    with torch.no_grad():
        assert torch.equal(model(IDS).logits, expected)
    assert not [name for name, _ in model.named_parameters() if "vis" in name]
    save(model, tmp_path / "text", adapter_only=False, dtype=None, writes=True)
    reloaded, loading_info = AutoModelForCausalLM.from_pretrained(tmp_path / "text", output_loading_info=True)
    assert not any(loading_info.values()) and reloaded.config.model_type == text_type
    with torch.no_grad():
        assert torch.equal(reloaded.eval()(IDS).logits, expected)


def test_the_text_weights_of_llama_4_are_loaded(tmp_path):
    """Only weights are compared, as transformers' model does not run without images (5.24)."""
    whole = save_image_model("llama4", tmp_path)
    model = loading.load_pretrained(AutoModelForCausalLM, str(tmp_path))
    expected = {name.removeprefix("language_model."): value for name, value in whole.named_parameters()
                if name.startswith("language_model.")}
    weights = dict(model.named_parameters())
    assert weights.keys() == expected.keys() and all(torch.equal(weights[name], expected[name]) for name in expected)


def test_layers_are_quantised_like_those_of_a_text_model(tmp_path):
    save_image_model("gemma3", tmp_path / "whole")
    plain = loading.load_pretrained(AutoModelForCausalLM, str(tmp_path / "whole"))
    save(plain, tmp_path / "text", adapter_only=False, dtype=None, writes=True)
    model, expected = (loading.load_pretrained(AutoModelForCausalLM, str(tmp_path / part), quantize="nf4", frozen=True)
                       for part in ("whole", "text"))
    assert sum(type(part).__name__ == "Linear4bit" for part in model.modules()) == 2 * 7
    with torch.no_grad():
        assert torch.equal(model.eval()(IDS).logits, expected.eval()(IDS).logits)


def test_a_checkpoint_saved_in_4_bits_is_loaded(tmp_path):
    save_image_model("gemma3", tmp_path / "plain")
    settings = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_use_double_quant=True,
                                  llm_int8_skip_modules=["vision_tower", "multi_modal_projector", "lm_head"])
    AutoModelForImageTextToText.from_pretrained(tmp_path / "plain", quantization_config=settings,
                                                device_map={"": "cpu"}).save_pretrained(tmp_path / "codes")
    model = loading.load_pretrained(AutoModelForCausalLM, str(tmp_path / "codes"), frozen=True).eval()
    expected = loading.load_pretrained(AutoModelForCausalLM, str(tmp_path / "plain"), quantize="nf4",
                                       frozen=True).eval()
    assert sum(type(part).__name__ == "Linear4bit" for part in model.modules()) == 2 * 7
    with torch.no_grad():
        assert torch.equal(model(IDS).logits, expected(IDS).logits)
