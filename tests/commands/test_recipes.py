"""The recipes for real models: their headers, their published batch, and two steps of each on stand-ins for the hub.

The stand-in models are tiny and random; `datasets.load_dataset` returns a few rows in the layout of the real dataset.
"""

import io
import json
import re
from pathlib import Path

import datasets
import pytest
import yaml

from lmmods.cli import main
from lmmods.recipe.classes import declared
from tests.data.conftest import CORPUS
from tests.data.test_mlm import bert_folder  # noqa: F401 - a fixture
from tests.data.test_qa import CONTEXT
from tests.torch_engine.test_architectures import DECODERS, ENCODERS, make_folder
from tests.vision_models import picture, save_vision_model

ROOT = Path(__file__).parents[2]
RECIPES = {path.stem: path for path in sorted((ROOT / "configs" / "recipes").glob("*.yaml"))}
ROWS_PER_STEP = {  # as published, or as in the program that the recipe follows
    "clm_gpt2_wikitext2": 8, "clm_gpt2_scratch": 64, "pretrain_qwen2.5_lora": 64, "pretrain_llama3.2_qlora": 64,
    "mlm_roberta_wikitext2": 8, "qa_bert_squad": 12, "qa_bert_squad_v2": 12, "sft_guanaco_7b": 16,
    "sft_guanaco_33b": 16, "sft_alpaca_7b": 16, "sft_smolvlm_docvqa": 16, "sft_qwen3_vl_chartqa": 32,
    "preference_zephyr_7b": 32, "preference_orpo_mistral_7b": 32, "preference_kto_qwen2.5_7b": 32,
    "classify_bert_glue": 32, "tag_bert_conll2003": 32, "choose_roberta_swag": 128, "reward_qwen_ultrafeedback": 64,
    "grpo_qwen3_gsm8k": 128, "grpo_qwen2.5_coder_mbpp": 128}
SHORT = {"GRPO": ["--model.num_generations", "2", "--model.max_new_tokens", "8"]}  # more options to shrink a task
LINES = [{"text": line} for line in [*CORPUS, ""] * 8]
QUESTIONS = [{"id": str(n), "title": "sums", "question": "what is the sum?", "context": CONTEXT,
              "answers": {"text": [CONTEXT[:5]], "answer_start": [0]}} for n in range(24)]
UNANSWERED = {"id": "none", "title": "sums", "question": "who?", "context": CONTEXT,
              "answers": {"text": [], "answer_start": []}}
CHAT_PROMPTS = [[{"role": "user", "content": f"Add {n} and 1."}] for n in range(8)]
PICTURE = io.BytesIO()
picture(0).save(PICTURE, "PNG")
PICTURES = {"image": {"bytes": PICTURE.getvalue(), "path": None}}
ANSWERS = [[{"role": "assistant", "content": text}] for text in ("The sum.", "No.")]
HUB = {  # repository -> (configurations, splits, rows)
    "Salesforce/wikitext": ({"wikitext-2-raw-v1", "wikitext-103-raw-v1"}, {"train", "validation", "test"}, LINES),
    "rajpurkar/squad": ({None}, {"train", "validation"}, QUESTIONS),
    "rajpurkar/squad_v2": ({None}, {"train", "validation"}, [*QUESTIONS, UNANSWERED]),
    "timdettmers/openassistant-guanaco": ({None}, {"train", "test"}, [
        {"text": f"### Human: Add {n} and 1.### Assistant: {n + 1}" + " of course" * (n % 300)} for n in range(40)]),
    "tatsu-lab/alpaca": ({None}, {"train"}, [
        {"instruction": f"Add {n} and 1.", "input": "", "output": str(n + 1), "text": "the whole prompt"}
        for n in range(1100)]),
    "HuggingFaceH4/ultrafeedback_binarized": ({None}, {"train_prefs", "test_prefs"}, [
        {"prompt": chat[0]["content"], "messages": chat + ANSWERS[0], "chosen": chat + ANSWERS[0],
         "rejected": chat + ANSWERS[1], "score_chosen": 8.0, "score_rejected": 3.0} for chat in CHAT_PROMPTS]),
    "nyu-mll/glue": ({"mrpc"}, {"train", "validation"}, [
        {"sentence1": CORPUS[n % 3], "sentence2": CORPUS[n % 2], "label": n % 2, "idx": n} for n in range(24)]),
    "tomaarsen/conll2003": ({None}, {"train", "validation", "test"}, [
        {"id": str(n), "tokens": ["the", "quick", "fox"], "ner_tags": ["O", "O", "B-LOC" if n % 2 else "B-PER"]}
        for n in range(24)]),
    "allenai/swag": ({"regular"}, {"train", "validation"}, [
        {"sent1": "the fox jumps", "sent2": "it", **{f"ending{index}": f"{index} dogs" for index in range(4)},
         "label": n % 4} for n in range(24)]),
    "trl-lib/ultrafeedback_binarized": ({None}, {"train", "test"}, [
        {"chosen": chat + ANSWERS[0], "rejected": chat + ANSWERS[1], "score_chosen": 8.0, "score_rejected": 3.0}
        for chat in CHAT_PROMPTS]),
    "openai/gsm8k": ({"main"}, {"train", "test"}, [
        {"question": f"What is {n} + 1?", "answer": f"{n} + 1 = <<{n}+1={n + 1}>>{n + 1}\n#### {n + 1}"}
        for n in range(8)]),
    "google-research-datasets/mbpp": ({"full"}, {"train", "validation"}, [
        {"task_id": n, "text": f"Write a function that adds {n}.", "code": f"def add(x):\n    return x + {n}",
         "test_list": [f"assert add(1) == {n + 1}"], "test_setup_code": "", "challenge_test_list": []}
        for n in range(8)]),
    "HuggingFaceM4/ChartQA": ({None}, {"train", "val", "test"}, [
        {**PICTURES, "query": f"How many in {n}?", "label": [str(n)], "human_or_machine": n % 2} for n in range(8)]),
    "HuggingFaceM4/DocumentVQA": ({None}, {"train", "validation", "test"}, [
        {"questionId": n, "question": f"Who wrote page {n}?", "question_types": ["handwritten"], **PICTURES, "docId": n,
         "ucsf_document_id": "a", "ucsf_document_page_no": "1", "answers": [f"Dr. {n}", f"Doctor {n}"]}
        for n in range(8)]),
    "trl-lib/kto-mix-14k": ({None}, {"train", "test"}, [
        {"prompt": chat, "completion": ANSWERS[n % 2], "label": n % 2 == 0} for n, chat in enumerate(CHAT_PROMPTS)]),
}


def read_header(path: Path) -> str:
    return re.match(r"(?:#.*\n)+", path.read_text()).group()


def test_every_recipe_has_an_expected_batch_size():
    assert set(RECIPES) == set(ROWS_PER_STEP)


@pytest.mark.parametrize("name", RECIPES)
def test_a_header_has_command_hardware_time_and_published_figures(name):
    header = " ".join(read_header(RECIPES[name]).replace("#", " ").split())
    assert f"python train.py fit --config configs/recipes/{name}.yaml" in header
    assert re.search(r"Hardware: GPU with \d+ GB", header) and re.search(r"Time: .*\(estimate", header)
    assert "Published" in header or "no figure is published" in header.lower()


@pytest.mark.parametrize("name", RECIPES)
def test_a_step_has_the_published_number_of_rows(name):
    content = yaml.safe_load(RECIPES[name].read_text())
    trainer, data = content["trainer"], content["data"]["init_args"]
    assert trainer["devices"] == 1
    assert data["batch_size"] * trainer.get("accumulate_grad_batches", 1) == ROWS_PER_STEP[name]


@pytest.fixture(scope="session")
def models(tmp_path_factory, tokenizer_folder, bert_folder, shared):  # noqa: F811
    """Hub id -> folder of a tiny model of that kind."""
    vision = {name: shared(f"vision_{name}", lambda folder, name=name: save_vision_model(name, folder))
              for name in ("smolvlm", "qwen3_vl")}
    root, longer = tmp_path_factory.mktemp("hub"), {"max_position_embeddings": 2048}
    decoders = {"gpt2": {**DECODERS["gpt2"], "n_positions": 1024}, "llama": {**DECODERS["llama"], **longer},
                "qwen2": {**DECODERS["qwen2"], **longer}}
    folders = {name: make_folder(root, name, fields, tokenizer_folder, "AutoModelForCausalLM")
               for name, fields in decoders.items()}
    for name, positions in (("bert", 512), ("roberta", 514)):
        fields = {**ENCODERS[name], "max_position_embeddings": positions}
        folders[name] = make_folder(root, name, fields, bert_folder, "AutoModelForMaskedLM")
    return {"openai-community/gpt2": folders["gpt2"], "Qwen/Qwen2.5-0.5B": folders["qwen2"],
            "google-bert/bert-base-uncased": folders["bert"], "google-bert/bert-base-cased": folders["bert"],
            "FacebookAI/roberta-base": folders["roberta"], "Qwen/Qwen2.5-7B-Instruct": folders["qwen2"],
            "HuggingFaceTB/SmolVLM2-2.2B-Instruct": str(vision["smolvlm"]),
            "Qwen/Qwen3-VL-4B-Instruct": str(vision["qwen3_vl"]),
            "Qwen/Qwen3-0.6B": folders["qwen2"], "Qwen/Qwen2.5-Coder-1.5B-Instruct": folders["qwen2"],
            **dict.fromkeys(("meta-llama/Llama-3.2-1B", "huggyllama/llama-7b", "huggyllama/llama-30b",
                             "mistralai/Mistral-7B-v0.1", "alignment-handbook/zephyr-7b-sft-full"), folders["llama"])}


@pytest.fixture
def hub(monkeypatch, tmp_path):
    """A dataset hub with the real configurations and splits, and a folder my_texts."""
    def load_dataset(repository, name, *, split, **_):
        names, splits, rows = HUB[repository]
        assert name in names and split in splits, f"{repository}: no {name} / {split}"
        return datasets.Dataset.from_list(rows)

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    monkeypatch.setenv("LMMODS_CACHE", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)
    (tmp_path / "my_texts").mkdir()
    for n, line in enumerate(CORPUS * 4):
        (tmp_path / "my_texts" / f"{n}.txt").write_text(line * 40)


def test_the_dataset_can_be_changed_as_the_header_says(monkeypatch, capsys):
    monkeypatch.chdir(ROOT)
    header = " ".join(read_header(RECIPES["clm_gpt2_scratch"]).replace("#", " ").split())
    options = re.search(r"--data\.source\.name.*", header).group().split()
    assert main(["fit", "--config", str(RECIPES["clm_gpt2_scratch"]), *options, "--print_config"]) == 0
    data = yaml.safe_load(capsys.readouterr().out)["data"]["init_args"]
    assert data["source"]["name"] == data["val_source"]["name"] == "wikitext-2-raw-v1"
    assert data["source"]["path"] == "Salesforce/wikitext" and data["val_source"]["split"] == "validation"


def replace_models(content: dict, models: dict[str, str]) -> dict:
    """Replace the hub models of a recipe; everything else stays."""
    for options in (content["model"]["init_args"], content["data"]["init_args"]):
        for key in ("pretrained", "config", "tokenizer"):
            if key in options:
                options[key] = models[options[key]]
    return content


@pytest.mark.parametrize("name", RECIPES)
def test_a_recipe_trains_two_steps_on_stand_ins(name, hub, models, tmp_path):
    content = replace_models(yaml.safe_load(RECIPES[name].read_text()), models)
    path = tmp_path / "recipe.yaml"
    path.write_text(yaml.safe_dump(content))
    assert main(["fit", "--config", str(path), "--trainer.max_steps", "2", "--trainer.limit_val_batches", "1",
                 "--trainer.num_sanity_val_steps", "0", "--trainer.accelerator", "cpu",
                 "--trainer.log_every_n_steps", "1", "--trainer.accumulate_grad_batches", "1", "--data.batch_size", "2",
                 "--data.eval_batch_size", "2", "--data.num_workers", "0",  # others do not have the stand-ins
                 *SHORT.get(content["model"]["class_path"], [])]) == 0
    run = tmp_path / "runs" / name
    metrics = json.loads((run / "metrics.json").read_text())
    task = declared("model")[content["model"]["class_path"]]
    assert metrics["trainer/global_step"] == 2
    assert content.get("checkpoint", {}).get("monitor", task.ranked_by[0]) in metrics
    if task.ranked_by[0] == "val/loss":  # with GRPO, equal rewards give no gradient
        assert metrics["train/grad_norm"] > 0
    weights = "adapter_model" if "lora" in content["model"]["init_args"] else "model"
    assert (run / "model" / f"{weights}.safetensors").exists() and (run / "completed").exists()
    report = json.loads((run / "data_report.json").read_text())
    assert all(split["length"]["max"] <= content["data"]["init_args"]["max_length"]
               for split in report["splits"].values())
    if name.startswith("sft_guanaco"):  # every token but the begin token is a target
        source = next(iter(report["sources"].values()))
        assert source["tokens"] - source["labelled_tokens"] == source["rows_kept"]
