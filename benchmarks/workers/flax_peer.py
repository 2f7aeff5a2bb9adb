"""The Flax classes that transformers had, in a pmap loop like those of its Flax examples.

Tuned with `scan`, that many steps are one jitted call: a `lax.scan` over stacked batches, with the state donated.
"""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import jax_utils
from flax.training import train_state
from flax.training.common_utils import onehot, shard
from rounds import Rounds, read_check, read_rows, read_settings
from transformers import (
    AutoTokenizer,
    FlaxAutoModelForCausalLM,
    FlaxAutoModelForMaskedLM,
    FlaxAutoModelForQuestionAnswering,
)

MODELS = {"clm": FlaxAutoModelForCausalLM, "mlm": FlaxAutoModelForMaskedLM, "qa": FlaxAutoModelForQuestionAnswering}


def token_loss(logits, labels, is_target):  # noqa: ANN001, ANN201
    losses = optax.softmax_cross_entropy(logits, onehot(labels, logits.shape[-1])) * is_target
    return losses.sum(), is_target.sum()


def clm_loss(logits, batch):  # noqa: ANN001, ANN201
    return token_loss(logits[:, :-1], batch["labels"][:, 1:], jnp.ones_like(batch["labels"][:, 1:]))


def mlm_loss(logits, batch):  # noqa: ANN001, ANN201
    return token_loss(logits, batch["labels"], batch["labels"] >= 0)


def qa_loss(logits, batch):  # noqa: ANN001, ANN201
    start, end = (optax.softmax_cross_entropy(part, onehot(batch[name], part.shape[-1])).sum()
                  for part, name in zip(logits, ("start_positions", "end_positions")))
    return (start + end) / 2, jnp.asarray(len(batch["start_positions"]))


def read_logits(task: str, output):  # noqa: ANN001, ANN201
    return (output.start_logits, output.end_logits) if task == "qa" else output.logits


def collate(settings: dict, rows: list[dict], random: np.random.Generator, tokenizer) -> dict[str, np.ndarray]:  # noqa: ANN001
    """Collate rows: full blocks unchanged, masks drawn by numpy, windows padded to their full length."""
    length = settings["length"] if settings["task"] == "qa" else max(len(row["input_ids"]) for row in rows)
    ids = np.full((len(rows), length), tokenizer.pad_token_id, np.int32)
    for row_index, row in enumerate(rows):
        ids[row_index, : len(row["input_ids"])] = row["input_ids"]
    mask = np.array([[1] * len(row["input_ids"]) + [0] * (length - len(row["input_ids"])) for row in rows], np.int32)
    batch = {"input_ids": ids, "attention_mask": mask}
    if settings["task"] == "clm":
        return {**batch, "labels": ids}
    if settings["task"] == "mlm":
        is_masked = random.random(ids.shape) < 0.15
        draw = random.random(ids.shape)
        labels = np.where(is_masked, ids, -100)
        ids = np.where(is_masked & (draw < 0.8), tokenizer.mask_token_id, ids)
        ids = np.where(is_masked & (draw > 0.9), random.integers(len(tokenizer), size=ids.shape), ids)
        return {**batch, "input_ids": ids.astype(np.int32), "labels": labels.astype(np.int32)}
    types = np.zeros_like(ids)
    for row_index, row in enumerate(rows):
        types[row_index, : len(row["token_type_ids"])] = row["token_type_ids"]
    ends = {name: np.array([row[name] for row in rows], np.int32) for name in ("start_positions", "end_positions")}
    return {**batch, "token_type_ids": types, **ends}


def generate_stacks(settings: dict, num_batches: int, tokenizer):  # noqa: ANN001, ANN201
    """Yield random batches forever, `num_batches` at a time, stacked in a new first dimension."""
    rows, random = read_rows(settings["folder"]), np.random.default_rng(0)
    size = num_batches * settings["batch_size"]
    while True:
        order = random.permutation(len(rows))
        for start in range(0, len(order) - size + 1, size):
            batches = [collate(settings, [rows[i] for i in indices], random, tokenizer)
                       for indices in order[start : start + size].reshape(num_batches, -1)]
            yield {name: np.stack([batch[name] for batch in batches]) for name in batches[0]}


def main() -> None:
    settings = read_settings()
    scan, task = settings["tuned"].get("scan"), settings["task"]
    rounds = Rounds(settings, stride=scan or 1)
    model = MODELS[task].from_pretrained(f"{settings['folder']}/model", from_pt=True)
    loss_of = {"clm": clm_loss, "mlm": mlm_loss, "qa": qa_loss}[task]
    labels = ("labels", "start_positions", "end_positions")

    def forward(params, batch):  # noqa: ANN001, ANN202
        inputs = {name: value for name, value in batch.items() if name not in labels}
        return loss_of(read_logits(task, model(**inputs, params=params, train=False)), batch)

    rounds.record_ready()
    check = {name: np.asarray(value, np.int32) for name, value in read_check(settings["folder"]).items()
             if name not in ("index", "token_seeds")}
    total, weight = jax.jit(forward)(model.params, check)
    rounds.record_loss(float(total) / float(weight))

    def decays(params):  # noqa: ANN001, ANN202
        return jax.tree.map(lambda leaf: leaf.ndim > 1, params)

    state = train_state.TrainState.create(
        apply_fn=model.__call__, params=model.params,
        tx=optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-4, weight_decay=0.01, mask=decays)))

    def update(state, batch, sum_over=lambda value: value):  # noqa: ANN001, ANN202
        (total, weight), gradients = jax.value_and_grad(lambda params: forward(params, batch), has_aux=True)(
            state.params)
        weight = sum_over(weight)
        gradients = jax.tree.map(lambda g: g / weight, sum_over(gradients))
        return state.apply_gradients(grads=gradients), {"loss": sum_over(total) / weight}

    if scan:
        train_steps = jax.jit(partial(jax.lax.scan, update), donate_argnums=0)
        params, optimizer_state = jax.tree.map(jnp.array, (state.params, state.opt_state))  # not those of the model
        state = state.replace(params=params, opt_state=optimizer_state)
    else:
        train_steps = jax.pmap(partial(update, sum_over=partial(jax.lax.psum, axis_name="batch")),
                               axis_name="batch", donate_argnums=0)
        state = jax_utils.replicate(state)
    for stacked in generate_stacks(settings, scan or 1, AutoTokenizer.from_pretrained(f"{settings['folder']}/model")):
        state, _ = train_steps(state, stacked if scan else shard({name: of[0] for name, of in stacked.items()}))
        if rounds.is_last_step:
            jax.block_until_ready(state)
        rounds.record_step(int(stacked["attention_mask"].sum()))


if __name__ == "__main__":
    main()
