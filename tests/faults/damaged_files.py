"""Data files of every format with one fault, generated from a seed: the same seed gives the same file."""

import bz2
import gzip
import io
import json
import lzma
from dataclasses import dataclass
from random import Random
from typing import Any

import pyarrow as pa
import pyarrow.parquet

HUGE, TOO_LARGE = "@huge@", "@too large@"  # placeholders for numbers that json.dumps cannot write
WORDS = "the quick brown fox jumps over lazy dog naïve Größe 東京 42 +1 \n \t {x} </s> [MASK]".split(" ")


@dataclass
class Case:
    """A damaged file.

    Args:
        task: Data module that reads it: sft, clm, mlm or qa.
        name: File name.
        contents: Bytes of the file.
        num_rows: Number of rows in it; None if the damage makes it uncertain.
        description: The damage, for the message of a failed test.
    """

    task: str
    name: str
    contents: bytes
    num_rows: int | None
    description: str


def make_text(random: Random) -> str:
    return " ".join(random.choices(WORDS, k=random.randint(1, 12))).strip() or "x"


def make_chat(random: Random, role: str, content: str) -> list[dict]:
    names = ("user", "assistant") if role == "role" else ("human", "gpt")
    return [{role: name, content: make_text(random)} for name in names * random.randint(1, 2)]


def make_tree(random: Random, depth: int = 2) -> dict:
    replies = [make_tree(random, depth - 1) for _ in range(random.randint(0, 2))] if depth else []
    return {"text": make_text(random), "role": "prompter" if depth % 2 == 0 else "assistant",
            "rank": random.choice([0, 1, None]), "replies": replies}


def make_question(random: Random) -> dict:
    context = make_text(random) + " fox " + make_text(random)
    return {"id": str(random.random()), "question": make_text(random), "context": context,
            "answers": {"text": ["fox"], "answer_start": [context.index("fox")]}}


LAYOUTS = {
    "alpaca": ("sft", lambda r: {"instruction": make_text(r), "input": make_text(r), "output": make_text(r)}),
    "pair": ("sft", lambda r: {"prompt": make_text(r), "completion": make_text(r)}),
    "messages": ("sft", lambda r: {"messages": make_chat(r, "role", "content"), "tools": None}),
    "sharegpt": ("sft", lambda r: {"conversations": make_chat(r, "from", "value"), "system": make_text(r)}),
    "hh": ("sft", lambda r: {"chosen": f"\n\nHuman: {make_text(r)}\n\nAssistant: {make_text(r)}", "rejected": "x"}),
    "trees": ("sft", lambda r: {"message_tree_id": make_text(r), "prompt": make_tree(r)}),
    "posts": ("sft", lambda r: {"message_id": str(r.randint(0, 9)), "parent_id": r.choice([None, "1", "2"]),
                                "text": make_text(r), "role": r.choice(["prompter", "assistant"])}),
    "instances": ("sft", lambda r: {"instruction": make_text(r),
                                    "instances": [{"input": make_text(r), "output": make_text(r)}]}),
    "text": ("clm", lambda r: {"text": make_text(r), "meta": {"n": [1, 2]}}),
    "masked": ("mlm", lambda r: {"text": make_text(r)}),
    "question": ("qa", make_question),
    "posed": ("qa", lambda r: {**make_question(r), "is_impossible": r.choice([True, False])}),
}
REGROUPED = ("trees", "posts", "instances", "squad")  # one row of the file is not one counted row
ENDINGS = ("jsonl", "json", "csv", "tsv", "parquet", "arrow")
VALUES = (
    None, True, 0, -1, 10**17, 0.5, float("nan"), float("inf"), HUGE, TOO_LARGE,
    "", " ", "x", "\0", "a\0b", "\ud800", "NaN", "1e999", "[]", "null", "\ufeff", "a" * 20_000,
    [], [[]], [None], {}, {"": None}, {"text": ["x"]}, [{"role": "user"}], [{"from": 3, "value": []}],
    {"text": ["x"], "answer_start": [float("inf")]}, {"text": ["x"], "answer_start": [-(10**30)]},
    {"text": "x", "answer_start": 3}, {"text": ["x"], "answer_start": [None]}, [{"text": None, "answer_start": 0}],
    json.loads("[" * 400 + "]" * 400),
)


def spoil(random: Random, row: dict[str, Any]) -> dict[str, Any]:
    """Return a copy of a row with one change, at the top level or nested."""
    node, row = row, json.loads(json.dumps(row))
    node = row
    while random.random() < 0.4:
        inner = [item for item in (node.values() if isinstance(node, dict) else node) if isinstance(item, (dict, list))]
        if not any(inner):
            break
        node = random.choice([item for item in inner if item])
    key = random.choice(list(node) if isinstance(node, dict) else range(len(node)))
    action = random.choice(["value", "value", "value", "remove", "add", "rename"])
    if action == "value" or not isinstance(node, dict):
        node[key] = random.choice(VALUES)
    elif action == "add":
        name = random.choice(["", "text", "messages", "id", "answers", "starts", "x" * 500, "a.b"])
        node[name] = random.choice(VALUES)
    else:
        value = node.pop(key)
        if action == "rename":
            node[key.upper() + " "] = value
    return row


def encode_rows(rows: list[dict], ending: str, random: Random) -> bytes:
    """Return a file with these rows; Arrow formats raise if the rows do not fit one schema."""
    if ending in ("parquet", "arrow"):
        table = pa.Table.from_pylist(rows)
        sink = io.BytesIO()
        if ending == "parquet":
            pa.parquet.write_table(table, sink, compression=random.choice(["none", "snappy", "gzip"]))
        else:
            open_writer = random.choice([pa.ipc.new_stream, pa.ipc.new_file])
            with open_writer(sink, table.schema) as writer:
                writer.write_table(table)
        return sink.getvalue()
    if ending in ("csv", "tsv"):
        names = list(dict.fromkeys(name for row in rows for name in row))
        cells = [names, *([format_cell(row.get(name)) for name in names] for row in rows)]
        separator = "," if ending == "csv" else "\t"
        lines = [separator.join('"' + str(value).replace('"', '""') + '"' for value in line) for line in cells]
        return "\n".join(lines).encode("utf-8", "replace")
    if ending == "json":
        return to_json(rows if random.random() < 0.7 else {"version": "1", "data": rows}, random)
    return b"\n".join(to_json(row) for row in rows)


def format_cell(value: Any) -> str:
    return "" if value is None else value if isinstance(value, str) else to_json(value).decode()


def to_json(value: Any, random: Random | None = None) -> bytes:
    text = json.dumps(value, indent=random.choice([None, 1]) if random else None)
    return text.replace(f'"{HUGE}"', "9" * 5000).replace(f'"{TOO_LARGE}"', "1e999").encode()


def to_squad(rows: list[dict]) -> dict:
    return {"data": [{"title": "t", "paragraphs": [
        {"context": row.get("context"), "qas": [{key: row[key] for key in row if key != "context"}]}]} for row in rows]}


def damage_bytes(random: Random, contents: bytes) -> tuple[bytes, str]:
    """Damage a file in a random way; return it and a description."""
    offset = random.randrange(len(contents) + 1)
    size = random.choice([1, 3, 40, 1000])
    damage = random.choice("truncate truncate flip flip flip remove repeat zeros random encoding tail".split())
    if damage == "truncate":
        contents = contents[:offset]
    elif damage == "flip":
        flipped = bytearray(contents)
        for _ in range(random.choice([1, 1, 5, 50])):
            flipped[random.randrange(len(flipped))] ^= 1 << random.randrange(8)
        contents = bytes(flipped)
    elif damage == "remove":
        contents = contents[:offset] + contents[offset + size :]
    elif damage == "repeat":
        contents = contents[:offset] + contents[max(0, offset - size) :]
    elif damage in ("zeros", "random"):
        middle = bytes(size) if damage == "zeros" else random.randbytes(size)
        contents = contents[:offset] + middle + contents[offset + size :]
    elif damage == "tail":
        contents += random.choice([b"\0", b"]", b"}", b",", b"\n\n\n", b'"', b"\x1a", contents[-30:]])
    else:
        encoding = random.choice(["utf-16", "utf-16-le", "utf-32", "utf-8-sig", "latin-1", "cr", "crlf"])
        as_text = contents.decode("utf-8", "replace")
        contents = (as_text.replace("\n", {"cr": "\r", "crlf": "\r\n"}[encoding]).encode() if encoding.startswith("cr")
                    else as_text.encode(encoding, "replace"))
        damage = encoding
    return contents, f"{damage} at {offset}, {size}"


def make_case(seed: int) -> Case:
    """Return the damaged file of this seed."""
    random = Random(seed)
    layout = random.choice(list(LAYOUTS))
    task, make_row = LAYOUTS[layout]
    rows = [make_row(random) for _ in range(random.randint(1, 6))]
    ending = random.choice(ENDINGS)
    is_known, description, contents = layout not in REGROUPED and ending != "json", "", b""
    if random.random() < 0.55:
        index = random.randrange(len(rows))
        rows[index] = spoil(random, rows[index])
        description = f"row {index + 1}: {str(rows[index])[:200]!r}"
    if task == "qa" and ending == "json" and random.random() < 0.7:
        is_known, contents = False, to_json(to_squad(rows))
    elif task in ("clm", "mlm") and random.random() < 0.2:
        is_known, ending = False, "txt"
        contents = "\n\n".join(str(row.get("text")) for row in rows).encode("utf-8", "surrogatepass")
    else:
        try:
            contents = encode_rows(rows, ending, random)
        except (pa.ArrowException, OverflowError, UnicodeEncodeError, RecursionError, TypeError):
            ending = "jsonl"
            contents = encode_rows(rows, ending, random)
    if not description:
        contents, description = damage_bytes(random, contents)
        is_known = False
    compression = random.choice([None] * 8 + ["gz", "bz2", "xz"])
    if compression:
        contents = {"gz": gzip.compress, "bz2": bz2.compress, "xz": lzma.compress}[compression](contents)
        ending += f".{compression}"
        if random.random() < 0.5:
            contents, damage = damage_bytes(random, contents)
            is_known, description = False, f"{description}, {compression}: {damage}"
    return Case(task, f"{layout}.{ending}", contents, len(rows) if is_known else None, description)
