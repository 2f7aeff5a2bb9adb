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
from lmmods.commands.gguf_file import GGUFType, find_family, require_gguf, write_gguf
from lmmods.commands.gguf_projector import check_projector, write_projector
from lmmods.core.adapters import SETTINGS, WEIGHTS, fitting_adapter
from lmmods.core.errors import UserError
from lmmods.core.generation_config import GENERATION_CONFIG, saved_end_ids
from lmmods.core.image_models import PROCESSOR_FILES
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
        gguf: Also write `model.gguf` for llama.cpp and Ollama, with matrices of this type, and `mmproj.gguf` for a
            model with images. After full fine-tuning, `out` is a copy of the model with these files. For models that
            generate text.
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
        finished, adapter_text = _run_to_merge(run if isinstance(run, list) else [run], combined,
                                               Combination(combination or "cat", weights, density, seed), combination)
        if gguf:
            if not finished.writes:
                raise UserError(f"--gguf is for models that generate text, but the task of {finished.option} is "
                                f"{finished.task}. Remove --gguf.")
            require_gguf()
            config = finished.config()
            find_family(config)
            if finished.all_parts:
                check_projector(config.model_type)
        if finished.has_adapter:
            _merge(finished, adapter_text, out_folder, base, dtype, threshold, force, gguf,
                   has_combined=combined.exists())
        elif gguf is None:
            raise UserError(f"{finished.option}: {finished.folder.model} is a plain model already."
                            + (" --gguf converts it." if finished.writes else " Use that folder."))
        elif (base, dtype, threshold, force) != ("dequantized", "float32", 0.02, False):
            raise UserError(f"{finished.option}: {finished.folder.model} is a plain model already. Remove --base, "
                            "--dtype, --threshold and --force.")
        else:
            temporary = fresh_folder(out_folder.with_name(f".{out_folder.name}"))
            shutil.copytree(finished.folder.model, temporary, dirs_exist_ok=True)
            _finish_folder(finished, finished.tokenizer(), temporary, out_folder, gguf)
    finally:
        delete(combined)


def _run_to_merge(names: list[str], combined: Path, combination: Combination, method: Method | None
                  ) -> tuple[FinishedRun, str]:
    """Return the run, or the first of several with their combined adapter, and the card's description of the adapter.

    Args:
        combined: Folder to create for the combined adapter.
        method: The method on the command line.
    """
    if len(names) == 1:
        if method or combination.weights is not None or combination.density is not None or combination.seed is not None:
            raise UserError("--combination, --weights, --density and --seed need several runs. Remove them, or use "
                            "--run '[runs/a, runs/b]'.")
        recipe = FinishedRun.read(names[0], "merge", list(declared("model")))
        return recipe, "The adapter of this run"
    runs = read_runs(names)
    combination.check(len(runs))
    adapters = ", ".join(f"{code(run.folder.root.name)} ({weight:g})" for run, weight in zip(
        runs, combination.weights or [1 / len(runs)] * len(runs)))
    text = f"The adapters of {adapters}, combined by {code(combination.method)},"
    return combine(runs, combination, combined), text


def _merge(recipe: FinishedRun, adapter_text: str, out_folder: Path, base: str, dtype: DTypeName, threshold: float,
           force: bool, gguf: GGUFType | None, has_combined: bool) -> None:
    saved = recipe.saved_quantization()
    if saved and base == "original":
        raise UserError(f"--base original: {recipe.pretrained} is saved in {saved}, so its original is not available. "
                        "Remove --base.")
    reference = _compute_reference(recipe)
    merged_model, distances = None, []
    for base_kind in ("dequantized", "original") if recipe.quantize and not saved else (base,):
        model = _merge_adapter(recipe, base_kind, dtype)
        distances.append((base_kind, _measure_distance(model, reference)))
        if base_kind == base:
            merged_model = model
    print(_format_distances(distances, base, recipe.writes))
    difference = dict(distances)[base].largest
    if difference > threshold and not force:
        raise UserError(f"The merged model differs from the adapter by {difference:.2g} of the largest logit, more "
                        f"than --threshold {threshold}. Nothing was written. Use the other --base, a wider --dtype, or "
                        "--force true.")
    from lmmods.torch_engine.nn.export import save  # imports torch, not needed for errors and help

    temporary = fresh_folder(out_folder.with_name(f".{out_folder.name}"))
    save(merged_model, temporary, adapter_only=False, dtype=None, writes=True)
    reference.tokenizer.save_pretrained(temporary)
    for name in (GENERATION_CONFIG, *PROCESSOR_FILES):
        if (recipe.folder.model / name).is_file():
            shutil.copyfile(recipe.folder.model / name, temporary / name)
    if has_combined:
        (temporary / "adapter").mkdir()
        for name in (SETTINGS, WEIGHTS):
            shutil.copyfile(recipe.folder.model / name, temporary / "adapter" / name)
    name = out_folder.resolve().name if has_combined else recipe.folder.root.name
    card = _build_card(recipe, name, adapter_text, base, distances, reference.tokenizer.chat_template is not None)
    (temporary / "README.md").write_text(card, encoding="utf-8")
    _finish_folder(recipe, reference.tokenizer, temporary, out_folder, gguf)


def _finish_folder(recipe: FinishedRun, tokenizer: Any, temporary: Path, out_folder: Path, gguf: GGUFType | None
                   ) -> None:
    """Add the files of other programs to a model, rename its folder to the final name, and print how to use it."""
    if gguf:
        try:
            write_gguf(temporary, temporary / GGUF_FILE, gguf, out_folder.resolve().name)
            if recipe.all_parts:
                write_projector(temporary, temporary / PROJECTOR_FILE, gguf, out_folder.resolve().name)
        except UserError:
            shutil.rmtree(temporary)
            raise
    if not recipe.writes:
        commit_folder(temporary, out_folder)
        return print(f"Wrote {out_folder}. Its README.md shows how to load it.")
    data = read_recipe(recipe.folder.config)["data"]["init_args"]
    if text := modelfile(temporary, tokenizer, data.get("system_prompt"), data.get("chat_template_kwargs")):
        (temporary / MODELFILE).write_text(text, encoding="utf-8")
    commit_folder(temporary, out_folder)
    print(f"Wrote {out_folder}. To use it:\n{serving_lines(out_folder)}")


@dataclass
class _Reference:
    """Output of the adapter on the base it was trained on.

    Args:
        ids: Tokens sampled from the tuned model, or random ones if it does not generate text: [B, T], or [B, C, T] for
            multiple choice.
        logits: [B, ...] float32, see `_logits`.
    """

    tokenizer: object
    ids: object
    logits: object


def _compute_reference(recipe: FinishedRun) -> _Reference:
    import torch

    torch.manual_seed(0)
    tokenizer = recipe.tokenizer()
    model = recipe.with_adapter(recipe.load(recipe.quantize))
    if recipe.writes:
        start = tokenizer.bos_token_id if tokenizer.bos_token_id is not None else tokenizer.eos_token_id
        prompts = torch.full((8, 1), start)
        with torch.no_grad():
            ids = model.generate(input_ids=prompts, attention_mask=torch.ones_like(prompts), do_sample=True, top_k=0,
                                 min_new_tokens=48, max_new_tokens=48, pad_token_id=tokenizer.pad_token_id)
    else:
        shape = (8, 2, 32) if recipe.auto_class == "AutoModelForMultipleChoice" else (8, 32)
        ids = torch.randint(len(tokenizer), shape)
    return _Reference(tokenizer, ids, _logits(model, ids))


def _logits(model, ids):
    """Return float32 logits. The last dimension is choices, labels or tokens; for spans it is positions."""
    import torch

    with torch.no_grad():
        outputs = [model(input_ids=row) for row in ids.split(1)]  # no padding, which some decoders do not support
    if "start_logits" in outputs[0]:
        return torch.cat([torch.stack([output.start_logits, output.end_logits], 1) for output in outputs]).float()
    return torch.cat([output.logits for output in outputs]).float()


def _merge_adapter(recipe: FinishedRun, base_kind: str, dtype: str):
    """Return a plain model with the adapter merged into its weights.

    Loads the weights again: on some CPUs, bitsandbytes repacks 4-bit weights in a forward pass, and merging them
    afterwards gives wrong results.
    """
    import torch

    saved = recipe.saved_quantization()
    model = recipe.unpack() if saved else recipe.load(None)
    if base_kind == "dequantized" and recipe.quantize and not saved:
        copy_dequantized(recipe.load(recipe.quantize), model)
    adapted = recipe.with_adapter(model)
    with fitting_adapter(recipe.folder.model, recipe.option):  # rejects an adapter with NaNs
        merged = adapted.merge_and_unload(safe_merge=True)
    return merged.to(getattr(torch, dtype))


@dataclass
class _Distance:
    largest: float  # maximum |difference| / maximum |logit|
    mean: float
    agreement: float  # fraction of positions with the same most likely token


def _measure_distance(model, reference: _Reference) -> _Distance:
    logits = _logits(model.eval(), reference.ids)
    difference, scale = (logits - reference.logits).abs(), reference.logits.abs().max()
    agreement = (logits.argmax(-1) == reference.logits.argmax(-1)).float().mean()
    return _Distance((difference.max() / scale).item(), (difference.mean() / scale).item(), agreement.item())


def _format_distances(distances: list[tuple[str, _Distance]], written: str, writes: bool) -> str:
    lines = [f"base merged into   largest logit difference   mean        same top {'token' if writes else 'output'}"]
    for name, distance in distances:
        mark = "*" if name == written else " "
        lines.append(f"{mark} {name:<16} {distance.largest:<26.3g} {distance.mean:<11.3g} {distance.agreement:.1%}")
    return "\n".join([*lines, "(compared with the adapter on its training base; differences as a fraction of the "
                              "largest logit; * is written)"])


def _build_card(recipe: FinishedRun, name: str, adapter_text: str, base: str,
                distances: list[tuple[str, _Distance]], is_chat: bool) -> str:
    from lmmods.runs.model_card import POOLING, ends_in_padding, format_loading  # imports torch, not needed for help

    fields_class = declared("model")[recipe.task]
    base_model = {"base_model": recipe.pretrained} if hub_id(recipe.pretrained) else {}
    header = as_yaml({"library_name": "transformers", "pipeline_tag": fields_class.pipeline_tag, **base_model})
    is_chat = is_chat and declared("data")[fields_class.takes].has_chats
    in_padding = ends_in_padding(json.loads(recipe.folder.data_report.read_text(encoding="utf-8")))
    load = format_loading({"data": read_recipe(recipe.folder.config)["data"]}, None, recipe.auto_class, is_chat,
                          in_padding=in_padding)
    table = fence(_format_distances(distances, base, recipe.writes))
    return (f"---\n{header}---\n\n# {escape(name)}, merged\n\n{adapter_text} merged into "
            f"{code(recipe.pretrained)} ({base} weights).\n\n{table}\n\n"
            + "\n\n".join([load, *([POOLING] if in_padding else [])]) + "\n")


# ---------------------------------------------------------------------------------------------------------------------
# Serving a merged model with other programs: command lines, and an Ollama Modelfile with the prompts of training.
#
# Ollama renders prompts with Go's text/template from `.System` (all system turns) and `.Messages`. A Jinja chat
# template is translated by its output: if it writes the same texts around the turns of all conversations, these texts
# form the Go template. Otherwise the Modelfile has no template, as slightly different prompts degrade answers silently.

MODELFILE = "Modelfile"
GGUF_FILE, PROJECTOR_FILE = "model.gguf", "mmproj.gguf"
Render = Callable[[list[dict[str, str]]], str]

# Architecture in config.json -> programs that support it, for every supported causal family and models with images.
# Sources: vLLM 0.33.0 (models/registry.py, including its transformers backend), SGLang 0.5.23 (EntryClass of
# srt/models; gpt_neox, olmo3 and smollm3 via its transformers fallback), llama.cpp 00bdaa1 (conversion/__init__.py),
# Ollama 0.33.0-rc2 (convert/convert.go, which reads gpt_oss only as MXFP4, not in the form that `merge` writes).
# Ollama serves the other architectures from the file that llama.cpp's converter writes.
NO_PROGRAM: frozenset[str] = frozenset()
GGUF = frozenset({"vLLM", "SGLang", "llama.cpp"})
IMAGES = frozenset({"vLLM", "SGLang"})  # llama.cpp reads what `merge --gguf` writes; its converter needs hub folders
ALL = GGUF | {"Ollama"}
PROGRAMS = {
    "CTRLLMHeadModel": NO_PROGRAM,
    "Cohere2ForCausalLM": GGUF,
    "FalconForCausalLM": GGUF - {"SGLang"},
    "GPT2LMHeadModel": GGUF,
    "GPTJForCausalLM": GGUF - {"llama.cpp"},
    "GPTNeoXForCausalLM": GGUF,
    "Gemma2ForCausalLM": ALL,
    "Gemma3ForCausalLM": ALL,
    "Gemma3ForConditionalGeneration": IMAGES,
    "Gemma4ForCausalLM": GGUF - {"llama.cpp"},  # its converter needs the whole multimodal checkpoint
    "Gemma4ForConditionalGeneration": IMAGES - {"SGLang"},
    "GemmaForCausalLM": ALL,
    "Glm4ForCausalLM": GGUF,
    "GptOssForCausalLM": GGUF,
    "GraniteForCausalLM": GGUF,
    "Idefics3ForConditionalGeneration": IMAGES - {"SGLang"},
    "InternVLForConditionalGeneration": IMAGES - {"SGLang"},
    "LlamaForCausalLM": ALL,
    "LlavaForConditionalGeneration": IMAGES - {"SGLang"},
    "LlavaNextForConditionalGeneration": IMAGES - {"SGLang"},
    "LlavaOnevisionForConditionalGeneration": IMAGES - {"SGLang"},
    "MistralForCausalLM": GGUF,
    "MixtralForCausalLM": ALL,
    "OPTForCausalLM": GGUF - {"llama.cpp"},
    "Olmo2ForCausalLM": GGUF,
    "Olmo3ForCausalLM": ALL,
    "OlmoeForCausalLM": GGUF,
    "OpenAIGPTLMHeadModel": NO_PROGRAM,
    "Phi3ForCausalLM": ALL,
    "PhiForCausalLM": GGUF,
    "Qwen2ForCausalLM": ALL,
    "Qwen2VLForConditionalGeneration": IMAGES,
    "Qwen2_5_VLForConditionalGeneration": IMAGES,
    "Qwen3ForCausalLM": GGUF,
    "Qwen3MoeForCausalLM": GGUF,
    "Qwen3VLForConditionalGeneration": IMAGES,
    "Qwen3VLMoeForConditionalGeneration": IMAGES - {"SGLang"},
    "Qwen3_5ForCausalLM": GGUF,
    "Qwen3_5ForConditionalGeneration": IMAGES - {"SGLang"},
    "Qwen3_5MoeForConditionalGeneration": IMAGES - {"SGLang"},
    "SmolLM3ForCausalLM": GGUF,
    "SmolVLMForConditionalGeneration": IMAGES - {"SGLang"},
    "StableLmForCausalLM": GGUF,
    "Starcoder2ForCausalLM": GGUF,
}


@dataclass
class Layout:
    """Fixed texts around the turns of every prompt.

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
        """Render a conversation up to the start of the assistant's next answer."""
        text = self.start
        if messages[0]["role"] == "system":
            text = f"{self.before_system}{messages[0]['content']}{self.after_system}"
        for message in messages:
            if message["role"] != "system":
                text += message["content"] + (self.answer if message["role"] == "user" else self.next_turn)
        return text

    def go_template(self) -> str:
        """Return the layout as a Go template."""
        start, answer, next_turn = map(_escape_go, (self.start, self.answer, self.next_turn))
        if self.before_system is not None:
            before, after = _escape_go(self.before_system), _escape_go(self.after_system)
            start = (f"{{{{ if .System }}}}{before}{{{{ .System }}}}{after}{{{{ else }}}}{start}{{{{ end }}}}")
        return (f'{start}{{{{ range $i, $turn := .Messages }}}}{{{{ if eq $turn.Role "user" }}}}{{{{ $turn.Content }}}}'
                f'{answer}{{{{ else if eq $turn.Role "assistant" }}}}{{{{ $turn.Content }}}}'
                f"{{{{ if gt (len (slice $.Messages $i)) 1 }}}}{next_turn}{{{{ end }}}}{{{{ end }}}}{{{{ end }}}}")


def find_layout(render: Render) -> Layout | None:
    """Return the texts that a chat template writes around turns; None if they are not the same in all prompts.

    Args:
        render: Renders a conversation to its prompt; raises RowProblem or ValueError if it cannot.
    """
    system, question, reply, next_question = "(A system turn.)", "(A question?)", "(An answer.)", "(Another question?)"

    def turns(*texts: str, system_text: str | None = None) -> list[dict[str, str]]:
        roles = ("user", "assistant")
        messages = [{"role": roles[index % 2], "content": text} for index, text in enumerate(texts)]
        return [{"role": "system", "content": system_text}, *messages] if system_text else messages

    try:
        start, answer = render(turns(question)).split(question)
        next_turn, _ = render(turns(question, reply, next_question)).partition(reply)[2].split(next_question)
    except (RowProblem, ValueError):  # a turn is rejected, dropped or duplicated
        return None
    before_system = after_system = None
    try:
        before_system, after_system_text = render(turns(question, system_text=system)).split(system)
        after_system = after_system_text.split(question)[0]
    except (RowProblem, ValueError):
        before_system = None
    layout = Layout(start, before_system, after_system or "", answer, next_turn)
    probes = [turns(question), turns(question, reply, next_question), turns("a\nb", "c\n\nd", "e", reply, question),
              turns(*"1234567")]
    if before_system is not None:
        probes += [turns(*(message["content"] for message in probe), system_text="x\ny") for probe in probes]
    try:
        return layout if all(render(probe) == layout.prompt(probe) for probe in probes) else None
    except (RowProblem, ValueError):
        return None


def _escape_go(text: str) -> str:
    return text.replace("{{", '{{ "{{" }}')


def modelfile(folder: Path, tokenizer: Any, system: str | None, template_kwargs: dict[str, Any] | None) -> str | None:
    """Return Ollama's Modelfile for a model folder; None if neither Ollama nor llama.cpp supports the architecture.

    Args:
        system: System turn used for all training rows.
        template_kwargs: Chat template variables used in training.
    """
    programs = _find_programs(folder)
    if not programs & {"llama.cpp", "Ollama"}:
        return None
    from_weights = "Ollama" in programs and not (folder / GGUF_FILE).is_file()
    lines = ["FROM ." if from_weights else f"FROM ./{GGUF_FILE}"]
    if tokenizer.chat_template is None:
        lines.append("# This model continues texts: it has no chat template.")
    elif layout := _find_ollama_layout(folder, tokenizer, template_kwargs or {}):
        lines += ["# The chat template does not support system turns."] if layout.before_system is None else []
        lines.append(f'TEMPLATE """{layout.go_template()}"""')
    else:
        lines.append("# Ollama cannot express the chat template (chat_template.jinja). Write TEMPLATE yourself.")
    if system is not None:
        lines.append(f"SYSTEM {_quote(system)}" if _can_be_quoted(system) else
                     "# The system prompt of the training has characters that a Modelfile cannot contain.")
    return "\n".join([*lines, *(f"PARAMETER stop {_quote(token)}" for token in _end_tokens(folder, tokenizer))]) + "\n"


def _find_ollama_layout(folder: Path, tokenizer: Any, template_kwargs: dict[str, Any]) -> Layout | None:
    """Return the layout of the prompts; None if Ollama's templates or a Modelfile cannot express it."""
    bos = tokenizer.bos_token
    settings = json.loads((folder / "tokenizer_config.json").read_text(encoding="utf-8"))
    adds_bos = bool(bos and settings.get("add_bos_token"))  # Ollama reads this setting

    def render(messages: list[dict[str, str]]) -> str:
        text = template.render(messages, True, **template_kwargs)
        if adds_bos and not text.startswith(bos):
            raise ValueError("Ollama would add a token that the template does not write")
        return text.removeprefix(bos) if adds_bos else text

    try:
        template = ChatTemplate(tokenizer.get_chat_template(), tokenizer.special_tokens_map)
        layout = None if "strftime_now" in template.names else find_layout(render)  # the date would not change
    except UserError:  # the template fails or does not terminate
        return None
    return layout if layout and _can_be_quoted(layout.go_template()) else None


def _find_programs(folder: Path) -> frozenset[str]:
    """Return the programs that support a model folder; empty for an architecture that is not in `PROGRAMS`."""
    architecture = json.loads((folder / "config.json").read_text(encoding="utf-8"))["architectures"][0]
    return PROGRAMS.get(architecture, NO_PROGRAM)


def _end_tokens(folder: Path, tokenizer: Any) -> list[str]:
    return [token for token in tokenizer.convert_ids_to_tokens(saved_end_ids(folder)) if token]


def _can_be_quoted(text: str) -> bool:
    """True if a Modelfile can contain the text. Triple quotes would end it; unprintable characters are lost."""
    return '"""' not in text and not text.endswith('"') and all(char.isprintable() or char in "\n\t" for char in text)


def _quote(text: str) -> str:
    return f'"""{text}"""' if '"' in text or "\n" in text else f'"{text}"'


def serving_lines(folder: Path) -> str:
    """Return the command lines to chat with, serve and convert a merged model in the programs that support it."""
    programs, path = _find_programs(folder), shlex.quote(str(folder))
    name = re.sub(r"[^a-z0-9._-]+", "-", folder.resolve().name.lower()).strip("-._") or "model"
    gguf, file = shlex.quote(str(folder / GGUF_FILE)), shlex.quote(str(folder / MODELFILE))
    lines = [("chat", f"python train.py chat --model {path}"), ("transformers", f"transformers serve {path}")]
    if "vLLM" in programs:
        lines.append(("vLLM", f"vllm serve {path}"))
    if "SGLang" in programs:
        lines.append(("SGLang", f"sglang serve --model-path {path}"))
    has_gguf, projector = (folder / GGUF_FILE).is_file(), folder / PROJECTOR_FILE
    if "llama.cpp" in programs or has_gguf:
        converts = [] if has_gguf else [f"python convert_hf_to_gguf.py {path} --outfile {gguf}"]
        images = f" --mmproj {shlex.quote(str(projector))}" if projector.is_file() else ""
        lines += zip(("llama.cpp", ""), [*converts, f"llama-server -m {gguf}{images}"])
    if (folder / MODELFILE).is_file():
        condition = "" if "Ollama" in programs or has_gguf else "   (after llama.cpp's converter)"
        lines.append(("Ollama", f"ollama create {name} -f {file}{condition}"))
    return "\n".join(f"  {program:<13} {line}" for program, line in lines)
