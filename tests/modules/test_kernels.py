"""Faster kernels compute what the plain ones do."""

import pytest
import torch
from transformers import GPT2Config, GPT2LMHeadModel

from lmmods.modules import cpu_kernels
from lmmods.modules.cpu_kernels import prefer_onednn
from lmmods.modules.loading import compile_layers, fuse_activations


@pytest.fixture
def products():
    """The setting of the process, put back afterwards, and a trial that has not been made."""
    before = torch.get_float32_matmul_precision()
    prefer_onednn.cache_clear()
    yield
    prefer_onednn.cache_clear()
    torch.set_float32_matmul_precision(before)


def gradients(model: torch.nn.Module) -> tuple[float, dict[str, torch.Tensor]]:
    ids = torch.arange(40).reshape(2, 20) % 61
    loss = model(input_ids=ids, labels=ids).loss
    loss.backward()
    found = {name.replace("._orig_mod", ""): p.grad.clone() for name, p in model.named_parameters()}
    model.zero_grad()
    return loss.item(), found


@pytest.fixture
def gpt2():
    torch.manual_seed(0)
    return GPT2LMHeadModel(GPT2Config(n_embd=32, n_layer=2, n_head=2, vocab_size=61, n_positions=64,
                                      bos_token_id=0, eos_token_id=0)).eval()


@pytest.mark.parametrize("change", [fuse_activations, pytest.param(compile_layers, marks=pytest.mark.slow)])
def test_loss_and_gradients_are_the_same(gpt2, change):
    loss, expected = gradients(gpt2)
    change(gpt2)
    new_loss, found = gradients(gpt2)
    assert new_loss == pytest.approx(loss, rel=1e-6) and set(found) == set(expected)
    for name, grad in found.items():
        torch.testing.assert_close(grad, expected[name], rtol=1e-4, atol=1e-6)
    assert "NewGELUActivation" not in str(gpt2) or change is compile_layers


def test_products_stay_float32_where_onednn_makes_them(products):
    prefer_onednn()
    random = torch.Generator().manual_seed(1)
    a, b = torch.randn(300, 700, generator=random), torch.randn(700, 200, generator=random)
    exact = a.double() @ b.double()
    torch.testing.assert_close((a @ b).double(), exact, rtol=0, atol=1e-5 * exact.abs().max().item())


def test_products_that_are_not_float32_are_refused(products, monkeypatch):
    multiply = torch.Tensor.__matmul__

    def rough(a, b):  # as bfloat16 inside would be
        coarse = torch.get_float32_matmul_precision() == "medium" and a.dtype == torch.float32
        return multiply(a.bfloat16().float(), b) if coarse else multiply(a, b)

    monkeypatch.setattr(cpu_kernels.Tensor, "__matmul__", rough)
    torch.set_float32_matmul_precision("highest")
    assert not prefer_onednn()
    assert torch.get_float32_matmul_precision() == "highest"
