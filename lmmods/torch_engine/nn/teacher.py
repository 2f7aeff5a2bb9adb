"""A teacher's top k tokens for every target token, computed before training and cached."""

from collections.abc import Iterator
from typing import Any

import numpy as np
from torch import nn

from lmmods.core.console import say
from lmmods.data.batch.collate import PLACES
from lmmods.data.teacher import COMPUTING, TeacherTopKTable, gather_top_k, num_columns, number_targets, teacher_store
from lmmods.runs.model_card import describe_initial_weights
from lmmods.torch_engine.nn.distillation import compute_top_k
from lmmods.torch_engine.nn.lm_head import LMHead, run_without_head
from lmmods.torch_engine.nn.micro_batches import gather, split_rows
from lmmods.torch_engine.nn.reference import eval_mode


def cached_teacher(task: Any) -> tuple[TeacherTopKTable, int]:
    """Return the top k tokens of a task's teacher, and the number of tokens in its distributions.

    They are computed unless they are cached. A collective call, for use once the network is built. Raises UserError if
    the data is a stream.
    """
    trainer, data, teacher = task.trainer, task.trainer.datamodule, task.teacher
    strategy, network, parts, start = trainer.strategy, None, [], 0
    facts = describe_initial_weights(task.teacher_fields, trainer.precision, 0)
    size = num_columns(teacher, data.tokenizer, task.model.config.get_text_config().vocab_size, task.trust_remote_code)
    for role, count in number_targets(data, trainer.state.fn.value).items():
        store = teacher_store(data, role, facts, count, teacher.top_k, size)
        top_k = strategy.broadcast(store.read() if trainer.is_global_zero else None)
        if top_k is None:
            if trainer.is_global_zero:
                say(COMPUTING.format(top_k=teacher.top_k, teacher=teacher.pretrained, tokens=count, role=role))
            if network is None:  # not sharded: a whole copy on every device
                network = nn.Module.to(task.build_teacher(), task.built_for)  # transformers' own rejects quantised ones
            all_parts = gather({trainer.data_rank: list(_compute(task, network, role, size))}, trainer.world_size)
            top_k = gather_top_k((part for rank in all_parts.values() for part in rank), start, count, teacher.top_k)
            if trainer.is_global_zero:
                store.write(top_k)
        parts.append(top_k)
        start += count
    return TeacherTopKTable(parts, teacher.top_k), size


def _compute(task: Any, network: nn.Module, role: str, size: int) -> Iterator[tuple[np.ndarray, ...]]:
    """Yield indices in the table, top k tokens and log-probabilities for target tokens in this process's rows."""
    trainer, chunk_tokens = task.trainer, task.chunk_tokens()
    with eval_mode(network), trainer.precision_plugin.forward_context():
        head = LMHead.from_model(network)
        for batch in trainer.datamodule.evaluation_loader(role):
            batch = trainer.strategy.batch_to_device(batch)
            for rows in split_rows(batch, chunk_tokens) if chunk_tokens else [batch]:
                # A position predicts the token after it.
                indices = rows[PLACES][:, 1:]
                hidden, rows_head, *_ = run_without_head(network, head, rows)
                is_target = indices > 0
                hidden = hidden[:, :-1][is_target]
                ids, logps = compute_top_k(hidden, rows_head, size, task.teacher.top_k, task.built_for)
                yield indices[is_target].cpu().numpy(), ids.int().cpu().numpy(), logps.cpu().numpy()
