"""Selecting parameters by patterns, and mistakes in the patterns."""

import pytest

from lmmods.core.errors import UserError
from lmmods.core.freezing import check_new_tokens, chosen
from lmmods.core.settings import LoRA
from lmmods.recipe.tasks.base import TaskFields

NAMES = {"embed.weight": ["embed.weight", "lm_head.weight"],
         **{name: [name] for index in (0, 1, 10)
            for name in (f"layers.{index}.up.weight", f"layers.{index}.up.bias")},
         "norm.weight": ["norm.weight"]}


@pytest.mark.parametrize(("trainable", "frozen", "expected"), [
    (None, ["embed", "bias$"], {"layers.0.up.weight", "layers.1.up.weight", "layers.10.up.weight", "norm.weight"}),
    ([r"layers\.1\."], None, {"layers.1.up.weight", "layers.1.up.bias"}),
    (["layers.1"], ["bias"], {"layers.1.up.weight", "layers.10.up.weight"}),
    (["lm_head", "norm"], None, {"embed.weight", "norm.weight"}),
    (None, ["lm_head", "layers"], {"norm.weight"}),
])
def test_patterns_match_anywhere_in_any_name(trainable, frozen, expected):
    assert chosen(NAMES, trainable, frozen) == expected


@pytest.mark.parametrize(("trainable", "frozen", "message"), [
    (["layers", "laiers"], None, "model.trainable_parameters: 'laiers' matches no parameter of this model. Its 8 "
     "parameters have names like embed.weight, layers.1.up.bias and norm.weight"),
    (None, ["^up"], r"model.frozen_parameters: '\^up' matches no parameter"),
    (["norm"], ["weight"], "matches all parameters that would train"),
])
def test_patterns_without_effect_are_rejected(trainable, frozen, message):
    with pytest.raises(UserError, match=message):
        chosen(NAMES, trainable, frozen)


@pytest.mark.parametrize(("changes", "message"), [
    ({"frozen_parameters": ["(", "a"]}, r"model.frozen_parameters: '\(' is not a valid regular expression"),
    ({"trainable_parameters": []}, "model.trainable_parameters is an empty list"),
    ({"trainable_parameters": ["a"], "lora": LoRA()}, "model.trainable_parameters is .*, but must be null with"),
    ({"frozen_parameters": ["a"], "adapter": "x"}, "model.frozen_parameters is .*, but must be null with model.lora"),
])
def test_invalid_pattern_settings_are_rejected(changes, message):
    with pytest.raises(UserError, match=message):
        TaskFields(pretrained="x", **changes)


def test_new_tokens_need_a_trained_embedding():
    check_new_tokens([], trains=False)
    check_new_tokens([7], trains=True)
    with pytest.raises(UserError, match="1 tokens are new to the model"):
        check_new_tokens([7], trains=False)
