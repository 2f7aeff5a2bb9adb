"""Preference optimisation on JAX: every loss with any batch split, on several devices, with its reference."""

import copy
import math
from contextlib import nullcontext
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from peft import LoraConfig, get_peft_model
from test_lora import add_random_adapter
from transformers import AutoModelForCausalLM, AutoTokenizer

from jax_engine.distributed.devices import Replicas
from jax_engine.distributed.loss import IGNORED
from jax_engine.distributed.mesh import ShardedMesh
from jax_engine.distributed.prefetch import GlobalBatch
from jax_engine.distributed.steps import Clipping, Steps, fetch_step_metrics
from jax_engine.distributed.tree import flatten, merge, unflatten
from jax_engine.models.building import build_network
from jax_engine.models.network import Network
from jax_engine.optim import build, step_scalars
from jax_engine.tasks.base import Weights
from jax_engine.tasks.preference import Preference
from jax_engine.tasks.reference import COPIES
from lmmods.core.dropout import token_seeds
from lmmods.core.preference_losses import METHODS, PreferenceLoss
from lmmods.core.settings import LoRA, Optimizer
from lmmods.torch_engine.nn.lm_head import LMHead
from lmmods.torch_engine.nn.reference import Reference as TorchReference
from lmmods.torch_engine.tasks.preference import Preference as TorchPreference
from tests.closeness import EPS

SGD = Optimizer(name="sgd", lr=100.0)  # moves parameters by more than their rounding
B, T, V = 8, 9, 40
SMOOTHED = {"exo_pair": {"label_smoothing": 0.01}, "robust": {"label_smoothing": 0.1}}


def make_rows(paired=True, seed=0):
    """Return pairs, or answers and those to other prompts, of different lengths and weights; prompts have no labels."""
    random = np.random.default_rng(seed)
    ids = random.integers(4, 37, (B, 2, T))
    lengths, prompts = random.integers(5, T + 1, (B, 2, 1)), random.integers(1, 4, (B, 1, 1))
    mask = np.arange(T) < lengths
    labels = np.where(mask & (np.arange(T) >= prompts), ids, IGNORED)
    seeds = token_seeds(0, 0, np.arange(2 * B)[:, None], np.arange(T)).reshape(B, 2, T)
    weights = np.broadcast_to(random.choice([0.5, 1, 2], (B, 1, 1)), ids.shape).astype(np.float32)
    batch = {"input_ids": ids, "attention_mask": mask.astype(int), "labels": labels, "token_seeds": seeds}
    batch = {name: x.astype(np.int32) for name, x in batch.items()} | {"loss_weights": weights}
    return batch if paired else batch | {"desirable": random.integers(0, 2, B).astype(np.int32)}


def pad_rows(batch, size):
    """Add padding rows."""
    fill = {"labels": IGNORED}
    return {name: np.concatenate([x, np.full((size - len(x), *x.shape[1:]), fill.get(name, 0), x.dtype)])
            for name, x in batch.items()}


class Bigram:
    """Causal LM with two matrices, which compiles fast: it predicts a token from the previous token alone."""

    head, config, arch = "causal", SimpleNamespace(), SimpleNamespace(vocab_size=V)

    def __init__(self):
        random = np.random.default_rng(1)
        self.params = {name: {"tokens": {"weight": random.normal(size=(V, 6)).astype(np.float32)}}
                       for name in ("embed", "head")}
        self.shapes = self.params

    def hidden(self, params, batch, training=False):
        return params["embed"]["tokens"]["weight"][batch["input_ids"]]

    def logits(self, params, hidden):
        return hidden @ params["head"]["tokens"]["weight"].T

    def split(self, params):
        return params, {}

    def trains(self, path):
        return True

    def decays(self, params):
        return jax.tree.map(lambda _: True, params)

    def to_torch(self, tree):
        return {".".join(path): np.asarray(leaf) for path, leaf in flatten(tree).items()}

    def from_torch(self, named):
        return unflatten({tuple(name.split(".")): leaf for name, leaf in named.items()})


LOSSES = {name: PreferenceLoss(name, **SMOOTHED.get(name, {})) for name in METHODS}
PAIRED = [name for name, method in METHODS.items() if method.is_paired]
SINGLE = [name for name in METHODS if name not in PAIRED]


class AnyOfPairs(Preference):
    """All losses of pairs in one program: the column `picked` [N, 1, losses] selects one."""

    def _facts(self, rows):
        return {**super()._facts(rows), "picked": rows["picked"][:, 0]}

    def _measure(self, ops, facts, logps, reference, baseline):
        results = [LOSSES[name].of_pairs(ops, logps, facts["lengths"],
                                         reference if METHODS[name].has_reference else None) for name in PAIRED]
        return (jnp.stack([losses for losses, _ in results], axis=1) * facts["picked"]).sum(1), results[0][1]


class AnyOfAnswers(AnyOfPairs):
    """All losses of single answers in one program."""

    def _measure(self, ops, facts, logps, reference, baseline):
        results = [LOSSES[name].of_answers(ops, logps[:, 0], facts["desirable"], reference[:, 0],
                                           baseline if METHODS[name].has_baseline else 0.0) for name in SINGLE]
        metrics = results[SINGLE.index("kto")][1]
        return (jnp.stack([losses for losses, _ in results], axis=1) * facts["picked"]).sum(1), metrics


def make_moved_bigram(task_class, loss):
    """Return a task that has moved away from its reference, a copy, and its steps on one device."""
    network, single = Bigram(), Replicas(jax.devices()[:1])
    # All logits at once compile faster.
    task = task_class(pretrained="x", loss=loss, reference="copy", fast_kernels=False)
    trainable, frozen = task.adopt_network(network, network.params, {})
    random = np.random.default_rng(2)
    frozen = jax.tree.map(lambda p: p + random.normal(size=p.shape).astype(np.float32) / 4, frozen)
    return task, trainable, frozen, single, steps_of(task, trainable, single)


@pytest.fixture(scope="module")
def any_of_pairs():
    return make_moved_bigram(AnyOfPairs, "sigmoid")


@pytest.fixture(scope="module")
def any_of_answers():
    return make_moved_bigram(AnyOfAnswers, "kto")


@pytest.fixture(scope="module")
def adapted_llama(make_ref):
    """Return PEFT's tiny Llama with random adapters, the same network on JAX, and its parameters."""
    return add_random_adapter(make_ref("llama", "causal"), LoRA(rank=4))


def task_of(adapted_llama, loss="sigmoid", **options):
    _, net, params = adapted_llama
    task = Preference(pretrained="x", loss=loss, lora=LoRA(rank=4), **options)
    return task, *task.adopt_network(net, params, {})


def steps_of(task, trainable, parallel):
    return Steps(parallel, task.batch_loss, build(SGD, task.network.decays(trainable)), predict=task.predict,
                 metric_names=task.metric_names, survey=task.survey, statistic_names=task.statistic_names)


def take_step(task, trainable, frozen, parallel, groups, steps):
    """Take a step over micro-batches [ranks, B, ...]; return its metrics and the change of the parameters."""
    state, frozen = steps.new_state(parallel.put_state(trainable)), parallel.put_state(frozen)
    scalars = parallel.put_scalars(step_scalars(SGD, 0, 9))
    batches = [parallel.put_batch(group) for group in groups]
    if len(batches) == 1:
        state, figures = steps.full_step(state, frozen, batches[0], scalars)
    else:
        accumulation = steps.new_accumulation(state)
        for batch in batches if task.survey else []:
            accumulation = steps.survey(state, frozen, accumulation, batch)
        for batch in batches:
            accumulation = steps.accumulate(state, frozen, accumulation, batch)
        state, figures = steps.update(state, accumulation, scalars)
    moved = jax.tree.map(np.subtract, parallel.fetch_state(state["trainable"]), trainable)
    return fetch_step_metrics(figures), moved


def within_rounding(figures):
    """Return approximate values for sums in another order: KL and rewards have the rounding of log-probabilities."""
    rounding = 4 * EPS * max(abs(value) for name, value in figures.items() if name.startswith("logps/"))

    def allowed(name):
        return LOSSES["sigmoid"].beta * rounding if name.startswith("rewards/") else rounding if name == "kl" else 0

    return {name: pytest.approx(value, rel=1e-5, abs=allowed(name)) for name, value in figures.items()}


def assert_same(actual, expected):
    (metrics, moved), (expected_metrics, expected_moved) = actual, expected
    assert metrics == within_rounding(expected_metrics)
    largest = max(np.abs(leaf).max() for leaf in jax.tree.leaves(expected_moved))
    for change, reference in zip(jax.tree.leaves(moved), jax.tree.leaves(expected_moved), strict=True):
        assert np.abs(change - reference).max() <= 1e-5 * largest


def check_batch_splits(task, trainable, frozen, device, steps, all_rows):
    """Check 8 x 1 = 4 x 2 = 1 x 8 with padding rows."""
    whole = take_step(task, trainable, frozen, device, [{name: x[None] for name, x in all_rows.items()}], steps)
    assert whole[0]["num_rows"] == B and whole[0]["grad_norm"] > 0 and {*task.metric_names} <= whole[0].keys()
    halves = [{name: x[start : start + 4][None] for name, x in all_rows.items()} for start in (0, 4)]
    assert_same(take_step(task, trainable, frozen, device, halves, steps), whole)
    single = [{name: x[None] for name, x in pad_rows({name: x[n : n + 1] for name, x in all_rows.items()}, 4).items()}
              for n in range(B)]
    assert_same(take_step(task, trainable, frozen, device, single, steps), whole)
    return whole


def select_loss(loss, losses):
    return {"picked": np.tile(np.array(losses) == loss, (B, 1, 1)).astype(np.float32)}


@pytest.mark.slow
@pytest.mark.parametrize("loss", PAIRED)
def test_any_batch_split_of_pairs_gives_the_same_step(any_of_pairs, loss):
    check_batch_splits(*any_of_pairs, make_rows() | select_loss(loss, PAIRED))


@pytest.mark.slow
@pytest.mark.parametrize("loss", SINGLE)
def test_any_batch_split_of_answers_gives_the_same_step(any_of_answers, loss):
    all_rows = make_rows(paired=False) | select_loss(loss, SINGLE)
    metrics, _ = check_batch_splits(*any_of_answers, all_rows)
    assert metrics["kl"] > 0  # makes an answer's loss depend on the others
    *arguments, steps = any_of_answers
    groups = [{name: x[start : start + 4][None] for name, x in all_rows.items()} for start in (0, 4)]
    empty = [{name: x * 0 + (IGNORED if name == "labels" else 0) for name, x in group.items()} for group in groups]
    halves = [take_step(*arguments, [*pair], steps)[0]["kl"] for pair in zip(groups, empty, strict=True)]
    assert abs(halves[0] - halves[1]) > 1e-3


@pytest.fixture(scope="module", params=[lambda: Replicas(jax.devices()[:2]),
                                        lambda: ShardedMesh(devices=jax.devices()[:2]),
                                        lambda: ShardedMesh(data=2, tensor=2, devices=jax.devices()[:4])],
                ids=["replicas", "fsdp", "mesh"])
def spread_steps(request, any_of_pairs, any_of_answers):
    """Return devices that split a batch in two, and the steps of all losses of pairs and of answers on them."""
    devices = request.param()
    return devices, *(steps_of(task, trainable, devices) for task, trainable, *_ in (any_of_pairs, any_of_answers))


@pytest.mark.slow
@pytest.mark.parametrize("loss", METHODS)
def test_several_devices_take_the_step_of_one(any_of_pairs, any_of_answers, spread_steps, loss):
    is_paired = METHODS[loss].is_paired
    task, trainable, frozen, single, steps = any_of_pairs if is_paired else any_of_answers
    all_rows = make_rows(is_paired) | select_loss(loss, PAIRED if is_paired else SINGLE)
    devices, *both_steps = spread_steps
    whole = take_step(task, trainable, frozen, single, [{name: x[None] for name, x in all_rows.items()}], steps)
    halves = {name: np.stack([x[:4], x[4:]]) for name, x in all_rows.items()}
    quarters = [{name: x[:, part] for name, x in halves.items()} for part in (slice(0, 2), slice(2, 4))]
    steps = both_steps[0] if is_paired else both_steps[1]
    assert_same(take_step(task, trainable, frozen, devices, [halves], steps), whole)
    assert_same(take_step(task, trainable, frozen, devices, quarters, steps), whole)


# Twenty steps on torch ------------------------------------------------------------------------------------------------

GENTLE = Optimizer(name="sgd", lr=0.05)


def build_full_finetuning(task_class, loss, net, params):
    """Return a task that trains a whole Llama with a copy as its reference, and its steps."""
    task, single = task_class(pretrained="x", loss=loss, reference="copy"), Replicas(jax.devices()[:1])
    trainable, frozen = task.adopt_network(net, params, {})
    steps = Steps(single, task.batch_loss, build(GENTLE, net.decays(trainable)), Clipping(1.0),
                  metric_names=task.metric_names, survey=task.survey, statistic_names=task.statistic_names)
    return single, steps, trainable, single.put_state(frozen)


@pytest.fixture(scope="module")
def on_jax(make_ref):
    """Return the setups that train the losses of pairs (True) and of answers (False), each in one program."""
    ref = make_ref("llama", "causal", num_hidden_layers=1)
    return {is_paired: build_full_finetuning(task_class, loss, ref.net, ref.params)
            for is_paired, task_class, loss in ((True, AnyOfPairs, "sigmoid"), (False, AnyOfAnswers, "kto"))}


def train_on_torch(model, loss, batches):
    """Return the losses of a bare SGD loop with gradient clipping around the torch engine's task."""
    task = TorchPreference(pretrained="x", loss=loss, **SMOOTHED.get(loss, {}))
    task.model = copy.deepcopy(model)
    task.head, task._dropout = LMHead.from_model(task.model), SimpleNamespace(begin=lambda batch: None)
    if task.reference_kind:
        task._reference = TorchReference(task.model, task.reference_kind, task.trainable())
    task._trainer = SimpleNamespace(precision_plugin=SimpleNamespace(forward_context=nullcontext), strategy=(
        SimpleNamespace(batch_to_device=lambda batch: batch, reduce=lambda sums, reduce_op: sums)))
    optimizer = torch.optim.SGD(task.trainable().values(), lr=GENTLE.lr)
    losses = []
    for batch in batches:
        batch = {name: torch.tensor(x if x.dtype == np.float32 else x.astype(np.int64)) for name, x in batch.items()}
        if loss == "apo_zero_unpaired":
            batch = {name: x[:, :1] if x.ndim > 1 else x for name, x in batch.items()}
        task._baseline = task._compute_baseline([batch]) if loss == "kto" else None
        optimizer.zero_grad()
        sums = task.batch_loss(task.complete(batch))
        (sums.total / sums.weight).backward()
        torch.nn.utils.clip_grad_norm_(task.trainable().values(), 1.0)
        optimizer.step()
        losses.append((sums.total / sums.weight).item())
    return losses


@pytest.mark.slow
@pytest.mark.parametrize("loss", METHODS)
def test_twenty_steps_have_the_losses_of_torch(on_jax, make_ref, loss):
    is_paired = METHODS[loss].is_paired
    batches = [make_rows(is_paired, seed=index % 4) for index in range(20)]
    single, steps, trainable, frozen = on_jax[is_paired]
    state, losses = steps.new_state(single.put_state(trainable)), []
    for index, batch in enumerate(batches):
        batch = batch | select_loss(loss, PAIRED if is_paired else SINGLE)
        state, figures = steps.full_step(state, frozen, single.put_batch({name: x[None] for name, x in batch.items()}),
                                         single.put_scalars(step_scalars(GENTLE, index, 20)))
        losses.append(fetch_step_metrics(figures)["loss"])
    assert loss != "kto" or fetch_step_metrics(figures)["kl"] > 0
    expected = train_on_torch(make_ref("llama", "causal", num_hidden_layers=1).torch, loss, batches)
    assert losses == pytest.approx(expected, rel=1e-4)
    assert np.mean(losses[:4]) > np.mean(losses[-4:])  # the loss falls


def evaluate(task, trainable, frozen, batches):
    single = Replicas(jax.devices()[:1])
    steps = steps_of(task, trainable, single)
    weights = Weights(single, single.put_state(trainable), single.put_state(frozen))
    for batch in batches:
        host = {name: x[None] for name, x in batch.items()}
        task.evaluate(steps, weights, GlobalBatch(single.put_batch(host), host, 1, None))
    return task.eval_results("val", None)[0]


def test_log_probs_equal_pefts_with_the_adapter_on_and_off(adapted_llama):
    task, trainable, frozen = task_of(adapted_llama)
    assert COPIES not in frozen
    batch = make_rows()
    actual = jax.jit(task.predict)(merge(trainable, frozen), batch)
    ids, mask, labels = (torch.tensor(batch[name].reshape(-1, T)).long() for name in (
        "input_ids", "attention_mask", "labels"))

    def compute_log_probs():
        with torch.no_grad():
            by_token = adapted_llama[0](input_ids=ids, attention_mask=mask).logits[:, :-1].log_softmax(-1)
        picked = by_token.gather(2, labels[:, 1:, None].clamp(min=0))[..., 0]
        return (picked * (labels[:, 1:] != IGNORED)).sum(1).reshape(B, 2).numpy()

    assert actual["logps"] == pytest.approx(compute_log_probs(), rel=1e-5)
    with adapted_llama[0].disable_adapter():
        assert actual["reference"] == pytest.approx(compute_log_probs(), rel=1e-5)
    assert np.abs(actual["logps"] - actual["reference"]).mean() > 0.1


@pytest.mark.parametrize("loss", ["sigmoid", "kto"])
def test_an_evaluation_does_not_depend_on_its_batches(loss):
    task, trainable, frozen, _, _ = make_moved_bigram(Preference, loss)
    all_rows = make_rows(METHODS[loss].is_paired)
    whole = evaluate(task, trainable, frozen, [all_rows])
    parts = [pad_rows({name: x[part] for name, x in all_rows.items()}, 5) for part in (slice(0, 5), slice(5, 8))]
    assert evaluate(task, trainable, frozen, parts) == within_rounding(whole)
    assert whole.keys() == {"loss", *task.metric_names}
    batch = {name: jnp.asarray(x) for name, x in all_rows.items()}
    params = merge(trainable, frozen)
    sums = jax.jit(lambda params: task.batch_loss(params, batch, False, True, *(
        [task.survey(params, batch)] if task.survey else [])))(params)
    expected = {"loss": sums.total / sums.weight, **{name: total / weight for name, (total, weight) in
                                                     sums.metrics.items()}}
    assert whole == within_rounding({name: value.item() for name, value in expected.items()})


def test_initial_losses_equal_their_closed_form():
    for loss, expected in (("sigmoid", math.log(2)), ("ipo", 25.0), ("kto", 0.5), ("apo_zero_unpaired", 0.5)):
        task = Preference(pretrained="x", loss=loss, reference="copy", fast_kernels=False)
        trainable, frozen = task.adopt_network(network := Bigram(), network.params, {})
        metrics = evaluate(task, trainable, frozen, [make_rows(METHODS[loss].is_paired)])
        assert metrics["loss"] == pytest.approx(expected, rel=1e-6) and metrics["rewards/chosen"] == 0


def test_cached_log_probs_replace_the_reference():
    task, trainable, frozen, _, _ = make_moved_bigram(Preference, "sigmoid")
    params, batch = merge(trainable, frozen), make_rows()
    reference = np.asarray(jax.jit(task.predict)(params, batch)["reference"])
    measure = jax.jit(lambda params, batch: task.batch_loss(params, batch, True, False))
    live, cached = measure(params, batch), measure(trainable, batch | {"reference_logps": reference})
    assert cached.total.item() == pytest.approx(live.total.item(), rel=1e-6)
    assert np.allclose(cached.metrics["rewards/margin"], live.metrics["rewards/margin"], rtol=1e-5)


def test_only_the_recipe_turns_dropout_on(llama_folder, tmp_path):
    """The tiny Llama's attention dropout and the dropout of a continued adapter are off."""
    model = AutoModelForCausalLM.from_pretrained(llama_folder)
    get_peft_model(model, LoraConfig(r=2, lora_dropout=0.3, target_modules=["q_proj"], task_type="CAUSAL_LM")
                   ).save_pretrained(tmp_path)
    data = SimpleNamespace(tokenizer=AutoTokenizer.from_pretrained(llama_folder), network_fields={})

    def drops(**fields) -> bool:
        task = Preference(pretrained=str(llama_folder), adapter=str(tmp_path), **fields)
        return build_network(task, "causal", data, precision="32-true", seed=0)[0].drops

    assert not drops() and drops(config_overrides={"attention_dropout": 0.1})


@pytest.mark.parametrize("loss", ["sigmoid", "orpo", "kto", "apo_zero_unpaired"])
def test_passes_counts_the_forward_passes_of_a_step(adapted_llama, monkeypatch, loss):
    """Counted in tokens through the networks: in training, and for the reference and the baseline."""
    task, trainable, frozen = task_of(adapted_llama, loss)
    params, num_tokens, hidden = merge(trainable, frozen), {True: 0, False: 0}, Network.hidden
    num_answers = 1 if task.answers == "single" else 2
    batch = {name: x[:, :num_answers] if x.ndim > 1 else x for name, x in make_rows(loss in PAIRED).items()}

    def counting(network, params, batch, training=False):
        num_tokens[training] += batch["input_ids"].size
        return hidden(network, params, batch, training)

    monkeypatch.setattr(Network, "hidden", counting)
    statistics = [task.survey(params, batch)] if task.survey else []
    task.batch_loss(params, batch, True, False, *statistics)
    assert task.passes() == (num_tokens[True] / batch["input_ids"].size, num_tokens[False] / batch["input_ids"].size)
