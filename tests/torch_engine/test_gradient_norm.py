"""Gradient norm."""

import torch

from lmmods.torch_engine.nn.optim import total_norm


def test_the_norm_of_a_large_table_is_accurate():
    torch.manual_seed(0)
    grads = [torch.randn(50257, 256) * 1e-4, torch.randn(768) * 1e-3, torch.randn(3, 4, 5)]
    exact = sum(grad.double().square().sum() for grad in grads).sqrt()
    torch.testing.assert_close(total_norm(grads).double(), exact, rtol=1e-6, atol=0)
