"""The README.md of an exported model: metadata for the Hugging Face hub, and a description for people."""

import copy
import json
import math
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml

from lmmods.core import fingerprints
from lmmods.core.console import warn
from lmmods.core.errors import UserError, one_line
from lmmods.core.files import read_text
from lmmods.core.generation_config import GENERATION_CONFIG, exported_generation
from lmmods.core.hf_config import TEXT_NAMES, TEXT_WRITERS, parts_left_out
from lmmods.core.image_models import IMAGES_AUTO_CLASS
from lmmods.core.markdown import code, escape, fence
from lmmods.core.redaction import redact, redacted
from lmmods.data.base import DataModule
from lmmods.data.read.source_reader import NAMED_SETS
from lmmods.data.report import render_table
from lmmods.recipe.classes import declared
from lmmods.recipe.files import Loader, as_yaml
from lmmods.recipe.tasks.base import CausalFields, TaskFields
from lmmods.runs.eval_results import eval_results, write_eval_results
from lmmods.runs.folder import RunFolder
from lmmods.runs.published_paths import hub_id, show_path, show_paths
from lmmods.runs.repair import read_table
from lmmods.runs.run_files import write_json

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

ENDS_IN_PADDING = "ends_in_padding"  # key of the data report: a decoder classifier's rows that end in the padding token
POOLING = """## Padding

transformers classifies a row at its last token that is not the padding token. Some rows in this model's training data
end in the padding token, so the code above sets `pad_token_id` to None. Score one row at a time, without padding."""
OF_TEXT = """The base also takes inputs other than text. The adapter belongs to its text model, which this code loads.
For some bases, such as Gemma 3, `AutoPeftModelForCausalLM` loads the whole base, in which layers have other names, so
the adapter has no effect."""


def build_card(folder: RunFolder, base: str | None, is_adapter: bool, auto_class: str, is_chat: bool = False,
               labels: dict[str, Any] | None = None, has_parts: bool = False) -> str:
    """Return the model card in Markdown, with metadata for the Hugging Face hub.

    It will be published, so it contains no password, no token, and no absolute path of this machine.

    Args:
        folder: The run folder with all other files written; metrics.json may be missing.
        is_adapter: True if model/ is an adapter of `base`.
        auto_class: transformers' class that loads it.
        is_chat: True if its tokenizer has the chat template that it was trained with.
        labels: Fields of the configuration that describe the head's labels; empty for a language model.
        has_parts: True if the base also has parts for other inputs than text, which were not trained.
    """
    recipe, metrics = _read_recipe(folder), _read_metrics(folder)
    report = json.loads(folder.data_report.read_text(encoding="utf-8"))
    shown_base = base and show_path(base, folder.root)
    in_padding = ends_in_padding(report)
    parts = [
        f"---\n{_front_matter(folder.root.name, recipe, metrics, base, is_adapter, auto_class)}---",
        f"# {escape(folder.root.name)}",
        " ".join(filter(None, [_describe_origin(shown_base, is_adapter), _describe_method(recipe)[1]])),
        format_loading(recipe, shown_base if is_adapter else None, auto_class, is_chat, labels, has_parts, in_padding),
    ]
    if in_padding:
        parts.append(POOLING)
    if metrics:
        parts.append("## Metrics\n\n" + _table(metrics))
    if folder.metrics_csv.exists():
        parts.append("![Training and validation loss](loss.png)")
    parts.append("## Data\n\n" + fence(render_table(show_paths(report, folder.root)), "text"))
    if recipe:
        parts.append("## Recipe\n\n" + fence(as_yaml(show_paths(redacted(recipe), folder.root)).strip(), "yaml"))
    return redact("\n\n".join(parts) + "\n")


def ends_in_padding(report: dict[str, Any]) -> bool:
    """True if, by the data report, a classifier's rows end in the padding token."""
    return any(source.get(ENDS_IN_PADDING) for source in report.get("sources", {}).values())


def _read_recipe(run: RunFolder) -> dict[str, Any]:
    text = run.config.read_text(encoding="utf-8") if run.config.exists() else ""
    return yaml.load(text, Loader=Loader) or {}


def _read_metrics(run: RunFolder) -> dict[str, Any]:
    return json.loads(run.metrics_json.read_text(encoding="utf-8")) if run.metrics_json.exists() else {}


def _front_matter(name: str, recipe: dict, metrics: dict, base: str | None, is_adapter: bool, auto_class: str) -> str:
    """Return the metadata block as YAML that ends with a newline."""
    from huggingface_hub import ModelCardData

    data = recipe.get("data", {}).get("init_args", {})
    model = recipe.get("model", {}).get("init_args", {})
    task = _pipeline_tag(auto_class)
    results = _evaluation_results(task or "", data, metrics)
    metadata = ModelCardData(
        library_name="peft" if is_adapter else "transformers",
        pipeline_tag=task,
        license=recipe.get("publish", {}).get("license") or None,
        base_model=hub_id(base),
        datasets=[path for path in _paths(data.get("source")) if hub_id(path)] or None,
        tags=["lmmods", *(["qlora" if model.get("quantize") else "lora"] if is_adapter else []),
              *_describe_method(recipe)[0]],
        model_name=name if results else None,  # the hub uses it for evaluation results only
        eval_results=results or None,
    )
    # `to_yaml` does not quote a run name such as 1e-4, which the hub's YAML 1.2 reads as a number.
    return as_yaml(metadata.to_dict())


def _pipeline_tag(auto_class: str) -> str | None:
    """Return the hub's task name for a transformers class."""
    if auto_class == IMAGES_AUTO_CLASS:
        return "image-text-to-text"
    return next(task.pipeline_tag for task in declared("model").values() if task.auto_class == auto_class)


def _describe_origin(base: str | None, is_adapter: bool) -> str:
    if not base:
        return "Trained from scratch."
    return f"{'An adapter for' if is_adapter else 'Fine-tuned from'} {code(base)}."


def _describe_method(recipe: dict[str, Any]) -> tuple[list[str], str]:
    """Return tags and a description of the recipe's training method, see `TaskFields.method`."""
    model = recipe.get("model", {})
    fields_class = declared("model").get(str(model.get("class_path", "")).rpartition(".")[2], TaskFields)
    return fields_class.method(model.get("init_args") or {})


def _evaluation_results(task: str, data: dict, metrics: dict) -> list[Any]:
    """Return validation and test metrics as huggingface_hub's `EvalResult`s."""
    from huggingface_hub import EvalResult

    sources = {"val": data.get("val_source") or data.get("source"), "test": data.get("test_source")}
    results = []
    for role, source in sources.items():
        path = next(iter(_paths(source)), None)
        if not path:
            continue
        dataset_type, dataset_name = (path, path) if hub_id(path) else ("local", Path(path).stem)
        results += [
            EvalResult(task_type=task, dataset_type=dataset_type, dataset_name=dataset_name,
                       dataset_split={"val": "validation"}.get(role, role), metric_type=key.removeprefix(f"{role}/"),
                       metric_name=key, metric_value=value)
            for key, value in metrics.items()
            if key.startswith(f"{role}/") and isinstance(value, int | float) and math.isfinite(value)]
    return results


def _paths(source: Any) -> list[str]:
    """Return the paths and hub ids in a `source` field of a recipe."""
    items = source if isinstance(source, list) else [source] if source else []
    paths = [item["path"] if isinstance(item, dict) else item for item in items]
    return [NAMED_SETS.get(path, path) for path in paths]


def format_loading(recipe: dict, base: str | None, auto_class: str, is_chat: bool, labels: dict[str, Any] | None = None,
                has_parts: bool = False, in_padding: bool = False) -> str:
    """Return the card's section with code that loads the model, and for a chat model answers or scores a chat.

    Args:
        recipe: Recipe of the run, for its hub repository and chat settings.
        base: Base of an adapter, as the code names it; None if the folder contains a whole model.
        auto_class: transformers' class that loads it.
        is_chat: True if its tokenizer has a chat template.
        labels: See `build_card`.
        has_parts: See `build_card`.
        in_padding: See `ends_in_padding`.
    """
    repo = recipe.get("publish", {}).get("repo")
    generates, sees_images = auto_class in TEXT_WRITERS, auto_class == IMAGES_AUTO_CLASS
    names = [auto_class, "AutoProcessor" if sees_images else "AutoTokenizer",
             *(["GenerationConfig"] if generates and base is not None else [])]
    lines = [f"from transformers import {', '.join(names)}", "",
             f'name = "{repo}"' if repo else 'name = "."  # this folder',
             *(["processor = AutoProcessor.from_pretrained(name)", "tokenizer = processor.tokenizer"]
               if sees_images else ["tokenizer = AutoTokenizer.from_pretrained(name)"])]
    if base is None:
        lines.append(f"model = {auto_class}.from_pretrained(name)")
    else:
        options = recipe.get("model", {}).get("init_args", {})
        source = "".join(f", {key}={options[key]!r}" for key in ("revision", "trust_remote_code") if options.get(key))
        arguments = source + "".join(f", {key}={value!r}" for key, value in (labels or {}).items())
        quoted_base = json.dumps(base, ensure_ascii=False)
        if has_parts:
            # The adapter's weights are named as in the text model.
            lines = ["from transformers import AutoConfig", *lines,
                     f"whole = AutoConfig.from_pretrained({quoted_base}{source})", "text = whole.text_config",
                     f"text.update({{'tie_word_embeddings': whole.tie_word_embeddings, **{labels or {}!r}}})"]
            arguments = f"{source}, config=text, key_mapping={TEXT_NAMES!r}"
        lines = ["from peft import PeftModel", *lines,
                 f"base = {auto_class}.from_pretrained({quoted_base}{arguments})",
                 "if len(tokenizer) > base.get_input_embeddings().num_embeddings:",
                 "    base.resize_token_embeddings(len(tokenizer))",
                 *(["base.generation_config = GenerationConfig.from_pretrained(name)"] if generates else []),
                 "model = PeftModel.from_pretrained(base, name)"]
    if in_padding:
        lines.append("model.config.pad_token_id = None")
    prompt_code = _prompt_code(recipe, generates, sees_images) if is_chat else []
    code_block = fence("\n".join([*lines, *prompt_code]), "python")
    return "\n\n".join(["## Load", *([OF_TEXT] if base is not None and has_parts else []), code_block])


def _prompt_code(recipe: dict, generates: bool, sees_images: bool = False) -> list[str]:
    """Return code that prompts the model with the system prompt and template variables of the training.

    Args:
        generates: True if the model generates the answer, False if it scores one.
        sees_images: True if turns are lists of parts, texts and images.
    """
    data = recipe.get("data", {}).get("init_args", {})
    texts = [("user", "What is this?" if sees_images else "Hello!")]
    if data.get("system_prompt") is not None:
        texts.insert(0, ("system", data["system_prompt"]))
    messages: list[dict[str, Any]] = [
        {"role": role, "content": [{"type": "text", "text": text}] if sees_images else text} for role, text in texts]
    if sees_images:
        messages[-1]["content"].insert(0, {"type": "image", "path": "picture.png"})
    arguments = f", **{data['chat_template_kwargs']!r}" if data.get("chat_template_kwargs") else ""
    if not generates:
        messages.append({"role": "assistant", "content": "Hello! How can I help?"})
        return ["", f"messages = {messages!r}",
                f'answer = tokenizer.apply_chat_template(messages, return_dict=True, return_tensors="pt"{arguments})',
                "print(model(**answer.to(model.device)).logits.item())  # the score"]
    return ["", f"messages = {messages!r}",
            f"prompt = {'processor' if sees_images else 'tokenizer'}.apply_chat_template(messages, "
            f"add_generation_prompt=True, {'tokenize=True, ' if sees_images else ''}return_dict=True, "
            f'return_tensors="pt"{arguments})',
            "tokens = model.generate(**prompt.to(model.device))",
            'print(tokenizer.decode(tokens[0, prompt["input_ids"].shape[1]:], skip_special_tokens=True))']


def _table(values: dict) -> str:
    rows = [f"| {escape(name)} | {value:.6g} |" if isinstance(value, float) else
            f"| {escape(name)} | {escape(str(value))} |"
            for name, value in values.items()]
    return "\n".join(["| | |", "|---|---|", *rows])


# ---------------------------------------------------------------------------------------------------------------------
# Facts that identify a model folder or hub repository: its configuration, and a fingerprint of its weights.

# Fields about library versions and the storage of weights, which do not identify a model.
_IGNORED_FIELDS = {"_name_or_path", "transformers_version", "torch_dtype", "dtype", "peft_version",
                   "base_model_name_or_path", "inference_mode"}


LOADED_SUFFIXES = {".safetensors", ".bin", ".json", ".jinja", ".model", ".txt", ".py"}


def model_facts(name: str, revision: str | None, adapter: bool, weights: bool) -> dict[str, Any]:
    """Return facts that identify a model folder or hub repository, as far as known without a download.

    Returns:
        `config`; for a folder `weights`, a fingerprint of sizes and blocks of the files; for a hub model `commit`.

    Raises:
        UserError: A file cannot be read.
    """
    file = "adapter_config.json" if adapter else "config.json"
    folder = Path(name).expanduser()
    facts: dict[str, Any] = {}
    if not folder.is_dir():
        config = _from_hub_cache(name, file, revision)
        if config is None:
            return {}
        folder, facts["commit"] = config.parent, config.parent.name
    elif weights:
        # Regular files only, as reading a pipe would block; the loader rejects it later.
        files = [path for path in sorted(folder.glob("*.safetensors")) or sorted(folder.glob("*.bin"))
                 if path.is_file()]
        facts["weights"] = fingerprints.combine_fingerprints(fingerprints.hash_sampled(path) for path in files)
    if (folder / file).is_file():
        facts["config"] = _read_configuration(folder / file)
    return facts


def describe_initial_weights(fields: TaskFields, precision: str, seed: int) -> dict[str, Any]:
    """Return all facts that determine a task's network before its first step, and its numerics.

    Args:
        precision: Lightning's name.
        seed: Seed of the parameters that are not loaded from a file.

    Raises:
        UserError: A file cannot be read.
    """
    def describe(name: str | dict[str, Any] | None, adapter: bool = False) -> Any:
        if not isinstance(name, str):
            return name
        return model_facts(name, None if adapter else fields.revision, adapter, name != fields.config) or name

    facts = {"pretrained": describe(fields.pretrained), "config": describe(fields.config),
             "adapter": describe(fields.adapter, True), "overrides": fields.config_overrides,
             "quantize": fields.quantize, "double_quant": fields.double_quant,
             "frozen": fields.trains_adapter, "precision": precision, "seed": seed}
    if fields.quantize == "int8" or _is_saved_in_8bit(facts["pretrained"]):
        facts["activations"] = "as they are"  # caches of older versions, which rounded activations, do not match
    if fields.lora and not fields.starts_at_base:  # the initialisation changes the base weights
        facts["principal"] = {"rank": fields.lora.rank, "targets": fields.lora.targets}
    return facts


def _is_saved_in_8bit(pretrained: dict[str, Any] | str | None) -> bool:
    config = pretrained.get("config", {}) if isinstance(pretrained, dict) else {}
    return bool((config.get("quantization_config") or {}).get("load_in_8bit"))


def describe_model(name: str, revision: str | None, file: str) -> dict[str, Any]:
    """Return the manifest's entry for a model, an adapter or a tokenizer: `path`, and `files` with size and hash.

    Large weights are only sampled, as in `model_facts`. A hub model also has `commit`; it has no `files` if it is not
    in this machine's cache.

    Args:
        file: A file that it contains, such as config.json.

    Raises:
        UserError: A file cannot be read.
    """
    folder = Path(name).expanduser()
    entry: dict[str, Any] = {"path": name}
    if folder.is_file():
        return {**entry, "files": {folder.name: fingerprints.describe_file(folder)}}
    if not folder.is_dir():
        cached = _from_hub_cache(name, file, revision)
        if cached is None:
            return {**entry, "revision": revision}
        folder = cached.parent
        entry |= {"revision": revision, "commit": folder.name}
    paths = sorted(path for path in folder.iterdir() if path.suffix in LOADED_SUFFIXES and path.is_file())
    return {**entry, "files": {path.name: fingerprints.describe_file(path) for path in paths}}


def _read_configuration(path: Path) -> dict[str, Any]:
    try:
        fields = json.loads(read_text(path))
        return {key: value for key, value in fields.items() if key not in _IGNORED_FIELDS}
    except (OSError, ValueError, AttributeError) as error:
        raise UserError(f"{path}: this configuration cannot be read ({error}). Download or save the model again."
                        ) from error


def find_file(name: str, file: str, revision: str | None) -> Path | None:
    """Return a file of a model folder or of the hub cache; None if it is missing."""
    folder = Path(name).expanduser()
    if not folder.is_dir():
        return _from_hub_cache(name, file, revision)
    return folder / file if (folder / file).is_file() else None


def _from_hub_cache(name: str, file: str, revision: str | None) -> Path | None:
    from huggingface_hub import try_to_load_from_cache
    from huggingface_hub.errors import HFValidationError

    try:
        cached = try_to_load_from_cache(name, file, revision=revision)
    except HFValidationError:  # not a hub id; the loader reports it
        return None
    return Path(cached) if isinstance(cached, str) else None


# ---------------------------------------------------------------------------------------------------------------------
# Further files of an exported model: tokenizer, generation settings, card and loss curves.

def complete_model(folder: Path, run: RunFolder, task: TaskFields, auto_class: str, data: DataModule) -> None:
    """Write all files of an exported model or adapter except weights and configuration.

    Args:
        run: Run folder of the model.
        auto_class: transformers' class that loads it.
        data: The data module, set up.
    """
    chat_template = data.chat_template
    save_tokenizer(data.tokenizer, chat_template, folder, data.codec.has_token_types)
    start = task.pretrained or (task.config if isinstance(task.config, str) else None)
    files = data.codec.model_files(lambda name: find_file(start, name, task.revision) if start else None)
    for name, content in files.items():
        write_json(folder / name, content)
    if isinstance(task, CausalFields):
        base = base_generation(task.pretrained, task.revision)
        tokenizer = data.tokenizer
        write_json(folder / GENERATION_CONFIG, exported_generation(
            task.generation, base, data.codec.stop_token_ids, tokenizer.bos_token_id, tokenizer.pad_token_id))
    network = {**(task.overrides or {}), **data.network_fields}
    labels: dict[str, Any] = {key: network[key] for key in ("num_labels", "id2label", "label2id") if key in network}
    card = build_card(run, task.pretrained, task.trains_adapter, auto_class, chat_template is not None, labels,
                      bool(task.pretrained and not task.all_parts
                           and parts_left_out(task.pretrained, task.revision, task.trust_remote_code)))
    (folder / "README.md").write_text(card, encoding="utf-8")
    metrics = _read_metrics(run)
    # metrics.json is missing at a checkpoint within a run. Test and benchmark metrics are measured later.
    write_eval_results(folder, eval_results(_read_recipe(run), metrics, {"val", "mmlu"} if metrics else set()))
    plot_curves(run.metrics_csv, folder / "loss.png")


def save_tokenizer(tokenizer: "PreTrainedTokenizerBase", chat_template: str | None, folder: Path,
                   has_token_types: bool = False) -> None:
    """Write a transformers tokenizer.

    Args:
        chat_template: Replaces the tokenizer's own template; None keeps it.
        has_token_types: True if the network was trained with token types, which the tokenizer must then return.
    """
    own_template = tokenizer.chat_template
    tokenizer = copy.copy(tokenizer)  # the original is part of the run's identity
    own_templates = own_template.values() if isinstance(own_template, dict) else [own_template]
    if chat_template is not None and chat_template not in own_templates:
        tokenizer.chat_template = chat_template
    if has_token_types and "token_type_ids" not in tokenizer.model_input_names:
        tokenizer.model_input_names = [*tokenizer.model_input_names, "token_type_ids"]
        # save_pretrained only writes attributes with a key in `init_kwargs`.
        tokenizer.init_kwargs = {**tokenizer.init_kwargs, "model_input_names": None}
    tokenizer.save_pretrained(folder)


def base_generation(pretrained: str | None, revision: str | None) -> dict[str, Any]:
    """Return the generation settings of the base model, {} if they are not on this machine.

    As in transformers, the end tokens of config.json are used if generation_config.json is missing.
    """
    for file, allowed in ((GENERATION_CONFIG, None), ("config.json", ("eos_token_id",))):
        path = pretrained and find_file(pretrained, file, revision)
        if path:
            return {key: value for key, value in _read_json(path).items() if allowed is None or key in allowed}
    return {}


def _read_json(path: Path) -> dict[str, Any]:
    """Return the content of a JSON file. A bad file only causes a warning, as it must not stop a run at its end."""
    try:
        return dict(json.loads(path.read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError) as error:
        warn(f"{path} cannot be read ({one_line(error)}). The exported model does not use its settings.")
        return {}


# ---------------------------------------------------------------------------------------------------------------------
# loss.png of the run folder.

def plot_curves(metrics_csv: Path, picture: Path) -> None:
    """Plot loss, and rewards if there are any, over the steps. Does nothing if there is no metrics.csv."""
    if not metrics_csv.exists():
        return
    rows = read_table(metrics_csv).rows
    from matplotlib.figure import Figure

    names = ["loss", *(["reward"] if any(row.get("train/reward") for row in rows) else [])]
    figure = Figure(figsize=(7 * len(names), 4), layout="constrained")
    for axes, name in zip(figure.subplots(1, len(names), squeeze=False)[0], names, strict=True):
        for part, style in (("train", {"linewidth": 1.2}), ("val", {"marker": "o", "markersize": 4})):
            key = f"{part}/{name}"
            points = [(int(row["step"]), float(row[key])) for row in rows if row.get(key)]
            if points:
                axes.plot(*zip(*points, strict=True), label=key, **style)
        axes.set_xlabel("optimiser step")
        axes.set_ylabel(name)
        if axes.lines:
            axes.legend()
    figure.savefig(picture, dpi=120)
