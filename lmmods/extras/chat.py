"""`chat`: chat with a run, a checkpoint, a model folder or a hub model, on either engine."""

import contextlib
import importlib
import json
import os
import re
import signal
import sys
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, dataclass, field, fields, make_dataclass, replace
from functools import cached_property, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Protocol

from lmmods.commands.exported_model import data_module, exported_fields, model_block, read_blocks
from lmmods.core import hub
from lmmods.core.adapters import SETTINGS, adapter_config
from lmmods.core.console import tell
from lmmods.core.errors import UserError
from lmmods.core.files import read_text
from lmmods.core.generation_config import BOOKKEEPING, GENERATION_CONFIG, SAMPLING
from lmmods.core.settings import Generation, require
from lmmods.core.signals import Interrupted
from lmmods.core.waiting import sleep_if_busy
from lmmods.data.encode.tokenizer import decode
from lmmods.data.read.conversation import Message, RowProblem
from lmmods.data.read.formats import find_format
from lmmods.data.read.images import IMAGE, decode_image, images_of
from lmmods.recipe.files import read_recipe
from lmmods.recipe.images import ImageFields
from lmmods.recipe.tasks.base import CausalFields, Quantize
from lmmods.recipe.tasks.clm import CLMDataFields
from lmmods.recipe.trust import check_remote_code, is_trusted
from lmmods.runs.folder import RunFolder

if TYPE_CHECKING:
    from lmmods.data.base import DataModule

Changes = make_dataclass("GenerationChanges", [(item.name, item.type | None, None) for item in fields(Generation)],
                         frozen=True, namespace={"__doc__": Generation.__doc__, "__module__": __name__})


def chat(run: str | None = None, model: str | None = None, ckpt_path: str | None = None, prompt: str | None = None,
         image: str | None = None, system: str | None = None, compare_base: bool = False,
         generation: Changes = Changes(), seed: int | None = None, template: str | None = None,
         chat_template_kwargs: dict[str, bool | int | float | str | None] | None = None,
         quantize: Quantize | None = None, engine: Literal["torch", "jax"] | None = None,
         precision: Literal["32-true", "bf16-true", "bf16-mixed", "16-mixed"] | None = None,
         device: str = "auto") -> None:
    """Chat with a run, one of its checkpoints, a model folder or a hub model.

    Prompts are rendered as in training and predict. On a terminal, answers are streamed: Ctrl+C stops one, /new starts
    a new conversation, Ctrl+D exits. Without a terminal, each line of stdin is a turn. Answers go to stdout, everything
    else to stderr.

    Args:
        run: Run folder, of either engine.
        model: Folder or hub id of a model or an adapter, instead of a run.
        ckpt_path: Checkpoint to load instead of the run's model: `last`, `best`, a step number or a path.
        prompt: Answer this prompt and exit.
        image: Image file that the first question is about, for a run with `model.images` or a vision-language model. On
            a terminal, `/image FILE` adds one to the next question.
        system: System turn. Default: the recipe's.
        compare_base: Also print the answers of the model that the run or adapter started from.
        generation: Generation settings. Default: the recipe's, or the model's generation_config.json.
        seed: Random seed of sampling. Default: the run's, or 0.
        template: For `model`: a named template (alpaca, chatml, ...) or a Jinja file. Default: the tokenizer's chat
            template; a model without one continues each text.
        chat_template_kwargs: For `model`: variables of its chat template, for example {enable_thinking: false}.
        quantize: For `model`: store the base model in 4 bits (nf4, fp4) or 8 bits (int8).
        engine: torch or jax. Default: the run's; torch for `model`.
        precision: Precision of the computation. Default: the run's; for `model`, bfloat16 if the GPU supports it,
            otherwise float32.
        device: cpu, cuda, cuda:1; auto uses a GPU if there is one.

    Raises:
        UserError: No such run, checkpoint or model; no causal LM; settings that do not fit.
    """

    _check_options(run, model, prompt, ckpt_path=ckpt_path, template=template,
                   chat_template_kwargs=chat_template_kwargs, quantize=quantize)
    require(seed is None or seed >= 0, "--seed", seed, "0 or more")
    _exit_on_signals()
    with contextlib.redirect_stdout(sys.stderr):  # keep loading messages out of the answers
        source = (read_run(run, ckpt_path) if run else
                  read_model(model, template, chat_template_kwargs, quantize, images=image is not None))
        pictures = [] if image is None else [source.open_image(image)]
        if system is not None and not source.is_chat:
            raise UserError("--system: this model continues texts and has no system turn. Remove it.")
        if compare_base and source.base is None:
            raise UserError("--compare_base: this model's base is unknown. Use it with an adapter, or with a run that "
                            "started from a model.")
        overrides = {key: value for key, value in asdict(generation).items() if value is not None}
        settings = replace(source.generation, **overrides)
        load = _make_loader(engine or source.engine, source, precision, device)
        stored_frozen = source.frozen or source.model.trains_adapter
        models = {"base": load(source.base, frozen=stored_frozen)} if compare_base else {}
        models["tuned"] = load(source.model, checkpoint=source.checkpoint, frozen=source.frozen)
        session = Session(source, models, settings, source.seed if seed is None else seed,
                          source.model.max_positions(), system, pictures=pictures)
    if not source.is_chat:
        tell("This model has no chat template; it continues each text that you enter on its own.")
    try:
        if prompt is not None:
            session.ask(prompt)
        elif sys.stdin.isatty() and sys.stdout.isatty():
            images = f"{IMAGE_COMMAND} FILE adds an image to the next question, " if source.sees_images else ""
            tell(f"{source.title}. Ctrl+C stops an answer, {NEW} starts a new conversation, {images}Ctrl+D exits.")
            converse(session)
        else:
            answer_lines(session)
    except BrokenPipeError:  # the reader closed the pipe
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _check_options(run: str | None, model: str | None, prompt: str | None, ckpt_path: str | None,
                   **model_options: Any) -> None:
    """Raise UserError unless the options identify one model to chat with."""
    if (run is None) == (model is None):
        raise UserError("chat needs --run RUN, a run folder, or --model MODEL, a model folder or hub id"
                        + ("; both are set. Remove one." if run else "."))
    for name, value in (("--run", run), ("--model", model)):
        require(value != "", name, "empty", "a name")
    require(prompt is None or bool(prompt.strip()), "--prompt", repr(prompt), "text that is not blank")
    if model is not None and ckpt_path is not None:
        raise UserError("--ckpt_path selects a checkpoint of a run. Use --run instead of --model.")
    for name, value in model_options.items():
        if run is not None and value is not None:
            raise UserError(f"--{name} applies only to --model; a run's config.yaml sets it. Remove it.")


def _make_loader(engine: str, source: Any, precision: str | None, device: str) -> Callable[..., Any]:
    """Return a function that loads a model of `source` from its fields, on one engine."""
    if engine == "jax":
        importlib.import_module("jax_engine.engine").load()  # reports missing packages
        answering = importlib.import_module("jax_engine.answering")
        answering.connect(device)
        precision = precision or source.precision or answering.choose_precision()
        options: dict[str, Any] = {}
    else:
        if line := sleep_if_busy():
            tell(line)
        answering = importlib.import_module("lmmods.torch_engine.answering")
        options = {"device": answering.choose_device(device)}
        precision = precision or source.precision or answering.choose_precision(options["device"])
    return partial(answering.TextModel, data=source.data, precision=precision, seed=source.seed, **options)


def _exit_on_signals() -> None:
    def interrupt(signum: int, _frame: Any) -> None:
        raise Interrupted("Interrupted.")

    for signum in (signal.SIGINT, signal.SIGTERM):
        signal.signal(signum, interrupt)


# ---------------------------------------------------------------------------------------------------------------------
# Chat sources (a run, one of its checkpoints, a model folder or a hub id) and their prompt format.

CHAT, TEXT = "messages", "text"  # row layouts: turns, and whole texts
NO_ROWS = "none"  # placeholder source of a data module that reads no rows
# Keys of generation_config.json that are used elsewhere or do not affect the text.
USED_ELSEWHERE = {*BOOKKEEPING, "eos_token_id", "bos_token_id", "pad_token_id", "max_length", "early_stopping",
                  "output_attentions", "output_hidden_states", "return_dict_in_generate", "cache_implementation"}


@dataclass
class Source:
    """Model to chat with, before it is loaded.

    Args:
        title: Human-readable description.
        model: Fields that the network is built from.
        data: Data module that renders prompts and knows the special tokens.
        layout: Layout of the training rows; None for language models, which continue texts.
        generation: Generation settings of its recipe or generation_config.json.
        stop_token_ids: Tokens that end an answer.
        precision: Precision of the run; None without a run.
        seed: Seed of the run.
        checkpoint: Checkpoint to load the weights from; None loads those of `model`.
        frozen: True if the weights may be stored in the narrower types of a model that is never trained.
        base: Model that training started from, for comparison; None if unknown.
    """

    title: str
    model: CausalFields
    data: "DataModule"
    layout: str | None
    generation: Generation
    stop_token_ids: list[int]
    engine: str = "torch"
    precision: str | None = None
    seed: int = 0
    checkpoint: Path | None = None
    frozen: bool = False
    base: CausalFields | None = None

    @property
    def is_chat(self) -> bool:
        """True if the model uses chat turns; otherwise it continues the given text."""
        return self.layout is not None and find_format(self.layout).template is None

    @property
    def sees_images(self) -> bool:
        """True if questions may have images."""
        return getattr(self.model, "images", False)

    def open_image(self, path: str) -> Any:
        """Return the picture of an image file. Raises UserError: it cannot be read, or the model sees no images."""
        if not self.sees_images:
            raise UserError("This model was loaded without images. Use a run with model.images, or --image with "
                            "--model and a vision-language model.")
        try:
            return decode_image(Path(path).expanduser().read_bytes(), self.data.codec.images.max_pixels)
        except OSError as error:
            raise UserError(f"{path} cannot be read ({error.strerror}). Use an image file.") from error
        except RowProblem as problem:
            raise UserError(f"{path}: {problem}. Use another file.") from problem

    @cached_property
    def _encoder(self) -> Any:
        return self.data.codec.prompt_encoder(self.layout)

    def encode(self, messages: list[Message]) -> list[int]:
        """Return the prompt's token ids for a conversation. Raises UserError: the template cannot render it."""
        if self.layout is None:
            return self.data.encode_prompts([messages[-1]["content"]])[0]
        try:
            return self._encoder.prompts([messages])[0]
        except RowProblem as problem:
            raise UserError(f"The template cannot render this conversation: {problem}.") from problem


# A run -------------------------------------------------------------------------------------------------------------


def read_run(run: str, ckpt_path: str | None) -> Source:
    """Read a run's model or one of its checkpoints. Raises UserError: no run of a causal model, or no model yet."""
    folder = RunFolder(run)
    if not folder.config.is_file():
        is_model = any((folder.root / name).is_file() for name in ("config.json", SETTINGS))
        raise UserError(f"--run {run} has no config.yaml, so it is not a run folder. "
                        + (f"Use --model {run}" if is_model else "Use a run folder."))
    options = model_block(run, "chat")["init_args"]
    check_remote_code(options)
    model, declared = _read_blocks(run, folder)
    model.compile, model.gradient_checkpointing = False, False  # only useful in training
    data = data_module(declared)
    checkpoint = folder.resolve(ckpt_path) if ckpt_path is not None else None
    recipe = read_recipe(folder.config)
    exported = model if checkpoint else _find_exported(run, folder, model)
    if checkpoint:
        from lmmods.runs.checkpoint import read_plain

        data.resume_from(read_plain(checkpoint))
    else:
        data.tokenizer = str(folder.model)
    _connect(data, model, exported)
    trainer = recipe.get("trainer") if isinstance(recipe.get("trainer"), dict) else {}
    return Source(_describe(str(checkpoint or folder.model), model), exported, data, _read_layout(folder, declared),
                  model.generation, data.codec.stop_token_ids, recipe.get("engine", "torch"),
                  trainer.get("precision", "32-true"), _read_seed(recipe), checkpoint,
                  base=without_training(model) if model.pretrained else None)


def _describe(name: str, model: CausalFields) -> str:
    quantized = f" in {model.quantize}" if model.quantize else ""
    return f"{name}, an adapter on {model.pretrained}{quantized}" if model.trains_adapter else f"{name}{quantized}"


def without_training(model: CausalFields) -> CausalFields:
    """Return the model that a run starts from; as it is not trained, it may be quantised without an adapter."""
    start = replace(model, lora=None, quantize=model.quantize if model.adapter else None)
    start.quantize = model.quantize
    return start


def _read_blocks(run: str, folder: RunFolder) -> tuple[CausalFields, Any]:
    """Read `model` and `data` of a run's config.yaml into their fields. Raises UserError: chat does not support one.
    """
    model, data = read_blocks(folder)
    if data is None or not isinstance(model, CausalFields):
        recipe = read_recipe(folder.config)
        classes = " and ".join(str((recipe.get(block) or {}).get("class_path")) for block in ("model", "data"))
        raise UserError(f"--run {run}: its model and data are {classes}, which chat does not support. Use --model "
                        f"{folder.model}")
    return model, data


def _connect(data: "DataModule", model: CausalFields, exported: CausalFields | None = None) -> None:
    network = exported or model
    images = {"image_model": network.image_model} if getattr(network, "images", False) else {}
    data.connect(pretrained=model.pretrained, revision=model.revision, trust_remote_code=model.trust_remote_code,
                 **images)


def _find_exported(run: str, folder: RunFolder, model: CausalFields) -> CausalFields:
    """Return the fields that load the exported model/ of a run. Raises UserError: it does not exist yet."""
    exported = exported_fields(folder, model)
    if exported is None:
        raise UserError(f"--run {run} has no model in {folder.model}. "
                        + ("Use a checkpoint: --ckpt_path last" if folder.names() else "Use a finished run."))
    return exported


def _read_layout(folder: RunFolder, declared: Any) -> str | None:
    """Return the layout of the training rows according to the data report; chat turns if unknown."""
    if isinstance(declared, CLMDataFields):
        return None
    try:
        sources = json.loads(folder.data_report.read_text(encoding="utf-8"))["sources"]
        return next(iter(sources.values()))["format"]
    except (OSError, ValueError, LookupError, TypeError, AttributeError, StopIteration):
        return declared.dataset_format or CHAT


def _read_seed(recipe: dict[str, Any]) -> int:
    seed = recipe.get("seed_everything")
    return seed if isinstance(seed, int) and not isinstance(seed, bool) else 0


# A model -----------------------------------------------------------------------------------------------------------


def read_model(name: str, template: str | None, template_kwargs: dict[str, Any] | None, quantize: Quantize | None,
               images: bool = False) -> Source:
    """Read a model or adapter from a folder or hub id. Raises UserError: it is neither, or not a causal LM.

    Args:
        images: Read a vision-language model, not only its text model.
    """
    if (Path(name) / "config.yaml").is_file() and (Path(name) / "checkpoints").is_dir():
        raise UserError(f"--model {name} is a run folder. Use --run {name}")
    adapter = _find_file(name, SETTINGS)
    base = adapter_config(adapter.parent, f"--model {name}").get("base_model_name_or_path") if adapter else None
    if adapter and not base:
        raise UserError(f"--model {name}: {SETTINGS} has no base_model_name_or_path. Add the adapter's base model.")
    model = ImageFields(pretrained=base or name, adapter=name if adapter else None, trust_remote_code=is_trusted(),
                        images=images)
    model.quantize = quantize
    _check_causal(model)
    tokenizer = name if _find_file(name, "tokenizer_config.json") else model.pretrained
    data = _build_data(tokenizer, model, template, template_kwargs)
    generation = _read_json(name, GENERATION_CONFIG) or _read_json(model.pretrained, GENERATION_CONFIG)
    stop_ids = generation.get("eos_token_id")
    stop_ids = stop_ids if isinstance(stop_ids, list) else [] if stop_ids is None else [stop_ids]
    layout = CHAT if data.has_chats else None
    # Before the rest, as reading the codec's stop_token_ids also checks the template.
    stop_ids = sorted({*data.codec.stop_token_ids, *stop_ids})
    return Source(_describe(name, model), model, data, layout, _select_generation(generation), stop_ids, frozen=True,
                  base=without_adapter(model) if adapter else None)


def without_adapter(model: CausalFields) -> CausalFields:
    """Return the base of an adapter."""
    base = replace(model, adapter=None, quantize=None)
    base.quantize = model.quantize
    return base


def _check_causal(model: CausalFields) -> None:
    from lmmods.core.hf_config import load_config

    architectures = load_config(model.pretrained, trust_remote_code=model.trust_remote_code).architectures or []
    causal = ("ForCausalLM", "LMHeadModel", "ForConditionalGeneration")
    if architectures and not any(name.endswith(causal) for name in architectures):
        raise UserError(f"--model {model.pretrained} is a {architectures[0]}. Use a causal language model.")


def _build_data(tokenizer: str, model: ImageFields, template: str | None, template_kwargs: dict[str, Any] | None
                ) -> Any:
    """Return a chat data module if there is a template, a text one otherwise."""
    from lmmods.data.clm import CLMData
    from lmmods.data.sft import SFTData

    data = SFTData(NO_ROWS, tokenizer=tokenizer, template=template, chat_template_kwargs=template_kwargs)
    _connect(data, model)
    if template or data.tokenizer.chat_template or model.images:  # a model with images needs a template
        return data
    if template_kwargs:
        raise UserError(f"--chat_template_kwargs: {tokenizer} has no chat template. Remove it.")
    data = CLMData(NO_ROWS, tokenizer=tokenizer)
    _connect(data, model)
    return data


def _find_file(name: str, file: str) -> Path | None:
    """Return a file of a folder or hub repository, downloaded if needed; None if there is no such file.

    Raises:
        UserError: The hub does not answer.
    """
    if Path(name).is_dir():
        return Path(name) / file if (Path(name) / file).exists() else None
    from huggingface_hub import hf_hub_download
    from huggingface_hub.errors import EntryNotFoundError

    try:
        with hub.loading("--model", name, missing=()):
            return Path(hf_hub_download(name, file))
    except EntryNotFoundError:  # neither online nor cached: loading the model reports more if it matters
        return None


def _read_json(name: str, file: str) -> dict[str, Any]:
    """Read a JSON file of a model, {} if it does not exist. Raises UserError: it cannot be read."""
    path = _find_file(name, file)
    try:
        return dict(json.loads(read_text(path))) if path else {}
    except (OSError, ValueError, TypeError, RecursionError) as error:
        raise UserError(f"--model {name}: {path} cannot be read ({error}). Fix or remove it.") from error


def _select_generation(settings: dict[str, Any]) -> Generation:
    """Return the supported settings of generation_config.json; report the unsupported ones."""
    supported = {item.name for item in fields(Generation)}
    settings = {key: value for key, value in settings.items() if value is not None}
    if not settings.get("do_sample"):
        settings = {key: value for key, value in settings.items() if key not in SAMPLING}
    if unsupported := sorted(settings.keys() - supported - USED_ELSEWHERE):
        tell(f"{GENERATION_CONFIG} sets {', '.join(unsupported)}; chat does not support this and ignores it.")
    return Generation(**{key: value for key, value in settings.items() if key in supported})


# ---------------------------------------------------------------------------------------------------------------------
# Conversation at a terminal or over a pipe.

PROMPT = ">>> "
NEW, IMAGE_COMMAND = "/new", "/image"
CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")  # terminal control characters, except line breaks and tabs


class TextModel(Protocol):
    """Text-generating model of either engine."""

    def answer(self, prompt: list[int], settings: Generation, stop_token_ids: list[int], seed: int, row: int,
               on_token: Callable[[int], bool], images: dict[str, Any] | None = None) -> bool: ...


@dataclass
class Session:
    """Conversation with one or more models, in turns if they support them.

    Args:
        models: Models that answer each question, by the name shown before the answer if there are several.
        limit: Maximum tokens of prompt and answer together; None if the model sets no limit.
        system: System turn of all conversations; None leaves it to the recipe.
        pictures: Images of the next question.
    """

    source: Source
    models: dict[str, TextModel]
    settings: Generation
    seed: int
    limit: int | None
    system: str | None = None
    turns: dict[str, list[Message]] = field(default_factory=dict)  # conversation history per model
    num_questions: int = 0
    is_stopped: bool = False  # set by Ctrl+C
    pictures: list[Any] = field(default_factory=list)

    def ask(self, text: str) -> None:
        """Print the answers on stdout and everything else on stderr.

        Raises:
            UserError: The template cannot render the conversation, or it is too long. The question is dropped.
        """
        question: Message = {"role": "user", "content": text}
        if self.pictures:
            question = {"role": "user", "content": IMAGE * len(self.pictures) + text, "images": self.pictures}
            self.pictures = []
        prompts = {name: self._prompt(name, [*self.turns.get(name, []), question]) for name in self.models}
        row, self.num_questions = self.num_questions, self.num_questions + 1
        for name, (turns, prompt, settings) in prompts.items():
            if len(self.models) > 1:
                _write(f"{name}: ")
            answer = self._answer(self.models[name], prompt, images_of(turns), settings, row)
            if self.source.is_chat:
                self.turns[name] = [*turns, {"role": "assistant", "content": answer}]

    def _prompt(self, name: str, turns: list[Message]) -> tuple[list[Message], list[int], Generation]:
        """Return the turns that fit, their token ids, and the settings with the remaining budget for the answer."""
        prefix = f"{name}: " if len(self.models) > 1 else ""
        num_dropped, max_new_tokens = 0, self.settings.max_new_tokens
        while True:
            system: list[Message] = [{"role": "system", "content": self.system}] if self.system is not None else []
            prompt = self.source.encode([*system, *turns])
            budget = max_new_tokens if self.limit is None else min(max_new_tokens, self.limit - len(prompt))
            if budget == max_new_tokens or len(turns) == 1:
                break
            turns, num_dropped = turns[2:], num_dropped + 1
        if budget < 1:
            raise UserError(f"The prompt has {len(prompt)} tokens, which leaves no space for an answer in the model's "
                            f"{self.limit} positions. Shorten it.")
        if num_dropped:
            tell(f"{prefix}the conversation and its answer exceed the model's {self.limit} positions; dropping the "
                 f"{num_dropped} oldest exchanges.")
        if budget < max_new_tokens:
            tell(f"{prefix}the prompt uses {len(prompt)} of the model's {self.limit} positions, so the answer is "
                 f"limited to {budget} tokens.")
        return turns, prompt, replace(self.settings, max_new_tokens=budget)

    def _answer(self, model: TextModel, prompt: list[int], pictures: list[Any], settings: Generation, row: int) -> str:
        tokenizer = self.source.data.tokenizer
        detokenizer = Detokenizer(lambda tokens: decode(tokenizer, tokens, self.source.stop_token_ids,
                                                        clean_up_tokenization_spaces=False))

        def on_token(token: int) -> bool:
            _write(detokenizer.add(token))
            return not self.is_stopped

        self.is_stopped = False
        images = {"images": self.source.data.codec.collate_images(pictures)} if pictures else {}
        has_ended = model.answer(prompt, settings, self.source.stop_token_ids, self.seed, row, on_token, **images)
        _write(detokenizer.end() + "\n")
        if self.is_stopped:
            tell("(stopped)")
        elif not has_ended and len(detokenizer.tokens) >= settings.max_new_tokens:
            tell(f"(truncated after {len(detokenizer.tokens)} tokens; raise --generation.max_new_tokens)")
        elif not detokenizer.text.strip():
            tell("(empty answer)")
        return detokenizer.text


# Input -------------------------------------------------------------------------------------------------------------


def converse(session: Session) -> None:
    """Read questions from a terminal until Ctrl+D.

    Ctrl+C at the prompt starts a new line; during an answer it stops the answer. A second Ctrl+C during an answer exits
    the program, as the first may wait for a long computation.
    """
    with suppress(ImportError):
        import readline  # noqa: F401 - adds line editing and history to input()

    is_answering = False

    def on_interrupt(signum: int, _frame: Any) -> None:
        if not is_answering:
            raise KeyboardInterrupt
        if session.is_stopped:
            raise Interrupted("Interrupted.")
        session.is_stopped = True

    previous = signal.signal(signal.SIGINT, on_interrupt)
    try:
        while True:
            try:
                text = input(PROMPT)
                if text.strip() == NEW:
                    session.turns = {}
                    tell("Started a new conversation.")
                elif text.strip().split(" ")[0] == IMAGE_COMMAND:
                    session.pictures.append(session.source.open_image(text.strip()[len(IMAGE_COMMAND):].strip()))
                    tell("The next question has this image.")
                elif text.strip():
                    session.is_stopped, is_answering = False, True
                    session.ask(text)
            except UserError as error:  # continue the conversation without this question
                tell(str(error))
            except EOFError:
                return print(file=sys.stderr, flush=True)
            except KeyboardInterrupt:
                tell("\n(Ctrl+D exits)")
            finally:
                is_answering = False
    finally:
        signal.signal(signal.SIGINT, previous)


def answer_lines(session: Session) -> None:
    """Read questions from a pipe or file, one per line, as one conversation.

    Raises:
        UserError: A line cannot be answered, or there is none.
    """
    line_number = 0
    sys.stdin.reconfigure(encoding="utf-8", errors="surrogateescape")
    for line_number, line in enumerate(sys.stdin, start=1):
        text = line.removesuffix("\n").removesuffix("\r")
        if not text.strip():
            tell(f"line {line_number} is empty; skipping it")
            continue
        try:
            text.encode()
            session.ask(text)
        except UnicodeEncodeError as error:  # undecodable bytes arrive as lone surrogates
            raise UserError(f"line {line_number} of stdin is not UTF-8. Convert it; the lines before it have been "
                            "answered.") from error
        except UserError as error:
            raise UserError(f"line {line_number} of stdin: {error}") from error
    if not line_number:
        raise UserError("stdin is empty. Write one turn per line, or use --prompt TEXT.")


def _write(text: str) -> None:
    """Write text of an answer, with control characters escaped on a terminal."""
    if text and sys.stdout.isatty():
        text = CONTROL.sub(lambda match: f"\\x{ord(match[0]):02x}", text)
    sys.stdout.write(text)
    sys.stdout.flush()


# ---------------------------------------------------------------------------------------------------------------------
# Incremental detokenisation of an answer.

UNFINISHED = "\ufffd"  # decoders' replacement for an incomplete character


class Detokenizer:
    """Incremental decoder whose chunks add up to the text of all tokens; `tokens` and `text` are the state so far.

    A token may be part of a character, and spaces depend on neighbouring tokens. So each call decodes all tokens again,
    and holds back the end while a character may be incomplete.

    Args:
        decode: Function from tokens to text.
    """

    def __init__(self, decode: Callable[[list[int]], str]):
        self._decode = decode
        self.tokens: list[int] = []
        self.text = ""
        self._num_returned = 0

    def add(self, token: int) -> str:
        """Add a token and return the new text."""
        self.tokens.append(token)
        self.text = self._decode(self.tokens)
        return self._take_new(self.text.rstrip(UNFINISHED))

    def end(self) -> str:
        """Return the text held back so far."""
        return self._take_new(self.text)

    def _take_new(self, text: str) -> str:
        new = text[self._num_returned:]
        self._num_returned += len(new)
        return new
