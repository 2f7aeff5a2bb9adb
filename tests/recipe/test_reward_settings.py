"""Rewards in a recipe: how they are read, and errors for mistakes."""

import re

import pytest

from lmmods.core.errors import UserError
from lmmods.recipe.keys import keys_of
from lmmods.recipe.rewards import NAMED, OTHERS, Code, ExactMatch, Format, Function, Length, Model, Regex, read_rewards


def test_rewards_are_read_with_their_options():
    assert read_rewards([
        {"name": "exact_match", "ignore_case": True, "extract": None}, {"name": "length", "max_tokens": 9, "weight": 2},
        {"name": "regex", "pattern": "a", "label": "has_a"}, {"function": "my.rewards.short"},
        {"model": "runs/reward", "weight": 0, "name": None}, {"name": "format", "tags": ["a"]},
        {"name": "code", "timeout": 2, "language": "python"}]) == [
            ExactMatch(ignore_case=True), Length(max_tokens=9, weight=2.0), Regex(pattern="a", label="has_a"),
            Function(function="my.rewards.short"), Model(model="runs/reward", weight=0.0), Format(tags=["a"]),
            Code(timeout=2.0)]


def test_a_reward_is_named_by_label_name_function_or_model():
    rewards = read_rewards([{"name": "f1"}, {"name": "f1", "label": "f1_of_titles", "column": "title"},
                            {"function": "my.rewards.short"}, {"model": "runs/helpful/"}])
    assert [reward.name for reward in rewards] == ["f1", "f1_of_titles", "short", "helpful"]


@pytest.mark.parametrize(("rewards", "message"), [
    (["f1"], "model.rewards[0] is f1, but must be a mapping such as {name: exact_match}."),
    ([{}], "model.rewards[0] is incomplete, but must have one of name, function, model"),
    ([{"weight": 1}], "model.rewards[0] is incomplete"),
    ([{"name": "f1"}, {"name": "f1", "model": "m"}], "model.rewards[1] has name and model, but must have one of"),
    ([{"name": "exact_mach"}], "model.rewards[0].name is exact_mach, but must be one of exact_match, contains, regex, "
                               "format, length, f1, math, code. Did you mean exact_match?"),
    ([{"name": ["f1"]}], "model.rewards[0].name is ['f1'], but must be one of"),
    ([{"name": "exact_match", "colum": "a"}],
     "model.rewards[0].colum is not a key. The keys there are weight, label, column, ignore_case, strip, extract. Did "
     "you mean column?"),
    ([{"function": "a.b", "wieght": 1}],
     "model.rewards[0].wieght is not a key. The keys there are weight, label, function. Did you mean weight?"),
    ([{"name": "f1", 1: 2}], "model.rewards[0].1 is not a key. The keys there are weight, label, column."),
    ([{"name": "regex"}], "model.rewards[0].pattern is missing. It must be a string."),
    ([{"name": "regex", "pattern": 3}], "model.rewards[0].pattern is 3, but must be a string."),
    ([{"name": "f1", "weight": True}], "model.rewards[0].weight is true, but must be a number."),
    ([{"name": "f1", "weight": None}], "model.rewards[0].weight is null, but must be a number."),
    ([{"name": "f1", "weight": "1"}], "model.rewards[0].weight is '1', but must be a number."),
    ([{"name": "length", "max_tokens": 1.5}], "model.rewards[0].max_tokens is 1.5, but must be an integer."),
    ([{"name": "exact_match", "strip": 1}], "model.rewards[0].strip is 1, but must be true or false."),
    ([{"name": "format", "tags": "a"}], "model.rewards[0].tags is a, but must be a list of strings."),
    ([{"name": "format", "tags": ["a", 1]}], "model.rewards[0].tags is [a, 1], but must be a list of strings."),
    ([{"name": "format", "tags": ["a", "a"]}], "model.rewards[0].tags is ['a', 'a'], but must be a list of different"),
    ([{"name": "code", "language": "rust"}], "model.rewards[0].language is rust, but must be python."),
    ([{"name": "code", "timeout": 0}], "model.rewards[0].timeout is 0.0, but must be more than 0."),
    ([{"name": "f1", "weight": float("nan")}], "model.rewards[0].weight is nan, but must be a finite number."),
    ([{"name": "f1", "label": "a/b"}], "model.rewards[0].label is 'a/b', but must be a word without a slash."),
    ([{"name": "f1", "label": ""}], "model.rewards[0].label is '', but must be a word without a slash."),
    ([{"name": "regex", "pattern": "("}], "model.rewards[0].pattern is (, but must be a regular expression: missing )"),
    ([{"name": "exact_match", "extract": "a"}],
     "model.rewards[0].extract is a, but must be an expression with a group"),
    ([{"name": "contains", "text": "a", "column": "b"}], "model.rewards[0].text is a, but must be null where "
                                                         "model.rewards[0].column is set."),
    ([{"name": "contains", "text": ""}], "model.rewards[0].text is empty, but must be a string"),
    ([{"name": "length", "max_tokens": 4, "soft_tokens": 5}],
     "model.rewards[0].soft_tokens is 5, but must be from 0 to max_tokens."),
    ([{"function": "short"}],
     "model.rewards[0].function is short, but must be an import path such as my.module.function."),
    ([{"model": " "}], "model.rewards[0].model is ' ', but must be a folder or hub id of a reward model."),
    ([{"name": "f1"}, {"name": "math"}, {"name": "f1"}],
     "model.rewards[2] and model.rewards[0] have the same name, f1. Set the label of one of them."),
    ([{"name": "f1"}, {"function": "my.f1"}], "model.rewards[1] and model.rewards[0] have the same name, f1"),
])
def test_a_mistake_in_a_reward_names_key_and_value(rewards, message):
    with pytest.raises(UserError, match=re.escape(message)):
        read_rewards(rewards)


@pytest.mark.parametrize("cls", [*NAMED.values(), *OTHERS.values()])
def test_every_reward_option_is_described(cls):
    assert all(key.text for key in keys_of(cls).values())
