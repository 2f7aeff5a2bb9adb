"""What lmmods/recipe/jsonargparse_compat.py and argument_parser.py need of jsonargparse."""

import contextlib
from calendar import Calendar, TextCalendar

import jsonargparse
import pytest
from jsonargparse import ActionConfigFile, ArgumentParser, set_parsing_settings

from lmmods.commands.argument_parser import Parser
from lmmods.recipe.jsonargparse_compat import (
    kept_settings,
    list_classes,
    options_of,
    parse_alone,
    replace_check,
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


def test_classes_are_listed_in_help(parser):
    assert f"{TextCalendar.__module__}.{TextCalendar.__name__}," in " ".join(parser.format_help().split())
    list_classes(by_name(parser, "kind"), ("First", "Second"))
    assert "known subclasses: First, Second)" in " ".join(parser.format_help().split()), mend(
        "jsonargparse", list_classes)


def test_another_check_decides(parser):
    seen = []

    def check(original, value, before):
        seen.append((value, before))
        return "left" if value == "Unknown" or before == "left" else original(value)

    replace_check(by_name(parser, "kind"), check)
    arguments = ["--kind", "Unknown", "--kind.firstweekday", "3"]
    assert parser.parse_args(arguments).kind == "left", mend("jsonargparse", replace_check)
    assert seen[0] == ("Unknown", None) and (("firstweekday", "3"), "left") in seen, mend("jsonargparse", replace_check)
    assert parser.parse_args(["--kind", "TextCalendar"]).kind.class_path == "calendar.TextCalendar"


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


def test_parsers_of_commands_are_found_by_name():
    parser, command = Parser(), Parser()
    parser.add_subcommands().add_subcommand("train", command)
    assert parser.commands["train"] is command, mend("jsonargparse", Parser.add_subcommands)


def test_a_command_is_parsed_without_the_parser_above_it(capsys):
    whole, command = Parser(), Parser()
    command.add_argument("--config", action=ActionConfigFile)  # with which --print_config comes
    command.add_argument("--number", type=int)
    whole.add_subcommands().add_subcommand("train", command)
    assert parse_alone(command, ["--number", "3"]) == whole.parse_args(["train", "--number", "3"]).train
    with pytest.raises(SystemExit):
        parse_alone(command, ["--number", "3", "--print_config"])
    assert capsys.readouterr().out == "number: 3\n", mend("jsonargparse", parse_alone)
