"""The identity of a run: saved in every checkpoint of both engines, and compared before a run is resumed from one.

The identity is the resolved recipe as in config.yaml, with facts that a recipe does not contain added to their keys:
fingerprints of sources and weights, the fields of a model's config.json. A file that has moved is the same file.
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

FACTS = ("content", "weights", "commit")  # fingerprints of the content behind a path
PLACES = ("path", "revision")  # its location
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
        trust_places: Assume that a changed path leads to the same content, because another process compares that.
    """

    def __init__(self, was: dict[str, Any], now: dict[str, Any], defaults: dict[str, Any], trust_places: bool = False):
        self.refused: list[Change] = []
        self.reported: list[Change] = []
        self.recut: list[Change] = []  # changes of keys in `CUT`
        self.unknown: list[str] = []  # facts that only one of the two has
        self._trusts = trust_places
        self._walk(was, now, defaults, "")

    def _walk(self, was: object, now: object, defaults: Any, key: str, moved: bool = False) -> None:
        if isinstance(was, dict) and isinstance(now, dict):
            self._walk_block(was, now, defaults if isinstance(defaults, dict) else {}, key)
        elif _are_blocks(was) and _are_blocks(now) and len(was) == len(now):
            # A list of blocks is compared block by block, so that a message names the key that changed within one.
            for number, (old, new) in enumerate(zip(was, now, strict=True)):
                self._walk(old, new, None, f"{key}[{number}]" if len(was) > 1 else key)
        elif not (_same(key, _plain(was), _plain(now)) or is_among(key, NOT_COMPARED)):
            # Keys of the batch split wait for `_check_cut`: only together do they tell if a step has the same rows.
            kind = (self.recut if is_among(key, CUT) else self.reported if moved or is_among(key, REPORTED)
                    else self.refused)
            kind.append(Change(key, was, now))

    def _walk_block(self, was: dict[str, Any], now: dict[str, Any], defaults: dict[str, Any], key: str) -> None:
        facts = {*FACTS, *(["config"] if "path" in now else [])}
        # If a fingerprint is known on both sides it decides, and the path may differ: the file has moved.
        # The configuration of an adapter or a network alone does not identify its weights.
        known = any(None not in (was.get(fact), now.get(fact)) for fact in (facts if key == "model.config" else FACTS))
        for name in {**was, **now}:
            old, new = (side.get(name, defaults.get(name)) for side in (was, now))
            inner = f"{key}.{name}".removeprefix(".")
            # A fact that only one side has is neither equal nor changed.
            if name in facts and None in (old, new):
                self.unknown += [] if known or old == new else [inner]
            else:
                self._walk(old, new, defaults.get(name), inner, name in PLACES and (known or self._trusts))


class RunIdentity:
    """The identity of a run, and its changes since the checkpoint that it is resumed from.

    Args:
        recipe: As in config.yaml; without one nothing is stored or compared.
        defaults: A tree of the same form with the defaults of this version, for keys that older checkpoints lack.
    """

    def __init__(self, recipe: dict[str, Any] | None = None, defaults: dict[str, Any] | None = None):
        self._recipe, self._defaults = recipe or {}, defaults or {}
        self._reported: list[Change] = []
        self.tree: dict[str, Any] = {}

    def resolve(self, data: DataModule | None, checkpoint: Path | None, cut: BatchSplit) -> list[str]:
        """Compute this run's identity, and check that it continues the run that wrote `checkpoint`.

        Args:
            data: DataModule; None on a process that leaves reading to the first one.
            checkpoint: Checkpoint to resume from; None for a new run.
            cut: Batch split of this run.

        Returns:
            Messages for the user: what has changed, and what could not be compared.

        Raises:
            UserError: It would become another run; each key is named with its old and new value.
        """
        if not self._recipe:
            return []
        self.tree = identity_tree(self._recipe, data)
        if checkpoint is None:
            return []
        state, was = saved_identity(checkpoint)
        lines: list[str | None] = []
        if was is None:
            lines.append(f"{checkpoint} does not tell which recipe wrote it, so nothing could be compared.")
        else:
            # Without data this process has no facts; the first process compares them.
            found = Comparison(was, self.tree, self._defaults, trust_places=data is None)
            problem = _check_cut(found, BatchSplitChange(state, was, self.tree, self._defaults, cut))
            self._reported = found.reported
            lines.append(self._report(checkpoint, found.refused, found.reported, problem))
            lines.append(_uncompared(found.unknown if data else []))
        return [line for line in lines if line]

    def check_evaluation(self, checkpoint: Path | None) -> list[str]:
        """Check that `checkpoint` belongs to the model to evaluate. Data and precision may differ.

        Returns:
            Messages for the user.

        Raises:
            UserError: It is of another network, adapter or base; each key is named with its old and new value.
        """
        was = saved_identity(checkpoint)[1] if self._recipe and checkpoint else None
        if was is None:
            return []
        model = {key: value for key, value in identity_tree(self._recipe, None, reads_model=True)["model"].items()
                 # Only keys that the checkpoint's identity has. The optimiser does not matter for evaluation.
                 if key in was["model"] and key != "optimizer"}
        found = Comparison({"model": {key: was["model"][key] for key in model}}, {"model": model}, self._defaults)
        changes = [*found.refused, *found.reported]
        refused = [change for change in found.refused if is_among(change.key, WEIGHTS_DEFINING)]
        line = self._report(checkpoint, refused, [change for change in changes if change not in refused])
        return [line] if line else []

    def note_resume(self, folder: RunFolder, checkpoint: Path, step: int) -> None:
        """Append a line to resumes.jsonl: time, checkpoint and changed keys of a resume."""
        folder.files.claim(folder.resumes.name)
        append_json(folder.resumes, {
            "step": step, "checkpoint": checkpoint.name, "time": datetime.now(UTC).isoformat(timespec="seconds"),
            "changed": {_spelt(change.key): [change.was, change.now] for change in self._reported}})

    @staticmethod
    def _report(checkpoint: Path | None, refused: list[Change], reported: list[Change], problem: str = "") -> str:
        """Return a table of the reported changes. Raises UserError if a change is refused, or there is a `problem`."""
        new = "start a new run in another trainer.default_root_dir."
        if refused:
            raise UserError(
                f"{checkpoint} is of another run. These keys are not as they were, and with them the rest would be "
                "something else:\n" + _table(refused) + (f"\n{problem}" if problem else "") + "\nPut them back "
                f"(config.yaml in the folder of that run has them), or {new}")
        if problem:
            raise UserError(f"{checkpoint} is of another run. {problem} Or {new}")
        return "Changed since that checkpoint:\n" + _table(reported) if reported else ""


def identity_tree(recipe: dict[str, Any], data: DataModule | None, reads_model: bool = False) -> dict[str, Any]:
    """Normalise a recipe, so that different spellings of one meaning are equal, and add facts to their keys.

    Args:
        data: DataModule, which knows the facts of data; None leaves all facts out.
        reads_model: Read the facts of models even then.

    Raises:
        UserError: A source, the tokenizer or a model cannot be read.
    """
    tree, facts = copy.deepcopy(recipe), data.identity() if data is not None else {}
    if _is_count(interval := tree["trainer"].get("val_check_interval")):
        tree["trainer"]["val_check_interval"] = f"{interval} steps"  # earlier versions counted micro-batches
    tree["trainer"].pop("default_root_dir", None)
    for block in ("model", "data"):
        # Merged to one level, so that keys do not depend on the recipe's nesting.
        tree[block] = {"class_path": tree[block]["class_path"], **tree[block].get("init_args", {})}
    _name_data(tree, facts)
    model = tree["model"]
    for named in named_models(model):
        # Only the model that trains has a key `revision`.
        entry = {"path": named.name, **({"revision": named.revision} if named.block is model else {})}
        if facts or reads_model:
            entry |= model_facts(named.name, named.revision, named.last == "adapter", named.last != "config")
        named.block[named.last] = entry
    model.pop("revision", None)
    if model.get("lora") and model["lora"].get("init") == "kaiming":  # the only way of older versions, which name none
        model["lora"]["init"] = None
    for key in list_all("model", lambda task: task.class_keys):
        if model.get(key) is not None:
            model[key] = {"class": model[key], "content": facts.get(key)}
    limit = tree["trainer"].get("limit_train_batches")
    if isinstance(limit, float) and limit == 1:  # all batches, the default
        tree["trainer"]["limit_train_batches"] = None
    return tree


def _name_data(tree: dict[str, Any], facts: dict[str, Any]) -> None:
    """Resolve keys of `data` that default to other keys, and add the fingerprints of its sources."""
    data = tree["data"]
    columns = data.pop("columns", None)
    if data.get("mixing") and data["mixing"].get("rule") == "concat":  # what null means
        data["mixing"] = None
    weight = None if data.get("mixing") else 1.0  # of a source that names none
    for key in ("source", "val_source", "test_source", "predict_source"):
        if data.get(key) is not None:
            data[key] = _named_sources(data[key], columns, facts.get(key), weight)
    if data.get("decontaminate") is not None:
        data["decontaminate"] = _named_sources(data["decontaminate"], None, facts.get("decontaminate"), 1.0)
    path = data.get("tokenizer")
    # A tokenizer that comes with the model is named by the model, so renaming both is one change.
    data["tokenizer"] = {"path": None if path == tree["model"].get("pretrained") else path,
                         "content": facts.get("tokenizer")}
    data["max_length"] = {"content": facts.get("max_length", data.get("max_length"))}
    if data.get("seed") == tree.get("seed_everything"):  # defaults to the run's seed
        data["seed"] = None


def _named_sources(value: object, columns: dict[str, str] | None, contents: list[str | None] | None,
                   weight: float | None) -> list[dict[str, Any]]:
    items = [dict(item) if isinstance(item, dict) else {"path": item}
             for item in (value if isinstance(value, list) else [value])]
    return [{"name": None, "split": None, "revision": None, "limit": None, "format": None, **item,
             "columns": item.get("columns") or columns, "weight": item.get("weight") or weight, "content": content}
            for item, content in zip(items, contents or [None] * len(items), strict=True)]


def saved_identity(checkpoint: Path) -> tuple[dict[str, Any], dict[str, Any] | None]:
    """Return state.json of a checkpoint and the identity in it; for older checkpoints, that of config.yaml or None.

    Raises:
        UserError: The checkpoint or config.yaml is damaged.
    """
    state = read_plain(checkpoint)
    config = checkpoint.parent.parent / "config.yaml"
    if state.get("identity") or not config.is_file():
        # The checkpoint's own identity, or, for versions that saved none, the recipe next to it.
        return state, _with_unit(state["identity"]) if state.get("identity") else None
    try:
        return state, identity_tree(read_recipe(config), None)
    except (UserError, LookupError, TypeError, AttributeError) as error:
        raise UserError(f"{config} cannot be read: {error}. It says which run the checkpoint belongs to: put it back, "
                        "or move it away to resume without a comparison.") from error


class BatchSplitChange:
    """Batch splits of the run that wrote a checkpoint and of this one.

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
        # Identities hold keys as in recipes, so missing ones have the defaults of this version.
        self.was = BatchSplit(int(data.get("batch_size") or 1),
                              int(self._trainers[0].get("accumulate_grad_batches") or 1),
                              state.get("world_size", 1))
        self.now = now
        self._num_rows = state.get(data["class_path"].rpartition(".")[2], {}).get("num_rows")  # None of a stream

    @property
    def micro_batches_differ(self) -> bool:
        """True if a micro-batch now has another number of rows, which changes limits counted in micro-batches."""
        return self.was.at_once != self.now.at_once

    def problem(self) -> str:
        """Explain why later steps or epochs would hold other rows, and which settings avoid it; "" if they do not."""
        was, now = self.was, self.now
        if was.step != now.step:
            return f"Its steps have {was}, those of this recipe {now}: {fitting(was.step, now)}."
        then, here = (self._epoch(trainer, cut) for trainer, cut in zip(self._trainers, (was, now), strict=True))
        if self.micro_batches_differ and then != here:
            key = "overfit_batches" if self._trainers[0].get("overfit_batches") else "limit_train_batches"
            whole, rest = divmod(then, now.at_once)
            return (f"trainer.{key} counts micro-batches, of {was.at_once} rows then and of {now.at_once} now: an "
                    f"epoch had {then} rows and would have {here}. "
                    + (f"Set trainer.{key} {whole}, or keep" if not rest else "Keep")
                    + f" data.batch_size {was.rows} with {was.devices}.")
        return ""

    def _epoch(self, trainer: dict[str, Any], cut: BatchSplit) -> int:
        """Rows of an epoch after limits."""
        rows, overfit = self._num_rows, trainer.get("overfit_batches") or 0
        # A share is taken of micro-batches of `cut.rows` rows, and leaves at least one of them.
        if rows is not None and overfit and isinstance(overfit, float):
            return min(max(int(overfit * -(-rows // cut.rows)), 1) * cut.rows, rows)
        whole = ENDLESS if rows is None else -(-rows // cut.at_once)
        limit = overfit or trainer.get("limit_train_batches")
        if limit is None or isinstance(limit, float) and rows is None:
            return ENDLESS if rows is None else rows
        found = limit_batches(whole, limit, "train") * cut.at_once
        return found if rows is None else min(found, rows)


def fitting(rows: int, now: BatchSplit) -> str:
    """Return settings for steps of `rows` rows, on as many devices as now or the next smaller divisor."""
    def largest(least: int, of: int) -> int:
        return next(size for size in range(min(least, of), 0, -1) if of % size == 0)

    # The largest number of ranks, then the largest micro-batch, that divide the step without a rest.
    ranks = largest(now.ranks, rows)
    size = largest(now.rows, rows // ranks)
    cut = BatchSplit(size, rows // ranks // size, ranks)
    return (f"with {cut.devices}, data.batch_size {cut.rows} and trainer.accumulate_grad_batches {cut.accumulated} "
            f"make {rows}")


def _check_cut(found: Comparison, cuts: BatchSplitChange) -> str:
    """Sort changes of the batch split into reported or refused ones. Returns `Cuts.problem`."""
    problem = cuts.problem()
    # Other micro-batches of the same step are harmless, so they are reported only.
    (found.refused if problem else found.reported).extend(found.recut)
    # A limit in micro-batches has to change with their size; `problem` has checked that the rows stay the same.
    scaled = [change for change in found.refused
              if not problem and cuts.micro_batches_differ and change.key == "trainer.limit_train_batches"]
    found.reported += scaled
    found.refused = [change for change in found.refused if change not in scaled]
    return problem


def check_parameters(saved: dict[str, tuple[int, ...]], wanted: dict[str, tuple[int, ...]]) -> None:
    """Raise UserError unless a checkpoint holds the parameters that this run trains.

    Args:
        saved: Shapes in the checkpoint, by name.
        wanted: Shapes in the network.
    """
    differences = [(sorted(wanted.keys() - saved.keys()), "are missing from it"),
                   (sorted(saved.keys() - wanted.keys()), "are unknown here"),
                   (sorted(name for name in saved.keys() & wanted.keys() if saved[name] != wanted[name]),
                    "have another shape in it")]
    if any(names for names, _ in differences):
        raise UserError("This checkpoint is of another model: "
                        + "; ".join(f"{len(names)} parameters {what}, e.g. {names[0]}"
                                    for names, what in differences if names)
                        + ". Resume with the recipe the run was started with (config.yaml in its folder).")


def _is_count(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _with_unit(tree: dict[str, Any]) -> dict[str, Any]:
    """An identity with the unit of `val_check_interval` spelled out; without a unit it counts micro-batches."""
    trainer = tree["trainer"]
    interval, accumulated = trainer.get("val_check_interval"), trainer.get("accumulate_grad_batches") or 1
    if not _is_count(interval):
        return tree
    said = f"{interval} micro-batches" if interval % accumulated else f"{interval // accumulated} steps"
    return {**tree, "trainer": {**trainer, "val_check_interval": said}}


def _are_blocks(value: object) -> TypeGuard[list[Any]]:
    return isinstance(value, list) and any(isinstance(item, dict) for item in value)


def _plain(value: Any) -> Any:
    """Normalise a value for comparison: tuples become lists, empty containers None."""
    # None for empty containers, so that an absent key equals an empty one.
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items() if _plain(item) is not None} or None
    return [_plain(item) for item in value] or None if isinstance(value, (list, tuple)) else value


def _same(key: str, was: object, now: object) -> bool:
    """True if equal; for keys in `FRACTIONS`, 1.0 (all) differs from 1 (one)."""
    return was == now and (key not in FRACTIONS or was != 1 or type(was) is type(now))


def _uncompared(keys: list[str]) -> str:
    if not keys:
        return ""
    return f"Not compared, as that checkpoint or this start does not tell: {', '.join(map(_spelt, keys))}."


def _table(changes: list[Change]) -> str:
    """Format key, old and new value of each change in columns."""
    rows = [("key", "was", "now")]
    rows += [(_spelt(change.key), _format(change.was), _format(change.now)) for change in changes]
    widths = [max(len(row[column]) for row in rows) for column in range(2)]
    return "\n".join(f"  {key:<{widths[0]}}  {was:<{widths[1]}}  {now}" for key, was, now in rows)


def _spelt(key: str) -> str:
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
# Keys of a recipe that may change when a run is resumed: `REPORTED`, `NOT_COMPARED` and, if the rows of a step stay the
# same, `CUT`. Changes of all others are refused. Of a task and its data, the fields say it themselves: `may_change`.
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

# Batch split of an optimiser step, together with the devices. Reported if the product stays the same.
CUT = {"data.batch_size", "trainer.accumulate_grad_batches"}

# Location of a run and its names in loggers, which may differ at each start.
NOT_COMPARED = {"trainer.default_root_dir", "trainer.logger.init_args.id", "trainer.logger.init_args.version",
                "trainer.logger.init_args.save_dir", "trainer.logger.init_args.dir"}

# Keys that must match a checkpoint to evaluate it: they define the function that its weights parametrise.
WEIGHTS_DEFINING = {"model.pretrained", "model.config", "model.config_overrides", "model.adapter", "model.lora.rank",
                    "model.lora.alpha", "model.lora.targets", "model.lora.modules_to_save", "model.lora.dora",
                    "model.lora.rslora", "model.lora.init"}

# Keys whose floats are fractions of a whole, and whose integers are counts: 1.0 is everything, 1 is one.
FRACTIONS = {"trainer.val_check_interval", "trainer.overfit_batches", "trainer.limit_train_batches",
             "trainer.limit_val_batches", "model.optimizer.warmup", "model.optimizer.decay",
             "data.val_size"}


def is_among(key: str, keys: set[str]) -> bool:
    """True if a key, or a block that contains it, is in `keys`. List indices (`[0]`) are ignored."""
    parts = re.sub(r"\[\d+\]", "", key).split(".")
    return any(".".join(parts[:length]) in keys for length in range(1, len(parts) + 1))
