"""Fast kernels compute what plain ones compute."""

import copy
import os
from types import SimpleNamespace

import pytest
import torch
from torch.nn import functional as F
from transformers import GPT2Config, GPT2LMHeadModel
from transformers.trainer_pt_utils import LabelSmoother

from lmmods.core.settings import TokenLoss
from lmmods.torch_engine.nn import loss as loss_module
from lmmods.torch_engine.nn.building import compile_layers, fuse_activations
from lmmods.torch_engine.nn.cpu_kernels import bound_onednn_cache, fast_products, stays_float32
from lmmods.torch_engine.nn.loss import IGNORED, token_loss
from tests.closeness import Float64, assert_as_close, in_both

CPU = torch.device("cpu")


@pytest.fixture
def unchecked():
    """Forget the result of the float32 check, before and after a test."""
    stays_float32.cache_clear()
    yield
    stays_float32.cache_clear()


def compute_gradients(model: torch.nn.Module) -> tuple[float, dict[str, torch.Tensor]]:
    ids = torch.arange(40).reshape(2, 20) % 61
    loss = model(input_ids=ids, labels=ids).loss
    loss.backward()
    grads = {name.replace("._orig_mod", ""): p.grad.clone() for name, p in model.named_parameters()}
    model.zero_grad()
    return loss.item(), grads


@pytest.fixture
def gpt2():
    torch.manual_seed(0)
    return GPT2LMHeadModel(GPT2Config(n_embd=32, n_layer=2, n_head=2, vocab_size=61, n_positions=64,
                                      bos_token_id=0, eos_token_id=0)).eval()


@pytest.mark.parametrize("change", [fuse_activations, pytest.param(compile_layers, marks=pytest.mark.slow)])
def test_loss_and_gradients_are_the_same_when_fused_or_compiled(gpt2, change):
    (loss, expected), (exact_loss, exact) = in_both(compute_gradients, gpt2)
    change(gpt2)
    new_loss, new_gradients = compute_gradients(gpt2)
    assert_as_close(new_loss, loss, exact_loss)
    assert_as_close(new_gradients, expected, exact)
    assert "NewGELUActivation" not in str(gpt2) or change is compile_layers


def test_fast_products_stay_float32(unchecked):
    random = torch.Generator().manual_seed(1)
    a, b = torch.randn(300, 700, generator=random), torch.randn(700, 200, generator=random)
    exact = a.double() @ b.double()
    with fast_products(CPU):
        torch.testing.assert_close((a @ b).double(), exact, rtol=0, atol=1e-5 * exact.abs().max().item())
    assert torch.get_float32_matmul_precision() == "highest"


def test_fast_products_that_are_not_float32_are_not_used(unchecked, monkeypatch):
    multiply = torch.Tensor.__matmul__

    def rough(a, b):  # as with bfloat16 inside the product
        coarse = torch.get_float32_matmul_precision() == "medium" and a.dtype == torch.float32
        return multiply(a.bfloat16().float(), b) if coarse else multiply(a, b)

    monkeypatch.setattr(torch.Tensor, "__matmul__", rough)
    assert not stays_float32()
    with fast_products(CPU):
        assert torch.get_float32_matmul_precision() == "highest"


def test_an_explicit_matmul_precision_stays():
    torch.set_float32_matmul_precision("high")
    try:
        with fast_products(CPU):
            assert torch.get_float32_matmul_precision() == "high"
    finally:
        torch.set_float32_matmul_precision("highest")


def test_the_onednn_cache_is_bounded(monkeypatch):
    monkeypatch.setenv("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "7")
    bound_onednn_cache()
    assert os.environ["ONEDNN_PRIMITIVE_CACHE_CAPACITY"] == "7"
    monkeypatch.delenv("ONEDNN_PRIMITIVE_CACHE_CAPACITY")
    bound_onednn_cache()
    assert os.environ["ONEDNN_PRIMITIVE_CACHE_CAPACITY"] == "64"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("trains", [True, False])
@pytest.mark.parametrize("weighted", [True, False])
@pytest.mark.parametrize(("scale", "softcap"), [(1.0, None), (0.3, 2.0)])
def test_the_manual_head_gradient_equals_autograd(  # noqa: PLR0913
        monkeypatch, dtype, trains, weighted, scale, softcap):
    """Float32 up to rounding; under bfloat16 autocast, the two round differently."""
    monkeypatch.setattr(loss_module, "CHUNK_BYTES", 4 * 61 * 5)  # five positions per chunk
    monkeypatch.setattr(loss_module, "MIN_CHUNK", 1)
    torch.manual_seed(0)
    layer = torch.nn.Linear(16, 61, bias=False).requires_grad_(trains)
    hidden, targets = torch.randn(2, 9, 16), torch.randint(0, 61, (2, 9))
    targets[0, :4] = IGNORED
    weights = torch.rand(2, 9) if weighted else None

    def run(head, plain=False):
        x = hidden.clone().requires_grad_()
        params = [layer.weight] if trains else []
        with torch.autocast("cpu", dtype, enabled=dtype != torch.float32):
            sums = token_loss(x, targets, head, params, 61, count_correct=True, plain=plain, weights=weights)
        return [sums.total, sums.weight, sums.correct, *torch.autograd.grad(sums.total / 8, [x, *params])]

    def whole(x):
        logits = layer(x) * scale
        return logits if softcap is None else torch.tanh(logits / softcap) * softcap

    by_hand = SimpleNamespace(linear=layer, scale=scale, softcap=softcap)
    exact = dtype == torch.float32
    for result, chunked, plain in zip(run(by_hand), run(whole), run(whole, plain=True), strict=True):
        for reference in (chunked, plain):
            torch.testing.assert_close(result, reference, rtol=1e-5 if exact else 2e-2, atol=1e-6 if exact else 2e-2)


@pytest.mark.parametrize("form", [TokenLoss(0.1), TokenLoss(0.0, 0.01), TokenLoss(0.2, 0.01), TokenLoss(dft=True),
                                  TokenLoss(z_loss=0.01, dft=True)], ids=str)
@pytest.mark.parametrize("head", ["by hand", "by autograd", "plain"])
def test_loss_terms_equal_transformers_trl_and_their_formulas(monkeypatch, form, head):
    """transformers' LabelSmoother, log Z squared by logsumexp, and TRL's factor of `loss_type: dft`."""
    monkeypatch.setattr(loss_module, "CHUNK_BYTES", 4 * 61 * 5)
    monkeypatch.setattr(loss_module, "MIN_CHUNK", 1)
    torch.manual_seed(0)
    layer = torch.nn.Linear(16, 61, bias=False)
    hidden, targets = torch.randn(2, 9, 16), torch.randint(0, 61, (2, 9))
    targets[0, :4] = IGNORED

    def compute(model, x):
        form_of_head = SimpleNamespace(linear=model) if head == "by hand" else model
        sums = token_loss(x, targets, form_of_head, [model.weight], 61, plain=head == "plain", form=form)
        return sums.total / sums.weight

    def compute_reference(model, x):
        logits = model(x)
        loss = LabelSmoother(epsilon=form.label_smoothing)({"logits": logits}, targets)
        if form.dft:
            losses = F.cross_entropy(logits[targets != IGNORED], targets[targets != IGNORED], reduction="none")
            loss = (losses * torch.softmax(logits, -1).gather(2, targets.clamp(min=0)[..., None]).detach()[
                targets != IGNORED].squeeze(-1)).mean()
        log_z = logits.logsumexp(-1)[targets != IGNORED]
        return loss + form.z_loss * log_z.square().mean()

    def run(function, dtype=torch.float32):
        model, x = copy.deepcopy(layer).to(dtype), hidden.to(dtype).requires_grad_()
        loss = function(model, x)
        return [loss, *torch.autograd.grad(loss, [x, model.weight])]

    with Float64():
        exact = run(compute_reference, torch.float64)
    assert_as_close(run(compute), run(compute_reference), exact)
    with torch.no_grad():
        assert_as_close(compute(layer, hidden), compute_reference(layer, hidden), exact[0])


@pytest.mark.skipif(not hasattr(F, "linear_cross_entropy"), reason="torch has it from 2.13 on")
@pytest.mark.parametrize("trains", [True, False])
def test_the_chunked_head_is_as_exact_as_torch(monkeypatch, trains):
    """The exact value is cross-entropy of full logits in float64; torch's fused loss has its own chunks."""
    monkeypatch.setattr(loss_module, "CHUNK_BYTES", 4 * 307 * 50)  # 50 positions per chunk
    monkeypatch.setattr(loss_module, "MIN_CHUNK", 1)
    torch.manual_seed(0)
    layer = torch.nn.Linear(48, 307, bias=False).requires_grad_(trains)
    torch.nn.init.normal_(layer.weight)  # confident predictions, like a trained model's
    hidden, targets = torch.randn(4, 64, 48), torch.randint(0, 307, (4, 64))
    targets[1:, ::3] = IGNORED

    def compute(x, head):
        return token_loss(x, targets, SimpleNamespace(linear=head), [head.weight] if trains else [], 307).total

    def compute_by_torch(x, head):
        return F.linear_cross_entropy(x.flatten(0, 1), head.weight, targets.flatten(), reduction="sum",
                                      ignore_index=IGNORED)

    def compute_full(x, head):
        return F.cross_entropy(head(x).flatten(0, 1), targets.flatten(), reduction="sum", ignore_index=IGNORED)

    def run(loss, dtype=torch.float32):
        head, x = copy.deepcopy(layer).to(dtype), hidden.clone().to(dtype).requires_grad_()
        total = loss(x, head)
        (total / 8).backward()
        return {"loss": total.detach(), "hidden": x.grad, **({"head": head.weight.grad} if trains else {})}

    assert_as_close(run(compute), run(compute_by_torch), run(compute_full, torch.float64))
