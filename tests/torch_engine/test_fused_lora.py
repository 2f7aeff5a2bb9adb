"""LoRA layers fused into one autograd function compute what PEFT's forward computes."""

import copy
from functools import partial

import pytest
import torch
from bitsandbytes.nn import Linear4bit, Linear8bitLt
from peft import LoraConfig, get_peft_model
from torch import nn
from transformers import GPT2Config, GPT2LMHeadModel

from lmmods.torch_engine.compat.bitsandbytes import matrix_of, multiply_by_matrices, patch_cpu_kernels
from lmmods.torch_engine.compat.peft import lora_layers
from lmmods.torch_engine.nn import lora
from lmmods.torch_engine.nn.lora import fuse_adapters
from tests.closeness import assert_as_close, in_both

LINEAR = {None: nn.Linear, "nf4": partial(Linear4bit, compute_dtype=torch.float32, quant_type="nf4"),
          "int8": partial(Linear8bitLt, has_fp16_weights=False, threshold=6.0)}
X, WEIGHTS = torch.randn(2, 3, 5, 64, generator=torch.Generator().manual_seed(1))


class Network(nn.Module):
    """Two layers, one with a bias."""

    def __init__(self, quantised: str | None):
        super().__init__()
        linear, self.is_loaded_in_8bit = LINEAR[quantised], quantised == "int8"
        self.up, self.down = linear(64, 128, bias=False), linear(128, 64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(torch.tanh(self.up(x).clamp_(-9, 9)))  # in place, as some networks clip queries


def make_model(quantised: str | None = None, **fields) -> nn.Module:
    torch.manual_seed(0)
    model = get_peft_model(Network(quantised).to("cpu"), LoraConfig(
        r=4, lora_alpha=12, target_modules=["up", "down"], init_lora_weights=False, **fields))
    patch_cpu_kernels(model)
    multiply_by_matrices(model)
    return model.train()


def run_step(model: nn.Module, autocast: bool = False) -> list[torch.Tensor]:
    """Return the output, and the gradients of the input and the adapter."""
    dtype = next(param.dtype for name, param in model.named_parameters() if "lora_A" in name)
    x = X.to(dtype, copy=True).requires_grad_()
    torch.manual_seed(1)  # for dropout
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        y = model(x)
    model.zero_grad()
    (y.float() * WEIGHTS).sum().backward()
    return [y.detach().float(), x.grad, *(p.grad.clone() for p in model.parameters() if p.grad is not None)]


def run_peft(model: nn.Module) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Return the results of PEFT's forward and, in float64, of the dequantised matrices."""
    plain = copy.deepcopy(model)
    for _, layer in lora_layers(plain):
        base = layer.base_layer
        if type(base) is not nn.Linear:
            layer.base_layer = nn.Linear(base.in_features, base.out_features, bias=base.bias is not None)
            layer.base_layer.weight.data = matrix_of(base, torch.float32)
            layer.base_layer.bias = base.bias
            layer.base_layer.requires_grad_(False)
    return run_step(copy.deepcopy(model)), in_both(run_step, plain)[1]


@pytest.fixture
def fused_calls(monkeypatch):
    """Calls of the fused function."""
    calls = []
    apply = lora._AdaptedProduct.apply
    monkeypatch.setattr(lora._AdaptedProduct, "apply", lambda *args: calls.append(True) or apply(*args))
    return calls


@pytest.mark.parametrize("dropout", [0.0, 0.3])
@pytest.mark.parametrize("quantised", LINEAR)
def test_results_and_gradients_equal_peft(fused_calls, quantised, dropout):
    model = make_model(quantised, lora_dropout=dropout)
    plain, exact = run_peft(model)
    assert not fused_calls
    fuse_adapters(model)
    assert_as_close(run_step(model), plain, exact)
    assert len(fused_calls) == 2


@pytest.mark.parametrize("dropout", [0.0, 0.3])
@pytest.mark.parametrize("quantised", ["nf4", "int8"])
def test_quantised_dora_equals_peft_on_the_dequantised_matrix(quantised, dropout):
    model = make_model(quantised, use_dora=True, lora_dropout=dropout)
    plain = make_model(use_dora=True, lora_dropout=dropout)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_" in name:
                plain.get_parameter(name).copy_(parameter * (2 if "magnitude" in name else 1))
                parameter.copy_(plain.get_parameter(name))
        for layer in ("up", "down"):
            quantised_layer, plain_layer = (getattr(network.base_model.model, layer).base_layer
                                            for network in (model, plain))
            plain_layer.weight.copy_(matrix_of(quantised_layer, torch.float32))
            if quantised_layer.bias is not None:
                plain_layer.bias.copy_(quantised_layer.bias)
    fuse_adapters(model)
    for training in (True, False, True):
        assert_as_close(run_step(model.train(training)), *in_both(run_step, plain.train(training)))


@pytest.mark.parametrize("quantised", LINEAR)
def test_under_autocast_errors_are_close_to_those_of_peft(fused_calls, quantised):
    model = make_model(quantised)
    exact = run_step(model)

    def errors():
        return [((result - exact_result).norm() / exact_result.norm()).item()
                for result, exact_result in zip(run_step(model, autocast=True), exact, strict=True)]

    expected = errors()
    fuse_adapters(model)
    for error, expected_error in zip(errors(), expected, strict=True):
        assert 0 < error < 0.01 and error < 1.3 * expected_error
    assert len(fused_calls) == 2
    with torch.autocast("cpu", torch.bfloat16):
        assert model.base_model.model.up(torch.randn(3, 5, 64)).dtype == torch.bfloat16


@pytest.mark.parametrize("quantised", LINEAR)
def test_gradient_checkpointing_recomputes_the_fused_function(fused_calls, quantised):
    model = make_model(quantised)
    plain, exact = run_peft(model)
    fuse_adapters(model)
    forward = model.base_model.model.forward
    model.base_model.model.forward = lambda x: torch.utils.checkpoint.checkpoint(forward, x, use_reentrant=False)
    assert_as_close(run_step(model), plain, exact)
    assert len(fused_calls) == 4


def add_another(model: nn.Module) -> None:
    model.add_adapter("more", LoraConfig(r=2, target_modules=["up", "down"], init_lora_weights=False))
    model.base_model.set_adapter(["default", "more"])


def add_hooks(model: nn.Module) -> None:
    layers = model.base_model.model
    for part in (layers.up.lora_A.default, layers.down.base_layer):
        part.register_forward_hook(lambda *_: None)


@pytest.mark.parametrize(("fields", "change", "num_fused"), [
    pytest.param({"use_dora": True}, None, 0, id="DoRA"),
    pytest.param({"lora_bias": True}, None, 0, id="adapter bias"),
    pytest.param({"bias": "all"}, None, 1, id="trained base bias"),  # `up` has none
    pytest.param({}, lambda model: model.merge_adapter(), 0, id="merged"),
    pytest.param({}, lambda model: model.base_model.disable_adapter_layers(), 0, id="switched off"),
    pytest.param({}, add_another, 0, id="two adapters"),
    pytest.param({}, add_hooks, 0, id="hooks"),
])
def test_unsupported_adapters_use_the_forward_of_peft(fused_calls, fields, change, num_fused):
    model = make_model(**fields)
    if change:
        change(model)
    plain, exact = run_peft(model)
    fuse_adapters(model)
    assert_as_close(run_step(model), plain, exact)
    assert len(fused_calls) == num_fused


def test_decoding_and_other_layers_use_the_forward_of_peft(fused_calls):
    model = make_model()
    fuse_adapters(model)
    model(torch.randn(3, 1, 64))
    torch.manual_seed(0)
    gpt2 = GPT2LMHeadModel(GPT2Config(n_embd=32, n_layer=1, n_head=2, vocab_size=61, bos_token_id=0, eos_token_id=0))
    gpt2 = get_peft_model(gpt2, LoraConfig(target_modules=["c_attn"], fan_in_fan_out=True))
    fuse_adapters(gpt2)
    gpt2(torch.arange(6).unsqueeze(0))
    assert not fused_calls


@pytest.mark.parametrize(("make", "message"), [
    (make_model, ""),
    (lambda: make_model("nf4"), ""),
    (lambda: make_model("int8"), ""),
    (lambda: make_model(use_dora=True),
     "LoRA: 2 of 2 adapted layers (up, down) are not fused with their adapters and run slower: DoRA scales the sum of "
     "both outputs.\n"),
    (lambda: make_model(bias="all"),
     "LoRA: 1 of 2 adapted layers (down) are not fused with their adapters and run slower: their biases train.\n"),
    (lambda: get_peft_model(GPT2LMHeadModel(GPT2Config(n_embd=8, n_layer=2, n_head=2, vocab_size=9)), LoraConfig(
        target_modules=["c_attn", "lm_head"], fan_in_fan_out=True)),
     "LoRA: 2 of 3 adapted layers (c_attn) are not fused with their adapters and run slower: they are Conv1D, "
     "neither plain nor quantised linear layers.\n"),
], ids=["plain", "4-bit", "8-bit", "DoRA", "bias", "Conv1D"])
def test_layers_that_cannot_be_fused_are_reported(make, message, capsys):
    fuse_adapters(make())
    assert capsys.readouterr().out == message


def test_layers_with_the_same_input_share_its_cast():
    x = torch.randn(2, 3)
    first = lora._in_dtype(x, torch.bfloat16)
    assert lora._in_dtype(x, torch.bfloat16) is first
    x.mul_(2)
    assert torch.equal(lora._in_dtype(x, torch.bfloat16), x.bfloat16())
    y = x + 1
    assert torch.equal(lora._in_dtype(y, torch.bfloat16), y.bfloat16())
    assert torch.equal(lora._in_dtype(y, torch.float16), y.half())


@pytest.mark.parametrize("quantised", LINEAR)
def test_inference_mode_equals_no_grad(fused_calls, quantised):
    """Casts under autocast are cached by version, which inference tensors do not have."""
    model = make_model(quantised)
    fuse_adapters(model)
    with torch.autocast("cpu", torch.bfloat16):
        with torch.no_grad():
            expected = model(X.clone())
        with torch.inference_mode():
            x = X.clone()
            assert torch.equal(model(x), expected)
            assert torch.equal(model(x.zero_()), model(torch.zeros_like(x)))  # not the cached cast of the old x
    assert fused_calls
