"""The card of every task: its own words load the model, and the hub's reader understands its metadata."""

import html
import json
import re
import shutil

import pytest
import torch
import yaml
from huggingface_hub import ModelCard
from safetensors.torch import load_file
from transformers import AutoTokenizer, BertConfig, BertModel

from lmmods.cli import main
from lmmods.runs.folder import RunFolder, write_json, write_text
from lmmods.runs.inside import hub_id
from lmmods.runs.model_card import model_card
from tests.data.conftest import CORPUS
from tests.data.test_mlm import bert_folder  # noqa: F401 - a fixture
from tests.data.test_qa import squad
from tests.image_models import save_image_model

PART = {"rows": 9, "tokens": 90, "length": {"median": 10.0, "max": 12},
        "padding_share": {"shuffled": 0.1, "group_by_length": 0.05}}
REPORT = {"sources": {"someone/rows": {"rows_read": 10, "rows_kept": 9, "dropped": {
    "empty text": {"rows": 1, "first": ["rows.jsonl:3"]}}}}, "splits": {"train": PART}, "tokenizer": []}


@pytest.fixture
def run(tmp_path):
    """A function that writes what a card is made of."""
    def write(metrics: dict | None = None, **recipe) -> RunFolder:
        folder = RunFolder(tmp_path / "tiny")
        write_json(folder.data_report, REPORT)
        if metrics is not None:
            write_json(folder.metrics_json, metrics)
        if recipe:
            write_text(folder.config, yaml.safe_dump(recipe))
        return folder

    return write


def test_metadata_is_what_the_hub_reads(run):
    metrics = {"val/f1": 88.5, "val/exact_match": 81.0, "val/loss": float("nan"), "test/f1": 87.0, "train/loss": 1.0}
    folder = run(metrics,
                 model={"init_args": {"revision": "v1", "quantize": "nf4"}}, publish={"repo": "me/x", "license": "mit"},
                 data={"init_args": {"source": ["rajpurkar/squad", "my/rows.jsonl.gz", "alpaca"],
                                     "val_source": {"path": "rajpurkar/squad", "split": "validation"},
                                     "test_source": "held/out.json"}})
    card = model_card(folder, "google-bert/bert-base-uncased", True, "AutoModelForQuestionAnswering")
    told = ModelCard(card).data
    assert (told.license, told.library_name, told.pipeline_tag) == ("mit", "peft", "question-answering")
    assert told.base_model == "google-bert/bert-base-uncased"
    assert told.datasets == ["rajpurkar/squad", "tatsu-lab/alpaca"]
    assert told.tags == ["lmmods", "qlora"] and told.model_name == "tiny"
    assert {(r.task_type, r.dataset_type, r.dataset_name, r.dataset_split, r.metric_type, r.metric_value)
            for r in told.eval_results} == {
        ("question-answering", "rajpurkar/squad", "rajpurkar/squad", "validation", "f1", 88.5),
        ("question-answering", "rajpurkar/squad", "rajpurkar/squad", "validation", "exact_match", 81.0),
        ("question-answering", "local", "out", "test", "f1", 87.0)}
    assert "10 rows read, 9 kept" in card and "dropped 1: empty text" in card
    assert "from_pretrained(\"google-bert/bert-base-uncased\", revision='v1')" in card


def test_reinforcement_learning_is_described(run):
    rewards = [{"name": "exact_match"}, {"function": "mine.is_short", "weight": 0.5}]
    folder = run({"val/reward": 0.5, "val/pass@8": 0.75},
                 data={"init_args": {"source": "me/rows", "val_source": "me/held"}},
                 model={"class_path": "GRPO", "init_args": {
                     "rewards": rewards, "loss": "dr_grpo", "ratio": "sequence", "num_generations": 4, "beta": 0.1}})
    card = model_card(folder, "me/base", False, "AutoModelForCausalLM")
    assert ("Trained by reinforcement learning on its own answers: reward `exact_match`, reward `is_short`, loss "
            "`dr_grpo`, ratio of sequences, 4 answers to each prompt, beta 0.1.") in " ".join(card.split())
    told = ModelCard(card).data
    assert told.tags == ["lmmods", "reinforcement-learning", "grpo"]
    assert {(r.metric_type, r.metric_value) for r in told.eval_results} == {("reward", 0.5), ("pass@8", 0.75)}


def test_names_are_texts_in_yaml_1_2(run):
    """The hub's parser reads 1e-4 as a number, PyYAML as text."""
    card = model_card(run({"val/loss": 1.0}, data={"init_args": {"source": "rows/1e-4.jsonl"}}), None, False,
                      "AutoModelForCausalLM")
    assert re.search(r"""name: ['"]1e-4['"]\n""", card)
    assert [result.dataset_name for result in ModelCard(card).data.eval_results] == ["1e-4"]


def test_a_chat_is_shown_as_it_was_trained(run):
    folder = run(data={"init_args": {"system_prompt": "Be kind.", "chat_template_kwargs": {"enable_thinking": False}}})
    card = model_card(folder, None, False, "AutoModelForCausalLM", is_chat=True)
    assert "[{'role': 'system', 'content': 'Be kind.'}, {'role': 'user', 'content': 'Hello!'}]" in card
    assert "return_tensors=\"pt\", **{'enable_thinking': False})" in card
    assert "apply_chat_template" not in model_card(folder, None, False, "AutoModelForCausalLM")


NASTY = ("<script>alert(1)</script>\n```\n<script>\n````\n# Mine\r\r</code></pre><script>\r[x]](javascript:alert(1)) "
         "`a`` <img src=x onerror=alert(1)> \u2028<script>")


def rendered(markdown: str) -> tuple[list[str], list[str]]:
    """Tags of a page and texts of its blocks of code, by a reader of Markdown that passes HTML on."""
    page = pytest.importorskip("markdown_it").MarkdownIt("commonmark", {"html": True}).enable("table").render(markdown)
    return re.findall(r"<(\w+)", page), [html.unescape(text) for text in re.findall(
        r"<pre><code.*?>(.*?)</code></pre>", page, re.DOTALL)]


def test_nothing_that_a_run_says_is_markup(run):
    data = {"init_args": {"system_prompt": NASTY, "source": NASTY}}
    metrics = {"val/loss": 1.0, f"eval/{NASTY}": 2.0}
    model = {"class_path": "Preference", "init_args": {"loss": NASTY}}
    plain, folder = run({"val/loss": 1.0}, data={}, model={"class_path": "Preference"}), None
    tags, _ = rendered(model_card(plain, "base", True, "AutoModelForCausalLM", True).split("---\n", 2)[2])
    folder = run(metrics, data=data, samples={"prompts": [NASTY]}, model=model)
    source = REPORT["sources"]["someone/rows"]
    write_json(folder.data_report, {**REPORT, "sources": {NASTY.replace("/", "|"): source}})
    found, blocks = rendered(model_card(folder, NASTY, True, "AutoModelForCausalLM", True).split("---\n", 2)[2])
    assert set(found) == set(tags) and found.count("h1") == 1 and found.count("h2") == tags.count("h2")
    assert found.count("pre") == tags.count("pre") == len(blocks)
    assert repr(NASTY) in blocks[0] and yaml.safe_load(blocks[-1])["samples"] == {"prompts": [NASTY]}


def test_a_card_says_the_method_of_preferences(run):
    folder = run(model={"class_path": "Preference", "init_args": {"loss": "orpo", "beta": 0.3, "sft_weight": 0.5}})
    card = model_card(folder, "some/base", True, "AutoModelForCausalLM")
    assert "An adapter for `some/base`. Trained on preferences: loss `orpo`, beta 0.3, sft_weight 0.5." in card
    assert ModelCard(card).data.tags == ["lmmods", "lora", "preference-optimization", "orpo"]


def test_a_card_while_training_has_no_metrics_yet(run):
    card = model_card(run(), None, False, "AutoModelForCausalLM")
    told = ModelCard(card).data
    assert told.eval_results is None and "## Metrics" not in card
    assert "Trained from scratch" in card and told.base_model is None


def test_a_card_names_no_absolute_path_of_this_machine(run, tmp_path):
    home = str(tmp_path / "home of me")
    folder = run(model={"init_args": {"pretrained": f"{home}/models/tiny-llama"}},
                 trainer={"default_root_dir": str(tmp_path / "tiny"),
                          "logger": [{"init_args": {"save_dir": str(tmp_path / "tiny" / "logs")}}]},
                 data={"init_args": {"source": [f"{home}/a/rows.jsonl", f"zip://x.jsonl::file://{home}/z.zip"],
                                     "val_source": {"path": f"{home}/b/*.jsonl"}, "cache_dir": "~/cache"}},
                 samples={"prompts": ["/help me"]})
    source = REPORT["sources"]["someone/rows"]
    dropped = {"empty text": {"rows": 1, "first": [f"{home}/a/rows.jsonl:3"]}}
    write_json(folder.data_report, {**REPORT, "sources": {
        f"{home}/a/rows.jsonl": {**source, "dropped": dropped, "rows_read": 7}, f"{home}/b/rows.jsonl": source}})
    card = model_card(folder, f"{home}/models/tiny-llama", True, "AutoModelForCausalLM")
    assert "home of me" not in card and str(tmp_path) not in card and "~" not in card
    assert "An adapter for `tiny-llama`" in card and 'from_pretrained("tiny-llama")' in card
    assert "rows.jsonl: 7 rows read" in card and "rows.jsonl (2): 10 rows read" in card and "rows.jsonl:3" in card
    recipe = yaml.safe_load(re.findall(r"```yaml\n(.*?)```", card, re.DOTALL)[0])
    assert recipe["trainer"] == {"default_root_dir": ".", "logger": [{"init_args": {"save_dir": "logs"}}]}
    assert recipe["data"]["init_args"] == {"source": ["rows.jsonl", "zip://x.jsonl::z.zip"],
                                           "val_source": {"path": "*.jsonl"}, "cache_dir": "cache"}
    assert recipe["samples"]["prompts"] == ["/help me"]
    assert ModelCard(card).data.base_model is None


def test_a_local_base_is_no_hub_id(tmp_path):
    assert hub_id("gpt2") == "gpt2" and hub_id("org/name-1.5_b") == "org/name-1.5_b"
    for name in (None, str(tmp_path), "a/b/c", "../model", "with space", "rows.jsonl"):
        assert hub_id(name) is None


# The words under "Load" -----------------------------------------------------------------------------------------------


@pytest.fixture(scope="session")
def bert_base(tmp_path_factory, bert_folder):  # noqa: F811
    """A random BERT body with its tokenizer."""
    folder = tmp_path_factory.mktemp("base") / "bert"
    shutil.copytree(bert_folder, folder)
    torch.manual_seed(0)
    config = BertConfig(vocab_size=120, hidden_size=32, intermediate_size=48, num_hidden_layers=1,
                        num_attention_heads=2, max_position_embeddings=64)
    BertModel(config).save_pretrained(folder)
    return str(folder)


def changes_of(task: str, lora: bool, tmp_path, bert: str, llama: str, rows: str) -> dict:
    causal = task in ("SFT", "CLM")
    (tmp_path / "text.txt").write_text("\n".join(CORPUS))
    model = {"pretrained": llama if causal else bert, "lora": {"rank": 2} if lora else None}
    sources = {"SFT": {"source": rows}, "QA": {"source": squad(tmp_path), "question_max_length": 16, "stride": 16}}
    data = {"val_size": 0.2, "max_length": 64, "batch_size": 4, **sources.get(task, {
        "source": str(tmp_path / "text.txt"), "documents": "paragraph" if causal else "line"})}
    return {"model": {"class_path": task, "init_args": model}, "data": {"class_path": f"{task}Data", "init_args": data},
            "trainer__max_steps": 1, "trainer__val_check_interval": 1, "trainer__limit_val_batches": 0}


@pytest.mark.parametrize(("task", "lora"), [("SFT", True), ("CLM", False), ("MLM", True), ("MLM", False), ("QA", True),
                                            ("QA", False)])
def test_the_card_says_how_to_load_the_model(task, lora, recipe, tmp_path, bert_base, llama_folder, instructions,
                                             monkeypatch):
    changes = changes_of(task, lora, tmp_path, bert_base, str(llama_folder), str(instructions))
    assert main(["fit", *recipe(**changes)]) == 0
    folder = tmp_path / "run" / "model"
    [code] = re.findall(r"```python\n(.*?)```", (folder / "README.md").read_text(), re.DOTALL)
    monkeypatch.chdir(folder)
    if lora:  # a base that only this machine has goes by its last name: the reader puts it in place
        base = changes["model"]["init_args"]["pretrained"]
        (folder / base.rsplit("/", 1)[-1]).symlink_to(base)
    found: dict = {}
    exec(code, found)  # noqa: S102 - the point of the test
    network = found["model"].get_base_model() if lora else found["model"]
    ending = {"MLM": "ForMaskedLM", "QA": "ForQuestionAnswering"}.get(task, "ForCausalLM")
    assert type(network).__name__.endswith(ending)
    ids = torch.tensor([[3, 4, 5]])
    output = network(input_ids=ids)
    assert torch.isfinite(output.start_logits if task == "QA" else output.logits).all()
    if lora:
        adapter = json.loads((folder / "adapter_config.json").read_text())
        assert adapter["r"] == 2


def test_the_card_loads_the_text_of_a_base_with_images(recipe, tmp_path, tokenizer_folder, monkeypatch):
    tokenizer = AutoTokenizer.from_pretrained(tokenizer_folder)
    save_image_model("gemma3", tmp_path / "base", len(tokenizer))
    tokenizer.save_pretrained(tmp_path / "base")
    assert main(["fit", *recipe(model__init_args__pretrained=str(tmp_path / "base"), trainer__max_steps=1,
                                model__init_args__quantize=None, trainer__limit_val_batches=0)]) == 0
    folder = tmp_path / "run" / "model"
    [code] = re.findall(r"```python\n(.*?)```", (folder / "README.md").read_text(), re.DOTALL)
    (folder / "base").symlink_to(tmp_path / "base")
    monkeypatch.chdir(folder)
    found: dict = {}
    exec(code, found)  # noqa: S102 - the point of the test
    saved = load_file(folder / "adapter_model.safetensors")
    loaded = {name: param for name, param in found["model"].named_parameters() if "lora_" in name}
    assert {name.replace(".default", "") for name in loaded} == saved.keys()
    assert all(torch.equal(param, saved[name.replace(".default", "")]) for name, param in loaded.items())
    assert type(found["model"].get_base_model()).__name__ == "Gemma3ForCausalLM"
