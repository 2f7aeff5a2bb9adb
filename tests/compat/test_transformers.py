"""Private API of transformers that the torch engine uses."""

import logging
from contextlib import nullcontext

import pytest
import torch
from torch import nn
from transformers import (
    DynamicCache,
    Gemma3Config,
    Gemma3ForConditionalGeneration,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    ModernBertConfig,
    ModernBertModel,
    PreTrainedConfig,
    PreTrainedModel,
    initialization,
)
from transformers.activations import NewGELUActivation
from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.models.gemma3 import modeling_gemma3
from transformers.utils.logging import set_tqdm_hook

from lmmods.core.lazy_array import LazyArray
from lmmods.torch_engine.compat import transformers as compat
from lmmods.torch_engine.nn.building import compile_layers, fuse_activations
from tests.compat.contract import fix
from tests.vision_models import SIGLIP, TEXT


@pytest.fixture(scope="module")
def llama():
    torch.manual_seed(0)
    return LlamaForCausalLM(LlamaConfig(vocab_size=11, hidden_size=8, intermediate_size=8, num_hidden_layers=1,
                                        num_attention_heads=2)).eval()


def test_the_attention_implementation_is_known_and_can_be_changed(llama):
    llama.set_attn_implementation("sdpa")
    assert compat.attention_name(llama) == "sdpa", fix("transformers", compat.attention_name)
    llama.set_attn_implementation("eager")
    assert compat.attention_name(llama) == "eager", fix("transformers", compat.attention_name)
    assert compat.can_change_attention(llama) is True, fix("transformers", compat.can_change_attention)


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_gemmas_masks_of_packed_documents_are_those_of_each_document(attention):
    text = {**TEXT, "vocab_size": 8, "sliding_window": 3}
    model = Gemma3ForConditionalGeneration(Gemma3Config(text_config=text, vision_config=SIGLIP, mm_tokens_per_image=4))
    model.set_attn_implementation(attention)
    # Documents end and start with an image, and have more tokens than the window.
    is_image = torch.tensor([[0, 1, 1, 1, 1, 1, 1, 1, 0, 0, 0, 0, 1, 1, 1, 0],
                             [1, 1, 0, 0, 1, 1, 1, 1, 1, 0, 0, 0, 0, 0, 0, 0]]) > 0
    segments = torch.tensor([[1] * 5 + [2] * 11, [1] * 2 + [2] * 12 + [0] * 2])
    masks = compat.masks_of_documents(model, is_image, segments)
    hidden = torch.ones(2, 1, 16, 16, dtype=torch.bool)
    for row, start, end in ((0, 0, 5), (0, 5, 16), (1, 0, 2), (1, 2, 14)):
        expected = modeling_gemma3.create_masks_for_vision_model(
            model.config.text_config, torch.zeros(1, end - start, 1), None, None, None,
            modeling_gemma3.get_block_sequence_ids_for_mask(is_image[row:row + 1, start:end].long()))
        for name, mask in expected.items():
            assert torch.equal(masks[name][row, :, start:end, start:end], mask[0]), fix(
                "transformers", compat.masks_of_documents)
        hidden[row, :, start:end, start:end] = False
    hidden[1, :, 14:, 14:] = False  # padding
    for mask in masks.values():
        values = mask[hidden].unique().tolist()
        assert values == [torch.finfo(torch.float32).min if attention == "eager" else False]


def test_gelu_of_gpt2_equals_that_of_torch():
    x = torch.linspace(-4, 4, 99)
    assert torch.allclose(NewGELUActivation()(x), nn.GELU(approximate="tanh")(x), atol=1e-6), fix(
        "transformers", fuse_activations)
    model = GPT2LMHeadModel(GPT2Config(vocab_size=11, n_embd=8, n_layer=1, n_head=2))
    assert any(type(part) is NewGELUActivation for part in model.modules()), fix("transformers", fuse_activations)


def test_transformer_layers_have_a_common_class(llama):
    assert sum(isinstance(part, GradientCheckpointingLayer) for part in llama.modules()) == 1, fix(
        "transformers", compile_layers)


def test_a_preallocated_cache_equals_a_dynamic_cache():
    """Same keys, values and lengths as in transformers' layers, after dropping and repeating rows."""
    states = torch.randn(2, 4, 2, 80, 4)  # keys and values of up to 4 rows and 80 tokens
    preallocated, dynamic = DynamicCache(), DynamicCache()
    assert not compat.has_separable_rows(preallocated), fix("transformers", compat.has_separable_rows)  # no layers yet
    preallocated.layers, dynamic.layers = [DynamicLayer(), DynamicSlidingWindowLayer(5)], [DynamicLayer()]
    assert compat.has_separable_rows(preallocated), fix("transformers", compat.has_separable_rows)
    compat.preallocate_cache(preallocated)
    assert [type(layer) for layer in preallocated.layers] == [compat.PreallocatedLayer, DynamicSlidingWindowLayer]
    for rows, step in (([0, 1, 2], 7), ([2, 2, 0, 1], 1), ([1, 3], 80), ([0, 1], 3)):
        for cache in (preallocated, dynamic):
            cache.reorder_cache(torch.tensor(rows))
        actual, expected = (cache.update(*states[:, :len(rows), :, :step], 0) for cache in (preallocated, dynamic))
        assert all(map(torch.equal, actual, expected)), fix("transformers", compat.preallocate_cache)
        assert preallocated.get_seq_length() == dynamic.get_seq_length()


def test_a_cache_of_fixed_size_equals_a_dynamic_cache():
    """Same keys and values after dropping rows and in new columns; hidden columns are zeros."""
    states = torch.randn(2, 3, 2, 80, 4)
    fixed, dynamic = DynamicCache(), DynamicCache()
    fixed.layers, dynamic.layers = [DynamicLayer()], [DynamicLayer()]
    assert compat.has_whole_layers(fixed), fix("transformers", compat.has_whole_layers)
    for cache in (fixed, dynamic):
        cache.update(*states[..., :7, :], 0)
    column = torch.tensor([7])
    fixed.layers = [compat.FixedLayer(layer, 7, 12, column) for layer in fixed.layers]
    assert not compat.has_whole_layers(fixed), fix("transformers", compat.has_whole_layers)
    for rows in ([0, 1, 2], [2, 0]):
        for cache in (fixed, dynamic):
            cache.reorder_cache(torch.tensor(rows))
        actual, expected = (cache.update(*states[:, :len(rows), :, column], 0) for cache in (fixed, dynamic))
        column += 1
        assert all(torch.equal(a[:, :, :column], b) and not a[:, :, column:].any() for a, b in
                   zip(actual, expected, strict=True)), fix("transformers", compat.FixedLayer)


def test_a_model_tells_whether_its_steps_can_be_compiled(llama):
    assert compat.can_compile_steps(llama) is True, fix("transformers", compat.can_compile_steps)


def test_experts_may_use_another_implementation_when_decoding(llama):
    with compat.decoding_experts(llama):
        pass


class Plain(PreTrainedModel):
    """A model with a part that its `_init_weights` skips."""

    config_class = PreTrainedConfig
    _no_split_modules = []

    def __init__(self, config):
        super().__init__(config)
        self.first, self.second = nn.Linear(3, 3), nn.Bilinear(3, 3, 3)
        self.post_init()

    @torch.no_grad()
    def _init_weights(self, module):
        if isinstance(module, nn.Linear):
            initialization.constant_(module.weight, 7.0)


def test_models_can_be_made_without_initial_weights():
    with compat.skip_initial_weights():
        model = Plain(PreTrainedConfig())
        assert not (model.first.weight == 7).any(), fix("transformers", compat.skip_initial_weights)
    before = model.second.weight.clone()
    model.init_weights()
    assert (model.first.weight == 7).all() and torch.equal(model.second.weight, before), fix(
        "transformers", compat.skip_initial_weights)
    assert (Plain(PreTrainedConfig()).first.weight == 7).all()


def test_a_callback_runs_before_each_module_is_initialised():
    with compat.skip_initial_weights():
        model = Plain(PreTrainedConfig())
    calls = []
    with compat.before_each_module(lambda module: calls.append((module, bool((model.first.weight == 7).any())))):
        model.init_weights()
    assert calls == [(model.first, False), (model.second, True), (model, True)], fix(
        "transformers", compat.before_each_module)


def test_truncated_normal_initialisation_can_be_replaced():
    config = ModernBertConfig(vocab_size=11, hidden_size=8, intermediate_size=8, num_hidden_layers=1,
                              num_attention_heads=2, pad_token_id=0)
    with compat.skip_initial_weights():
        model = ModernBertModel(config)
    embedding, calls = model.embeddings.tok_embeddings.weight, {}
    with compat.replace_truncated_normals(lambda tensor, *numbers: calls.update({id(tensor): numbers})):
        model.layers[0].mlp.Wo.weight._is_hf_initialized = True
        model.init_weights()
    assert calls[id(embedding)] == (0.0, 0.02, 2.0) and len(calls) == 4, fix(
        "transformers", compat.replace_truncated_normals)


def test_initialisation_of_missing_weights_can_be_wrapped(tmp_path):
    model = Plain(PreTrainedConfig())
    model.save_pretrained(tmp_path, state_dict={"first.bias": torch.full((3,), 2.0)})
    weights = []

    def start(model, initialize):
        with torch.no_grad():  # uninitialised memory
            model.first.weight.zero_()
        initialize()
        weights.append((model.first.weight.clone(), model.first.bias.clone()))

    with compat.wrap_missing_weights(start):
        Plain.from_pretrained(tmp_path)
    assert len(weights) == 1 and (weights[0][0] == 7).all() and (weights[0][1] == 2).all(), fix(
        "transformers", compat.wrap_missing_weights)
    Plain.from_pretrained(tmp_path)
    assert len(weights) == 1


def test_the_load_report_is_printed_only_with_an_error(llama, tmp_path, caplog):
    """The progress bar is hidden, too."""
    logger = logging.getLogger("transformers.modeling_utils")
    llama.model.save_pretrained(tmp_path)  # without a head
    logger.addHandler(caplog.handler)
    try:
        bars = []
        previous_hook = set_tqdm_hook(lambda bar, args, kwargs: bars.append(kwargs) or bar(*args, **kwargs))
        LlamaForCausalLM.from_pretrained(tmp_path)
        assert "LOAD REPORT" in caplog.text and bars, fix("transformers", compat.quiet_loading)
        caplog.clear()
        with compat.quiet_loading():
            _, info = LlamaForCausalLM.from_pretrained(tmp_path, output_loading_info=True)
        assert "LOAD REPORT" not in caplog.text and list(info["missing_keys"]) == ["lm_head.weight"] and len(bars) == 1
        with pytest.raises(OSError, match="disk"), compat.quiet_loading():
            LlamaForCausalLM.from_pretrained(tmp_path)
            raise OSError("disk")
        assert "LOAD REPORT" in caplog.text
    finally:
        set_tqdm_hook(previous_hook)
        logger.removeHandler(caplog.handler)


def test_weights_can_be_loaded_lazily(llama, tmp_path):
    llama.save_pretrained(tmp_path)
    weights, requests = llama.state_dict(), []

    def defer(value, array):
        requests.append((type(value), tuple(value.shape)))
        return nn.Parameter(value.read_rows(slice(None)).mul(2))

    with compat.defer_weights(defer, lambda param: param, nullcontext):
        model = LlamaForCausalLM.from_pretrained(tmp_path)
    assert requests and {cls for cls, _ in requests} == {LazyArray}, fix("transformers", compat.defer_weights)
    assert all(torch.equal(value, 2 * weights[name]) for name, value in model.state_dict().items())
    assert torch.equal(LlamaForCausalLM.from_pretrained(tmp_path).lm_head.weight, llama.lm_head.weight)
