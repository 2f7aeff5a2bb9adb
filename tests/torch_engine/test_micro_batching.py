"""Micro-batches in pieces: nothing is lost, nothing is longer than it must be."""

import torch

from lmmods.torch_engine.nn.micro_batches import split_rows


def batch(lengths: list[int], width: int, left: bool = False) -> dict[str, torch.Tensor]:
    place = torch.arange(width)
    mask = place >= width - torch.tensor(lengths)[:, None] if left else place < torch.tensor(lengths)[:, None]
    ids = torch.arange(len(lengths) * width).reshape(len(lengths), width)
    return {"input_ids": ids * mask, "attention_mask": mask.long(), "index": torch.arange(len(lengths))}


def test_pieces_hold_every_real_token_once_in_its_row():
    whole = batch([3, 30, 17, 9, 24, 1], 32)
    found = {}
    for piece in split_rows(whole, 48):
        for row, index in enumerate(piece["index"].tolist()):
            assert index not in found
            found[index] = piece["input_ids"][row, piece["attention_mask"][row] > 0].tolist()
    expected = {row: whole["input_ids"][row, : int(whole["attention_mask"][row].sum())].tolist() for row in range(6)}
    assert found == expected


def test_a_piece_has_rows_of_similar_length_and_at_most_so_many_tokens():
    pieces = split_rows(batch([3, 30, 17, 9, 24, 1], 32), 48)
    assert [tuple(piece["input_ids"].shape) for piece in pieces] == [(1, 32), (2, 24), (3, 16)]
    assert [piece["index"].tolist() for piece in pieces] == [[1], [2, 4], [3, 0, 5]]


def test_a_longer_row_is_a_piece_of_its_own_and_a_small_batch_stays_whole():
    assert [len(piece["index"]) for piece in split_rows(batch([32, 32], 32), 16)] == [1, 1]
    whole = batch([8, 8], 8)
    assert split_rows(whole, 100) == [whole]


def test_positions_behind_padding_on_the_left_stay():
    pieces = split_rows(batch([8, 20], 32, left=True), 1000)
    assert [tuple(piece["input_ids"].shape) for piece in pieces] == [(2, 32)]
