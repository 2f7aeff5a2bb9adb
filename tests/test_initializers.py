"""Weights that no file holds: PEFT's distribution, from seed and name alone."""

import numpy as np
import torch

from lmmods.core.initializers import init_lora_A, init_weight


def test_the_first_a_is_distributed_as_pefts():
    reference = torch.empty(64, 300)
    torch.nn.init.kaiming_uniform_(reference, a=5**0.5)  # peft.tuners.lora.layer.LoraLayer.reset_lora_parameters
    found = init_lora_A(0, "a", (64, 300))
    assert found.dtype == np.float32 and np.abs(found).max() <= 300**-0.5
    assert abs(found.std() / reference.std().item() - 1) < 0.02 and abs(found.mean()) < 1e-3


def test_seed_and_name_decide():
    assert (init_lora_A(1, "a", (4, 8)) == init_lora_A(1, "a", (4, 8))).all()
    assert (init_lora_A(1, "a", (4, 8)) != init_lora_A(2, "a", (4, 8))).any()
    assert (init_weight(1, "a", (4, 8), 0.02) != init_weight(1, "b", (4, 8), 0.02)).any()
    assert abs(init_weight(1, "a", (400, 80), 0.02).std() / 0.02 - 1) < 0.02
    assert not init_weight(1, "b", (4,), 1).any()
