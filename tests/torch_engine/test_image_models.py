"""Checkpoints that read images and text are loaded, trained and saved as their text networks alone."""

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoModelForImageTextToText, BitsAndBytesConfig

from lmmods.torch_engine.nn import loading
from lmmods.torch_engine.nn.export import save
from tests.image_models import save_image_model, text_logits

IDS = torch.randint(3, 60, (2, 12), generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize(("model_type", "text_type"), [
    ("gemma3", "gemma3_text"), ("gemma4", "gemma4_text"), ("qwen3_5", "qwen3_5_text"), ("mistral3", "mistral")])
def test_the_text_network_is_loaded_and_saved_alone(model_type, text_type, tmp_path, capsys):
    wanted = text_logits(save_image_model(model_type, tmp_path / "whole"), IDS)
    model = loading.load_pretrained(AutoModelForCausalLM, str(tmp_path / "whole")).eval()
    lines = capsys.readouterr()
    told = [line for line in (lines.out + lines.err).splitlines() if str(tmp_path) in line]
    assert told == [f"{tmp_path / 'whole'} has parts other than text (vision): only its text model ({text_type}) "
                    "is loaded and saved, without them."]
    with torch.no_grad():
        assert torch.equal(model(IDS).logits, wanted)
    assert not [name for name, _ in model.named_parameters() if "vis" in name]
    save(model, tmp_path / "text", adapter_only=False, dtype=None, writes=True)
    again, found = AutoModelForCausalLM.from_pretrained(tmp_path / "text", output_loading_info=True)
    assert not any(found.values()) and again.config.model_type == text_type
    with torch.no_grad():
        assert torch.equal(again.eval()(IDS).logits, wanted)


def test_weights_of_llama_4(tmp_path):
    """transformers' own network of images and text does not run without images (5.24)."""
    whole = save_image_model("llama4", tmp_path)
    model = loading.load_pretrained(AutoModelForCausalLM, str(tmp_path))
    wanted = {name.removeprefix("language_model."): value for name, value in whole.named_parameters()
              if name.startswith("language_model.")}
    found = dict(model.named_parameters())
    assert found.keys() == wanted.keys() and all(torch.equal(found[name], wanted[name]) for name in wanted)


def test_layers_are_quantised_as_those_of_a_text_model(tmp_path):
    save_image_model("gemma3", tmp_path / "whole")
    plain = loading.load_pretrained(AutoModelForCausalLM, str(tmp_path / "whole"))
    save(plain, tmp_path / "text", adapter_only=False, dtype=None, writes=True)
    found, wanted = (loading.load_pretrained(AutoModelForCausalLM, str(tmp_path / part), quantize="nf4", frozen=True)
                     for part in ("whole", "text"))
    assert sum(type(part).__name__ == "Linear4bit" for part in found.modules()) == 2 * 7
    with torch.no_grad():
        assert torch.equal(found.eval()(IDS).logits, wanted.eval()(IDS).logits)


def test_a_checkpoint_that_is_saved_quantised(tmp_path):
    save_image_model("gemma3", tmp_path / "plain")
    settings = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_use_double_quant=True,
                                  llm_int8_skip_modules=["vision_tower", "multi_modal_projector", "lm_head"])
    AutoModelForImageTextToText.from_pretrained(tmp_path / "plain", quantization_config=settings,
                                                device_map={"": "cpu"}).save_pretrained(tmp_path / "codes")
    found = loading.load_pretrained(AutoModelForCausalLM, str(tmp_path / "codes"), frozen=True).eval()
    wanted = loading.load_pretrained(AutoModelForCausalLM, str(tmp_path / "plain"), quantize="nf4", frozen=True).eval()
    assert sum(type(part).__name__ == "Linear4bit" for part in found.modules()) == 2 * 7
    with torch.no_grad():
        assert torch.equal(found(IDS).logits, wanted(IDS).logits)
