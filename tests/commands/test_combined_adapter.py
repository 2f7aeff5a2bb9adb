"""Combined adapters of several runs, against PEFT and numpy."""

import json
import shutil

import numpy as np
import pytest
import torch
from peft import PeftModel
from safetensors.numpy import load_file, save_file
from transformers import AutoModelForCausalLM

from lmmods.cli import main
from lmmods.commands.combined_adapter import Combination, combine, read_runs
from lmmods.core.errors import UserError

WEIGHTS = [0.75, -0.5]


@pytest.fixture
def pair(finished, tmp_path):
    """Two runs of one base with random adapters; keyword arguments change settings of the second."""
    def make(both: dict | None = None, **changes):
        one = finished("one", model__init_args__quantize=None, model__init_args__lora={"rank": 4})
        two = type(one)(str(shutil.copytree(one.root, tmp_path / "two")))
        random = np.random.default_rng(0)
        for run, more in ((one, both or {}), (two, {**(both or {}), **changes})):
            path = run.model / "adapter_config.json"
            settings = json.loads(path.read_text()) | more
            path.write_text(json.dumps(settings))
            values = load_file(run.model / "adapter_model.safetensors")
            for name, value in sorted(values.items()):
                rank = pattern_value(settings["rank_pattern"], name, settings["r"])
                shape = (rank, value.shape[1]) if "lora_A" in name else (value.shape[0], rank)
                values[name] = random.normal(0, 0.1, shape).astype(np.float32)
            save_file(values, run.model / "adapter_model.safetensors")
        return str(one.root), str(two.root)

    return make


def pattern_value(pattern: dict, name: str, default):
    """Return the value of a PEFT pattern for a layer, or the default if none matches."""
    return next((value for part, value in pattern.items() if f"{part}.lora_" in name), default)


def read_factors(folder) -> dict[str, tuple[float, np.ndarray, np.ndarray]]:
    """Return scale and factors B, A of each layer of an adapter, in float64."""
    settings = json.loads((folder / "adapter_config.json").read_text())
    values = load_file(folder / "adapter_model.safetensors")
    layers = {}
    for name, a in values.items():
        if "lora_A" in name:
            alpha = pattern_value(settings["alpha_pattern"], name, settings["lora_alpha"])
            assert len(a) == pattern_value(settings["rank_pattern"], name, settings["r"])
            scale = alpha / len(a) ** (0.5 if settings["use_rslora"] else 1)
            layers[name] = scale, values[name.replace("lora_A", "lora_B")].astype(np.float64), a.astype(np.float64)
    return layers


def compute_updates(folder) -> dict[str, np.ndarray]:
    """Return the weight update of each layer of an adapter, in float64."""
    return {name: scale * b @ a for name, (scale, b, a) in read_factors(folder).items()}


@pytest.mark.parametrize(("method", "density", "seed"), [
    ("cat", None, None), ("svd", None, None), ("linear", None, None), ("ties", 0.4, None), ("dare_linear", 0.5, 3),
    ("dare_ties", 0.5, 4)])
def test_adapters_are_combined_as_peft_does(method, density, seed, pair, tmp_path):
    runs = read_runs(list(pair()))
    result = combine(runs, Combination(method, WEIGHTS, density, seed), tmp_path / "combined")
    model = PeftModel.from_pretrained(runs[0].load(None), runs[0].folder.model)
    model.load_adapter(str(runs[1].folder.model), "other")
    if seed is not None:
        torch.manual_seed(seed)
    model.add_weighted_adapter(["default", "other"], WEIGHTS, "both", method, density=density)
    model.save_pretrained(tmp_path / "peft", selected_adapters=["both"])
    combined, expected = (load_file(path / "adapter_model.safetensors")
                          for path in (result.folder.model, tmp_path / "peft" / "both"))
    assert combined.keys() == expected.keys()
    assert all(np.array_equal(combined[name], expected[name]) for name in combined)


def test_cat_sums_the_weighted_updates(pair, tmp_path):
    """Also with different ranks, and if one adapter is scaled by the root of its rank."""
    runs = read_runs(list(pair(r=2, use_rslora=True, lora_alpha=3)))
    for ordered_runs in (runs, runs[::-1]):  # PEFT uses the first one's settings
        result = combine(ordered_runs, Combination("cat", WEIGHTS, None, None), tmp_path / "combined")
        combined, *parts = (compute_updates(run.folder.model) for run in (result, *ordered_runs))
        assert json.loads((result.folder.model / "adapter_config.json").read_text())["r"] == 6
        for name, value in combined.items():
            np.testing.assert_allclose(value, sum(weight * part[name] for weight, part in zip(WEIGHTS, parts)),
                                       rtol=0, atol=1e-7)


PATTERNS = {"rank_pattern": {"q_proj": 2, "down_proj": 3}, "alpha_pattern": {"q_proj": 8, "v_proj": 5}}


@pytest.mark.parametrize("changes", [{"lora_alpha": 3}, {
    # The same ranks written differently, which PEFT itself rejects.
    "r": 8, "rank_pattern": {**dict.fromkeys(["k_proj", "v_proj", "o_proj", "gate_proj", "up_proj"], 4),
                             **PATTERNS["rank_pattern"]}}])
def test_linear_sums_the_factors_of_layers_with_their_own_ranks(changes, pair, tmp_path):
    runs = read_runs(list(pair(PATTERNS, **changes)))
    made = combine(runs, Combination("linear", WEIGHTS, None, None), tmp_path / "combined")
    parts = [read_factors(run.folder.model) for run in runs]
    model = PeftModel.from_pretrained(runs[0].load(None), made.folder.model)
    for name, update in compute_updates(made.folder.model).items():
        scales = [weight * part[name][0] for weight, part in zip(WEIGHTS, parts)]
        b = sum(abs(scale) ** 0.5 * part[name][1] for scale, part in zip(scales, parts))
        a = sum(np.sign(scale) * abs(scale) ** 0.5 * part[name][2] for scale, part in zip(scales, parts))
        np.testing.assert_allclose(update, b @ a, rtol=0, atol=1e-6)
        layer = model.get_submodule(name.removesuffix(".lora_A.weight"))
        np.testing.assert_allclose(layer.get_delta_weight("default").detach().numpy(), update, rtol=0, atol=1e-6)


@pytest.mark.parametrize(("method", "density"), [("cat", None), ("svd", None), ("ties", 0.6)])
def test_layers_with_their_own_ranks_are_combined_as_peft_does(method, density, pair, tmp_path):
    runs = read_runs(list(pair(PATTERNS)))
    made = combine(runs, Combination(method, WEIGHTS, density, None), tmp_path / "combined")
    model = PeftModel.from_pretrained(runs[0].load(None), runs[0].folder.model)
    model.load_adapter(str(runs[1].folder.model), "other")
    model.add_weighted_adapter(["default", "other"], WEIGHTS, "both", method, density=density)
    for name, update in compute_updates(made.folder.model).items():
        layer = model.get_submodule(name.removesuffix(".lora_A.weight"))
        np.testing.assert_allclose(layer.get_delta_weight("both").detach().numpy(), update, rtol=0, atol=1e-6)


def test_ties_rejects_adapters_of_different_ranks(pair, tmp_path):
    one, two = pair(rank_pattern={"v_proj": 2})
    with pytest.raises(UserError, match=r"--combination ties adds .* model.layers.0.self_attn.v_proj has rank 4 in "
                                        r".*one, 2 in .*two. Use cat or svd."):
        combine(read_runs([one, two]), Combination("ties", None, 0.5, None), tmp_path / "combined")


def test_merge_writes_the_combined_adapter_and_the_model(pair, tmp_path, capsys):
    names, out = pair(), tmp_path / "out"
    assert main(["merge", "--run", f"[{', '.join(names)}]", "--out", str(out), "--weights", "[0.75, -0.5]"]) == 0
    base = read_runs([names[0]])[0].load(None)
    by_hand = PeftModel.from_pretrained(base, out / "adapter").merge_and_unload().state_dict()
    merged = AutoModelForCausalLM.from_pretrained(out).state_dict()
    assert all(torch.equal(value, by_hand[name]) for name, value in merged.items())
    card = (out / "README.md").read_text()
    assert "The adapters of `one` (0.75), `two` (-0.5), combined by `cat`, merged into" in card
    assert not (tmp_path / ".out.combined").exists()


@pytest.mark.parametrize(("options", "reason"), [
    ({"weights": [1.0]}, r"--weights is \[1.0\], but must be 2 numbers"),
    ({"weights": [1.0, float("nan")]}, "must be 2 numbers"),
    ({"method": "ties"}, "--combination ties needs --density"),
    ({"method": "dare_ties", "density": 0.0}, "needs --density"),
    ({"density": 0.5}, "--density applies only to ties and dare"),
    ({"method": "ties", "density": 0.5, "seed": 1}, "--seed applies only to dare")])
def test_options_that_do_not_apply_are_rejected(options, reason):
    options = {"method": "cat", "weights": None, "density": None, "seed": None} | options
    with pytest.raises(UserError, match=reason):
        Combination(**options).check(2)


def test_weights_need_several_runs(pair, tmp_path, capsys):
    assert main(["merge", "--run", pair()[0], "--out", str(tmp_path / "out"), "--weights", "[1]"]) == 2
    assert "need several runs" in capsys.readouterr().err


def test_another_base_or_kind_of_adapter_is_rejected(pair, tmp_path):
    one, two = pair()
    config = tmp_path / "two" / "config.yaml"
    text = config.read_text()
    config.write_text(text.replace("revision: null", "revision: other", 1))
    with pytest.raises(UserError, match="two: model.revision is other, but .*one has None"):
        read_runs([one, two])
    config.write_text(text)
    settings = tmp_path / "two" / "model" / "adapter_config.json"
    original = json.loads(settings.read_text())
    for changes, reason in (({"use_dora": True}, "use_dora, which PEFT cannot combine"),
                            ({"modules_to_save": ["lm_head"]}, "modules_to_save, which"), ({"bias": "all"}, "biases")):
        settings.write_text(json.dumps(original | changes))
        with pytest.raises(UserError, match=f"two: its adapter .*{reason}"):
            read_runs([one, two])
