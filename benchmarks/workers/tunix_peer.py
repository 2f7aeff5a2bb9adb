"""Tunix's PeftTrainer: LoRA on a Llama in float32.

At its defaults rows are padded to their full length; tuned with `multiple`, they come grouped by length and padded to
the next multiple of it, so that few programs are compiled.
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
from rounds import Rounds, read_check, read_rows, settings
from tunix.models.llama3 import model as llama
from tunix.models.llama3 import params
from tunix.sft import peft_trainer, utils

LINEAR = ".*(q_proj|k_proj|v_proj|o_proj|gate_proj|up_proj|down_proj)"


def load_model(folder: Path) -> tuple[nnx.Module, int]:
    """The model with an adapter of rank 16 on all linear layers, and the padding token."""
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
    """Rows padded to a length."""
    ids = np.full((len(rows), length), pad_id, np.int32)
    scored = np.zeros((len(rows), length), bool)
    for place, row in enumerate(rows):
        ids[place, : len(row["input_ids"])] = row["input_ids"]
        scored[place, : len(row["input_ids"])] = np.array(row["labels"]) >= 0
    return peft_trainer.TrainingInput(input_tokens=ids, input_mask=scored)


def batches(asked: dict, pad_id: int) -> Iterator[tuple[peft_trainer.TrainingInput, int]]:
    """Random batches without end, and how many real tokens each has."""
    rows, random, size = read_rows(asked["folder"]), np.random.default_rng(0), asked["batch_size"]
    multiple = asked["tuned"].get("multiple")
    lengths = np.array([len(row["input_ids"]) for row in rows])
    while True:
        order = np.argsort(lengths, kind="stable") if multiple else random.permutation(len(rows))
        groups = order[: len(order) // size * size].reshape(-1, size)
        for chosen in random.permutation(groups):
            longest = lengths[chosen].max()
            length = min(-(-longest // multiple) * multiple, asked["length"]) if multiple else asked["length"]
            yield collate([rows[i] for i in chosen], length, pad_id), int(lengths[chosen].sum())


def main() -> None:
    asked = settings()
    rounds = Rounds(asked)
    model, pad_id = load_model(Path(asked["folder"]) / "model")
    trainer = peft_trainer.PeftTrainer(
        model, optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-4)),
        peft_trainer.TrainingConfig(eval_every_n_steps=1_000_000))

    def inputs(batch: peft_trainer.TrainingInput) -> dict[str, jax.Array]:
        real = batch.input_tokens != pad_id
        return {"input_tokens": batch.input_tokens, "input_mask": batch.input_mask,
                "positions": utils.build_positions_from_mask(real), "attention_mask": utils.make_causal_attn_mask(real)}

    trainer.with_gen_model_input_fn(inputs)
    rounds.ready()
    check = read_check(asked["folder"])
    batch = peft_trainer.TrainingInput(input_tokens=jnp.array(check["input_ids"], jnp.int32),
                                       input_mask=jnp.array(check["labels"]) >= 0)
    rounds.start_loss(float(trainer.loss_fn(model, **inputs(batch))))

    def examples() -> Iterator[peft_trainer.TrainingInput]:
        for batch, tokens in batches(asked, pad_id):
            yield batch
            if rounds.closing:  # a batch is asked for when the step before it has been dispatched
                jax.block_until_ready(nnx.state(model, nnx.LoRAParam))
            rounds.step(tokens)

    trainer.train(examples())


if __name__ == "__main__":
    main()
