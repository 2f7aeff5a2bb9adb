"""Write the vision tower and projector of a model as a second GGUF file, which llama.cpp reads with the model.

What a reader computes comes from llama.cpp (tools/mtmd: clip.cpp, models/siglip.cpp, mtmd-image.cpp). It resizes
images itself, with the same filter as transformers but other rounding.
"""

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lmmods.commands.gguf_file import GGUFType, StoredTensor, find_type, list_weights, open_writer, write_file
from lmmods.core.errors import UserError
from lmmods.core.image_models import is_of_language_model

# Part of a weight's name as transformers saves it -> as the package `gguf` knows it.
PARTS = {
    r"(model\.)?(vision_tower\.)?(vision_model\.)?(?=embeddings|encoder|post_layernorm)": "vision_tower.vision_model.",
    r"(model\.)?connector\.": "model.connector.",
    r"(model\.)?multi_modal_projector\.": "multi_modal_projector.",
    "mm_input_projection_weight": "mm_input_projection.weight",
}
PROJECTION, NORM = "multi_modal_projector.mm_input_projection.weight", "multi_modal_projector.mm_soft_emb_norm.weight"


@dataclass(frozen=True)
class Projector:
    """How llama.cpp computes a family's image features.

    Args:
        name: llama.cpp's name of the projector.
        factor: Returns how many patches along each edge become one token.
        resampling: PIL's number of the filter that resizes images.
        fixed: Fields of the image processor that llama.cpp does not read, and the value that it assumes.
    """

    name: str
    factor: Callable[[Any], int]
    resampling: int
    fixed: Callable[[Any], dict[str, Any]]


def _pooling_factor(config: Any) -> int:
    vision = config.vision_config
    return vision.image_size // vision.patch_size // int(config.mm_tokens_per_image**0.5)


IDEFICS = Projector("idefics3", lambda config: config.scale_factor, 1, lambda size: {
    "do_image_splitting": True, "max_image_size": {"longest_edge": size}})
PROJECTORS = {
    "idefics3": IDEFICS,
    "smolvlm": IDEFICS,
    "gemma3": Projector("gemma3", _pooling_factor, 2, lambda size: {
        "do_pan_and_scan": None, "size": {"height": size, "width": size}}),
}


def check_projector(model_type: str) -> None:
    """Raise UserError if the projector of a model with images is not supported."""
    if model_type not in PROJECTORS:
        raise UserError(f"--gguf: with images, a model of type {model_type} is not supported, only "
                        f"{', '.join(PROJECTORS)}. Remove --gguf.")


def write_projector(folder: Path, path: Path, dtype: GGUFType, name: str) -> None:
    """Write vision tower and projector as a GGUF file, with one tensor in memory at a time.

    Args:
        folder: Weights, configuration and processor, as transformers saves them.
        dtype: Type of the matrices, as in `write_gguf`; the embeddings of patches are float32.
        name: Name of the model in the file.

    Raises:
        UserError: llama.cpp would compute other features, or a weight is too large for f16.
    """
    import gguf
    from transformers import AutoConfig, AutoImageProcessor

    config = AutoConfig.from_pretrained(folder)
    projector, vision = PROJECTORS[config.model_type], config.vision_config
    images = AutoImageProcessor.from_pretrained(folder, backend="pil").to_dict()
    writer = open_writer(path, "clip", dtype, name)
    writer.add_type(gguf.GGUFType.MMPROJ)
    expected = {"do_resize": True, "do_rescale": True, "do_normalize": True, "rescale_factor": 1 / 255,
                "resample": projector.resampling, **projector.fixed(vision.image_size)}
    unsupported = [f"image processor with {key} {images.get(key)} instead of {value}"
                   for key, value in expected.items() if (images.get(key) or None) != value]
    if vision.hidden_act != "gelu_pytorch_tanh":
        unsupported.append(f"activation {vision.hidden_act} of the vision tower")
    if vision.intermediate_size == vision.hidden_size:  # a sign of old files, whose matrices llama.cpp swaps
        unsupported.append("vision tower with intermediate_size equal to hidden_size")
    longest = images["size"].get("longest_edge")
    if longest is not None and longest <= vision.image_size:  # transformers does not split these images, llama.cpp does
        unsupported.append(f"image processor with size.longest_edge {longest}, not above {vision.image_size}")
    if unsupported:
        raise UserError(f"--gguf: llama.cpp does not support this model's {unsupported[0]}. Remove --gguf.")
    tensors = list(_list_tensors(folder, vision.num_hidden_layers, dtype))
    writer.add_clip_has_vision_encoder(True)
    writer.add_clip_projector_type(projector.name)
    writer.add_vision_projector_scale_factor(projector.factor(config))
    writer.add_vision_projection_dim(config.get_text_config().hidden_size)
    writer.add_vision_image_size(vision.image_size)
    writer.add_vision_patch_size(vision.patch_size)
    writer.add_vision_embedding_length(vision.hidden_size)
    writer.add_vision_feed_forward_length(vision.intermediate_size)
    writer.add_vision_block_count(vision.num_hidden_layers)
    writer.add_vision_head_count(vision.num_attention_heads)
    writer.add_vision_attention_layernorm_eps(vision.layer_norm_eps)
    writer.add_vision_use_gelu(True)
    writer.add_vision_image_mean(images["image_mean"])
    writer.add_vision_image_std(images["image_std"])
    if longest is not None:
        writer.add_vision_preproc_image_size(longest)
    write_file(writer, tensors)


def _list_tensors(folder: Path, num_layers: int, dtype: GGUFType) -> Iterator[StoredTensor]:
    import gguf

    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.MMPROJ, num_layers)
    for source, shape, read in list_weights(folder, dtype):
        if is_of_language_model(source):
            continue
        known = source
        for pattern, part in PARTS.items():
            known = re.sub(pattern, part, known, count=1)
        target = names.get_name(known, (".weight", ".bias"))
        if target is None:
            raise UserError(f"--gguf: llama.cpp does not support this model's weight {source}. Remove --gguf.")
        kind = find_type("f32" if ".embeddings." in source else dtype, shape)
        if known == PROJECTION and dtype != "f32":
            kind = gguf.GGMLQuantizationType.F16  # the reader transposes this matrix
        offset = 1 if known == NORM else 0  # Gemma scales by 1 + weight
        yield StoredTensor(target, shape, kind, lambda read=read, offset=offset: (read() + offset).numpy())
