"""Splitting micro-batches into chunks loses nothing and trims padding; sums are over all processes."""

import subprocess
import sys

import torch

from lmmods.torch_engine.nn.micro_batches import split_rows


def batch(lengths: list[int], width: int, left: bool = False) -> dict[str, torch.Tensor]:
    position = torch.arange(width)
    mask = position >= width - torch.tensor(lengths)[:, None] if left else position < torch.tensor(lengths)[:, None]
    ids = torch.arange(len(lengths) * width).reshape(len(lengths), width)
    return {"input_ids": ids * mask, "attention_mask": mask.long(), "index": torch.arange(len(lengths))}


def test_chunks_contain_every_real_token_once_in_its_row():
    whole = batch([3, 30, 17, 9, 24, 1], 32)
    tokens = {}
    for chunk in split_rows(whole, 48):
        for row, index in enumerate(chunk["index"].tolist()):
            assert index not in tokens
            tokens[index] = chunk["input_ids"][row, chunk["attention_mask"][row] > 0].tolist()
    expected = {row: whole["input_ids"][row, : int(whole["attention_mask"][row].sum())].tolist() for row in range(6)}
    assert tokens == expected


def test_chunks_have_similar_lengths_and_a_maximum_number_of_tokens():
    chunks = split_rows(batch([3, 30, 17, 9, 24, 1], 32), 48)
    assert [tuple(chunk["input_ids"].shape) for chunk in chunks] == [(1, 32), (2, 24), (3, 16)]
    assert [chunk["index"].tolist() for chunk in chunks] == [[1], [2, 4], [3, 0, 5]]


def test_a_longer_row_is_its_own_chunk_and_a_small_batch_stays_whole():
    assert [len(chunk["index"]) for chunk in split_rows(batch([32, 32], 32), 16)] == [1, 1]
    whole = batch([8, 8], 8)
    assert split_rows(whole, 100) == [whole]


def test_padding_on_the_left_is_not_trimmed():
    chunks = split_rows(batch([8, 20], 32, left=True), 1000)
    assert [tuple(chunk["input_ids"].shape) for chunk in chunks] == [(2, 32)]


SUM = """
import sys

import torch
from lightning.pytorch.strategies import DDPStrategy, SingleDeviceStrategy

from lmmods.torch_engine.nn.micro_batches import sum_over_processes

rank = int(sys.argv[1])
torch.distributed.init_process_group("gloo", init_method=f"file://{sys.argv[2]}", rank=rank, world_size=2)
print([sum_over_processes(torch.tensor([1.0 + rank, 10.0]), strategy).tolist()
       for strategy in (DDPStrategy(), SingleDeviceStrategy("cpu"))])
"""


def test_sums_are_over_all_processes_of_a_distributed_strategy(tmp_path):
    processes = [subprocess.Popen([sys.executable, "-c", SUM, str(rank), str(tmp_path / "store")],
                                  stdout=subprocess.PIPE, text=True) for rank in range(2)]
    sums = [process.communicate(timeout=120)[0].strip() for process in processes]
    assert sums == ["[[3.0, 20.0], [1.0, 10.0]]", "[[3.0, 20.0], [2.0, 10.0]]"]
