"""Data files of every kind with one thing wrong, drawn by number: the same number gives the same file."""

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

HUGE, TOO_LARGE = "@huge@", "@too large@"  # numbers that json.dumps cannot write; they take these texts' places
WORDS = "the quick brown fox jumps over lazy dog naïve Größe 東京 42 +1 \n \t {x} </s> [MASK]".split(" ")


@dataclass
class Case:
    """A file and what is known of it.

    Args:
        task: Data module that shall read it: sft, clm, mlm or qa.
        name: File name.
        contents: Bytes of the file.
        num_rows: Rows that are in it, where damage leaves that certain.
        what: What was done, for the message of a failed test.
    """

    task: str
    name: str
    contents: bytes
    num_rows: int | None
    what: str


def text(random: Random) -> str:
    return " ".join(random.choices(WORDS, k=random.randint(1, 12))).strip() or "x"


def chat(random: Random, role: str, content: str) -> list[dict]:
    names = ("user", "assistant") if role == "role" else ("human", "gpt")
    return [{role: name, content: text(random)} for name in names * random.randint(1, 2)]


def tree(random: Random, depth: int = 2) -> dict:
    replies = [tree(random, depth - 1) for _ in range(random.randint(0, 2))] if depth else []
    return {"text": text(random), "role": "prompter" if depth % 2 == 0 else "assistant",
            "rank": random.choice([0, 1, None]), "replies": replies}


def question(random: Random) -> dict:
    context = text(random) + " fox " + text(random)
    return {"id": str(random.random()), "question": text(random), "context": context,
            "answers": {"text": ["fox"], "answer_start": [context.index("fox")]}}


LAYOUTS = {
    "alpaca": ("sft", lambda r: {"instruction": text(r), "input": text(r), "output": text(r)}),
    "pair": ("sft", lambda r: {"prompt": text(r), "completion": text(r)}),
    "messages": ("sft", lambda r: {"messages": chat(r, "role", "content"), "tools": None}),
    "sharegpt": ("sft", lambda r: {"conversations": chat(r, "from", "value"), "system": text(r)}),
    "hh": ("sft", lambda r: {"chosen": f"\n\nHuman: {text(r)}\n\nAssistant: {text(r)}", "rejected": "x"}),
    "trees": ("sft", lambda r: {"message_tree_id": text(r), "prompt": tree(r)}),
    "posts": ("sft", lambda r: {"message_id": str(r.randint(0, 9)), "parent_id": r.choice([None, "1", "2"]),
                                "text": text(r), "role": r.choice(["prompter", "assistant"])}),
    "instances": ("sft", lambda r: {"instruction": text(r), "instances": [{"input": text(r), "output": text(r)}]}),
    "text": ("clm", lambda r: {"text": text(r), "meta": {"n": [1, 2]}}),
    "masked": ("mlm", lambda r: {"text": text(r)}),
    "question": ("qa", question),
    "posed": ("qa", lambda r: {**question(r), "is_impossible": r.choice([True, False])}),
}
REGROUPED = ("trees", "posts", "instances", "squad")  # rows of the file and rows that are counted are not the same
ENDINGS = ("jsonl", "json", "csv", "tsv", "parquet", "arrow")
VALUES = (
    None, True, 0, -1, 10**17, 0.5, float("nan"), float("inf"), HUGE, TOO_LARGE,
    "", " ", "x", "\0", "a\0b", "\ud800", "NaN", "1e999", "[]", "null", "\ufeff", "a" * 20_000,
    [], [[]], [None], {}, {"": None}, {"text": ["x"]}, [{"role": "user"}], [{"from": 3, "value": []}],
    {"text": ["x"], "answer_start": [float("inf")]}, {"text": ["x"], "answer_start": [-(10**30)]},
    {"text": "x", "answer_start": 3}, {"text": ["x"], "answer_start": [None]}, [{"text": None, "answer_start": 0}],
    json.loads("[" * 400 + "]" * 400),
)


def spoiled(random: Random, row: dict[str, Any]) -> dict[str, Any]:
    """A row with one thing other than it should be, at its top or inside."""
    node, row = row, json.loads(json.dumps(row))
    node = row
    while random.random() < 0.4:
        inner = [item for item in (node.values() if isinstance(node, dict) else node) if isinstance(item, (dict, list))]
        if not any(inner):
            break
        node = random.choice([item for item in inner if item])
    place = random.choice(list(node) if isinstance(node, dict) else range(len(node)))
    action = random.choice(["value", "value", "value", "remove", "add", "rename"])
    if action == "value" or not isinstance(node, dict):
        node[place] = random.choice(VALUES)
    elif action == "add":
        name = random.choice(["", "text", "messages", "id", "answers", "starts", "x" * 500, "a.b"])
        node[name] = random.choice(VALUES)
    else:
        value = node.pop(place)
        if action == "rename":
            node[place.upper() + " "] = value
    return row


def written(rows: list[dict], ending: str, random: Random) -> bytes:
    """Rows as a file; arrow's kinds raise where the rows do not fit one schema."""
    if ending in ("parquet", "arrow"):
        table = pa.Table.from_pylist(rows)
        sink = io.BytesIO()
        if ending == "parquet":
            pa.parquet.write_table(table, sink, compression=random.choice(["none", "snappy", "gzip"]))
        else:
            new = random.choice([pa.ipc.new_stream, pa.ipc.new_file])
            with new(sink, table.schema) as writer:
                writer.write_table(table)
        return sink.getvalue()
    if ending in ("csv", "tsv"):
        names = list(dict.fromkeys(name for row in rows for name in row))
        cells = [names, *([cell(row.get(name)) for name in names] for row in rows)]
        mark = "," if ending == "csv" else "\t"
        lines = [mark.join('"' + str(value).replace('"', '""') + '"' for value in line) for line in cells]
        return "\n".join(lines).encode("utf-8", "replace")
    if ending == "json":
        return in_json(rows if random.random() < 0.7 else {"version": "1", "data": rows}, random)
    return b"\n".join(in_json(row) for row in rows)


def cell(value: Any) -> str:
    return "" if value is None else value if isinstance(value, str) else in_json(value).decode()


def in_json(value: Any, random: Random | None = None) -> bytes:
    text = json.dumps(value, indent=random.choice([None, 1]) if random else None)
    return text.replace(f'"{HUGE}"', "9" * 5000).replace(f'"{TOO_LARGE}"', "1e999").encode()


def squad(rows: list[dict]) -> dict:
    return {"data": [{"title": "t", "paragraphs": [
        {"context": row.get("context"), "qas": [{key: row[key] for key in row if key != "context"}]}]} for row in rows]}


def damaged_bytes(random: Random, contents: bytes) -> tuple[bytes, str]:
    """A file cut, flipped, with a piece gone, twice or of zeros, or in another encoding."""
    place = random.randrange(len(contents) + 1)
    size = random.choice([1, 3, 40, 1000])
    damage = random.choice("cut cut flip flip flip gone twice zeros random encoding tail".split())
    if damage == "cut":
        contents = contents[:place]
    elif damage == "flip":
        changed = bytearray(contents)
        for _ in range(random.choice([1, 1, 5, 50])):
            changed[random.randrange(len(changed))] ^= 1 << random.randrange(8)
        contents = bytes(changed)
    elif damage == "gone":
        contents = contents[:place] + contents[place + size :]
    elif damage == "twice":
        contents = contents[:place] + contents[max(0, place - size) :]
    elif damage in ("zeros", "random"):
        middle = bytes(size) if damage == "zeros" else random.randbytes(size)
        contents = contents[:place] + middle + contents[place + size :]
    elif damage == "tail":
        contents += random.choice([b"\0", b"]", b"}", b",", b"\n\n\n", b'"', b"\x1a", contents[-30:]])
    else:
        encoding = random.choice(["utf-16", "utf-16-le", "utf-32", "utf-8-sig", "latin-1", "cr", "crlf"])
        as_text = contents.decode("utf-8", "replace")
        contents = (as_text.replace("\n", {"cr": "\r", "crlf": "\r\n"}[encoding]).encode() if encoding.startswith("cr")
                    else as_text.encode(encoding, "replace"))
        damage = encoding
    return contents, f"{damage} at {place}, {size}"


def case(number: int) -> Case:
    """Damaged file of this number."""
    random = Random(number)
    layout = random.choice(list(LAYOUTS))
    task, make = LAYOUTS[layout]
    rows = [make(random) for _ in range(random.randint(1, 6))]
    ending = random.choice(ENDINGS)
    known, what, contents = layout not in REGROUPED and ending != "json", "", b""
    if random.random() < 0.55:
        place = random.randrange(len(rows))
        rows[place] = spoiled(random, rows[place])
        what = f"row {place + 1}: {str(rows[place])[:200]!r}"
    if task == "qa" and ending == "json" and random.random() < 0.7:
        known, contents = False, in_json(squad(rows))
    elif task in ("clm", "mlm") and random.random() < 0.2:
        known, ending = False, "txt"
        contents = "\n\n".join(str(row.get("text")) for row in rows).encode("utf-8", "surrogatepass")
    else:
        try:
            contents = written(rows, ending, random)
        except (pa.ArrowException, OverflowError, UnicodeEncodeError, RecursionError, TypeError):
            ending = "jsonl"
            contents = written(rows, ending, random)
    if not what:
        contents, what = damaged_bytes(random, contents)
        known = False
    packing = random.choice([None] * 8 + ["gz", "bz2", "xz"])
    if packing:
        contents = {"gz": gzip.compress, "bz2": bz2.compress, "xz": lzma.compress}[packing](contents)
        ending += f".{packing}"
        if random.random() < 0.5:
            contents, more = damaged_bytes(random, contents)
            known, what = False, f"{what}, {packing}: {more}"
    return Case(task, f"{layout}.{ending}", contents, len(rows) if known else None, what)
