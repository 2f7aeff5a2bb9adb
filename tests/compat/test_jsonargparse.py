"""What lmmods/recipe/jsonargparse_compat.py needs of jsonargparse."""

import contextlib
from calendar import Calendar

import jsonargparse
import pytest
from jsonargparse import ArgumentParser, set_parsing_settings

from lmmods.recipe.jsonargparse_compat import (
    kept_settings,
    options_of,
    take_no_files,
    type_of,
)
from tests.compat.contract import mend


@pytest.fixture
def parser():
    parser = ArgumentParser(exit_on_error=False)
    parser.add_argument("--number", type=int | None, default=1)
    parser.add_subclass_arguments(Calendar, "kind", required=False)
    return parser


def by_name(parser, name):
    return next(option for option in options_of(parser) if option.dest == name)


def test_options_and_their_types_are_listed(parser):
    names = {option.dest for option in options_of(parser)}
    assert {"help", "number", "kind"} <= names, mend("jsonargparse", options_of)
    assert set(type_of(by_name(parser, "number")).__args__) == {int, type(None)}, mend("jsonargparse", type_of)
    assert type_of(by_name(parser, "help")) is None


def test_a_file_of_the_same_name_is_no_value(parser, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "rows").write_text("class_path: calendar.TextCalendar\n")
    assert parser.parse_args(["--kind", "rows"]).kind.class_path == "calendar.TextCalendar"
    take_no_files(parser)
    with pytest.raises(jsonargparse.ArgumentError):
        assert parser.parse_args(["--kind", "rows"]) is None, mend("jsonargparse", take_no_files)


def test_settings_are_put_back():
    parser = ArgumentParser(exit_on_error=False)
    parser.add_subclass_arguments(Calendar, "kind", required=False)
    arguments = ["--kind", "calendar.TextCalendar"]
    with kept_settings():
        set_parsing_settings(import_path_denylist=["*"], import_path_allowlist=["lmmods"])
        with contextlib.suppress(jsonargparse.ArgumentError):
            parser.parse_args(arguments)
            raise AssertionError("jsonargparse's list of allowed imports has no effect")
    try:
        assert parser.parse_args(arguments).kind.class_path == "calendar.TextCalendar"
    except jsonargparse.ArgumentError as error:
        raise AssertionError(mend("jsonargparse", kept_settings)) from error
