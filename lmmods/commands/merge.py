"""`merge`: a run's adapter becomes part of plain weights, and how far the result is from the adapter is told."""

import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from lmmods.commands.exported_model import FinishedRun, copy_dequantized
from lmmods.core.adapters import fitting_adapter
from lmmods.core.errors import UserError
from lmmods.core.generation_config import GENERATION_CONFIG
from lmmods.core.markdown import code, escaped, fenced
from lmmods.core.recipes import as_yaml, read_recipe
from lmmods.runs.folder import commit_folder
from lmmods.runs.inside import fresh_folder
from lmmods.runs.local_paths import hub_id

DTypeName = Literal["float32", "bfloat16", "float16"]


def merge(run: str, out: str, base: Literal["dequantized", "original"] = "dequantized", dtype: DTypeName = "float32",
          threshold: float = 0.02, force: bool = False, overwrite: bool = False) -> None:
    """Merge a run's adapter into freshly loaded base weights and write a plain Hugging Face folder.

    Args:
        run: The run folder.
        out: Folder to write.
        base: Weights to merge into. `dequantized` are the 4- or 8-bit ones the adapter was trained on, unpacked;
            `original` the full ones. Without quantisation they are the same.
        dtype: Type of the written weights; the sum itself is formed in float32.
        threshold: Refuse when the largest difference of a logit, as a share of the largest logit, is above this.
        force: Write although the difference is above `threshold`.
        overwrite: Replace what `out` holds.
    """
    from lmmods.commands.serving import MODELFILE, modelfile, serving_lines

    out_folder = Path(out)
    if out_folder.is_symlink():
        raise UserError(f"--out {out} is a link to {out_folder.resolve()}. Name that folder itself.")
    if out_folder.exists() and any(out_folder.iterdir()) and not overwrite:
        raise UserError(f"--out {out} is not empty. Choose another folder, or add --overwrite true.")
    recipe = FinishedRun.read(run, "merge")
    if not recipe.has_adapter:
        raise UserError(f"--run {run}: {recipe.folder.model} is a plain model already.")
    saved = recipe.saved_quantization()
    if saved and base == "original":
        raise UserError(f"--base original: {recipe.pretrained} is saved in {saved}, so there is no original here. "
                        "Leave --base out.")
    reference = _reference(recipe)
    chosen, report = None, []
    for kind in ("dequantized", "original") if recipe.quantize and not saved else (base,):
        model = _merged(recipe, kind, dtype)
        report.append((kind, _distance(model, reference)))
        if kind == base:
            chosen = model
    print(_table(report, base))
    difference = dict(report)[base].largest
    if difference > threshold and not force:
        raise UserError(f"The merged model is {difference:.2g} of the logits' scale away from the adapter, more than "
                        f"--threshold {threshold}. Nothing was written. Try the other --base, a wider --dtype, or "
                        "--force true.")
    from lmmods.torch_engine.nn.export import save  # needs torch, which mistakes and help do not

    temporary = fresh_folder(out_folder.with_name(f".{out_folder.name}"))
    save(chosen, temporary, adapter_only=False, dtype=None, writes=True)
    reference.tokenizer.save_pretrained(temporary)
    if (recipe.folder.model / GENERATION_CONFIG).is_file():
        shutil.copyfile(recipe.folder.model / GENERATION_CONFIG, temporary / GENERATION_CONFIG)
    card = _card(recipe, base, report, reference.tokenizer.chat_template is not None)
    (temporary / "README.md").write_text(card, encoding="utf-8")
    data = read_recipe(recipe.folder.config)["data"]["init_args"]
    if text := modelfile(temporary, reference.tokenizer, data.get("system_prompt"), data.get("chat_template_kwargs")):
        (temporary / MODELFILE).write_text(text, encoding="utf-8")
    commit_folder(temporary, out_folder)
    print(f"Wrote {out}. To use it:\n{serving_lines(out_folder)}")


@dataclass
class _Reference:
    """What the adapter says on the base it was trained on.

    Args:
        ids: [B, T] tokens that the tuned model wrote itself.
        logits: [B, T, V] float32.
    """

    tokenizer: object
    ids: object
    logits: object


def _reference(recipe: FinishedRun) -> _Reference:
    import torch

    torch.manual_seed(0)
    tokenizer = recipe.tokenizer()
    model = recipe.with_adapter(recipe.load(recipe.quantize))
    start = tokenizer.bos_token_id if tokenizer.bos_token_id is not None else tokenizer.eos_token_id
    first = torch.full((8, 1), start)
    with torch.no_grad():
        ids = model.generate(input_ids=first, attention_mask=torch.ones_like(first), do_sample=True, top_k=0,
                             min_new_tokens=48, max_new_tokens=48, pad_token_id=tokenizer.pad_token_id)
        return _Reference(tokenizer, ids, model(input_ids=ids).logits.float())


def _merged(recipe: FinishedRun, kind: str, dtype: str):
    """A plain model whose weights hold the adapter.

    Always from weights no forward pass has touched: bitsandbytes repacks 4-bit weights during one on some CPUs, and
    a merge after that is garbage.
    """
    import torch

    saved = recipe.saved_quantization()
    model = recipe.unpack() if saved else recipe.load(None)
    if kind == "dequantized" and recipe.quantize and not saved:
        copy_dequantized(recipe.load(recipe.quantize), model)
    adapted = recipe.with_adapter(model)
    with fitting_adapter(recipe.folder.model, recipe.option):  # an adapter with NaNs is refused here
        merged = adapted.merge_and_unload(safe_merge=True)
    return merged.to(getattr(torch, dtype))


@dataclass
class _Distance:
    largest: float  # largest |difference| over largest |logit|
    mean: float
    agreement: float  # share of positions with the same most likely token


def _distance(model, reference: _Reference) -> _Distance:
    import torch

    with torch.no_grad():
        logits = model.eval()(input_ids=reference.ids).logits.float()
    difference, scale = (logits - reference.logits).abs(), reference.logits.abs().max()
    same = (logits.argmax(-1) == reference.logits.argmax(-1)).float().mean()
    return _Distance((difference.max() / scale).item(), (difference.mean() / scale).item(), same.item())


def _table(report: list[tuple[str, _Distance]], chosen: str) -> str:
    lines = ["base merged into   largest logit difference   mean        same top token"]
    for kind, distance in report:
        mark = "*" if kind == chosen else " "
        lines.append(f"{mark} {kind:<16} {distance.largest:<26.3g} {distance.mean:<11.3g} {distance.agreement:.1%}")
    return "\n".join([*lines, "(against the adapter on the base it was trained on; differences as a share of the "
                              "largest logit; * is written)"])


def _card(recipe: FinishedRun, base: str, report: list[tuple[str, _Distance]], is_chat: bool) -> str:
    from lmmods.runs.model_card import how_to_load  # needs torch, which help does not

    base_model = {"base_model": recipe.pretrained} if hub_id(recipe.pretrained) else {}
    header = as_yaml({"library_name": "transformers", **base_model})
    return (f"---\n{header}---\n\n# {escaped(recipe.folder.root.name)}, merged\n\nThe adapter of this run merged into "
            f"{code(recipe.pretrained)} ({base} weights).\n\n{fenced(_table(report, base))}\n\n"
            + how_to_load({"data": read_recipe(recipe.folder.config)["data"]}, None, "AutoModelForCausalLM", is_chat)
            + "\n")
