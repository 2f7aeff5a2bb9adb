"""Multiple choice on torch: scores and losses equal those of transformers."""

import pytest
import torch
from torch.nn import functional as F

from lmmods.torch_engine.nn.classifier import Classifier
from lmmods.torch_engine.tasks.multiple_choice import choice_loss
from tests.torch_engine.test_classifier import ENCODERS, make, padded, rows


@pytest.mark.parametrize("name", [*ENCODERS])
def test_scores_and_losses_of_choices_equal_transformers(name):
    model, labels = make(name, "MultipleChoice"), torch.tensor([1, 0])
    batch = {key: values[torch.tensor([[0, 1], [2, 1]])] for key, values in padded(rows()).items()}  # [2, 2, T]
    output = model(**batch, labels=labels)
    sums = choice_loss(Classifier(model)(batch), {"labels": labels, "choices": torch.tensor([2, 2])})
    torch.testing.assert_close(sums.total / sums.weight, output.loss)


def test_missing_choices_do_not_count_in_the_loss():
    logits = torch.randn(2, 4, generator=torch.Generator().manual_seed(0)).requires_grad_()
    sums = choice_loss(logits, {"labels": torch.tensor([1, -100]), "choices": torch.tensor([3, 0])})
    sums.total.backward()
    torch.testing.assert_close(sums.total, F.cross_entropy(logits[:1, :3], torch.tensor([1])))
    assert sums.weight == 1 and not logits.grad[1].any() and logits.grad[0, 3] == 0
