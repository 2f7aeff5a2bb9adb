"""Reinforcement learning on JAX: its loss as on torch, under every cut, on devices; its reference; drawing and scoring.

The formulas themselves are judged in tests/core/test_policy_losses.py.
"""

from types import SimpleNamespace

import jax
import numpy as np
import pytest
import torch
from test_jax_preference import Bigram, padded, stepped
from test_lora import wrapped

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
from lmmods.core.generation_config import draws
from lmmods.core.settings import LoRA, Optimizer
from lmmods.data.sft import SFTData
from lmmods.rollouts.policy import Row
from tests.closeness import assert_as_close, gradients, in_both

SGD = Optimizer(name="sgd", lr=100.0)  # moves parameters by more than they are rounded
TORCH = SimpleNamespace(exp=torch.exp, where=torch.where, stop_gradient=torch.Tensor.detach)
B, T, WARM = 8, 9, 0.7
PARTS = slice(0, 4), slice(4, 8)


def task_of(network, params, base=None, **fields):
    """A task with its trainable and frozen parameters."""
    fields = {"pretrained": "x", "rewards": [{"name": "exact_match"}], "temperature": WARM, **fields}
    task = GRPO(**fields)
    return task, *task.take(network, params, base or {})


def rows(seed=0):
    """Answers of unequal lengths, one with a tool's tokens inside, one that is idle, and a row of padding."""
    random = np.random.default_rng(seed)
    ids = random.integers(4, 37, (B, T))
    lengths, prompts = random.integers(5, T + 1, (B, 1)), random.integers(1, 4, (B, 1))
    mask = np.arange(T) < lengths
    mask[-1] = np.arange(T) < 1
    drawn = mask & (np.arange(T) >= prompts)
    drawn[2, 4] = False
    drawn[0] = False
    batch = {"input_ids": ids, "attention_mask": mask, "labels": np.where(drawn, ids, IGNORED)}
    return {name: x.astype(np.int32) for name, x in batch.items()} | {
        "advantages": (random.normal(size=B) * drawn.any(1)).astype(np.float32),
        "idle_weight": np.where(np.arange(B) == 0, 3, 0).astype(np.float32)}


def with_columns(batch, logps, seed=1):
    """Further columns, near the log-probabilities [B, T] of the token after each position."""
    random = np.random.default_rng(seed)
    own = np.pad(logps[:, :-1], ((0, 0), (1, 0)))  # at the token itself
    near = {name: own + random.normal(0, 0.4, own.shape) for name in ("old_logps", "reference_logps")}
    near["sampler_weights"] = random.uniform(0.5, 2, own.shape)
    return batch | {name: np.where(batch["labels"] == IGNORED, 0, x).astype(np.float32) for name, x in near.items()}


def log_probs_of(model, batch, temperature=WARM):
    """Of the token after each position by transformers, [B, T - 1], 0 where it has no label."""
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
def test_loss_and_gradient_are_those_of_torch(make_ref, name):
    ref = make_ref("llama", num_hidden_layers=1)
    task, trainable, frozen = task_of(ref.net, ref.params, **LOSSES[name])
    predicted = jax.jit(task.predict)(merge(trainable, frozen), rows())
    batch = with_columns(rows(), np.asarray(predicted))
    if not task.beta:
        del batch["reference_logps"]

    def total(trainable):
        sums = task.batch_loss(merge(trainable, frozen), batch, True, False)
        return sums.total, sums

    gradient, sums = jax.jit(jax.grad(total, has_aux=True))(trainable)

    def of_torch(model):
        logps = log_probs_of(model, batch)
        shifted = {name: torch.tensor(batch[name][:, 1:], dtype=logps.dtype) if name in batch else None
                   for name in ("old_logps", "reference_logps", "sampler_weights")}
        mask = torch.tensor(batch["labels"][:, 1:] != IGNORED, dtype=logps.dtype)
        found, weight, metrics = task.policy_loss.of_rows(
            TORCH, logps, mask, torch.tensor(batch["advantages"], dtype=logps.dtype), *shifted.values())
        metrics = {name: torch.stack([value.sum(), count.sum()]) for name, (value, count) in metrics.items()}
        return ({"total": found.sum().detach(), "weight": weight.sum() + 3, "metrics": metrics},
                gradients(model, found.sum()))

    (found, theirs), (truth, exact) = in_both(of_torch, ref.torch)
    mine = {"total": sums.total, "weight": sums.weight, "metrics": sums.metrics}
    assert {*sums.metrics} == {*task.metric_names}
    assert_as_close(mine, found, truth)
    assert_as_close(task.network.to_torch(jax.device_get(gradient)), theirs, exact)


def test_ratios_are_exactly_one_without_old_log_probs(make_ref):
    ref = make_ref("llama", num_hidden_layers=1)
    task, trainable, frozen = task_of(ref.net, ref.params)
    assert task.is_on_policy
    batch = rows()
    sums = jax.jit(lambda params: task.batch_loss(params, batch, True, False))(merge(trainable, frozen))
    ratio, tokens = sums.metrics["ratio"].tolist()
    assert ratio == tokens == sums.weight - 3 == (batch["labels"][:, 1:] != IGNORED).sum()
    assert sums.metrics["clip_ratio/low"][0] == sums.metrics["clip_ratio/high"][0] == 0
    # With ratios of one the loss is the negated sum of advantages, whatever the network says.
    advantages = (batch["advantages"][:, None] * (batch["labels"][:, 1:] != IGNORED)).sum()
    assert float(sums.total) == pytest.approx(-advantages, rel=1e-6)


# Any cut --------------------------------------------------------------------------------------------------------------


def steps_of(task, trainable, parallel, chunk_tokens=0):
    return Steps(parallel, task.batch_loss, build(SGD, task.network.decays(trainable)), predict=task.predict,
                 metric_names=task.metric_names, chunk_tokens=chunk_tokens)


def bigram(name):
    """A task, its parameters, and answers whose columns say that it has moved."""
    network = Bigram()
    task, trainable, frozen = task_of(network, network.params, fast_kernels=False, **LOSSES[name])
    predicted = jax.jit(task.predict)(merge(trainable, frozen), rows())
    batch = with_columns(rows(), np.asarray(predicted))
    for column, is_needed in (("old_logps", not task.is_on_policy), ("reference_logps", task.beta)):
        if not is_needed:
            del batch[column]
    return task, trainable, frozen, batch


def assert_same(found, wanted):
    (figures, moved), (expected, wanted_moved) = found, wanted
    assert figures == pytest.approx(expected, rel=1e-5)
    largest = max(np.abs(leaf).max() for leaf in jax.tree.leaves(wanted_moved))
    for ours, theirs in zip(jax.tree.leaves(moved), jax.tree.leaves(wanted_moved), strict=True):
        assert np.abs(ours - theirs).max() <= 1e-5 * largest


@pytest.mark.parametrize("name", LOSSES)
def test_any_cut_is_the_same_step(name):
    """8 x 1 = 4 x 2, stopped in between, = 1 x 8 among rows of padding = 8 in chunks of 3, which lack a row."""
    task, trainable, frozen, batch = bigram(name)
    one = Replicas(jax.devices()[:1])
    steps = steps_of(task, trainable, one)
    whole = stepped(task, trainable, frozen, one, [{name: x[None] for name, x in batch.items()}], steps)
    assert whole[0]["num_rows"] == B - 2 and whole[0]["grad_norm"] > 0 and {*task.metric_names} <= whole[0].keys()
    assert name == "grpo" or abs(whole[0]["ratio"] - 1) > 1e-3
    halves = [{name: x[part][None] for name, x in batch.items()} for part in PARTS]
    assert_same(stepped(task, trainable, frozen, one, halves, steps), whole)
    single = [{name: x[None] for name, x in padded({name: x[n : n + 1] for name, x in batch.items()}, 4).items()}
              for n in range(B)]
    assert_same(stepped(task, trainable, frozen, one, single, steps), whole)
    chunked = steps_of(task, trainable, one, 3 * T)
    assert_same(stepped(task, trainable, frozen, one, [{name: x[None] for name, x in batch.items()}], chunked), whole)


DEVICES = {"replicas": lambda: Replicas(jax.devices()[:2]), "fsdp": lambda: ShardedMesh(devices=jax.devices()[:2]),
           "mesh": lambda: ShardedMesh(data=2, tensor=2, devices=jax.devices()[:4])}


@pytest.mark.parametrize("devices", DEVICES)
def test_several_devices_take_the_step_of_one(devices):
    task, trainable, frozen, batch = bigram("dapo")
    one, several = Replicas(jax.devices()[:1]), DEVICES[devices]()
    whole = stepped(task, trainable, frozen, one, [{name: x[None] for name, x in batch.items()}],
                    steps_of(task, trainable, one))
    halves = {name: np.stack([x[part] for part in PARTS]) for name, x in batch.items()}
    steps = steps_of(task, trainable, several)
    assert_same(stepped(task, trainable, frozen, several, [halves], steps), whole)
    quarters = [{name: x[:, part] for name, x in halves.items()} for part in (slice(0, 2), slice(2, 4))]
    assert_same(stepped(task, trainable, frozen, several, quarters, steps), whole)


# The reference --------------------------------------------------------------------------------------------------------


def test_a_base_is_scored_without_the_adapter(make_ref):
    model, net, params = wrapped(make_ref("llama"), LoRA(rank=4))
    task, trainable, frozen = task_of(net, params, lora=LoRA(rank=4), beta=0.1)
    assert task.reference_kind == "base" and COPIES not in frozen
    params, batch = merge(trainable, frozen), rows()
    found = [np.asarray(jax.jit(task.predict)(params, batch | columns))[:, :-1]
             for columns in ({}, {OF_REFERENCE: np.ones(B, np.int32)})]
    with torch.no_grad():
        own = in_both(lambda model: log_probs_of(model, batch), model)
        with model.disable_adapter():
            base = in_both(lambda model: log_probs_of(model, batch), model)
    assert_as_close(found[0], *own)
    assert_as_close(found[1], *base)
    assert np.abs(found[0] - found[1]).max() > 0.1


def test_a_copy_is_scored_as_training_began(make_ref):
    ref, batch = make_ref("llama", num_hidden_layers=1), rows()
    task, trainable, frozen = task_of(ref.net, ref.params, beta=0.1)
    assert task.reference_kind == "copy"
    predict = jax.jit(task.predict)
    before = predict(merge(trainable, frozen), batch)
    params = merge(jax.tree.map(lambda p: p + 0.3, trainable), frozen)
    of_reference = predict(params, batch | {OF_REFERENCE: np.ones(B, np.int32)})
    assert np.array_equal(of_reference, before) and not np.allclose(predict(params, batch), before, atol=1e-2)
    # It counts neither as a parameter nor in FLOPs.
    assert task.flops_per_token(trainable, frozen) == task_of(ref.net, ref.params)[0].flops_per_token(trainable, {})


def test_rows_without_labels_are_questions(make_ref):
    ref = make_ref("llama", num_hidden_layers=1)
    task, trainable, frozen = task_of(ref.net, ref.params)
    task.choice_ids = np.array([5, 9])
    batch = {name: x for name, x in rows().items() if name in ("input_ids", "attention_mask")}
    found = jax.jit(task.predict)(merge(trainable, frozen), batch)
    assert found.shape == (B, 2)


# Drawing and scoring in a run -----------------------------------------------------------------------------------------

ANSWER = 6
PROMPTS = [[5, 6, 7], [5, 6, 7], [9, 8], [9, 8], [4, 30, 12, 9, 9], [4, 30, 12, 9, 9], [17]]


def run_of(task, trainable, frozen, parallel, batch_size=2, max_length=40):
    data = SimpleNamespace(tokenizer=SimpleNamespace(pad_token_id=0), batch_size=batch_size, max_length=max_length)
    weights = Weights(parallel, parallel.put_state(trainable), parallel.put_state(frozen))
    return Run(folder=None, data=data, task=task, description="", memory=None, flops_per_token=0, parallel=parallel,
               steps=steps_of(task, trainable, parallel), weights=weights, limits={}, bar=None, stopwatch=None)


def rows_of(prompts, drawn):
    return [Row(np.array([*prompt, *answer.tokens], np.int32),
                np.array([IGNORED] * len(prompt) + answer.tokens.tolist(), np.int32))
            for prompt, answer in zip(prompts, drawn, strict=True)]


@pytest.fixture(scope="module")
def adapted(make_ref):
    """A QLoRA whose adapter has moved: a network, its trainable and its frozen parameters."""
    ref, lora = make_ref("llama", num_hidden_layers=1), LoRA(rank=2)
    net = hub.network(ref.net.config, "causal", lora=lora)
    params = adapters.add_adapter(net, loading.load(ref.net, str(ref.folder), quantize="nf4"), 3)
    task, trainable, frozen = task_of(net, params, lora=lora, quantize="nf4", beta=0.1)
    random = np.random.default_rng(0)
    trainable = jax.tree.map(lambda leaf: random.normal(size=leaf.shape).astype(np.float32) * 0.2, trainable)
    return task, trainable, frozen


WAYS = {"one": lambda: Replicas(jax.devices()[:1]), **DEVICES,
        "sequence": lambda: ShardedMesh(sequence=2, devices=jax.devices()[:2])}


@pytest.mark.parametrize("way", ["one", "replicas", *(
    pytest.param(way, marks=pytest.mark.slow) for way in ("fsdp", "mesh", "sequence"))])
def test_what_is_drawn_has_the_same_log_probs_when_scored(adapted, way):
    task, trainable, frozen = adapted
    policy = JaxPolicy(run_of(task, trainable, frozen, WAYS[way]()))
    assert (policy.rank, policy.num_ranks) == (0, 1)
    numbers = draws(1, range(len(PROMPTS)), ANSWER)
    drawn = policy.draw(PROMPTS, numbers, WARM, ANSWER, [2])
    wanted = sample_answers(task.network, merge(trainable, frozen), PROMPTS, numbers, WARM, ANSWER, [2], 0)
    assert [answer.tokens.tolist() for answer in drawn] == [answer.tokens.tolist() for answer in wanted]
    answers = rows_of(PROMPTS, drawn)
    scored = policy.logps(answers, WARM)
    for prompt, answer, row in zip(PROMPTS, drawn, scored, strict=True):
        assert row.dtype == np.float32 and row.shape == (len(prompt) + len(answer.tokens),)
        assert not row[: len(prompt)].any()
        assert_as_close(row[len(prompt) :], answer.logps, answer.logps)
    base = policy.logps(answers, WARM, reference=True)
    assert max(np.abs(own - other).max() for own, other in zip(scored, base, strict=True)) > 0.1
    assert policy.gather({0: 1}) == {0: 1}


def test_scores_do_not_depend_on_batches(adapted):
    task, trainable, frozen = adapted
    one, answers = WAYS["one"](), rows_of(PROMPTS, [SimpleNamespace(tokens=np.arange(5, 12))] * len(PROMPTS))
    found = [JaxPolicy(run_of(task, trainable, frozen, one, size)).logps(answers, WARM) for size in (1, 3)]
    assert_as_close(found[0], found[1], found[1])
    policy = JaxPolicy(run_of(task, trainable, frozen, one))
    assert policy.logps([], WARM) == [] and policy.draw([], None, WARM, ANSWER, [2]) == []
    with pytest.raises(ValueError, match="temperature"):
        policy.logps(answers, 1.0)


def test_answers_are_drawn_in_parts_where_memory_is_short(adapted, monkeypatch):
    task, trainable, frozen = adapted
    policy, numbers = JaxPolicy(run_of(task, trainable, frozen, WAYS["one"]())), draws(1, range(len(PROMPTS)), ANSWER)
    whole = policy.draw(PROMPTS, numbers, WARM, ANSWER, [2])
    assert answers_at_once(task.network, 40, present_target().memory) >= len(PROMPTS)
    cache = jax.eval_shape(lambda: task.network.init_cache(1, 5 + ANSWER))
    memory = 4 * 3.5 * (4 * 4 * 37 + sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(cache)))
    monkeypatch.setattr("jax_engine.tasks.sampler.present_target", lambda: SimpleNamespace(memory=memory))
    assert task.answers_at_once(5 + ANSWER, memory) == 2
    for found, wanted in zip(policy.draw(PROMPTS, numbers, WARM, ANSWER, [2]), whole, strict=True):
        assert np.array_equal(found.tokens, wanted.tokens)


def test_few_lengths_go_up_to_the_longest():
    for longest in (1, 32, 33, 100, 1000, 4096):
        lengths = halve_lengths(longest)
        assert lengths[-1] == longest and list(lengths) == sorted({*lengths}) and len(lengths) <= 8
        for length, following in zip(lengths, lengths[1:], strict=False):
            assert length % 32 == 0 and following <= 2 * length


def test_other_data_are_refused():
    with pytest.raises(UserError, match="PromptData"):
        GRPO(pretrained="x", rewards=[{"name": "exact_match"}]).link(SFTData(source="x.jsonl"))
