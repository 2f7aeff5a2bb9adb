"""Loading: dtypes, quantisation, embeddings, adapters, and workarounds for library bugs."""

import shutil
from types import SimpleNamespace

import pytest
import torch
from peft import PeftModel
from peft.tuners.lora import LoraLayer
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoModelForQuestionAnswering, AutoTokenizer

from lmmods.core.adapters import adapted_layers
from lmmods.core.errors import UserError
from lmmods.core.settings import LoRA
from lmmods.recipe.tasks.base import TaskFields
from lmmods.torch_engine.nn import loading, lora, summary
from lmmods.torch_engine.nn.attention import CPU
from lmmods.torch_engine.nn.building import build_network, enable_checkpointing
from lmmods.torch_engine.nn.export import save


@pytest.fixture
def llama_folder(llama_of):
    """Two layers, which a test can tell apart."""
    return llama_of(2)


def load(folder, **options):
    return loading.load_pretrained(AutoModelForCausalLM, str(folder), **options)


def ids(seed: int = 0) -> torch.Tensor:
    return torch.randint(3, 300, (2, 16), generator=torch.Generator().manual_seed(seed))


def test_models_are_loaded_in_training_mode_with_their_dropout(llama_folder):
    """from_pretrained returns models in eval mode, which Lightning keeps since 2.2."""
    model = load(llama_folder)
    assert all(module.training for module in model.modules())
    torch.manual_seed(0)
    assert not torch.equal(model(ids()).logits, model(ids()).logits)


def test_a_question_answering_model_loads_the_base_of_a_causal_model(llama_folder, tmp_path):
    """transformers expects another name for the base, and would start from random weights."""
    causal = load(llama_folder)
    for quantize in (None, "nf4"):
        model = loading.load_pretrained(AutoModelForQuestionAnswering, str(llama_folder), quantize=quantize,
                                        frozen=quantize is not None)
        assert torch.equal(model.transformer.embed_tokens.weight, causal.model.embed_tokens.weight)
        if quantize is None:
            assert all(torch.equal(param, causal.model.get_parameter(name))
                       for name, param in model.transformer.named_parameters())
            save(model, tmp_path, adapter_only=False, dtype=None, writes=True)
            reloaded = AutoModelForQuestionAnswering.from_pretrained(tmp_path)
            assert all(torch.equal(param, model.get_parameter(name)) for name, param in reloaded.named_parameters())
            loaded = loading.load_pretrained(AutoModelForQuestionAnswering, str(tmp_path))
            assert torch.equal(loaded.qa_outputs.weight, model.qa_outputs.weight)


def test_a_folder_that_lacks_base_weights_is_rejected(llama_folder, tmp_path):
    shutil.copytree(llama_folder, tmp_path / "model")
    file = tmp_path / "model" / "model.safetensors"
    weights = load_file(file)
    del weights["model.layers.1.mlp.up_proj.weight"]
    save_file(weights, file, {"format": "pt"})
    with pytest.raises(UserError, match="lacks 1 weights of LlamaForCausalLM, for example model.layers.1.mlp.up_proj"):
        load(tmp_path / "model")


@pytest.mark.parametrize(("precision", "frozen", "matrix", "norm"), [
    ("32-true", True, torch.float32, torch.float32),
    ("bf16-mixed", True, torch.bfloat16, torch.float32),
    ("bf16-mixed", False, torch.float32, torch.float32),
    ("bf16-true", True, torch.bfloat16, torch.bfloat16),
    ("16-mixed", True, torch.float16, torch.float32),
])
def test_dtypes_follow_the_precision(llama_folder, precision, frozen, matrix, norm):
    model = load(llama_folder, precision=precision, frozen=frozen)
    assert model.model.embed_tokens.weight.dtype == model.lm_head.weight.dtype == matrix
    assert model.model.norm.weight.dtype == model.model.layers[0].input_layernorm.weight.dtype == norm


@pytest.mark.parametrize(("quantize", "double", "max_error"), [
    ("nf4", True, 0.13), ("nf4", False, 0.13), ("fp4", True, 0.17), ("int8", True, 0.02)])
def test_quantised_weights_approximate_the_originals(llama_folder, quantize, double, max_error):
    plain, model = load(llama_folder), load(llama_folder, quantize=quantize, double_quant=double, frozen=True)
    original, quantised = plain.model.layers[0].mlp.up_proj, model.model.layers[0].mlp.up_proj
    assert type(quantised).__name__ == ("Linear8bitLt" if quantize == "int8" else "Linear4bit")
    assert type(model.lm_head) is torch.nn.Linear
    eye = torch.eye(original.in_features)
    error = (quantised(eye) - original(eye)).norm() / original(eye).norm()
    assert 0 < error < max_error
    sizes = summary.summarize(model)
    assert sizes.num_params == sum(p.numel() for p in plain.parameters())
    assert sizes.dtypes[quantize] == sum(m.weight.numel() for n, m in plain.named_modules()
                                         if isinstance(m, torch.nn.Linear) and n != "lm_head")


def test_double_quantisation_follows_its_option(llama_folder):
    for double in (True, False):
        model = load(llama_folder, quantize="nf4", double_quant=double, frozen=True)
        assert model.model.layers[0].mlp.up_proj.weight.quant_state.nested is double


def test_evaluation_does_not_change_the_training_of_a_4bit_model(llama_folder):
    """On CPUs with AVX512-BF16, bitsandbytes 0.50 repacks weights in an eval forward and then trains wrongly."""

    def train(evaluate: bool) -> list[float]:
        torch.manual_seed(0)
        model = load(llama_folder, quantize="nf4", frozen=True, precision="bf16-mixed")
        model = lora.add_lora(model, LoRA(rank=4, alpha=8), [], torch.float32)
        optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)
        losses_by_step = []
        for step in range(6):
            if evaluate and step == 3:
                model.eval()
                with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
                    model(ids(9))
                model.train()
            torch.manual_seed(step)
            with torch.autocast("cpu", torch.bfloat16):
                loss = model(ids(), labels=ids()).loss
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses_by_step.append(loss.item())
        return losses_by_step

    assert train(evaluate=True) == train(evaluate=False)


def test_new_embedding_rows_are_the_mean_of_the_old_rows(llama_folder):
    model = load(llama_folder)
    old = model.model.embed_tokens.weight.data.clone()
    head = model.lm_head.weight.data.clone()
    assert loading.resize_embeddings(model, len(old)) == []
    assert loading.resize_embeddings(model, len(old) + 2) == [len(old), len(old) + 1]
    assert model.config.vocab_size == len(old) + 2
    for matrix, expected in ((model.model.embed_tokens.weight, old), (model.lm_head.weight, head)):
        torch.testing.assert_close(matrix[:-2], expected, rtol=0, atol=0)
        torch.testing.assert_close(matrix[-2:], expected.mean(0).expand(2, -1))


def test_new_tokens_train_and_are_saved_with_the_adapter(llama_folder, tmp_path):
    def build():
        model = load(llama_folder, frozen=True)
        return model, loading.resize_embeddings(model, model.config.vocab_size + 1)

    model, new = build()
    tables = [table.weight[new].clone() for table in (model.model.embed_tokens, model.lm_head)]  # not tied
    model = lora.add_lora(model, LoRA(rank=4), new, torch.float32)
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=1.0)
    tokens = torch.tensor([[5, *new, 7, 8]])
    model(tokens, labels=tokens).loss.backward()
    optimizer.step()
    model.eval()
    for table, before in zip((model.get_input_embeddings(), model.get_output_embeddings()), tables, strict=True):
        assert not torch.allclose(table.weight[new], before)
    model.save_pretrained(tmp_path, save_embedding_layers=False)
    reloaded = PeftModel.from_pretrained(build()[0], tmp_path).eval()
    torch.testing.assert_close(reloaded(tokens).logits, model(tokens).logits)


def test_gradient_checkpointing_trains_every_adapter(llama_folder):
    model = load(llama_folder, quantize="nf4", frozen=True)
    model = lora.add_lora(model, LoRA(rank=4), [], torch.float32)
    enable_checkpointing(model)
    calls = []
    model.base_model.model.model.layers[0].input_layernorm.register_forward_hook(lambda *_: calls.append(1))
    model(ids(), labels=ids()).loss.backward()
    assert len(calls) == 2  # forward and recomputation
    grads = {name: p.grad for name, p in model.named_parameters() if "lora_B" in name}
    assert len(grads) == 14 and all(grad is not None and grad.abs().sum() > 0 for grad in grads.values())


@pytest.mark.parametrize(("settings", "key"), [
    (LoRA(targets=["q_prj"]), "lora.targets: 'q_prj'"),
    (LoRA(modules_to_save=["head"]), "lora.modules_to_save: 'head'"),
])
def test_targets_without_a_match_are_rejected_with_candidates(llama_folder, settings, key):
    with pytest.raises(UserError, match=f"{key} matches no module.*Candidates: .*q_proj"):
        lora.add_lora(load(llama_folder, frozen=True), settings, [], torch.float32)


@pytest.mark.parametrize(("quantize", "name"), [
    ("nf4", "self_attn.q_proj"), ("int8", "self_attn.q_proj"), ("nf4", "mlp")])
def test_full_fine_tuning_of_a_quantised_layer_is_rejected(llama_folder, quantize, name):
    """By its own name and by that of a module that contains it."""
    with pytest.raises(UserError, match=rf"lora.modules_to_save: model.layers.0.{name} is stored in"):
        lora.add_lora(load(llama_folder, quantize=quantize, frozen=True),
                      LoRA(modules_to_save=[name], targets="v_proj"), [], torch.float32)


@pytest.mark.parametrize("targets", ["all-linear", ["all-linear", "q_proj"], ["q_proj", "layers.1.mlp.up_proj"],
                                     ["lm_head", "v_proj"], "proj", "embed_tokens"])
def test_targets_select_the_same_layers_as_peft(llama_folder, targets):
    """`adapted_layers`, which JAX selects by and torch checks: a target matches the end of a name after a dot."""
    settings, model = LoRA(rank=2, targets=targets), load(llama_folder, frozen=True)
    linear = [name for name, module in model.named_modules()
              if isinstance(module, torch.nn.Linear) and name != "lm_head"]
    if targets in ("proj", "embed_tokens") or "lm_head" in targets:
        with pytest.raises(UserError, match="lora.targets: .* matches no module"):
            adapted_layers(settings, linear)
        return
    wrapped = lora.add_lora(model, settings, [], torch.float32)
    adapted = {name.removeprefix("base_model.model.") for name, module in wrapped.named_modules()
               if isinstance(module, LoraLayer)}
    assert adapted == adapted_layers(settings, linear)


def test_all_linear_excludes_the_head_and_only_adapters_train(llama_folder):
    model = lora.add_lora(load(llama_folder, frozen=True), LoRA(rank=4, dora=True, rslora=True), [], torch.float32)
    trained = [name for name, p in model.named_parameters() if p.requires_grad]
    assert all("lora_" in name for name in trained) and not any("lm_head" in name for name in trained)
    assert sum("lora_A" in name for name in trained) == 14
    assert sum("magnitude" in name for name in trained) == 14


def test_a_saved_adapter_is_continued_with_the_same_weights(llama_folder, tmp_path):
    model = lora.add_lora(load(llama_folder, frozen=True), LoRA(rank=4, modules_to_save=["lm_head"]), [],
                             torch.float32)
    for name, param in model.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(param)
    model.save_pretrained(tmp_path)
    continued = lora.continue_adapter(load(llama_folder, frozen=True), str(tmp_path), torch.float32)
    torch.testing.assert_close(continued.eval()(ids()).logits, model.eval()(ids()).logits)
    assert ({n for n, p in continued.named_parameters() if p.requires_grad}
            == {n for n, p in model.named_parameters() if p.requires_grad})


def test_a_missing_or_invalid_folder_is_rejected_by_name(llama_folder, tmp_path):
    with pytest.raises(UserError, match="model.pretrained: there is no folder 'no/such'"):
        load("no/such")
    (tmp_path / "empty").mkdir()
    with pytest.raises(UserError, match="has no config.json"):
        load(tmp_path / "empty")
    (tmp_path / "config.json").write_text((llama_folder / "config.json").read_text())
    with pytest.raises(UserError, match="model.pretrained: cannot load"):
        load(tmp_path)
    with pytest.raises(UserError, match="model.adapter: .* has no adapter_config.json"):
        lora.continue_adapter(load(llama_folder), str(tmp_path), torch.float32)


def test_all_linear_adapts_conv1d_layers():
    from transformers import GPT2Config, GPT2LMHeadModel

    model = GPT2LMHeadModel(GPT2Config(vocab_size=50, n_embd=32, n_layer=1, n_head=2, n_positions=32))
    model = lora.add_lora(model, LoRA(rank=2), [], torch.float32)
    assert sum("lora_A" in name for name, _ in model.named_parameters()) == 4


@pytest.mark.parametrize("overrides", [
    {"rope_parameters": {"rope_type": "linear", "rope_theta": 10000.0, "factor": 4.0}},
    {"rope_parameters": {"rope_type": "linear", "factor": 4.0}}, {"rope_scaling": {"type": "linear", "factor": 4.0}},
], ids=["complete", "without_theta", "before_transformers_5"])
def test_an_override_scales_rotary_positions(llama_folder, overrides):
    from transformers import AutoConfig, LlamaForCausalLM

    from lmmods.core.hf_config import load_config

    config = AutoConfig.from_pretrained(llama_folder)
    config.rope_parameters = {"rope_type": "linear", "rope_theta": config.rope_parameters["rope_theta"], "factor": 4.0}
    ids = torch.arange(40).unsqueeze(0)
    logits = [LlamaForCausalLM.from_pretrained(llama_folder, config=model_config).eval()(ids).logits
              for model_config in (config, load_config(str(llama_folder), overrides))]
    torch.testing.assert_close(*logits)


@pytest.mark.parametrize(("device", "attention"), [("cpu", CPU), ("cuda", "sdpa")])
def test_float32_attention_is_used_on_cpus_only(llama_folder, device, attention):
    """Depends on the device that will train; modules are still on the CPU when the network is built."""
    data = SimpleNamespace(network_fields={}, tokenizer=AutoTokenizer.from_pretrained(llama_folder))
    model = build_network(TaskFields(pretrained=str(llama_folder)), "AutoModelForCausalLM", "CAUSAL_LM", data,
                          precision="bf16-mixed", device=torch.device(device), seed=0)
    assert model.config._attn_implementation == attention
