"""`new`: create a complete recipe for a model and a dataset, with measured lengths and memory."""

import itertools
import json
import math
import re
import tempfile
import textwrap
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

from lmmods.core.errors import UserError
from lmmods.core.hf_config import known_fields, load_config, position_limit, saved_quantization, tells_token_types
from lmmods.core.memory import CHUNK_BYTES_GPU, NetworkShape, Step, StepMemory, estimate_step
from lmmods.core.settings import LoRA
from lmmods.recipe.classes import class_name, declared, implementation
from lmmods.recipe.files import as_yaml
from lmmods.recipe.tasks.base import TaskFields, Usual

SAMPLE = 20_000  # leading rows to read
MULTIPLE = 64  # lengths are rounded up to multiples of this
MAX_LENGTH = 32_768  # maximum of measured and written lengths, even if the model supports more
WINDOW, STRIDE, QUESTION = 384, 128, 64  # usual question answering settings since BERT
FEW_BLOCKS = 100  # with fewer blocks, use shorter ones
FEW_ROWS = 10  # with fewer rows, hold out none for validation
OPTIONS = ("columns", "tokenizer", "eos_token")  # keys of `data` that are options of this command
Task = Literal[tuple(declared("model"))]  # type: ignore[valid-type]  # the names of all tasks


def new(name: str, model: str, data: str, task: Task | None = None, memory: float | None = None,
        columns: dict[str, str] | None = None, tokenizer: str | None = None, eos_token: str | None = None,
        overwrite: bool = False) -> None:
    """Create a recipe for your model and data: layout, template, lengths, batch size and memory are fitted to them.

    Args:
        name: Name of the run. The recipe is NAME.yaml in the working directory, or this file if it ends in .yaml.
        model: Folder or hub id of the model to start from.
        data: File, folder, glob, URL or hub id of the training rows.
        task: Task to train. Default: by the rows and the model.
        memory: GiB of the GPU that will train. Default: this machine's.
        columns: Column names in the file -> names that the task expects, for example {reply: output}.
        tokenizer: Folder or hub id of the tokenizer. Default: the model's.
        eos_token: Token that ends a text, if the tokenizer defines none.
        overwrite: Replace an existing recipe.

    Raises:
        UserError: The model or the rows cannot be used, or the recipe exists already.
    """
    path = _free_path(name, overwrite)
    if memory is not None and not memory > 0:
        raise UserError(f"--memory is {memory}, but must be more than 0. Set it to the GiB of one GPU.")
    from lmmods.runs.folder import write_text
    from lmmods.torch_engine.nn.summary import planned_shape

    config = load_config(model)
    with _name_options():
        rows = _first_rows(data, columns)
        task_name, reason = _choose_task(task, model, config, rows[0])
    fields_class, settings = declared("model")[task_name], _data_class(task_name).model_settings(rows[0])
    length_limit = min(position_limit(known_fields(config)) or MAX_LENGTH, MAX_LENGTH)
    if settings.get("max_new_tokens", (0, ""))[0] > length_limit // 2:
        settings["max_new_tokens"] = (length_limit // 2,
                                      f"maximum answer length: half of the model's {length_limit} tokens")
    fields = fields_class(pretrained=model, **{name: value for name, (value, _) in settings.items()})
    explicit = {name: value for name, value in (("columns", columns), ("tokenizer", tokenizer),
                                              ("eos_token", eos_token)) if value is not None}
    with _name_options():
        measured = _measure(fields, task_name, model, config, data, explicit, len(rows) > SAMPLE)
    overrides = {**(fields.overrides or {}), **measured.network_fields}
    shape = planned_shape(load_config(model, overrides), fields_class.auto_class)
    machine = gpu_of(memory) if memory is not None else this_machine(shape.widths.hidden)
    measured.rows *= fields.rows_per_prompt
    batch = _rows_per_step(measured.rows, fields_class.usual.rows, fields.rows_per_prompt)
    plan = plan_memory(shape, machine, measured.options["max_length"], batch, saved_quantization(config) is not None,
                       measured.sequences, fields.reference_kind is not None)
    facts = Facts(path=str(path), model=model, data=data, task=task_name, why=reason, settings=settings,
                  num_params=shape.num_params, machine=machine, plan=plan, batch=batch, fields=fields,
                  **vars(measured))
    text = recipe_text(facts)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_text(path, text)
    except OSError as error:
        raise UserError(f"{path} cannot be written ({error.strerror}). Use another name.") from error
    print(f"{measured.table}\n\nWrote {path}: {facts.summary}.")
    if not plan.fits:
        print(f"warning: a step needs {plan.memory}, more than fits on {machine.name}. Use a smaller model, lower "
              "data.max_length, or shard it over several GPUs (docs/cluster.md).")
    print(f"Inspect it:  python train.py inspect --config {path}\nTrain:       python train.py fit --config {path}")


@dataclass
class Measured:
    """Measured properties of the rows, and the resulting keys of `data`.

    Args:
        options: Keys of `data` in recipe order.
        notes: Reason for each key's value.
        rows: Batch rows made from the rows that were read.
        sequences: Number of sequences per row.
        network_fields: Fields of the network's configuration that depend on the rows.
        is_sample: True if the source has more rows than were read.
        table: Data report.
    """

    options: dict[str, Any]
    notes: dict[str, str]
    rows: int
    sequences: int
    network_fields: dict[str, Any]
    is_sample: bool
    table: str


@contextmanager
def _name_options() -> Iterator[None]:
    """Context in which errors name options of this command instead of recipe keys."""
    try:
        yield
    except UserError as error:
        text = re.sub(rf"\bdata\.({'|'.join(OPTIONS)})\b", r"--\1", str(error))
        if keys := re.findall(r"\bdata\.(?:\w+_columns?|dataset_format)\b", text):
            text = f"{text.removesuffix('.')}. new cannot set {' or '.join(dict.fromkeys(keys))}."
            if "--columns" not in text:
                column = re.sub(r"data\.|_columns?", "", keys[0])
                text += f" Map yours with --columns, for example {{your_column: {column}}}."
        raise UserError(text) from error


def _free_path(name: str, overwrite: bool) -> Path:
    path = Path(name if name.endswith(".yaml") else f"{name}.yaml")
    if not Path(name).name.removesuffix(".yaml").strip() or path.is_dir():
        raise UserError(f"new {name!r}: this is not a recipe name. Use for example new mine --model … --data …")
    if path.exists() and not overwrite:
        raise UserError(f"{path} already exists. Use another name, or add --overwrite true.")
    return path


def _first_rows(data: str, columns: dict[str, str] | None) -> list[Any]:
    """Return up to `SAMPLE` + 1 rows; the extra one shows that there are more. Raises UserError: no row is usable."""
    from lmmods.data.read.source_reader import SourceReader
    from lmmods.recipe.source import Source

    usable = (row for row in SourceReader(Source(data, columns=columns)) if row.problem is None)
    rows = list(itertools.islice(usable, SAMPLE + 1))
    if not rows:
        raise UserError(f"--data {data} has no usable row. Use a dataset with rows.")
    return rows


def _choose_task(requested: str | None, model: str, config: Any, row: Any) -> tuple[str, str]:
    """Return the task, requested or inferred from the first row, and the reason.

    Raises:
        UserError: The model does not support the task, or no task supports the rows.
    """
    encoder = _is_encoder(config)
    claims = [(requested, "--task")] if requested else _find_tasks(row)
    supported = [(name, reason) for name, reason in claims if _needs_encoder(name) in (None, encoder)]
    task, reason = (supported or claims)[0]
    model_note = f"{model} is of type {config.model_type}, an encoder"
    if not supported and encoder:
        others = ", ".join(name for name in declared("model") if _needs_encoder(name) is not False)
        raise UserError(f"{task} ({reason}) generates text, but {model_note}. Use a causal model, or data for "
                        f"{others}.")
    if not supported:
        raise UserError(f"--task {task} needs an encoder such as BERT, but {model} is of type {config.model_type}.")
    return task, f"{reason}, {model_note}" if _needs_encoder(task) else reason


def _find_tasks(row: Any) -> list[tuple[str, str]]:
    """Return the most specific tasks that recognise a row, each with the reason."""
    data_classes = sorted(declared("data").values(), key=lambda data_class: data_class.generality)
    for _, group in itertools.groupby(data_classes, lambda data_class: data_class.generality):
        claims = [(name, reason) for data_class in group for name, task in declared("model").items()
                  if task.takes == class_name(data_class) and (reason := _data_class(name).recognise(row))]
        if claims:
            return claims
    raise UserError(f"{row.file}: no task matches the columns {', '.join(row.values)}. Set --task.")


def _needs_encoder(task: str) -> bool | None:
    """True for a task of encoders, False for a task of decoders, None for both."""
    auto_class = declared("model")[task].auto_class
    return {"AutoModelForMaskedLM": True, "AutoModelForCausalLM": False}.get(auto_class)


def _data_class(task: str) -> Any:
    """Import the data module of a task."""
    return implementation(declared("data")[declared("model")[task].takes], "lmmods.data")


def _is_encoder(config: Any) -> bool:
    """True for a masked LM, False for a causal LM. Raises UserError for an encoder-decoder."""
    from transformers.models.auto.modeling_auto import MODEL_FOR_MASKED_LM_MAPPING_NAMES

    if config.is_encoder_decoder:
        raise UserError(f"--model: {config.model_type} is an encoder-decoder, which no task supports. Use another "
                        "model.")
    names = " ".join(getattr(config, "architectures", None) or [])
    return config.model_type in MODEL_FOR_MASKED_LM_MAPPING_NAMES and "CausalLM" not in names and "LMHead" not in names


def _measure(fields: TaskFields, task: Task, model: str, config: Any, data: str, explicit: dict[str, Any],
             has_more: bool) -> Measured:
    """Read and tokenise the first rows, once to measure lengths and once with the recipe's settings.

    Args:
        explicit: Keys of `data` from the command line.
        has_more: True if the source has more rows.
    """
    length_limit = min(position_limit(known_fields(config)) or MAX_LENGTH, MAX_LENGTH)
    with tempfile.TemporaryDirectory(prefix="lmmods-new-") as cache:
        def read(**options: Any) -> Any:
            return _build_data(fields, task, model, config, cache, data, {**explicit, **options})

        data_class = _data_class(task)
        measure = {"texts": _texts, "questions": _questions, "conversations": _conversations}[data_class.rows_are]
        options, notes, module = measure(read, length_limit, data_class)
        report = module.report
        table, sequences, network_fields = module.report_table(), module.sequences_per_row, module.network_fields
    [source] = report["sources"].values()
    options |= explicit
    num_usable, is_sample = source["rows_kept"], has_more or "documents" in options and source["rows_read"] >= SAMPLE
    val_size, notes["val_size"] = _choose_val_size(num_usable, is_sample)
    options["val_size"] = val_size
    return Measured(options, notes, report["splits"]["train"]["rows"], sequences, network_fields, is_sample, table)


def _build_data(task: TaskFields, name: Task, model: str, config: Any, cache: str, data: str, options: dict[str, Any]
                ) -> Any:
    """Build the data module of a task on the first rows. Raises UserError: the rows or the tokenizer cannot be used."""
    from lmmods.recipe.source import Source

    fields = known_fields(config)
    module = _data_class(name)(source=Source(data, limit=SAMPLE), cache_dir=cache, **options)
    module.connect(pretrained=model, seed=42, max_positions=position_limit(fields),
                   token_types=tells_token_types(fields), answers=task.answers, new_tokens=task.new_tokens)
    module.prepare_data()
    module.setup("fit")
    return module


def _conversations(read: Any, length_limit: int, data_class: Any) -> tuple[dict[str, Any], dict[str, str], Any]:
    """Limit rows to the 95th percentile of lengths, and set a template for chats if the tokenizer has none."""
    untruncated = read(max_length=length_limit)
    template = {"template": "alpaca"} if data_class.has_chats and not untruncated.tokenizer.chat_template else {}
    lengths, answer_tokens = untruncated.report["splits"]["train"]["length"], untruncated.codec.model.new_tokens - 1
    max_length = min(_round_up(lengths["p95"] + answer_tokens), length_limit)
    if _round_up(lengths["max"] + answer_tokens) <= 1.25 * max_length:  # the longest rows are hardly longer: lose none
        max_length = min(_round_up(lengths["max"] + answer_tokens), length_limit)
    options: dict[str, Any] = {**template, "max_length": max_length}
    module = read(**options, batch_size=8)  # a typical size, for the fraction of padding
    [source] = module.report["sources"].values()
    dropped = sum(entry["rows"] for reason, entry in source["dropped"].items() if "long" in reason)
    num_truncated, read_rows = source.get("rows_cut", 0), source["rows_read"]
    loss_note = (f"this truncates {num_truncated / read_rows:.1%} of the rows and drops {dropped / read_rows:.1%} "
                 "(data.on_overflow)" if num_truncated or dropped else "no row is truncated or dropped")
    notes = {
        "source": f"{read_rows:,} rows read, layout {source['format']}",
        "template": "the tokenizer has no chat template; other templates: docs/tasks/sft.md" if template else "",
        "max_length": f"95 % of the rows have at most {lengths['p95']:.0f} tokens, the longest {lengths['max']}; "
                      + loss_note
                      + (f"; an answer takes {answer_tokens + 1} more" if answer_tokens else "")}
    padding = module.report["splits"]["train"]["padding_share"]
    if not answer_tokens and padding["shuffled"] > 0.1 and padding["group_by_length"] < 0.9 * padding["shuffled"]:
        options["group_by_length"] = True
        notes["group_by_length"] = (f"padding is {padding['group_by_length']:.0%} of the positions, instead of "
                                    f"{padding['shuffled']:.0%} without it (8 rows at a time)")
    return options, notes, module


def _texts(read: Any, length_limit: int, data_class: Any) -> tuple[dict[str, Any], dict[str, str], Any]:
    """Pack joined documents into full blocks. A single text file is split into paragraphs or lines as documents."""
    from lmmods.recipe.source import file_type

    block = usual_block = min(data_class.block, length_limit)
    for documents in ("file", "paragraph", "line"):
        module = read(max_length=block, documents=documents)
        [source] = module.report["sources"].values()
        if source["rows_kept"] >= FEW_ROWS or not all(file_type(path) == ".txt" for path in source["files"]):
            break
    tokens = module.report["splits"]["train"]["tokens"]
    while block >= 2 * MULTIPLE and tokens / block < FEW_BLOCKS:
        block = block // 2 // MULTIPLE * MULTIPLE
    options: dict[str, Any] = {"documents": documents, "max_length": block} if documents != "file" else {
        "max_length": block}
    module = read(**options)
    [source] = module.report["sources"].values()
    notes = {"source": f"{source['rows_kept']:,} rows, {tokens:,} tokens in total",
             "documents": f"each {documents} of the file is a document, so that some can be held out for validation",
             "max_length": "documents are concatenated and split into blocks of this many tokens; none is lost"
                           + (f"; the usual {usual_block} would leave fewer than {FEW_BLOCKS} blocks"
                              if block < usual_block else "")}
    return options, notes, module


def _questions(read: Any, length_limit: int, _data_class: Any) -> tuple[dict[str, Any], dict[str, str], Any]:
    """Split contexts into windows of the usual length, or shorter ones if all contexts are short."""
    def windows(max_length: int) -> dict[str, int]:
        return {"max_length": max_length, "stride": min(STRIDE, max_length // 3),
                "question_max_length": min(QUESTION, max_length // 4)}

    module = read(**windows(min(WINDOW, length_limit)))
    max_tokens = module.report["splits"]["train"]["length"]["max"]
    options: dict[str, Any] = windows(min(_round_up(max_tokens), WINDOW, length_limit))
    module = read(**options)
    [source] = module.report["sources"].values()
    notes = {"source": f"{source['rows_read']:,} questions, layout {source['format']}",
             "max_length": "longer contexts are split into windows, so nothing is lost",
             "stride": "tokens that neighbouring windows share"}
    questions = module.rows("train")
    if any(_has_no_answer(questions.source_row(index)) for index in range(source["rows_read"])):
        options["version_2_with_negative"] = True
        notes["version_2_with_negative"] = "some questions have no answer"
    return options, notes, module


def _has_no_answer(row: dict[str, Any]) -> bool:
    """True if a question is marked as unanswerable."""
    answers = row.get("answers")
    return row.get("is_impossible") is True or answers == [] or isinstance(answers, dict) and not answers.get("text")


def _choose_val_size(usable: int, is_sample: bool) -> tuple[int, str]:
    """Return the number of validation rows, and the reason."""
    if usable < FEW_ROWS:
        return 0, f"{usable} rows are too few to hold any out: set val_source"
    if is_sample:
        return 500, "rows held out for validation; or set val_source"
    return min(500, max(1, usable // 20)), "rows held out for validation, one in twenty; or set val_source"


def _rows_per_step(rows: int, batch: int, min_rows: int) -> int:
    """Return the usual number of rows per step, or fewer, so that an epoch has at least 20 steps.

    Args:
        min_rows: Minimum number of rows per step.
    """
    while batch > min_rows and rows / batch < 20:
        batch //= 2
    return batch


def _round_up(length: float) -> int:
    return -int(-length // MULTIPLE) * MULTIPLE


# ---------------------------------------------------------------------------------------------------------------------
# Fitting into memory: full fine-tuning, LoRA or QLoRA, batch size and gradient checkpointing.

MEMORY_FRACTION = 0.8  # fraction of memory to use, as the estimate may be off by tens of percent
FULL_BELOW = 10**9  # number of parameters up to which full fine-tuning is the first choice
ADAPTER = LoRA(rank=16, alpha=32, dropout=0.05)
SMALLEST_PLAIN_BATCH = 4  # for smaller ones use gradient checkpointing, which costs a third of the time


@dataclass(frozen=True)
class MemoryPlan:
    """Training method and the memory of a step.

    Args:
        lora: True if an adapter is trained instead of the model itself.
        quantize: True if the base is stored in nf4.
        batch_size: Rows per micro-batch.
        memory: Memory of a step; `MEMORY_FRACTION` of the device's memory is available.
    """

    lora: bool
    quantize: bool
    batch_size: int
    checkpointing: bool
    memory: StepMemory

    @property
    def needed(self) -> int:
        """Peak bytes of a step."""
        return self.memory.needed

    @property
    def fits(self) -> bool:
        """True if a step fits."""
        return self.memory.fits


@dataclass(frozen=True)
class Machine:
    """Training device.

    Args:
        memory: Bytes of device memory.
        compute_bytes: Bytes per activation value, and per weight of a frozen base.
        tokens_at_once: Number of a micro-batch's tokens computed at a time; 0 computes all.
        name: Human-readable name.
        chunk_bytes: See `Step`.
    """

    memory: int
    compute_bytes: int
    tokens_at_once: int
    name: str
    chunk_bytes: int = CHUNK_BYTES_GPU


def this_machine(hidden: int) -> Machine:
    """Return the device and precision that `auto` selects on this machine."""
    import torch

    from lmmods.torch_engine.nn.loss import chunk_bytes
    from lmmods.torch_engine.nn.micro_batches import choose_chunk_tokens
    from lmmods.torch_engine.nn.summary import available_bytes
    from lmmods.torch_engine.precision import choose_precision

    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    precision, _ = choose_precision("auto")
    name = "this GPU" if device.type == "cuda" else "this machine"
    return Machine(available_bytes(device), 4 if precision == "32-true" else 2,
                   choose_chunk_tokens(None, True, device, hidden), name, chunk_bytes(device))


def gpu_of(gibibytes: float) -> Machine:
    """Return a GPU with this memory that computes in bfloat16."""
    return Machine(int(gibibytes * 2**30), 2, 0, "--memory")


def plan_memory(shape: NetworkShape, machine: Machine, max_length: int, batch: int, is_quantized: bool,
                sequences: int = 1, has_reference: bool = False) -> MemoryPlan:
    """Return the first plan that fits, or the smallest if none does.

    Args:
        max_length: Maximum sequence length in tokens.
        batch: Rows per step, the maximum of a micro-batch.
        is_quantized: True if the model is saved in 4 or 8 bits, so that only an adapter can be trained.
        sequences: Number of sequences per row, such as the answers of a pair.
        has_reference: True if training uses a frozen reference, for which full fine-tuning keeps a copy of the model.
    """
    plan = None
    for lora, quantize, size, checkpointing in _list_choices(shape, batch, is_quantized):
        tokens = size * sequences * max_length
        if machine.tokens_at_once:
            tokens = min(tokens, max(machine.tokens_at_once, sequences * max_length))
        trainable = shape.lora_per_rank * ADAPTER.rank if lora else shape.num_params
        weights = shape.base_bytes(quantize or is_quantized, machine.compute_bytes) + 4 * trainable if lora \
            else 4 * shape.num_params * (2 if has_reference else 1)
        step = Step(trainable, "adamw", checkpointing, machine.compute_bytes, in_full=not lora, has_dropout=lora,
                    chunk_bytes=machine.chunk_bytes if shape.head else 0, trained_head=0 if lora else shape.head)
        memory = estimate_step(shape.widths, weights, step, tokens, MEMORY_FRACTION * machine.memory)
        plan = MemoryPlan(lora, quantize, size, checkpointing, memory)
        if plan.fits:
            break
    return plan


def _list_choices(shape: NetworkShape, batch: int, is_quantized: bool) -> Iterator[tuple[bool, bool, int, bool]]:
    """Yield (lora, quantize, batch size, checkpointing) in order of preference."""
    methods = [(True, False)] if is_quantized else [(True, False), (True, True)]
    if shape.num_params < FULL_BELOW and not is_quantized:
        methods.insert(0, (False, False))
    sizes = [size for size in (32, 16, 8, 4, 2, 1) if size <= batch]
    plain_sizes = [size for size in sizes if size >= min(SMALLEST_PLAIN_BATCH, batch)]
    for lora, quantize in methods:
        yield from ((lora, quantize, size, False) for size in plain_sizes)
        yield from ((lora, quantize, size, True) for size in sizes)


def as_options(plan: MemoryPlan) -> dict[str, Any]:
    """Return the keys of `model` that the plan sets."""
    return {**({"quantize": "nf4"} if plan.quantize else {}),
            **({"lora": {"rank": ADAPTER.rank, "alpha": ADAPTER.alpha, "dropout": ADAPTER.dropout,
                         "targets": ADAPTER.targets}} if plan.lora else {})}


# ---------------------------------------------------------------------------------------------------------------------
# Text of the recipe that `new` writes, with comments that give reasons.

SMALL = 50_000_000  # number of parameters below which a network is small
WIDTH = 120  # maximum line width


@dataclass
class Facts(Measured):
    """Input of a recipe's text.

    Args:
        path: Path of the recipe.
        why: Reason for the choice of task.
        settings: Further keys of `model`, each with its comment.
        batch: Rows per step.
        fields: Settings of the task.
    """

    path: str
    model: str
    data: str
    task: str
    why: str
    settings: dict[str, tuple[Any, str]]
    num_params: int
    machine: Machine
    plan: MemoryPlan
    batch: int
    fields: TaskFields

    @property
    def usual(self) -> Usual:
        """Usual settings of the task."""
        return declared("model")[self.task].usual

    @cached_property
    def training(self) -> str:
        """Name of the tuning method."""
        return "QLoRA" if self.plan.quantize else "LoRA" if self.plan.lora else "full fine-tuning"

    @cached_property
    def summary(self) -> str:
        """One-line summary of the recipe."""
        plan = self.plan
        return (f"{self.task} by {self.training}, rows of {self.options['max_length']} tokens, {plan.batch_size} × "
                f"{self.batch // plan.batch_size} a step, {plan.memory}")


def recipe_text(facts: Facts) -> str:
    """Return the recipe as YAML with comments, valid for both engines."""
    plan, steps = facts.plan, math.ceil(
        max(1, facts.rows - facts.options["val_size"] * facts.fields.rows_per_prompt) / facts.batch)
    usual, epochs = facts.usual, facts.usual.epochs
    steps_note = f"{'at least ' if facts.is_sample else 'about '}{steps} steps each"
    rate = usual.adapter_lr if plan.lora else usual.small_lr if facts.num_params < SMALL else usual.lr
    data = {"source": facts.data, **facts.options}
    lines = [
        f"# {facts.task} of {_plain(facts.model)} on {_plain(facts.data)}, by {facts.training}.",
        "# Created by `new`; edit it freely.",
        "#",
        f"#   python train.py inspect --config {_plain(facts.path)}",
        f"#   python train.py fit --config {_plain(facts.path)}",
        "#",
        f"# Hardware: {facts.machine.memory / 2**30:.0f} GiB ({facts.machine.name}); {plan.memory}",
        f"# Time: {epochs * steps} steps{' or more' if facts.is_sample else ''}; fit prints the duration at its start",
        "",
        *_line("engine", "torch", "or jax: the same recipe"),
        *_line("seed_everything", 42),
        "trainer:",
        *_line("max_epochs", epochs, steps_note, 2),
        *_line("accumulate_grad_batches", facts.batch // plan.batch_size,
               f"so that a step has {facts.fields.describe_step(facts.batch, None)[0]}; divide by the number of "
               "devices", 2),
        *_line("gradient_clip_val", 1.0, "", 2),
        *_line("precision", "auto", "bf16-mixed if the hardware supports it, otherwise 32-true", 2),
        *_line("devices", 1, "", 2),
        *(_line("val_check_interval", 0.5, "validates twice an epoch", 2) if data["val_size"] else []),
        *_line("log_every_n_steps", min(10, steps), "", 2),
        *_line("default_root_dir", f"runs/{Path(facts.path).stem}", "the run folder, with metrics.csv and loss.png", 2),
        "  # logger: [{class_path: WandbLogger}]   # or TensorBoardLogger with init_args: {save_dir: …}",
        "model:",
        *_line("class_path", facts.task, facts.why, 2),
        "  init_args:",
        *_line("pretrained", facts.model, f"{facts.num_params:,} parameters", 4),
        *_model_lines(facts),
        *_line("optimizer", {"name": "adamw", "lr": rate, "schedule": "cosine", "warmup": 0.03},
               "the most important setting: try lr three times higher and lower", 4),
        "data:",
        *_line("class_path", declared("model")[facts.task].takes, "", 2),
        "  init_args:",
        *[line for key, value in data.items() for line in _line(key, value, facts.notes.get(key, ""), 4)],
        *_line("batch_size", plan.batch_size, _explain_batch_size(facts), 4),
        *(_line("eval_batch_size", max(plan.batch_size // 2, 1), "prompts answered at once", 4)
          if facts.fields.rows_per_prompt > 1 else []),
        "checkpoint:",
        *_line("every_n_steps", max(1, min(500, steps // 2)), "resume with --ckpt_path last", 2),
        *_line("keep_last", 2, "", 2)]
    if usual.prompt:
        lines.append(f"# samples: {{prompts: [{usual.prompt}], every_n_steps: 100}}   # answers during "
                     "training")
    return "\n".join(lines) + "\n"


def _explain_batch_size(facts: Facts) -> str:
    plan = facts.plan
    if not plan.fits:
        return f"rows per micro-batch: even these need more than {MEMORY_FRACTION:.0%} of the memory"
    if plan.batch_size == facts.batch:
        return "rows per micro-batch: the whole step"
    return (f"rows per micro-batch: twice as many would need more than {MEMORY_FRACTION:.0%} of the memory"
            + ("" if plan.checkpointing else " without gradient_checkpointing, which takes longer"))


def _model_lines(facts: Facts) -> list[str]:
    plan, options = facts.plan, as_options(facts.plan)
    notes = {"quantize": "the frozen base in 4 bits (QLoRA), as it would not fit in 16 bits",
             "lora": "trains adapters on a frozen base; null is full fine-tuning"}
    lines = [line for key, value in options.items() for line in _line(key, value, notes[key], 4)]
    lines = [*(line for key, (value, note) in facts.settings.items() for line in _line(key, value, note, 4)), *lines]
    if not plan.lora:
        lines.append("    # lora: {rank: 16, alpha: 32}   # adapters instead of full fine-tuning, with lr "
                     f"{_value(facts.usual.adapter_lr)}")
    if plan.checkpointing:
        lines += _line("gradient_checkpointing", True, "takes a third more time and less memory", 4)
    return lines


def _line(key: str, value: Any, comment: str = "", indent: int = 0) -> list[str]:
    """Format a key with its comment next to it, or above it if the line would be too long."""
    text = f"{' ' * indent}{key}: {_value(value)}"
    if not comment:
        return [text]
    line = f"{text}   # {_plain(comment)}"
    if len(line) <= WIDTH:
        return [line]
    prefix = f"{' ' * indent}# "
    return [*textwrap.wrap(_plain(comment), WIDTH, initial_indent=prefix, subsequent_indent=prefix), text]


def _plain(text: str) -> str:
    """Collapse whitespace, as a line break would end the comment."""
    return " ".join(text.split())


def _value(value: Any) -> str:
    if isinstance(value, dict):
        return "{" + ", ".join(f"{_value(name)}: {_value(item)}" for name, item in value.items()) + "}"
    if isinstance(value, float) and 0 < value < 0.01:  # YAML 1.1 reads 2e-05 as a string
        digits, exponent = f"{value:.1e}".split("e")
        return f"{digits}e{int(exponent)}"
    if isinstance(value, str) and not value.isprintable():
        return json.dumps(value)  # keeps it on one line
    return as_yaml([value], default_flow_style=True, width=math.inf)[1:-2]
