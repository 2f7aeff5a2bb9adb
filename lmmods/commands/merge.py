"""`merge`: merge a run's adapter into plain weights and report how far the result deviates from the adapter."""

import json
import re
import shlex
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from lmmods.commands.combined_adapter import Combination, Method, combine, read_runs
from lmmods.commands.exported_model import FinishedRun, copy_dequantized
from lmmods.commands.gguf_file import GGUFType, check_architecture, require_gguf, write_gguf
from lmmods.core.adapters import SETTINGS, WEIGHTS, fitting_adapter
from lmmods.core.errors import UserError
from lmmods.core.generation_config import GENERATION_CONFIG, saved_end_ids
from lmmods.core.markdown import code, escape, fence
from lmmods.data.encode.chat_template import ChatTemplate
from lmmods.data.read.conversation import RowProblem
from lmmods.recipe.classes import declared
from lmmods.recipe.files import as_yaml, read_recipe
from lmmods.runs.folder import commit_folder
from lmmods.runs.published_paths import hub_id
from lmmods.runs.run_files import delete, fresh_folder

DTypeName = Literal["float32", "bfloat16", "float16"]


def merge(run: str | list[str], out: str, base: Literal["dequantized", "original"] = "dequantized",
          dtype: DTypeName = "float32", threshold: float = 0.02, force: bool = False, overwrite: bool = False,
          gguf: GGUFType | None = None, combination: Method | None = None, weights: list[float] | None = None,
          density: float | None = None, seed: int | None = None) -> None:
    """Merge a run's adapter into its base model and write a plain Hugging Face folder.

    Args:
        run: Run folder; or a list, `[runs/a, runs/b]`, whose adapters are combined first. The combined adapter is also
            written to `adapter/` in `out`.
        out: Output folder.
        base: Weights to merge into: `dequantized` are the 4- or 8-bit weights that the adapter was trained on,
            `original` the full ones. Without quantisation they are the same.
        dtype: Type of the written weights; the sum is computed in float32.
        threshold: Maximum difference of a logit, as a fraction of the largest logit; more is an error.
        force: Write even if the difference is above `threshold`.
        overwrite: Replace the contents of `out`.
        gguf: Also write `model.gguf` for llama.cpp and Ollama, with matrices of this type. After full fine-tuning,
            `out` is a copy of the model with that file. For models that generate text.
        combination: Method to combine adapters, as in PEFT's `add_weighted_adapter`: `cat` (the default, exact: ranks
            add up), `svd` (with the largest rank), `linear`, `ties`, `dare_linear` or `dare_ties`.
        weights: Weight of each adapter. Default: their average.
        density: Fraction of each adapter's numbers that `ties` and `dare` keep.
        seed: Random seed of `dare`. Default: 0.
    """

    out_folder = Path(out)
    if out_folder.is_symlink():
        raise UserError(f"--out {out} is a link to {out_folder.resolve()}. Use that folder.")
    if out_folder.exists() and any(out_folder.iterdir()) and not overwrite:
        raise UserError(f"--out {out} is not empty. Use another folder, or add --overwrite true.")
    combined = out_folder.with_name(f".{out_folder.name}.combined")
    try:
        recipe, origin = _run_to_merge(run if isinstance(run, list) else [run], combined,
                                       Combination(combination or "cat", weights, density, seed), combination)
        if gguf:
            if not recipe.writes:
                raise UserError(f"--gguf is for models that write text, but {recipe.option} is a {recipe.task} run. "
                                "Remove --gguf.")
            require_gguf()
            check_architecture(recipe.config().model_type)
        if recipe.has_adapter:
            _merge(recipe, origin, out_folder, base, dtype, threshold, force, gguf, has_combined=combined.exists())
        elif gguf is None:
            raise UserError(f"{recipe.option}: {recipe.folder.model} is a plain model already."
                            + (" --gguf converts it." if recipe.writes else " Use that folder."))
        elif (base, dtype, threshold, force) != ("dequantized", "float32", 0.02, False):
            raise UserError(f"{recipe.option}: {recipe.folder.model} is a plain model already. Remove --base, --dtype, "
                            "--threshold and --force.")
        else:
            temporary = fresh_folder(out_folder.with_name(f".{out_folder.name}"))
            shutil.copytree(recipe.folder.model, temporary, dirs_exist_ok=True)
            _hand_over(recipe, recipe.tokenizer(), temporary, out_folder, gguf)
    finally:
        delete(combined)


def _run_to_merge(names: list[str], combined: Path, combination: Combination, given: Method | None
                  ) -> tuple[FinishedRun, str]:
    """Return the run, or the first with the combined adapter of several, and what the card says of the adapter.

    Args:
        combined: Folder to make for the combined adapter.
        given: The method on the command line.
    """
    if len(names) == 1:
        if given or combination.weights is not None or combination.density is not None or combination.seed is not None:
            raise UserError("--combination, --weights, --density and --seed need several runs. Remove them, or use "
                            "--run '[runs/a, runs/b]'.")
        recipe = FinishedRun.read(names[0], "merge", list(declared("model")))
        return recipe, "The adapter of this run"
    runs = read_runs(names)
    combination.check(len(runs))
    parts = ", ".join(f"{code(run.folder.root.name)} ({weight:g})" for run, weight in zip(
        runs, combination.weights or [1 / len(runs)] * len(runs)))
    return combine(runs, combination, combined), f"The adapters of {parts}, combined by {code(combination.method)},"


def _merge(recipe: FinishedRun, origin: str, out_folder: Path, base: str, dtype: DTypeName, threshold: float,
           force: bool, gguf: GGUFType | None, has_combined: bool) -> None:
    saved = recipe.saved_quantization()
    if saved and base == "original":
        raise UserError(f"--base original: {recipe.pretrained} is saved in {saved}, so there is no original here. "
                        "Remove --base.")
    reference = _reference(recipe)
    chosen, report = None, []
    for kind in ("dequantized", "original") if recipe.quantize and not saved else (base,):
        model = _merge_adapter(recipe, kind, dtype)
        report.append((kind, _distance(model, reference)))
        if kind == base:
            chosen = model
    print(_table(report, base, recipe.writes))
    difference = dict(report)[base].largest
    if difference > threshold and not force:
        raise UserError(f"The merged model differs from the adapter by {difference:.2g} of the largest logit, more "
                        f"than --threshold {threshold}. Nothing was written. Use the other --base, a wider --dtype, or "
                        "--force true.")
    from lmmods.torch_engine.nn.export import save  # imports torch, not needed for errors and help

    temporary = fresh_folder(out_folder.with_name(f".{out_folder.name}"))
    save(chosen, temporary, adapter_only=False, dtype=None, writes=True)
    reference.tokenizer.save_pretrained(temporary)
    if (recipe.folder.model / GENERATION_CONFIG).is_file():
        shutil.copyfile(recipe.folder.model / GENERATION_CONFIG, temporary / GENERATION_CONFIG)
    if has_combined:
        (temporary / "adapter").mkdir()
        for name in (SETTINGS, WEIGHTS):
            shutil.copyfile(recipe.folder.model / name, temporary / "adapter" / name)
    name = out_folder.resolve().name if has_combined else recipe.folder.root.name
    card = _card(recipe, name, origin, base, report, reference.tokenizer.chat_template is not None)
    (temporary / "README.md").write_text(card, encoding="utf-8")
    _hand_over(recipe, reference.tokenizer, temporary, out_folder, gguf)


def _hand_over(recipe: FinishedRun, tokenizer: Any, temporary: Path, out_folder: Path, gguf: GGUFType | None) -> None:
    """Add what other programs need to a written model, put it in its place, and print how to use it."""
    if gguf:
        try:
            write_gguf(temporary, temporary / GGUF_FILE, gguf, out_folder.resolve().name)
        except UserError:
            shutil.rmtree(temporary)
            raise
    if not recipe.writes:
        commit_folder(temporary, out_folder)
        return print(f"Wrote {out_folder}. Its README.md says how to load it.")
    data = read_recipe(recipe.folder.config)["data"]["init_args"]
    if text := modelfile(temporary, tokenizer, data.get("system_prompt"), data.get("chat_template_kwargs")):
        (temporary / MODELFILE).write_text(text, encoding="utf-8")
    commit_folder(temporary, out_folder)
    print(f"Wrote {out_folder}. To use it:\n{serving_lines(out_folder)}")


@dataclass
class _Reference:
    """Output of the adapter on the base it was trained on.

    Args:
        ids: [B, T] tokens sampled from the tuned model, or at random if it does not write text; [B, C, T] of choices.
        logits: [B, ...] float32, as of `_logits`.
    """

    tokenizer: object
    ids: object
    logits: object


def _reference(recipe: FinishedRun) -> _Reference:
    import torch

    torch.manual_seed(0)
    tokenizer = recipe.tokenizer()
    model = recipe.with_adapter(recipe.load(recipe.quantize))
    if recipe.writes:
        start = tokenizer.bos_token_id if tokenizer.bos_token_id is not None else tokenizer.eos_token_id
        first = torch.full((8, 1), start)
        with torch.no_grad():
            ids = model.generate(input_ids=first, attention_mask=torch.ones_like(first), do_sample=True, top_k=0,
                                 min_new_tokens=48, max_new_tokens=48, pad_token_id=tokenizer.pad_token_id)
    else:
        shape = (8, 2, 32) if recipe.auto_class == "AutoModelForMultipleChoice" else (8, 32)
        ids = torch.randint(len(tokenizer), shape)
    return _Reference(tokenizer, ids, _logits(model, ids))


def _logits(model, ids):
    """Return the logits of a network, float32: those of the choices, labels or tokens last, of spans the positions."""
    import torch

    with torch.no_grad():
        outputs = [model(input_ids=row) for row in ids.split(1)]  # no padding, which some decoders do not know
    if "start_logits" in outputs[0]:
        return torch.cat([torch.stack([output.start_logits, output.end_logits], 1) for output in outputs]).float()
    return torch.cat([output.logits for output in outputs]).float()


def _merge_adapter(recipe: FinishedRun, kind: str, dtype: str):
    """Return a plain model with the adapter merged into its weights.

    Always loads fresh weights: on some CPUs bitsandbytes repacks 4-bit weights during a forward pass, and merging
    afterwards produces garbage.
    """
    import torch

    saved = recipe.saved_quantization()
    model = recipe.unpack() if saved else recipe.load(None)
    if kind == "dequantized" and recipe.quantize and not saved:
        copy_dequantized(recipe.load(recipe.quantize), model)
    adapted = recipe.with_adapter(model)
    with fitting_adapter(recipe.folder.model, recipe.option):  # rejects an adapter with NaNs
        merged = adapted.merge_and_unload(safe_merge=True)
    return merged.to(getattr(torch, dtype))


@dataclass
class _Distance:
    largest: float  # largest |difference| over largest |logit|
    mean: float
    agreement: float  # fraction of positions with the same most likely token


def _distance(model, reference: _Reference) -> _Distance:
    logits = _logits(model.eval(), reference.ids)
    difference, scale = (logits - reference.logits).abs(), reference.logits.abs().max()
    same = (logits.argmax(-1) == reference.logits.argmax(-1)).float().mean()
    return _Distance((difference.max() / scale).item(), (difference.mean() / scale).item(), same.item())


def _table(report: list[tuple[str, _Distance]], chosen: str, writes: bool) -> str:
    lines = [f"base merged into   largest logit difference   mean        same top {'token' if writes else 'output'}"]
    for kind, distance in report:
        mark = "*" if kind == chosen else " "
        lines.append(f"{mark} {kind:<16} {distance.largest:<26.3g} {distance.mean:<11.3g} {distance.agreement:.1%}")
    return "\n".join([*lines, "(compared with the adapter on its training base; differences as a fraction of the "
                              "largest logit; * is written)"])


def _card(recipe: FinishedRun, name: str, origin: str, base: str, report: list[tuple[str, _Distance]], is_chat: bool
          ) -> str:
    from lmmods.runs.model_card import POOLING, ends_in_padding, how_to_load  # imports torch, not needed for help

    kind = declared("model")[recipe.task]
    base_model = {"base_model": recipe.pretrained} if hub_id(recipe.pretrained) else {}
    header = as_yaml({"library_name": "transformers", "pipeline_tag": kind.pipeline_tag, **base_model})
    is_chat = is_chat and declared("data")[kind.takes].has_chats
    in_padding = ends_in_padding(json.loads(recipe.folder.data_report.read_text(encoding="utf-8")))
    load = how_to_load({"data": read_recipe(recipe.folder.config)["data"]}, None, kind.auto_class, is_chat,
                       in_padding=in_padding)
    return (f"---\n{header}---\n\n# {escape(name)}, merged\n\n{origin} merged into "
            f"{code(recipe.pretrained)} ({base} weights).\n\n{fence(_table(report, base, recipe.writes))}\n\n"
            + "\n\n".join([load, *([POOLING] if in_padding else [])]) + "\n")


# ---------------------------------------------------------------------------------------------------------------------
# Serving a merged model with other programs: command lines, and an Ollama Modelfile with the prompts of training.
#
# Ollama renders prompts with Go's text/template over `.System` (all system turns) and `.Messages`. A Jinja chat
# template is translated by its output: if all conversations consist of the same pieces around the turns, these pieces
# form the Go template. Otherwise no Modelfile is written, as a merely similar prompt would degrade answers silently.

MODELFILE = "Modelfile"
GGUF_FILE = "model.gguf"
Render = Callable[[list[dict[str, str]]], str]

# Architecture in config.json -> programs that support it, for every supported causal family. Sources, as registered
# in: vLLM 0.33.0 (models/registry.py, including its transformers backend), SGLang 0.5.23 (EntryClass of srt/models;
# gpt_neox, olmo3 and smollm3 via its transformers fallback), llama.cpp 00bdaa1 (conversion/__init__.py),
# Ollama 0.33.0-rc2 (convert/convert.go, which reads gpt_oss only as MXFP4, not in the form that `merge` writes).
# Ollama serves the other architectures from the file that llama.cpp's converter writes.
NONE: frozenset[str] = frozenset()
GGUF = frozenset({"vLLM", "SGLang", "llama.cpp"})
ALL = GGUF | {"Ollama"}
PROGRAMS = {
    "CTRLLMHeadModel": NONE,
    "Cohere2ForCausalLM": GGUF,
    "FalconForCausalLM": GGUF - {"SGLang"},
    "GPT2LMHeadModel": GGUF,
    "GPTJForCausalLM": GGUF - {"llama.cpp"},
    "GPTNeoXForCausalLM": GGUF,
    "Gemma2ForCausalLM": ALL,
    "Gemma3ForCausalLM": ALL,
    "Gemma4ForCausalLM": GGUF - {"llama.cpp"},  # whose converter takes the whole checkpoint alone
    "GemmaForCausalLM": ALL,
    "Glm4ForCausalLM": GGUF,
    "GptOssForCausalLM": GGUF,
    "GraniteForCausalLM": GGUF,
    "LlamaForCausalLM": ALL,
    "MistralForCausalLM": GGUF,
    "MixtralForCausalLM": ALL,
    "OPTForCausalLM": GGUF - {"llama.cpp"},
    "Olmo2ForCausalLM": GGUF,
    "Olmo3ForCausalLM": ALL,
    "OlmoeForCausalLM": GGUF,
    "OpenAIGPTLMHeadModel": NONE,
    "Phi3ForCausalLM": ALL,
    "PhiForCausalLM": GGUF,
    "Qwen2ForCausalLM": ALL,
    "Qwen3ForCausalLM": GGUF,
    "Qwen3MoeForCausalLM": GGUF,
    "Qwen3_5ForCausalLM": GGUF,
    "SmolLM3ForCausalLM": GGUF,
    "StableLmForCausalLM": GGUF,
    "Starcoder2ForCausalLM": GGUF,
}


@dataclass
class Layout:
    """Fixed pieces of text around the turns of every prompt.

    Args:
        start: Before the first user turn if there is no system turn.
        before_system: Before the system turn; None if the template rejects system turns.
        after_system: Between the system turn and the first user turn.
        answer: Between a user turn and its answer.
        next_turn: Between an answer and the next user turn.
    """

    start: str
    before_system: str | None
    after_system: str
    answer: str
    next_turn: str

    def prompt(self, messages: list[dict[str, str]]) -> str:
        """Render a conversation up to where the assistant answers."""
        text = self.start
        if messages[0]["role"] == "system":
            text = f"{self.before_system}{messages[0]['content']}{self.after_system}"
        for message in messages:
            if message["role"] != "system":
                text += message["content"] + (self.answer if message["role"] == "user" else self.next_turn)
        return text

    def go_template(self) -> str:
        """Return the layout as a Go template."""
        start, answer, next_turn = map(_literal, (self.start, self.answer, self.next_turn))
        if self.before_system is not None:
            start = (f"{{{{ if .System }}}}{_literal(self.before_system)}{{{{ .System }}}}{_literal(self.after_system)}"
                     f"{{{{ else }}}}{start}{{{{ end }}}}")
        return (f'{start}{{{{ range $i, $turn := .Messages }}}}{{{{ if eq $turn.Role "user" }}}}{{{{ $turn.Content }}}}'
                f'{answer}{{{{ else if eq $turn.Role "assistant" }}}}{{{{ $turn.Content }}}}'
                f"{{{{ if gt (len (slice $.Messages $i)) 1 }}}}{next_turn}{{{{ end }}}}{{{{ end }}}}{{{{ end }}}}")


def find_layout(render: Render) -> Layout | None:
    """Return the pieces from which a chat template builds every prompt; None if it does not work that way.

    Args:
        render: Renders a conversation to its prompt; raises RowProblem or ValueError if it cannot.
    """
    system, ask, say, again = "(A system turn.)", "(A question?)", "(An answer.)", "(Another question?)"

    def turns(*texts: str, begins: str | None = None) -> list[dict[str, str]]:
        roles = ("user", "assistant")
        said = [{"role": roles[place % 2], "content": text} for place, text in enumerate(texts)]
        return [{"role": "system", "content": begins}, *said] if begins else said

    try:
        start, answer = render(turns(ask)).split(ask)
        next_turn, _ = render(turns(ask, say, again)).partition(say)[2].split(again)
    except (RowProblem, ValueError):  # a turn is rejected, dropped or duplicated
        return None
    before_system = after_system = None
    try:
        before_system, rest = render(turns(ask, begins=system)).split(system)
        after_system = rest.split(ask)[0]
    except (RowProblem, ValueError):
        before_system = None
    layout = Layout(start, before_system, after_system or "", answer, next_turn)
    probes = [turns(ask), turns(ask, say, again), turns("a\nb", "c\n\nd", "e", say, ask), turns(*"1234567")]
    if before_system is not None:
        probes += [turns(*(message["content"] for message in probe), begins="x\ny") for probe in probes]
    try:
        return layout if all(render(probe) == layout.prompt(probe) for probe in probes) else None
    except (RowProblem, ValueError):
        return None


def _literal(text: str) -> str:
    return text.replace("{{", '{{ "{{" }}')


def modelfile(folder: Path, tokenizer: Any, system: str | None, template_kwargs: dict[str, Any] | None) -> str | None:
    """Return Ollama's Modelfile for a model folder; None if neither Ollama nor llama.cpp supports the architecture.

    Args:
        system: System turn used for all training rows.
        template_kwargs: Chat template variables used in training.
    """
    programs = _programs(folder)
    if not programs & {"llama.cpp", "Ollama"}:
        return None
    from_weights = "Ollama" in programs and not (folder / GGUF_FILE).is_file()
    lines = ["FROM ." if from_weights else f"FROM ./{GGUF_FILE}"]
    if tokenizer.chat_template is None:
        lines.append("# This model continues texts: it has no chat template.")
    elif layout := _layout(folder, tokenizer, template_kwargs or {}):
        lines += ["# The chat template takes no system turn."] if layout.before_system is None else []
        lines.append(f'TEMPLATE """{layout.go_template()}"""')
    else:
        lines.append("# Ollama cannot express the chat template (chat_template.jinja): write TEMPLATE yourself.")
    if system is not None:
        lines.append(f"SYSTEM {_quote(system)}" if _can_be_quoted(system) else
                     "# The system turn of training has characters that a Modelfile cannot contain.")
    return "\n".join([*lines, *(f"PARAMETER stop {_quote(token)}" for token in _end_tokens(folder, tokenizer))]) + "\n"


def _layout(folder: Path, tokenizer: Any, template_kwargs: dict[str, Any]) -> Layout | None:
    """Return the prompt pieces; None if Ollama's templates or a Modelfile cannot express them."""
    bos = tokenizer.bos_token
    settings = json.loads((folder / "tokenizer_config.json").read_text(encoding="utf-8"))
    adds_bos = bool(bos and settings.get("add_bos_token"))  # Ollama reads this setting

    def render(messages: list[dict[str, str]]) -> str:
        text = template.render(messages, True, **template_kwargs)
        if adds_bos and not text.startswith(bos):
            raise ValueError("Ollama would start it with a token that the template does not write")
        return text.removeprefix(bos) if adds_bos else text

    try:
        template = ChatTemplate(tokenizer.get_chat_template(), tokenizer.special_tokens_map)
        layout = None if "strftime_now" in template.names else find_layout(render)  # a baked-in date would go stale
    except UserError:  # the template fails or does not terminate
        return None
    return layout if layout and _can_be_quoted(layout.go_template()) else None


def _programs(folder: Path) -> frozenset[str]:
    """Return the programs that support a model folder; none for an architecture missing from `PROGRAMS`."""
    architecture = json.loads((folder / "config.json").read_text(encoding="utf-8"))["architectures"][0]
    return PROGRAMS.get(architecture, NONE)


def _end_tokens(folder: Path, tokenizer: Any) -> list[str]:
    return [token for token in tokenizer.convert_ids_to_tokens(saved_end_ids(folder)) if token]


def _can_be_quoted(text: str) -> bool:
    """True if a Modelfile can contain the text: triple quotes end it, and unprintable characters are lost."""
    return '"""' not in text and not text.endswith('"') and all(char.isprintable() or char in "\n\t" for char in text)


def _quote(text: str) -> str:
    return f'"""{text}"""' if '"' in text or "\n" in text else f'"{text}"'


def serving_lines(folder: Path) -> str:
    """Return the command lines to chat with, serve and convert a merged model in the programs that support it."""
    programs, path = _programs(folder), shlex.quote(str(folder))
    name = re.sub(r"[^a-z0-9._-]+", "-", folder.resolve().name.lower()).strip("-._") or "model"
    gguf, file = shlex.quote(str(folder / GGUF_FILE)), shlex.quote(str(folder / MODELFILE))
    lines = [("chat", f"python train.py chat --model {path}"), ("transformers", f"transformers serve {path}")]
    if "vLLM" in programs:
        lines.append(("vLLM", f"vllm serve {path}"))
    if "SGLang" in programs:
        lines.append(("SGLang", f"sglang serve --model-path {path}"))
    if "llama.cpp" in programs:
        converts = [] if (folder / GGUF_FILE).is_file() else [f"python convert_hf_to_gguf.py {path} --outfile {gguf}"]
        lines += zip(("llama.cpp", ""), [*converts, f"llama-server -m {gguf}"])
    if (folder / MODELFILE).is_file():
        first = "" if "Ollama" in programs or (folder / GGUF_FILE).is_file() else "   (after llama.cpp's converter)"
        lines.append(("Ollama", f"ollama create {name} -f {file}{first}"))
    return "\n".join(f"  {program:<13} {line}" for program, line in lines)
