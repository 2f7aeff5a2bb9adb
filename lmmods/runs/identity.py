"""The identity of a run: saved in every checkpoint, and compared before a run resumes from one.

The identity is the resolved recipe of config.yaml with facts added to its keys: fingerprints of sources and weights,
and the fields of a model's config.json. A file that has moved counts as the same file.
"""

import copy
import json
import re
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, NamedTuple, TypeGuard

from lmmods.core.errors import UserError
from lmmods.data.base import DataModule
from lmmods.data.batch.stream import ENDLESS
from lmmods.recipe.classes import BASES, list_all, named_models
from lmmods.recipe.files import read_recipe
from lmmods.recipe.trainer_fields import limit_batches
from lmmods.runs.checkpoint import read_plain
from lmmods.runs.folder import RunFolder
from lmmods.runs.model_card import model_facts
from lmmods.runs.progress import BatchSplit
from lmmods.runs.run_files import append_json

FACTS = ("content", "weights", "commit")  # fingerprints of the content at a path
LOCATION = ("path", "revision")
LONGEST_VALUE = 60  # characters of a value shown in messages


class Change(NamedTuple):
    """A key whose value has changed."""

    key: str
    was: Any
    now: Any


class Comparison:
    """The differences between two identities.

    Args:
        defaults: Values of keys that one of them lacks.
        trusts_paths: Assume that a changed path has the same content, because another process compares it.
    """

    def __init__(self, was: dict[str, Any], now: dict[str, Any], defaults: dict[str, Any], trusts_paths: bool = False):
        self.refused: list[Change] = []
        self.reported: list[Change] = []
        self.split: list[Change] = []  # changes of keys in `CUT`
        self.unknown: list[str] = []  # keys of facts that only one identity has
        self._trusts_paths = trusts_paths
        self._walk(was, now, defaults, "")

    def _walk(self, was: object, now: object, defaults: Any, key: str, moved: bool = False) -> None:
        if isinstance(was, dict) and isinstance(now, dict):
            self._walk_block(was, now, defaults if isinstance(defaults, dict) else {}, key)
        elif _are_blocks(was) and _are_blocks(now) and len(was) == len(now):
            # Compare lists block by block, so that messages name the key within a block.
            for index, (old, new) in enumerate(zip(was, now, strict=True)):
                self._walk(old, new, None, f"{key}[{index}]" if len(was) > 1 else key)
        elif not (_is_same(key, _plain(was), _plain(now)) or is_among(key, NOT_COMPARED)):
            # Whether a step has the same rows depends on all keys of the batch split: see `_sort_split_changes`.
            changes = (self.split if is_among(key, CUT) else self.reported if moved or is_among(key, REPORTED)
                       else self.refused)
            changes.append(Change(key, was, now))

    def _walk_block(self, was: dict[str, Any], now: dict[str, Any], defaults: dict[str, Any], key: str) -> None:
        facts = {*FACTS, *(["config"] if "path" in now else [])}
        # If both sides have a fingerprint, it decides and the path may differ: the file has moved. A configuration does
        # not identify the weights of an adapter or a network.
        has_facts = any(None not in (was.get(fact), now.get(fact))
                        for fact in (facts if key == "model.config" else FACTS))
        for name in {**was, **now}:
            old, new = (side.get(name, defaults.get(name)) for side in (was, now))
            inner_key = f"{key}.{name}".removeprefix(".")
            # A fact that only one side has is neither equal nor changed.
            if name in facts and None in (old, new):
                self.unknown += [] if has_facts or old == new else [inner_key]
            else:
                has_moved = name in LOCATION and (has_facts or self._trusts_paths)
                self._walk(old, new, defaults.get(name), inner_key, has_moved)


class RunIdentity:
    """The identity of a run, and its changes since the checkpoint it resumes from.

    Args:
        recipe: As in config.yaml. Without a recipe, nothing is stored or compared.
        defaults: Recipe with this version's defaults, for keys that older checkpoints lack.
    """

    def __init__(self, recipe: dict[str, Any] | None = None, defaults: dict[str, Any] | None = None):
        self._recipe, self._defaults = recipe or {}, defaults or {}
        self._reported: list[Change] = []
        self.tree: dict[str, Any] = {}

    def resolve(self, data: DataModule | None, checkpoint: Path | None, batch_split: BatchSplit) -> list[str]:
        """Compute this run's identity, and check that it continues the run that wrote `checkpoint`.

        Args:
            data: DataModule; None on a process that does not read the data, unlike the first one.
            checkpoint: Checkpoint to resume from; None for a new run.
            batch_split: Batch split of this run.

        Returns:
            Messages for the user: what has changed, and what could not be compared.

        Raises:
            UserError: Keys differ that may not change; the message lists them with old and new values.
        """
        if not self._recipe:
            return []
        self.tree = identity_tree(self._recipe, data)
        if checkpoint is None:
            return []
        state, was = saved_identity(checkpoint)
        lines: list[str | None] = []
        if was is None:
            lines.append(f"{checkpoint} does not contain its recipe, so changes cannot be detected.")
        else:
            comparison = Comparison(was, self.tree, self._defaults, trusts_paths=data is None)
            splits = BatchSplitChange(state, was, self.tree, self._defaults, batch_split)
            problem = _sort_split_changes(comparison, splits)
            self._reported = comparison.reported
            lines.append(self._report(checkpoint, comparison.refused, comparison.reported, problem))
            lines.append(_list_unknown(comparison.unknown if data else []))
        return [line for line in lines if line]

    def check_evaluation(self, checkpoint: Path | None) -> list[str]:
        """Check that `checkpoint` belongs to the model to evaluate. Data and precision may differ.

        Returns:
            Messages for the user.

        Raises:
            UserError: Its network, adapter or base differ; the message lists the keys with old and new values.
        """
        was = saved_identity(checkpoint)[1] if self._recipe and checkpoint else None
        if was is None:
            return []
        model = {key: value for key, value in identity_tree(self._recipe, None, reads_model=True)["model"].items()
                 # Older identities lack some keys, and evaluation does not depend on the optimiser.
                 if key in was["model"] and key != "optimizer"}
        comparison = Comparison({"model": {key: was["model"][key] for key in model}}, {"model": model}, self._defaults)
        changes = [*comparison.refused, *comparison.reported]
        refused = [change for change in comparison.refused if is_among(change.key, WEIGHTS_DEFINING)]
        line = self._report(checkpoint, refused, [change for change in changes if change not in refused])
        return [line] if line else []

    def note_resume(self, folder: RunFolder, checkpoint: Path, step: int) -> None:
        """Append time, checkpoint and changed keys of a resume to resumes.jsonl."""
        folder.files.claim(folder.resumes.name)
        append_json(folder.resumes, {
            "step": step, "checkpoint": checkpoint.name, "time": datetime.now(UTC).isoformat(timespec="seconds"),
            "changed": {_spell(change.key): [change.was, change.now] for change in self._reported}})

    @staticmethod
    def _report(checkpoint: Path | None, refused: list[Change], reported: list[Change], problem: str = "") -> str:
        """Return a table of the reported changes. Raises UserError if a change is refused, or there is a `problem`."""
        remedy = "start a new run in another trainer.default_root_dir."
        if refused:
            raise UserError(
                f"{checkpoint} belongs to another run. These keys have changed, so it cannot resume with this recipe:\n"
                + _table(refused) + (f"\n{problem}" if problem else "") + "\nSet them to their old values, which are "
                f"in config.yaml of that run's folder, or {remedy}")
        if problem:
            raise UserError(f"{checkpoint} belongs to another run. {problem} Or {remedy}")
        return "Changed since that checkpoint:\n" + _table(reported) if reported else ""


def identity_tree(recipe: dict[str, Any], data: DataModule | None, reads_model: bool = False) -> dict[str, Any]:
    """Normalise a recipe, so that different spellings of one meaning are equal, and add facts to their keys.

    Args:
        data: DataModule, which provides the facts about data; None for a tree without facts.
        reads_model: Read the facts about models even without `data`.

    Raises:
        UserError: A source, the tokenizer or a model cannot be read.
    """
    tree, facts = copy.deepcopy(recipe), data.identity() if data is not None else {}
    if _is_count(interval := tree["trainer"].get("val_check_interval")):
        tree["trainer"]["val_check_interval"] = f"{interval} steps"  # earlier versions counted micro-batches
    tree["trainer"].pop("default_root_dir", None)
    for block in ("model", "data"):
        tree[block] = {"class_path": tree[block]["class_path"], **tree[block].get("init_args", {})}
    _normalise_data(tree, facts)
    model = tree["model"]
    for named in named_models(model):
        # Only the model that trains has a key `revision`.
        entry = {"path": named.name, **({"revision": named.revision} if named.block is model else {})}
        if facts or reads_model:
            entry |= model_facts(named.name, named.revision, named.last == "adapter", named.last != "config")
        named.block[named.last] = entry
    model.pop("revision", None)
    if model.get("lora") and model["lora"].get("init") == "kaiming":  # older versions had no other
        model["lora"]["init"] = None
    for key in list_all("model", lambda task: task.class_keys):
        if model.get(key) is not None:
            model[key] = {"class": model[key], "content": facts.get(key)}
    limit = tree["trainer"].get("limit_train_batches")
    if isinstance(limit, float) and limit == 1:  # all batches, the default
        tree["trainer"]["limit_train_batches"] = None
    return tree


def _normalise_data(tree: dict[str, Any], facts: dict[str, Any]) -> None:
    """Replace keys of `data` whose defaults depend on other keys, and add the fingerprints of its sources."""
    data = tree["data"]
    columns = data.pop("columns", None)
    if data.get("mixing") and data["mixing"].get("rule") == "concat":  # what null means
        data["mixing"] = None
    weight = None if data.get("mixing") else 1.0  # the default
    for key in ("source", "val_source", "test_source", "predict_source"):
        if data.get(key) is not None:
            data[key] = _normalise_sources(data[key], columns, facts.get(key), weight)
    if data.get("decontaminate") is not None:
        data["decontaminate"] = _normalise_sources(data["decontaminate"], None, facts.get("decontaminate"), 1.0)
    path = data.get("tokenizer")
    # The path of the model's own tokenizer is None, so that a moved model is one change.
    data["tokenizer"] = {"path": None if path == tree["model"].get("pretrained") else path,
                         "content": facts.get("tokenizer")}
    data["max_length"] = {"content": facts.get("max_length", data.get("max_length"))}
    if data.get("seed") == tree.get("seed_everything"):  # defaults to the run's seed
        data["seed"] = None


def _normalise_sources(value: object, columns: dict[str, str] | None, contents: list[str | None] | None,
                       weight: float | None) -> list[dict[str, Any]]:
    items = [dict(item) if isinstance(item, dict) else {"path": item}
             for item in (value if isinstance(value, list) else [value])]
    return [{"name": None, "split": None, "revision": None, "limit": None, "format": None, **item,
             "columns": item.get("columns") or columns, "weight": item.get("weight") or weight, "content": content}
            for item, content in zip(items, contents or [None] * len(items), strict=True)]


def saved_identity(checkpoint: Path) -> tuple[dict[str, Any], dict[str, Any] | None]:
    """Return state.json of a checkpoint and its identity; older ones take it from config.yaml, or have None.

    Raises:
        UserError: The checkpoint or config.yaml is damaged.
    """
    state = read_plain(checkpoint)
    config = checkpoint.parent.parent / "config.yaml"
    if state.get("identity") or not config.is_file():
        return state, _with_unit(state["identity"]) if state.get("identity") else None
    try:
        return state, identity_tree(read_recipe(config), None)
    except (UserError, LookupError, TypeError, AttributeError) as error:
        raise UserError(f"{config} cannot be read: {error}. Restore it, or remove it to resume without checking for "
                        "changes.") from error


class BatchSplitChange:
    """Batch splits of the run that wrote a checkpoint and of the run that resumes from it.

    Args:
        state: Content of the checkpoint without arrays.
        was: Identity in the checkpoint.
        tree: Identity of this run.
        defaults: Values of keys that the identities lack.
        now: Batch split of this run.
    """

    def __init__(self, state: dict[str, Any], was: dict[str, Any], tree: dict[str, Any], defaults: dict[str, Any],
                 now: BatchSplit):
        self._trainers = tuple({**defaults.get("trainer", {}), **side["trainer"]} for side in (was, tree))
        data = {**defaults.get("data", {}), **was["data"]}
        self.was = BatchSplit(int(data.get("batch_size") or 1),
                              int(self._trainers[0].get("accumulate_grad_batches") or 1),
                              state.get("world_size", 1))
        self.now = now
        self._num_rows = state.get(data["class_path"].rpartition(".")[2], {}).get("num_rows")  # None for a stream

    @property
    def micro_batches_differ(self) -> bool:
        """True if the number of rows per micro-batch has changed, which affects limits in micro-batches."""
        return self.was.at_once != self.now.at_once

    def problem(self) -> str:
        """Explain why steps or epochs would contain other rows, and which settings avoid it; "" if they would not."""
        was, now = self.was, self.now
        if was.step != now.step:
            return f"Its steps have {was}, but this recipe's have {now}: {suggest_split(was.step, now)}."
        old_rows, new_rows = (self._rows_per_epoch(trainer, split)
                              for trainer, split in zip(self._trainers, (was, now), strict=True))
        if self.micro_batches_differ and old_rows != new_rows:
            key = "overfit_batches" if self._trainers[0].get("overfit_batches") else "limit_train_batches"
            batches, remainder = divmod(old_rows, now.at_once)
            return (f"trainer.{key} counts micro-batches, of {was.at_once} rows then and of {now.at_once} now: an "
                    f"epoch had {old_rows} rows and would have {new_rows}. "
                    + (f"Set trainer.{key} {batches}, or keep" if not remainder else "Keep")
                    + f" data.batch_size {was.rows} with {was.devices}.")
        return ""

    def _rows_per_epoch(self, trainer: dict[str, Any], split: BatchSplit) -> int:
        """Return the number of rows in an epoch, after limits."""
        rows, overfit = self._num_rows, trainer.get("overfit_batches") or 0
        # A fraction refers to micro-batches of `split.rows` rows, and means at least one of them.
        if rows is not None and overfit and isinstance(overfit, float):
            return min(max(int(overfit * -(-rows // split.rows)), 1) * split.rows, rows)
        batches = ENDLESS if rows is None else -(-rows // split.at_once)
        limit = overfit or trainer.get("limit_train_batches")
        if limit is None or isinstance(limit, float) and rows is None:
            return ENDLESS if rows is None else rows
        limited = limit_batches(batches, limit, "train") * split.at_once
        return limited if rows is None else min(limited, rows)


def suggest_split(rows: int, now: BatchSplit) -> str:
    """Return settings for steps of `rows` rows, on the current number of devices or the next smaller divisor."""
    def largest(at_most: int, total: int) -> int:
        return next(size for size in range(min(at_most, total), 0, -1) if total % size == 0)

    ranks = largest(now.ranks, rows)
    size = largest(now.rows, rows // ranks)
    split = BatchSplit(size, rows // ranks // size, ranks)
    return (f"with {split.devices}, data.batch_size {split.rows} and trainer.accumulate_grad_batches "
            f"{split.accumulated} make {rows}")


def _sort_split_changes(comparison: Comparison, splits: BatchSplitChange) -> str:
    """Sort changes of the batch split into reported or refused ones. Returns `BatchSplitChange.problem`."""
    problem = splits.problem()
    (comparison.refused if problem else comparison.reported).extend(comparison.split)
    # A limit in micro-batches changes with their size; `problem` has checked that the rows stay the same.
    scaled = [change for change in comparison.refused
              if not problem and splits.micro_batches_differ and change.key == "trainer.limit_train_batches"]
    comparison.reported += scaled
    comparison.refused = [change for change in comparison.refused if change not in scaled]
    return problem


def check_parameters(saved: dict[str, tuple[int, ...]], expected: dict[str, tuple[int, ...]]) -> None:
    """Raise UserError unless a checkpoint has the parameters that this run trains.

    Args:
        saved: Shapes in the checkpoint, by name.
        expected: Shapes in the network.
    """
    differences = [(sorted(expected.keys() - saved.keys()), "are missing in it"),
                   (sorted(saved.keys() - expected.keys()), "are not in the model"),
                   (sorted(name for name in saved.keys() & expected.keys() if saved[name] != expected[name]),
                    "have another shape in it")]
    if any(names for names, _ in differences):
        raise UserError("This checkpoint belongs to another model: "
                        + "; ".join(f"{len(names)} parameters {problem}, e.g. {names[0]}"
                                    for names, problem in differences if names)
                        + ". Resume with the run's own recipe, config.yaml in its folder.")


def _is_count(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _with_unit(tree: dict[str, Any]) -> dict[str, Any]:
    """Return an identity with the unit of `val_check_interval`; a number without a unit counts micro-batches."""
    trainer = tree["trainer"]
    interval, accumulated = trainer.get("val_check_interval"), trainer.get("accumulate_grad_batches") or 1
    if not _is_count(interval):
        return tree
    spelled = f"{interval} micro-batches" if interval % accumulated else f"{interval // accumulated} steps"
    return {**tree, "trainer": {**trainer, "val_check_interval": spelled}}


def _are_blocks(value: object) -> TypeGuard[list[Any]]:
    return isinstance(value, list) and any(isinstance(item, dict) for item in value)


def _plain(value: Any) -> Any:
    """Normalise a value for comparison: tuples become lists, empty containers None."""
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items() if _plain(item) is not None} or None
    return [_plain(item) for item in value] or None if isinstance(value, (list, tuple)) else value


def _is_same(key: str, was: object, now: object) -> bool:
    """True if equal; for keys in `FRACTIONS`, 1.0 (all) differs from 1 (one)."""
    return was == now and (key not in FRACTIONS or was != 1 or type(was) is type(now))


def _list_unknown(keys: list[str]) -> str:
    if not keys:
        return ""
    return f"Not compared, as the checkpoint or this run has no value: {', '.join(map(_spell, keys))}."


def _table(changes: list[Change]) -> str:
    """Format key, old and new value of each change in columns."""
    rows = [("key", "was", "now")]
    rows += [(_spell(change.key), _format(change.was), _format(change.now)) for change in changes]
    widths = [max(len(row[column]) for row in rows) for column in range(2)]
    return "\n".join(f"  {key:<{widths[0]}}  {was:<{widths[1]}}  {now}" for key, was, now in rows)


def _spell(key: str) -> str:
    """Return a key as it is written in recipes."""
    key = key.replace("model.pretrained.revision", "model.revision").replace("model.config.revision", "model.revision")
    key = key.replace("data.max_length.content", "data.max_length")
    return key if "source" in key else key.removesuffix(".path")


def _format(value: object) -> str:
    if isinstance(value, dict) and "path" in value:
        value = value["path"]
    elif _are_blocks(value):
        value = [item.get("path", item.get("class_path", item)) if isinstance(item, dict) else item for item in value]
    text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
    return text if len(text) <= LONGEST_VALUE else f"{text[: LONGEST_VALUE - 1]}…"


# ---------------------------------------------------------------------------------------------------------------------
# Keys of a recipe that may change when a run resumes: `REPORTED`, `NOT_COMPARED` and, if a step has the same rows,
# `CUT`. Changes of other keys are refused. The fields of a task and its data list their own keys in `may_change`.
#
# tests/runs/test_identity.py checks that the documentation lists the same keys, and that each is in exactly one set.

_TRAINER = """accelerator devices num_nodes strategy precision plugins deterministic benchmark inference_mode profiler
    max_epochs min_epochs max_steps min_steps max_time fast_dev_run barebones gradient_clip_val gradient_clip_algorithm
    val_check_interval check_val_every_n_epoch limit_val_batches limit_test_batches
    limit_predict_batches num_sanity_val_steps log_every_n_steps logger callbacks enable_checkpointing
    enable_progress_bar detect_anomaly heartbeat_timeout model_registry"""

REPORTED = {
    "engine", "checkpoint", "samples", "mmlu", "publish",
    *(f"trainer.{name}" for name in _TRAINER.split()),
    *(f"{block}.{name}" for block in BASES for name in list_all(block, lambda fields: fields.may_change)),
}

# Batch split of an optimiser step. Reported if the product with the number of devices stays the same.
CUT = {"data.batch_size", "trainer.accumulate_grad_batches"}

# Location of a run and its names in loggers, which may differ at each start.
NOT_COMPARED = {"trainer.default_root_dir", "trainer.logger.init_args.id", "trainer.logger.init_args.version",
                "trainer.logger.init_args.save_dir", "trainer.logger.init_args.dir"}

# Keys that must match a checkpoint to evaluate it, because its weights only fit a model with these values.
WEIGHTS_DEFINING = {"model.pretrained", "model.config", "model.config_overrides", "model.adapter", "model.lora.rank",
                    "model.lora.alpha", "model.lora.targets", "model.lora.modules_to_save", "model.lora.dora",
                    "model.lora.rslora", "model.lora.init"}

# Keys whose floats are fractions and whose integers are counts: 1.0 is everything, 1 is one.
FRACTIONS = {"trainer.val_check_interval", "trainer.overfit_batches", "trainer.limit_train_batches",
             "trainer.limit_val_batches", "model.optimizer.warmup", "model.optimizer.decay",
             "data.val_size"}


def is_among(key: str, keys: set[str]) -> bool:
    """True if a key, or a block that contains it, is in `keys`. List indices (`[0]`) are ignored."""
    parts = re.sub(r"\[\d+\]", "", key).split(".")
    return any(".".join(parts[:length]) in keys for length in range(1, len(parts) + 1))
