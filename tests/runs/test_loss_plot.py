"""The loss plot, loss.png."""

import pytest
from matplotlib.image import imread

from lmmods.runs.model_card import plot_curves


@pytest.fixture
def plot(tmp_path):
    """A function that plots a metrics.csv and returns the height, width and number of colours."""

    def plot_text(text: str) -> tuple[int, int, int]:
        (tmp_path / "metrics.csv").write_text(text)
        plot_curves(tmp_path / "metrics.csv", tmp_path / "loss.png")
        pixels = imread(tmp_path / "loss.png")
        return *pixels.shape[:2], len({tuple(pixel) for pixel in (pixels[::3, ::3] * 7).round().reshape(-1, 4)})

    return plot_text


def test_training_and_validation_loss_are_plotted(plot):
    height, width, neither = plot("step,train/lr\n1,0.1\n2,0.1\n")
    _, _, train = plot("step,train/loss,val/loss\n1,2.0,\n2,1.5,\n3,1.0,\n")
    _, _, both = plot("step,train/loss,val/loss\n1,2.0,\n2,1.5,1.8\n3,1.0,1.9\n")
    assert (height, width) == (480, 840) and neither < train < both


def test_rewards_are_plotted_next_to_the_loss(plot):
    table = "step,train/loss,train/reward,val/reward\n0,,0.1,\n1,0.0,0.2,0.3\n2,0.1,0.4,{}\n"
    height, width, few = plot(table.format(""))
    _, _, more = plot(table.format("0.5").replace("0.3", ""))
    assert (height, width) == (480, 1680) and few and more


def test_nothing_is_plotted_without_a_metrics_csv(tmp_path):
    plot_curves(tmp_path / "metrics.csv", tmp_path / "loss.png")
    assert not list(tmp_path.iterdir())
