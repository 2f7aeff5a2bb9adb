"""Write the tables of keys on the pages of docs/ from the declarations of the keys: `make fields`.

A table follows its mark, `<!-- fields: NAME -->`. NAME is a block of the recipe (`model.lora`); `recipe` for the keys
next to the blocks; `trainer torch` for the keys of Lightning's trainer that JAX lacks; keys with commas between them
(`model.label_smoothing, model.z_loss`); the class of a task or its data, for the keys that it adds to those on
docs/fields.md; `conversations` for the keys of all data with conversations; `reward` for the keys of every reward,
`reward comparison` for the keys that all rewards with a correct answer share, `reward exact_match` for one's own keys.
"""

import re
from pathlib import Path
from typing import Any, Union

import yaml

from lmmods.commands.registry import options_of
from lmmods.recipe import keys
from lmmods.recipe.classes import BASES, class_name
from lmmods.recipe.images import ImageDataFields
from lmmods.recipe.rewards import NAMED, ComparisonReward, RewardSettings
from lmmods.recipe.tasks.base import ConversationFields
from lmmods.runs.identity import CUT, NOT_COMPARED, REPORTED, is_among

DOCS = Path(__file__).parents[1] / "docs"
TABLE = re.compile(r"(<!-- fields: (.+?) -->\n\n)(?:\|.*\n)*")
COLUMNS = "| type | default | meaning |\n|---|---|---|---|\n"
MARKS = {"†": REPORTED | NOT_COMPARED, "‡": CUT}  # keys that may change on resume
PAGE = re.compile(r"\bdocs/(\w+)\.md")  # as descriptions name a page
REWARDS = {"": RewardSettings, "comparison": ComparisonReward, **NAMED}
CLASSES = {class_name(cls): (block, cls) for block in BASES for cls in keys.task_classes(block)}
ALL = {key.name: key for key in keys.walk(keys.recipe_keys(options_of("fit")[0], "torch"), {
    block: (base, *keys.task_classes(block)) for block, base in BASES.items()})}


def fields_of(name: str) -> list[keys.Key]:
    """Return the keys of the table NAME; an empty list if there is no such table."""
    if name == "recipe":
        return [ALL["engine"], ALL["seed_everything"]]
    if name in CLASSES:
        block, cls = CLASSES[name]
        if block == "data":
            shared = keys.keys_of(next(base for base in (ImageDataFields, ConversationFields, BASES[block])
                                       if issubclass(cls, base)))
            return [key for field, key in keys.keys_of(cls, block).items() if field not in shared]
        # SFT adds generation, balance_loss and the keys of the token loss, which have tables on docs/fields.md.
        # Keys are compared, not only names: label_smoothing has another meaning in Preference.
        shared = keys.keys_of(CLASSES["SFT"][1], block)
        return [key for field, key in keys.keys_of(cls, block).items() if shared.get(field) != key]
    if name == "conversations":
        shared = keys.keys_of(BASES["data"])
        return [key for field, key in keys.keys_of(ConversationFields, "data").items() if field not in shared]
    if name in BASES:
        return list(keys.keys_of(BASES[name], name).values())
    if name.startswith("trainer"):
        on_jax = keys.keys_of(keys.TRAINERS["jax"])
        return [key for field, key in keys.keys_of(keys.TRAINERS["torch"], "trainer").items()
                if (field in on_jax) == (name == "trainer")]
    if name.partition(" ")[0] == "reward":
        cls = REWARDS[name.partition(" ")[2]]
        inherited = {} if cls is RewardSettings else keys.keys_of(cls.__base__)
        return [key for field, key in keys.keys_of(cls).items() if field not in inherited]
    block = [key for key in ALL.values() if key.name.rpartition(".")[0] == name]
    return block or [key for key in ALL.values() if key.name in name.split(", ")]


def default_of(key: keys.Key) -> str:
    """Return the default as YAML in backticks, `required`, or `below` for a block with its own table."""
    if key.default is keys.REQUIRED:
        return "required"
    return "below" if keys.block_in(type(key.default)) else f"`{as_yaml(key.default)}`"


def type_of(key: keys.Key) -> str:
    """Return the type in words, without the null that the default shows already."""
    members = [member for member in keys.members(key.type) if key.default is not None or member is not type(None)]
    return keys.in_words(Union[tuple(members)], key.name, as_type=True)  # noqa: UP007 - members from a list


def mark_of(key: keys.Key) -> str:
    """Return the mark of a key that may change on resume; empty for others."""
    return next((mark for mark, marked in MARKS.items() if is_among(key.name, marked)), "")


def as_yaml(value: Any) -> str:
    return yaml.safe_dump(value, default_flow_style=True, width=1000).removesuffix("...\n").strip()


def table(name: str, page: Path) -> str:
    """Return the table NAME for a page, with links relative to that page.

    Raises:
        ValueError: There is no such table.
    """
    up = "../" * (len(page.relative_to(DOCS).parts) - 1)
    rows = [(f"`{key.name}`{mark_of(key)}", type_of(key), default_of(key),
             PAGE.sub(rf"[\1]({up}\1.md)", key.text).replace("|", "\\|")) for key in fields_of(name)]
    if not rows:
        raise ValueError(f"{page}: unknown table {name}. Fix its mark, <!-- fields: NAME -->.")
    is_marked = any(row[0][-1] in MARKS for row in rows) and page.name != "fields.md"  # which explains the marks
    legend = f" [†]({up}fields.md#what-may-change-on-resume)" if is_marked else ""
    return f"| key{legend} {COLUMNS}" + "".join(f"| {' | '.join(row)} |\n" for row in rows)


def pages() -> dict[Path, str]:
    """Return the text that each page of docs/ should have."""
    return {page: TABLE.sub(lambda mark, page=page: mark[1] + table(mark[2], page), page.read_text())
            for page in sorted(DOCS.rglob("*.md"))}


if __name__ == "__main__":
    for path, text in pages().items():
        path.write_text(text)
