"""The model card of every task: its code loads the model, and the hub's reader parses its metadata."""

import html
import json
import re
import shutil

import pytest
import torch
import yaml
from huggingface_hub import ModelCard
from safetensors.torch import load_file
from transformers import AutoTokenizer, BertConfig, BertForMaskedLM, BertModel

from lmmods.cli import main
from lmmods.recipe.classes import declared
from lmmods.runs.folder import RunFolder, write_json, write_text
from lmmods.runs.model_card import build_card
from lmmods.runs.published_paths import hub_id
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
    """A function that writes the files that a card is built from."""
    def write(metrics: dict | None = None, **recipe) -> RunFolder:
        folder = RunFolder(tmp_path / "tiny")
        write_json(folder.data_report, REPORT)
        if metrics is not None:
            write_json(folder.metrics_json, metrics)
        if recipe:
            write_text(folder.config, yaml.safe_dump(recipe))
        return folder

    return write


def test_the_hub_parses_the_metadata_of_a_card(run):
    metrics = {"val/f1": 88.5, "val/exact_match": 81.0, "val/loss": float("nan"), "test/f1": 87.0, "train/loss": 1.0}
    folder = run(metrics,
                 model={"init_args": {"revision": "v1", "quantize": "nf4"}}, publish={"repo": "me/x", "license": "mit"},
                 data={"init_args": {"source": ["rajpurkar/squad", "my/rows.jsonl.gz", "alpaca"],
                                     "val_source": {"path": "rajpurkar/squad", "split": "validation"},
                                     "test_source": "held/out.json"}})
    card = build_card(folder, "google-bert/bert-base-uncased", True, "AutoModelForQuestionAnswering")
    metadata = ModelCard(card).data
    assert (metadata.license, metadata.library_name, metadata.pipeline_tag) == ("mit", "peft", "question-answering")
    assert metadata.base_model == "google-bert/bert-base-uncased"
    assert metadata.datasets == ["rajpurkar/squad", "tatsu-lab/alpaca"]
    assert metadata.tags == ["lmmods", "qlora"] and metadata.model_name == "tiny"
    assert {(r.task_type, r.dataset_type, r.dataset_name, r.dataset_split, r.metric_type, r.metric_value)
            for r in metadata.eval_results} == {
        ("question-answering", "rajpurkar/squad", "rajpurkar/squad", "validation", "f1", 88.5),
        ("question-answering", "rajpurkar/squad", "rajpurkar/squad", "validation", "exact_match", 81.0),
        ("question-answering", "local", "out", "test", "f1", 87.0)}
    assert "10 rows read, 9 kept" in card and "dropped 1: empty text" in card
    assert "from_pretrained(\"google-bert/bert-base-uncased\", revision='v1')" in card


def test_a_grpo_card_describes_rewards_loss_and_ratio(run):
    rewards = [{"name": "exact_match"}, {"function": "mine.is_short", "weight": 0.5}]
    folder = run({"val/reward": 0.5, "val/pass@8": 0.75},
                 data={"init_args": {"source": "me/rows", "val_source": "me/held"}},
                 model={"class_path": "GRPO", "init_args": {
                     "rewards": rewards, "loss": "dr_grpo", "ratio": "sequence", "num_generations": 4, "beta": 0.1}})
    card = build_card(folder, "me/base", False, "AutoModelForCausalLM")
    assert ("Trained by reinforcement learning on its own answers: reward `exact_match`, reward `is_short`, loss "
            "`dr_grpo`, sequence ratio, 4 answers per prompt, beta 0.1.") in " ".join(card.split())
    metadata = ModelCard(card).data
    assert metadata.tags == ["lmmods", "reinforcement-learning", "grpo"]
    assert {(r.metric_type, r.metric_value) for r in metadata.eval_results} == {("reward", 0.5), ("pass@8", 0.75)}


def test_dataset_names_stay_strings_in_yaml_1_2(run):
    """The hub's parser reads 1e-4 as a number, PyYAML as a string."""
    card = build_card(run({"val/loss": 1.0}, data={"init_args": {"source": "rows/1e-4.jsonl"}}), None, False,
                      "AutoModelForCausalLM")
    assert re.search(r"""name: ['"]1e-4['"]\n""", card)
    assert [result.dataset_name for result in ModelCard(card).data.eval_results] == ["1e-4"]


def test_the_example_chat_uses_the_system_prompt_and_template_options(run):
    folder = run(data={"init_args": {"system_prompt": "Be kind.", "chat_template_kwargs": {"enable_thinking": False}}})
    card = build_card(folder, None, False, "AutoModelForCausalLM", is_chat=True)
    assert "[{'role': 'system', 'content': 'Be kind.'}, {'role': 'user', 'content': 'Hello!'}]" in card
    assert "return_tensors=\"pt\", **{'enable_thinking': False})" in card
    assert "apply_chat_template" not in build_card(folder, None, False, "AutoModelForCausalLM")


NASTY = ("<script>alert(1)</script>\n```\n<script>\n````\n# Mine\r\r</code></pre><script>\r[x]](javascript:alert(1)) "
         "`a`` <img src=x onerror=alert(1)> \u2028<script>")


def render(markdown: str) -> tuple[list[str], list[str]]:
    """Return a page's tags and the contents of its code blocks, as rendered by a parser that passes HTML through."""
    page = pytest.importorskip("markdown_it").MarkdownIt("commonmark", {"html": True}).enable("table").render(markdown)
    return re.findall(r"<(\w+)", page), [html.unescape(text) for text in re.findall(
        r"<pre><code.*?>(.*?)</code></pre>", page, re.DOTALL)]


def test_values_from_a_run_are_escaped_in_the_card(run):
    data = {"init_args": {"system_prompt": NASTY, "source": NASTY}}
    metrics = {"val/loss": 1.0, f"eval/{NASTY}": 2.0}
    model = {"class_path": "Preference", "init_args": {"loss": NASTY}}
    plain, folder = run({"val/loss": 1.0}, data={}, model={"class_path": "Preference"}), None
    tags, _ = render(build_card(plain, "base", True, "AutoModelForCausalLM", True).split("---\n", 2)[2])
    folder = run(metrics, data=data, samples={"prompts": [NASTY]}, model=model)
    source = REPORT["sources"]["someone/rows"]
    write_json(folder.data_report, {**REPORT, "sources": {NASTY.replace("/", "|"): source}})
    nasty_tags, blocks = render(build_card(folder, NASTY, True, "AutoModelForCausalLM", True).split("---\n", 2)[2])
    assert set(nasty_tags) == set(tags) and nasty_tags.count("h1") == 1 and nasty_tags.count("h2") == tags.count("h2")
    assert nasty_tags.count("pre") == tags.count("pre") == len(blocks)
    assert repr(NASTY) in blocks[0] and yaml.safe_load(blocks[-1])["samples"] == {"prompts": [NASTY]}


def test_a_preference_card_describes_the_loss(run):
    folder = run(model={"class_path": "Preference", "init_args": {"loss": "orpo", "beta": 0.3, "sft_weight": 0.5}})
    card = build_card(folder, "some/base", True, "AutoModelForCausalLM")
    assert "An adapter for `some/base`. Trained on preferences: loss `orpo`, beta 0.3, sft_weight 0.5." in card
    assert ModelCard(card).data.tags == ["lmmods", "lora", "preference-optimization", "orpo"]


def test_a_card_written_during_training_has_no_metrics(run):
    card = build_card(run(), None, False, "AutoModelForCausalLM")
    metadata = ModelCard(card).data
    assert metadata.eval_results is None and "## Metrics" not in card
    assert "Trained from scratch" in card and metadata.base_model is None


def test_a_card_contains_no_absolute_local_path(run, tmp_path):
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
    card = build_card(folder, f"{home}/models/tiny-llama", True, "AutoModelForCausalLM")
    assert "home of me" not in card and str(tmp_path) not in card and "~" not in card
    assert "An adapter for `tiny-llama`" in card and 'from_pretrained("tiny-llama")' in card
    assert "rows.jsonl: 7 rows read" in card and "rows.jsonl (2): 10 rows read" in card and "rows.jsonl:3" in card
    recipe = yaml.safe_load(re.findall(r"```yaml\n(.*?)```", card, re.DOTALL)[0])
    assert recipe["trainer"] == {"default_root_dir": ".", "logger": [{"init_args": {"save_dir": "logs"}}]}
    assert recipe["data"]["init_args"] == {"source": ["rows.jsonl", "zip://x.jsonl::z.zip"],
                                           "val_source": {"path": "*.jsonl"}, "cache_dir": "cache"}
    assert recipe["samples"]["prompts"] == ["/help me"]
    assert ModelCard(card).data.base_model is None


def test_a_local_base_is_not_a_hub_id(tmp_path):
    assert hub_id("gpt2") == "gpt2" and hub_id("org/name-1.5_b") == "org/name-1.5_b"
    for name in (None, str(tmp_path), "a/b/c", "../model", "with space", "rows.jsonl"):
        assert hub_id(name) is None


# The code under "Load" ------------------------------------------------------------------------------------------------


@pytest.fixture(scope="session")
def bert_base(tmp_path_factory, bert_folder):  # noqa: F811
    """A random BERT with its tokenizer."""
    folder = tmp_path_factory.mktemp("base") / "bert"
    shutil.copytree(bert_folder, folder)
    torch.manual_seed(0)
    config = BertConfig(vocab_size=120, hidden_size=32, intermediate_size=48, num_hidden_layers=1,
                        num_attention_heads=2, max_position_embeddings=64)
    BertForMaskedLM(config).save_pretrained(folder)
    return str(folder)


LABELLED = {
    "SequenceClassification": [{"text": f"the {['cat', 'dog'][n % 2]}", "label": "ab"[n % 2]} for n in range(12)],
    "TokenClassification": [{"tokens": ["the", "cat", "sat"], "tags": ["O", "B-X", ["O", "B-Y"][n % 2]]}
                            for n in range(12)],
    "MultipleChoice": [{"context": "the cat", "choices": ["sat", "ran"], "answer": n % 2} for n in range(12)]}
CHATS = ("SFT", "GRPO", "Preference", "Reward")
CAUSAL = ("SFT", "CLM", "GRPO", "Preference")


def build_changes(task: str, lora: bool, tmp_path, bert: str, llama: str, rows: str, pairs: str) -> dict:
    (tmp_path / "text.txt").write_text("\n".join(CORPUS))
    (tmp_path / "labelled.jsonl").write_text("".join(json.dumps(row) + "\n" for row in LABELLED.get(task, [])))
    model = {"pretrained": llama if task in (*CAUSAL, "Reward") else bert, "lora": {"rank": 2} if lora else None,
             "optimizer": {"lr": 0.01, "schedule": "constant", "warmup": 0}}
    if task == "GRPO":
        model |= {"rewards": [{"name": "exact_match"}], "num_generations": 2, "max_new_tokens": 4}
    texts = {"source": str(tmp_path / "text.txt"), "documents": "paragraph" if task == "CLM" else "line"}
    sources = {"SFT": {"source": rows}, "GRPO": {"source": rows}, "Preference": {"source": pairs},
               "Reward": {"source": pairs}, "CLM": texts, "MLM": texts,
               "QA": {"source": squad(tmp_path), "question_max_length": 16, "stride": 16}}
    data = {"val_size": 0.2, "max_length": 256 if task in CHATS else 64, "batch_size": 4,
            **sources.get(task, {"source": str(tmp_path / "labelled.jsonl")})}
    return {"model": {"class_path": task, "init_args": model},
            "data": {"class_path": "PromptData" if task == "GRPO" else f"{task}Data", "init_args": data},
            "trainer__max_steps": 2, "trainer__val_check_interval": 1, "trainer__limit_val_batches": 0}


def run_card(folder, monkeypatch) -> dict:
    """Run a card's code in its folder, as a reader would, and return its variables."""
    [code] = re.findall(r"```python\n(.*?)```", (folder / "README.md").read_text(), re.DOTALL)
    monkeypatch.chdir(folder)
    variables: dict = {}
    exec(code, variables)  # noqa: S102 - the point of the test
    return variables


def compute_outputs(network, task: str) -> torch.Tensor:
    ids = torch.tensor([[[3, 4, 5], [3, 6, 7]]]) if task == "MultipleChoice" else torch.tensor([[3, 4, 5]])
    with torch.no_grad():
        output = network(input_ids=ids)
    return torch.stack([output.start_logits, output.end_logits]) if task == "QA" else output.logits


TASKS = [("SFT", True), ("GRPO", True), ("Preference", True), ("CLM", False), ("MLM", True), ("MLM", False),
         ("QA", True), ("QA", False), ("Reward", True), ("Reward", False), ("SequenceClassification", True),
         ("SequenceClassification", False), ("TokenClassification", True), ("MultipleChoice", True)]


def test_every_task_has_a_card_case():
    assert {task for task, _ in TASKS} == set(declared("model"))


@pytest.mark.parametrize(("task", "lora"), TASKS)
def test_the_code_of_a_card_loads_the_model(task, lora, recipe, tmp_path, bert_base, llama_folder, instructions, pairs,
                                            monkeypatch, capsys):
    """For an adapter, also the model that `merge` writes: both give the same logits and labels."""
    changes = build_changes(task, lora, tmp_path, bert_base, str(llama_folder), str(instructions), pairs)
    assert main(["fit", *recipe(**changes)]) == 0
    folder = tmp_path / "run" / "model"
    if lora:  # the card names a local base by its last part: the reader puts it next to the card
        base = changes["model"]["init_args"]["pretrained"]
        (folder / base.rsplit("/", 1)[-1]).symlink_to(base)
    capsys.readouterr()
    model = run_card(folder, monkeypatch)["model"]
    assert bool(capsys.readouterr().out) is (task in CHATS)  # prints the answer or its score
    network = model.get_base_model() if lora else model
    assert type(network).__name__.endswith(declared("model")[task].auto_class.removeprefix("AutoModel"))
    logits = compute_outputs(network, task)
    assert torch.isfinite(logits).all()
    if lora:
        assert json.loads((folder / "adapter_config.json").read_text())["r"] == 2
        assert main(["merge", "--run", str(tmp_path / "run"), "--out", str(tmp_path / "merged")]) == 0
        assert "initialised randomly" not in capsys.readouterr().out  # the adapter contains the head
        merged = run_card(tmp_path / "merged", monkeypatch)["model"]
        assert type(merged) is type(network) and merged.config.id2label == network.config.id2label
        torch.testing.assert_close(compute_outputs(merged, task), logits)


@pytest.mark.parametrize(("lora", "padding"), [(True, "<unk>"), (False, "<unk>"), (True, "</s>")])
def test_the_card_of_a_reward_model_scores_like_predict(lora, padding, recipe, tmp_path, bert_base, llama_folder,
                                                        pairs, monkeypatch, capsys):
    """Also where rows end with the padding token, which transformers would skip."""
    changes = build_changes("Reward", lora, tmp_path, bert_base, str(llama_folder), "", pairs)
    changes["data"]["init_args"]["pad_token"] = padding
    assert main(["fit", *recipe(**changes)]) == 0
    folder = tmp_path / "run" / "model"
    (folder / llama_folder.name).symlink_to(llama_folder)
    capsys.readouterr()
    variables = run_card(folder, monkeypatch)
    messages, is_unset = variables["messages"], variables["model"].config.pad_token_id is None
    assert ("## Padding" in (folder / "README.md").read_text()) is (padding == "</s>")
    assert is_unset or padding != "</s>"
    score = float(capsys.readouterr().out)
    (tmp_path / "chat.jsonl").write_text(json.dumps({"messages": messages}) + "\n")
    monkeypatch.chdir(tmp_path)
    assert main(["predict", "--config", "run/config.yaml", "--ckpt_path", "last",
                 "--data.predict_source", "chat.jsonl"]) == 0
    [row] = (tmp_path / "run" / "predictions.jsonl").read_text().splitlines()
    assert score == pytest.approx(json.loads(row)["score"], rel=1e-4)


def test_merge_initialises_a_missing_head_like_the_run(recipe, tmp_path, bert_folder):  # noqa: F811
    """A masked-LM adapter on an encoder without a head: the merged model has the run's loss."""
    base = tmp_path / "body"
    shutil.copytree(bert_folder, base)
    config = BertConfig(vocab_size=120, hidden_size=32, intermediate_size=48, num_hidden_layers=1,
                        num_attention_heads=2, max_position_embeddings=64)
    BertModel(config).save_pretrained(base)
    changes = build_changes("MLM", True, tmp_path, str(base), "", "", "") | {"trainer__limit_val_batches": 1.0}
    assert main(["fit", *recipe(**changes)]) == 0
    assert main(["merge", "--run", str(tmp_path / "run"), "--out", str(tmp_path / "merged")]) == 0
    assert main(["validate", "--config", str(tmp_path / "run" / "config.yaml"), "--model.lora", "null",
                 "--model.pretrained", str(tmp_path / "merged"), "--trainer.default_root_dir",
                 str(tmp_path / "again")]) == 0
    losses = [json.loads((tmp_path / name / "metrics.json").read_text())["val/loss"] for name in ("run", "again")]
    assert losses[1] == pytest.approx(losses[0], rel=1e-6)


def test_the_card_loads_the_text_part_of_a_base_with_images(recipe, tmp_path, tokenizer_folder, monkeypatch):
    tokenizer = AutoTokenizer.from_pretrained(tokenizer_folder)
    save_image_model("gemma3", tmp_path / "base", len(tokenizer))
    tokenizer.save_pretrained(tmp_path / "base")
    assert main(["fit", *recipe(model__init_args__pretrained=str(tmp_path / "base"), trainer__max_steps=1,
                                model__init_args__quantize=None, trainer__limit_val_batches=0)]) == 0
    folder = tmp_path / "run" / "model"
    (folder / "base").symlink_to(tmp_path / "base")
    variables = run_card(folder, monkeypatch)
    saved = load_file(folder / "adapter_model.safetensors")
    loaded = {name: param for name, param in variables["model"].named_parameters() if "lora_" in name}
    assert {name.replace(".default", "") for name in loaded} == saved.keys()
    assert all(torch.equal(param, saved[name.replace(".default", "")]) for name, param in loaded.items())
    assert type(variables["model"].get_base_model()).__name__ == "Gemma3ForCausalLM"
    assert "`AutoPeftModelForCausalLM` loads the whole base" in " ".join((folder / "README.md").read_text().split())
