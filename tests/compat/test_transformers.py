"""What the torch engine needs of transformers beyond its documentation."""

import logging
from contextlib import nullcontext

import pytest
import torch
from torch import nn
from transformers import (
    DynamicCache,
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
from transformers.utils.logging import set_tqdm_hook

from lmmods.core.lazy_array import LazyArray
from lmmods.torch_engine.compat import transformers as compat
from lmmods.torch_engine.nn.building import compile_layers, fuse_activations
from tests.compat.contract import mend


@pytest.fixture(scope="module")
def llama():
    torch.manual_seed(0)
    return LlamaForCausalLM(LlamaConfig(vocab_size=11, hidden_size=8, intermediate_size=8, num_hidden_layers=1,
                                        num_attention_heads=2)).eval()


def test_the_attention_in_use(llama):
    llama.set_attn_implementation("sdpa")
    assert compat.attention_name(llama) == "sdpa", mend("transformers", compat.attention_name)
    llama.set_attn_implementation("eager")
    assert compat.attention_name(llama) == "eager", mend("transformers", compat.attention_name)
    assert compat.can_change_attention(llama) is True, mend("transformers", compat.can_change_attention)


def test_gelu_of_gpt2_is_that_of_torch():
    x = torch.linspace(-4, 4, 99)
    assert torch.allclose(NewGELUActivation()(x), nn.GELU(approximate="tanh")(x), atol=1e-6), mend(
        "transformers", fuse_activations)
    model = GPT2LMHeadModel(GPT2Config(vocab_size=11, n_embd=8, n_layer=1, n_head=2))
    assert any(type(part) is NewGELUActivation for part in model.modules()), mend("transformers", fuse_activations)


def test_layers_are_of_one_class(llama):
    assert sum(isinstance(part, GradientCheckpointingLayer) for part in llama.modules()) == 1, mend(
        "transformers", compile_layers)


def test_caches_of_rows_grow_in_room_of_their_own():
    """The same keys, values and lengths as in transformers' layers, after rows were dropped and repeated."""
    states = torch.randn(2, 4, 2, 80, 4)  # keys and values of up to 4 rows and 80 tokens
    ours, theirs = DynamicCache(), DynamicCache()
    assert not compat.has_separable_rows(ours), mend("transformers", compat.has_separable_rows)  # has no layers yet
    ours.layers, theirs.layers = [DynamicLayer(), DynamicSlidingWindowLayer(5)], [DynamicLayer()]
    assert compat.has_separable_rows(ours), mend("transformers", compat.has_separable_rows)
    compat.preallocate_cache(ours)
    assert [type(layer) for layer in ours.layers] == [compat.PreallocatedLayer, DynamicSlidingWindowLayer]
    for rows, step in (([0, 1, 2], 7), ([2, 2, 0, 1], 1), ([1, 3], 80), ([0, 1], 3)):
        for cache in (ours, theirs):
            cache.reorder_cache(torch.tensor(rows))
        found, expected = (cache.update(*states[:, :len(rows), :, :step], 0) for cache in (ours, theirs))
        assert all(map(torch.equal, found, expected)), mend("transformers", compat.preallocate_cache)
        assert ours.get_seq_length() == theirs.get_seq_length()


def test_experts_may_decode_otherwise(llama):
    with compat.decoding_experts(llama):
        pass


class Plain(PreTrainedModel):
    """Has a part that its `_init_weights` leaves alone."""

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


def test_models_are_made_without_first_weights():
    with compat.skip_initial_weights():
        model = Plain(PreTrainedConfig())
        assert not (model.first.weight == 7).any(), mend("transformers", compat.skip_initial_weights)
    before = model.second.weight.clone()
    model.init_weights()
    assert (model.first.weight == 7).all() and torch.equal(model.second.weight, before), mend(
        "transformers", compat.skip_initial_weights)
    assert (Plain(PreTrainedConfig()).first.weight == 7).all()


def test_modules_are_entered_before_their_weights_are_drawn():
    with compat.skip_initial_weights():
        model = Plain(PreTrainedConfig())
    seen = []
    with compat.before_each_module(lambda module: seen.append((module, bool((model.first.weight == 7).any())))):
        model.init_weights()
    assert seen == [(model.first, False), (model.second, True), (model, True)], mend(
        "transformers", compat.before_each_module)


def test_truncated_normals_of_models_are_drawn_at_one_place():
    config = ModernBertConfig(vocab_size=11, hidden_size=8, intermediate_size=8, num_hidden_layers=1,
                              num_attention_heads=2, pad_token_id=0)
    with compat.skip_initial_weights():
        model = ModernBertModel(config)
    embedding, drawn = model.embeddings.tok_embeddings.weight, {}
    with compat.replace_truncated_normals(lambda tensor, *numbers: drawn.update({id(tensor): numbers})):
        model.layers[0].mlp.Wo.weight._is_hf_initialized = True
        model.init_weights()
    assert drawn[id(embedding)] == (0.0, 0.02, 2.0) and len(drawn) == 4, mend(
        "transformers", compat.replace_truncated_normals)


def test_missing_weights_are_drawn_at_one_place(tmp_path):
    model = Plain(PreTrainedConfig())
    model.save_pretrained(tmp_path, state_dict={"first.bias": torch.full((3,), 2.0)})
    seen = []

    def start(model, initialize):
        with torch.no_grad():  # it is memory that holds anything yet
            model.first.weight.zero_()
        initialize()
        seen.append((model.first.weight.clone(), model.first.bias.clone()))

    with compat.wrap_missing_weights(start):
        Plain.from_pretrained(tmp_path)
    assert len(seen) == 1 and (seen[0][0] == 7).all() and (seen[0][1] == 2).all(), mend(
        "transformers", compat.wrap_missing_weights)
    Plain.from_pretrained(tmp_path)
    assert len(seen) == 1


def test_the_load_report_is_told_with_errors_alone(llama, tmp_path, caplog):
    """Also the bar of a load of less than two seconds is not there, even where bars are shown."""
    logger = logging.getLogger("transformers.modeling_utils")
    llama.model.save_pretrained(tmp_path)  # without a head
    logger.addHandler(caplog.handler)
    try:
        bars = []
        before = set_tqdm_hook(lambda bar, args, kwargs: bars.append(kwargs) or bar(*args, **kwargs))
        LlamaForCausalLM.from_pretrained(tmp_path)
        assert "LOAD REPORT" in caplog.text and bars, mend("transformers", compat.quiet_loading)
        caplog.clear()
        with compat.quiet_loading():
            _, found = LlamaForCausalLM.from_pretrained(tmp_path, output_loading_info=True)
        assert "LOAD REPORT" not in caplog.text and list(found["missing_keys"]) == ["lm_head.weight"] and len(bars) == 1
        with pytest.raises(OSError, match="disk"), compat.quiet_loading():
            LlamaForCausalLM.from_pretrained(tmp_path)
            raise OSError("disk")
        assert "LOAD REPORT" in caplog.text
    finally:
        set_tqdm_hook(before)
        logger.removeHandler(caplog.handler)


def test_weights_that_are_not_read(llama, tmp_path):
    llama.save_pretrained(tmp_path)
    weights, asked = llama.state_dict(), []

    def wait(value, array):
        asked.append((type(value), tuple(value.shape)))
        return nn.Parameter(value.over_first(slice(None)).mul(2))

    with compat.defer_weights(wait, lambda param: param, nullcontext):
        found = LlamaForCausalLM.from_pretrained(tmp_path)
    assert asked and {kind for kind, _ in asked} == {LazyArray}, mend("transformers", compat.defer_weights)
    assert all(torch.equal(value, 2 * weights[name]) for name, value in found.state_dict().items())
    assert torch.equal(LlamaForCausalLM.from_pretrained(tmp_path).lm_head.weight, llama.lm_head.weight)
