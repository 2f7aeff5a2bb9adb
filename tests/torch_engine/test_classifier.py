"""Classification heads on torch: scores and losses equal transformers', and which parts train."""

import copy

import pytest
import torch
import transformers
from torch.nn import functional as F
from transformers import CONFIG_MAPPING

from lmmods.core.errors import UserError
from lmmods.core.settings import LoRA
from lmmods.torch_engine.nn.classifier import Classifier, head_modules, label_loss, reward_loss
from lmmods.torch_engine.nn.loading import load_pretrained
from lmmods.torch_engine.nn.lora import add_lora
from lmmods.torch_engine.nn.micro_batches import split_rows
from tests.closeness import assert_as_close, gradients, in_both

V, PAD, K = 61, 0, 3
ROPE = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 4,
        "num_key_value_heads": 2, "max_position_embeddings": 64, "initializer_range": 0.2}
BERT = {key: ROPE[key] for key in ROPE if key != "num_key_value_heads"}
OLD = {"n_embd": 16, "n_layer": 2, "n_head": 4, "n_positions": 64, "initializer_range": 0.2}
ENCODERS = {
    "bert": BERT, "roberta": BERT, "xlm-roberta": BERT, "electra": {**BERT, "embedding_size": 12},
    "albert": {**BERT, "embedding_size": 12}, "deberta-v2": {**BERT, "relative_attention": True,
                                                             "pos_att_type": ["p2c", "c2p"]},
    "distilbert": {"dim": 16, "hidden_dim": 24, "n_layers": 2, "n_heads": 4, "max_position_embeddings": 64,
                   "initializer_range": 0.2},
    "modernbert": {**BERT, "classifier_pooling": "mean", "cls_token_id": 1, "sep_token_id": 2},
}
DECODERS = {
    "llama": ROPE, "qwen2": ROPE, "qwen3": {**ROPE, "head_dim": 6}, "gemma": {**ROPE, "head_dim": 6},
    "gemma2": {**ROPE, "head_dim": 6}, "gemma3_text": {**ROPE, "head_dim": 6}, "mistral": ROPE, "phi3": ROPE,
    "glm4": {**ROPE, "head_dim": 8}, "starcoder2": ROPE, "smollm3": ROPE, "olmo2": ROPE, "olmo3": ROPE,
    "gpt_neox": BERT, "gpt2": OLD, "openai-gpt": OLD, "ctrl": {**OLD, "dff": 24},
}
LENGTHS = (9, 5, 12)


def make(name: str, head: str, **fields) -> torch.nn.Module:
    torch.manual_seed(0)
    tokens = {"pad_token_id": PAD, **({"bos_token_id": 1, "eos_token_id": 2} if name in DECODERS else {})}
    config = CONFIG_MAPPING[name](**{**(ENCODERS | DECODERS)[name], "vocab_size": V, **tokens, **fields})
    return getattr(transformers, f"AutoModelFor{head}").from_config(config).eval()


def rows(end: int | None = None) -> list[torch.Tensor]:
    """Return the token ids [1, T] of three texts without padding tokens; with `end`, all end in it."""
    generator = torch.Generator().manual_seed(1)
    texts = [torch.randint(3, V, (1, length), generator=generator) for length in LENGTHS]
    for ids in texts if end is not None else ():
        ids[:, -1] = end
    return texts


def padded(texts: list[torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return the texts as a batch, padded on the right."""
    longest = max(LENGTHS)
    return {"input_ids": torch.cat([F.pad(ids, (0, longest - ids.shape[1]), value=PAD) for ids in texts]),
            "attention_mask": torch.stack([(torch.arange(longest) < ids.shape[1]).long() for ids in texts])}


@pytest.mark.parametrize("name", [*ENCODERS, *DECODERS])
def test_scores_and_gradients_equal_transformers_on_single_rows(name):
    model = make(name, "SequenceClassification", num_labels=K)
    labels = torch.tensor([2, 0, 1])

    def compute(network):
        logits = Classifier(network)(padded(rows()))
        sums = label_loss(logits, labels)
        return logits, sums.total / sums.weight, gradients(network, sums.total / sums.weight)

    def compute_by_transformers(network):
        outputs = [network(input_ids=ids, labels=label.view(1)) for ids, label in zip(rows(), labels, strict=True)]
        loss = torch.stack([output.loss for output in outputs]).mean()
        return torch.cat([output.logits for output in outputs]), loss, gradients(network, loss)

    for result, reference, exact in zip(compute(model), *in_both(compute_by_transformers, model), strict=True):
        assert_as_close(result, reference, exact, terms=1024)


@pytest.mark.parametrize("name", ["llama", "gpt2", "ctrl"])
def test_a_final_padding_token_in_a_text_is_not_taken_for_padding(name):
    model = make(name, "SequenceClassification", num_labels=K)
    batch = padded(rows(end=PAD))
    alone = copy.deepcopy(model)
    alone.config.pad_token_id = None  # transformers then uses the last token; rows are passed singly
    expected = torch.cat([alone(input_ids=ids).logits for ids in rows(end=PAD)])
    torch.testing.assert_close(Classifier(model)(batch), expected, rtol=1e-4, atol=1e-5)
    assert not torch.allclose(model(**batch).logits, expected, rtol=1e-2)  # which finds the end by the padding id


@pytest.mark.parametrize("name", ["bert", "distilbert", "modernbert", "llama", "gpt2"])
def test_token_classification_losses_equal_transformers(name):
    model, batch = make(name, "TokenClassification", num_labels=K), padded(rows())
    labels = torch.where(batch["attention_mask"] > 0, batch["input_ids"] % K, -100)
    output = model(**batch, labels=labels)
    sums = label_loss(Classifier(model)(batch), labels)
    torch.testing.assert_close(sums.total / sums.weight, output.loss)


@pytest.mark.parametrize("label_type", ["single", "several", "value"])
def test_losses_equal_transformers_for_each_label_type(label_type):
    fields = {"single": ({"num_labels": K}, torch.tensor([2, 0, 1])),
              "several": ({"num_labels": K, "problem_type": "multi_label_classification"},
                          torch.tensor([[1.0, 0, 1], [0, 0, 0], [0, 1, 1]])),
              "value": ({"num_labels": 1, "problem_type": "regression"}, torch.tensor([0.5, -100.0, 3.0]))}[label_type]
    model, batch = make("bert", "SequenceClassification", **fields[0]), padded(rows())
    sums = label_loss(Classifier(model)(batch), fields[1])
    torch.testing.assert_close(sums.total / sums.weight, model(**batch, labels=fields[1]).loss)


def test_filler_rows_do_not_count():
    logits = torch.randn(2, K)
    whole = label_loss(logits[:1], torch.tensor([[1.0, 0, 1]]))
    both = label_loss(logits, torch.tensor([[1.0, 0, 1], [float("nan")] * 3]))
    assert both.total == whole.total and both.weight == whole.weight == 1
    value = label_loss(logits[:, :1], torch.tensor([1.5, float("nan")]))
    assert value.weight == 1 and value.total == (logits[0, 0] - 1.5).square()


def test_class_weights_equal_those_of_torch_losses():
    generator = torch.Generator().manual_seed(0)
    logits, weights = torch.randn(5, K, generator=generator), torch.tensor([0.5, 2.0, 1.0])
    labels = torch.tensor([0, 1, 2, 1, -100])
    sums = label_loss(logits, labels, weights)
    torch.testing.assert_close(sums.total / sums.weight, F.cross_entropy(logits, labels, weights))
    several = (torch.rand(5, K, generator=generator) > 0.5).float()
    sums = label_loss(logits, several, weights)
    expected = F.binary_cross_entropy_with_logits(logits, several, weights / weights.mean())
    torch.testing.assert_close(sums.total / sums.weight, expected)


def test_the_reward_loss_equals_trl():
    scores, margin = torch.tensor([[1.0, 0.2], [-0.3, 0.4], [5.0, 5.0]]), torch.tensor([0.5, 0.0, float("nan")])
    sums = reward_loss(scores, margin, 0.01)
    chosen, rejected = scores[:2].unbind(1)
    expected = -F.logsigmoid(chosen - rejected - margin[:2]).mean() + 0.01 * ((chosen + rejected) ** 2).mean()
    torch.testing.assert_close(sums.total / sums.weight, expected)


def test_class_labels_are_not_trimmed_like_positions():
    batch = {**padded(rows()), "labels": torch.rand(3, max(LENGTHS)).round()}
    chunks = split_rows(batch, 12)
    assert len(chunks) == 3 and all(chunk["labels"].shape[1] == max(LENGTHS) for chunk in chunks)
    assert sorted(chunk["input_ids"].shape[1] for chunk in chunks) == [8, 12, 12]


HEADS = [("bert", "SequenceClassification", ["bert.pooler", "classifier"]),
         ("bert", "TokenClassification", ["classifier"]),
         ("distilbert", "MultipleChoice", ["pre_classifier", "classifier"]),
         ("roberta", "SequenceClassification", ["classifier"]), ("llama", "SequenceClassification", ["score"])]


@pytest.mark.parametrize(("name", "head", "parts"), HEADS)
def test_the_whole_head_trains_with_an_adapter_and_peft_loads_both(name, head, parts, tmp_path):
    model = make(name, head)
    assert head_modules(model) == parts
    base = copy.deepcopy(model)
    task = {"SequenceClassification": "SEQ_CLS", "TokenClassification": "TOKEN_CLS"}.get(head)
    wrapped = add_lora(model, LoRA(rank=2, targets="all-linear"), [], torch.float32, task, 0)
    trained = [name for name, param in wrapped.named_parameters() if param.requires_grad]
    in_head = [name for name in trained if "lora_" not in name]
    expected = [name for name, _ in base.named_parameters() if any(name.startswith(f"{part}.") for part in parts)]
    names = [name.replace("base_model.model.", "").replace(".modules_to_save.default", "") for name in in_head]
    assert names == expected
    assert not any(part in name for name in trained if "lora_" in name for part in parts)
    with torch.no_grad():
        for param in wrapped.parameters():
            if param.requires_grad:
                param.add_(torch.full_like(param, 0.1))
    wrapped.save_pretrained(tmp_path)
    from peft import PeftModel

    loaded = PeftModel.from_pretrained(base, tmp_path).eval()
    batch = padded(rows())
    batch = {key: values.unsqueeze(0) for key, values in batch.items()} if head == "MultipleChoice" else batch
    torch.testing.assert_close(loaded(**batch).logits, wrapped.eval()(**batch).logits)


def test_a_head_for_other_labels_is_reinitialised_and_reported(tmp_path, capsys):
    saved = make("bert", "SequenceClassification", num_labels=5)
    saved.save_pretrained(tmp_path)
    cls = transformers.AutoModelForSequenceClassification
    model = load_pretrained(cls, str(tmp_path), overrides={"id2label": {0: "a", 1: "b"}}, seed=3)
    assert "classifier.weight" in capsys.readouterr().out
    assert model.classifier.weight.shape == (2, 16) and model.classifier.weight.std() > 0
    reloaded = load_pretrained(cls, str(tmp_path), overrides={"id2label": {0: "a", 1: "b"}}, seed=3)
    assert torch.equal(model.classifier.weight, reloaded.classifier.weight)
    # Weights that fit are loaded.
    assert torch.equal(model.bert.pooler.dense.weight, saved.bert.pooler.dense.weight)
    saved.config.hidden_size = saved.config.intermediate_size = 12
    saved.config.save_pretrained(tmp_path)
    with pytest.raises(UserError, match="lacks"):
        load_pretrained(cls, str(tmp_path))


def test_the_head_of_a_quantised_base_has_full_precision(tmp_path):
    # Checkpoints of masked LMs have no pooler.
    transformers.AutoModelForMaskedLM.from_config(make("bert", "MaskedLM").config).save_pretrained(tmp_path)
    model = load_pretrained(transformers.AutoModelForSequenceClassification, str(tmp_path), quantize="nf4", frozen=True)
    plain = {name for name, module in model.named_modules() if type(module) is torch.nn.Linear}
    assert plain == {"bert.pooler.dense", "classifier"}
