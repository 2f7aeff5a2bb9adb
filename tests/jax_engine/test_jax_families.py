"""Every family with every head, built once and compared with transformers, PEFT and bitsandbytes in all that runs use.

The other files test what one family suffices to show.
"""

import copy
import math
from collections.abc import Callable
from pathlib import Path

import jax
import numpy as np
import pytest
import torch
import transformers
from bitsandbytes.nn import Linear4bit
from hf_reference import AUTO, NUM_LABELS, HFReference, labels_of, of_real, our_loss, row_labels, torch_inputs
from test_generate import EOS, generate_on_torch, prompts_of
from test_initial_parameters import SIZES, assert_same_values, build_model, make_config
from test_lora import check_adapter
from test_quant import assert_logits_equal_torchs, quantise_on_torch, stacked_experts
from tested import PAIRS, QUICK, TESTED
from transformers.pytorch_utils import Conv1D

from jax_engine.distributed.mesh import ShardedMesh
from jax_engine.distributed.tree import flatten
from jax_engine.models import building, generate, hub, loading, quant
from jax_engine.optim import in_hidden_matrix
from lmmods.core.dropout import token_seeds
from lmmods.core.settings import Generation, LoRA, depth, is_hidden_matrix, num_layers
from lmmods.torch_engine.nn.dropout import TokenDropout
from lmmods.torch_engine.nn.loading import resize_embeddings
from tests.closeness import assert_as_close, gradients, in_both

# Dropout rates of a family's configuration, all different where it has several.
RATES = {name: {"hidden_dropout_prob": 0.3, "attention_probs_dropout_prob": 0.2}
         for name in ("bert", "roberta", "albert", "xlm-roberta", "electra", "deberta-v2")}
RATES |= {name: {"embd_pdrop": 0.1, "attn_pdrop": 0.2, "resid_pdrop": 0.3} for name in ("gpt2", "openai-gpt", "ctrl")}
RATES |= {"starcoder2": {"embedding_dropout": 0.1, "attention_dropout": 0.2, "residual_dropout": 0.3},
          "gpt_neox": {"hidden_dropout": 0.3, "attention_dropout": 0.2},
          "phi3": {"resid_pdrop": 0.3, "attention_dropout": 0.2},
          "modernbert": {"embedding_dropout": 0.1, "attention_dropout": 0.2, "mlp_dropout": 0.3,
                         "classifier_dropout": 0.25},
          "distilbert": {"dropout": 0.3, "attention_dropout": 0.2, "qa_dropout": 0.1, "seq_classif_dropout": 0.4}}
RATES["deberta-v2"] |= {"pooler_dropout": 0.4, "cls_dropout": 0.25}
RATES["electra"] |= {"classifier_dropout": 0.25, "summary_last_dropout": 0.4}
NOISE = 9.0
# No task packs rows of an encoder, but its positions and windows support it.
CHECKED = TESTED | {"all": PAIRS, "packing": [*TESTED["packing"], ("bert", "masked"), ("roberta", "masked"),
                                              ("modernbert", "masked")]}


@pytest.mark.parametrize(("name", "head"), [
    pytest.param(name, head, id=f"{name}-{head}", marks=[] if name in QUICK else pytest.mark.slow)
    for name, head in PAIRS])
def test_a_family_with_a_head_is_the_model_of_transformers(name, head, tmp_path):
    """Every check runs, also after a failure; the message names all that failed."""
    ref = HFReference(name, head, tmp_path / "base", **rates_of(name))
    failures, failed = [], []
    for feature, checks in CHECKS.items():
        for check in checks if (name, head) in CHECKED[feature] else ():
            folder = tmp_path / check.__name__
            folder.mkdir()
            try:
                check(ref, folder)
            except Exception as error:
                error.add_note(f"in {check.__name__} of {name}-{head}")
                failures.append(error)
                failed.append(check.__name__)
    if failures:
        raise ExceptionGroup(f"{name}-{head} fails in {', '.join(failed)}", failures)


def rates_of(name: str) -> dict[str, float]:
    return RATES.get(name, {"attention_dropout": 0.3})


def compute_torch_loss(model, head, batch, labels):
    """Return the logits and the loss that `our_loss` computes."""
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


def check_logits_loss_and_all_gradients(ref: HFReference, _: Path) -> None:
    batch = ref.batch()

    def run_torch(model):
        logits, loss = compute_torch_loss(model, ref.head, batch, labels_of(batch))
        by_name = gradients(model, loss)
        return of_real(logits, batch, ref.head), loss, {
            name: by_name.get(name, torch.zeros(param.shape)) for name, param in model.named_parameters()}

    expected, exact = in_both(run_torch, ref.torch)
    logits, value, grads = ref.outputs
    named = ref.net.to_torch(grads)
    assert logits.dtype == np.float32 and list(named) == list(exact[2])
    for compared in zip((of_real(logits, batch, ref.head), value, named), expected, exact, strict=True):
        assert_as_close(*compared, terms=1024)  # up to three layers, forward and backward


def check_names_of_parameters(ref: HFReference, _: Path) -> None:
    """Patterns can match torch's names, including all names of tied parameters; names determine the layer."""
    torch_names: dict[torch.nn.Parameter, set[str]] = {}
    for name, param in ref.torch.named_parameters(remove_duplicate=False):
        torch_names.setdefault(param, set()).add(name)
    net, per_group = ref.net, ref.net.arch.layers_per_group or 1
    assert [set(names) for names in net.all_names().values()] == list(torch_names.values())
    # Names and the JAX network's tree agree on embeddings, layers and heads.
    layers = num_layers(name for name, *_ in net.names())
    assert layers == net.num_named_layers == net.arch.num_stored_layers // per_group
    for name, path, index in net.names():
        layer = None if index is None else net.arch.layers_with(".".join(path[:-1]))[index]
        expected = {"embed": 0}.get(path[0], layers + 1) if layer is None else 1 + layer // per_group
        assert depth(name, layers) == expected, name


def check_weight_decay_is_on_matrices(ref: HFReference, _: Path) -> None:
    decays, params = flatten(ref.net.decays(ref.params)), dict(ref.torch.named_parameters())
    for name, path, _ in ref.net.names():
        assert decays[path] == (params[name].ndim >= 2 and not name.endswith("bias")), name
    assert {path for path in flatten(ref.params) if ref.net.trains(path)} == {path for _, path, _ in ref.net.names()}


def check_muon_trains_linear_layers_and_experts_but_not_embeddings_and_head(ref: HFReference, _: Path) -> None:
    """Names of torch and paths of JAX, which both order a checkpoint's state, agree."""
    decays, params = flatten(ref.net.decays(ref.params)), dict(ref.torch.named_parameters())
    ends = {*map(id, (ref.torch.get_input_embeddings(), ref.torch.get_output_embeddings()))}
    linear = {f"{name}.weight" for name, module in ref.torch.named_modules()
              if isinstance(module, torch.nn.Linear | Conv1D) and id(module) not in ends}
    by_muon = set()
    for name, path, _ in ref.net.names():
        is_muon = is_hidden_matrix(name, params[name].ndim)
        assert is_muon == (decays[path] and in_hidden_matrix(path)), name
        by_muon |= {name} if is_muon else set()
    layers = {name for name, path, _ in ref.net.names() if path[0] == "layers"}
    experts = {name for name in layers if params[name].ndim == 3 and ".experts." in name}
    routers = {name for name in layers - linear if params[name].ndim == 2 and name.endswith("weight")}
    assert by_muon == layers & linear | experts | routers and len(by_muon) >= 4
    assert all("gate" in name or "router" in name for name in routers)


def check_transformers_loads_the_same_model_from_a_saved_folder(ref: HFReference, folder: Path) -> None:
    hub.save(ref.net, ref.params, folder)
    reloaded = type(ref.torch).from_pretrained(folder).eval()
    before = dict(ref.torch.named_parameters())
    assert all(torch.equal(value, before[name]) for name, value in reloaded.named_parameters())
    saved, original = reloaded.config.to_dict(), type(ref.torch).from_pretrained(ref.folder).config.to_dict()
    assert saved | {"_name_or_path": ""} == original | {"_name_or_path": ""}
    inputs = torch_inputs(ref.batch(), ref.head)
    with torch.no_grad():
        actual, expected = reloaded(**inputs), ref.torch(**inputs)
    key = "start_logits" if ref.head == "qa" else "logits"
    assert torch.equal(actual[key], expected[key])


def check_initial_values_agree_on_both_engines_and_have_transformers_distribution(
        ref: HFReference, _: Path) -> None:
    """Mean and variance of every parameter, within five standard deviations of their random fluctuation."""
    config = make_config(ref.name, ref.head)
    model, net = build_model(ref.name, ref.head), hub.network(config, ref.head)
    on_jax = net.to_torch(net.init(0))
    assert on_jax.keys() == dict(model.named_parameters()).keys()
    assert_same_values(on_jax, model)
    torch.manual_seed(0)
    in_transformers = dict(getattr(transformers, AUTO[ref.head]).from_config(config).named_parameters())
    for name, param in model.named_parameters():
        value, size = in_transformers[name].detach(), in_transformers[name].numel()
        assert param.shape == value.shape and param.requires_grad, name
        if size == 1 or value.std() == 0:
            assert torch.equal(param, value), name
            continue
        if name.endswith("A_log"):  # too few values for moments, and a much wider range than matrices
            assert (0.01 <= param.exp()).all() and (param.exp() <= 16).all() and len(set(param.tolist())) == size
            continue
        zeros = (value == 0).all(-1)
        assert torch.equal((param == 0).all(-1), zeros) and not torch.equal(param, value), name
        nonzero, other = param[~zeros].double(), value[~zeros].double()
        spread = value.std() if size > 9 else SIZES["initializer_range"]  # few numbers do not determine it
        assert abs(nonzero.mean() - other.mean()) < 5 * spread * math.sqrt(2 / size), name
        assert abs(nonzero.var() / other.var() - 1) < 5 * math.sqrt(4 / size) + 25 / size, name


def check_new_token_rows_are_the_same_on_both_engines(ref: HFReference, _: Path) -> None:
    model, net = copy.deepcopy(ref.torch), hub.network(copy.deepcopy(ref.net.config), ref.head)
    resize_embeddings(model, 40)
    net.resize(40)
    assert_same_values(net.to_torch(building._add_rows(net, ref.params)), model)
    assert model.get_input_embeddings().weight.shape[0] == 40


def check_dropout_and_noise_on_embeddings(ref: HFReference, _: Path) -> None:
    """The same features of tokens, sites and layers are dropped, also where layers share weights.

    With a language-modelling head, embeddings get noise as well, scaled by the row's length and added after the scale
    of transformers' table.
    """
    has_noise = ref.head in ("causal", "masked")
    batch, seeds = ref.batch(), token_seeds(5, 0, np.arange(4)[:, None], np.arange(9))
    seeds = np.where(batch["attention_mask"] > 0, seeds, 0) if has_noise else seeds
    undropped = copy.deepcopy(ref.config)
    undropped.update(dict.fromkeys(rates_of(ref.name), 0.0))
    undropped = type(ref.torch)(undropped)
    undropped.load_state_dict(ref.torch.state_dict())

    def run_torch(model, noise):
        model = copy.deepcopy(model).train()
        TokenDropout(model, noise=noise).begin({"token_seeds": torch.from_numpy(seeds),
                                                "attention_mask": torch.from_numpy(batch["attention_mask"])})
        with torch.no_grad():
            return compute_torch_loss(model, ref.head, batch, labels_of(batch))[0].numpy()

    expected = run_torch(ref.torch, NOISE * has_noise)
    net = hub.network(ref.net.config, ref.head, noise=NOISE) if has_noise else ref.net
    seeded = batch | {"token_seeds": seeds}
    logits = np.asarray(jax.jit(lambda params: net.scores(params, seeded, True))(ref.params)).reshape(expected.shape)

    def distance(other):
        return of_real(np.abs(logits - other), batch, ref.head).max()

    error, scale = distance(expected), np.abs(expected).max()
    assert error <= 1e-4 * scale < 1e-2 * distance(run_torch(undropped, NOISE * has_noise)), "dropout"
    assert not has_noise or error <= 0.05 * distance(run_torch(ref.torch, 0.0)), "noise on embeddings"


def check_the_same_layers_are_quantised(ref: HFReference, _: Path) -> None:
    model = quantise_on_torch(ref.folder, ref.head, "nf4")
    leaves = flatten(loading.load(ref.net, str(ref.folder), quantize="nf4"))
    expected = {f"{name}.weight" for name, module in model.named_modules() if isinstance(module, Linear4bit)}
    expected |= set(stacked_experts(model))
    actual = {name for name, path, _ in ref.net.names(plain=True) if isinstance(leaves[path], quant.Quantized)}
    assert actual == expected


def check_logits_of_quantised_layers(ref: HFReference, _: Path) -> None:
    assert_logits_equal_torchs(ref.folder, ref.head, "nf4", True)


def check_an_adapter_equals_pefts(ref: HFReference, folder: Path) -> None:
    check_adapter(ref, LoRA(rank=3, alpha=6), folder)


def check_packed_documents_equal_separate_ones(ref: HFReference, _: Path) -> None:
    """The separate documents run through the compiled `loss_and_gradients`."""
    first, second = np.split(np.random.default_rng(3).integers(4, 37, 9), [5])
    ids = np.stack([np.concatenate([document, second, [ref.pad] * 2]) for document in (first, first[::-1])])
    packed = {"input_ids": ids, "attention_mask": np.ones_like(ids),
              "position_ids": np.array([[0, 1, 2, 3, 4, 0, 1, 2, 3, 0, 1]] * 2),
              "segment_ids": np.array([[1] * 5 + [2] * 4 + [0] * 2] * 2)}
    alone = {name: np.zeros_like(value) for name, value in ref.batch().items()}
    alone["attention_mask"][:] = np.arange(9) < [[5], [4], [5], [4]]
    alone["input_ids"][:] = ref.pad
    alone["input_ids"][::2, :5], alone["input_ids"][1::2, :4] = first, second
    together, changed = np.asarray(jax.jit(lambda batch: ref.net.scores(ref.params, batch))(packed))
    (_, apart), _ = ref.loss_and_gradients(ref.params, alone, labels_of(alone))
    for actual, expected in ((together[:5], apart[0, :5]), (together[5:9], apart[1, :4])):
        assert np.abs(actual - expected).max() <= 1e-5 * np.abs(expected).max()
    assert np.array_equal(changed[5:9], together[5:9])


def check_greedy_tokens_equal_transformers(ref: HFReference, _: Path) -> None:
    prompts, settings = prompts_of(ref), Generation(max_new_tokens=14)
    answers = generate.generate(ref.net, ref.params, prompts, settings, EOS, pad=0)
    assert answers == [generate_on_torch(ref, prompt, settings) for prompt in prompts]
    assert any(answers)


def check_a_mesh_computes_the_gradients_of_one_device(ref: HFReference, _: Path) -> None:
    """Six devices split matrices in two and rows in three."""
    labels = labels_of(ref.batch())
    batch = {name: value[None].astype(np.int32) for name, value in ref.batch().items()}  # of one rank

    def gradients_of(params, batch):
        batch = {name: value[0] for name, value in batch.items()}
        return (jax.grad(lambda p: our_loss(ref.net, p, batch, labels)[0])(params),)

    mesh = ShardedMesh(fsdp=1, sequence=3, tensor=2, devices=jax.devices()[:6])
    placed = mesh.put_state(ref.params)
    assert any(not leaf.sharding.is_fully_replicated for leaf in jax.tree.leaves(placed["layers"]))
    step = mesh.compile(gradients_of, ("state", "batch"), ("state",))
    actual = flatten(mesh.fetch_state(step(placed, mesh.put_batch(batch))[0]))
    expected = flatten(ref.outputs[2])
    largest = max(np.abs(leaf).max() for leaf in expected.values())
    for path, leaf in expected.items():
        scale = max(np.abs(leaf).max(), 1e-3 * largest)
        assert np.abs(actual[path] - leaf).max() <= 1e-4 * scale, path


# Checks per feature; each takes the reference and an empty folder.
CHECKS: dict[str, list[Callable[[HFReference, Path], None]]] = {
    "all": [check_logits_loss_and_all_gradients, check_names_of_parameters, check_weight_decay_is_on_matrices,
            check_muon_trains_linear_layers_and_experts_but_not_embeddings_and_head,
            check_transformers_loads_the_same_model_from_a_saved_folder,
            check_initial_values_agree_on_both_engines_and_have_transformers_distribution,
            check_new_token_rows_are_the_same_on_both_engines, check_dropout_and_noise_on_embeddings,
            check_the_same_layers_are_quantised],
    "quantize": [check_logits_of_quantised_layers],
    "lora": [check_an_adapter_equals_pefts],
    "packing": [check_packed_documents_equal_separate_ones],
    "generation": [check_greedy_tokens_equal_transformers],
    "mesh": [check_a_mesh_computes_the_gradients_of_one_device],
}
