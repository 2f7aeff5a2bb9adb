"""Reinforcement learning on JAX: loss as on torch, with any batch split and devices; reference; sampling and scoring.

tests/core/test_policy_losses.py checks the formulas.
"""

from types import SimpleNamespace

import jax
import numpy as np
import pytest
import torch
from test_jax_preference import Bigram, pad_rows, take_step
from test_lora import add_random_adapter

from jax_engine.distributed.devices import Replicas
from jax_engine.distributed.loss import IGNORED
from jax_engine.distributed.mesh import ShardedMesh
from jax_engine.distributed.prefetch import halve_lengths
from jax_engine.distributed.steps import Steps
from jax_engine.distributed.target import present_target
from jax_engine.distributed.tree import merge
from jax_engine.models import hub, loading
from jax_engine.models import lora as adapters
from jax_engine.models.generate import sample_answers
from jax_engine.optim import build
from jax_engine.run import Run
from jax_engine.tasks.base import Weights
from jax_engine.tasks.grpo import GRPO, OF_REFERENCE, JaxPolicy
from jax_engine.tasks.reference import COPIES
from jax_engine.tasks.sampler import answers_at_once
from lmmods.core.errors import UserError
from lmmods.core.generation_config import sampling_uniforms
from lmmods.core.settings import LoRA, Optimizer
from lmmods.data.sft import SFTData
from lmmods.rollouts.policy import Row
from tests.closeness import assert_as_close, gradients, in_both

SGD = Optimizer(name="sgd", lr=100.0)  # moves parameters by more than their rounding
TORCH = SimpleNamespace(exp=torch.exp, where=torch.where, stop_gradient=torch.Tensor.detach)
B, T, TEMPERATURE = 8, 9, 0.7
PARTS = slice(0, 4), slice(4, 8)


def task_of(network, params, base=None, **fields):
    """Return a task with its trainable and frozen parameters."""
    fields = {"pretrained": "x", "rewards": [{"name": "exact_match"}], "temperature": TEMPERATURE, **fields}
    task = GRPO(**fields)
    return task, *task.adopt_network(network, params, base or {})


def make_rows(seed=0):
    """Return answers of different lengths: one contains tool tokens, one is idle, and the last row is padding."""
    random = np.random.default_rng(seed)
    ids = random.integers(4, 37, (B, T))
    lengths, prompts = random.integers(5, T + 1, (B, 1)), random.integers(1, 4, (B, 1))
    mask = np.arange(T) < lengths
    mask[-1] = np.arange(T) < 1
    is_sampled = mask & (np.arange(T) >= prompts)
    is_sampled[2, 4] = False
    is_sampled[0] = False
    batch = {"input_ids": ids, "attention_mask": mask, "labels": np.where(is_sampled, ids, IGNORED)}
    return {name: x.astype(np.int32) for name, x in batch.items()} | {
        "advantages": (random.normal(size=B) * is_sampled.any(1)).astype(np.float32),
        "idle_weight": np.where(np.arange(B) == 0, 3, 0).astype(np.float32)}


def add_columns(batch, logps, seed=1):
    """Add columns close to the log-probabilities [B, T] of the token after each position."""
    random = np.random.default_rng(seed)
    aligned = np.pad(logps[:, :-1], ((0, 0), (1, 0)))  # at the token itself
    columns = {name: aligned + random.normal(0, 0.4, aligned.shape) for name in ("old_logps", "reference_logps")}
    columns["sampler_weights"] = random.uniform(0.5, 2, aligned.shape)
    return batch | {name: np.where(batch["labels"] == IGNORED, 0, x).astype(np.float32) for name, x in columns.items()}


def compute_log_probs(model, batch, temperature=TEMPERATURE):
    """Return transformers' log-probability [B, T - 1] of the token after each position, 0 where it has no label."""
    ids, mask, labels = (torch.tensor(batch[name]).long() for name in ("input_ids", "attention_mask", "labels"))
    logs = (model(input_ids=ids, attention_mask=mask).logits[:, :-1] / temperature).log_softmax(-1)
    picked = logs.gather(2, labels[:, 1:, None].clamp(min=0))[..., 0]
    return torch.where(labels[:, 1:] == IGNORED, 0.0, picked)


# The loss -------------------------------------------------------------------------------------------------------------

OFF_POLICY = {"num_iterations": 2}
LOSSES = {
    "dapo": {"beta": 0.2, "reference": "copy", **OFF_POLICY}, "grpo": {"loss": "grpo"},
    "dr_grpo": {"loss": "dr_grpo", "max_new_tokens": 20, **OFF_POLICY}, "cispo": {"loss": "cispo", **OFF_POLICY},
    "sequence": {"loss": "grpo", "ratio": "sequence", **OFF_POLICY},
}


@pytest.mark.parametrize("name", ["dapo", "sequence"])
def test_loss_and_gradient_equal_torchs(make_ref, name):
    ref = make_ref("llama", num_hidden_layers=1)
    task, trainable, frozen = task_of(ref.net, ref.params, **LOSSES[name])
    predicted = jax.jit(task.predict)(merge(trainable, frozen), make_rows())
    batch = add_columns(make_rows(), np.asarray(predicted))
    if not task.beta:
        del batch["reference_logps"]

    def total(trainable):
        sums = task.batch_loss(merge(trainable, frozen), batch, True, False)
        return sums.total, sums

    gradient, sums = jax.jit(jax.grad(total, has_aux=True))(trainable)

    def torch_loss(model):
        logps = compute_log_probs(model, batch)
        shifted = {name: torch.tensor(batch[name][:, 1:], dtype=logps.dtype) if name in batch else None
                   for name in ("old_logps", "reference_logps", "sampler_weights")}
        mask = torch.tensor(batch["labels"][:, 1:] != IGNORED, dtype=logps.dtype)
        losses, weight, metrics = task.policy_loss.of_rows(
            TORCH, logps, mask, torch.tensor(batch["advantages"], dtype=logps.dtype), *shifted.values())
        metrics = {name: torch.stack([value.sum(), count.sum()]) for name, (value, count) in metrics.items()}
        return ({"total": losses.sum().detach(), "weight": weight.sum() + 3, "metrics": metrics},
                gradients(model, losses.sum()))

    (expected, expected_gradients), (exact, exact_gradients) = in_both(torch_loss, ref.torch)
    actual = {"total": sums.total, "weight": sums.weight, "metrics": sums.metrics}
    assert {*sums.metrics} == {*task.metric_names}
    assert_as_close(actual, expected, exact)
    assert_as_close(task.network.to_torch(jax.device_get(gradient)), expected_gradients, exact_gradients)


def test_ratios_are_exactly_one_without_old_log_probs(make_ref):
    ref = make_ref("llama", num_hidden_layers=1)
    task, trainable, frozen = task_of(ref.net, ref.params)
    assert task.is_on_policy
    batch = make_rows()
    sums = jax.jit(lambda params: task.batch_loss(params, batch, True, False))(merge(trainable, frozen))
    ratio, tokens = sums.metrics["ratio"].tolist()
    assert ratio == tokens == sums.weight - 3 == (batch["labels"][:, 1:] != IGNORED).sum()
    assert sums.metrics["clip_ratio/low"][0] == sums.metrics["clip_ratio/high"][0] == 0
    # With ratios of one, the loss is the negated sum of advantages, whatever the network computes.
    advantages = (batch["advantages"][:, None] * (batch["labels"][:, 1:] != IGNORED)).sum()
    assert float(sums.total) == pytest.approx(-advantages, rel=1e-6)


# Batch splits ---------------------------------------------------------------------------------------------------------


def steps_of(task, trainable, parallel, chunk_tokens=0):
    return Steps(parallel, task.batch_loss, build(SGD, task.network.decays(trainable)), predict=task.predict,
                 metric_names=task.metric_names, chunk_tokens=chunk_tokens)


def make_bigram(name):
    """Return a task, its parameters, and answers with columns as if the parameters had changed."""
    network = Bigram()
    task, trainable, frozen = task_of(network, network.params, fast_kernels=False, **LOSSES[name])
    predicted = jax.jit(task.predict)(merge(trainable, frozen), make_rows())
    batch = add_columns(make_rows(), np.asarray(predicted))
    for column, is_needed in (("old_logps", not task.is_on_policy), ("reference_logps", task.beta)):
        if not is_needed:
            del batch[column]
    return task, trainable, frozen, batch


def assert_same(actual, expected):
    (metrics, moved), (expected_metrics, expected_moved) = actual, expected
    assert metrics == pytest.approx(expected_metrics, rel=1e-5)
    largest = max(np.abs(leaf).max() for leaf in jax.tree.leaves(expected_moved))
    for change, reference in zip(jax.tree.leaves(moved), jax.tree.leaves(expected_moved), strict=True):
        assert np.abs(change - reference).max() <= 1e-5 * largest


@pytest.mark.parametrize("name", LOSSES)
def test_any_batch_split_gives_the_same_step(name):
    """8 x 1 = 4 x 2 = 1 x 8 with padding rows = 8 in chunks of 3, the last of which lacks a row."""
    task, trainable, frozen, batch = make_bigram(name)
    device = Replicas(jax.devices()[:1])
    steps = steps_of(task, trainable, device)
    all_rows = [{name: x[None] for name, x in batch.items()}]
    whole = take_step(task, trainable, frozen, device, all_rows, steps)
    assert whole[0]["num_rows"] == B - 2 and whole[0]["grad_norm"] > 0 and {*task.metric_names} <= whole[0].keys()
    assert name == "grpo" or abs(whole[0]["ratio"] - 1) > 1e-3
    halves = [{name: x[part][None] for name, x in batch.items()} for part in PARTS]
    assert_same(take_step(task, trainable, frozen, device, halves, steps), whole)
    single = [{name: x[None] for name, x in pad_rows({name: x[n : n + 1] for name, x in batch.items()}, 4).items()}
              for n in range(B)]
    assert_same(take_step(task, trainable, frozen, device, single, steps), whole)
    chunked = steps_of(task, trainable, device, 3 * T)
    assert_same(take_step(task, trainable, frozen, device, all_rows, chunked), whole)


DEVICES = {"replicas": lambda: Replicas(jax.devices()[:2]), "fsdp": lambda: ShardedMesh(devices=jax.devices()[:2]),
           "mesh": lambda: ShardedMesh(data=2, tensor=2, devices=jax.devices()[:4])}


@pytest.mark.parametrize("devices", DEVICES)
def test_several_devices_take_the_step_of_one(devices):
    task, trainable, frozen, batch = make_bigram("dapo")
    single, several = Replicas(jax.devices()[:1]), DEVICES[devices]()
    whole = take_step(task, trainable, frozen, single, [{name: x[None] for name, x in batch.items()}],
                      steps_of(task, trainable, single))
    halves = {name: np.stack([x[part] for part in PARTS]) for name, x in batch.items()}
    steps = steps_of(task, trainable, several)
    assert_same(take_step(task, trainable, frozen, several, [halves], steps), whole)
    quarters = [{name: x[:, part] for name, x in halves.items()} for part in (slice(0, 2), slice(2, 4))]
    assert_same(take_step(task, trainable, frozen, several, quarters, steps), whole)


# The reference --------------------------------------------------------------------------------------------------------


def test_the_base_reference_is_scored_without_the_adapter(make_ref):
    model, net, params = add_random_adapter(make_ref("llama"), LoRA(rank=4))
    task, trainable, frozen = task_of(net, params, lora=LoRA(rank=4), beta=0.1)
    assert task.reference_kind == "base" and COPIES not in frozen
    params, batch = merge(trainable, frozen), make_rows()
    actual = [np.asarray(jax.jit(task.predict)(params, batch | columns))[:, :-1]
              for columns in ({}, {OF_REFERENCE: np.ones(B, np.int32)})]
    with torch.no_grad():
        adapted = in_both(lambda model: compute_log_probs(model, batch), model)
        with model.disable_adapter():
            base = in_both(lambda model: compute_log_probs(model, batch), model)
    assert_as_close(actual[0], *adapted)
    assert_as_close(actual[1], *base)
    assert np.abs(actual[0] - actual[1]).max() > 0.1


def test_the_copied_reference_is_scored_with_the_initial_weights(make_ref):
    ref, batch = make_ref("llama", num_hidden_layers=1), make_rows()
    task, trainable, frozen = task_of(ref.net, ref.params, beta=0.1)
    assert task.reference_kind == "copy"
    predict = jax.jit(task.predict)
    before = predict(merge(trainable, frozen), batch)
    params = merge(jax.tree.map(lambda p: p + 0.3, trainable), frozen)
    of_reference = predict(params, batch | {OF_REFERENCE: np.ones(B, np.int32)})
    assert np.array_equal(of_reference, before) and not np.allclose(predict(params, batch), before, atol=1e-2)
    # The copy adds no FLOPs.
    assert task.flops_per_token(trainable, frozen) == task_of(ref.net, ref.params)[0].flops_per_token(trainable, {})


def test_rows_without_labels_get_the_logits_of_the_choices(make_ref):
    ref = make_ref("llama", num_hidden_layers=1)
    task, trainable, frozen = task_of(ref.net, ref.params)
    task.choice_ids = np.array([5, 9])
    batch = {name: x for name, x in make_rows().items() if name in ("input_ids", "attention_mask")}
    logits = jax.jit(task.predict)(merge(trainable, frozen), batch)
    assert logits.shape == (B, 2)


# Sampling and scoring in a run ----------------------------------------------------------------------------------------

ANSWER = 6
PROMPTS = [[5, 6, 7], [5, 6, 7], [9, 8], [9, 8], [4, 30, 12, 9, 9], [4, 30, 12, 9, 9], [17]]


def run_of(task, trainable, frozen, parallel, batch_size=2, max_length=40):
    data = SimpleNamespace(tokenizer=SimpleNamespace(pad_token_id=0), batch_size=batch_size, max_length=max_length)
    weights = Weights(parallel, parallel.put_state(trainable), parallel.put_state(frozen))
    return Run(folder=None, data=data, task=task, description="", memory=None, flops_per_token=0, parallel=parallel,
               steps=steps_of(task, trainable, parallel), weights=weights, limits={}, bar=None, stopwatch=None)


def rows_of(prompts, answers):
    return [Row(np.array([*prompt, *answer.tokens], np.int32),
                np.array([IGNORED] * len(prompt) + answer.tokens.tolist(), np.int32))
            for prompt, answer in zip(prompts, answers, strict=True)]


@pytest.fixture(scope="module")
def adapted(make_ref):
    """Return a QLoRA task with a random adapter, its trainable and its frozen parameters."""
    ref, lora = make_ref("llama", num_hidden_layers=1), LoRA(rank=2)
    net = hub.network(ref.net.config, "causal", lora=lora)
    params = adapters.add_adapter(net, loading.load(ref.net, str(ref.folder), quantize="nf4"), 3)
    task, trainable, frozen = task_of(net, params, lora=lora, quantize="nf4", beta=0.1)
    random = np.random.default_rng(0)
    trainable = jax.tree.map(lambda leaf: random.normal(size=leaf.shape).astype(np.float32) * 0.2, trainable)
    return task, trainable, frozen


LAYOUTS = {"one": lambda: Replicas(jax.devices()[:1]), **DEVICES,
           "sequence": lambda: ShardedMesh(sequence=2, devices=jax.devices()[:2])}


@pytest.mark.parametrize("layout", ["one", "replicas", *(
    pytest.param(layout, marks=pytest.mark.slow) for layout in ("fsdp", "mesh", "sequence"))])
def test_sampled_answers_have_the_same_log_probs_when_scored(adapted, layout):
    task, trainable, frozen = adapted
    policy = JaxPolicy(run_of(task, trainable, frozen, LAYOUTS[layout]()))
    assert (policy.rank, policy.num_ranks) == (0, 1)
    uniforms = sampling_uniforms(1, range(len(PROMPTS)), ANSWER)
    sampled = policy.draw(PROMPTS, uniforms, TEMPERATURE, ANSWER, [2])
    expected = sample_answers(task.network, merge(trainable, frozen), PROMPTS, uniforms, TEMPERATURE, ANSWER, [2], 0)
    assert [answer.tokens.tolist() for answer in sampled] == [answer.tokens.tolist() for answer in expected]
    answers = rows_of(PROMPTS, sampled)
    scored = policy.logps(answers, TEMPERATURE)
    for prompt, answer, row in zip(PROMPTS, sampled, scored, strict=True):
        assert row.dtype == np.float32 and row.shape == (len(prompt) + len(answer.tokens),)
        assert not row[: len(prompt)].any()
        assert_as_close(row[len(prompt) :], answer.logps, answer.logps)
    base = policy.logps(answers, TEMPERATURE, reference=True)
    assert max(np.abs(log_probs - other).max() for log_probs, other in zip(scored, base, strict=True)) > 0.1
    assert policy.gather({0: 1}) == {0: 1}


def test_scores_do_not_depend_on_batches(adapted):
    task, trainable, frozen = adapted
    single, answers = LAYOUTS["one"](), rows_of(PROMPTS, [SimpleNamespace(tokens=np.arange(5, 12))] * len(PROMPTS))
    scores = [JaxPolicy(run_of(task, trainable, frozen, single, size)).logps(answers, TEMPERATURE) for size in (1, 3)]
    assert_as_close(scores[0], scores[1], scores[1])
    policy = JaxPolicy(run_of(task, trainable, frozen, single))
    assert policy.logps([], TEMPERATURE) == [] and policy.draw([], None, TEMPERATURE, ANSWER, [2]) == []
    with pytest.raises(ValueError, match="temperature"):
        policy.logps(answers, 1.0)


def test_answers_are_sampled_in_several_batches_if_memory_is_short(adapted, monkeypatch):
    task, trainable, frozen = adapted
    policy = JaxPolicy(run_of(task, trainable, frozen, LAYOUTS["one"]()))
    uniforms = sampling_uniforms(1, range(len(PROMPTS)), ANSWER)
    whole = policy.draw(PROMPTS, uniforms, TEMPERATURE, ANSWER, [2])
    assert answers_at_once(task.network, 40, present_target().memory) >= len(PROMPTS)
    cache = jax.eval_shape(lambda: task.network.init_cache(1, 5 + ANSWER))
    memory = 4 * 3.5 * (4 * 4 * 37 + sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(cache)))
    monkeypatch.setattr("jax_engine.tasks.sampler.present_target", lambda: SimpleNamespace(memory=memory))
    assert answers_at_once(task.network, 5 + ANSWER, memory) == 2
    for answer, expected in zip(policy.draw(PROMPTS, uniforms, TEMPERATURE, ANSWER, [2]), whole, strict=True):
        assert np.array_equal(answer.tokens, expected.tokens)


def test_halved_lengths_end_at_the_maximum():
    for max_length in (1, 32, 33, 100, 1000, 4096):
        lengths = halve_lengths(max_length)
        assert lengths[-1] == max_length and list(lengths) == sorted({*lengths}) and len(lengths) <= 8
        for length, following in zip(lengths, lengths[1:], strict=False):
            assert length % 32 == 0 and following <= 2 * length


def test_data_modules_other_than_prompt_data_are_rejected():
    with pytest.raises(UserError, match="PromptData"):
        GRPO(pretrained="x", rewards=[{"name": "exact_match"}]).link(SFTData(source="x.jsonl"))
