"""Tiny models of transformers for every family and head, with random parameters and no two equal sizes."""

from functools import cached_property

import jax
import jax.numpy as jnp
import numpy as np
import torch
import transformers

from jax_engine.models import hub, loading
from jax_engine.models.network import Network
from lmmods.core.hf_config import load_config

VOCAB = 37
DECODER = {"vocab_size": VOCAB, "bos_token_id": 1, "eos_token_id": 2}
LLAMA = DECODER | {"hidden_size": 24, "intermediate_size": 20, "num_hidden_layers": 3, "num_attention_heads": 4,
                   "num_key_value_heads": 2, "max_position_embeddings": 64, "head_dim": 10, "pad_token_id": 0}
GPT = DECODER | {"n_embd": 24, "n_layer": 3, "n_head": 3, "n_positions": 32}
BERT = {"vocab_size": VOCAB, "hidden_size": 24, "intermediate_size": 20, "num_hidden_layers": 3,
        "num_attention_heads": 3, "max_position_embeddings": 32, "type_vocab_size": 2, "layer_norm_eps": 1e-5}
# One or two layers, enough to show a pattern.
NEW = LLAMA | {"hidden_size": 16, "num_hidden_layers": 2, "head_dim": 6}
ROUTED = NEW | {"num_experts_per_tok": 2, "head_dim": 4}
YARN = {"rope_type": "yarn", "rope_theta": 100.0, "factor": 4.0, "original_max_position_embeddings": 16}
FAMILIES = {
    "gpt2": GPT | {"n_inner": 20, "scale_attn_by_inverse_layer_idx": True},
    "openai-gpt": GPT,
    "ctrl": GPT | {"dff": 20},
    "llama": LLAMA | {"mlp_bias": True, "rope_parameters": {
        "rope_type": "llama3", "rope_theta": 100.0, "factor": 4.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
        "original_max_position_embeddings": 16}},
    "mistral": LLAMA | {"sliding_window": 4},
    "qwen2": {k: v for k, v in LLAMA.items() if k != "head_dim"} | {
        "tie_word_embeddings": True, "use_sliding_window": True, "sliding_window": 3, "max_window_layers": 2,
        "rope_parameters": {"rope_type": "linear", "factor": 2.0, "rope_theta": 50.0}},
    "qwen3": LLAMA | {"attention_bias": True},
    "gemma": LLAMA,
    "granite": NEW | {"num_hidden_layers": 1, "embedding_multiplier": 3.0, "logits_scaling": 2.0,
                      "residual_multiplier": 0.4, "attention_multiplier": 0.2},
    "olmo2": NEW | {"num_hidden_layers": 1},
    "olmo3": NEW | {"sliding_window": 3, "layer_types": ["sliding_attention", "full_attention"], "rope_parameters": {
        "sliding_attention": {"rope_type": "default", "rope_theta": 50.0}, "full_attention": YARN}},
    "smollm3": NEW | {"no_rope_layer_interval": 2, "use_sliding_window": True, "sliding_window": 3},
    "phi3": NEW | {"num_hidden_layers": 1, "head_dim": 4, "rope_parameters": {
        "rope_type": "longrope", "partial_rotary_factor": 0.5, "rope_theta": 100.0, "factor": 4.0,
        "short_factor": [1.5], "long_factor": [3.0]}, "original_max_position_embeddings": 4},
    "starcoder2": NEW | {"num_hidden_layers": 1, "sliding_window": 4},
    "gpt_neox": DECODER | {"num_hidden_layers": 1, "hidden_size": 24, "num_attention_heads": 3, "intermediate_size": 20,
                           "rope_parameters": {"partial_rotary_factor": 0.5, "rope_theta": 100.0}},
    "gemma2": NEW | {"sliding_window": 3, "query_pre_attn_scalar": 9, "attn_logit_softcapping": 1.5,
                     "final_logit_softcapping": 2.5},
    "gemma3_text": NEW | {"sliding_window": 3, "query_pre_attn_scalar": 9, "layer_types": [
        "sliding_attention", "full_attention"]},
    "gemma4_text": NEW | {
        "num_hidden_layers": 4, "layer_types": ["sliding_attention", "full_attention"] * 2, "sliding_window": 3,
        "num_kv_shared_layers": 2, "use_double_wide_mlp": True, "attention_k_eq_v": True,
        "num_global_key_value_heads": 1, "global_head_dim": 8, "hidden_size_per_layer_input": 5,
        "vocab_size_per_layer_input": VOCAB, "final_logit_softcapping": 2.5, "enable_moe_block": True, "num_experts": 5,
        "top_k_experts": 2, "moe_intermediate_size": 12},
    "qwen3_5_text": NEW | {
        "num_hidden_layers": 3, "layer_types": ["linear_attention", "linear_attention", "full_attention"],
        "linear_num_key_heads": 2, "linear_num_value_heads": 6, "linear_key_head_dim": 5, "linear_value_head_dim": 7,
        "linear_conv_kernel_dim": 3, "head_dim": 8},
    "glm4": NEW | {"num_hidden_layers": 1, "head_dim": 8},
    "cohere2": NEW | {"sliding_window": 3, "layer_types": ["sliding_attention", "full_attention"],
                      "logit_scale": 0.5, "hidden_size": 16},
    "mixtral": ROUTED | {"num_local_experts": 5, "sliding_window": 4},
    "qwen3_moe": ROUTED | {"num_experts": 4, "moe_intermediate_size": 12, "norm_topk_prob": True,
                           "mlp_only_layers": [1]},
    "olmoe": ROUTED | {"num_experts": 6, "clip_qkv": 0.8},
    "gpt_oss": ROUTED | {"num_local_experts": 4, "sliding_window": 3, "swiglu_limit": 0.7, "rope_parameters": YARN},
    "bert": BERT,
    "roberta": BERT | {"pad_token_id": 3, "bos_token_id": 1, "eos_token_id": 2},
    "albert": BERT | {"embedding_size": 10, "num_hidden_groups": 2, "inner_group_num": 2, "pad_token_id": 0},
    "distilbert": {"vocab_size": VOCAB, "dim": 24, "hidden_dim": 20, "n_layers": 3, "n_heads": 3,
                   "max_position_embeddings": 32},
    "xlm-roberta": BERT | {"num_hidden_layers": 1, "pad_token_id": 3, "type_vocab_size": 1},
    "electra": BERT | {"num_hidden_layers": 1, "embedding_size": 10, "pad_token_id": 0},
    "deberta-v2": BERT | {"num_hidden_layers": 2, "pad_token_id": 0, "type_vocab_size": 0, "relative_attention": True,
                          "position_buckets": 4, "pos_att_type": ["p2c", "c2p"], "share_att_key": True,
                          "norm_rel_ebd": "layer_norm", "position_biased_input": False,
                          "conv_kernel_size": 3, "conv_groups": 2, "conv_act": "gelu"},
    "modernbert": DECODER | {"hidden_size": 24, "intermediate_size": 20, "num_hidden_layers": 2, "pad_token_id": 0,
                             "num_attention_heads": 3, "max_position_embeddings": 32, "local_attention": 4,
                             "layer_types": ["full_attention", "sliding_attention"], "rope_parameters": {
                                 "sliding_attention": {"rope_type": "default", "rope_theta": 50.0},
                                 "full_attention": YARN}},
}
AUTO = {"causal": "AutoModelForCausalLM", "masked": "AutoModelForMaskedLM", "qa": "AutoModelForQuestionAnswering",
        "sequence": "AutoModelForSequenceClassification", "token": "AutoModelForTokenClassification",
        "choice": "AutoModelForMultipleChoice"}
NUM_LABELS, NUM_CHOICES = 5, 2  # a batch of four rows is two questions


def fields_of(name: str, head: str) -> dict:
    """Return the configuration fields of a family with this head."""
    fields = FAMILIES[name]
    if head in ("sequence", "token"):
        # Without a padding token, transformers accepts only one row at a time.
        fields = {"pad_token_id": 0} | fields | {"num_labels": NUM_LABELS}
    return fields


def labels_of(batch: dict[str, np.ndarray]) -> np.ndarray:
    """Return labels [B, T] for most of the real tokens; -100 elsewhere."""
    random = np.random.default_rng(2)
    labels = random.integers(0, VOCAB, batch["input_ids"].shape)
    real = batch["attention_mask"] > 0
    return np.where(real & (random.random(labels.shape) < 0.7), labels, -100)


def our_loss(net: Network, params: dict, batch: dict, labels: np.ndarray, training: bool = False):
    """Return a loss summed over labels, or over answer spans of one token, and the logits."""
    logits = net.scores(params, batch, training)
    if net.head == "choice":
        logits = logits.reshape(-1, NUM_CHOICES)
    if net.head in ("sequence", "choice"):
        picked = jax.nn.log_softmax(logits)[np.arange(len(logits)), row_labels(len(logits), net.head)]
        return -picked.sum() + jnp.tanh(logits).sum(), logits  # as below
    if net.head == "qa":
        real = batch["attention_mask"][..., None] > 0
        spans = -jax.nn.log_softmax(jnp.where(real, logits, -1e4), axis=1)[:, 4].sum()
        return spans + jnp.where(real, jnp.tanh(logits), 0).sum(), logits  # the second term gives biases a gradient
    target_logits = logits
    if net.head == "token":
        labels = jnp.where(labels < 0, labels, labels % NUM_LABELS)
    if net.head == "causal":
        target_logits, labels = logits[:, :-1], labels[:, 1:]
    picked = jnp.take_along_axis(jax.nn.log_softmax(target_logits), jnp.maximum(labels, 0)[..., None], -1)[..., 0]
    return -jnp.where(labels >= 0, picked, 0).sum(), logits


def row_labels(num_rows: int, head: str) -> np.ndarray:
    """Return a label per row."""
    return np.arange(num_rows) * 3 % (NUM_CHOICES if head == "choice" else NUM_LABELS)


def of_real(values, batch: dict[str, np.ndarray], head: str):
    """Return the logits to compare: of the real tokens, or of all rows."""
    return values if head in ("sequence", "choice") else values[batch["attention_mask"] > 0]


def torch_inputs(batch: dict[str, np.ndarray], head: str) -> dict[str, torch.Tensor]:
    """Return a batch as inputs of the torch model."""
    shape = (-1, NUM_CHOICES) if head == "choice" else (-1,)
    return {name: torch.tensor(value).unflatten(0, shape) for name, value in batch.items()}


class HFReference:
    """A torch model, its folder, and the JAX network loaded from it."""

    def __init__(self, name: str, head: str, folder, **changes):
        config = transformers.CONFIG_MAPPING[name](**fields_of(name, head) | changes)
        torch.manual_seed(0)
        self.torch = getattr(transformers, AUTO[head]).from_config(config).eval()
        with torch.no_grad():
            for parameter in self.torch.parameters():
                parameter.copy_(torch.randn_like(parameter) * 0.25)
            for key, buffer in self.torch.named_buffers():
                if key.endswith("layer_scalar"):
                    buffer.uniform_(0.5, 1.5)
        self.torch.save_pretrained(folder)
        self.name, self.folder, self.head, self.config = name, folder, head, config
        self.net = hub.network(load_config(str(folder)), head)
        self.params = loading.load(self.net, str(folder))
        self.pad = 0 if config.pad_token_id is None else config.pad_token_id

    @cached_property
    def loss_and_gradients(self):
        """`our_loss` with its logits and the gradients of all parameters, compiled."""
        return jax.jit(jax.value_and_grad(lambda params, batch, labels: our_loss(self.net, params, batch, labels),
                                          has_aux=True))

    @cached_property
    def outputs(self) -> tuple[np.ndarray, float, dict]:
        """Logits, loss and gradients of all parameters on `batch`, computed with JAX."""
        (loss, logits), gradients = self.loss_and_gradients(self.params, self.batch(), labels_of(self.batch()))
        return np.asarray(logits), float(loss), gradients

    def batch(self) -> dict[str, np.ndarray]:
        """Return four rows of 9 tokens: full, right-padded, left-padded, and one with the padding token in its text.

        Rows for label heads are right-padded only.
        """
        random = np.random.default_rng(1)
        ids = random.integers(4, VOCAB, (4, 9))
        mask = np.ones_like(ids)
        mask[1, 6:] = 0
        mask[2, slice(5, None) if self.head in ("sequence", "token", "choice") else slice(4)] = 0
        ids[mask == 0] = self.pad
        ids[3, 4] = self.pad
        batch = {"input_ids": ids, "attention_mask": mask}
        if self.net.arch.num_types > 1:
            batch["token_type_ids"] = np.ones_like(ids) * (np.arange(9) > 4)
        return batch
