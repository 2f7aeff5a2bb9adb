"""Idefics 3 (Laurençon et al. 2024): a SigLIP whose patches are joined to squares, and Llama."""

from dataclasses import replace

from transformers import PreTrainedConfig

from jax_engine.models.architecture import Architecture, Family, PaddedImages, plain_layers, refuse
from jax_engine.models.families import llama
from jax_engine.models.linear import check_activation

# Modules of a SigLIP inside `{}`, in torch's order. In Idefics 3, keys come before values and queries.
TOWER = {"images.patches": "embeddings.patch_embedding",
         "images.positions": "embeddings.position_embedding",
         "image_layers.attn.k": "encoder.layers.{}.self_attn.k_proj",
         "image_layers.attn.v": "encoder.layers.{}.self_attn.v_proj",
         "image_layers.attn.q": "encoder.layers.{}.self_attn.q_proj",
         "image_layers.attn.o": "encoder.layers.{}.self_attn.out_proj",
         "image_layers.attn_norm": "encoder.layers.{}.layer_norm1",
         "image_layers.mlp.up": "encoder.layers.{}.mlp.fc1",
         "image_layers.mlp.down": "encoder.layers.{}.mlp.fc2",
         "image_layers.mlp_norm": "encoder.layers.{}.layer_norm2",
         "images.norm": "post_layernorm"}


def siglip(config: PreTrainedConfig) -> Architecture:
    """Return the architecture of a SigLIP's layers."""
    refuse(config, attention_dropout=0.0)
    head_dim, std = config.hidden_size // config.num_attention_heads, getattr(config, "initializer_range", 0.02)
    return Architecture(
        vocab_size=0, hidden_size=config.hidden_size, num_layers=config.num_hidden_layers,
        num_heads=config.num_attention_heads, num_kv_heads=config.num_attention_heads, head_dim=head_dim,
        mlp_size=config.intermediate_size, activation=check_activation(config.hidden_act),
        norm_eps=config.layer_norm_eps, init_std=std, layer_std=std, residual_std=std, causal=False,
        **plain_layers(config.num_hidden_layers, head_dim**-0.5))


def with_images(text: Family, part: str, before: dict[str, str], name: str, **fields) -> Family:
    """Return the family of a network with a text family's decoder.

    Args:
        part: Name of the decoder in the network.
        before: Modules before the decoder, in torch's order.
        name: transformers' class.
        fields: Fields of Family to override.
    """
    inside = {module: f"{part}.{torch_name}" for module, torch_name in text.modules.items()}
    return replace(text, modules=before | inside, classes={"causal": name}, classifiers={}, head_dropouts={},
                   base_of={}, tied={"causal": text.tied["causal"]},
                   head_modules={"causal": text.head_modules["causal"]},
                   dropouts={site: f"{part}.{torch_name}" for site, torch_name in text.dropouts.items()}, **fields)


def architecture(config: PreTrainedConfig) -> Architecture:
    refuse(config.text_config, model_type="llama")
    vision = config.vision_config
    images = PaddedImages(tower=siglip(vision), token=config.image_token_id, size=vision.image_size,
                          patch=vision.patch_size, channels=vision.num_channels, projector="shuffle",
                          factor=config.scale_factor, by_fraction=True)
    return replace(llama.architecture(config.text_config), images=images, tied=config.tie_word_embeddings)


MODULES = {module: f"vision_model.{name}" for module, name in TOWER.items()} | {
    "images.project": "connector.modality_projection.proj"}
FAMILY = with_images(llama.FAMILY, "text_model", MODULES, "Idefics3ForConditionalGeneration",
                     architecture=architecture)
