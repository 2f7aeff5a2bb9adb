"""Regrouping of nested and scattered rows to rows of one conversation each."""

from collections.abc import Iterable, Iterator
from typing import Any

from lmmods.data.read.readers import Row


def flat_instances(rows: Iterable[Row]) -> Iterator[Row]:
    """self-instruct and unnatural-instructions: one row per instance and reformulation of an instruction.

    Damaged rows pass unchanged; conversion reports them.
    """
    for row in rows:
        items = [item for key in ("instances", "reformulations") for item in as_list(row.values.get(key))]
        if not items or not all(isinstance(item, dict) for item in items):
            yield row
            continue
        outer = {key: value for key, value in row.values.items() if key not in ("instances", "reformulations")}
        for item in items:
            yield row._replace(values={**outer, **item})


def oasst_messages(rows: Iterable[Row]) -> Iterator[Row]:
    """OASST1 message rows: one conversation per tree, with the best-ranked reply at each turn.

    All messages of the source are in memory, since the rows of a tree need not be adjacent. A message whose parent is
    missing starts a conversation. Messages without a usable id, or in a cycle of parents, pass unchanged; conversion
    reports them.
    """
    messages_read = []
    for row in rows:
        if all(isinstance(row.values.get(key), str | int | None) for key in ("message_id", "parent_id")):
            messages_read.append(row)
        else:
            yield row
    ids = {row.values.get("message_id") for row in messages_read}
    replies: dict[Any, list[Row]] = {}
    roots = []
    for row in messages_read:
        parent = row.values.get("parent_id")
        replies.setdefault(parent, []).append(row)
        if parent is None or parent not in ids:
            roots.append(row)
    yield from _find_unrooted(roots, replies, messages_read)
    for root in roots:
        messages, answers = [root.values], replies.get(root.values.get("message_id"), [])
        while answers:
            # Rank 0 is the best reply; unranked ones come last.
            best = min(answers, key=lambda row: _rank(row.values)).values
            messages.append(best)
            # an id that is its own ancestor would never end
            answers = replies.pop(best.get("message_id"), [])
        yield root._replace(values={"messages": messages})


def _find_unrooted(roots: list[Row], replies: dict[Any, list[Row]], messages: list[Row]) -> Iterator[Row]:
    """Return the messages that are not reachable from any root."""
    waiting, reached = list(roots), set()
    while waiting:
        row = waiting.pop()
        name = row.values.get("message_id")
        if name not in reached:
            reached.add(name)
            waiting += replies.get(name, [])
    yield from (row for row in messages if row.values.get("message_id") not in reached)


def oasst_trees(rows: Iterable[Row]) -> Iterator[Row]:
    """OASST1 tree rows (`prompt` with nested `replies`): one conversation per tree, of the best-ranked replies."""
    for row in rows:
        messages, node = [], row.values.get("prompt")
        while isinstance(node, dict):
            messages.append({key: value for key, value in node.items() if key != "replies"})
            answers = [reply for reply in as_list(node.get("replies")) if isinstance(reply, dict)]
            node = min(answers, key=_rank, default=None)
        outer = {key: value for key, value in row.values.items() if key not in ("message_tree_id", "prompt")}
        yield row._replace(values={**outer, "messages": messages})


def _rank(message: dict[str, Any]) -> float:
    rank = message.get("rank")
    return rank if isinstance(rank, int | float) else float("inf")


def as_list(value: Any) -> list:
    """Return the value if it is a list, else an empty list."""
    return value if isinstance(value, list) else []
