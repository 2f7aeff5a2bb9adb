"""Tiny random image-and-text models with processors, written by transformers, and pictures to show them."""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import PIL.Image
import pytest
import torch
import transformers
import transformers.models.smolvlm.processing_smolvlm as processing_smolvlm
from transformers import CONFIG_MAPPING, AutoModelForImageTextToText, AutoTokenizer, PreTrainedTokenizerFast

TEXT = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
        "num_key_value_heads": 2, "head_dim": 8, "initializer_range": 0.2}
SIGLIP = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2,
          "image_size": 28, "patch_size": 14}
MROPE = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [2, 1, 1]}
# Templates in the style of each family's own: SmolVLM's writes a turn that starts with an image without a space.
SMOLVLM = """<|im_start|>{% for message in messages %}{{message['role'] | capitalize}}
{%- if message['content'][0]['type'] == 'image' %}{{':'}}{% else %}{{': '}}{% endif %}
{%- for part in message['content'] %}
{%- if part['type'] == 'text' %}{{part['text']}}{% elif part['type'] == 'image' %}{{ '<image>' }}{% endif %}
{%- endfor %}<end_of_utterance>
{% endfor %}{% if add_generation_prompt %}{{ 'Assistant:' }}{% endif %}"""
CHATML = """{% for message in messages %}<|im_start|>{{ message['role'] + '\n' }}
{%- if message['content'] is string %}{{ message['content'] }}{% else %}
{%- for part in message['content'] %}
{%- if part['type'] == 'image' %}{{ 'IMAGE' }}{% else %}{{ part['text'] }}{% endif %}
{%- endfor %}{% endif %}<|im_end|>
{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"""
GEMMA = """{{ bos_token }}{% for message in messages %}
{%- set role = 'model' if message['role'] == 'assistant' else message['role'] %}<start_of_turn>{{ role + '\n' }}
{%- if message['content'] is string %}{{ message['content'] | trim }}{% else %}
{%- for part in message['content'] %}
{%- if part['type'] == 'image' %}{{ '<start_of_image>' }}{% else %}{{ part['text'] | trim }}{% endif %}
{%- endfor %}{% endif %}<end_of_turn>
{% endfor %}{% if add_generation_prompt %}{{ '<start_of_turn>model\n' }}{% endif %}"""
LLAVA = """{% for message in messages %}{{ message['role'] | upper + ': ' }}
{%- for part in message['content'] if part['type'] == 'image' %}{{ '<image>\n' }}{% endfor %}
{%- for part in message['content'] if part['type'] == 'text' %}{{ part['text'] }}{% endfor %}<|im_end|> {% endfor %}
{%- if add_generation_prompt %}{{ 'ASSISTANT:' }}{% endif %}"""
CLIP = SIGLIP | {"model_type": "clip_vision_model", "num_hidden_layers": 2}
GRID = [[28, 28], [28, 56], [56, 28], [56, 56]]
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
LINEAR = {"layer_types": ["linear_attention", "full_attention"], "linear_num_key_heads": 2,
          "linear_num_value_heads": 4, "linear_key_head_dim": 6, "linear_value_head_dim": 5,
          "rope_parameters": MROPE | {"partial_rotary_factor": 1.0}}
QWEN_VISION = {"depth": 2, "hidden_size": 16, "intermediate_size": 32, "num_heads": 2, "patch_size": 4,
               "temporal_patch_size": 2, "spatial_merge_size": 2}
FAMILIES: dict[str, dict[str, Any]] = {
    "idefics3": {"template": SMOLVLM, "tokens": ["<|im_start|>", "<end_of_utterance>", "<fake_token_around_image>",
                                                 "<image>", "<global-img>", *(f"<row_{i}_col_{j}>" for i in range(1, 4)
                                                                              for j in range(1, 4))],
                 "end": "<end_of_utterance>", "image": "<image>",
                 "config": {"text_config": TEXT | {"model_type": "llama"},
                            "vision_config": SIGLIP | {"image_size": 16, "patch_size": 4}, "scale_factor": 2},
                 "processor": "Idefics3Processor", "image_processor": "Idefics3ImageProcessorPil",
                 "options": {"size": {"longest_edge": 32}, "max_image_size": {"longest_edge": 16}},
                 "arguments": {"image_seq_len": 4}},
    "gemma3": {"template": GEMMA, "tokens": ["<start_of_turn>", "<end_of_turn>", "<start_of_image>",
                                             "<image_soft_token>", "<end_of_image>"],
               "end": "<end_of_turn>", "image": "<image_soft_token>",
               "names": {"boi_token": "<start_of_image>", "eoi_token": "<end_of_image>",
                         "image_token": "<image_soft_token>"},
               "config": {"text_config": TEXT | {"sliding_window": 8, "num_hidden_layers": 2,
                                                 "layer_types": ["sliding_attention", "full_attention"]},
                          "vision_config": SIGLIP | {"vision_use_head": False}, "mm_tokens_per_image": 4},
               "processor": "Gemma3Processor", "image_processor": "Gemma3ImageProcessorPil",
               "options": {"size": {"height": 28, "width": 28}}, "arguments": {"image_seq_length": 4}},
    "qwen2_5_vl": {"template": CHATML.replace("IMAGE", "<|vision_start|><|image_pad|><|vision_end|>"),
                   "tokens": ["<|im_start|>", "<|im_end|>", "<|vision_start|>", "<|vision_end|>", "<|image_pad|>",
                              "<|video_pad|>"], "end": "<|im_end|>", "image": "<|image_pad|>",
                   "config": {"text_config": TEXT | {"rope_parameters": MROPE}, "vision_config": QWEN_VISION | {
                       "out_hidden_size": 32, "fullatt_block_indexes": [1], "window_size": 16}},
                   "processor": "Qwen2_5_VLProcessor", "image_processor": "Qwen2VLImageProcessorPil",
                   "options": {"patch_size": 4, "size": {"shortest_edge": 64, "longest_edge": 24 * 24}}},
    "qwen3_vl": {"template": CHATML.replace("IMAGE", "<|vision_start|><|image_pad|><|vision_end|>"),
                 "tokens": ["<|im_start|>", "<|im_end|>", "<|vision_start|>", "<|vision_end|>", "<|image_pad|>",
                            "<|video_pad|>"], "end": "<|im_end|>", "image": "<|image_pad|>",
                 "config": {"text_config": TEXT | {"rope_parameters": MROPE}, "vision_config": QWEN_VISION | {
                     "depth": 4, "out_hidden_size": 32, "num_position_embeddings": 16,
                     "deepstack_visual_indexes": [1, 2]}},
                 "processor": "Qwen3VLProcessor", "image_processor": "Qwen2VLImageProcessorPil",
                 "options": {"patch_size": 4, "size": {"shortest_edge": 64, "longest_edge": 24 * 24}}},
    "llava_onevision": {"template": CHATML.replace("IMAGE", "<image>\\n"),
                        "tokens": ["<|im_start|>", "<|im_end|>", "<image>", "<video>"],
                        "end": "<|im_end|>", "image": "<image>",
                        "config": {"text_config": TEXT | {"model_type": "qwen2"},
                                   "vision_config": SIGLIP | {"model_type": "siglip_vision_model"},
                                   "image_grid_pinpoints": GRID, "vision_feature_layer": -1,
                                   "vision_feature_select_strategy": "full"},
                        "processor": "LlavaOnevisionProcessor", "image_processor": "LlavaOnevisionImageProcessorPil",
                        "options": {"size": {"height": 28, "width": 28}, "image_grid_pinpoints": GRID},
                        "arguments": {"num_image_tokens": 4, "vision_feature_select_strategy": "full"}},
    "llava": {"template": LLAVA, "tokens": ["<|im_end|>", "<image>"], "end": "<|im_end|>", "image": "<image>",
              "config": {"text_config": TEXT | {"model_type": "llama"}, "vision_config": CLIP},
              "processor": "LlavaProcessor", "image_processor": "LlavaImageProcessorPil",
              "options": {"size": {"shortest_edge": 28}, "crop_size": {"height": 28, "width": 28}},
              "arguments": {"patch_size": 14, "vision_feature_select_strategy": "default",
                            "num_additional_image_tokens": 1}},
    "internvl": {"template": CHATML.replace("IMAGE", "<IMG_CONTEXT>\\n"),
                 "tokens": ["<|im_start|>", "<|im_end|>", "<img>", "</img>", "<IMG_CONTEXT>", "<video>"],
                 "end": "<|im_end|>", "image": "<IMG_CONTEXT>",
                 "names": {"start_image_token": "<img>", "end_image_token": "</img>",
                           "context_image_token": "<IMG_CONTEXT>", "video_token": "<video>"},
                 "config": {"text_config": TEXT | {"model_type": "qwen2"}, "image_seq_length": 4,
                            "vision_config": SIGLIP | {"patch_size": 7}},
                 "processor": "InternVLProcessor", "image_processor": "GotOcr2ImageProcessorPil",
                 "options": {"size": {"height": 28, "width": 28}, "min_patches": 1, "max_patches": 3},
                 "arguments": {"image_seq_length": 4}},
    "gemma4": {"template": GEMMA.replace("<start_of_image>", "<|image|>"),
               "tokens": ["<start_of_turn>", "<end_of_turn>", "<|image|>", "<|image>", "<image|>", "<|audio|>",
                          "<|audio>", "<audio|>", "<|video|>"],
               "end": "<end_of_turn>", "image": "<|image|>",
               "names": {"image_token": "<|image|>", "boi_token": "<|image>", "eoi_token": "<image|>",
                         "audio_token": "<|audio|>", "boa_token": "<|audio>", "eoa_token": "<audio|>"},
               "config": {"text_config": TEXT | {
                   "num_hidden_layers": 3, "sliding_window": 8, "global_head_dim": 8, "num_kv_shared_layers": 1,
                   "layer_types": ["sliding_attention", "full_attention", "full_attention"],
                   "hidden_size_per_layer_input": 4, "use_bidirectional_attention": "vision"},
                   "vision_config": {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1,
                                     "num_attention_heads": 2, "num_key_value_heads": 2, "head_dim": 8,
                                     "pooling_kernel_size": 2, "patch_size": 4, "position_embedding_size": 64}},
               "processor": "Gemma4Processor", "image_processor": "Gemma4ImageProcessorPil",
               "options": {"patch_size": 4, "pooling_kernel_size": 2, "max_soft_tokens": 70}},
}
FAMILIES["smolvlm"] = FAMILIES["idefics3"] | {
    "processor": "SmolVLMProcessor", "image_processor": "SmolVLMImageProcessorPil",
    "options": {"size": {"longest_edge": 32}, "max_image_size": {"longest_edge": 16}}}
FAMILIES["qwen2_vl"] = FAMILIES["qwen2_5_vl"] | {
    "processor": "Qwen2VLProcessor", "config": {"text_config": TEXT | {"rope_parameters": MROPE}, "vision_config": {
        "depth": 2, "embed_dim": 16, "hidden_size": 32, "num_heads": 2, "patch_size": 4, "temporal_patch_size": 2,
        "spatial_merge_size": 2, "mlp_ratio": 2}}}
for name, text in (("qwen3_vl_moe", TEXT | EXPERTS | {"rope_parameters": MROPE}), ("qwen3_5", TEXT | LINEAR),
                   ("qwen3_5_moe", TEXT | LINEAR | EXPERTS | {"shared_expert_intermediate_size": 16})):
    FAMILIES[name] = FAMILIES["qwen3_vl"] | {"config": FAMILIES["qwen3_vl"]["config"] | {"text_config": text}}
FAMILIES["llava_next"] = FAMILIES["llava"] | {
    "config": FAMILIES["llava"]["config"] | {"image_grid_pinpoints": GRID}, "processor": "LlavaNextProcessor",
    "image_processor": "LlavaNextImageProcessorPil",
    "options": FAMILIES["llava"]["options"] | {"image_grid_pinpoints": GRID}}
# Families whose code in the product another one shares: their expensive tests are slow.
ALIKE = ("llava", "llava_next", "internvl", "gemma4", "qwen3_vl_moe", "qwen3_5", "qwen3_5_moe")
FAMILY_PARAMS = [pytest.param(name, marks=pytest.mark.slow) if name in ALIKE else name for name in FAMILIES]
if processing_smolvlm.num2words is None:  # a package that spells numbers in texts about videos
    processing_smolvlm.num2words = str


def make_processor(family: str) -> Any:
    """Return transformers' processor of a family, without its parts for videos and sound."""
    fields = FAMILIES[family]
    base = AutoTokenizer.from_pretrained("demo/llama")
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=base.backend_tokenizer, bos_token="<s>", eos_token=fields["end"], unk_token="<unk>",
        pad_token="[PAD]", extra_special_tokens=fields.get("names", {}))
    tokenizer.add_special_tokens({"additional_special_tokens": fields["tokens"]})
    tokenizer.chat_template = fields["template"]
    cls = getattr(transformers, fields["processor"])
    # transformers itself requires all parts.
    without_video = type(cls.__name__, (cls,), {"check_argument_for_proper_class": lambda self, name, argument: None})
    parts = dict.fromkeys(cls.get_attributes()) | {
        "image_processor": getattr(transformers, fields["image_processor"])(**fields["options"]),
        "tokenizer": tokenizer}
    if family == "smolvlm":
        parts["video_processor"] = SimpleNamespace(num_frames=None, fps=None)  # which it reads in any case
    return without_video(chat_template=fields["template"], **parts, **fields.get("arguments", {}))


def save_vision_model(family: str, folder: Path) -> Any:
    """Write a checkpoint with tokenizer and processor; return its processor."""
    fields, processor = FAMILIES[family], make_processor(family)
    tokenizer = processor.tokenizer
    image = tokenizer.convert_tokens_to_ids(fields["image"])
    config = json.loads(json.dumps(fields["config"]))
    config["text_config"] |= {"vocab_size": len(tokenizer), "pad_token_id": tokenizer.pad_token_id,
                              "bos_token_id": tokenizer.bos_token_id, "eos_token_id": tokenizer.eos_token_id}
    if family == "gemma4":
        config["text_config"]["vocab_size_per_layer_input"] = len(tokenizer)
    key = "image_token_index" if family == "gemma3" or family.startswith("llava") else "image_token_id"
    config |= {key: image, "pad_token_id": tokenizer.pad_token_id}
    if family.startswith("qwen"):
        config |= {f"{name}_token_id": tokenizer.convert_tokens_to_ids(f"<|{token}|>") for name, token in (
            ("video", "video_pad"), ("vision_start", "vision_start"), ("vision_end", "vision_end"))}
    if family == "llava_onevision":
        config["video_token_index"] = tokenizer.convert_tokens_to_ids("<video>")
    torch.manual_seed(0)
    model = AutoModelForImageTextToText.from_config(CONFIG_MAPPING[family](**config))
    with torch.no_grad():
        for param in model.parameters():
            if not param.any():  # Gemma's projection, without which images would not matter
                param.normal_(0, 0.2)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    settings = {"processor_class": fields["processor"], **fields.get("arguments", {})}
    (folder / "processor_config.json").write_text(json.dumps(settings))
    processor.image_processor.save_pretrained(folder)
    return processor


def picture(seed: int, width: int = 40, height: int = 28) -> PIL.Image.Image:
    """Return a picture of random blocks."""
    blocks = np.random.default_rng(seed).integers(0, 256, (4, 4, 3), np.uint8)
    return PIL.Image.fromarray(blocks).resize((width, height), PIL.Image.Resampling.NEAREST)


def make_arguments(task: str, folder: Path, source: str, root: Path, **changes: Any) -> list[str]:
    """Return the arguments of a short run of a task on images; keys in `changes` replace those of the run."""
    keys = {"trainer.default_root_dir": str(root), "trainer.max_steps": 3, "trainer.accelerator": "cpu",
            "trainer.devices": 1, "trainer.limit_val_batches": 0, "trainer.log_every_n_steps": 1, "model": task,
            "model.pretrained": str(folder), "model.images": True, "model.optimizer.name": "sgd",
            "model.optimizer.lr": 0.1, "model.generation.max_new_tokens": 4, "data": f"{task}Data",
            "data.source": source, "data.max_length": 256, "data.batch_size": 4} | changes
    return [item for key, value in keys.items()
            for item in (f"--{key}", value if isinstance(value, str) else json.dumps(value))]
