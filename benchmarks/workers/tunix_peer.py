"""Tunix's PeftTrainer: LoRA on a Llama in float32.

By default, rows are padded to the maximum length. Tuned with `multiple`, they are grouped by length and padded to a
multiple of it, so that few programs are compiled.
"""

import json
from collections.abc import Iterator
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import qwix
from flax import nnx
from rounds import Rounds, read_check, read_rows, read_settings
from tunix.models.llama3 import model as llama
from tunix.models.llama3 import params
from tunix.sft import peft_trainer, utils

LINEAR = ".*(q_proj|k_proj|v_proj|o_proj|gate_proj|up_proj|down_proj)"


def load_model(folder: Path) -> tuple[nnx.Module, int]:
    """Return the model with a rank-16 adapter on all linear layers, and the padding token."""
    config = json.loads((folder / "config.json").read_text())
    sizes = llama.ModelConfig(
        num_layers=config["num_hidden_layers"], vocab_size=config["vocab_size"], embed_dim=config["hidden_size"],
        hidden_dim=config["intermediate_size"], num_heads=config["num_attention_heads"], head_dim=config["head_dim"],
        num_kv_heads=config["num_key_value_heads"], rope_theta=int(config["rope_parameters"]["rope_theta"]),
        norm_eps=config["rms_norm_eps"], weight_tying=config["tie_word_embeddings"])
    model = params.create_model_from_safe_tensors(str(folder), sizes, dtype=jnp.float32)
    adapter = qwix.LoraProvider(module_path=LINEAR, rank=16, alpha=32)
    return qwix.apply_lora_to_model(model, adapter, rngs=nnx.Rngs(0), **model.get_model_input()), config["pad_token_id"]


def collate(rows: list[dict], length: int, pad_id: int) -> peft_trainer.TrainingInput:
    """Pad rows to a length."""
    ids = np.full((len(rows), length), pad_id, np.int32)
    is_target = np.zeros((len(rows), length), bool)
    for row_index, row in enumerate(rows):
        ids[row_index, : len(row["input_ids"])] = row["input_ids"]
        is_target[row_index, : len(row["input_ids"])] = np.array(row["labels"]) >= 0
    return peft_trainer.TrainingInput(input_tokens=ids, input_mask=is_target)


def generate_batches(settings: dict, pad_id: int) -> Iterator[tuple[peft_trainer.TrainingInput, int]]:
    """Yield random batches and their number of real tokens forever."""
    rows, random, size = read_rows(settings["folder"]), np.random.default_rng(0), settings["batch_size"]
    multiple = settings["tuned"].get("multiple")
    lengths = np.array([len(row["input_ids"]) for row in rows])
    while True:
        order = np.argsort(lengths, kind="stable") if multiple else random.permutation(len(rows))
        groups = order[: len(order) // size * size].reshape(-1, size)
        for indices in random.permutation(groups):
            max_length = lengths[indices].max()
            length = min(-(-max_length // multiple) * multiple, settings["length"]) if multiple else settings["length"]
            yield collate([rows[i] for i in indices], length, pad_id), int(lengths[indices].sum())


def main() -> None:
    settings = read_settings()
    rounds = Rounds(settings)
    model, pad_id = load_model(Path(settings["folder"]) / "model")
    trainer = peft_trainer.PeftTrainer(
        model, optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-4)),
        peft_trainer.TrainingConfig(eval_every_n_steps=1_000_000))

    def make_inputs(batch: peft_trainer.TrainingInput) -> dict[str, jax.Array]:
        is_real = batch.input_tokens != pad_id
        return {"input_tokens": batch.input_tokens, "input_mask": batch.input_mask,
                "positions": utils.build_positions_from_mask(is_real),
                "attention_mask": utils.make_causal_attn_mask(is_real)}

    trainer.with_gen_model_input_fn(make_inputs)
    rounds.record_ready()
    check = read_check(settings["folder"])
    batch = peft_trainer.TrainingInput(input_tokens=jnp.array(check["input_ids"], jnp.int32),
                                       input_mask=jnp.array(check["labels"]) >= 0)
    rounds.record_loss(float(trainer.loss_fn(model, **make_inputs(batch))))

    def examples() -> Iterator[peft_trainer.TrainingInput]:
        for batch, tokens in generate_batches(settings, pad_id):
            yield batch
            if rounds.is_last_step:  # a batch is requested when the previous step has been dispatched
                jax.block_until_ready(nnx.state(model, nnx.LoRAParam))
            rounds.record_step(tokens)

    trainer.train(examples())


if __name__ == "__main__":
    main()
