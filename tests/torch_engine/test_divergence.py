"""The divergence from a teacher: TRL's value and gradient, in every form of the head; what is no teacher."""

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

V, PADDED = 61, 64  # tokens, and rows of the teacher's table
FORMS = [Divergence(beta, temperature) for beta in (0.0, 0.1, 0.5, 1.0) for temperature in (0.7, 1.0, 2.0)]


def of_trl(form, logits, taught, targets):
    """The sum over scored positions."""
    pytest.importorskip("trl", reason="an extra of developers (dev)")
    from trl.experimental.gkd import GKDTrainer

    return GKDTrainer.generalized_jsd_loss(logits, taught, targets, form.beta, form.temperature, reduction="sum")


@pytest.fixture
def small_chunks(monkeypatch):
    monkeypatch.setattr(loss_module, "CHUNK_BYTES", 4 * V * 5)
    monkeypatch.setattr(loss_module, "MIN_CHUNK", 1)


@pytest.fixture
def drawn():
    """Student, teacher, hidden states of both, targets."""
    torch.manual_seed(0)
    student, teacher = torch.nn.Linear(16, V, bias=False), torch.nn.Linear(24, PADDED, bias=False)
    targets = torch.randint(0, V, (2, 9))
    targets[0, :4] = IGNORED
    return student, teacher.requires_grad_(False), 4 * torch.randn(2, 9, 16), 4 * torch.randn(2, 9, 24), targets


@pytest.mark.parametrize("form", FORMS, ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_divergence_and_gradient_are_trls(form, dtype):
    torch.manual_seed(1)
    logits, taught = 3 * torch.randn(7, V, dtype=dtype), 3 * torch.randn(7, PADDED, dtype=dtype)

    def theirs(x, taught):
        x.requires_grad_()
        value = of_trl(form, x[None], taught[None, :, :V], torch.zeros(1, 7, dtype=torch.long))
        return [value, *torch.autograd.grad(value, x)]

    value, gradient = compute_divergence(logits, taught, form)
    assert (value >= 0).all()
    exact = theirs(logits.double(), taught.double())
    assert_as_close([value.sum(), gradient()], theirs(logits.clone(), taught), exact)


@pytest.mark.parametrize(("form", "divergence"), [(TokenLoss(), divergence) for divergence in FORMS[1::3]] + [
    (TokenLoss(0.1, 0.01), Divergence(0.5, 1.5, 0.25)), (TokenLoss(), Divergence(0.0, 1.0, 1.0))], ids=str)
@pytest.mark.parametrize("head", ["by hand", "by autograd", "plain"])
@pytest.mark.parametrize("own_draws", [None, [[0.0], [1.0]], [[1.0], [1.0]]], ids=["given", "one row drawn", "drawn"])
def test_a_mixed_loss_is_cross_entropy_and_trls_divergence(  # noqa: PLR0913
        small_chunks, drawn, form, divergence, head, own_draws):
    """The sums of both parts are metrics; positions count by their weight. Of what the student has drawn it is the
    divergence alone, whatever the ratio."""
    student, teacher, hidden, taught, targets = drawn
    weights, ratio = torch.rand(2, 9), divergence.ratio
    divergence = divergence._replace(on_policy=own_draws is not None)
    is_drawn = torch.tensor(own_draws or 0.0).expand(2, 9)

    def ours(model, other, x, guide, weights):
        own = SimpleNamespace(linear=model) if head == "by hand" else model
        sums = distillation_loss(x, targets, own, [model.weight], V, plain=head == "plain", weights=weights, form=form,
                                 divergence=divergence,
                                 teacher=TeacherStates(guide, other, own_draws and is_drawn.to(x.dtype)))
        return sums.total, sums.metrics

    def theirs(model, other, x, guide, weights):
        logits = model(x)
        log_probs, log_z = logits.log_softmax(-1), logits.logsumexp(-1)
        picked = log_probs.gather(-1, targets.clamp(min=0)[..., None])[..., 0]
        smoothing = form.label_smoothing
        plain = -(1 - smoothing) * picked - smoothing * log_probs.mean(-1) + form.z_loss * log_z.square()
        scored = (targets != IGNORED) * weights
        # TRL has no weights: a row of one position at a time.
        diverging = torch.stack([of_trl(divergence, one[None, None], two[None, None, :V], torch.zeros(1, 1))
                                 for one, two in zip(logits.flatten(0, 1), other(guide).flatten(0, 1), strict=True)])
        diverging, given = diverging.view(2, 9) * scored, is_drawn == 0
        parts = [diverging.sum(), (plain * scored)[given].sum()]
        counts = [scored.sum(), scored[given].sum()]
        if own_draws:
            parts, counts = [*parts, scored[~given].sum()], [*counts, scored.sum()]
        total = ratio * diverging[given].sum() + diverging[~given].sum() + (1 - ratio) * parts[1]
        return total, torch.stack([torch.stack(parts), torch.stack(counts)], 1)

    def found(function, dtype=torch.float32):
        model, other = (copy.deepcopy(each).to(dtype) for each in (student, teacher))
        x = hidden.to(dtype).requires_grad_()
        total, metrics = function(model, other, x, taught.to(dtype), weights.to(dtype))
        return [total, metrics, *torch.autograd.grad(total, [x, model.weight])]

    with Float64():
        exact = found(theirs, torch.float64)
    assert_as_close(found(ours), found(theirs), exact)
    with torch.no_grad():
        assert_as_close(ours(student, teacher, hidden, taught, weights)[0], theirs(
            student, teacher, hidden, taught, weights)[0], exact[0])


@pytest.mark.parametrize("form", FORMS, ids=str)
def test_a_network_that_is_its_own_teacher_learns_nothing(small_chunks, drawn, form):
    student, _, hidden, _, targets = drawn
    hidden.requires_grad_()
    sums = distillation_loss(hidden, targets, student, [student.weight], V, divergence=form._replace(ratio=1.0),
                             teacher=TeacherStates(hidden.detach(), student))
    gradients = torch.autograd.grad(sums.total, [hidden, student.weight])
    assert_as_close([sums.total, *gradients], *[[torch.zeros_like(x) for x in (sums.total, *gradients)]] * 2,
                    magnitude=1.0)


def by_hand(logits, taught, k):
    """Log-probabilities of the teacher's k likeliest tokens and of the others together, of both; and these tokens."""
    student, teacher = logits.log_softmax(-1), taught.log_softmax(-1)
    ids = teacher.topk(k).indices
    inside = torch.zeros_like(logits, dtype=torch.bool).scatter_(-1, ids, True)
    return *(torch.cat([x.gather(-1, ids), x.masked_fill(inside, -torch.inf).logsumexp(-1, keepdim=True)], -1)
             for x in (student, teacher)), ids


@pytest.mark.parametrize("beta", [0.0, 0.1, 1.0])
@pytest.mark.parametrize("k", [1, 7, V - 1])
def test_likeliest_tokens_and_the_rest_are_one_distribution(beta, k):
    """TRL's divergence of k + 1 probabilities."""
    torch.manual_seed(1)
    form, logits, taught = Divergence(beta), 3 * torch.randn(7, V), 3 * torch.randn(7, V)

    def theirs(x):
        x.requires_grad_()
        student, teacher, _ = by_hand(x, taught.to(x.dtype), k)
        value = of_trl(form, student[None], teacher[None], torch.zeros(1, 7, dtype=torch.long))
        return [value, *torch.autograd.grad(value, x)]

    _, known, ids = by_hand(logits, taught.double(), k)
    value, gradient = compute_divergence(logits, TeacherTopK(ids, known.float(), V), form)
    assert_as_close([value.sum(), gradient()], theirs(logits.clone()), theirs(logits.double()))
    own = compute_top_k(taught, lambda x: x, V, k, torch.device("cpu"))
    assert (own[0] == ids).all()
    assert_as_close(own[1], known.float(), known)


@pytest.mark.parametrize("form", FORMS[1::3], ids=str)
@pytest.mark.parametrize("plain", [False, True])
def test_all_tokens_as_likeliest_are_the_whole_distribution(small_chunks, drawn, form, plain):
    student, teacher, hidden, taught, targets = drawn
    ids, logps = compute_top_k(taught.flatten(0, 1), teacher, V, V, hidden.device)
    results = []
    for expected in (TeacherStates(taught, lambda x: teacher(x)[:, :V]),
                     TeacherTopK(ids.view(2, 9, V), logps.view(2, 9, V + 1), V)):
        x = hidden.clone().requires_grad_()
        sums = distillation_loss(x, targets, student, [student.weight], V, plain=plain, divergence=form,
                                 teacher=expected)
        results.append([sums.total, sums.metrics, *torch.autograd.grad(sums.total, [x, student.weight])])
    assert_as_close(results[1], results[0], results[0], magnitude=1.0)


def test_likeliest_tokens_are_found_by_number():
    parts = [{"ids": np.array([[1, 2], [3, 4]]), "logps": np.ones((2, 3))}, {"ids": np.array([[5, 6]]),
                                                                            "logps": np.full((1, 3), 2.0)}]
    ids, logps = TeacherTopKTable(parts, 2)(np.array([[0, 3], [2, 1]]))
    assert ids.tolist() == [[[0, 0], [5, 6]], [[3, 4], [1, 2]]] and logps[..., 0].tolist() == [[0, 2], [1, 1]]


def test_evaluation_measures_the_divergence_and_has_the_plain_loss(small_chunks, drawn):
    student, teacher, hidden, taught, targets = drawn
    sums = distillation_loss(hidden, targets, student, [student.weight], V, count_correct=True,
                             divergence=Divergence(0.5).evaluated, teacher=TeacherStates(taught, teacher))
    plain = token_loss(hidden, targets, student, [student.weight], V, count_correct=True)
    assert sums.total == plain.total == sums.metrics[1, 0] and sums.correct == plain.correct
    assert sums.metrics[0, 0] > 0


def test_a_teacher_of_another_vocabulary_is_refused(tokenizer_folder, llama_folder):
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(tokenizer_folder)
    check_teacher(Teacher(pretrained=str(llama_folder)), tokenizer)
    tokenizer.add_tokens(["<new>"])
    with pytest.raises(UserError, match=r"model\.teacher\.pretrained .* 1 tokens differ, such as '<new>'"):
        check_teacher(Teacher(pretrained=str(llama_folder)), tokenizer)
    with pytest.raises(UserError, match=r"differs from data\.tokenizer"):
        check_teacher(Teacher(pretrained="demo/bert"), tokenizer)


@pytest.mark.parametrize(("given", "words"), [
    ({"pretrained": None}, "teacher.pretrained is null"), ({"beta": 1.5}, "teacher.beta is 1.5"),
    ({"temperature": 0.0}, "teacher.temperature is 0.0"), ({"ratio": 0.0}, "teacher.ratio is 0.0"),
    ({"top_k": 0}, "teacher.top_k is 0"), ({"top_k": 4, "temperature": 2.0}, "teacher.temperature is 2.0"),
    ({"on_policy": 1.5}, "teacher.on_policy is 1.5"), ({"on_policy": 0.5, "top_k": 4}, "teacher.top_k is 4"),
    ({"on_policy": 1.0, "max_new_tokens": 0}, "teacher.max_new_tokens is 0"),
    ({"on_policy": 1.0, "sampling_temperature": 0.0}, "teacher.sampling_temperature is 0"),
    ({"max_new_tokens": 64}, "teacher.max_new_tokens is 64.*on_policy 0")])
def test_settings_of_a_teacher(given, words):
    with pytest.raises(UserError, match=words):
        Teacher(**{"pretrained": "demo/llama", **given})
