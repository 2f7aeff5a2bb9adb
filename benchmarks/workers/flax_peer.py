"""The Flax classes that transformers had, in a pmap loop as its Flax examples have it.

Tuned with `scan`, so many steps are one jitted call: a `lax.scan` over stacked batches, with the state donated.
"""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import jax_utils
from flax.training import train_state
from flax.training.common_utils import onehot, shard
from rounds import Rounds, read_check, read_rows, settings
from transformers import (
    AutoTokenizer,
    FlaxAutoModelForCausalLM,
    FlaxAutoModelForMaskedLM,
    FlaxAutoModelForQuestionAnswering,
)

MODELS = {"clm": FlaxAutoModelForCausalLM, "mlm": FlaxAutoModelForMaskedLM, "qa": FlaxAutoModelForQuestionAnswering}


def token_loss(logits, labels, scored):  # noqa: ANN001, ANN201
    losses = optax.softmax_cross_entropy(logits, onehot(labels, logits.shape[-1])) * scored
    return losses.sum(), scored.sum()


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


def collate(asked: dict, rows: list[dict], random: np.random.Generator, tokenizer) -> dict[str, np.ndarray]:  # noqa: ANN001
    """Blocks as they are; masks by numpy; windows padded to their full length."""
    length = asked["length"] if asked["task"] == "qa" else max(len(row["input_ids"]) for row in rows)
    ids = np.full((len(rows), length), tokenizer.pad_token_id, np.int32)
    for place, row in enumerate(rows):
        ids[place, : len(row["input_ids"])] = row["input_ids"]
    mask = np.array([[1] * len(row["input_ids"]) + [0] * (length - len(row["input_ids"])) for row in rows], np.int32)
    batch = {"input_ids": ids, "attention_mask": mask}
    if asked["task"] == "clm":
        return {**batch, "labels": ids}
    if asked["task"] == "mlm":
        masked = random.random(ids.shape) < 0.15
        kind = random.random(ids.shape)
        labels = np.where(masked, ids, -100)
        ids = np.where(masked & (kind < 0.8), tokenizer.mask_token_id, ids)
        ids = np.where(masked & (kind > 0.9), random.integers(len(tokenizer), size=ids.shape), ids)
        return {**batch, "input_ids": ids.astype(np.int32), "labels": labels.astype(np.int32)}
    types = np.zeros_like(ids)
    for place, row in enumerate(rows):
        types[place, : len(row["token_type_ids"])] = row["token_type_ids"]
    ends = {name: np.array([row[name] for row in rows], np.int32) for name in ("start_positions", "end_positions")}
    return {**batch, "token_type_ids": types, **ends}


def stacks(asked: dict, count: int, tokenizer):  # noqa: ANN001, ANN201
    """Random batches without end, so many at a time, stacked in front."""
    rows, random = read_rows(asked["folder"]), np.random.default_rng(0)
    size = count * asked["batch_size"]
    while True:
        order = random.permutation(len(rows))
        for start in range(0, len(order) - size + 1, size):
            batches = [collate(asked, [rows[i] for i in chosen], random, tokenizer)
                       for chosen in order[start : start + size].reshape(count, -1)]
            yield {name: np.stack([batch[name] for batch in batches]) for name in batches[0]}


def main() -> None:
    asked = settings()
    scan, task = asked["tuned"].get("scan"), asked["task"]
    rounds = Rounds(asked, stride=scan or 1)
    model = MODELS[task].from_pretrained(f"{asked['folder']}/model", from_pt=True)
    loss_of = {"clm": clm_loss, "mlm": mlm_loss, "qa": qa_loss}[task]
    labels = ("labels", "start_positions", "end_positions")

    def forward(params, batch):  # noqa: ANN001, ANN202
        inputs = {name: value for name, value in batch.items() if name not in labels}
        return loss_of(read_logits(task, model(**inputs, params=params, train=False)), batch)

    rounds.ready()
    check = {name: np.asarray(value, np.int32) for name, value in read_check(asked["folder"]).items()
             if name not in ("index", "token_seeds")}
    total, weight = jax.jit(forward)(model.params, check)
    rounds.start_loss(float(total) / float(weight))

    def decays(params):  # noqa: ANN001, ANN202
        return jax.tree.map(lambda leaf: leaf.ndim > 1, params)

    state = train_state.TrainState.create(
        apply_fn=model.__call__, params=model.params,
        tx=optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-4, weight_decay=0.01, mask=decays)))

    def update(state, batch, total_of=lambda value: value):  # noqa: ANN001, ANN202
        (total, weight), gradients = jax.value_and_grad(lambda params: forward(params, batch), has_aux=True)(
            state.params)
        weight = total_of(weight)
        gradients = jax.tree.map(lambda g: g / weight, total_of(gradients))
        return state.apply_gradients(grads=gradients), {"loss": total_of(total) / weight}

    if scan:
        train_steps = jax.jit(partial(jax.lax.scan, update), donate_argnums=0)
        params, optimizer_state = jax.tree.map(jnp.array, (state.params, state.opt_state))  # not the model's own
        state = state.replace(params=params, opt_state=optimizer_state)
    else:
        train_steps = jax.pmap(partial(update, total_of=partial(jax.lax.psum, axis_name="batch")),
                               axis_name="batch", donate_argnums=0)
        state = jax_utils.replicate(state)
    for stacked in stacks(asked, scan or 1, AutoTokenizer.from_pretrained(f"{asked['folder']}/model")):
        state, _ = train_steps(state, stacked if scan else shard({name: of[0] for name, of in stacked.items()}))
        if rounds.closing:
            jax.block_until_ready(state)
        rounds.step(int(stacked["attention_mask"].sum()))


if __name__ == "__main__":
    main()
