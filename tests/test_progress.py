"""A run's place among micro-batches, counted for other numbers of workers."""

import pytest

from lmmods.core.errors import UserError
from lmmods.runs.progress import recount

DATA = {"num_rows": 38, "batch_size": 3}  # 13 micro-batches an epoch


@pytest.mark.parametrize(("ready", "epoch", "batches", "before", "now", "expected"), [
    (8, 0, 8, 1, 2, (4, 4)),  # the middle of the first epoch
    (4, 0, 8, 2, 1, (8, 8)),
    (7, 0, 13, 2, 1, (13, 13)),  # its end, where two workers had a round half empty
    (13, 1, 13, 1, 2, (7, 14)),  # the end of the second
    (2, 2, 4, 2, 4, (1, 9)),
])
def test_recount(ready, epoch, batches, before, now, expected):
    assert recount(ready, {**DATA, "epoch": epoch, "batches": batches}, before, now, "processes") == expected


def test_a_stream_is_one_epoch():
    assert recount(6, {"epoch": 3, "window": 1, "batches": 2}, 2, 4, "devices") == (3, 3)


def test_inside_a_round_is_refused():
    with pytest.raises(UserError, match="it stands at micro-batch 7, which 2 processes do not share evenly"):
        recount(7, {**DATA, "epoch": 0, "batches": 7}, 1, 2, "processes")
