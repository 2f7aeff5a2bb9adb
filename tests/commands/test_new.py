"""`new` writes recipes that `inspect` accepts, with values that follow from the data and the memory."""

import json
import re

import pytest
import yaml

from lmmods.cli import main
from lmmods.commands.new import Machine, gpu_of, plan_memory
from lmmods.core.memory import NetworkShape, Widths
from lmmods.recipe.files import header_of

LLAMA_7B = NetworkShape(6_738_415_616, 6_476_005_376, 2_498_560, Widths(32, 4096, 11_008, 4096, 4096, 32_000),
                        32_000 * 4096)
GPT2 = NetworkShape(124_439_808, 84_934_656, 147_456, Widths(12, 768, 3072, 768, 768, 50_257, False),
                    50_257 * 768)


@pytest.fixture(scope="module")
def bert_folder(shared):
    """A small random BERT with a word tokenizer."""
    from tokenizers import Tokenizer, models, pre_tokenizers, processors
    from transformers import BertConfig, BertForMaskedLM, PreTrainedTokenizerFast

    def fill(folder):
        words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *"abcdefghij",
                 *(f"##{letter}" for letter in "abcdefghij")]
        tokenizer = Tokenizer(models.WordPiece({word: index for index, word in enumerate(words)}, unk_token="[UNK]"))
        tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
        tokenizer.post_processor = processors.BertProcessing(("[SEP]", 3), ("[CLS]", 2))
        PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="[PAD]", unk_token="[UNK]", cls_token="[CLS]",
                                sep_token="[SEP]", mask_token="[MASK]").save_pretrained(folder)
        BertForMaskedLM(BertConfig(vocab_size=len(words), hidden_size=32, intermediate_size=64, num_hidden_layers=1,
                                   num_attention_heads=2, max_position_embeddings=128)).save_pretrained(folder)

    return shared("bert", fill)


@pytest.fixture
def new_recipe(tmp_path, monkeypatch, capsys):
    """A function that runs `new` and returns its output and the recipe, or its error."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("LMMODS_CACHE", str(tmp_path / "cache"))

    def new(model, rows, *options, name="mine", ending=".jsonl"):
        path = tmp_path / f"rows{ending}"
        path.write_text(rows if isinstance(rows, str) else "".join(json.dumps(row) + "\n" for row in rows))
        status = main(["new", name, "--model", str(model), "--data", path.name, *options])
        output = capsys.readouterr()
        return (output.out, yaml.safe_load((tmp_path / f"{name}.yaml").read_text())) if status == 0 else output.err

    return new


def inspect_recipe(capsys, *options) -> str:
    assert main(["inspect", "--config", "mine.yaml", "--rows", "1", *options]) == 0, capsys.readouterr().err
    return capsys.readouterr().out


ALPACA = [{"instruction": f"Say a {n} times.", "output": "a " * (n % 50)} for n in range(200)]


def test_instructions_become_an_sft_recipe(new_recipe, llama_folder, capsys, tmp_path):
    output, recipe = new_recipe(llama_folder, ALPACA)
    assert "Wrote mine.yaml: SFT by full fine-tuning" in output
    data, model, trainer = recipe["data"], recipe["model"], recipe["trainer"]
    assert (model["class_path"], data["class_path"]) == ("SFT", "SFTData")
    options = data["init_args"]
    assert options["template"] == "alpaca" and options["val_size"] == 9 and options["max_length"] % 64 == 0
    rows_per_step = trainer["accumulate_grad_batches"] * options["batch_size"]
    assert rows_per_step == 8 and trainer["default_root_dir"] == "runs/mine"
    assert header_of(tmp_path / "mine.yaml").hardware
    inspect_output = inspect_recipe(capsys)
    # both commands estimate the memory with the same formula
    gibibytes = float(re.search(r"about ([\d.]+) GiB", output)[1])
    assert gibibytes == float(re.search(r"Memory: about ([\d.]+) GiB", inspect_output)[1])
    assert "Read" not in inspect_output and not (tmp_path / "runs").exists()
    assert yaml.safe_load((tmp_path / "mine.yaml").read_text())["data"]["init_args"]["source"] == "rows.jsonl"


@pytest.mark.parametrize(("rows", "reward"), [
    (ALPACA, {"name": "exact_match"}),
    ([{"prompt": row["instruction"], "answer": str(n)} for n, row in enumerate(ALPACA)],
     {"name": "exact_match", "column": "answer"}),
    ([{"instruction": "Say it.", "input": row["instruction"], "solution": str(n)} for n, row in enumerate(ALPACA)],
     {"name": "exact_match", "column": "solution"}),
    ([{"messages": [{"role": "user", "content": row["instruction"]}], "answer": str(n)}
      for n, row in enumerate(ALPACA)], {"name": "exact_match", "column": "answer"}),
    ([{"prompt": row["instruction"], "level": n} for n, row in enumerate(ALPACA)], {"name": "exact_match"})],
    ids=["responses", "answers", "inputs", "turns", "prompts"])
def test_grpo_recipes_choose_the_reward_from_the_columns(new_recipe, llama_folder, capsys, tmp_path, rows, reward):
    """A prompt counts as many rows of a step as it has answers; the longest prompt leaves space for an answer."""
    output, recipe = new_recipe(llama_folder, rows, "--task", "GRPO")
    data, model, trainer = recipe["data"], recipe["model"]["init_args"], recipe["trainer"]
    assert (recipe["model"]["class_path"], data["class_path"]) == ("GRPO", "PromptData")
    assert model["rewards"] == [reward] and model["num_generations"] == 8
    options = data["init_args"]
    assert "group_by_length" not in options and options["max_length"] > model["max_new_tokens"]
    # 190 of 200 rows are for training, 8 prompts per step: 24 steps
    assert trainer["accumulate_grad_batches"] * options["batch_size"] == 64 and "# about 24 steps" in (
        tmp_path / "mine.yaml").read_text()
    inspect_output = inspect_recipe(capsys)
    assert "Step: 8 prompts x 8 answers" in inspect_output
    assert "Length: 24 steps" in inspect_output and "dropped" not in inspect_output
    assert ("no known column has a right answer" in (tmp_path / "mine.yaml").read_text()) is ("level" in rows[0])


PAIRS = [{"prompt": f"Say a {n} times.", "chosen": "a " * (n + 1), "rejected": "b " * (n % 9 + 1)} for n in range(60)]
LABELLED = [{"prompt": row["prompt"], "completion": row["chosen"], "label": n % 2 == 0} for n, row in enumerate(PAIRS)]


@pytest.mark.parametrize(("rows", "loss"), [(PAIRS, "sigmoid"), (LABELLED, "kto")])
def test_pairs_and_labelled_answers_become_preference_recipes(new_recipe, llama_folder, capsys, rows, loss):
    output, recipe = new_recipe(llama_folder, rows)
    assert "Wrote mine.yaml: Preference by full fine-tuning" in output
    assert (recipe["model"]["class_path"], recipe["data"]["class_path"]) == ("Preference", "PreferenceData")
    options = recipe["model"]["init_args"]
    assert options["loss"] == loss and options["optimizer"]["lr"] == 1e-5  # ten times the rate of large models
    gibibytes = float(re.search(r"about ([\d.]+) GiB", output)[1])
    assert gibibytes == float(re.search(r"Memory: about ([\d.]+) GiB", inspect_recipe(capsys))[1])
    assert new_recipe(llama_folder, rows, "--task", "SFT", "--overwrite", "true")[1]["model"]["class_path"] == "SFT"


def test_max_length_follows_the_95th_percentile_of_the_rows(new_recipe, llama_folder):
    """24 of 25 rows are short: max_length follows them, and the comment reports the fraction of dropped rows."""
    rows = [{"prompt": "x", "completion": "y" * (200 if n % 25 == 0 else 20)} for n in range(250)]
    output, recipe = new_recipe(llama_folder, rows)
    assert recipe["data"]["init_args"]["max_length"] == 192 or recipe["data"]["init_args"]["max_length"] == 128
    text = open("mine.yaml").read()
    [length, percent_dropped] = re.search(r"95 % of the rows have at most (\d+) tokens.*drops ([\d.]+)%", text).groups()
    assert int(length) <= recipe["data"]["init_args"]["max_length"] and float(percent_dropped) == 4.0
    assert "dropped 10" in output


def test_chats_use_the_chat_template_of_the_tokenizer(new_recipe, llama_folder, tmp_path, capsys):
    import shutil

    model = shutil.copytree(llama_folder, tmp_path / "chat")
    path = model / "tokenizer_config.json"
    template = ("{% for m in messages %}<s>{{ m.role }}\n{{ m.content }}</s>{% endfor %}"
                "{% if add_generation_prompt %}<s>assistant\n{% endif %}")
    path.write_text(json.dumps(json.loads(path.read_text()) | {"chat_template": template}))
    turns = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello"}]
    _, recipe = new_recipe(model, [{"messages": turns}] * 4)
    options = recipe["data"]["init_args"]
    assert "template" not in options and options["max_length"] == 64 and options["val_size"] == 0
    assert "val_check_interval" not in recipe["trainer"] and "too few" in open("mine.yaml").read()
    inspect_recipe(capsys)


def test_texts_become_a_clm_or_mlm_recipe(new_recipe, llama_folder, bert_folder, capsys):
    text = "\n\n".join(["a b c d e f g h i j " * 12] * 40)
    output, recipe = new_recipe(llama_folder, text, ending=".txt")
    options = recipe["data"]["init_args"]
    assert recipe["model"]["class_path"] == "CLM" and options["documents"] == "paragraph" and options["val_size"] == 2
    assert options["max_length"] in (64, 128, 256)
    inspect_recipe(capsys)
    output, recipe = new_recipe(bert_folder, [{"text": "a b c " * 9}] * 30, "--overwrite", "true")
    options = recipe["data"]["init_args"]
    assert recipe["model"]["class_path"] == "MLM" and "documents" not in options
    assert recipe["model"]["init_args"]["optimizer"]["lr"] == 5e-5  # the rate for encoders of any size
    inspect_recipe(capsys)


def test_questions_become_a_qa_recipe(new_recipe, bert_folder, capsys):
    questions = [{"id": str(n), "question": "a b", "answers": [] if n % 2 else [{"text": "d", "answer_start": 6}],
                  "is_impossible": bool(n % 2)} for n in range(24)]
    squad = {"data": [{"title": "t", "paragraphs": [{"context": "a b c d e f " * 3, "qas": questions}]}]}
    output, recipe = new_recipe(bert_folder, json.dumps(squad), ending=".json")
    options = recipe["data"]["init_args"]
    assert recipe["model"]["class_path"] == "QA" and options["version_2_with_negative"] is True
    assert options["max_length"] == 64 and options["stride"] < 64
    assert recipe["model"]["init_args"]["optimizer"]["lr"] == 3e-5
    inspect_recipe(capsys)


TEXTS = [{"text": f"a {'b c'[n % 2]} d", "label": ["bad", "good"][n % 2]} for n in range(40)]
TAGGED = [{"tokens": ["a", "b", "c"], "ner_tags": ["B-X", "O", ["O", "B-Y"][n % 2]]} for n in range(40)]
CHOICES = [{"context": "a b", "choices": ["c", "d", "e", "f"][:2 + n % 3], "answer": n % 2} for n in range(40)]


@pytest.mark.parametrize("engine", ["torch", pytest.param("jax", marks=pytest.mark.slow)])
@pytest.mark.parametrize(("task", "rows", "network"), [
    ("SequenceClassification", TEXTS, "bert"), ("SequenceClassification", TEXTS, "llama"),
    ("TokenClassification", TAGGED, "bert"), ("TokenClassification", TAGGED, "llama"),
    ("MultipleChoice", CHOICES, "bert"), ("Reward", PAIRS, "bert"), ("Reward", PAIRS, "llama")])
def test_recipes_for_tasks_with_a_head_are_recognised_and_trained(new_recipe, bert_folder, llama_folder, capsys, task,
                                                                  rows, network, engine):
    """On encoders and decoders, the task is recognised, estimated as in `inspect`, and trained."""
    # The default task for pairs on a decoder is Preference.
    task_option = ("--task", task) if (task, network) == ("Reward", "llama") else ()
    output, recipe = new_recipe({"bert": bert_folder, "llama": llama_folder}[network], rows, *task_option)
    options = recipe["data"]["init_args"]
    assert recipe["model"]["class_path"] == task and recipe["data"]["class_path"] == f"{task}Data"
    assert options.get("template") == ("alpaca" if task == "Reward" else None)
    if engine == "torch":
        gibibytes = float(re.search(r"about ([\d.]+) GiB", output)[1])
        assert gibibytes == float(re.search(r"Memory: about ([\d.]+) GiB", inspect_recipe(capsys))[1])
    assert main(["fit", "--config", "mine.yaml", "--engine", engine, "--trainer.max_steps", "3",
                 "--trainer.val_check_interval", "3", "--trainer.accelerator", "cpu"]) == 0, capsys.readouterr().err
    assert "val/loss" in capsys.readouterr().out


def test_multiple_choice_needs_an_encoder(new_recipe, llama_folder):
    assert "no ForMultipleChoice network of type llama" in new_recipe(llama_folder, CHOICES)


def test_columns_task_and_memory_can_be_set(new_recipe, llama_folder, capsys):
    rows = [{"q": "what", "a": "that " * n} for n in range(30)]
    output = new_recipe(llama_folder, rows)
    assert "--columns, for example {your_column: instruction}, " in output
    assert "new cannot set data.dataset_format." in output
    output = new_recipe(llama_folder, rows, "--task", "CLM")
    assert "Map yours with --columns, for example {your_column: text}" in output
    output, recipe = new_recipe(llama_folder, rows, "--columns", "{q: instruction, a: output}", "--memory", "0.0005")
    assert recipe["data"]["init_args"]["columns"] == {"q": "instruction", "a": "output"}
    assert recipe["model"]["init_args"]["gradient_checkpointing"] is True
    assert "GiB (--memory)" in open("mine.yaml").read() and "warning: a step needs about" in output
    inspect_recipe(capsys)
    output, recipe = new_recipe(llama_folder, rows, "--columns", "{a: text}", "--task", "CLM", "--overwrite", "true")
    assert recipe["model"]["class_path"] == "CLM"
    inspect_recipe(capsys)


@pytest.mark.parametrize(("options", "message"), [
    ((), "already exists"), (("--overwrite", "true", "--memory", "0"), "--memory is 0"),
    (("--overwrite", "true", "--task", "MLM"), "needs an encoder"),
    (("--overwrite", "true", "--task", "QA"), "no column 'question'"),
    (("--overwrite", "true", "--task", "Chat"), "task")])
def test_a_rejected_command_overwrites_nothing(new_recipe, llama_folder, tmp_path, options, message):
    (tmp_path / "mine.yaml").write_text("kept: 1")
    assert message in new_recipe(llama_folder, ALPACA, *options)
    assert (tmp_path / "mine.yaml").read_text() == "kept: 1"
    assert sorted(path.name for path in tmp_path.iterdir() if path.is_file()) == ["mine.yaml", "rows.jsonl"]


def test_mistakes_in_data_model_or_name_are_errors(new_recipe, llama_folder, bert_folder):
    assert "rows.jsonl:1: " in new_recipe(llama_folder, "{broken\n")
    assert "has no usable row" in new_recipe(llama_folder, "")
    assert "there is no folder 'no/model'" in new_recipe("no/model", ALPACA)
    assert "an encoder" in new_recipe(bert_folder, ALPACA)
    assert "this is not a recipe name" in new_recipe(llama_folder, ALPACA, name=".yaml")


def test_a_missing_tokenizer_or_end_token_can_be_set_by_an_option(new_recipe, llama_folder, tmp_path, capsys):
    """The options that the errors recommend work, and are in the recipe."""
    import shutil

    bare = shutil.copytree(llama_folder, tmp_path / "bare", ignore=lambda _, names: [
        name for name in names if "token" in name and "config" not in name or name == "tokenizer_config.json"])
    assert "Set --tokenizer to a folder" in new_recipe(bare, ALPACA)
    _, recipe = new_recipe(bare, ALPACA, "--tokenizer", str(llama_folder))
    assert recipe["data"]["init_args"]["tokenizer"] == str(llama_folder)
    inspect_recipe(capsys)
    endless = shutil.copytree(llama_folder, tmp_path / "endless")
    for name in ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json"):
        if (path := endless / name).exists():
            path.write_text(path.read_text().replace("</s>", "<end>").replace('"eos_token"', '"left_out"'))
    texts = [{"text": "a b c d " * 9}] * 30
    assert "Set --eos_token" in new_recipe(endless, texts, "--overwrite", "true")
    _, recipe = new_recipe(endless, texts, "--eos_token", "<end>", "--overwrite", "true")
    assert recipe["data"]["init_args"]["eos_token"] == "<end>"
    inspect_recipe(capsys)


def test_a_file_name_with_yaml_characters_stays_a_string(new_recipe, llama_folder, tmp_path, capsys):
    rows = "".join(json.dumps(row) + "\n" for row in ALPACA[:12])
    (tmp_path / "a: {b}\n# c.jsonl").write_text(rows)
    assert main(["new", "mine", "--model", str(llama_folder), "--data", "a: {b}\n# c.jsonl"]) == 0
    assert yaml.safe_load((tmp_path / "mine.yaml").read_text())["data"]["init_args"]["source"] == "a: {b}\n# c.jsonl"


# Memory -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("shape", "memory", "lora", "quantize", "fits"), [
    (GPT2, 24, False, False, True), (LLAMA_7B, 80, True, False, True), (LLAMA_7B, 12, True, True, True),
    (LLAMA_7B, 3, True, True, False), (GPT2, 1, True, False, True)])
def test_the_memory_decides_between_full_fine_tuning_lora_and_qlora(shape, memory, lora, quantize, fits):
    plan = plan_memory(shape, gpu_of(memory), 512, 16, is_quantized=False)
    assert (plan.lora, plan.quantize, plan.fits) == (lora, quantize, fits)
    assert (plan.needed <= 0.8 * memory * 2**30) is fits


def test_memory_counts_sequences_per_row_and_the_reference_model():
    """Four choices need as much memory as four rows; a reference model is another copy of the weights."""
    alone, choices, with_reference = (
        plan_memory(GPT2, gpu_of(80), 128, size, False, sequences, has_reference)
        for size, sequences, has_reference in ((16, 1, False), (4, 4, False), (16, 1, True)))
    assert alone.memory == choices.memory and choices.batch_size == 4
    assert with_reference.needed - alone.needed == pytest.approx(4 * GPT2.num_params, rel=0.01)


def test_a_comment_says_why_a_micro_batch_has_its_size(new_recipe, llama_folder):
    """A tiny model fits all rows of a step; with less memory the comment says why there are fewer."""
    def plan_rows(*options):
        _, recipe = new_recipe(llama_folder, ALPACA, *options, "--overwrite", "true")
        rows = recipe["data"]["init_args"]["batch_size"]
        [comment] = re.findall(r"# (rows per micro-batch.*)", open("mine.yaml").read())
        return rows, rows * recipe["trainer"]["accumulate_grad_batches"], comment

    rows, rows_per_step, comment = plan_rows()
    assert rows == rows_per_step and comment.endswith("the whole step")
    rows, rows_per_step, comment = plan_rows("--memory", "0.002")
    assert rows < rows_per_step and "twice as many would need more than 80% of the memory" in comment
    assert "even these need more" in plan_rows("--memory", "0.0005")[2]


def test_more_memory_never_gives_a_smaller_batch():
    plans = [plan_memory(LLAMA_7B, gpu_of(gibibytes), 1024, 16, is_quantized=True) for gibibytes in (6, 8, 12, 24, 80)]
    assert all(plan.lora and not plan.quantize for plan in plans)
    sizes = [plan.batch_size for plan in plans if plan.checkpointing]
    assert sizes == sorted(sizes) and not plans[-1].checkpointing
    machine = Machine(64 * 2**30, 4, 512, "this machine")
    assert plan_memory(GPT2, machine, 256, 32, False).batch_size == 32
