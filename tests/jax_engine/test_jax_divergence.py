"""The divergence from a teacher on JAX: values, gradients and sums equal torch's, on one device and on a mesh."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from jax.sharding import NamedSharding, PartitionSpec

from jax_engine.distributed import loss
from jax_engine.distributed.distillation import TeacherStates, TeacherTopK, distillation_loss
from jax_engine.distributed.interface import DATA_AXES
from jax_engine.distributed.loss import IGNORED
from jax_engine.distributed.mesh import ShardedMesh
from lmmods.core.settings import Divergence, TokenLoss
from lmmods.torch_engine.nn import distillation as torch_distillation
from tests.closeness import Float64, assert_as_close

B, T, D, TEACHER_D, V = 8, 9, 12, 20, 50
FORMS = [(TokenLoss(), Divergence(0.0)), (TokenLoss(0.1, 0.01), Divergence(0.3, 1.5, 0.25)),
         (TokenLoss(), Divergence(1.0, 0.7, 1.0))]
# With rows that the student sampled.
ON_POLICY = [(form, divergence._replace(on_policy=True)) for form, divergence in FORMS]
IS_SAMPLED = np.array([1, 0, 1, 0, 0, 1, 1, 0], np.float32)


@pytest.fixture
def small_chunks(monkeypatch):
    monkeypatch.setattr(loss, "CHUNK_BYTES", 4 * V * 5)
    monkeypatch.setattr(loss, "MIN_CHUNK", 1)


def make_inputs(rows: int = V):
    """Return hidden states of student and teacher, targets, weights and both heads; the teacher's head has `rows`."""
    random = np.random.default_rng(0)
    targets = np.where(random.random((B, T)) < 0.4, random.integers(0, V, (B, T)), IGNORED)
    hidden, teacher_hidden, head, teacher = (random.normal(size=shape).astype(np.float32)
                                             for shape in ((B, T, D), (B, T, TEACHER_D), (V, D), (rows, TEACHER_D)))
    return hidden, teacher_hidden, targets, random.choice([0.25, 1, 3], (B, T)).astype(np.float32), head, teacher


def compile_loss(form, divergence, plain=False, count=False):
    def total(hidden, head, teacher_hidden, targets, weights, teacher):
        is_sampled = jnp.broadcast_to(IS_SAMPLED[:, None], (B, T)) if divergence.on_policy else None
        states = TeacherStates(teacher_hidden, lambda x: x @ teacher.T, is_sampled)
        sums = distillation_loss(hidden, targets, lambda x: x @ head.T, V, count, plain, weights, form=form,
                                 divergence=divergence, teacher=states)
        return sums.total, sums

    return jax.jit(jax.value_and_grad(total, argnums=(0, 1), has_aux=True))


def run_torch(form, divergence, hidden, teacher_hidden, targets, weights, head, teacher):  # noqa: PLR0913
    arrays = hidden, head, teacher, teacher_hidden, weights
    x, head_weight, teacher_head, teacher_x, by_position = (torch.tensor(a, dtype=torch.float32) for a in arrays)
    x.requires_grad_(), head_weight.requires_grad_()
    is_sampled = torch.tensor(IS_SAMPLED, dtype=x.dtype)[:, None].expand(B, T) if divergence.on_policy else None
    states = torch_distillation.TeacherStates(teacher_x, lambda h: h @ teacher_head.T, is_sampled)
    sums = torch_distillation.distillation_loss(x, torch.tensor(targets), lambda h: h @ head_weight.T, [head_weight], V,
                                                weights=by_position, form=form, divergence=divergence, teacher=states)
    return [sums.total, sums.metrics, *torch.autograd.grad(sums.total, [x, head_weight])]


@pytest.mark.parametrize(("form", "divergence"), FORMS + ON_POLICY, ids=str)
@pytest.mark.parametrize(("plain", "rows"), [(False, V), (False, V + 6), (True, V + 6)])
def test_the_distillation_loss_equals_torchs(form, divergence, plain, rows, small_chunks):
    hidden, teacher_hidden, targets, weights, head, teacher = make_inputs(rows)
    function = compile_loss(form, divergence, plain)
    (total, sums), gradients = function(hidden, head, teacher_hidden, targets, weights, teacher)
    actual = [total, np.stack([sums.metrics[name] for name in divergence.metric_names]), *gradients]
    with Float64():
        exact = run_torch(form, divergence, hidden, teacher_hidden, targets, weights, head, teacher)
    assert_as_close(actual, run_torch(form, divergence, hidden, teacher_hidden, targets, weights, head, teacher), exact)


@pytest.mark.parametrize(("settings", "rows"), [(FORMS[1], V), (FORMS[1], V + 6), (ON_POLICY[1], V)], ids=str)
def test_the_distillation_loss_is_the_same_on_a_mesh(settings, rows, small_chunks):
    hidden, teacher_hidden, targets, weights, head, teacher = make_inputs(rows)
    expected = compile_loss(*settings, count=True)(hidden, head, teacher_hidden, targets, weights, teacher)
    mesh = ShardedMesh(data=2, fsdp=2, tensor=2).mesh
    by_rows, table = NamedSharding(mesh, PartitionSpec(DATA_AXES)), NamedSharding(mesh, PartitionSpec("fsdp"))
    put = [jax.device_put(x, where) for x, where in ((hidden, by_rows), (head, table), (teacher_hidden, by_rows), (
        targets, by_rows), (weights, by_rows), (teacher, table))]
    with jax.set_mesh(mesh):
        on_mesh = compile_loss(*settings, count=True)(*put)
    for actual, reference in zip(*map(jax.tree.leaves, (on_mesh, expected)), strict=True):
        assert_as_close(actual, reference, reference, magnitude=1)


def compile_top_k_loss(form, divergence, size, plain=False):
    def total(hidden, head, targets, weights, ids, logps):
        sums = distillation_loss(hidden, targets, lambda x: x @ head.T, V, False, plain, weights, form=form,
                                 divergence=divergence, teacher=TeacherTopK(ids, logps, size))
        return sums.total, sums

    return jax.jit(jax.value_and_grad(total, argnums=(0, 1), has_aux=True))


@pytest.mark.parametrize("beta", [0.0, 0.3, 1.0])
@pytest.mark.parametrize(("plain", "k"), [(False, 6), (False, V - 3), (True, 6)])
def test_the_top_k_distillation_loss_equals_torchs(beta, plain, k, small_chunks):
    """The student's table has three padding rows."""
    hidden, teacher_hidden, targets, weights, head, teacher = make_inputs()
    divergence = Divergence(beta)
    log_probs = torch.tensor(teacher_hidden @ teacher[: V - 3].T).log_softmax(-1)
    ids = log_probs.topk(k).indices.numpy()
    others = log_probs.scatter(-1, torch.tensor(ids), -torch.inf).logsumexp(-1, keepdim=True)
    logps = torch.cat([log_probs.gather(-1, torch.tensor(ids)), others], -1).numpy()
    function = compile_top_k_loss(TokenLoss(), divergence, V - 3, plain)
    (total, sums), gradients = function(hidden, head, targets, weights, ids.astype(np.int32), logps)

    def run_torch():
        x, weight, by_position = (torch.tensor(array, dtype=torch.float32) for array in (hidden, head, weights))
        x.requires_grad_(), weight.requires_grad_()
        top_k = torch_distillation.TeacherTopK(torch.tensor(ids), torch.tensor(logps, dtype=torch.float32), V - 3)
        sums = torch_distillation.distillation_loss(x, torch.tensor(targets), lambda h: h @ weight.T, [weight],
                                                    V, weights=by_position, divergence=divergence, teacher=top_k)
        return [sums.total, sums.metrics, *torch.autograd.grad(sums.total, [x, weight])]

    with Float64():
        exact = run_torch()
    actual = [total, np.stack([sums.metrics[name] for name in divergence.metric_names]), *gradients]
    assert_as_close(actual, run_torch(), exact)


def test_the_top_k_distillation_loss_is_the_same_on_a_mesh(small_chunks):
    hidden, _, targets, weights, head, _ = make_inputs()
    random = np.random.default_rng(1)
    ids = np.argsort(random.random((B, T, V)))[..., :4].astype(np.int32)
    logps = np.log(random.dirichlet(np.ones(5), (B, T))).astype(np.float32)
    function = compile_top_k_loss(*FORMS[1], V)
    expected = function(hidden, head, targets, weights, ids, logps)
    mesh = ShardedMesh(data=2, fsdp=2, tensor=2).mesh
    by_rows, table = NamedSharding(mesh, PartitionSpec(DATA_AXES)), NamedSharding(mesh, PartitionSpec("fsdp"))
    put = [jax.device_put(x, where) for x, where in ((hidden, by_rows), (head, table), (targets, by_rows), (
        weights, by_rows), (ids, by_rows), (logps, by_rows))]
    with jax.set_mesh(mesh):
        on_mesh = compile_top_k_loss(*FORMS[1], V)(*put)
    for actual, reference in zip(*map(jax.tree.leaves, (on_mesh, expected)), strict=True):
        assert_as_close(actual, reference, reference, magnitude=1)


@pytest.mark.parametrize("form", [Divergence(beta, 1.5, 1.0) for beta in (0.0, 0.5, 1.0)], ids=str)
def test_a_network_that_is_its_own_teacher_learns_nothing(form, small_chunks):
    hidden, _, targets, weights, head, _ = make_inputs()
    (total, _), gradients = compile_loss(TokenLoss(), form)(hidden, head, hidden, targets, weights, head)
    for value in (total, *gradients):
        assert_as_close(value, np.zeros_like(value), np.zeros_like(value), magnitude=1)
