"""The picture of the losses, loss.png."""

import pytest
from matplotlib.image import imread

from lmmods.runs.model_card import plot_curves


@pytest.fixture
def drawn(tmp_path):
    """A function that gives height, width and number of colours of the picture of a metrics.csv."""

    def draw(text: str) -> tuple[int, int, int]:
        (tmp_path / "metrics.csv").write_text(text)
        plot_curves(tmp_path / "metrics.csv", tmp_path / "loss.png")
        pixels = imread(tmp_path / "loss.png")
        return *pixels.shape[:2], len({tuple(pixel) for pixel in (pixels[::3, ::3] * 7).round().reshape(-1, 4)})

    return draw


def test_both_losses_are_drawn(drawn):
    height, width, neither = drawn("step,train/lr\n1,0.1\n2,0.1\n")
    _, _, train = drawn("step,train/loss,val/loss\n1,2.0,\n2,1.5,\n3,1.0,\n")
    _, _, both = drawn("step,train/loss,val/loss\n1,2.0,\n2,1.5,1.8\n3,1.0,1.9\n")
    assert (height, width) == (480, 840) and neither < train < both


def test_rewards_are_drawn_beside_the_loss(drawn):
    table = "step,train/loss,train/reward,val/reward\n0,,0.1,\n1,0.0,0.2,0.3\n2,0.1,0.4,{}\n"
    height, width, few = drawn(table.format(""))
    _, _, more = drawn(table.format("0.5").replace("0.3", ""))
    assert (height, width) == (480, 1680) and few and more


def test_nothing_is_drawn_without_a_table(tmp_path):
    plot_curves(tmp_path / "metrics.csv", tmp_path / "loss.png")
    assert not list(tmp_path.iterdir())
