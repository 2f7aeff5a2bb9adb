"""Every family and head against its torch ref: logits, loss, all gradients, packing; and the tree's own rules."""

import copy

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from hf_reference import NUM_LABELS, labels_of, of_real, our_loss, row_labels, torch_inputs
from tested import MAIN, cases, cells, every_pair
from transformers.pytorch_utils import Conv1D

from jax_engine.distributed import loss
from jax_engine.distributed import loss as losses
from jax_engine.distributed.tree import flatten, unflatten
from jax_engine.models import hub
from jax_engine.optim import in_hidden_matrix
from lmmods.core.dropout import token_seeds
from lmmods.core.settings import is_hidden_matrix
from lmmods.torch_engine.nn.dropout import TokenDropout
from tests.closeness import assert_as_close, gradients, in_both


def torch_loss(model, head, batch, labels):
    inputs = torch_inputs(batch, head)
    output = model(**inputs)
    if head in ("sequence", "choice"):
        targets = torch.tensor(row_labels(len(output.logits), head))
        loss = torch.nn.functional.cross_entropy(output.logits, targets, reduction="sum")
        return output.logits, loss + output.logits.tanh().sum()
    if head == "qa":
        logits = torch.stack([output.start_logits, output.end_logits], -1)
        padding = inputs["attention_mask"][..., None] == 0
        spans = -logits.masked_fill(padding, -1e4).log_softmax(1)[:, 4].sum()
        return logits, spans + logits.tanh().masked_fill(padding, 0).sum()
    logits, labels = output.logits, torch.tensor(labels)
    labels = torch.where(labels < 0, labels, labels % NUM_LABELS) if head == "token" else labels
    pairs = (logits[:, :-1], labels[:, 1:]) if head == "causal" else (logits, labels)
    return logits, torch.nn.functional.cross_entropy(pairs[0].flatten(0, 1), pairs[1].flatten(), reduction="sum")


@every_pair
def test_logits_loss_and_all_gradients_are_torchs(make_ref, name, head):
    ref = make_ref(name, head)
    batch = ref.batch()
    labels = labels_of(batch)

    def of_torch(model):
        logits, loss = torch_loss(model, head, batch, labels)
        found = gradients(model, loss)
        return of_real(logits, batch, head), loss, {name: found.get(name, torch.zeros(param.shape))
                                                  for name, param in model.named_parameters()}

    theirs, exact = in_both(of_torch, ref.torch)
    logits, value, grads = ref.found
    named = ref.net.to_torch(grads)
    assert logits.dtype == np.float32 and list(named) == list(exact[2])
    for found in zip((of_real(logits, batch, head), value, named), theirs, exact, strict=True):
        assert_as_close(*found, terms=1024)  # up to three layers, forth and back


@cells("all", (*MAIN, "gpt_neox", "modernbert"))
def test_saved_folder_is_the_same_model_for_transformers(make_ref, name, head, tmp_path):
    ref = make_ref(name, head)
    hub.save(ref.net, ref.params, tmp_path)
    again = type(ref.torch).from_pretrained(tmp_path).eval()
    before = dict(ref.torch.named_parameters())
    assert all(torch.equal(value, before[key]) for key, value in again.named_parameters())
    saved, original = again.config.to_dict(), type(ref.torch).from_pretrained(ref.folder).config.to_dict()
    assert saved | {"_name_or_path": ""} == original | {"_name_or_path": ""}
    inputs = torch_inputs(ref.batch(), head)
    with torch.no_grad():
        ours, theirs = again(**inputs), ref.torch(**inputs)
    assert torch.equal(ours.start_logits if head == "qa" else ours.logits,
                       theirs.start_logits if head == "qa" else theirs.logits)


# No task packs rows of an encoder; its positions and windows are apart all the same.
@pytest.mark.parametrize(("name", "head"), [*cases("packing", (*MAIN, "phi3", "gemma3_text", "qwen3_5_text")),
                                            ("bert", "masked"), ("roberta", "masked"), ("modernbert", "masked")])
def test_packed_documents_are_as_apart(make_ref, name, head):
    ref = make_ref(name, head)
    random = np.random.default_rng(3)
    first, second, padding = random.integers(4, 37, (1, 5)), random.integers(4, 37, (1, 4)), np.full((1, 7), ref.pad)
    rows = [np.concatenate([document, second, padding[:, :2]], 1) for document in (first, first[:, ::-1])]
    ids = np.concatenate(rows)
    packed = {"input_ids": ids, "attention_mask": np.ones_like(ids),
              "position_ids": np.array([[0, 1, 2, 3, 4, 0, 1, 2, 3, 0, 1]] * 2),
              "segment_ids": np.array([[1] * 5 + [2] * 4 + [0] * 2] * 2)}
    alone = [np.concatenate([document, padding[:, document.size - 4:]], 1) for document in (first, second)]
    alone = {"input_ids": np.concatenate(alone), "attention_mask": (np.arange(11) < [[5], [4]]).astype(int)}
    forward = jax.jit(lambda batch: ref.net.logits(ref.params, ref.net.hidden(ref.params, batch)))
    together, changed = np.asarray(forward(packed))
    apart = np.asarray(forward(alone))
    for found, expected in ((together[:5], apart[0, :5]), (together[5:9], apart[1, :4])):
        assert np.abs(found - expected).max() <= 1e-5 * np.abs(expected).max()
    assert np.array_equal(changed[5:9], together[5:9])


@pytest.mark.slow
@pytest.mark.parametrize("name", ["llama", "gpt2", "albert", "mixtral"])
def test_remat_and_unroll_change_no_gradient(make_ref, name):
    head = "masked" if name == "albert" else "causal"
    ref = make_ref(name, head)
    batch = ref.batch()
    labels = labels_of(batch)
    batch["token_seeds"] = token_seeds(0, 0, np.arange(4)[:, None], np.arange(9))

    def gradients(**options):
        net = hub.network(ref.net.config, head, **options)
        gradient = jax.jit(jax.grad(lambda p: our_loss(net, p, batch, labels, True)[0]))
        return gradient(ref.params), str(jax.make_jaxpr(gradient)(ref.params)).count("remat")

    plain, of_parts = gradients()  # norms and gated activations are computed again in any case
    largest = max(float(jnp.abs(leaf).max()) for leaf in jax.tree.leaves(plain))
    for options in ({"remat": "minimal"}, {"remat": "full"}, {"unroll": 3}):
        other, num_remats = gradients(**options)
        assert (num_remats > of_parts) == ("remat" in options)
        for path, leaf in flatten(plain).items():
            scale = max(float(jnp.abs(leaf).max()), 1e-3 * largest)
            assert jnp.abs(leaf - flatten(other)[path]).max() <= 1e-5 * scale, path


@pytest.mark.slow
@pytest.mark.parametrize(("name", "head"), [("gpt2", "causal"), ("bert", "masked"), ("distilbert", "qa")])
def test_a_rows_dropout_does_not_depend_on_its_batch(make_ref, name, head):
    ref = make_ref(name, head)
    seeds = token_seeds(5, 0, np.arange(4)[:, None], np.arange(9))
    batch = ref.batch() | {"attention_mask": np.ones((4, 9), int), "token_seeds": seeds}
    hidden = jax.jit(ref.net.hidden, static_argnums=2)
    whole = np.asarray(hidden(ref.params, batch, True))
    for row in range(4):
        alone = np.asarray(hidden(ref.params, {k: v[row:row + 1] for k, v in batch.items()}, True))
        assert np.allclose(alone[0], whole[row], atol=1e-5)
    longer = {k: np.pad(v, ((0, 0), (0, 3))) for k, v in batch.items()}
    assert np.allclose(np.asarray(hidden(ref.params, longer, True))[:, :9], whole, atol=1e-5)
    assert not np.allclose(np.asarray(hidden(ref.params, batch | {"token_seeds": seeds[::-1]}, True)), whole, atol=1e-2)
    assert not np.allclose(np.asarray(hidden(ref.params, batch)), whole, atol=1e-2)


RATES = {name: {"hidden_dropout_prob": 0.3, "attention_probs_dropout_prob": 0.2}
         for name in ("bert", "roberta", "albert", "xlm-roberta", "electra", "deberta-v2")}
RATES |= {name: {"embd_pdrop": 0.1, "attn_pdrop": 0.2, "resid_pdrop": 0.3} for name in ("gpt2", "openai-gpt", "ctrl")}
RATES |= {"starcoder2": {"embedding_dropout": 0.1, "attention_dropout": 0.2, "residual_dropout": 0.3},
          "gpt_neox": {"hidden_dropout": 0.3, "attention_dropout": 0.2},
          "phi3": {"resid_pdrop": 0.3, "attention_dropout": 0.2},
          "modernbert": {"embedding_dropout": 0.1, "attention_dropout": 0.2, "mlp_dropout": 0.3,
                         "classifier_dropout": 0.25}}
RATES |= {"distilbert": {"dropout": 0.3, "attention_dropout": 0.2, "qa_dropout": 0.1,
                         "seq_classif_dropout": 0.4}}
RATES["deberta-v2"] |= {"pooler_dropout": 0.4, "cls_dropout": 0.25}
RATES["electra"] |= {"classifier_dropout": 0.25, "summary_last_dropout": 0.4}


@cells("all", (*MAIN, "starcoder2", "modernbert"))
def test_dropout_is_torchs(make_ref, name, head):
    """Features of the same tokens, sites and layers are dropped, also where layers share weights."""
    ref = make_ref(name, head, **RATES.get(name, {"attention_dropout": 0.3}))
    batch, seeds = ref.batch(), token_seeds(5, 0, np.arange(4)[:, None], np.arange(9))
    dropout = TokenDropout.from_model(ref.torch) or TokenDropout(ref.torch)
    dropout.begin({"token_seeds": torch.from_numpy(seeds)})
    found = {}
    for training in (False, True):
        ref.torch.train(training)
        with torch.no_grad():
            found[training] = torch_loss(ref.torch, head, batch, labels_of(batch))[0].numpy()
    ref.torch.eval()
    seeded = batch | {"token_seeds": seeds}
    ours = np.asarray(jax.jit(lambda p: ref.net.scores(p, seeded, True))(ref.params)).reshape(found[True].shape)
    scale = np.abs(found[True]).max()
    near, far = (of_real(np.abs(ours - found[training]), batch, head).max() for training in (True, False))
    assert near <= 1e-4 * scale < 1e-2 * far


@cells("all", ("llama", "gemma", "gemma2", "granite", "ctrl", "gpt2", "bert", "albert"))
def test_noise_on_embeddings_is_torchs(make_ref, name, head):
    """Where transformers' table is scaled it comes after the scale; each row's is of its own length."""
    ref = make_ref(name, head, **dict.fromkeys(RATES.get(name, ()), 0.0))
    net = hub.network(ref.net.config, head, noise=9.0)
    batch, seeds = ref.batch(), token_seeds(5, 0, np.arange(4)[:, None], np.arange(9))
    seeds = np.where(batch["attention_mask"] > 0, seeds, 0)
    model = copy.deepcopy(ref.torch)
    dropout = TokenDropout(model, noise=9.0)
    found = {}
    for training in (False, True):
        model.train(training)
        dropout.begin({"token_seeds": torch.from_numpy(seeds),
                       "attention_mask": torch.from_numpy(batch["attention_mask"])})
        with torch.no_grad():
            found[training] = torch_loss(model, head, batch, labels_of(batch))[0].numpy()
    seeded = batch | {"token_seeds": seeds}
    ours = np.asarray(jax.jit(lambda p: net.scores(p, seeded, True))(ref.params)).reshape(found[True].shape)
    scale = np.abs(found[True]).max()
    near, far = (of_real(np.abs(ours - found[training]), batch, head).max() for training in (True, False))
    assert near <= min(1e-4 * scale, 0.05 * far)


@every_pair
def test_decay_is_on_matrices_as_torch_sees_them(make_ref, name, head):
    ref = make_ref(name, head)
    decays = flatten(ref.net.decays(ref.params))
    for key, path, _ in ref.net.names():
        is_matrix = dict(ref.torch.named_parameters())[key].ndim >= 2 and not key.endswith("bias")
        assert decays[path] == is_matrix, key
    assert {path for path in flatten(ref.params) if ref.net.trains(path)} == {path for _, path, _ in ref.net.names()}


@every_pair
def test_muon_moves_the_linear_layers_and_experts_between_embeddings_and_head(make_ref, name, head):
    """By torch's names and by paths alike, which order the state of a checkpoint."""
    ref = make_ref(name, head)
    decays = flatten(ref.net.decays(ref.params))
    params = dict(ref.torch.named_parameters())
    ends = {*map(id, (ref.torch.get_input_embeddings(), ref.torch.get_output_embeddings()))}
    linear = {f"{own}.weight" for own, module in ref.torch.named_modules()
              if isinstance(module, torch.nn.Linear | Conv1D) and id(module) not in ends}
    found = set()
    for key, path, _ in ref.net.names():
        moves = is_hidden_matrix(key, params[key].ndim)
        assert moves == (decays[path] and in_hidden_matrix(path)), key
        found |= {key} if moves else set()
    layers = {key for key, path, _ in ref.net.names() if path[0] == "layers"}
    experts = {key for key in layers if params[key].ndim == 3 and ".experts." in key}
    routers = {key for key in layers - linear if params[key].ndim == 2 and key.endswith("weight")}
    assert found == layers & linear | experts | routers and len(found) >= 4
    assert all("gate" in key or "router" in key for key in routers)


def test_half_precision_products_keep_float32_where_it_matters(make_ref):
    ref = make_ref("llama", "causal")
    batch = ref.batch()
    net = hub.network(ref.net.config, "causal", compute_dtype="bfloat16")
    hidden = net.hidden(ref.params, batch)
    logits = net.logits(ref.params, hidden)
    assert hidden.dtype == jnp.bfloat16 and logits.dtype == jnp.float32  # the head multiplies what it is given
    between = jax.make_jaxpr(lambda params: net.hidden(params, batch))(ref.params)
    assert "float32" in str(between.eqns[-1].invars[0].aval.dtype)  # what layers hand on
    exact = np.asarray(ref.net.logits(ref.params, ref.net.hidden(ref.params, batch)))
    real = batch["attention_mask"] > 0
    assert 0 < np.abs(np.asarray(logits) - exact)[real].max() < 0.03 * np.abs(exact).max()
    small = jax.tree.map(lambda leaf: jnp.asarray(leaf, jnp.bfloat16), ref.params)
    assert net.hidden(small, batch).dtype == jnp.bfloat16 and net.logits(small, hidden).dtype == jnp.float32


@jax.tree_util.register_pytree_node_class
class Halves:
    """A weight kept as two summands, as a quantised one is kept as codes and scales."""

    def __init__(self, *parts):
        self.parts = parts

    def astype(self, dtype):
        return sum(self.parts).astype(dtype)

    def tree_flatten(self):
        return self.parts, None

    @classmethod
    def tree_unflatten(cls, _, parts):
        return cls(*parts)


@pytest.mark.parametrize(("name", "head"), [("llama", "causal"), ("albert", "masked")])
def test_a_weight_may_be_kept_in_another_form(make_ref, name, head):
    ref = make_ref(name, head)
    batch = ref.batch()
    leaves = flatten(ref.params)
    kept = unflatten({path: Halves(leaf / 4, 3 * leaf / 4) if path[1] in ("attn", "mlp") and path[-1] == "weight"
                      and len(path) == 4 and "norm" not in path[2] else leaf for path, leaf in leaves.items()})
    hidden = jax.jit(ref.net.hidden)
    assert np.allclose(hidden(kept, batch), hidden(ref.params, batch), atol=1e-4)
    assert flatten(ref.net.split(kept)[0]).keys() == flatten(ref.net.decays(kept)).keys() == leaves.keys()


def test_a_row_of_padding_gives_finite_gradients(make_ref):
    for name, head in (("gpt2", "causal"), ("bert", "masked")):
        ref = make_ref(name, head)
        batch = ref.batch()
        batch["attention_mask"] = batch["attention_mask"] * np.array([[0], [1], [1], [1]])
        labels = labels_of(batch)
        grads = jax.jit(jax.grad(lambda p, net=ref.net, batch=batch, labels=labels: our_loss(
            net, p, batch, labels)[0]))(ref.params)
        assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(grads))


@pytest.mark.parametrize("name", ["llama", "gemma3_text"])
def test_a_deep_network_is_no_larger_a_program(make_ref, name):
    """Layers are one body of a loop, also where windows and positions alternate; compiling takes time by the text."""
    texts, batch = {}, {"input_ids": np.zeros((1, 6), np.int32)}
    for depth in (2, 32):
        config = copy.deepcopy(make_ref(name, "causal").config)
        config.num_hidden_layers, config.layer_types = depth, ["sliding_attention", "full_attention"] * (depth // 2)
        net = hub.network(config, "causal", unroll=1 if depth == 2 else None)
        lowered = jax.jit(jax.grad(lambda p, net=net: net.logits(p, net.hidden(p, batch)).sum())).lower(net.shapes)
        texts[depth] = len(lowered.as_text())
    assert texts[32] <= 1.01 * texts[2]


@pytest.mark.parametrize("name", ["gemma2", *(pytest.param(name, marks=pytest.mark.slow) for name in (
    "granite", "cohere2"))])
def test_chunked_losses_scale_and_cap_logits_too(make_ref, name, monkeypatch):
    ref = make_ref(name, "causal")
    monkeypatch.setattr(loss, "CHUNK_BYTES", 4 * 37 * 5)
    monkeypatch.setattr(loss, "LEAST_CHUNK", 1)
    batch = ref.batch()
    labels = labels_of(batch)

    def total(log_probs, picked):  # the second as a preference loss needs it: of rows, and not linear
        return -picked.sum() + (log_probs.sum(1) ** 2).sum() / 100

    def ours(params):
        hidden = ref.net.hidden(params, batch)
        arguments = hidden, losses.shift_labels(labels), lambda h: ref.net.logits(params, h), 37
        return total(losses.token_log_probs(*arguments), -losses.token_loss(*arguments).total)

    value, grads = jax.jit(jax.value_and_grad(ours))(ref.params)
    ref.torch.zero_grad()
    logits = ref.torch(**{key: torch.tensor(part) for key, part in batch.items()}).logits[:, :-1]
    wanted = torch.tensor(labels[:, 1:])
    log_probs = logits.log_softmax(-1).gather(-1, wanted.clamp(min=0)[..., None])[..., 0].where(wanted >= 0, 0)
    expected = total(log_probs, log_probs)
    expected.backward()
    assert abs(float(value) - expected.item()) <= 1e-4 * abs(expected.item())
    theirs = {key: parameter.grad.numpy() for key, parameter in ref.torch.named_parameters()}
    largest = max(np.abs(gradient).max() for gradient in theirs.values())
    for key, gradient in ref.net.to_torch(grads).items():
        assert np.abs(gradient - theirs[key]).max() <= 1e-4 * max(np.abs(theirs[key]).max(), 1e-3 * largest), key


def test_rows_longer_than_the_positions_are_refused(make_ref):
    from lmmods.core.errors import UserError

    for name, head, room in (("gpt2", "causal", 32), ("roberta", "masked", 28)):
        ref = make_ref(name, head)
        ids = np.ones((1, room + 1), int)
        with pytest.raises(UserError, match=f"{room} positions"):
            ref.net.hidden(ref.params, {"input_ids": ids, "attention_mask": ids})
        ref.net.hidden(ref.params, {"input_ids": ids[:, 1:], "attention_mask": ids[:, 1:]})
    with pytest.raises(UserError, match="token_type_ids"):
        ref = make_ref("gpt2", "causal")
        ref.net.hidden(ref.params, {"input_ids": ids, "token_type_ids": ids})
