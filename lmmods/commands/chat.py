"""`chat`: talk to a run, a checkpoint, a model folder or a base, on either engine."""

import contextlib
import importlib
import os
import signal
import sys
from collections.abc import Callable
from dataclasses import asdict, fields, make_dataclass, replace
from functools import partial
from typing import Any, Literal

from lmmods.core.console import tell
from lmmods.core.errors import UserError
from lmmods.core.settings import Generation, require
from lmmods.core.signals import Interrupted
from lmmods.core.task_fields import Quantize

Changes = make_dataclass("GenerationChanges", [(item.name, item.type | None, None) for item in fields(Generation)],
                         frozen=True, namespace={"__doc__": Generation.__doc__, "__module__": __name__})


def chat(run: str | None = None, model: str | None = None, ckpt_path: str | None = None, prompt: str | None = None,
         system: str | None = None, compare_base: bool = False, generation: Changes = Changes(),
         seed: int | None = None, template: str | None = None,
         chat_template_kwargs: dict[str, bool | int | float | str | None] | None = None,
         quantize: Quantize | None = None, engine: Literal["torch", "jax"] | None = None,
         precision: Literal["32-true", "bf16-true", "bf16-mixed", "16-mixed"] | None = None,
         device: str = "auto") -> None:
    """Talk to a run, one of its checkpoints, a model folder or a hub model, with the prompts of training and predict.

    At a terminal answers come as they are written; /help lists what can be said besides. Without one each line of stdin
    is a turn. Answers go to stdout, everything else to stderr.

    Args:
        run: The run folder, of either engine.
        model: Instead of a run a folder or hub id: of a merged or other model, or of an adapter.
        ckpt_path: Checkpoint of the run instead of its model: `last`, `best`, a step number or a path.
        prompt: Answer this and end.
        system: System turn; null takes the recipe's.
        compare_base: Let the model answer too that the run, or the adapter, started from.
        generation: How text is generated; null is what the recipe says, or the model's generation_config.json.
        seed: Of sampling; null takes the run's, or 0.
        template: For `model`: a named template (alpaca, chatml, ...) or a file of Jinja; null takes the tokenizer's
            chat template, and without one what is typed is gone on with as a text.
        chat_template_kwargs: For `model`: variables of its chat template, for example {enable_thinking: false}.
        quantize: For `model`: store its base in 4 bits (nf4, fp4) or 8 (int8).
        engine: torch or jax; null takes the run's, for `model` torch.
        precision: Arithmetic; null takes the run's, for `model` bfloat16 where a GPU multiplies it, else float32.
        device: cpu, cuda, cuda:1; auto takes a GPU where there is one.

    Raises:
        UserError: No such run, checkpoint or model; no causal LM; settings that do not fit.
    """
    from lmmods.commands.chat_session import Session, answer_lines, converse  # reads data modules, which help does not
    from lmmods.commands.chat_source import read_model, read_run

    _check_options(run, model, prompt, ckpt_path=ckpt_path, template=template,
                   chat_template_kwargs=chat_template_kwargs, quantize=quantize)
    require(seed is None or seed >= 0, "--seed", seed, "0 or more")
    _end_when_interrupted()
    with contextlib.redirect_stdout(sys.stderr):  # whatever is said while it loads
        source = read_run(run, ckpt_path) if run else read_model(model, template, chat_template_kwargs, quantize)
        if system is not None and not source.is_chat:
            raise UserError("--system: this model goes on with texts and knows no system turn. Leave it out.")
        if compare_base and source.base is None:
            raise UserError("--compare_base: it is not known what this model was trained from. It goes with adapters, "
                            "and with runs that start from a model.")
        chosen = {key: value for key, value in asdict(generation).items() if value is not None}
        settings = replace(source.generation, **chosen)
        load = _loader(engine or source.engine, source, precision, device)
        stored_frozen = source.frozen or source.model.trains_adapter
        models = {"base": load(source.base, frozen=stored_frozen)} if compare_base else {}
        models["tuned"] = load(source.model, checkpoint=source.checkpoint, frozen=source.frozen)
        session = Session(source, models, settings, source.seed if seed is None else seed,
                          source.model.max_positions(), system)
    if not source.is_chat:
        tell("This model has no chat template: what you write is gone on with as a text, each by itself.")
    try:
        if prompt is not None:
            session.ask(prompt)
        elif sys.stdin.isatty():
            tell(f"{source.title}. /help lists commands, Ctrl+D ends.")
            converse(session)
        else:
            answer_lines(session)
    except BrokenPipeError:  # who read the answers has gone
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _check_options(run: str | None, model: str | None, prompt: str | None, ckpt_path: str | None,
                   **of_models: Any) -> None:
    """Raise UserError unless the options say clearly what to talk to."""
    if (run is None) == (model is None):
        raise UserError("chat needs --run RUN, a run folder, or --model MODEL, a model folder or hub id"
                        + ("; both are given." if run else "."))
    for name, value in (("--run", run), ("--model", model)):
        require(value != "", name, "empty", "a name")
    require(prompt is None or bool(prompt.strip()), "--prompt", repr(prompt), "a text")
    if model is not None and ckpt_path is not None:
        raise UserError("--ckpt_path names a checkpoint of a run: give --run instead of --model.")
    for name, value in of_models.items():
        if run is not None and value is not None:
            raise UserError(f"--{name} goes with --model: a run says it in its config.yaml.")


def _loader(engine: str, source: Any, precision: str | None, device: str) -> Callable[..., Any]:
    """A function that loads a model of `source` from its fields, on one engine."""
    if engine == "jax":
        importlib.import_module("jax_engine.engine").load()  # says what is not installed
        answering = importlib.import_module("jax_engine.answering")
        answering.connect(device)
        precision = precision or source.precision or answering.choose_precision()
        options: dict[str, Any] = {}
    else:
        answering = importlib.import_module("lmmods.torch_engine.answering")
        options = {"device": answering.choose_device(device)}
        precision = precision or source.precision or answering.choose_precision(options["device"])
    return partial(answering.TextModel, data=source.data, precision=precision, seed=source.seed, **options)


def _end_when_interrupted() -> None:
    def interrupt(number: int, _frame: Any) -> None:
        raise Interrupted("Interrupted.")

    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, interrupt)
