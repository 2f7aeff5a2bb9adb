"""The data report: counts as plain JSON, and a short table of them."""

from collections.abc import Callable
from typing import Any

import numpy as np

from lmmods.data.batch.packing import best_fit_decreasing
from lmmods.data.codec import Codec, Settings
from lmmods.data.encode.encoder import SPELLED, UNUSED, describe_dropped
from lmmods.data.order.sampler import OrderRule, evaluation_order, training_order
from lmmods.data.read.by_role import Role
from lmmods.data.store.rows import RowSet

SAMPLE = 200_000  # rows from which the padding of larger sets is estimated
MAX_UNKNOWN = 0.03  # fraction of unknown tokens above which a vocabulary probably does not fit the texts
MAX_UNUSED = 30  # keys that the table names; data_report.json names all
# Parts of rows that are in no token, in words.
LEFT_OVER = {"not_used": "not used", "for_rewards": "only for rewards"}
EVALUATIONS = {"val": "Validation", "test": "Test", "predict": "Predict"}
MAX_LABELS = 12  # labels that the table counts; data_report.json counts all


def describe(settings: Settings, codec: Codec, sets: dict[Role, RowSet], items_of: Callable[[Role], Any],
             tokenizer_notes: list[str], batches_per_step: int, mixing: dict[str, Any] | None = None,
             left_out: dict[str, dict[str, Any]] | None = None) -> dict[str, Any]:
    """Build the report on all open sets.

    Args:
        items_of: Returns the items of a role that an epoch has, a dataset with `lengths`.
        batches_per_step: Global micro-batches of an optimiser step.
        mixing: Shares of the training sources; None if each row comes once.
        left_out: By store, the rows that were dropped after it was written, by reason (`dropped`), and how many stay
            (`rows_kept`).
    """
    stores = {store.name: store for rows in sets.values() for store in rows.stores}
    sources: dict[str, Any] = {}
    for store in stores.values():
        path, later = store.info["path"], (left_out or {}).get(store.name, {})
        info = {**store.info, **later, "dropped": {**store.info["dropped"], **later.get("dropped", {})}}
        sources[path if path not in sources else f"{path} ({store.name})"] = describe_source(info, codec.left_over)
    splits = {
        role: describe_rows(items_of(role), settings.batch_size if role == "train" else settings.eval_batch_size,
                            settings.pad_to_multiple_of, settings.max_length, settings.seed,
                            batches_per_step if role == "train" else 1)
        | ({"labels": counts} if (counts := codec.count_labels(sets[role])) else {})
        for role in sets
        if role != "predict"
    }
    return {"sources": sources, "splits": splits, **({"mixing": mixing} if mixing else {}),
            "max_length": settings.max_length, "tokenizer": tokenizer_notes}


def describe_source(info: dict[str, Any], left_over: str) -> dict[str, Any]:
    """Return a summary of one source, from its store's info.json.

    Args:
        left_over: Key of the counts of columns that no token contains.
    """
    counts = {name: count for name, count in info["counts"].items() if not name.startswith((UNUSED, SPELLED))}
    unused = {_key_name(name): count for name, count in info["counts"].items() if name.startswith(UNUSED)}
    spelled = {name.removeprefix(SPELLED): count for name, count in info["counts"].items()
               if name.startswith(SPELLED)}
    notes = [*info.get("notes", []), *(f"column {name!r} of {rows} rows was replaced by the one that data.columns "
                                       "renames to it" for name, rows in info.get("replaced", {}).items())]
    tokens, kept = counts.get("tokens", 0), info["rows_kept"]
    return {
        **{key: info[key] for key in ("format", "template", "files", "rows_read", "rows_kept") if key in info},
        **({"notes": notes} if notes or "notes" in info else {}),
        "rows_dropped": sum(entry["rows"] for entry in info["dropped"].values()),
        "dropped": info["dropped"],
        **({left_over: dict(sorted(unused.items(), key=lambda item: (-item[1], item[0])))} if unused else {}),
        **({"special_tokens_spelled": dict(sorted(spelled.items()))} if spelled else {}),
        **counts,
        **({"labelled_share": counts["labelled_tokens"] / tokens} if tokens and "labelled_tokens" in counts else {}),
        **({"eos_share": counts["responses_complete"] / kept} if kept and "responses_complete" in counts else {}),
    }


def unknown_tokens(counts: dict[str, Any]) -> str | None:
    """Describe how many tokens of a source are unknown to the vocabulary; None if there are none."""
    unknown, tokens = counts.get("unknown_tokens", 0), counts.get("tokens", 0)
    return f"{unknown:,} of {tokens:,} tokens ({unknown / tokens:.1%})" if unknown else None


def describe_unknown_tokens(info: dict[str, Any]) -> str | None:
    """Describe a source with too many unknown tokens, from its store's info.json; None if there are few."""
    counts = info["counts"]
    if counts.get("unknown_tokens", 0) <= MAX_UNKNOWN * counts.get("tokens", 0):
        return None
    return (f"{info['path']}: {unknown_tokens(counts)} are unknown to the vocabulary, so the model cannot learn "
            "what they mean. Set data.tokenizer to one that fits the texts; if that is a folder with only "
            "vocab.txt, which is read in lower case, set data.tokenizer_options: {do_lower_case: false}. inspect "
            "--which most_unknown shows rows")


def describe_lost(role: Role, info: dict[str, Any]) -> list[str]:
    """Describe which rows of a source an evaluation does not see, or not as a whole, from its store's info.json."""
    evaluation, counts, lines = EVALUATIONS[role], info["counts"], []
    if info["dropped"]:
        lines.append(f"{evaluation} excludes rows of {info['path']}, {describe_dropped(info)}")
    if counts.get("rows_cut"):
        lines.append(f"{evaluation} does not cover all of {info['path']}: {counts['rows_cut']} of {info['rows_kept']} "
                     f"rows are longer than the limits and lose {counts['tokens_cut']} tokens in total")
    return lines


def _key_name(name: str) -> str:
    """Return the key that a count of unused keys refers to, in printable characters."""
    return name.removeprefix(UNUSED)[:80].encode(errors="backslashreplace").decode()


def describe_rows(items: Any, batch_size: int, multiple: int, max_length: int, seed: int,
                  batches_per_step: int) -> dict[str, Any]:
    """Return the size and lengths of a split, and the fraction of padding for each way of batching.

    Args:
        items: Dataset with `lengths`, and with `tokens` if items are several sequences.
        multiple: Batch lengths are rounded up to a multiple of this.
        batches_per_step: Batches among which rows of similar length are divided.
    """
    lengths = items.lengths
    num_answers, tokens = getattr(items, "num_answers", 1), getattr(items, "tokens", lengths)
    edges = np.unique(np.linspace(0, max_length, 11).astype(int))
    return {"rows": len(items), "tokens": int(tokens.sum()),
            "length": {"min": int(lengths.min()), "median": float(np.median(lengths)),
                       "p95": float(np.quantile(lengths, 0.95)), "max": int(lengths.max())},
            "length_histogram": {"edges": edges.tolist(), "rows": np.histogram(lengths, edges)[0].tolist()},
            "padding_share": _padding_shares(lengths, tokens, num_answers, batch_size, multiple, max_length, seed,
                                             OrderRule(batch_size * batches_per_step))}


def _padding_shares(lengths: np.ndarray, tokens: np.ndarray, num_answers: int, batch_size: int, multiple: int,
                    max_length: int, seed: int, rule: OrderRule) -> dict[str, float]:
    """Return the fraction of padding for each way of batching, estimated from a sample if there are many rows."""
    if len(lengths) > SAMPLE:
        sampled = np.random.default_rng([seed, len(lengths)]).choice(len(lengths), SAMPLE)
        lengths, tokens = lengths[sampled], tokens[sampled]
    orders = {
        "shuffled": training_order(lengths, batch_size, [seed, 0], rule),
        "group_by_length": training_order(lengths, batch_size, [seed, 0], rule, group_by_length=True),
        "sorted": evaluation_order(lengths, batch_size),
    }
    padding = {name: padding_share(lengths, order.rows, batch_size, multiple, max_length, tokens.sum() / num_answers)
               for name, order in orders.items()}
    if num_answers == 1:  # only rows of one sequence can be packed
        _, bounds = best_fit_decreasing(lengths, max_length)
        padding["packed"] = float(1 - lengths.sum() / ((len(bounds) - 1) * max_length))
    return padding


def padding_share(lengths: np.ndarray, order: np.ndarray, batch_size: int, multiple: int, max_length: int,
                  num_tokens: float) -> float:
    """Return the fraction of padding if rows of `num_tokens` in total are batched in `order`."""
    ordered = lengths[order]
    max_lengths = np.maximum.reduceat(ordered, np.arange(0, len(ordered), batch_size))  # of each batch
    # As `Collator.pad_length`.
    padded = np.maximum(max_lengths, np.minimum(-(-max_lengths // multiple) * multiple, max_length))
    sizes = np.full(len(max_lengths), batch_size)
    # The last batch may be short.
    sizes[-1] = len(ordered) - batch_size * (len(max_lengths) - 1)
    return float(1 - num_tokens / (padded * sizes).sum())


def render_table(report: dict[str, Any]) -> str:
    """Format the report in a few lines for the screen."""
    lines = []
    for path, source in report["sources"].items():
        lines.append(f"{path}: {source['rows_read']} rows read, {source['rows_kept']} kept"
                     + "".join(f", {name} {source[name]}" for name in ("format", "template") if name in source))
        lines += [f"  dropped {entry['rows']}: {reason} (first {entry['first'][0]})"
                  for reason, entry in source["dropped"].items()]
        if unknown := unknown_tokens(source):
            lines.append(f"  unknown to the vocabulary: {unknown}")
        if source.get("rows_cut"):
            lines.append(f"  truncated {source['rows_cut']} rows by {source['tokens_cut']} tokens in total")
        if source.get("choices_cut"):
            lines.append(f"  truncated choices, too, in {source['choices_cut']} of these rows: they leave no space for "
                         "the text before them")
        if source.get("questions_cut"):
            lines.append(f"  truncated {source['questions_cut']} questions to data.question_max_length")
        if source.get("answers_not_in_context"):
            lines.append(f"  {source['answers_not_in_context']} questions have an answer that is not in their context: "
                         "the loss ignores them, exact match and F1 count them")
        if source.get("ends_in_padding"):
            lines.append(f"  {source['ends_in_padding']} rows end in the padding token: transformers classifies a "
                         "decoder's row at an earlier token, see the model card")
        if source.get("conversations_split"):
            lines.append(f"  {source['conversations_split']} conversations became one row for each response: the chat "
                         "template writes earlier turns differently")
        if source.get("turns_dropped"):
            lines.append(f"  dropped {source['turns_dropped']} responses of such conversations: longer than the limits")
        if source.get("responses_unlike_inference"):
            lines.append(f"  {source['responses_unlike_inference']} responses do not follow the prompt of "
                         "inference: the chat template opens these answers differently")
        for key, words in LEFT_OVER.items():
            if listed := [f"{name} ({rows} rows)" for name, rows in source.get(key, {}).items()]:
                lines.append(f"  {words}: {', '.join(listed[:MAX_UNUSED])}"
                             + (f" and {len(listed) - MAX_UNUSED} more" if len(listed) > MAX_UNUSED else ""))
        if spelled := source.get("special_tokens_spelled"):
            listed = [f"{name} ({rows} rows)" for name, rows in spelled.items()]
            lines.append(f"  special tokens spelled in target texts, where they stay text: "
                         f"{', '.join(listed[:MAX_UNUSED])}")
        if source.get("words_cut"):
            lines.append(f"  truncated {source['words_cut']} of {source['words']} words with them")
        if source.get("words_without_token"):
            lines.append(f"  the tokenizer finds no token in {source['words_without_token']} words")
        lines += [f"  note: {note}" for note in source.get("notes", [])]
    lines += _mixing_lines(report["mixing"]) if "mixing" in report else []
    lines.append(f"{'split':<8}{'rows':>9}{'tokens':>12}{'median':>8}{'longest':>9}{'padding':>9}{'grouped':>9}"
                 f"{'packed':>9}")
    for name, part in report["splits"].items():
        padding = part["padding_share"]
        lines.append(f"{name:<8}{part['rows']:>9}{part['tokens']:>12}{part['length']['median']:>8.0f}"
                     f"{part['length']['max']:>9}{padding['shuffled']:>9.1%}{padding['group_by_length']:>9.1%}"
                     + (f"{padding['packed']:>9.1%}" if "packed" in padding else ""))
    lines += [f"labels of {name}: {_label_list(part['labels'])}" for name, part in report["splits"].items()
              if "labels" in part]
    lines += [f"note: tokenizer: {note}" for note in report["tokenizer"]]
    return "\n".join(lines)


def _mixing_lines(mixing: dict[str, Any]) -> list[str]:
    """Describe the share of each source, and how often an epoch has its rows."""
    size = f": an epoch has {mixing['rows_per_epoch']} rows" if "rows_per_epoch" in mixing else ""
    lines = [f"mixing by the rule {mixing['rule']}{size}"]
    for source in mixing["sources"]:
        counts = (f", {source['rows_per_epoch']} rows per epoch, {source['passes_per_epoch']:.2f} times its "
                  f"{source['rows']}" if "rows" in source else "")
        lines.append(f"  {source['path']}: share {source['share']:.1%}{counts}")
    return lines


def _label_list(counts: dict[str, int]) -> str:
    """Describe how many rows have each label, most frequent first, and which labels have none."""
    total = max(sum(counts.values()), 1)
    pairs = sorted(((name, count) for name, count in counts.items() if count), key=lambda pair: -pair[1])
    absent = [name for name, count in counts.items() if not count]
    shown = [f"{name} {count} ({count / total:.1%})" for name, count in pairs[:MAX_LABELS]]
    more = [f"{len(pairs) - MAX_LABELS} more"] if len(pairs) > MAX_LABELS else []
    return ", ".join([*shown, *more]) + (f"; none of {', '.join(absent[:MAX_LABELS])}"
                                         + (" ..." if len(absent) > MAX_LABELS else "") if absent else "")
