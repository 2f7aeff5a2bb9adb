"""4-bit experts on torch equal plain networks with dequantised matrices."""

import copy
import weakref

import bitsandbytes.functional as F
import pytest
import torch
import transformers

from lmmods.commands.exported_model import copy_dequantized
from lmmods.core.errors import UserError
from lmmods.core.settings import LoRA
from lmmods.torch_engine.nn import experts
from lmmods.torch_engine.nn.building import compile_layers, enable_checkpointing
from lmmods.torch_engine.nn.loading import load_pretrained
from lmmods.torch_engine.nn.lora import add_lora, continue_adapter, fuse_adapters
from lmmods.torch_engine.nn.summary import summarize

SIZES = {"vocab_size": 31, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "head_dim": 4,
         "num_attention_heads": 2, "num_key_value_heads": 1, "num_experts_per_tok": 2, "num_local_experts": 5,
         "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
CLASSES = {"mixtral": transformers.MixtralForCausalLM, "gpt_oss": transformers.GptOssForCausalLM}
ON_EXPERTS = ["experts.gate_up_proj", "experts.down_proj"]
IDS = torch.tensor([[5, 9, 11, 4, 30, 7], [8, 3, 3, 21, 12, 6]])


def round_trip(weights, quant_type, double):
    return F.dequantize_4bit(*F.quantize_4bit(weights, quant_type=quant_type, compress_statistics=double))


@pytest.fixture(scope="module", params=[("mixtral", "nf4", True), ("gpt_oss", "fp4", False)], ids=lambda p: p[0])
def pair(request, tmp_path_factory):
    """A 4-bit model, the plain model with its dequantised weights, and the folder."""
    name, quant_type, double = request.param
    folder = tmp_path_factory.mktemp(name)
    torch.manual_seed(0)
    plain = CLASSES[name](transformers.CONFIG_MAPPING[name](**SIZES)).eval()
    plain.save_pretrained(folder)
    packed = load_pretrained(transformers.AutoModelForCausalLM, str(folder), quantize=quant_type, double_quant=double,
                             frozen=True)
    for key, weights in plain.named_parameters():
        if weights.ndim == 3 or "proj.weight" in key:
            weights.data = round_trip(weights.data, quant_type, double)
    return packed, plain, folder


def test_logits_and_merged_weights_equal_the_dequantised_model(pair):
    packed, plain, _ = pair
    with torch.no_grad():
        expected = plain(IDS).logits
        assert torch.allclose(packed(IDS).logits, expected, atol=1e-6)
        unpacked = copy.deepcopy(plain)
        for weights in unpacked.parameters():
            if weights.ndim == 3:
                weights.data.zero_()
        copy_dequantized(packed, unpacked)
        assert torch.equal(unpacked(IDS).logits, expected)
    assert summarize(packed).num_params == summarize(plain).num_params
    assert len(experts.packed_parameter_names(packed)) == 4


@pytest.mark.parametrize(("parameters", "checkpointing"), [
    (None, False), (ON_EXPERTS, False), pytest.param(ON_EXPERTS, True, marks=pytest.mark.slow),
    pytest.param(None, True, marks=pytest.mark.slow)])
def test_adapters_train_as_on_the_dequantised_model_without_keeping_matrices(
        pair, parameters, checkpointing, monkeypatch, tmp_path):
    references, original_forward = [], experts._Matrices.forward

    def forward(self, codes):
        matrices = original_forward(self, codes)
        references.append(weakref.ref(matrices))
        return matrices

    monkeypatch.setattr(experts._Matrices, "forward", forward)
    gradients = []
    for model in pair[:2]:
        model = add_lora(copy.deepcopy(model), LoRA(rank=2, target_parameters=parameters), [], torch.float32)
        torch.manual_seed(1)
        for name, weights in model.named_parameters():
            if "lora_B" in name:
                weights.data.normal_()
        fuse_adapters(model)
        if checkpointing:
            enable_checkpointing(model)
        logits = model.train()(IDS).logits
        assert not any(matrices() is not None for matrices in references)
        logits.logsumexp(-1).sum().backward()
        assert not any(matrices() is not None for matrices in references)
        gradients.append({name: weights.grad for name, weights in model.named_parameters() if weights.requires_grad})
        model.save_pretrained(tmp_path / str(len(gradients)))
    assert references and gradients[0].keys() == gradients[1].keys()
    for name, gradient in gradients[1].items():
        assert torch.allclose(gradients[0][name], gradient, atol=1e-5 * gradient.abs().max()), name
    with torch.no_grad():  # the plain model's adapter on the 4-bit base
        continued = continue_adapter(copy.deepcopy(pair[0]), str(tmp_path / "2"), torch.float32)
        assert torch.allclose(continued(IDS).logits, logits, atol=1e-5)


def test_training_or_compiling_4_bit_experts_is_rejected(pair):
    with pytest.raises(UserError, match=r"layers.0.mlp.experts is stored in 4 bits.*lora.target_parameters"):
        add_lora(pair[0], LoRA(modules_to_save=["experts"]), [], torch.float32)
    with pytest.raises(UserError, match="model.compile: 4-bit experts"):
        compile_layers(pair[0])
