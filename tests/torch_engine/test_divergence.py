"""Divergence from a teacher: TRL's value and gradient, in every form of the head; invalid teachers."""

import copy
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from lmmods.core.errors import UserError
from lmmods.core.settings import Divergence, Teacher, TokenLoss
from lmmods.data.teacher import TeacherTopKTable, check_teacher
from lmmods.torch_engine.nn import loss as loss_module
from lmmods.torch_engine.nn.distillation import (
    TeacherStates,
    TeacherTopK,
    compute_divergence,
    compute_top_k,
    distillation_loss,
)
from lmmods.torch_engine.nn.loss import IGNORED, token_loss
from tests.closeness import Float64, assert_as_close

V, PADDED = 61, 64  # tokens, and rows of the teacher's padded embedding
FORMS = [Divergence(beta, temperature) for beta in (0.0, 0.1, 0.5, 1.0) for temperature in (0.7, 1.0, 2.0)]


def divergence_of_trl(form, logits, teacher_logits, targets):
    """Return TRL's divergence, summed over target positions."""
    pytest.importorskip("trl", reason="an extra of developers (dev)")
    from trl.experimental.gkd import GKDTrainer

    return GKDTrainer.generalized_jsd_loss(logits, teacher_logits, targets, form.beta, form.temperature,
                                           reduction="sum")


@pytest.fixture
def small_chunks(monkeypatch):
    monkeypatch.setattr(loss_module, "CHUNK_BYTES", 4 * V * 5)
    monkeypatch.setattr(loss_module, "MIN_CHUNK", 1)


@pytest.fixture
def inputs():
    """Student head, teacher head, hidden states of both, targets."""
    torch.manual_seed(0)
    student, teacher = torch.nn.Linear(16, V, bias=False), torch.nn.Linear(24, PADDED, bias=False)
    targets = torch.randint(0, V, (2, 9))
    targets[0, :4] = IGNORED
    return student, teacher.requires_grad_(False), 4 * torch.randn(2, 9, 16), 4 * torch.randn(2, 9, 24), targets


@pytest.mark.parametrize("form", FORMS, ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_divergence_and_gradient_equal_trl(form, dtype):
    torch.manual_seed(1)
    logits, teacher_logits = 3 * torch.randn(7, V, dtype=dtype), 3 * torch.randn(7, PADDED, dtype=dtype)

    def compute_by_trl(x, teacher_logits):
        x.requires_grad_()
        value = divergence_of_trl(form, x[None], teacher_logits[None, :, :V], torch.zeros(1, 7, dtype=torch.long))
        return [value, *torch.autograd.grad(value, x)]

    value, gradient = compute_divergence(logits, teacher_logits, form)
    assert (value >= 0).all()
    exact = compute_by_trl(logits.double(), teacher_logits.double())
    assert_as_close([value.sum(), gradient()], compute_by_trl(logits.clone(), teacher_logits), exact)


@pytest.mark.parametrize(("form", "divergence"), [(TokenLoss(), divergence) for divergence in FORMS[1::3]] + [
    (TokenLoss(0.1, 0.01), Divergence(0.5, 1.5, 0.25)), (TokenLoss(), Divergence(0.0, 1.0, 1.0))], ids=str)
@pytest.mark.parametrize("head", ["by hand", "by autograd", "plain"])
@pytest.mark.parametrize("sampled", [None, [[0.0], [1.0]], [[1.0], [1.0]]], ids=["given", "one row sampled", "sampled"])
def test_the_distillation_loss_mixes_cross_entropy_and_trl_divergence(  # noqa: PLR0913
        small_chunks, inputs, form, divergence, head, sampled):
    """Both sums are metrics, and positions count by their weight. For sampled tokens, the loss is the divergence alone,
    whatever the ratio."""
    student, teacher, hidden, teacher_hidden, targets = inputs
    weights, ratio = torch.rand(2, 9), divergence.ratio
    divergence = divergence._replace(on_policy=sampled is not None)
    is_sampled = torch.tensor(sampled or 0.0).expand(2, 9)

    def compute(model, teacher_head, x, teacher_hidden, weights):
        head_module = SimpleNamespace(linear=model) if head == "by hand" else model
        states = TeacherStates(teacher_hidden, teacher_head, sampled and is_sampled.to(x.dtype))
        sums = distillation_loss(x, targets, head_module, [model.weight], V, plain=head == "plain", weights=weights,
                                 form=form, divergence=divergence, teacher=states)
        return sums.total, sums.metrics

    def compute_by_trl(model, teacher_head, x, teacher_hidden, weights):
        logits = model(x)
        log_probs, log_z = logits.log_softmax(-1), logits.logsumexp(-1)
        logps = log_probs.gather(-1, targets.clamp(min=0)[..., None])[..., 0]
        smoothing = form.label_smoothing
        plain = -(1 - smoothing) * logps - smoothing * log_probs.mean(-1) + form.z_loss * log_z.square()
        position_weights = (targets != IGNORED) * weights
        # TRL has no weights, so each position is its own row.
        positions = zip(logits.flatten(0, 1), teacher_head(teacher_hidden).flatten(0, 1), strict=True)
        divergences = torch.stack([divergence_of_trl(divergence, student_logits[None, None],
                                                     teacher_logits[None, None, :V], torch.zeros(1, 1))
                                   for student_logits, teacher_logits in positions])
        divergences, is_given = divergences.view(2, 9) * position_weights, is_sampled == 0
        parts = [divergences.sum(), (plain * position_weights)[is_given].sum()]
        counts = [position_weights.sum(), position_weights[is_given].sum()]
        if sampled:
            parts, counts = [*parts, position_weights[~is_given].sum()], [*counts, position_weights.sum()]
        total = ratio * divergences[is_given].sum() + divergences[~is_given].sum() + (1 - ratio) * parts[1]
        return total, torch.stack([torch.stack(parts), torch.stack(counts)], 1)

    def run(function, dtype=torch.float32):
        model, teacher_head = (copy.deepcopy(layer).to(dtype) for layer in (student, teacher))
        x = hidden.to(dtype).requires_grad_()
        total, metrics = function(model, teacher_head, x, teacher_hidden.to(dtype), weights.to(dtype))
        return [total, metrics, *torch.autograd.grad(total, [x, model.weight])]

    with Float64():
        exact = run(compute_by_trl, torch.float64)
    assert_as_close(run(compute), run(compute_by_trl), exact)
    with torch.no_grad():
        assert_as_close(compute(student, teacher, hidden, teacher_hidden, weights)[0], compute_by_trl(
            student, teacher, hidden, teacher_hidden, weights)[0], exact[0])


@pytest.mark.parametrize("form", FORMS, ids=str)
def test_a_student_equal_to_its_teacher_has_no_gradient(small_chunks, inputs, form):
    student, _, hidden, _, targets = inputs
    hidden.requires_grad_()
    sums = distillation_loss(hidden, targets, student, [student.weight], V, divergence=form._replace(ratio=1.0),
                             teacher=TeacherStates(hidden.detach(), student))
    gradients = torch.autograd.grad(sums.total, [hidden, student.weight])
    assert_as_close([sums.total, *gradients], *[[torch.zeros_like(x) for x in (sums.total, *gradients)]] * 2,
                    magnitude=1.0)


def compute_top_k_by_hand(logits, teacher_logits, k):
    """Return log-probabilities of the teacher's top k tokens and of all others together, for both; and these tokens."""
    student, teacher = logits.log_softmax(-1), teacher_logits.log_softmax(-1)
    ids = teacher.topk(k).indices
    is_in_top_k = torch.zeros_like(logits, dtype=torch.bool).scatter_(-1, ids, True)
    return *(torch.cat([x.gather(-1, ids), x.masked_fill(is_in_top_k, -torch.inf).logsumexp(-1, keepdim=True)], -1)
             for x in (student, teacher)), ids


@pytest.mark.parametrize("beta", [0.0, 0.1, 1.0])
@pytest.mark.parametrize("k", [1, 7, V - 1])
def test_top_k_divergence_equals_trl_on_k_plus_one_probabilities(beta, k):
    torch.manual_seed(1)
    form, logits, teacher_logits = Divergence(beta), 3 * torch.randn(7, V), 3 * torch.randn(7, V)

    def compute_by_trl(x):
        x.requires_grad_()
        student, teacher, _ = compute_top_k_by_hand(x, teacher_logits.to(x.dtype), k)
        value = divergence_of_trl(form, student[None], teacher[None], torch.zeros(1, 7, dtype=torch.long))
        return [value, *torch.autograd.grad(value, x)]

    _, top_logps, ids = compute_top_k_by_hand(logits, teacher_logits.double(), k)
    value, gradient = compute_divergence(logits, TeacherTopK(ids, top_logps.float(), V), form)
    assert_as_close([value.sum(), gradient()], compute_by_trl(logits.clone()), compute_by_trl(logits.double()))
    top_k = compute_top_k(teacher_logits, lambda x: x, V, k, torch.device("cpu"))
    assert (top_k[0] == ids).all()
    assert_as_close(top_k[1], top_logps.float(), top_logps)


@pytest.mark.parametrize("form", FORMS[1::3], ids=str)
@pytest.mark.parametrize("plain", [False, True])
def test_top_k_of_all_tokens_is_the_full_divergence(small_chunks, inputs, form, plain):
    student, teacher, hidden, teacher_hidden, targets = inputs
    ids, logps = compute_top_k(teacher_hidden.flatten(0, 1), teacher, V, V, hidden.device)
    results = []
    for teacher_data in (TeacherStates(teacher_hidden, lambda x: teacher(x)[:, :V]),
                         TeacherTopK(ids.view(2, 9, V), logps.view(2, 9, V + 1), V)):
        x = hidden.clone().requires_grad_()
        sums = distillation_loss(x, targets, student, [student.weight], V, plain=plain, divergence=form,
                                 teacher=teacher_data)
        results.append([sums.total, sums.metrics, *torch.autograd.grad(sums.total, [x, student.weight])])
    assert_as_close(results[1], results[0], results[0], magnitude=1.0)


def test_the_top_k_table_is_indexed_across_its_parts():
    parts = [{"ids": np.array([[1, 2], [3, 4]]), "logps": np.ones((2, 3))}, {"ids": np.array([[5, 6]]),
                                                                            "logps": np.full((1, 3), 2.0)}]
    ids, logps = TeacherTopKTable(parts, 2)(np.array([[0, 3], [2, 1]]))
    assert ids.tolist() == [[[0, 0], [5, 6]], [[3, 4], [1, 2]]] and logps[..., 0].tolist() == [[0, 2], [1, 1]]


def test_evaluation_reports_the_divergence_and_uses_the_plain_loss(small_chunks, inputs):
    student, teacher, hidden, teacher_hidden, targets = inputs
    sums = distillation_loss(hidden, targets, student, [student.weight], V, count_correct=True,
                             divergence=Divergence(0.5).evaluated, teacher=TeacherStates(teacher_hidden, teacher))
    plain = token_loss(hidden, targets, student, [student.weight], V, count_correct=True)
    assert sums.total == plain.total == sums.metrics[1, 0] and sums.correct == plain.correct
    assert sums.metrics[0, 0] > 0


def test_a_teacher_with_another_vocabulary_is_rejected(tokenizer_folder, llama_folder):
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(tokenizer_folder)
    check_teacher(Teacher(pretrained=str(llama_folder)), tokenizer)
    tokenizer.add_tokens(["<new>"])
    with pytest.raises(UserError, match=r"model\.teacher\.pretrained .* in 1 tokens, such as '<new>'"):
        check_teacher(Teacher(pretrained=str(llama_folder)), tokenizer)
    with pytest.raises(UserError, match=r"differs from data\.tokenizer"):
        check_teacher(Teacher(pretrained="demo/bert"), tokenizer)


@pytest.mark.parametrize(("settings", "message"), [
    ({"pretrained": None}, "teacher.pretrained is null"), ({"beta": 1.5}, "teacher.beta is 1.5"),
    ({"temperature": 0.0}, "teacher.temperature is 0.0"), ({"ratio": 0.0}, "teacher.ratio is 0.0"),
    ({"top_k": 0}, "teacher.top_k is 0"), ({"top_k": 4, "temperature": 2.0}, "teacher.temperature is 2.0"),
    ({"on_policy": 1.5}, "teacher.on_policy is 1.5"), ({"on_policy": 0.5, "top_k": 4}, "teacher.top_k is 4"),
    ({"on_policy": 1.0, "max_new_tokens": 0}, "teacher.max_new_tokens is 0"),
    ({"on_policy": 1.0, "sampling_temperature": 0.0}, "teacher.sampling_temperature is 0"),
    ({"max_new_tokens": 64}, "teacher.max_new_tokens is 64.*on_policy 0")])
def test_invalid_teacher_settings_are_rejected_by_name(settings, message):
    with pytest.raises(UserError, match=message):
        Teacher(**{"pretrained": "demo/llama", **settings})
