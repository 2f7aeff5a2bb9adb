"""Adapters compared with PEFT: logits, gradients, names, folders in both directions; and errors."""

import copy
import json
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
import transformers
from hf_reference import labels_of, of_real, torch_inputs
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file
from tested import WITH_EXPERTS

from jax_engine.distributed.tree import flatten, merge
from jax_engine.models import hub, loading
from jax_engine.models import lora as adapters
from jax_engine.models.dropout import Seeds
from jax_engine.models.quant import Quantized
from jax_engine.tasks.sft import SFT
from lmmods.core.dropout import token_seeds
from lmmods.core.errors import UserError
from lmmods.core.experts import Mixture
from lmmods.core.settings import LoRA
from lmmods.torch_engine.nn.lm_head import LMHead, causal_loss
from lmmods.torch_engine.nn.loading import load_pretrained
from lmmods.torch_engine.nn.lora import add_lora
from tests.closeness import assert_as_close, gradients, in_both

TASKS = {"causal": "CAUSAL_LM", "masked": None, "qa": "QUESTION_ANS", "sequence": "SEQ_CLS", "token": "TOKEN_CLS",
         "choice": None}

OTHER_LINEARS = ["gate_proj", "up_proj", "down_proj", "per_layer_input_gate", "per_layer_projection",
                 "per_layer_model_projection"]


def add_random_adapter(ref, lora):
    """Return PEFT's model with random adapters, the JAX network and its parameters with the same adapters."""
    targets = lora.targets
    if ref.config.model_type in WITH_EXPERTS and targets == "all-linear":
        # PEFT's own "all-linear" includes experts and routers, which have no adapters here.
        targets = ["q_proj", "k_proj", "v_proj", "o_proj"]
        targets += OTHER_LINEARS if ref.config.model_type == "gemma4_text" else []
    config = LoraConfig(r=lora.rank, lora_alpha=lora.alpha, lora_dropout=lora.dropout, target_modules=targets,
                        modules_to_save=copy.copy(lora.modules_to_save),
                        target_parameters=copy.copy(lora.target_parameters), use_dora=lora.dora,
                        use_rslora=lora.rslora, task_type=TASKS[ref.head])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = get_peft_model(copy.deepcopy(ref.torch), config).eval()
    torch.manual_seed(3)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.requires_grad and "magnitude" not in name:
                parameter.copy_(torch.randn_like(parameter) * 0.2)
            elif parameter.requires_grad:
                parameter.mul_(1 + 0.2 * torch.randn_like(parameter))
    net = hub.network(ref.net.config, ref.head, lora=lora)
    fresh = loading.load(net, str(ref.folder))
    trained = net.from_torch({name: value.detach().numpy() for name, value in model.named_parameters()
                              if value.requires_grad})
    _, frozen = net.split(fresh)
    return model, net, merge(trained, frozen)


def logits_of(model, batch, head="causal"):
    # PEFT's wrapper for question answering drops token_type_ids; the wrapped model does not.
    network = model.base_model if isinstance(model, PeftModel) else model
    output = network(**torch_inputs(batch, head))
    return output.logits if "logits" in output else torch.stack([output.start_logits, output.end_logits], -1)


EXPERTS = ["experts.down_proj", "mlp.experts.gate_up_proj"]
CASES = [
    ("llama", "causal", LoRA(rank=4, alpha=8, rslora=True, targets=["q_proj", "mlp.down_proj"])),
    ("llama", "causal", LoRA(rank=4, alpha=8, dora=True)),
    ("llama", "causal", LoRA(rank=2, alpha=8, modules_to_save=["lm_head", "embed_tokens", "input_layernorm"])),
    ("gpt2", "causal", LoRA(rank=4, alpha=8, dora=True)),
    ("gpt2", "causal", LoRA(rank=4, alpha=8, targets=["c_attn"], modules_to_save=["lm_head"])),
    ("gpt2", "causal", LoRA(rank=4, alpha=8, targets=["c_fc"], modules_to_save=["wte"])),
    ("bert", "masked", LoRA(rank=4, alpha=16, dora=True, rslora=True)),
    ("bert", "qa", LoRA(rank=4, alpha=16, targets=["query", "attention.output.dense"])),
    ("llama", "sequence", LoRA(rank=4, alpha=16)),
    ("llama", "token", LoRA(rank=4, alpha=16, modules_to_save=["score"])),
    ("bert", "sequence", LoRA(rank=4, alpha=16, targets=["query", "dense"], modules_to_save=["pooler"])),
    ("bert", "choice", LoRA(rank=4, alpha=16, targets=["value"], modules_to_save=["pooler", "classifier"])),
    ("albert", "sequence", LoRA(rank=4, alpha=16, targets=["value"], modules_to_save=["albert.pooler"])),
    ("distilbert", "sequence", LoRA(rank=4, alpha=16, modules_to_save=["pre_classifier"])),
    ("distilbert", "token", LoRA(rank=4, alpha=16, targets=["q_lin"])),
    ("roberta", "sequence", LoRA(rank=4, alpha=16, targets=["query", "dense"])),
    ("deberta-v2", "sequence", LoRA(rank=4, alpha=16, modules_to_save=["pooler", "rel_embeddings"])),
    ("electra", "choice", LoRA(rank=4, alpha=16, targets=["query"],
                               modules_to_save=["sequence_summary", "classifier"])),
    ("modernbert", "token", LoRA(rank=4, alpha=16, targets=["Wqkv"], modules_to_save=["head"])),
    ("modernbert", "qa", LoRA(rank=4, alpha=16, targets=["Wqkv", "head.dense"], modules_to_save=["classifier"])),
]
EXPERT_CASES = [
    pytest.param("mixtral", "causal", LoRA(rank=2, alpha=8, modules_to_save=["mlp.gate", "experts"]),
                 id="mixtral-causal-full-experts", marks=pytest.mark.slow),
    pytest.param("mixtral", "causal", LoRA(rank=2, alpha=8, rslora=True, target_parameters=EXPERTS),
                 id="mixtral-causal-experts"),
    pytest.param("gemma4_text", "causal", LoRA(rank=2, alpha=8, targets=["q_proj"],
                                               modules_to_save=["router", "experts"]),
                 id="gemma4_text-causal-full-experts", marks=pytest.mark.slow),
    pytest.param("gemma4_text", "causal", LoRA(rank=2, alpha=8, targets=["q_proj", "router.proj"],
                                               target_parameters=["experts.gate_up_proj"]),
                 id="gemma4_text-causal-router", marks=pytest.mark.slow),
    pytest.param("gpt_oss", "causal", LoRA(rank=2, alpha=8, target_parameters=EXPERTS[:1]),
                 id="gpt_oss-causal-experts", marks=pytest.mark.slow)]


def check_adapter(ref, lora, folder):
    model, net, params = add_random_adapter(ref, lora)
    batch = ref.batch()
    trained, frozen = net.split(params)

    def loss(trained):
        logits = of_real(net.scores(merge(trained, frozen), batch), batch, ref.head)
        return jnp.tanh(logits).sum(), logits

    def run_peft(model):
        logits = of_real(logits_of(model, batch, ref.head), batch, ref.head)
        logits = logits.reshape(-1, 1) if ref.head == "choice" else logits
        return logits, gradients(model, logits.tanh().sum())

    (_, logits), grads = jax.jit(jax.value_and_grad(loss, has_aux=True))(trained)
    expected, exact = in_both(run_peft, model)
    named = net.to_torch(grads)
    assert list(named) == [key for key, parameter in model.named_parameters() if parameter.requires_grad]
    for triple in zip((np.asarray(logits), named), expected, exact, strict=True):
        assert_as_close(*triple, terms=1024)  # up to three layers, forward and backward
    frozen_names = {key for key, p in model.named_parameters() if not p.requires_grad and "original_module" not in key}
    # A trained copy of a tied weight leaves the weight itself under the other name.
    assert frozen_names <= set(net.to_torch(frozen)) | {"base_model.model.transformer.wte.weight"}

    adapters.save_adapter(net, params, folder / "jax", base=str(ref.folder))
    model.save_pretrained(folder / "peft")
    by_jax = load_file(folder / "jax" / "adapter_model.safetensors")
    by_peft = load_file(folder / "peft" / "adapter_model.safetensors")
    assert by_jax.keys() == by_peft.keys() and all(torch.equal(by_jax[key], by_peft[key]) for key in by_jax)
    in_peft = PeftModel.from_pretrained(copy.deepcopy(ref.torch), folder / "jax").eval()
    assert torch.equal(logits_of(in_peft, batch, ref.head), logits_of(model, batch, ref.head))
    settings = adapters.adapter_settings(folder / "peft", ref.net)
    reloaded = hub.network(ref.net.config, ref.head, lora=settings)
    loaded = adapters.load_adapter(reloaded, folder / "peft")
    assert jax.tree.structure(loaded) == jax.tree.structure(trained)
    assert all(np.array_equal(a, b) for a, b in zip(jax.tree.leaves(loaded), jax.tree.leaves(trained)))


@pytest.mark.parametrize(("name", "head", "lora"), EXPERT_CASES + [
    pytest.param(*case, id=f"{case[0]}-{case[1]}-{index}") for index, case in enumerate(CASES)])
def test_logits_gradients_names_and_folders_equal_pefts(make_ref, name, head, lora, tmp_path):
    """`test_jax_families.py` checks adapters on all linear layers in every family."""
    check_adapter(make_ref(name, head), lora, tmp_path)


def test_a_new_adapter_changes_nothing_and_is_initialised_as_in_peft(make_ref):
    ref = make_ref("llama", "causal")
    batch = ref.batch()
    for lora in (LoRA(rank=64), LoRA(rank=64, dora=True)):
        net = hub.network(ref.net.config, "causal", lora=lora)
        params = loading.load(net, str(ref.folder), seed=1)
        plain = ref.net.logits(ref.params, ref.net.hidden(ref.params, batch))
        assert np.allclose(net.logits(params, net.hidden(params, batch)), plain, atol=1e-5)
        peft = dict(get_peft_model(copy.deepcopy(ref.torch), LoraConfig(
            r=64, target_modules="all-linear", use_dora=lora.dora)).named_parameters())
        for key, value in net.to_torch(net.split(params)[0]).items():
            expected = peft[key].detach().numpy()
            if "lora_A" in key:
                bound = 1 / np.sqrt(value.shape[1])
                assert np.abs(value).max() <= bound and np.abs(expected).max() <= bound
                assert abs(value.std() / expected.std() - 1) < 0.1 and abs(value.mean()) < 0.1 * bound
            else:
                assert np.allclose(value, expected, atol=1e-6), key
        same_seed, other_seed = loading.load(net, str(ref.folder), seed=1), loading.load(net, str(ref.folder), seed=2)
        q = ("layers", "attn", "q", "lora_A")
        assert np.array_equal(flatten(same_seed)[q], flatten(params)[q])
        assert not np.array_equal(flatten(other_seed)[q], flatten(params)[q])
        assert not np.array_equal(flatten(params)[q][0], flatten(params)[q][1])


@pytest.mark.slow
@pytest.mark.parametrize("dora", [False, True])
def test_only_the_adapters_input_has_dropout(make_ref, dora):
    """Averaged over many masks, the adapter's output is that without dropout; the base's output never changes."""
    ref = make_ref("llama", "causal")
    plain = LoRA(rank=4, alpha=16, targets=["q_proj"], dora=dora)
    _, net, params = add_random_adapter(ref, plain)
    dropped = hub.network(ref.net.config, "causal", lora=LoRA(rank=4, alpha=16, targets=["q_proj"], dora=dora,
                                                              dropout=0.25))
    from jax_engine.models.linear import Linear

    linear = {name: next(node for node in list_linears(network) if node.path == "layers.attn.q")
              for name, network in (("plain", net), ("dropped", dropped))}
    x = jnp.asarray(np.random.default_rng(0).normal(size=(1, 3, 24)), jnp.float32)
    weights = jax.tree.map(lambda leaf: leaf[0], params["layers"]["attn"]["q"])

    tokens = jnp.asarray(token_seeds(0, 0, np.arange(4000)[:, None], np.arange(3)).view(np.uint32))

    def apply(node, x, drops):
        from flax import nnx

        assert isinstance(node, Linear)
        seeds = Seeds(tokens[: len(x)], {"layers.attn.q.lora": jnp.uint32(1)}) if drops else None
        return nnx.merge(nnx.split(node)[0], weights)(x, seeds)

    exact = apply(linear["plain"], x, False)
    assert np.allclose(apply(linear["dropped"], x, False), exact)
    many = apply(linear["dropped"], jnp.repeat(x, 4000, 0), True)
    assert np.abs(many.mean(0) - exact[0]).max() < 0.1 * np.abs(exact).max()
    assert many.std(0).min() > 0
    without = {**weights, "lora_B": jnp.zeros_like(weights["lora_B"])}
    weights = without
    if not dora:
        assert np.allclose(apply(linear["dropped"], jnp.repeat(x, 4, 0), True),
                           x[0] @ weights["weight"].T, atol=1e-5)


def list_linears(network):
    from flax import nnx

    from jax_engine.models.architecture import LayerKind
    from jax_engine.models.linear import Linear
    from jax_engine.models.network import Block

    block = nnx.eval_shape(lambda: Block(network.arch, network.build, LayerKind()))
    return [node for _, node in nnx.iter_graph(block) if isinstance(node, Linear)]


def test_only_adapters_and_modules_to_save_train(make_ref):
    ref = make_ref("llama", "causal")
    net = hub.network(ref.net.config, "causal", lora=LoRA(rank=4, modules_to_save=["norm"]))
    params = loading.load(net, str(ref.folder))
    trained, frozen = net.split(params)
    assert {path[-1] for path in flatten(trained)} == {"lora_A", "lora_B", "weight"}
    assert [path for path in flatten(trained) if path[-1] == "weight"] == [("norm", "weight")]
    assert {path[-1] for path in flatten(frozen)} == {"weight", "bias"}
    joined = merge(trained, frozen)
    assert flatten(joined).keys() == flatten(params).keys()
    decays = flatten(net.decays(trained))
    assert all(decays[path] == (path[-1] in ("lora_A", "lora_B")) for path in decays)
    hub_folder_names = net.to_torch(params, plain=True)
    assert hub_folder_names.keys() == dict(ref.torch.named_parameters()).keys()


@pytest.mark.parametrize(("lora", "message"), [
    (LoRA(targets=["q_prj"]), "lora.targets: 'q_prj' matches no module of this model. Candidates: down_proj, gate"),
    (LoRA(targets=["lm_head"]), "lora.targets: 'lm_head' matches no module"),
    (LoRA(modules_to_save=["lm_had"]), "lora.modules_to_save: 'lm_had' matches no module"),
    (LoRA(targets=["layers.0.self_attn.q_proj"]), "some layers only"),
    (LoRA(modules_to_save=["o_proj"]), "o_proj is also among lora.targets"),
    (LoRA(target_parameters=EXPERTS), "this model has no stacked experts"),
])
def test_targets_that_do_not_match_are_errors(make_ref, lora, message):
    with pytest.raises(UserError, match=message):
        hub.network(make_ref("llama", "causal").net.config, "causal", lora=lora)


def test_unsupported_adapters_on_experts_are_errors_on_both_engines(make_ref):
    ref = make_ref("mixtral", "causal")
    for fields, message in (({"target_parameters": ["w1"]}, "'w1' matches no parameter .*: down_proj, gate_up_proj"),
                            ({"target_parameters": EXPERTS, "modules_to_save": ["experts"]}, "trains fully"),
                            ({"target_parameters": EXPERTS, "dropout": 0.1}, "lora.dropout is 0.1, but must be 0"),
                            ({"target_parameters": EXPERTS, "dora": True}, "lora.dora is true, but must be false")):
        for adapt in (lambda lora: hub.network(ref.net.config, "causal", lora=lora),
                      lambda lora: add_lora(ref.torch, lora, [], torch.float32)):
            with pytest.raises(UserError, match=message):
                adapt(LoRA(**fields))
    with pytest.raises(UserError, match="some layers only"):
        hub.network(ref.net.config, "causal", lora=LoRA(target_parameters=["layers.1.mlp.experts.down_proj"]))


def test_experts_with_adapters_on_a_quantised_base_train_alike_on_both_engines(make_ref, tmp_path):
    """Initial values, loss with expert balance, gradients; PEFT merges the adapter."""
    ref, lora = make_ref("mixtral", "causal"), LoRA(rank=2, target_parameters=EXPERTS)
    folder, batch = str(ref.folder), ref.batch()
    batch["labels"] = labels_of(batch)
    base = load_pretrained(transformers.AutoModelForCausalLM, folder, quantize="nf4", frozen=True)
    model = add_lora(base, lora, [], torch.float32, "CAUSAL_LM", seed=3).eval()
    bare, net = ref.net, hub.network(ref.net.config, "causal", lora=lora)
    params = adapters.add_adapter(net, loading.load(bare, folder, quantize="nf4"), 3)
    trained, frozen = net.split(params)
    peft = {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
    assert all(np.array_equal(value, peft[name].detach()) for name, value in net.to_torch(trained).items())
    assert isinstance(params["layers"]["attn"]["q"]["weight"], Quantized)
    random = np.random.default_rng(0)
    trained = jax.tree.map(lambda leaf: random.normal(size=leaf.shape).astype(np.float32) * 0.2, trained)
    with torch.no_grad():
        for name, value in net.to_torch(trained).items():
            peft[name].copy_(torch.tensor(value))

    task = SFT(pretrained=folder, balance_loss=0.3)
    task.network = net
    total, grads = jax.jit(jax.value_and_grad(
        lambda trained: task.batch_loss(merge(trained, frozen), batch, True, False).total))(trained)
    sums = causal_loss(model, LMHead.from_model(model), {key: torch.tensor(value) for key, value in batch.items()},
                       mixture=Mixture(5, 2), balance_loss=0.3)
    sums.total.backward()
    assert float(total) == pytest.approx(sums.total.item(), rel=1e-5)
    largest = max(float(parameter.grad.abs().max()) for parameter in peft.values())
    for name, gradient in net.to_torch(grads).items():
        scale = max(float(peft[name].grad.abs().max()), 1e-3 * largest)
        assert np.abs(gradient - peft[name].grad.numpy()).max() <= 1e-4 * scale, name

    adapters.save_adapter(net, trained, tmp_path, base=folder)
    plain = PeftModel.from_pretrained(copy.deepcopy(ref.torch), tmp_path).eval()
    expected = logits_of(plain, ref.batch())
    assert torch.allclose(logits_of(plain.merge_and_unload(safe_merge=True), ref.batch()), expected, atol=1e-5)


def test_a_tied_masked_head_cannot_train_separately(make_ref):
    with pytest.raises(UserError, match="one matrix"):
        hub.network(make_ref("bert", "masked").net.config, "masked", lora=LoRA(modules_to_save=["word_embeddings"]))


def test_adapters_that_do_not_fit_are_errors(make_ref, tmp_path):
    ref = make_ref("llama", "causal")
    lora = LoRA(rank=4, targets=["q_proj"])
    net = hub.network(ref.net.config, "causal", lora=lora)
    params = loading.load(net, str(ref.folder))
    with pytest.raises(UserError, match="no adapter_config.json"):
        adapters.adapter_settings(tmp_path, ref.net)
    adapters.save_adapter(net, params, tmp_path)
    assert adapters.adapter_settings(tmp_path, ref.net) == lora
    other = hub.network(ref.net.config, "causal", lora=LoRA(rank=4, targets=["k_proj"]))
    with pytest.raises(UserError, match="k_proj.lora_A.*Not expected.*q_proj.lora_A"):
        adapters.load_adapter(other, tmp_path)
    wider = hub.network(ref.net.config, "causal", lora=LoRA(rank=8, targets=["q_proj"]))
    with pytest.raises(UserError, match="expected"):
        adapters.load_adapter(wider, tmp_path)
    written = json.loads((tmp_path / "adapter_config.json").read_text())
    for change in ({"rank_pattern": {"q_proj": 8}}, {"bias": "all"}, {"peft_type": "IA3"},
                   {"target_modules": ".*q_proj"}):
        (tmp_path / "adapter_config.json").write_text(json.dumps(written | change))
        with pytest.raises(UserError, match=next(iter(change))):
            adapters.adapter_settings(tmp_path, ref.net)
