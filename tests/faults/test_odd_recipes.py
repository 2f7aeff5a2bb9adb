"""Odd recipes: each ends with one message and status 2, before anything is read or trained."""

import importlib.util
import os
import re
from pathlib import Path

import pytest
import torch
import yaml

from lmmods.cli import main
from lmmods.core.errors import UserError
from lmmods.recipe.files import MAX_NODES, check, config_argument, read_recipe
from tests.forks import Fork, train

ROOT = Path(__file__).parents[2]


def assert_error(capsys, arguments, pattern):
    assert main(arguments) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: ") and "Traceback" not in error and len(error) < 2000, error
    assert re.search(pattern, error, re.DOTALL), error


# Files --------------------------------------------------------------------------------------------------------------

BOMB = "a: &a [1, 1, 1, 1, 1, 1, 1, 1, 1]\n" + "".join(
    f"{chr(98 + n)}: &{chr(98 + n)} [{', '.join(['*' + chr(97 + n)] * 9)}]\n" for n in range(8))
FILES = {
    "bomb": (BOMB, r"odd\.yaml: line \d+: more than 100,000 values"),
    "recursive alias": ("a: &a [1, *a]\n", r"the alias \*a has no complete anchor &a"),
    "undefined alias": ("a: *b\n", r"line 1: the alias \*b has no complete anchor"),
    "deep list": ("a: " + "[" * 2000 + "]" * 2000, r"more than 64 levels of nesting"),
    "deep mapping": ("".join(" " * n + "a:\n" for n in range(2000)), r"more than 64 levels of nesting"),
    "duplicate key": ("trainer:\n  max_steps: 3\n  max_steps: 4\n", r"line 3: the key max_steps occurs twice"),
    "duplicate key at the top": ("engine: jax\ntrainer: {}\n\"engine\": torch\n", r"line 3: the key engine"),
    "tag int": ('seed_everything: !!int "abc"\n', r"line 1: the tag .*int is not allowed"),
    "tag date": ("seed_everything: !!timestamp 2024-13-45\n", r"the tag .*timestamp is not allowed"),
    "tag bool": ("trainer: {enable_checkpointing: !!bool perhaps}\n", r"the tag .*bool is not allowed"),
    "tag object": ("trainer: !!python/object/apply:os.system [echo]\n", r"the tag .*os\.system is not allowed"),
    "tag binary": ("a: !!binary é\n", r"the tag .*binary"),
    "digits": ("trainer: {max_steps: " + "9" * 5000 + "}\n", r"line 1: a number of 5000 digits"),
    "hex": ("trainer: {max_steps: 0x_}\n", r"odd\.yaml.*0x_|invalid literal"),
    "tab": ("trainer:\n\tmax_steps: 3\n", r"odd\.yaml: broken YAML: line 2.*cannot start any token"),
    "unclosed": ("trainer: {max_steps: 3\n", r"odd\.yaml: broken YAML"),
    "two documents": ("a: 1\n---\nb: 2\n", r"odd\.yaml: broken YAML.*document"),
    "empty": ("", r"odd\.yaml: a recipe must be a mapping.*empty"),
    "comment": ("# nothing\n", r"a recipe must be a mapping.*empty"),
    "list": ("- a\n- b\n", r"a recipe must be a mapping.*a list"),
    "single value": ("fit\n", r"a recipe must be a mapping.*a single value"),
    "list as key": ("[1, 2]: 3\n", r"odd\.yaml: broken YAML.*unhashable"),
    "NUL": ("a: \0\n", r"odd\.yaml: broken YAML"),
    "names another recipe": ("config: other.yaml\n", r"config is not a key: a recipe cannot name"),
    "trusts itself": ("trust_recipe_code: true\n", r"is allowed on the command line only"),
}
BYTES = {
    "latin-1": ("# Prüfung\ntrainer: {max_steps: 3}\n".encode("latin-1"), r"odd\.yaml:1: byte 0xfc is not UTF-8"),
    "UTF-16": ("trainer: {max_steps: 3}\n".encode("utf-16"), r"odd\.yaml: the file is UTF-16"),
    "binary": (bytes(range(128, 256)), r"odd\.yaml:1: byte 0x80 is not UTF-8"),
    "large": (b"# " + b"x" * (11 * 2**20), r"larger than 10 MiB, so it is not a recipe"),
}


@pytest.mark.parametrize("name", [*FILES, *BYTES])
def test_a_broken_recipe_file_is_one_message(tmp_path, capsys, name):
    content, pattern = FILES[name] if name in FILES else BYTES[name]
    (tmp_path / "odd.yaml").write_bytes(content if isinstance(content, bytes) else content.encode())
    assert_error(capsys, ["fit", "--config", str(tmp_path / "odd.yaml")], pattern)


def test_a_path_that_is_not_a_recipe_file_is_one_message(tmp_path, capsys):
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "loop").symlink_to(tmp_path / "loop")
    for path, pattern in ((tmp_path, "a regular file, not a folder"), (tmp_path / "pipe", "a regular file"),
                          ("/dev/zero", "a regular file"), (tmp_path / "loop", "cannot be read"),
                          (tmp_path / "none.yaml", r"none\.yaml: no such file"),
                          ("x" * 5000, r"x… \(5000 characters\)"), ("a\0b", "cannot be read"),
                          ("", "--config has no value")):
        assert_error(capsys, ["fit", "--config", str(path)], pattern)
        assert_error(capsys, ["fit", f"--config={path}"], pattern)


def test_a_broken_file_named_by_an_option_is_one_message(recipe, tmp_path, capsys):
    for name, content in (("bomb.yaml", BOMB.encode()), ("latin.yaml", "max_steps: 3 # ü".encode("latin-1")),
                          ("twice.yaml", b"max_steps: 3\nmax_steps: 4\n")):
        (tmp_path / name).write_bytes(content)
        assert_error(capsys, ["fit", *recipe(), "--trainer", str(tmp_path / name)], "error: ")


def test_unusual_but_valid_recipes_are_read(tmp_path):
    """A byte order mark, Windows line ends, anchors, merges, dates and long strings are valid."""
    path = tmp_path / "fine.yaml"
    path.write_bytes(b"\xef\xbb\xbfa: &x {k: 1}\r\nb:\r\n  <<: *x\r\n  k: 2\r\nc: 2024-13-45\r\nd: *x\r\n")
    assert read_recipe(path) == {"a": {"k": 1}, "b": {"k": 2}, "c": "2024-13-45", "d": {"k": 1}}
    assert config_argument("trainer: {max_steps: 3}") == {"trainer": {"max_steps": 3}}
    path.write_text("text: '" + "9" * 5000 + "'\nlist: [" + "1, " * (MAX_NODES - 100) + "1]\n")
    assert len(read_recipe(path)["list"]) == MAX_NODES - 99


def test_shipped_recipes_are_within_the_limits():
    files = sorted(ROOT.glob("configs/**/*.yaml"))
    assert len(files) > 10
    for file in files:
        assert read_recipe(file) == yaml.safe_load(file.read_text())


def test_valid_yaml_passes_the_check_and_duplicate_keys_do_not():
    for text in ("a", "- 1\n- [b, {c: d}]\n", "{a: {b: 1}, c: {b: 1}}", "? a\n: b\n", "- {a: 1}\n- {a: 1}\n"):
        check(text)
    with pytest.raises(UserError):
        config_argument("a: {b: 1, b: 2}")


# Values -------------------------------------------------------------------------------------------------------------

VALUES = [
    ("seed_everything", 2**32, r"seed_everything is 4294967296, but must be an integer from 0 to 4294967295"),
    ("seed_everything", -1, r"seed_everything is -1"),
    ("seed_everything", False, r"seed_everything is false"),
    ("seed_everything", float("inf"), r"seed_everything"),
    ("seed_everything", None, r"seed_everything"),
    ("seed_everything", "2024-13-45", r"seed_everything.*2024-13-45"),
    ("trainer__accelerator", "zzz", r"trainer\.accelerator.*zzz"),
    ("trainer__accelerator", None, r"trainer\.accelerator"),
    ("trainer__devices", "abc", r"trainer\.devices.*abc"),
    ("trainer__devices", 0, r"trainer\.devices is 0, but must be auto or a number from 1"),
    ("trainer__devices", -2, r"trainer\.devices is -2"),
    ("trainer__devices", [0, 1], r"trainer\.devices.*\[0, 1\]"),
    ("trainer__devices", [], r"trainer\.devices.*\[\]"),
    ("trainer__devices", "2,3", r"trainer\.devices.*2,3"),
    ("trainer__accelerator", "tpu", r"trainer\.accelerator is tpu, which the torch engine does not support"),
    ("model__init_args__pretrained", "", r"model\.pretrained is '', but must be a path or a name"),
    ("data__init_args__tokenizer", " ", r"data\.tokenizer is ' ', but must be a path or a name"),
    ("data__init_args__cache_dir", "", r"data\.cache_dir is ''"),
    ("ckpt_path", "", r"--ckpt_path is empty, but must be last, best, a step number"),
    ("ckpt_path", " ", r"--ckpt_path is empty"),
    ("ckpt_path", os.path.dirname(__file__), r"--ckpt_path .*faults is a folder without a state\.json"),
    ("data__init_args__batch_size", 99_999_999, r"is 99,999,999 .* Lower data\.batch_size to [\d,]+ or"),
    ("data__init_args__eval_batch_size", 99_999_999, r"Lower data\.eval_batch_size to"),
    ("data__init_args__max_length", 999_999_999, r"no device fits more than [\d,]+\. Lower data\.max_length"),
    ("trainer__devices", 10**9, r"trainer\.devices is 1000000000"),
    ("trainer__devices", None, r"trainer\.devices"),
    ("trainer__num_nodes", 0, r"trainer\.num_nodes is 0, but must be 1 or more"),
    ("trainer__default_root_dir", None, r"trainer\.default_root_dir"),
    ("trainer__default_root_dir", "", r"trainer\.default_root_dir is ''"),
    ("trainer__default_root_dir", "a\0b", r"trainer\.default_root_dir is 'a\\x00b'"),
    ("trainer__default_root_dir", "x" * 5000, r"trainer\.default_root_dir is x+… \(5000 characters\).*too long"),
    ("trainer__default_root_dir", __file__, r"test_odd_recipes\.py is a file"),
    ("trainer__default_root_dir", __file__ + "/run", r"test_odd_recipes\.py is a file"),
    ("trainer__gradient_clip_val", -1.0, r"trainer\.gradient_clip_val is -1\.0"),
    ("trainer__gradient_clip_val", float("nan"), r"trainer\.gradient_clip_val is nan"),
    ("trainer__gradient_clip_algorithm", "no", r"trainer\.gradient_clip_algorithm.*no"),
    ("trainer__accumulate_grad_batches", 0, r"trainer\.accumulate_grad_batches is 0"),
    ("trainer__max_steps", -2, r"trainer\.max_steps is -2"),
    ("trainer__max_steps", 0, r"trainer\.max_steps is 0, but must be 1 or more"),
    ("trainer__max_steps", float("inf"), r"trainer\.max_steps"),
    ("trainer__max_epochs", -2, r"trainer\.max_epochs is -2"),
    ("trainer__limit_val_batches", -1, r"trainer\.limit_val_batches is -1"),
    ("trainer__limit_train_batches", 1.5, r"trainer\.limit_train_batches is 1\.5"),
    ("trainer__limit_val_batches", float("nan"), r"trainer\.limit_val_batches is nan"),
    ("trainer__overfit_batches", -0.5, r"trainer\.overfit_batches is -0\.5"),
    ("trainer__val_check_interval", 0, r"trainer\.val_check_interval is 0"),
    ("trainer__val_check_interval", 1.5, r"trainer\.val_check_interval is 1\.5"),
    ("trainer__check_val_every_n_epoch", 0, r"trainer\.check_val_every_n_epoch is 0"),
    ("trainer__num_sanity_val_steps", -2, r"trainer\.num_sanity_val_steps is -2"),
    ("trainer__log_every_n_steps", 0, r"trainer\.log_every_n_steps is 0"),
    ("trainer", [1], r"trainer"),
    ("trainer", None, r"trainer"),
    ("checkpoint", "text", r"checkpoint"),
    ("mmlu", [1], r"mmlu"),
    ("model", None, r"model is None, but must be a class_path|model"),
    ("data", {}, r"data"),
    ("config", "other.yaml", r"config|other\.yaml"),
    ("model__init_args__pretrained", "a\0b", r"a"),
    ("model__init_args__pretrained", "x" * 5000, r"pretrained"),
    ("data__init_args__source", "a\0b", r"a"),
    ("data__init_args__source", "x" * 5000, r"x"),
    ("data__init_args__cache_dir", "a\0b", r"cache"),
    ("data__init_args__batch_size", None,
     r"data\.batch_size is null, but must be set\. Remove the key for its default, 1"),
    ("model__init_args__fast_kernels", None, r"model\.fast_kernels is null"),
    ("model__init_args__optimizer", None, r"model\.optimizer is null, but must be a mapping"),
    ("data__init_args__tokenizer", "x" * 5000, r"tokenizer"),
]


@pytest.mark.parametrize(("engine", "key", "value", "pattern"), [
    *(("torch", *case) for case in VALUES), *(("jax", *case) for case in VALUES[::4])],
    ids=lambda value: str(value)[:30])
def test_an_invalid_value_is_one_message_and_writes_nothing(recipe, capsys, tmp_path, key, value, pattern, engine):
    assert_error(capsys, ["fit", "--engine", engine, *recipe(**{key: value})], pattern)
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("engine", ["torch", "jax"])
@pytest.mark.parametrize("accelerator", ["cuda", "gpu"])
def test_a_missing_gpu_is_reported(recipe, tmp_path, engine, accelerator):
    """In separate processes, as JAX keeps the devices with which it started."""
    if torch.cuda.is_available():
        pytest.skip("this machine has a GPU")
    output = Fork(train, "inspect", "--engine", engine, *recipe(trainer__accelerator=accelerator)).communicate()
    name = {"torch": "torch", "jax": "JAX"}[engine]
    assert f"error: trainer.accelerator is {accelerator}, but {name} finds none on this machine" in output, output
    assert "Traceback" not in output and "python train.py doctor" in output


def test_gpu_indices_without_gpus_are_rejected(recipe, capsys):
    if torch.cuda.is_available():
        pytest.skip("this machine has a GPU")
    assert_error(capsys, ["inspect", *recipe(trainer__accelerator="auto", trainer__devices=[3, 4])],
                 r"trainer\.devices is \[3, 4\], indices of GPUs, but torch finds no GPU on this machine")


def test_a_plan_needs_no_accelerator_of_this_machine(recipe):
    assert main(["plan", "--on", "cpu", *recipe(trainer__accelerator="gpu")]) == 0


@pytest.mark.slow
def test_a_plan_on_jax_needs_no_accelerator_of_this_machine(recipe):
    fork = Fork(train, "plan", "--on", "cpu", "--engine", "jax", *recipe(trainer__accelerator="gpu"))
    assert "fits" in fork.communicate() and fork.returncode == 0


@pytest.mark.parametrize("engine", ["torch", "jax"])
def test_plan_rejects_too_many_tokens_at_once(recipe, capsys, engine):
    arguments = recipe(data__init_args__batch_size=99_999_999)
    assert_error(capsys, ["plan", "--on", "8xH100", "--engine", engine, *arguments],
                 r"tokens in a micro-batch, but no device fits more than 268,435,456")


def test_a_null_max_length_counts_with_its_resolved_value(recipe, capsys):
    assert_error(capsys, ["inspect", *recipe(data__init_args__batch_size=99_999_999, data__init_args__max_length=None)],
                 "tokens in a micro-batch")


FOREIGN = "base_model: demo/llama\ndatasets:\n  - path: demo/instructions.jsonl\n    type: alpaca\n"
COMMANDS_WITH_PATHS = [
    "migrate", "migrate foreign.yaml --out", "merge --out out --run", "verify", "report", "evaluate --tasks x --run",
    "chat --run", "chat --model", "new --model demo/llama --data demo/instructions.jsonl",
    "new mine --data demo/instructions.jsonl --model", "new mine --model demo/llama --data", "recipes --show",
    "sweep x=1,2 --space", "find --config configs/sft_qlora.yaml --result",
    "find --config configs/sft_qlora.yaml --plot"]


@pytest.mark.parametrize("bad", ["a\0b", "x" * 5000, f"{__file__}/x"], ids=["NUL", "long", "through a file"])
@pytest.mark.parametrize("words", COMMANDS_WITH_PATHS)
def test_an_invalid_path_for_a_command_is_one_message(words, bad, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(ROOT)
    foreign = tmp_path / "foreign.yaml"
    foreign.write_text(FOREIGN)
    assert_error(capsys, [*words.replace("foreign.yaml", str(foreign)).split(), bad], "error: ")


@pytest.mark.parametrize(("words", "kind"), [
    ("migrate foreign.yaml --out", "folder"),
    ("sweep --config configs/clm.yaml model.optimizer.lr=1,2 --folder", "file"),
    ("chat --model", "file"), ("verify", "file"), ("recipes --show", "folder"), ("report", "file"),
    ("sweep x=1,2 --space", "folder"), ("find --config configs/clm.yaml --result", "folder")])
def test_a_file_instead_of_a_folder_or_the_reverse_is_one_message(words, kind, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(ROOT)
    (tmp_path / "folder").mkdir()
    (tmp_path / "file").touch()
    (tmp_path / "foreign.yaml").write_text(FOREIGN)
    words = words.replace("foreign.yaml", str(tmp_path / "foreign.yaml"))
    assert_error(capsys, [*words.split(), str(tmp_path / kind)], "error: ")
    assert not list((tmp_path / "folder").iterdir())


@pytest.mark.skipif(getattr(os, "geteuid", lambda: 0)() == 0, reason="root may access everything")
@pytest.mark.parametrize("words", [
    "migrate foreign.yaml --out", "sweep --config configs/clm.yaml model.optimizer.lr=1,2 --folder",
    "merge --out out --run", "verify"])
def test_a_folder_without_permissions_is_one_message(words, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(ROOT)
    (tmp_path / "foreign.yaml").write_text(FOREIGN)
    (tmp_path / "folder").mkdir(mode=0o000)
    words = words.replace("foreign.yaml", str(tmp_path / "foreign.yaml")).split()
    assert_error(capsys, [*words, str(tmp_path / "folder" / "x")], "error: ")


@pytest.mark.parametrize("extra", [["--trainer.max_steps", "9" * 5000], ["--trainer.max_steps", "[" * 5000],
                                   ["--ckpt_path", "a\0b"], ["--ckpt_path", "x" * 5000], ["--ckpt_path", "9" * 5000],
                                   ["--seed_everything", "9" * 5000], ["--data.source", "{a: 1, a: 2}"],
                                   ["--trainer.callbacks", "*a"]], ids=lambda extra: " ".join(extra)[:30])
def test_an_invalid_option_value_is_one_message(recipe, capsys, extra):
    assert_error(capsys, ["fit", *recipe(), *extra], "error: ")


def test_a_logger_whose_package_is_missing_is_named(recipe, capsys):
    if importlib.util.find_spec("comet_ml"):
        pytest.skip("comet_ml is installed")
    assert_error(capsys, ["fit", *recipe(trainer__logger={"class_path": "lightning.pytorch.loggers.CometLogger"}),
                          "--trust_recipe_code", "true"], "CometLogger: .*comet")


@pytest.mark.parametrize(("changes", "pattern"), [
    ({"trainer__min_steps": -1}, "trainer.min_steps is -1"),
    ({"trainer__fast_dev_run": -1}, "trainer: fast_dev_run"),
    ({"trainer__profiler": "none"}, "trainer: "),
    ({"trainer__max_time": "tomorrow"}, "trainer.max_time is 'tomorrow'"),
    ({"trainer__reload_dataloaders_every_n_epochs": -1}, "trainer: "),
    ({"trainer__barebones": True}, "trainer: "),
])
def test_values_that_lightning_rejects_are_reported_with_their_key(recipe, capsys, changes, pattern):
    assert_error(capsys, ["inspect", *recipe(**changes)], pattern)


@pytest.mark.slow
@pytest.mark.parametrize("engine", ["torch", "jax"])
def test_minus_one_devices_on_a_cpu_means_all(recipe, engine):
    """In Lightning, -1 means all devices, as auto does."""
    assert main(["inspect", "--engine", engine, *recipe(trainer__devices=-1)]) == 0
