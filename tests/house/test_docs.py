"""The documentation matches the code: links, keys, defaults, messages and commands."""

import ast
import contextlib
import dataclasses
import functools
import importlib
import io
import itertools
import json
import re
import runpy
import shlex
import subprocess
from pathlib import Path

import pytest
import yaml

from lmmods.cli import main
from lmmods.commands.registry import COMMANDS, parse_command
from lmmods.core.settings import BestOf, LoRA, Teacher
from lmmods.recipe.classes import declared
from lmmods.recipe.foreign_keys import NO_KEY, read_rows
from lmmods.recipe.keys import keys_of
from lmmods.recipe.mixing import Mixing
from lmmods.recipe.source import Source
from lmmods.recipe.tasks.base import CausalFields, ConversationFields, DataFields

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
NAMES = [str(page.relative_to(ROOT)) for page in PAGES]
TASKS = tuple(declared("model"))
# Shipped recipe that a page's YAML fragments override, and that replaces a recipe the reader has created.
BASES = {"clm": "clm", "mlm": "mlm", "qa": "qa", "sft": "sft_qlora",
         "preference": "preference", "sequence_classification": "classify", "token_classification": "tag",
         "multiple_choice": "choose", "reward": "reward"}
TINY = ("--trainer.limit_val_batches 1 --trainer.limit_predict_batches 1 --trainer.num_sanity_val_steps 0 "
        "--trainer.accelerator cpu --trainer.devices 1").split()
TINY_FIT = ("--trainer.val_check_interval 2 --trainer.log_every_n_steps 1 --trainer.logger null --samples.prompts null "
            "--checkpoint.every_n_steps 2").split()
PARSERS = {name: functools.partial(parse_command, name) for name, command in COMMANDS.items()
           if command.takes != "recipe"}
VALUE = "…"
FORM = "… is …, but must be …"  # explains all messages of this form, whatever the key


def find_fences(text: str) -> list[tuple[str, str, str]]:
    """Return (preceding comment, language, content) of each fenced block of a page."""
    blocks = re.findall(r"(?:<!-- ([^\n]*?) -->\n)?^```(\w*)\n(.*?)^```$", text, re.S | re.M)
    return [(comment, language, content) for comment, language, content in blocks]


def find_commands(text: str) -> list[list[str]]:
    """Return the arguments of each `python train.py` or `train.py` command in a page's code blocks."""
    code = [content for _, language, content in find_fences(text) if language in ("bash", "")]
    code += re.findall(r"(?:^    .*\n?)+", re.sub(r"^```.*?^```$", "", text, flags=re.S | re.M), re.M)
    lines = "".join(code).replace("\\\n", " ").split("\n")
    return [shlex.split(line.split("train.py", 1)[1].split("#")[0]) for line in lines if "train.py " in line]


def use_shipped_files(arguments: list[str]) -> list[str] | None:
    """Replace a command's files by shipped ones; return None if the command cannot be parsed."""
    stands_for = {"my.yaml": "configs/sft_qlora.yaml"}
    by_run = {f"runs/{path.stem}/config.yaml": f"configs/{path.name}" for path in (ROOT / "configs").glob("*.yaml")}
    by_run["runs/sft/config.yaml"] = "configs/sft_qlora.yaml"
    replaced = [(stands_for | by_run).get(argument, argument) for argument in arguments]
    paths = [argument for option, argument in itertools.pairwise(replaced) if option == "--config"]
    has_variables = any("$" in argument for argument in arguments)
    return replaced if paths and not has_variables and all((ROOT / path).is_file() for path in paths) else None


# Links ------------------------------------------------------------------------------------------------------------


def find_anchors(page: Path) -> set[str]:
    """Return the anchors GitHub creates for a page's headings."""
    titles = re.findall(r"^#+ (.*)$", re.sub(r"^```.*?^```$", "", page.read_text(), flags=re.S | re.M), re.M)
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


@pytest.mark.parametrize("page", PAGES, ids=NAMES)
def test_links_have_targets(page):
    for target in re.findall(r"\]\(([^)\s]+)\)", page.read_text()):
        if "://" in target:
            continue
        path, _, anchor = target.partition("#")
        file = (page.parent / path).resolve() if path else page
        assert file.exists(), target
        assert not anchor or anchor in find_anchors(file), target


def test_every_page_is_in_the_index():
    index = (ROOT / "docs" / "README.md").read_text()
    for page in (ROOT / "docs").rglob("*.md"):
        assert page.name == "README.md" or f"({page.relative_to(ROOT / 'docs')})" in index, page


# Commands and fragments parse -------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("page", PAGES, ids=NAMES)
def test_commands_and_fragments_parse(page, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(ROOT)
    text = page.read_text()
    to_parse = []
    for arguments in find_commands(text):
        if arguments and arguments[0] in PARSERS:
            PARSERS[arguments[0]](arguments[1:])
        elif (shipped_arguments := use_shipped_files(arguments)) is not None and shipped_arguments not in to_parse:
            to_parse.append(shipped_arguments)
    base = BASES.get(page.stem, "sft_qlora")
    for index, (comment, language, content) in enumerate(find_fences(text)):
        if language == "yaml":
            path = tmp_path / f"{index}.yaml"
            path.write_text(content)
            name = comment.removeprefix("over ") if comment.startswith("over ") else base
            to_parse.append(["fit", "--config", f"configs/{name}.yaml", "--config", str(path)])
    for arguments in to_parse:
        status = main([*arguments, "--print_config"])
        assert status == 0, f"{arguments}: {capsys.readouterr().err}"


def test_every_shipped_recipe_is_on_the_recipes_page():
    page = (ROOT / "docs" / "recipes.md").read_text()
    for path in (ROOT / "configs").rglob("*.yaml"):
        assert f"(../{path.relative_to(ROOT)})" in page, path


# Keys and defaults ------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def by_task() -> dict[str, dict[str, object]]:
    """Return the default of every recipe key of each task, by dotted path."""
    defaults = {}
    for task in TASKS:
        out = io.StringIO()
        with contextlib.redirect_stdout(out):
            assert main(["fit", "--model", task, "--model.pretrained", "x", "--data", declared("model")[task].takes,
                         "--data.source", "x", "--trainer.max_steps", "1", "--print_config"]) == 0
        content = yaml.safe_load(out.getvalue())
        content["trainer"]["max_steps"] = -1
        for part in ("model", "data"):
            content[part] = content[part]["init_args"]
        content["model"]["pretrained"] = None
        if "best_of" in content["model"]:  # null by default, but its keys have their own table
            content["model"]["best_of"] = {field.name: field.default for field in dataclasses.fields(BestOf)}
        if "teacher" in content["model"]:
            content["model"]["teacher"] = {field.name: field.default for field in dataclasses.fields(Teacher)}
        defaults[task] = flatten(content) | {f"model.lora.{name}": value for name, value in vars(LoRA()).items()}
        defaults[task] |= {f"data.source.{name}": value for name, value in vars(Source("required")).items()}
        defaults[task]["data.source"] = "required"
    return defaults


@pytest.fixture(scope="module")
def known(by_task) -> set[str]:
    return {key for keys in by_task.values() for key in keys} | {f"data.mixing.{name}" for name in vars(Mixing())}


def flatten(tree: dict, prefix: str = "") -> dict[str, object]:
    keys: dict[str, object] = {}
    for name, value in tree.items():
        keys[prefix + name] = value
        if isinstance(value, dict):
            keys |= flatten(value, f"{prefix}{name}.")
    return keys


def find_unknown_keys(text: str, known: set[str]) -> list[str]:
    """Return keys in backticks, with or without a value, that no recipe has."""
    blocks = "trainer|model|data|checkpoint|samples|mmlu|publish"
    unknown = []
    for quoted in re.findall(r"`([^`\n]+)`", text):
        key = quoted.split(":")[0].split("=")[0].removeprefix("--").strip()
        key = re.sub(r"^data\.\w+_source\.", "data.source.", key)
        is_file = key.endswith((".class_path", ".gguf", ".jsonl", ".json", ".safetensors"))
        if re.fullmatch(rf"({blocks})\.\w+(\.\w+)*", key) and not is_file and key not in known:
            unknown.append(quoted)
    return unknown


@pytest.mark.slow
@pytest.mark.parametrize("page", PAGES, ids=NAMES)
def test_keys_on_pages_exist(page, known):
    content = re.sub(r"^```.*?^```$", "", page.read_text(), flags=re.S | re.M)
    if page.name == "migration.md":  # its first columns have keys of other programs
        content = re.sub(r"^\|[^|]*\|", "|", content, flags=re.M)
    assert not find_unknown_keys(content, known)


@pytest.mark.slow
def test_keys_named_for_other_programs_exist(known):
    """Include the rows that docs/migration.md omits."""
    rows = [row for row in read_rows() if row.cells[1] not in NO_KEY]
    assert len(rows) > 300
    for row in rows:
        assert not set(row.cells[1].split(", ")) - known, row.cells
    assert not find_unknown_keys("\n".join(row.cells[2] for row in read_rows()), known)


def read_key_rows(path: Path) -> list[tuple[str, str, str]]:
    """Return key, mark († or ‡ if it may change on resume) and default of each row in a page's generated tables."""
    tables = "".join(re.findall(r"^<!-- fields: .+? -->\n\n((?:\|.*\n)*)", path.read_text(), re.M))
    return re.findall(r"^\| `(\w+\.[\w.]+|engine|seed_everything)`([†‡]?) \| [^|]+ \| (`[^`]+`|required|below) \|",
                      tables, re.M)


def read_defaults(path: str) -> dict[str, str]:
    """Return the keys and defaults in a page's tables."""
    rows = read_key_rows(ROOT / "docs" / path)
    defaults = {key: default.strip("`") for key, _, default in rows}
    assert len(defaults) == len(rows), path
    return defaults


def marks() -> dict[str, str]:
    """Return the mark of each key in the tables; it is the same on all pages."""
    rows = {(key, mark) for page in PAGES for key, mark, _ in read_key_rows(page)}
    assert len(dict(rows)) == len(rows)
    return dict(rows)


@pytest.mark.slow
@pytest.mark.parametrize("task", TASKS)
def test_field_tables_have_every_key_with_its_default(task, by_task):
    cls = declared("model")[task]
    shared = read_defaults("fields.md") | read_defaults("metrics.md")
    if hasattr(cls, "images"):
        shared |= read_defaults("images.md")
    task_keys = read_defaults(f"tasks/{cls.__module__.rpartition('.')[2]}.md")
    if not issubclass(cls, CausalFields):
        decoder_keys = ("model.generation", "model.cuda_graphs", "model.best_of", "model.balance_loss")
        shared = {key: value for key, value in shared.items() if not key.startswith(decoder_keys)}
    if not hasattr(cls, "z_loss"):  # its loss is not a token loss
        token_loss_keys = ("model.label_smoothing", "model.z_loss", "model.teacher")
        shared = {key: value for key, value in shared.items() if not key.startswith(token_loss_keys)}
    if not hasattr(cls, "dft"):
        shared.pop("model.dft")
    if not issubclass(declared("data")[cls.takes], ConversationFields):
        conversation_keys = keys_of(ConversationFields).keys() - keys_of(DataFields).keys()
        shared = {key: value for key, value in shared.items() if key.removeprefix("data.") not in conversation_keys}
    assert not set(shared) & set(task_keys)
    on_page = {key: default for key, default in {**shared, **task_keys}.items() if default != "below"}
    expected = {key for key, value in by_task[task].items() if not isinstance(value, dict)}

    def select_checked(keys) -> set[str]:  # of Lightning's keys, the page has only those that both engines support
        return {key for key in keys if "." in key and not key.startswith("trainer.")}

    assert select_checked(on_page) == select_checked(expected)
    for key, default in on_page.items():
        assert yaml.safe_load(default) == by_task[task][key], key


def test_field_tables_are_generated_from_the_code():
    """To write them again: make fields"""
    for page, text in runpy.run_path(str(ROOT / ".ci" / "fields.py"))["pages"]().items():
        assert page.read_text() == text, page


# Messages ---------------------------------------------------------------------------------------------------------


def resolve_texts(node: ast.expr) -> list[str]:
    """Return the possible strings of an expression, with … for values."""
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return [node.value]
    if isinstance(node, ast.JoinedStr):
        return ["".join(part.value if isinstance(part, ast.Constant) else VALUE for part in node.values)]
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
        return [left + right for left in resolve_texts(node.left) for right in resolve_texts(node.right)]
    if isinstance(node, ast.IfExp):
        return resolve_texts(node.body) + resolve_texts(node.orelse)
    return [VALUE]


def find_messages(tree: ast.AST) -> list[ast.expr]:
    """Return the message expressions of a module: the arguments of UserError and similar errors."""
    nodes = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Call):
            index = {"UserError": 0, "ForeignCode": 0, "NotFinite": 0, "BrokenRecipe": 0, "RowProblem": 0,
                     "RowError": 1, "_reject": 1, "refuse_value": 0
                     }.get(node.func.id) if isinstance(node.func, ast.Name) else 1 if (
                         isinstance(node.func, ast.Attribute) and node.func.attr == "report") else None
            if index is not None and len(node.args) > index:
                nodes.append(node.args[index])
        elif isinstance(node, ast.FunctionDef) and node.name in ("problem", "quantised_in_full", "in_english"):
            nodes += [part.value for part in ast.walk(node) if isinstance(part, ast.Return) and part.value is not None]
    return nodes


@functools.cache
def read_messages() -> set[str]:
    """Return every message that a user's mistake can cause, with … for values."""
    files = [*(ROOT / "lmmods").rglob("*.py"), *(ROOT / "jax_engine").rglob("*.py")]
    texts = {text for file in files for node in find_messages(ast.parse(file.read_text()))
             for text in resolve_texts(node)}
    return {text for text in texts if len(re.findall(r"[a-z]", text)) >= 4}  # others only pass on a message


def read_entries() -> list[tuple[str, str]]:
    """Return the rows of the troubleshooting page: message and explanation."""
    return re.findall(r"^\| `(.*?)` \| (.*) \|$", (ROOT / "docs" / "troubleshooting.md").read_text(), re.M)


def fits(entry: str, message: str) -> bool:
    """Whether an entry is the start of a message, with … for any values, and has its first words."""
    begins = re.match(".*".join(re.escape(part) for part in entry.split(VALUE)), message, re.S)
    return bool(begins) and (entry == FORM or get_first_words(entry) == get_first_words(message))


def get_first_words(message: str) -> list[str]:
    return re.findall(r"[A-Za-z][\w.]*", message)[:3]


def test_every_explained_message_exists():
    all_messages = read_messages()
    explained = [entry for entry, _ in read_entries()]
    gone = [entry for entry in explained if not any(fits(entry, message) for message in all_messages)]
    assert len(all_messages) > 150 and len(explained) > 70
    assert not gone, "\n".join(gone)
    assert all(len(re.findall(r"[a-z]", entry)) >= 4 for entry in explained)
    assert len(explained) == len(set(explained))


def test_explanations_say_more_than_their_messages():
    """At least a third of an explanation's words, and at least three, are not in the message in any form."""
    for entry, explanation in read_entries():
        message_texts = " ".join(message for message in read_messages() if fits(entry, message))
        stems, message_stems = (list(dict.fromkeys(word[:5] for word in re.findall(r"[a-z_]{4,}", text.lower())))
                                for text in (explanation, message_texts))
        new_stems = [stem for stem in stems if stem not in message_stems]
        assert len(new_stems) >= max(3, len(stems) / 3), f"{entry}: {explanation}"


# Examples run -----------------------------------------------------------------------------------------------------


def shrink(arguments: list[str], steps: int) -> list[str]:
    """Reduce the work of a command to a minimum."""
    if arguments[0] == "inspect" or arguments[0] in PARSERS:
        return arguments
    return [*arguments, *TINY, *([*TINY_FIT, "--trainer.max_steps", str(steps)] if arguments[0] == "fit" else [])]


@pytest.fixture
def tree(tmp_path, monkeypatch) -> Path:
    """Return a new working directory with the demo assets and the recipes."""
    for name in ("demo", "configs"):
        (tmp_path / name).symlink_to(ROOT / name)
    monkeypatch.chdir(tmp_path)
    return tmp_path


RUN = [page for page in PAGES if "<!-- run -->" in page.read_text()]


@pytest.mark.slow
@pytest.mark.parametrize("page", RUN, ids=lambda page: page.stem)
def test_examples_run(page, tree, capfd):
    for comment, _, content in find_fences(page.read_text()):
        if comment != "run":
            continue
        shell = "\n".join(line for line in content.split("\n") if "train.py" not in line)
        for arguments in find_commands(f"```bash\n{content}```"):
            assert main(shrink(arguments, 4 if "--ckpt_path" in arguments else 2)) == 0, capfd.readouterr().err
        subprocess.run(["bash", "-euc", shell], check=True)


@pytest.mark.slow
def test_the_example_task_on_the_extending_page_trains(tree, monkeypatch, capsys):
    """The files are in extra folders of the packages that the page names; code and recipe are unchanged."""
    markers = {"lmmods.data": "class RetellCodec(SFTCodec):",
               "lmmods.torch_engine.tasks": "class Retell(CausalModule):",
               "jax_engine.tasks": "class Retell(CausalTask):"}
    blocks = [content for _, _, content in find_fences((ROOT / "docs" / "extending.md").read_text())]
    [recipe] = [block for block in blocks if "class_path: Retell," in block]
    (tree / "retell.yaml").write_text(recipe)
    for package, marker in markers.items():
        if package == "jax_engine.tasks":
            assert main(shrink(["fit", "--config", "retell.yaml", "--engine", "jax"], 2)) == 2
            assert "model is Retell, which only engine torch supports" in capsys.readouterr().err
        folder = tree.joinpath(*package.split("."))
        folder.mkdir(parents=True)
        (folder / "retell.py").write_text(next(block for block in blocks if marker in block))
        module = importlib.import_module(package)
        monkeypatch.setattr(module, "__path__", [*module.__path__, str(folder)])
    assert main(shrink(["fit", "--config", "retell.yaml"], 2)) == 0
    assert main(shrink(["inspect", "--config", "retell.yaml", "--engine", "jax", "--rows", "1"], 2)) == 0
    report = json.loads((tree / "runs/retell/data_report.json").read_text())
    assert report["splits"]["train"]["rows"] > 100


def test_the_public_names_on_the_extending_page_exist():
    section = (ROOT / "docs" / "extending.md").read_text().partition("## Public names")[2]
    rows = [line.split("|")[1:3] for line in section.splitlines() if line.startswith("| `")]
    assert len(rows) > 20
    for names, module in rows:
        for name in re.findall("`(.+?)`", names):
            assert hasattr(importlib.import_module(module.strip(" `")), name), (name, module)


def test_the_example_family_on_the_extending_page_is_valid():
    from transformers import LlamaConfig

    pages = find_fences((ROOT / "docs" / "extending.md").read_text())
    scope: dict = {}
    exec(next(content for _, _, content in pages if "FAMILY = " in content), scope)
    assert set(scope["FAMILY"].classes) == {"causal", "qa", "sequence", "token"}
    config = LlamaConfig(hidden_size=64, num_attention_heads=4, num_key_value_heads=2)
    assert scope["FAMILY"].architecture(config).num_heads == 4


# Contributing ------------------------------------------------------------------------------------------------------

CONTRIBUTING = (ROOT / "CONTRIBUTING.md").read_text()


def test_the_tree_in_contributing_has_every_package():
    """The tree, read by indentation, has each package of both engines and nothing else."""
    listed, parents = set(), {}
    for indent, name in re.findall(r"^    ( *)([\w.]+)/(?: |$)", CONTRIBUTING, re.M):
        parents[len(indent)] = name
        listed.add("/".join(parents[level] for level in sorted(parents) if level <= len(indent)))
    folders = {str(path.parent.relative_to(ROOT)) for top in ("lmmods", "jax_engine")
               for path in (ROOT / top).rglob("__init__.py")}
    assert {folder for folder in listed if folder.split("/")[0] in ("lmmods", "jax_engine")} == folders


def test_files_named_in_contributing_exist():
    paths = re.findall(r"`((?:lmmods|jax_engine|tests|configs|docs)/[\w./]+)`", CONTRIBUTING)
    assert len(paths) > 20
    assert not [path for path in paths if not (ROOT / path).exists()]


def test_every_promise_has_an_existing_test():
    """The tests and folders that tests/README.md names exist."""
    page = (ROOT / "tests" / "README.md").read_text()
    tests = re.findall(r"`([\w/]+\.py)::(\w+)`", page)
    assert len(tests) > 15
    for path, test in tests:
        assert f"def {test}(" in (ROOT / "tests" / path).read_text(), test
    folders = {path.name for path in (ROOT / "tests").iterdir() if path.is_dir() and path.name != "__pycache__"}
    assert folders == set(re.findall(r"`(\w+)`", page.split("Helpers")[0].split("|---|---|")[1])) - {"lmmods"}
