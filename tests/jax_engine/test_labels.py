"""Tasks with label heads: losses compared with torch, pooling, padding rows, the same steps on any mesh."""

from functools import cache, partial
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from hf_reference import HFReference, of_real, our_loss
from torch.nn import functional as F

from jax_engine.distributed.devices import Replicas
from jax_engine.distributed.loss import IGNORED, LossSums, label_loss, pair_loss, scored_rows
from jax_engine.distributed.mesh import ShardedMesh
from jax_engine.distributed.prefetch import Prefetcher
from jax_engine.distributed.steps import Clipping, Steps, fetch_step_metrics, split_rows
from jax_engine.models.heads import pool
from jax_engine.optim import build, step_scalars
from jax_engine.tasks.multiple_choice import MultipleChoice
from jax_engine.tasks.reward import Reward
from jax_engine.tasks.sequence_classification import SequenceClassification
from jax_engine.tasks.token_classification import TokenClassification
from lmmods.core.dropout import token_seeds
from lmmods.core.settings import Optimizer

B, K = 6, 5
WEIGHTS = np.array([0.5, 1, 2, 3, 0.25], np.float32)
NAN = np.float32(np.nan)


def cross_entropy(logits: torch.Tensor, labels: torch.Tensor, weights: torch.Tensor | None) -> torch.Tensor:
    return F.cross_entropy(logits.flatten(0, -2), labels.flatten(), weights, ignore_index=IGNORED, reduction="sum")


def binary_loss(logits: torch.Tensor, labels: torch.Tensor, weights: torch.Tensor | None) -> torch.Tensor:
    loss = F.binary_cross_entropy_with_logits(logits[:-1], labels[:-1], weights, reduction="sum")
    return loss / (K if weights is None else weights.sum())


def squared_error(logits: torch.Tensor, labels: torch.Tensor, weights: None) -> torch.Tensor:
    return F.mse_loss(logits[:-1, 0], labels[:-1], reduction="sum")


random = np.random.default_rng(0)
CLASSES = np.array([0, 3, 1, 4, 2, IGNORED])
TAGS = np.where(random.random((B, 7)) < 0.6, random.integers(0, K, (B, 7)), IGNORED)
YES = np.vstack([random.integers(0, 2, (B - 1, K)).astype(np.float32), np.full(K, NAN)])
VALUES = np.append(random.normal(size=B - 1).astype(np.float32), NAN)
LOSSES = {
    "classes": (CLASSES, None, cross_entropy, 5), "weighted classes": (CLASSES, WEIGHTS, cross_entropy, WEIGHTS.sum()),
    "tags": (TAGS, WEIGHTS, cross_entropy, WEIGHTS[TAGS[TAGS >= 0]].sum()),
    "several": (YES, None, binary_loss, B - 1), "weighted several": (YES, WEIGHTS, binary_loss, B - 1),
    "values": (VALUES, None, squared_error, B - 1)}


@pytest.mark.parametrize("kind", LOSSES)
def test_label_losses_equal_torchs(kind):
    labels, weights, torch_loss, weight = LOSSES[kind]
    logits = np.random.default_rng(1).normal(size=(*labels.shape[:2 - (kind != "tags")], K)).astype(np.float32) * 3
    value, gradient = jax.value_and_grad(lambda x: label_loss(x, labels, weights).total)(logits)
    tensor = torch.tensor(logits, requires_grad=True)
    expected = torch_loss(tensor, torch.tensor(labels), None if weights is None else torch.tensor(weights))
    expected.backward()
    assert float(value) == pytest.approx(expected.item(), rel=1e-5)
    assert float(label_loss(logits, labels, weights).weight) == pytest.approx(weight, rel=1e-6)
    assert np.abs(gradient - tensor.grad.numpy()).max() <= 1e-5 * np.abs(gradient).max()


def test_pair_losses_equal_their_formula():
    scores = np.random.default_rng(2).normal(size=(B, 2)).astype(np.float32) * 2
    margins = np.array([0, 0.5, 2, 0, 1, NAN], np.float32)
    value, gradient = jax.value_and_grad(lambda x: pair_loss(x, margins, 0.01).total)(scores)
    better, worse = scores[:-1].T.astype(np.float64)
    expected = np.log1p(np.exp(-(better - worse - margins[:-1]))) + 0.01 * (better + worse) ** 2
    assert float(value) == pytest.approx(expected.sum(), rel=1e-5)
    assert float(pair_loss(scores, margins).weight) == B - 1
    assert np.isfinite(gradient).all() and not gradient[-1].any()


def test_pooling_uses_the_mask(make_ref):
    """Also if the text ends with the padding token, where transformers would use an earlier token."""
    ref = make_ref("llama", "sequence")
    batch = ref.batch()
    batch["input_ids"][0, -1] = batch["input_ids"][1, 5] = ref.pad  # the last token of rows of 9 and of 6
    actual = np.asarray(jax.jit(ref.net.scores)(ref.params, batch))
    with torch.no_grad():
        hidden = ref.torch.model(**{name: torch.tensor(value) for name, value in batch.items()}).last_hidden_state
        last = torch.tensor(batch["attention_mask"]).sum(1) - 1
        expected = ref.torch.score(hidden[torch.arange(4), last])
        by_padding = ref.torch(**{name: torch.tensor(value) for name, value in batch.items()}).logits
    assert np.abs(actual - expected.numpy()).max() <= 1e-4 * np.abs(actual).max()
    differs = np.abs(actual - by_padding.numpy()).max(1) > 1e-2 * np.abs(actual).max()
    assert differs.tolist() == [True, True, False, False]


def test_pooling_ignores_padding_on_either_side():
    hidden = np.random.default_rng(3).normal(size=(2, 4, 3)).astype(np.float32)
    real = np.array([[True, True, True, False], [False, True, True, True]])
    assert np.array_equal(pool(hidden, real, "last"), hidden[[0, 1], [2, 3]])
    assert np.array_equal(pool(hidden, real, "first"), hidden[:, 0])
    expected = [hidden[0, :3].mean(0), hidden[1, 1:].mean(0)]
    assert np.allclose(pool(hidden, real, "mean"), expected, atol=1e-6)
    assert pool(hidden, real, None) is hidden


@pytest.mark.parametrize("head", ["sequence", pytest.param("choice", marks=pytest.mark.slow)])
def test_modernbert_pools_by_the_mean_if_configured(tmp_path, head):
    ref = HFReference("modernbert", head, tmp_path, classifier_pooling="mean")
    shape = (2, 2) if head == "choice" else (4,)
    inputs = {name: torch.tensor(value).unflatten(0, shape) for name, value in ref.batch().items()}
    with torch.no_grad():
        expected = ref.torch(**inputs).logits.numpy()
    logits = ref.outputs[0]
    assert np.abs(of_real(logits, ref.batch(), head) - expected).max() <= 1e-4 * np.abs(expected).max()
    first = HFReference("modernbert", head, tmp_path)
    assert not np.allclose(our_loss(first.net, ref.params, ref.batch(), CLASSES)[1], expected, rtol=1e-2)


# ---------------------------------------------------------------------------------------------------------------------
# Tasks, with batches like those of the data modules.

TASKS = {"single": (SequenceClassification, "sequence", {}), "several": (SequenceClassification, "sequence", {}),
         "value": (SequenceClassification, "sequence", {}), "tags": (TokenClassification, "token", {}),
         "choices": (MultipleChoice, "choice", {}), "pairs": (Reward, "sequence", {"center_rewards_coefficient": 0.01})}


def mark_slow_except(*kinds: str) -> list:
    """Return all tasks as parameters, slow except these: the others differ only in loss or head."""
    return [pytest.param(kind, marks=[] if kind in kinds else pytest.mark.slow) for kind in TASKS]


def make_rows(kind: str, num: int = 8, length: int = 7) -> dict[str, np.ndarray]:
    """Return rows of a task; the last one is padding."""
    random = np.random.default_rng(4)
    shape = {"choices": (num, 3, length), "pairs": (num, 2, length)}.get(kind, (num, length))
    mask = (np.arange(length) < random.integers(2, length + 1, (*shape[:-1], 1))).astype(np.int64)
    batch = {"input_ids": random.integers(4, 37, shape) * mask, "attention_mask": mask, "index": np.arange(num),
             "token_seeds": mask * token_seeds(3, 0, np.arange(mask[..., 0].size).reshape(*shape[:-1], 1),
                                               np.arange(length))}
    batch |= {
        "single": lambda: {"labels": random.integers(0, K, num)},
        "several": lambda: {"labels": random.integers(0, 2, (num, K)).astype(np.float32)},
        "value": lambda: {"labels": random.normal(size=num).astype(np.float32)},
        "tags": lambda: {"labels": np.where(mask & (random.random(shape) < 0.7), random.integers(0, K, shape),
                                            IGNORED)},
        "choices": lambda: {"labels": random.integers(0, 2, num), "choices": random.integers(2, 4, num)},
        "pairs": lambda: {"margin": random.random(num).astype(np.float32)}}[kind]()
    batch["index"][-1] = -1
    name = "margin" if kind == "pairs" else "labels"
    batch[name][-1] = np.nan if batch[name].dtype.kind == "f" else IGNORED
    batch["attention_mask"][-1] = np.arange(length) == 0
    return batch


def task_of(make_ref, kind: str):
    """Return a task with a tiny network, with dropout."""
    task_class, head, fields = TASKS[kind]
    ref = make_ref("bert", head, **({"num_labels": 1} if kind in ("value", "pairs") else {}))
    task = task_class(pretrained=str(ref.folder), **fields)
    task.network = ref.net
    if kind in ("single", "tags"):
        task.weights = WEIGHTS
    return task, ref


def split_batches(batch: dict[str, np.ndarray], size: int) -> list[dict[str, torch.Tensor]]:
    return [{name: torch.tensor(part[start:start + size]) for name, part in batch.items()}
            for start in range(0, len(batch["index"]), size)]


def run(kind: str, task, ref, parallel, size: int, chunk_tokens: int = 0):
    """Evaluate, then take a step of plain SGD on all rows; return metrics, parameter changes and the rows' outputs."""
    settings = Optimizer(name="sgd", lr=1.0, weight_decay=0.0)
    steps = Steps(parallel, task.batch_loss, build(settings, ref.net.decays(ref.params)), Clipping(), task.predict,
                  chunk_tokens=chunk_tokens)
    state = steps.new_state(parallel.put_state(jax.tree.map(np.copy, ref.params)))
    outputs_by_index, accumulation = {}, steps.new_accumulation(state)
    data = SimpleNamespace(answer=lambda role, outputs: outputs_by_index.update(outputs) or SimpleNamespace(
        scores={"rows": len(outputs)}, files={}))
    weights = SimpleNamespace(trainable=state["trainable"], frozen={})
    with Prefetcher(split_batches(make_rows(kind), size), parallel, size, pad_id=0) as prefetcher:
        for batch in prefetcher:
            task.evaluate(steps, weights, batch)
            accumulation = steps.accumulate(state, {}, accumulation, batch.arrays)
    results, files = task.eval_results("val", data)
    state, figures = steps.update(state, accumulation, parallel.put_scalars(step_scalars(settings, 0, 1)))
    after = parallel.fetch_state(state["trainable"])
    return results, fetch_step_metrics(figures), jax.tree.map(np.subtract, after, ref.params), outputs_by_index


def assert_near(actual, expected) -> None:
    """Compare changes of parameters, which are rounded like the parameters."""
    largest = max(np.abs(leaf).max() for leaf in jax.tree.leaves(expected))
    for change, reference in zip(jax.tree.leaves(actual), jax.tree.leaves(expected), strict=True):
        assert np.abs(change - reference).max() <= 1e-4 * max(np.abs(reference).max(), 0.1 * largest)


@pytest.fixture(scope="module")
def run_on_one_device(make_ref):
    """Return a function that runs a task on one device."""
    return cache(lambda kind: run(kind, *task_of(make_ref, kind), Replicas(jax.devices()[:1]), 8))


@pytest.mark.parametrize("kind", mark_slow_except("several", "choices"))
def test_a_step_has_the_gradient_of_all_rows_and_every_row_gets_its_output(make_ref, run_on_one_device, kind):
    task, ref = task_of(make_ref, kind)
    batch = make_rows(kind)
    results, figures, change, outputs = run_on_one_device(kind)
    assert results["rows"] == len(outputs) == 7 and figures["num_rows"] == 7
    assert figures["num_tokens"] == batch["attention_mask"][:-1].sum()

    @partial(jax.jit, static_argnums=1)
    def loss(params, training):
        sums = task.batch_loss(params, {name: jnp.asarray(x) for name, x in batch.items()}, training, False)
        return sums.total, sums.weight

    (total, weight), gradients = jax.value_and_grad(loss, has_aux=True)(ref.params, True)
    assert figures["loss"] == pytest.approx(float(total / weight), rel=1e-4)
    assert_near(change, jax.tree.map(lambda g: -np.asarray(g) / float(weight), gradients))
    # Evaluation has no dropout.
    total, weight = loss(ref.params, False)
    assert results["loss"] == pytest.approx(float(total / weight), rel=1e-4)
    shapes = {"single": (K,), "several": (K,), "value": (1,), "pairs": (2,)}
    for index, output in outputs.items():
        shape = {"tags": lambda i: (batch["attention_mask"][i].sum(), K),
                 "choices": lambda i: (batch["choices"][i],)}.get(kind, lambda i: shapes[kind])(index)
        assert output.shape == tuple(shape) and output.dtype == np.float32


# Devices, rows of a micro-batch, and tokens of a chunk.
LAYOUTS = {"chunks": (lambda: Replicas(jax.devices()[:1]), 8, 7),
           "eight ranks": (lambda: Replicas(jax.devices()[:8]), 1, 0),
           "fsdp and tensor": (lambda: ShardedMesh(fsdp=2, tensor=2, devices=jax.devices()[:4]), 2, 0),
           "data and sequence": (lambda: ShardedMesh(data=2, sequence=2, devices=jax.devices()[:4]), 4, 0)}


@pytest.mark.parametrize(("kind", "layout"), [
    pytest.param(kind, layout, marks=[] if (kind, layout) in (("several", "fsdp and tensor"), ("choices", "chunks"))
                 else pytest.mark.slow) for kind in TASKS for layout in LAYOUTS])
def test_many_devices_take_the_step_of_one_and_give_its_outputs(make_ref, run_on_one_device, kind, layout):
    results, figures, change, outputs = run_on_one_device(kind)
    make, size, chunk_tokens = LAYOUTS[layout]
    actual = run(kind, *task_of(make_ref, kind), make(), size, chunk_tokens)
    assert actual[0] == pytest.approx(results, rel=1e-4) and actual[1] == pytest.approx(figures, rel=1e-4)
    assert_near(actual[2], change)
    assert outputs.keys() == actual[3].keys()
    for index, output in outputs.items():
        assert np.abs(actual[3][index] - output).max() <= 1e-4 * max(np.abs(output).max(), 1)


@pytest.mark.parametrize("kind", TASKS)
def test_padding_rows_are_recognised_also_those_that_chunks_add(kind):
    batch = {name: jnp.asarray(x) for name, x in make_rows(kind).items()}
    assert scored_rows(batch).tolist() == [True] * 7 + [False]
    per_row = batch["input_ids"].size // 8
    parts = split_rows(batch, 3 * per_row)  # 3 + 3 + 2 rows, and an added one
    joined = {name: x.reshape(-1, *x.shape[2:]) for name, x in parts.items()}
    assert scored_rows(joined).tolist() == [True] * 7 + [False] * 2


def test_multi_label_rows_are_not_padded_along_tokens():
    batch = {name: torch.tensor(x) for name, x in make_rows("several", num=2, length=K).items()}
    with Prefetcher([batch], Replicas(jax.devices()[:2]), 3, pad_id=0, max_length=32) as prefetcher:
        (prefetched,) = prefetcher
    assert prefetched.host["labels"].shape == (2, 3, K) and prefetched.host["input_ids"].shape == (2, 3, 32)
    assert np.isnan(prefetched.host["labels"][0, 2]).all() and np.isnan(prefetched.host["labels"][1]).all()


def test_a_reward_model_scores_single_answers(make_ref):
    task, ref = task_of(make_ref, "pairs")
    batch = {name: jnp.asarray(x) for name, x in make_rows("pairs").items()}
    single = {name: x[:, :1] if x.ndim == 3 else x for name, x in batch.items()}
    outputs, pairs = task.predict(ref.params, single), task.predict(ref.params, batch)
    assert outputs.keys() == {"scores"} and outputs["scores"].shape == (8, 1)
    assert np.allclose(outputs["scores"], pairs["scores"][:, :1], atol=1e-5)
    assert isinstance(task.loss(pairs["scores"], batch), LossSums)


def test_the_data_module_provides_class_weights_when_the_network_is_built(make_ref):
    ref, requests = make_ref("bert", "sequence"), []

    class Tokenizer(SimpleNamespace):
        def __len__(self):
            return 37

    data = SimpleNamespace(
        tokenizer=Tokenizer(bos_token_id=None, eos_token_id=None, pad_token_id=0, unk_token_id=None),
        network_fields={"id2label": dict(enumerate("abcde")), "label2id": {name: i for i, name in enumerate("abcde")}},
        class_weights=lambda setting: requests.append(setting) or WEIGHTS)
    task = SequenceClassification(pretrained=str(ref.folder), class_weights="balanced")
    task.build("32-true", data, 0)
    assert requests == ["balanced"] and np.array_equal(task.weights, WEIGHTS)
    assert task.network.config.id2label == dict(enumerate("abcde")) and task.network.config.num_labels == 5
