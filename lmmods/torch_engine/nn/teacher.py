"""A teacher's most likely tokens for every target token, computed before training and cached."""

from collections.abc import Iterator
from typing import Any

import numpy as np
from torch import nn

from lmmods.core.console import say
from lmmods.data.batch.collate import PLACES
from lmmods.data.teacher import COMPUTING, TeacherTopKTable, gather_top_k, num_columns, number_scored, teacher_store
from lmmods.runs.model_card import first_weights
from lmmods.torch_engine.nn.distillation import compute_top_k
from lmmods.torch_engine.nn.lm_head import LMHead, run_without_head
from lmmods.torch_engine.nn.micro_batches import gather, split_rows
from lmmods.torch_engine.nn.reference import evaluating


def cached_teacher(task: Any) -> tuple[TeacherTopKTable, int]:
    """Return the most likely tokens of a task's teacher, and how many tokens its distributions are over.

    They are computed unless cached. A collective call, once the network is built. Raises UserError if the data is a
    stream.
    """
    trainer, data, teacher = task.trainer, task.trainer.datamodule, task.teacher
    strategy, network, parts, begin = trainer.strategy, None, [], 0
    facts = first_weights(task.teacher_fields, trainer.precision, 0)
    size = num_columns(teacher, data.tokenizer, task.model.config.get_text_config().vocab_size, task.trust_remote_code)
    for role, count in number_scored(data, trainer.state.fn.value).items():
        store = teacher_store(data, role, facts, count, teacher.top_k, size)
        found = strategy.broadcast(store.read() if trainer.is_global_zero else None)
        if found is None:
            if trainer.is_global_zero:
                say(COMPUTING.format(top_k=teacher.top_k, teacher=teacher.pretrained, tokens=count, role=role))
            if network is None:  # on each device, whole
                network = nn.Module.to(task.build_teacher(), task.built_for)  # transformers' own rejects quantised ones
            everywhere = gather({trainer.data_rank: list(_compute(task, network, role, size))}, trainer.world_size)
            found = gather_top_k((part for rank in everywhere.values() for part in rank), begin, count, teacher.top_k)
            if trainer.is_global_zero:
                store.write(found)
        parts.append(found)
        begin += count
    return TeacherTopKTable(parts, teacher.top_k), size


def _compute(task: Any, network: nn.Module, role: str, size: int) -> Iterator[tuple[np.ndarray, ...]]:
    """Yield numbers, tokens and log-probabilities of this process's rows of a set."""
    trainer, chunk_tokens = task.trainer, task.chunk_tokens()
    with evaluating(network), trainer.precision_plugin.forward_context():
        head = LMHead.from_model(network)
        for batch in trainer.datamodule.evaluation_loader(role):
            batch = trainer.strategy.batch_to_device(batch)
            for rows in split_rows(batch, chunk_tokens) if chunk_tokens else [batch]:
                # What a position predicts is the token after it.
                places = rows[PLACES][:, 1:]
                hidden, rows_head, *_ = run_without_head(network, head, rows)
                scored = places > 0
                ids, logps = compute_top_k(hidden[:, :-1][scored], rows_head, size, task.teacher.top_k, task.built_for)
                yield places[scored].cpu().numpy(), ids.int().cpu().numpy(), logps.cpu().numpy()
