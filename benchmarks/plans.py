"""Plan the shipped recipes: write the table of docs/plans.md and the memory column of docs/recipes.md.

    make plans              # creates .plan-cuda (3 GB); half an hour on two cores

The recipes' own keys are planned, for models of their checkpoints' sizes. Neither weights nor rows are read: the demo's
rows replace the recipes', because a plan counts each row at its maximum length.
"""

import copy
import json
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any, NamedTuple

import yaml

ROOT = Path(__file__).parents[1]
RECIPES = ROOT / "configs" / "recipes"
PAGE = ROOT / "docs" / "plans.md"
CATALOGUE = ROOT / "docs" / "recipes.md"
DEMO = ROOT / "demo"
MARK = "<!-- made by benchmarks/plans.py -->\n"
# Engine, devices, and how the memory is known. Several devices shard the weights.
PLANS = (("torch", "H100", "simulated"), ("jax", "H100", "compiled"), ("jax", "8xH100", "compiled"))

_LLAMA = {"model_type": "llama", "vocab_size": 32000, "max_position_embeddings": 2048}
_MISTRAL = {"model_type": "mistral", "vocab_size": 32000, "hidden_size": 4096, "intermediate_size": 14336,
            "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8, "sliding_window": 4096,
            "max_position_embeddings": 32768}
_QWEN = {"model_type": "qwen2", "max_position_embeddings": 32768}
SIZES = {
    "openai-community/gpt2": {"model_type": "gpt2", "vocab_size": 50257, "n_embd": 768, "n_layer": 12, "n_head": 12},
    "FacebookAI/roberta-base": {"model_type": "roberta", "vocab_size": 50265, "max_position_embeddings": 514,
                                "type_vocab_size": 1, "pad_token_id": 1},
    "google-bert/bert-base-uncased": {"model_type": "bert", "vocab_size": 30522},
    "huggyllama/llama-7b": _LLAMA | {"hidden_size": 4096, "intermediate_size": 11008, "num_hidden_layers": 32,
                                     "num_attention_heads": 32},
    "huggyllama/llama-30b": _LLAMA | {"hidden_size": 6656, "intermediate_size": 17920, "num_hidden_layers": 60,
                                      "num_attention_heads": 52},
    "meta-llama/Llama-3.2-1B": {"model_type": "llama", "vocab_size": 128256, "hidden_size": 2048,
                                "intermediate_size": 8192, "num_hidden_layers": 16, "num_attention_heads": 32,
                                "num_key_value_heads": 8, "head_dim": 64, "max_position_embeddings": 131072,
                                "tie_word_embeddings": True},
    "mistralai/Mistral-7B-v0.1": _MISTRAL,
    "alignment-handbook/zephyr-7b-sft-full": _MISTRAL,
    "Qwen/Qwen2.5-7B-Instruct": _QWEN | {"vocab_size": 152064, "hidden_size": 3584, "intermediate_size": 18944,
                                         "num_hidden_layers": 28, "num_attention_heads": 28,
                                         "num_key_value_heads": 4},
    "Qwen/Qwen2.5-0.5B": _QWEN | {"vocab_size": 151936, "hidden_size": 896, "intermediate_size": 4864,
                                  "num_hidden_layers": 24, "num_attention_heads": 14, "num_key_value_heads": 2,
                                  "tie_word_embeddings": True},
}
ENCODERS = ("bert", "roberta")
CHATML = """{% for message in messages %}<|im_start|>{{ message.role }}
{% for part in message.content %}{{ part.text if part.type == 'text' else 'IMAGE' }}{% endfor %}<|im_end|>
{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""


class Vision(NamedTuple):
    """A model that reads images, and the images that a recipe shows it.

    Args:
        sizes: The model's configuration.
        token: Token of an image in it.
        image: Text of an image in the chat template.
        tokens: Further special tokens.
        processor: Class of the processor, and its fields.
        image_processor: Class of the image processor, and its fields.
        size: Width and height of an image.
    """

    sizes: dict[str, Any]
    token: str
    image: str
    tokens: list[str]
    processor: dict[str, Any]
    image_processor: dict[str, Any]
    size: tuple[int, int]


VISION = {
    # Idefics3, whose network and processor are the same for images: SmolVLM's processor needs a further package.
    "HuggingFaceTB/SmolVLM2-2.2B-Instruct": Vision(
        {"model_type": "idefics3", "scale_factor": 3, "tie_word_embeddings": False, "text_config": {
            "model_type": "llama", "vocab_size": 49280, "hidden_size": 2048, "intermediate_size": 8192,
            "num_hidden_layers": 24, "num_attention_heads": 32, "num_key_value_heads": 32,
            "max_position_embeddings": 8192}, "vision_config": {
            "hidden_size": 1152, "intermediate_size": 4304, "num_hidden_layers": 27, "num_attention_heads": 16,
            "image_size": 384, "patch_size": 14}},
        "<image>", "<image>", ["<fake_token_around_image>", "<global-img>", *(
            f"<row_{row}_col_{column}>" for row in range(1, 5) for column in range(1, 5))],
        {"processor_class": "Idefics3Processor", "image_seq_len": 81},
        {"image_processor_type": "Idefics3ImageProcessor", "size": {"longest_edge": 1536},
         "max_image_size": {"longest_edge": 384}, "resample": 1}, (1700, 2200)),  # a page of 8.5 x 11 inches at 200 dpi
    "Qwen/Qwen3-VL-4B-Instruct": Vision(
        {"model_type": "qwen3_vl", "tie_word_embeddings": True, "text_config": {
            "model_type": "qwen3_vl_text", "vocab_size": 151936, "hidden_size": 2560, "intermediate_size": 9728,
            "num_hidden_layers": 36, "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128,
            "max_position_embeddings": 262144, "tie_word_embeddings": True, "rope_parameters": {
                "rope_type": "default", "rope_theta": 5e6, "mrope_section": [24, 20, 20], "mrope_interleaved": True}},
         "vision_config": {"model_type": "qwen3_vl", "depth": 24, "hidden_size": 1024, "intermediate_size": 4096,
                           "num_heads": 16, "out_hidden_size": 2560, "deepstack_visual_indexes": [5, 11, 17]}},
        "<|image_pad|>", "<|vision_start|><|image_pad|><|vision_end|>",
        ["<|vision_start|>", "<|vision_end|>", "<|video_pad|>"],
        {"processor_class": "Qwen3VLProcessor"},
        {"image_processor_type": "Qwen2VLImageProcessor", "patch_size": 16, "merge_size": 2, "temporal_patch_size": 2,
         "size": {"shortest_edge": 65536, "longest_edge": 16777216}}, (850, 1100)),  # more pixels than most charts
}


class PlanOutput(NamedTuple):
    """Output of `plan`.

    Args:
        lines: Lines for the unchanged recipe, by name.
        remedy: First change with which the recipe fits; None if it fits unchanged, or not at all.
        remedied: Lines for the recipe with that change.
    """

    lines: dict[str, str]
    remedy: str | None
    remedied: dict[str, str]


def run_plan(recipe: dict[str, Any], on: str) -> PlanOutput:
    """Plan a recipe on a target.

    Raises:
        SystemExit: The plan failed; the message has the end of its output.
    """
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "recipe.yaml"
        file.write_text(yaml.safe_dump(recipe))
        process = subprocess.run([sys.executable, "train.py", "plan", "--config", str(file), "--on", on,
                                  "--trainer.default_root_dir", f"{folder}/run"],
                                 cwd=ROOT, capture_output=True, text=True)
    if process.returncode:
        raise SystemExit(process.stderr[-3000:] or process.stdout[-3000:])
    unchanged, *changed = re.split(r"^It fits with (.*):$", process.stdout, flags=re.MULTILINE)
    if not changed:
        return PlanOutput(_parse_lines(unchanged), None, {})
    return PlanOutput(_parse_lines(unchanged), changed[0], _parse_lines(changed[1]))


def _parse_lines(text: str) -> dict[str, str]:
    return {line[:26].strip(): line[26:].strip() for line in text.splitlines() if len(line) > 26}


def parse_gibibytes(line: str) -> float:
    """Return the first size in a line, in GiB."""
    size, unit = re.search(r"([\d,.]+) ([GM])iB", line).groups()
    return float(size.replace(",", "")) / (1 if unit == "G" else 1024)


def write_model_folder(parent: Path, sizes: dict[str, Any]) -> Path:
    """Write a model folder with this configuration and a demo tokenizer, without weights."""
    folder = parent / "model"
    demo = DEMO / ("bert" if sizes["model_type"] in ENCODERS else "llama")
    shutil.copytree(demo, folder, ignore=shutil.ignore_patterns("*.safetensors"))
    (folder / "config.json").write_text(json.dumps(sizes))
    return folder


def write_vision_folder(parent: Path, vision: Vision) -> Path:
    """Write a model folder with this configuration, a processor and a demo tokenizer, without weights."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(DEMO / "llama")
    tokens = [vision.token, *vision.tokens, "<|im_start|>", "<|im_end|>"]
    tokenizer.add_special_tokens({"additional_special_tokens": tokens, "eos_token": "<|im_end|>"})
    tokenizer.chat_template = CHATML.replace("IMAGE", vision.image)
    tokenizer.save_pretrained(folder := parent / "model")
    ids = {"image_token_id": tokenizer.convert_tokens_to_ids(vision.token)} | {
        f"{token.strip('<|>')}_token_id": tokenizer.convert_tokens_to_ids(token) for token in vision.tokens
        if token.startswith("<|vision")}
    for name, content in (("config.json", vision.sizes | ids), ("processor_config.json", vision.processor),
                          ("preprocessor_config.json", vision.image_processor)):
        (folder / name).write_text(json.dumps(content))
    return folder


def replace_model_and_data(recipe: dict[str, Any], parent: Path) -> dict[str, Any]:
    """Change a shipped recipe to a model of its checkpoint's sizes and rows of the demo, and return it."""
    model, data = recipe["model"]["init_args"], recipe["data"]["init_args"]
    model_key = "pretrained" if "pretrained" in model else "config"
    vision = VISION.get(model[model_key])
    model[model_key] = str(write_vision_folder(parent, vision) if vision else write_model_folder(
        parent, SIZES[model[model_key]]))
    if model_key == "config":
        data["tokenizer"] = model[model_key]
    for key in ("val_source", "test_source", "predict_source", "val_size", "dataset_format", "template"):
        data.pop(key, None)
    recipe["trainer"].pop("logger", None)
    if vision:
        from PIL import Image

        data["source"] = str(parent / "pictures.jsonl")
        Image.new("RGB", vision.size).save(parent / "picture.png")
        Path(data["source"]).write_text(100 * (json.dumps({
            "prompt": "What is this?", "completion": "A picture.", "image": "picture.png"}) + "\n"))
    else:
        data |= _ROWS[recipe["data"]["class_path"]]
    if model.get("loss") == "kto":
        rows = map(json.loads, open(DEMO / "preferences.jsonl"))
        data["source"] = str(parent / "labelled.jsonl")
        Path(data["source"]).write_text("".join(json.dumps({
            "prompt": row["instruction"], "completion": row["chosen"], "label": bool(n % 2)}) + "\n"
            for n, row in zip(range(64), rows)))
    return recipe


_ROWS = {"CLMData": {"source": str(DEMO / "corpus" / "val.txt"), "documents": "paragraph"},
         "MLMData": {"source": str(DEMO / "corpus" / "val.txt"), "documents": "paragraph"},
         "QAData": {"source": str(DEMO / "squad" / "dev.json"), "version_2_with_negative": True},
         "SFTData": {"source": str(DEMO / "instructions.jsonl"), "template": "alpaca"},
         "PreferenceData": {"source": str(DEMO / "preferences.jsonl"), "template": "alpaca"}}


class Figures(NamedTuple):
    """Cells of the table for one plan.

    Args:
        memory: Memory per device; if the recipe does not fit, also with the change that makes it fit; empty if the
            engine does not plan the recipe.
        speed: Maximum number of tokens per second.
    """

    memory: str
    speed: str


def main() -> None:
    recipes = {path.stem: yaml.safe_load(path.read_text()) for path in sorted(RECIPES.glob("*.yaml"))}
    names = sys.argv[1:] or [name for name, recipe in recipes.items() if can_plan(recipe)]
    write_pages({name: [plan_recipe(recipes[name], *target) for target in PLANS] for name in names})


def can_plan(recipe: dict[str, Any]) -> bool:
    """Return whether the sizes of the recipe's model and rows for its data are known here."""
    model = recipe["model"]["init_args"]
    return (model.get("pretrained") or model.get("config")) in SIZES | VISION and recipe["data"]["class_path"] in _ROWS


def write_pages(rows: dict[str, list[Figures]]) -> None:
    """Write the table of docs/plans.md, and the recipes' memory in docs/recipes.md."""
    columns = [f"{on}, {engine.replace('jax', 'JAX')}" for engine, on, _ in PLANS]
    head = ["recipe", *columns, "tokens/s at most"]
    table = [head, *([f"[`{name}`](../configs/recipes/{name}.yaml)", *(plan.memory for plan in plans), plans[0].speed]
                     for name, plans in rows.items())]
    before, _, _ = PAGE.read_text().partition(MARK)
    lines = [f"| {' | '.join(cells)} |\n" for cells in table]
    lines.insert(1, f"|{'---|' * len(head)}\n")
    PAGE.write_text(before + MARK + "\n" + "".join(lines))
    catalogue = CATALOGUE.read_text()
    for name, plans in rows.items():
        row = re.compile(rf"^(\| \[`{re.escape(name)}`\](?:[^|\n]*\|){{3}})[^|\n]*\|", re.MULTILINE)
        catalogue = row.sub(lambda match, memory=plans[0].memory: f"{match[1]} {memory} |", catalogue)
    CATALOGUE.write_text(catalogue)


def plan_recipe(recipe: dict[str, Any], engine: str, on: str, source: str) -> Figures:
    """Plan a shipped recipe.

    Raises:
        SystemExit: The plan failed, or its memory was not determined by `source`.
    """
    if engine == "jax" and recipe["model"]["init_args"].get("images"):
        return Figures("", "")  # JAX plans without images
    with tempfile.TemporaryDirectory() as folder:
        recipe = replace_model_and_data(copy.deepcopy(recipe), Path(folder)) | {"engine": engine}
        if on != "H100":
            recipe["trainer"]["strategy"] = "fsdp"
        if engine == "jax":  # JAX has no paged memory
            optimizer = recipe["model"]["init_args"]["optimizer"]
            optimizer["name"] = optimizer["name"].replace("paged_adamw_32bit", "adamw")
        output = run_plan(recipe, on)
    known_source, verdict = output.lines["memory of each device"].split(None, 1)
    if known_source != source:
        raise SystemExit(f"The plan for {engine} on {on} is {known_source}, not {source}.")
    memory, lines = _parse_memory(verdict), output.lines
    if verdict.startswith("does not fit"):
        _, remedied_verdict = output.remedied.get("memory of each device", "x nothing").split(None, 1)
        memory += f"; `{output.remedy}`: {_parse_memory(remedied_verdict)}"
        lines = output.remedied
    result = Figures(memory, _parse_speed(lines.get("so at most", "")))
    print(engine, on, *result, flush=True)
    return result


def _parse_memory(verdict: str) -> str:
    """Return the memory in a verdict such as "fits: about 1.2 GiB of 72 GiB for a step"; keep "does not fit: "."""
    return re.sub(r"^fits: |about ", "", verdict).split(" of ")[0]


def _parse_speed(line: str) -> str:
    """Return the number in a line such as "assumed 1,234 tokens per second, 4,096 a step"; empty without one."""
    return line.partition(" tokens per second")[0].rpartition(" ")[2]


if __name__ == "__main__":
    main()
