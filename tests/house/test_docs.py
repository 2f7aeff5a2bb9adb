"""The documentation says what the program does: links, keys, defaults, messages and commands against the code."""

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
# What a fragment of YAML on a page is laid over, and the recipe that stands for one which the reader has made.
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


def fences(text: str) -> list[tuple[str, str, str]]:
    """(comment before it, language, content) of the fenced blocks of a page."""
    found = re.findall(r"(?:<!-- ([^\n]*?) -->\n)?^```(\w*)\n(.*?)^```$", text, re.S | re.M)
    return [(comment, language, content) for comment, language, content in found]


def commands(text: str) -> list[list[str]]:
    """Arguments of each `python train.py` or `train.py` command of a page, in fenced or indented blocks."""
    code = [content for _, language, content in fences(text) if language in ("bash", "")]
    code += re.findall(r"(?:^    .*\n?)+", re.sub(r"^```.*?^```$", "", text, flags=re.S | re.M), re.M)
    lines = "".join(code).replace("\\\n", " ").split("\n")
    return [shlex.split(line.split("train.py", 1)[1].split("#")[0]) for line in lines if "train.py " in line]


def shipped(arguments: list[str]) -> list[str] | None:
    """The same command on files of the repository; None where it is not one that can be parsed."""
    stands_for = {"my.yaml": "configs/sft_qlora.yaml"}
    made = {f"runs/{path.stem}/config.yaml": f"configs/{path.name}" for path in (ROOT / "configs").glob("*.yaml")}
    made["runs/sft/config.yaml"] = "configs/sft_qlora.yaml"
    replaced = [(stands_for | made).get(each, each) for each in arguments]
    paths = [each for option, each in itertools.pairwise(replaced) if option == "--config"]
    has_variables = any("$" in each for each in arguments)
    return replaced if paths and not has_variables and all((ROOT / path).is_file() for path in paths) else None


# Links ------------------------------------------------------------------------------------------------------------


def anchors(page: Path) -> set[str]:
    """Anchors of a page's headings, as GitHub makes them."""
    titles = re.findall(r"^#+ (.*)$", re.sub(r"^```.*?^```$", "", page.read_text(), flags=re.S | re.M), re.M)
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


@pytest.mark.parametrize("page", PAGES, ids=NAMES)
def test_links_lead_somewhere(page):
    for target in re.findall(r"\]\(([^)\s]+)\)", page.read_text()):
        if "://" in target:
            continue
        path, _, anchor = target.partition("#")
        file = (page.parent / path).resolve() if path else page
        assert file.exists(), target
        assert not anchor or anchor in anchors(file), target


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
    asked = []
    for arguments in commands(text):
        if arguments and arguments[0] in PARSERS:
            PARSERS[arguments[0]](arguments[1:])
        elif (known := shipped(arguments)) is not None and known not in asked:
            asked.append(known)
    base = BASES.get(page.stem, "sft_qlora")
    for number, (comment, language, content) in enumerate(fences(text)):
        if language == "yaml":
            path = tmp_path / f"{number}.yaml"
            path.write_text(content)
            under = comment.removeprefix("over ") if comment.startswith("over ") else base
            asked.append(["fit", "--config", f"configs/{under}.yaml", "--config", str(path)])
    for arguments in asked:
        status = main([*arguments, "--print_config"])
        assert status == 0, f"{arguments}: {capsys.readouterr().err}"


def test_every_shipped_recipe_is_on_the_page():
    page = (ROOT / "docs" / "recipes.md").read_text()
    for path in (ROOT / "configs").rglob("*.yaml"):
        assert f"(../{path.relative_to(ROOT)})" in page, path


# Keys and defaults ------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def by_task() -> dict[str, dict[str, object]]:
    """Every key that a recipe of a task may have, by its dotted path, with its default."""
    found = {}
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
        if "best_of" in content["model"]:  # null, too, but without a place in the table of `model`
            content["model"]["best_of"] = {each.name: each.default for each in dataclasses.fields(BestOf)}
        if "teacher" in content["model"]:
            content["model"]["teacher"] = {each.name: each.default for each in dataclasses.fields(Teacher)}
        found[task] = flat(content) | {f"model.lora.{name}": value for name, value in vars(LoRA()).items()}
        found[task] |= {f"data.source.{name}": value for name, value in vars(Source("required")).items()}
        found[task]["data.source"] = "required"
    return found


@pytest.fixture(scope="module")
def known(by_task) -> set[str]:
    return {key for keys in by_task.values() for key in keys} | {f"data.mixing.{name}" for name in vars(Mixing())}


def flat(tree: dict, prefix: str = "") -> dict[str, object]:
    found: dict[str, object] = {}
    for name, value in tree.items():
        found[prefix + name] = value
        if isinstance(value, dict):
            found |= flat(value, f"{prefix}{name}.")
    return found


def unknown_keys(text: str, known: set[str]) -> list[str]:
    """Keys in backticks, with or without a value, that no recipe has."""
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
def test_keys_exist(page, known):
    content = re.sub(r"^```.*?^```$", "", page.read_text(), flags=re.S | re.M)
    if page.name == "migration.md":  # whose first columns are keys of other programs
        content = re.sub(r"^\|[^|]*\|", "|", content, flags=re.M)
    assert not unknown_keys(content, known)


@pytest.mark.slow
def test_keys_named_for_other_programs_exist(known):
    """In all tables, also the rows that docs/migration.md omits."""
    rows = [row for row in read_rows() if row.cells[1] not in NO_KEY]
    assert len(rows) > 300
    for row in rows:
        assert not set(row.cells[1].split(", ")) - known, row.cells
    assert not unknown_keys("\n".join(row.cells[2] for row in read_rows()), known)


def rows_of_keys(path: Path) -> list[tuple[str, str, str]]:
    """Key, mark († or ‡ if it may change on resume) and default of each row in a page's generated tables."""
    tables = "".join(re.findall(r"^<!-- fields: .+? -->\n\n((?:\|.*\n)*)", path.read_text(), re.M))
    return re.findall(r"^\| `(\w+\.[\w.]+|engine|seed_everything)`([†‡]?) \| [^|]+ \| (`[^`]+`|required|below) \|",
                      tables, re.M)


def told(path: str) -> dict[str, str]:
    """Keys and defaults in the tables of a page."""
    rows = rows_of_keys(ROOT / "docs" / path)
    found = {key: default.strip("`") for key, _, default in rows}
    assert len(found) == len(rows), path
    return found


def marks() -> dict[str, str]:
    """Mark of each key in the tables of all pages; a key has the same on each."""
    rows = {(key, mark) for page in PAGES for key, mark, _ in rows_of_keys(page)}
    assert len(dict(rows)) == len(rows)
    return dict(rows)


@pytest.mark.slow
@pytest.mark.parametrize("task", TASKS)
def test_tables_of_fields_are_complete_and_right(task, by_task):
    kind = declared("model")[task]
    shared, own = told("fields.md") | told("metrics.md"), told(f"tasks/{kind.__module__.rpartition('.')[2]}.md")
    if not issubclass(kind, CausalFields):
        of_decoders = ("model.generation", "model.best_of", "model.balance_loss")
        shared = {key: value for key, value in shared.items() if not key.startswith(of_decoders)}
    if not hasattr(kind, "z_loss"):  # its loss is none of tokens
        of_tokens = ("model.label_smoothing", "model.z_loss", "model.teacher")
        shared = {key: value for key, value in shared.items() if not key.startswith(of_tokens)}
    if not hasattr(kind, "dft"):
        shared.pop("model.dft")
    if not issubclass(declared("data")[kind.takes], ConversationFields):
        of_conversations = keys_of(ConversationFields).keys() - keys_of(DataFields).keys()
        shared = {key: value for key, value in shared.items() if key.removeprefix("data.") not in of_conversations}
    assert not set(shared) & set(own)
    told_here = {key: default for key, default in {**shared, **own}.items() if default != "below"}
    wanted = {key for key, value in by_task[task].items() if not isinstance(value, dict)}

    def checked(keys) -> set[str]:  # of Lightning's own keys the page has those that both engines take
        return {key for key in keys if "." in key and not key.startswith("trainer.")}

    assert checked(told_here) == checked(wanted)
    for key, default in told_here.items():
        assert yaml.safe_load(default) == by_task[task][key], key


def test_tables_of_fields_are_those_of_the_code():
    """To write them anew: make fields"""
    for page, text in runpy.run_path(str(ROOT / ".ci" / "fields.py"))["pages"]().items():
        assert page.read_text() == text, page


# Messages ---------------------------------------------------------------------------------------------------------


def texts(node: ast.expr) -> list[str]:
    """The strings that an expression can be, with … for values."""
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return [node.value]
    if isinstance(node, ast.JoinedStr):
        return ["".join(part.value if isinstance(part, ast.Constant) else VALUE for part in node.values)]
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
        return [left + right for left in texts(node.left) for right in texts(node.right)]
    if isinstance(node, ast.IfExp):
        return texts(node.body) + texts(node.orelse)
    return [VALUE]


def expressions(tree: ast.AST) -> list[ast.expr]:
    """Messages of a module: what UserError and its kin are made of."""
    found = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Call):
            place = {"UserError": 0, "ForeignCode": 0, "NotFinite": 0, "BrokenRecipe": 0, "RowProblem": 0,
                     "RowError": 1, "_reject": 1, "refuse_value": 0
                     }.get(node.func.id) if isinstance(node.func, ast.Name) else 1 if (
                         isinstance(node.func, ast.Attribute) and node.func.attr == "report") else None
            if place is not None and len(node.args) > place:
                found.append(node.args[place])
        elif isinstance(node, ast.FunctionDef) and node.name in ("problem", "quantised_in_full", "in_english"):
            found += [part.value for part in ast.walk(node) if isinstance(part, ast.Return) and part.value is not None]
    return found


@functools.cache
def messages() -> set[str]:
    """Every message that a mistake of the user can bring, with … for values."""
    files = [*(ROOT / "lmmods").rglob("*.py"), *(ROOT / "jax_engine").rglob("*.py")]
    found = {text for file in files for node in expressions(ast.parse(file.read_text())) for text in texts(node)}
    return {text for text in found if len(re.findall(r"[a-z]", text)) >= 4}  # others only pass one on


def entries() -> list[tuple[str, str]]:
    """Rows of the page: message, and what there is to say about it."""
    return re.findall(r"^\| `(.*?)` \| (.*) \|$", (ROOT / "docs" / "troubleshooting.md").read_text(), re.M)


def fits(entry: str, message: str) -> bool:
    """Whether an entry is the beginning of a message, with … for any values, and has its first words."""
    begins = re.match(".*".join(re.escape(part) for part in entry.split(VALUE)), message, re.S)
    return bool(begins) and (entry == FORM or first_words(entry) == first_words(message))


def first_words(message: str) -> list[str]:
    return re.findall(r"[A-Za-z][\w.]*", message)[:3]


def test_no_explained_message_is_gone():
    found = messages()
    named = [entry for entry, _ in entries()]
    gone = [entry for entry in named if not any(fits(entry, message) for message in found)]
    assert len(found) > 150 and len(named) > 70
    assert not gone, "\n".join(gone)
    assert all(len(re.findall(r"[a-z]", entry)) >= 4 for entry in named)
    assert len(named) == len(set(named))


def test_explanations_say_more_than_their_messages():
    """A third of the words of an explanation, and three at least, are not in the message, in whatever form."""
    for entry, explanation in entries():
        said = " ".join(message for message in messages() if fits(entry, message))
        stems, of_message = (list(dict.fromkeys(word[:5] for word in re.findall(r"[a-z_]{4,}", text.lower())))
                             for text in (explanation, said))
        new = [stem for stem in stems if stem not in of_message]
        assert len(new) >= max(3, len(stems) / 3), f"{entry}: {explanation}"


# Examples run -----------------------------------------------------------------------------------------------------


def tiny(arguments: list[str], steps: int) -> list[str]:
    """A command with as little to do as possible."""
    if arguments[0] == "inspect" or arguments[0] in PARSERS:
        return arguments
    return [*arguments, *TINY, *([*TINY_FIT, "--trainer.max_steps", str(steps)] if arguments[0] == "fit" else [])]


@pytest.fixture
def tree(tmp_path, monkeypatch) -> Path:
    """An empty folder with the demo assets and the recipes in it."""
    for name in ("demo", "configs"):
        (tmp_path / name).symlink_to(ROOT / name)
    monkeypatch.chdir(tmp_path)
    return tmp_path


RUN = [page for page in PAGES if "<!-- run -->" in page.read_text()]


@pytest.mark.slow
@pytest.mark.parametrize("page", RUN, ids=lambda page: page.stem)
def test_examples_run(page, tree, capfd):
    for comment, _, content in fences(page.read_text()):
        if comment != "run":
            continue
        shell = "\n".join(line for line in content.split("\n") if "train.py" not in line)
        for arguments in commands(f"```bash\n{content}```"):
            assert main(tiny(arguments, 4 if "--ckpt_path" in arguments else 2)) == 0, capfd.readouterr().err
        subprocess.run(["bash", "-euc", shell], check=True)


@pytest.mark.slow
def test_the_new_task_of_the_page_trains(tree, monkeypatch, capsys):
    """As printed: the files where the page says, which more folders of the same packages stand for, and the recipe."""
    printed = {"lmmods.data": "class RetellCodec(SFTCodec):",
               "lmmods.torch_engine.tasks": "class Retell(CausalModule):",
               "jax_engine.tasks": "class Retell(CausalTask):"}
    blocks = [content for _, _, content in fences((ROOT / "docs" / "extending.md").read_text())]
    [recipe] = [block for block in blocks if "class_path: Retell," in block]
    (tree / "retell.yaml").write_text(recipe)
    for package, marker in printed.items():
        if package == "jax_engine.tasks":
            assert main(tiny(["fit", "--config", "retell.yaml", "--engine", "jax"], 2)) == 2
            assert "model is Retell, which only engine torch supports" in capsys.readouterr().err
        folder = tree.joinpath(*package.split("."))
        folder.mkdir(parents=True)
        (folder / "retell.py").write_text(next(block for block in blocks if marker in block))
        module = importlib.import_module(package)
        monkeypatch.setattr(module, "__path__", [*module.__path__, str(folder)])
    assert main(tiny(["fit", "--config", "retell.yaml"], 2)) == 0
    assert main(tiny(["inspect", "--config", "retell.yaml", "--engine", "jax", "--rows", "1"], 2)) == 0
    report = json.loads((tree / "runs/retell/data_report.json").read_text())
    assert report["splits"]["train"]["rows"] > 100


def test_the_public_names_of_the_page_exist():
    section = (ROOT / "docs" / "extending.md").read_text().partition("## Public names")[2]
    rows = [line.split("|")[1:3] for line in section.splitlines() if line.startswith("| `")]
    assert len(rows) > 20
    for names, module in rows:
        for name in re.findall("`(.+?)`", names):
            assert hasattr(importlib.import_module(module.strip(" `")), name), (name, module)


def test_the_new_family_of_the_page_is_one():
    from transformers import LlamaConfig

    pages = fences((ROOT / "docs" / "extending.md").read_text())
    scope: dict = {}
    exec(next(content for _, _, content in pages if "FAMILY = " in content), scope)
    assert set(scope["FAMILY"].classes) == {"causal", "qa", "sequence", "token"}
    config = LlamaConfig(hidden_size=64, num_attention_heads=4, num_key_value_heads=2)
    assert scope["FAMILY"].architecture(config).num_heads == 4


# The house ----------------------------------------------------------------------------------------------------------

CONTRIBUTING = (ROOT / "CONTRIBUTING.md").read_text()


def test_the_tree_has_every_folder():
    """By indentation: each package of both engines stands in the tree of CONTRIBUTING, and nothing else does."""
    shown, parents = set(), {}
    for indent, name in re.findall(r"^    ( *)([\w.]+)/(?: |$)", CONTRIBUTING, re.M):
        parents[len(indent)] = name
        shown.add("/".join(parents[level] for level in sorted(parents) if level <= len(indent)))
    folders = {str(path.parent.relative_to(ROOT)) for top in ("lmmods", "jax_engine")
               for path in (ROOT / top).rglob("__init__.py")}
    assert {folder for folder in shown if folder.split("/")[0] in ("lmmods", "jax_engine")} == folders


def test_the_files_of_usual_changes_are_there():
    """Files that CONTRIBUTING names exist."""
    named = re.findall(r"`((?:lmmods|jax_engine|tests|configs|docs)/[\w./]+)`", CONTRIBUTING)
    assert len(named) > 20
    assert not [path for path in named if not (ROOT / path).exists()]


def test_promises_have_their_tests():
    """Each test that tests/README.md names is there, and so is each folder."""
    page = (ROOT / "tests" / "README.md").read_text()
    named = re.findall(r"`([\w/]+\.py)::(\w+)`", page)
    assert len(named) > 15
    for path, test in named:
        assert f"def {test}(" in (ROOT / "tests" / path).read_text(), test
    rooms = {path.name for path in (ROOT / "tests").iterdir() if path.is_dir() and path.name != "__pycache__"}
    assert rooms == set(re.findall(r"`(\w+)`", page.split("Helpers")[0].split("|---|---|")[1])) - {"lmmods"}
