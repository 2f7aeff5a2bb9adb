"""`new`: a complete recipe for a model and a data set, its lengths and its memory measured."""

import itertools
import re
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from lmmods.core.errors import UserError
from lmmods.core.hf_config import known_fields, load_config, position_limit, saved_quantization, tells_token_types

SAMPLE = 20_000  # rows that are read: the first ones
MULTIPLE = 64  # lengths are multiples of this
LONGEST = 32_768  # measured and written at most, however long the rows that a model could take
BLOCK = {"CLM": 1024, "MLM": 512}  # length of blocks of texts
WINDOW, STRIDE, QUESTION = 384, 128, 64  # of question answering, as usual since BERT
FEW_BLOCKS = 100  # with fewer the blocks are made shorter
FEW_ROWS = 10  # of these none are set aside for validation
AUTO_CLASS = {"SFT": "AutoModelForCausalLM", "CLM": "AutoModelForCausalLM", "MLM": "AutoModelForMaskedLM",
              "QA": "AutoModelForQuestionAnswering", "Preference": "AutoModelForCausalLM"}
Task = Literal["SFT", "CLM", "MLM", "QA", "Preference"]


def new(name: str, model: str, data: str, task: Task | None = None, memory: float | None = None,
        columns: dict[str, str] | None = None, tokenizer: str | None = None, eos_token: str | None = None,
        overwrite: bool = False) -> None:
    """Write a recipe for your model and data: layout, template, lengths, batch size and memory are fitted to them.

    Args:
        name: Of the run; the recipe is NAME.yaml in the working directory, or the file itself where it ends in .yaml.
        model: Folder or hub id of the model to start from.
        data: File, folder, glob, URL or hub id of the training rows.
        task: SFT, CLM, MLM, QA or Preference; null decides by the rows and the model.
        memory: GiB of the GPU that will train; null takes the machine that this command runs on.
        columns: Names in the file -> names that the task expects, for example {reply: output}.
        tokenizer: Folder or hub id of the tokenizer; null takes the model's.
        eos_token: Token that ends a text, where the tokenizer names none.
        overwrite: Replace a recipe of this name.

    Raises:
        UserError: The model or the rows cannot be used, or the recipe is there already.
    """
    path = _free_path(name, overwrite)
    if memory is not None and not memory > 0:
        raise UserError(f"--memory is {memory}, but must be more than 0: the GiB of one GPU.")
    from lmmods.commands.memory_plan import gpu_of, plan_memory, this_machine
    from lmmods.commands.recipe_text import Facts, recipe_text
    from lmmods.runs.folder import write_text
    from lmmods.torch_engine.nn.summary import planned_shape

    config = load_config(model)
    with _own_names():
        rows = _first_rows(data, columns)
    chosen, why = _task(task, model, config, rows[0])
    loss = _loss(rows[0].values) if chosen == "Preference" else None
    fixed = {name: value for name, value in (("columns", columns), ("tokenizer", tokenizer),
                                           ("eos_token", eos_token)) if value is not None}
    with _own_names():
        measured = _measured(chosen, model, config, data, fixed, len(rows) > SAMPLE, "pair" if loss == "sigmoid" else
                             "mismatched")
    shape = planned_shape(config, AUTO_CLASS[chosen])
    machine = gpu_of(memory) if memory is not None else this_machine(shape.widths.hidden)
    batch = _rows_of_a_step(measured.rows, chosen)
    plan = plan_memory(shape, machine, measured.options["max_length"], batch, saved_quantization(config) is not None,
                       chosen == "Preference")
    facts = Facts(path=str(path), model=model, data=data, task=chosen, why=why, loss=loss, num_params=shape.num_params,
                  machine=machine, plan=plan, batch=batch, **vars(measured))
    text = recipe_text(facts)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_text(path, text)
    except OSError as error:
        raise UserError(f"{path} cannot be written ({error.strerror}). Choose another name.") from error
    print(f"{measured.table}\n\nWrote {path}: {facts.summary}.")
    if not plan.fits:
        print(f"warning: even so a step needs about {plan.needed / 2**30:.1f} GiB, more than {machine.name} has room "
              "for. Take a smaller model, lower data.max_length, or shard it over several GPUs (docs/cluster.md).")
    print(f"Look at it:  python train.py inspect --config {path}\nTrain:       python train.py fit --config {path}")


@dataclass
class Measured:
    """What the rows are, and the keys of `data` that follow.

    Args:
        options: Keys of `data`, in the order of the recipe.
        notes: Why a key has its value, by key.
        rows: Rows of batches among those read.
        is_sample: Whether the source has more rows than were read.
        table: The data report.
    """

    options: dict[str, Any]
    notes: dict[str, str]
    rows: int
    is_sample: bool
    table: str


@contextmanager
def _own_names() -> Iterator[None]:
    """What a message advises to set in a recipe is named as the option of this command that sets it there."""
    try:
        yield
    except UserError as error:
        raise UserError(re.sub(r"\bdata\.(columns|tokenizer|eos_token)\b", r"--\1", str(error))) from error


def _free_path(name: str, overwrite: bool) -> Path:
    path = Path(name if name.endswith(".yaml") else f"{name}.yaml")
    if not Path(name).name.removesuffix(".yaml").strip() or path.is_dir():
        raise UserError(f"new {name!r}: name the recipe to write, for example: new mine --model … --data …")
    if path.exists() and not overwrite:
        raise UserError(f"{path} is there already. Choose another name, or add --overwrite true.")
    return path


def _first_rows(data: str, columns: dict[str, str] | None) -> list[Any]:
    """One row more than `SAMPLE`, where there are so many. Raises UserError where there is none."""
    from lmmods.data.sources.source import Source
    from lmmods.data.sources.source_reader import SourceReader

    usable = (row for row in SourceReader(Source(data, columns=columns)) if row.problem is None)
    rows = list(itertools.islice(usable, SAMPLE + 1))
    if not rows:
        raise UserError(f"{data}: the data set is empty, no row was found")
    return rows


def _task(asked: Task | None, model: str, config: Any, row: Any) -> tuple[Task, str]:
    """The task by the first row, and why. Raises UserError: the model cannot learn it, or no layout is recognised."""
    from lmmods.data.sources.paths import file_type

    columns = row.values.keys()
    encoder = _is_encoder(config)
    if file_type(row.file) == ".txt" or asked in ("CLM", "MLM"):
        found, why = ("MLM" if encoder else "CLM"), "the data are texts"
    elif asked == "QA" or {"paragraphs", "qas"} & columns or {"question", "context", "answers"} <= columns:
        found, why = "QA", "the rows are questions on contexts"
    else:
        found, why = _of_conversations(row, encoder, asked)
    if asked is not None:
        found, why = asked, "--task"
    kind = f"{model} is of type {config.model_type}, an encoder"
    if encoder and found in ("SFT", "CLM", "Preference"):
        raise UserError(f"{found} ({why}) writes text, but {kind}. Choose a causal model, or data of texts "
                        "(MLM) or of questions on contexts (QA).")
    if not encoder and found == "MLM":
        raise UserError(f"--task MLM needs an encoder such as BERT, but {model} is of type {config.model_type}.")
    return found, f"{why}, {kind}" if found == "MLM" else why


def _of_conversations(row: Any, encoder: bool, asked: Task | None) -> tuple[Task, str]:
    """The task of a row that is neither a question on a context nor of a file of text, and why."""
    from lmmods.data.sources.formats import detect_format
    from lmmods.data.sources.preferences import conversation_layout, holds_preference

    where = f"{row.file}:{row.line}"
    if asked == "Preference" or asked is None and holds_preference(row.values):
        conversation_layout(row.values, where)
        return "Preference", "the rows hold better and worse answers"
    layout = detect_format(row.values, where)
    if layout == "text":
        return ("MLM" if encoder else "CLM"), "the rows are texts"
    return "SFT", f"the layout of the rows is {layout}"


def _loss(row: dict[str, Any]) -> str:
    """The usual loss of rows like this one: of pairs, or of single answers with a label."""
    from lmmods.data.sources.preferences import label_of

    return "sigmoid" if label_of(row) is None else "kto"


def _is_encoder(config: Any) -> bool:
    """Whether a model fills gaps instead of writing text. Raises UserError for one that does both."""
    from transformers.models.auto.modeling_auto import MODEL_FOR_MASKED_LM_MAPPING_NAMES

    if config.is_encoder_decoder:
        raise UserError(f"--model: {config.model_type} has an encoder and a decoder, which no task here trains.")
    names = " ".join(getattr(config, "architectures", None) or [])
    return config.model_type in MODEL_FOR_MASKED_LM_MAPPING_NAMES and "CausalLM" not in names and "LMHead" not in names


def _measured(task: Task, model: str, config: Any, data: str, fixed: dict[str, Any], has_more: bool, answers: str
              ) -> Measured:
    """Read and tokenise the first rows, once to see their lengths and once as the recipe will.

    Args:
        fixed: Keys of `data` that the command line gives.
        has_more: Whether the source has more rows.
        answers: What a row of preferences is to the loss.
    """
    most = min(position_limit(known_fields(config)) or LONGEST, LONGEST)
    with tempfile.TemporaryDirectory(prefix="lmmods-new-") as cache:
        def read(**options: Any) -> Any:
            return _opened(task, model, config, cache, data, {**fixed, **options}, answers)

        measure = {"CLM": _texts, "MLM": _texts, "QA": _questions}.get(task, _conversations)
        options, notes, module = measure(read, most, task)
        report = module.report
        table = module.report_table()
    [source] = report["sources"].values()
    options |= fixed
    usable, is_sample = source["rows_kept"], has_more or "documents" in options and source["rows_read"] >= SAMPLE
    val_size, notes["val_size"] = _validation(usable, is_sample)
    options["val_size"] = val_size
    return Measured(options, notes, report["splits"]["train"]["rows"], is_sample, table)


def _opened(task: Task, model: str, config: Any, cache: str, data: str, options: dict[str, Any], answers: str) -> Any:
    """The data module of a task over the first rows. Raises UserError as `inspect` does."""
    import importlib

    from lmmods.data.sources.source import Source

    kind = getattr(importlib.import_module(f"lmmods.data.{task.lower()}"), f"{task}Data")
    fields = known_fields(config)
    module = kind(source=Source(data, limit=SAMPLE), cache_dir=cache, **options)
    module.connect(pretrained=model, seed=42, max_positions=position_limit(fields),
                   token_types=tells_token_types(fields), answers=answers)
    module.prepare_data()
    module.setup("fit")
    return module


def _conversations(read: Any, most: int, _task: Task) -> tuple[dict[str, Any], dict[str, str], Any]:
    """Rows of up to the 95th percentile of lengths; the template is the tokenizer's own where it has one."""
    whole = read(max_length=most)
    named = {} if whole.tokenizer.chat_template else {"template": "alpaca"}
    length = whole.report["splits"]["train"]["length"]
    max_length = min(_rounded(length["p95"]), most)
    if _rounded(length["max"]) <= 1.25 * max_length:  # not worth losing a row
        max_length = min(_rounded(length["max"]), most)
    options: dict[str, Any] = {**named, "max_length": max_length}
    module = read(**options, batch_size=8)  # a usual one, for the share of padding
    [source] = module.report["sources"].values()
    dropped = sum(entry["rows"] for reason, entry in source["dropped"].items() if "long" in reason)
    cut, read_rows = source.get("rows_cut", 0), source["rows_read"]
    lost = (f"this truncates {cut / read_rows:.1%} of the rows and drops {dropped / read_rows:.1%} (data.on_overflow)"
            if cut or dropped else "no row is truncated or dropped")
    notes = {
        "source": f"{read_rows:,} rows read, layout {source['format']}",
        "template": "the tokenizer has no chat template of its own; others: docs/tasks/sft.md" if named else "",
        "max_length": f"95 % of the rows have at most {length['p95']:.0f} tokens, the longest {length['max']}; {lost}"}
    padding = module.report["splits"]["train"]["padding_share"]
    if padding["shuffled"] > 0.1:
        options["group_by_length"] = True
        notes["group_by_length"] = (f"with rows of any length side by side, 8 at a time, {padding['shuffled']:.0%} of "
                                    f"the positions would be padding, so {padding['group_by_length']:.0%}")
    return options, notes, module


def _texts(read: Any, most: int, task: Task) -> tuple[dict[str, Any], dict[str, str], Any]:
    """Full blocks of joined documents. Where there is one file of text, its paragraphs or lines are the documents."""
    from lmmods.data.sources.paths import file_type

    block = usual = min(BLOCK[task], most)
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
    notes = {"source": f"{source['rows_kept']:,} rows of {tokens:,} tokens in all",
             "documents": f"each {documents} of the file is a document, so that some can be set aside for validation",
             "max_length": "documents are laid end to end and split into blocks of so many tokens: none is lost"
                           + (f"; the usual {usual} would leave fewer than {FEW_BLOCKS} blocks"
                              if block < usual else "")}
    return options, notes, module


def _questions(read: Any, most: int, _task: Task) -> tuple[dict[str, Any], dict[str, str], Any]:
    """Windows of contexts: the usual ones, or shorter where all contexts are."""
    def windows(max_length: int) -> dict[str, int]:
        return {"max_length": max_length, "stride": min(STRIDE, max_length // 3),
                "question_max_length": min(QUESTION, max_length // 4)}

    module = read(**windows(min(WINDOW, most)))
    longest = module.report["splits"]["train"]["length"]["max"]
    options: dict[str, Any] = windows(min(_rounded(longest), WINDOW, most))
    module = read(**options)
    [source] = module.report["sources"].values()
    notes = {"source": f"{source['rows_read']:,} questions, layout {source['format']}",
             "max_length": "longer contexts become several windows, so nothing is lost",
             "stride": "tokens that neighbouring windows share"}
    if any(_has_no_answer(module.question_row("train", number)) for number in range(source["rows_read"])):
        options["version_2_with_negative"] = True
        notes["version_2_with_negative"] = "some questions have no answer"
    return options, notes, module


def _has_no_answer(row: dict[str, Any]) -> bool:
    """Whether the data say that a question has none."""
    answers = row.get("answers")
    return row.get("is_impossible") is True or answers == [] or isinstance(answers, dict) and not answers.get("text")


def _validation(usable: int, is_sample: bool) -> tuple[int, str]:
    """Rows to set aside, and why so many."""
    if usable < FEW_ROWS:
        return 0, f"{usable} rows are too few to set any aside: name others as val_source"
    if is_sample:
        return 500, "rows set aside for validation; or name others as val_source"
    return min(500, max(1, usable // 20)), "rows set aside for validation, one in twenty; or name others as val_source"


def _rows_of_a_step(rows: int, task: Task) -> int:
    """A usual number, a power of two; fewer for a small set, so that an epoch has 20 steps at least."""
    batch = 16 if task in ("SFT", "QA") else 32
    while batch > 1 and rows / batch < 20:
        batch //= 2
    return batch


def _rounded(length: float) -> int:
    return -int(-length // MULTIPLE) * MULTIPLE
