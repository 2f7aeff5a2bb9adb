"""GGUF files, read by transformers' reader and, where it is installed, by llama.cpp."""

import json

import numpy as np
import pytest
import torch
from tokenizers import Regex, Tokenizer, models, pre_tokenizers, trainers
from tokenizers.pre_tokenizers import ByteLevel
from transformers import (
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    AutoTokenizer,
    PreTrainedTokenizerFast,
)
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from lmmods.cli import main
from lmmods.commands.gguf_file import LETTERS, OTHERS, SPACE, find_family, write_gguf
from lmmods.commands.gguf_projector import check_projector, write_projector
from lmmods.core.errors import UserError
from tests import vision_models
from tests.closeness import assert_as_close
from tests.conftest import TEXTS
from tests.vision_models import save_vision_model

gguf = pytest.importorskip("gguf")

SIZES = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 4, "num_attention_heads": 4,
         "num_key_value_heads": 2, "max_position_embeddings": 128, "head_dim": 32}
GEMMA = SIZES | {"sliding_window": 16, "query_pre_attn_scalar": 32}
LLAMA3 = {"rope_type": "llama3", "rope_theta": 100.0, "factor": 4.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
          "original_max_position_embeddings": 16}
FAMILIES = {
    "llama": SIZES,
    "qwen2": {key: size for key, size in SIZES.items() if key != "head_dim"} | {"tie_word_embeddings": True},
    "qwen3": SIZES | {"head_dim": 128},
    "mistral": SIZES | {"sliding_window": 64, "rope_parameters": {"rope_type": "linear", "factor": 2.0,
                                                                  "rope_theta": 50.0}},
    "smollm3": SIZES | {"no_rope_layer_interval": 4},
    "gemma": SIZES,
    "gemma2": GEMMA,
    "gemma3_text": GEMMA | {"num_hidden_layers": 7},
}
# Settings that transformers' reader does not support.
STRICT = {"llama": {"attention_bias": True, "mlp_bias": True, "rope_parameters": LLAMA3}}
PROMPTS = [*TEXTS, " lead", "  two\n\n\nthree\t\ttabs   end ", "I'LL pay 12345 a1b2", "naïve 🚀 中文"]


def train_tokenizer(kind: str) -> PreTrainedTokenizerFast:
    """Train a tokenizer on TEXTS with the pre-tokenizer of that name; `bytes` uses ByteLevel's own splitting."""
    if kind == "scores":
        return build_scored_tokenizer()
    tokenizer = Tokenizer(models.BPE(ignore_merges=kind == "llama-bpe"))
    byte_level = ByteLevel(add_prefix_space=False, use_regex=kind in ("bytes", "digits"))
    first = {"digits": pre_tokenizers.Digits(individual_digits=True)}
    for name, digits in (("llama-bpe", r"\p{N}{1,3}"), ("smaug-bpe", r"\p{N}{1,3}"), ("qwen2", r"\p{N}")):
        first[name] = pre_tokenizers.Split(Regex(LETTERS + digits + OTHERS), "isolated")
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([first[kind], byte_level]) if kind in first else byte_level
    trainer = trainers.BpeTrainer(vocab_size=400, special_tokens=["<s>", "</s>", "<|end|>"],
                                  initial_alphabet=ByteLevel.alphabet(), show_progress=False)
    tokenizer.train_from_iterator(TEXTS * 3, trainer)
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>")


def build_scored_tokenizer(leave_out: int = 0) -> PreTrainedTokenizerFast:
    """Return a tokenizer whose merges follow from the order of its tokens, as in Llama 2.

    Args:
        leave_out: Number of first merges to leave out.
    """
    special = ["<unk>", "<s>", "</s>"]
    pieces = [f"{SPACE}t", "er", "in", f"{SPACE}a", "th", f"{SPACE}th", "e ", f"{SPACE}the", "ther", "on", "io", "ion"]
    letters = sorted(set("".join(TEXTS).replace(" ", SPACE)) - {"\n"})
    names = [*special, *(f"<0x{value:02X}>" for value in range(256)), *letters, *pieces]
    vocabulary = {name: index for index, name in enumerate(names)}
    merges = [(piece[:end], piece[end:]) for piece in pieces for end in range(1, len(piece))
              if {piece[:end], piece[end:]} <= vocabulary.keys()]
    tokenizer = Tokenizer(models.BPE(vocabulary, merges[leave_out:], unk_token="<unk>", byte_fallback=True,
                                     fuse_unk=True))
    saved = json.loads(tokenizer.to_str())
    saved["normalizer"] = {"type": "Sequence", "normalizers": [
        {"type": "Prepend", "prepend": SPACE}, {"type": "Replace", "pattern": {"String": " "}, "content": SPACE}]}
    return PreTrainedTokenizerFast(tokenizer_object=Tokenizer.from_str(json.dumps(saved)), bos_token="<s>",
                                   eos_token="</s>", unk_token="<unk>")


def save_model(folder, family: str = "llama", kind: str = "digits", tokenizer=None, **changes):
    """Save a random model and its tokenizer. Its embedding has five more rows than there are tokens."""
    tokenizer = tokenizer or train_tokenizer(kind)
    tokens = {"vocab_size": len(tokenizer) + 5, "bos_token_id": tokenizer.bos_token_id,
              "eos_token_id": tokenizer.eos_token_id, "pad_token_id": None}
    config = CONFIG_MAPPING[family](**tokens | FAMILIES[family] | changes)
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            noise = torch.randn_like(parameter) * (0.1 if parameter.ndim > 1 else 0.3)
            parameter.copy_(noise + ("norm" in name and "gemma" not in family))
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return model, tokenizer


def compute_logits(model, ids):
    with torch.no_grad():
        return model(input_ids=ids).logits


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3"])
def test_transformers_reads_a_model_with_the_same_logits(family, tmp_path):
    model, tokenizer = save_model(tmp_path, family)
    ids = torch.randint(len(tokenizer), (2, 40))
    write_gguf(tmp_path, tmp_path / "model.gguf", "f32", "a model")
    read = AutoModelForCausalLM.from_pretrained(tmp_path, gguf_file="model.gguf", dtype=torch.float32).eval()
    assert torch.equal(compute_logits(read, ids), compute_logits(model, ids))


@pytest.mark.parametrize(("kind", "dtype"), [("f16", torch.float16), ("bf16", torch.bfloat16), ("q8_0", None)])
def test_matrices_are_rounded_and_vectors_stay_float32(kind, dtype, tmp_path):
    model, tokenizer = save_model(tmp_path, "qwen2", hidden_size=48, num_attention_heads=4)
    write_gguf(tmp_path, tmp_path / "model.gguf", kind, "a model")
    reader = gguf.GGUFReader(tmp_path / "model.gguf")
    tensors = {tensor.name: tensor for tensor in reader.tensors}
    assert tensors["blk.0.attn_norm.weight"].tensor_type == tensors["blk.0.attn_q.bias"].tensor_type == 0  # float32
    for name, module in (("ffn_down", model.model.layers[1].mlp.down_proj),
                         ("ffn_up", model.model.layers[1].mlp.up_proj)):
        tensor, weight = tensors[f"blk.1.{name}.weight"], module.weight.detach()
        read = torch.tensor(gguf.quants.dequantize(tensor.data, tensor.tensor_type))
        if dtype is None and name == "ffn_down":  # 96 columns: blocks of 32, rounded to 1/127 of their maximum
            scale = weight.unflatten(1, (-1, 32)).abs().amax(-1, keepdim=True) / 127
            rounding = 0.5 + 127 * 2**-11  # of the value, and of its float16 scale
            assert ((read - weight).unflatten(1, (-1, 32)).abs() <= scale * rounding).all()
            assert tensor.tensor_type.name == "Q8_0"
        else:
            assert torch.equal(read, weight.to(dtype or torch.float16).float())  # 48 columns are not a multiple of 32


def test_a_gguf_file_has_the_tokens_end_tokens_and_chat_template(tmp_path):
    _, tokenizer = save_model(tmp_path)
    tokenizer.chat_template = "{{ bos_token }}{% for m in messages %}{{ m['content'] }}{% endfor %}"
    tokenizer.save_pretrained(tmp_path)
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [2, 1]}')
    write_gguf(tmp_path, tmp_path / "model.gguf", "f32", "a model")
    fields = {name: field.contents() for name, field in gguf.GGUFReader(tmp_path / "model.gguf").fields.items()}
    assert fields["tokenizer.chat_template"] == tokenizer.chat_template
    assert fields["tokenizer.ggml.eos_token_id"] == 1 and fields["tokenizer.ggml.eot_token_id"] == 2
    assert fields["tokenizer.ggml.pre"] == "smollm" and fields["tokenizer.ggml.add_bos_token"] is False
    assert fields["tokenizer.ggml.tokens"][-5:] == [f"[PAD{len(tokenizer) + index}]" for index in range(5)]
    assert fields["tokenizer.ggml.token_type"][:4] == [gguf.TokenType.CONTROL] * 3 + [gguf.TokenType.NORMAL]


@pytest.mark.parametrize(("kind", "name"), [("bytes", "gpt-2"), ("digits", "smollm"), ("llama-bpe", "llama-bpe"),
                                            ("smaug-bpe", "smaug-bpe"), ("qwen2", "qwen2")])
def test_a_tokenizer_rebuilt_from_the_file_gives_the_same_tokens(kind, name, tmp_path):
    _, tokenizer = save_model(tmp_path, "qwen2", kind)
    write_gguf(tmp_path, tmp_path / "model.gguf", "f32", "a model")
    reader = gguf.GGUFReader(tmp_path / "model.gguf")
    assert reader.fields["tokenizer.ggml.pre"].contents() == name
    tokens, merges = (reader.fields[f"tokenizer.ggml.{key}"].contents() for key in ("tokens", "merges"))
    rebuilt = Tokenizer(models.BPE({token: index for index, token in enumerate(tokens)},
                                   [tuple(merge.split(" ")) for merge in merges], ignore_merges=name == "llama-bpe"))
    rebuilt.pre_tokenizer = tokenizer.backend_tokenizer.pre_tokenizer
    for text in PROMPTS:
        assert rebuilt.encode(text).ids == tokenizer(text)["input_ids"]


def test_token_scores_reproduce_the_merges(tmp_path):
    _, tokenizer = save_model(tmp_path, kind="scores")
    write_gguf(tmp_path, tmp_path / "model.gguf", "f32", "a model")
    reader = gguf.GGUFReader(tmp_path / "model.gguf")
    tokens, scores = (reader.fields[f"tokenizer.ggml.{key}"].contents() for key in ("tokens", "scores"))
    score = dict(zip(tokens, scores))

    def encode(text: str) -> list[str]:
        """Merge like SentencePiece: the neighbours with the highest score first, the leftmost of equals."""
        parts = list(SPACE + text.replace(" ", SPACE))
        while pairs := [(-score[a + b], index) for index, (a, b) in enumerate(zip(parts, parts[1:])) if a + b in score]:
            index = min(pairs)[1]
            parts[index:index + 2] = [parts[index] + parts[index + 1]]
        return parts

    for text in TEXTS[3:]:
        assert encode(text) == tokenizer.tokenize(text)
    assert reader.fields["tokenizer.ggml.add_space_prefix"].contents() is True


@pytest.mark.parametrize(("changes", "reason"), [
    ({"hidden_act": "gelu"}, "activation gelu"),
    ({"rope_parameters": {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10.0}}, "rope_type dynamic"),
    ({"family": "smollm3", "no_rope_layer_interval": 2}, "no_rope_layers"),
    ({"family": "gemma2", "query_pre_attn_scalar": 9}, "query_pre_attn_scalar other than 32"),
    ({"family": "gemma3_text", "layer_types": ["full_attention"] * 7}, "layer_types"),
    ({"family": "qwen3", "attention_bias": True}, "weight model.layers.0.self_attn.o_proj.bias")])
def test_a_model_that_llama_cpp_computes_differently_is_rejected(changes, reason, tmp_path):
    save_model(tmp_path, **{"family": "llama"} | changes)
    with pytest.raises(UserError, match=f"does not support this model's {reason}.*convert_hf_to_gguf.py"):
        write_gguf(tmp_path, tmp_path / "model.gguf", "f32", "a model")


def test_a_tokenizer_that_llama_cpp_splits_differently_is_rejected(tmp_path):
    def assert_rejected(tokenizer, reason):
        save_model(tmp_path, tokenizer=tokenizer)
        with pytest.raises(UserError, match=reason):
            write_gguf(tmp_path, tmp_path / "model.gguf", "f32", "a model")

    assert_rejected(build_scored_tokenizer(leave_out=1), "merges cannot be expressed as token scores")
    punctuated = train_tokenizer("bytes")
    punctuated.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence([
        pre_tokenizers.Punctuation(), ByteLevel(False)])
    assert_rejected(punctuated, "pre_tokenizer")
    stripping = train_tokenizer("bytes")
    saved = json.loads(stripping.backend_tokenizer.to_str())
    saved["added_tokens"][2]["rstrip"] = True
    assert_rejected(PreTrainedTokenizerFast(tokenizer_object=Tokenizer.from_str(json.dumps(saved))), r"token <\|end\|>")


def test_a_tokenizer_without_tokenizer_json_is_rejected(tmp_path):
    save_model(tmp_path)
    (tmp_path / "tokenizer.json").unlink()
    with pytest.raises(UserError, match="does not support this model's tokenizer, which is not saved as tokenizer."):
        write_gguf(tmp_path, tmp_path / "model.gguf", "f32", "a model")


def test_weights_beyond_float16_are_rejected(tmp_path):
    model, _ = save_model(tmp_path)
    with torch.no_grad():
        model.model.layers[0].mlp.up_proj.weight[0, 0] = 7e4
    model.save_pretrained(tmp_path)
    with pytest.raises(UserError, match="up_proj.weight has weights above 65504"):
        write_gguf(tmp_path, tmp_path / "model.gguf", "f16", "a model")


def test_an_unsupported_architecture_is_rejected_by_name():
    with pytest.raises(UserError, match="GPT2LMHeadModel is not one of LlamaForCausalLM, .*convert_hf_to_gguf.py"):
        find_family(CONFIG_MAPPING["gpt2"]())


# Models with images: the projector is a second file ------------------------------------------------------------------

SIGLIP = {"patch_embd": "embeddings.patch_embedding", "position_embd": "embeddings.position_embedding",
          "post_ln": "post_layernorm", **{f"blk.0.{name}": f"encoder.layers.0.{module}" for name, module in {
              "attn_q": "self_attn.q_proj", "attn_k": "self_attn.k_proj", "attn_v": "self_attn.v_proj",
              "attn_out": "self_attn.out_proj", "ln1": "layer_norm1", "ln2": "layer_norm2", "ffn_up": "mlp.fc1",
              "ffn_down": "mlp.fc2"}.items()}}


@pytest.fixture(params=["idefics3", "smolvlm", "gemma3"])
def image_model(request, tmp_path, monkeypatch):
    """Save a model with images; return its network and its folder."""
    gemma = vision_models.FAMILIES["gemma3"]
    text = gemma["config"]["text_config"] | {"layer_types": ["sliding_attention"] * 2, "query_pre_attn_scalar": 8}
    monkeypatch.setitem(vision_models.FAMILIES, "gemma3", gemma | {"config": gemma["config"] | {"text_config": text}})
    save_vision_model(request.param, tmp_path)
    return AutoModelForImageTextToText.from_pretrained(tmp_path).eval(), tmp_path


def test_a_projector_has_the_weights_that_are_not_of_the_language_model(image_model):
    model, folder = image_model
    write_projector(folder, folder / "mmproj.gguf", "f32", "a model")
    reader = gguf.GGUFReader(folder / "mmproj.gguf")
    tensors = {tensor.name: torch.tensor(tensor.data) for tensor in reader.tensors}
    is_gemma = model.config.model_type == "gemma3"
    tower = dict((model.model.vision_tower if is_gemma else model.model.vision_model).named_parameters())
    expected = {f"v.{name}.{kind}": tower[f"{module}.{kind}"] for name, module in SIGLIP.items()
                for kind in ("weight", "bias") if f"{module}.{kind}" in tower}
    if is_gemma:
        projector = model.model.multi_modal_projector
        expected |= {"mm.input_projection.weight": projector.mm_input_projection_weight,
                     "mm.soft_emb_norm.weight": 1 + projector.mm_soft_emb_norm.weight}
    else:
        expected["mm.model.fc.weight"] = model.model.connector.modality_projection.proj.weight
    assert tensors.keys() == expected.keys()
    for name, value in expected.items():
        assert torch.equal(tensors[name], value.detach()), name
    fields = {name: field.contents() for name, field in reader.fields.items()}
    assert fields["clip.projector_type"] == ("gemma3" if is_gemma else "idefics3")
    assert fields["clip.vision.projector.scale_factor"] == (1 if is_gemma else 2)


@pytest.mark.parametrize("image_model", ["idefics3", "smolvlm"], indirect=True)
def test_a_language_model_of_a_model_with_images_has_the_same_logits(image_model):
    model, folder = image_model
    write_gguf(folder, folder / "model.gguf", "f32", "a model")
    read = AutoModelForCausalLM.from_pretrained(folder, gguf_file="model.gguf", dtype=torch.float32).eval()
    ids = torch.randint(20, (2, 30))
    assert torch.equal(compute_logits(read, ids), compute_logits(model, ids))


@pytest.mark.parametrize("image_model", ["gemma3"], indirect=True)
def test_a_language_model_has_the_same_file_with_and_without_images(image_model):
    """transformers does not read Gemma 3's files."""
    model, folder = image_model
    text = AutoModelForCausalLM.from_config(model.config.get_text_config())
    text.model.load_state_dict(model.model.language_model.state_dict())
    text.save_pretrained(folder / "text")
    AutoTokenizer.from_pretrained(folder).save_pretrained(folder / "text")
    readers = []
    for saved in (folder, folder / "text"):
        write_gguf(saved, saved / "model.gguf", "f32", "a model")
        readers.append(gguf.GGUFReader(saved / "model.gguf"))
    fields, tensors = ([{field.name: field.contents() for field in reader.fields.values()} for reader in readers],
                       [{tensor.name: tensor.data for tensor in reader.tensors} for reader in readers])
    assert fields[0] == fields[1] and tensors[0].keys() == tensors[1].keys()
    assert all(np.array_equal(data, tensors[1][name]) for name, data in tensors[0].items())


@pytest.mark.parametrize(("changes", "reason"), [
    ({"do_image_splitting": False}, "image processor with do_image_splitting False instead of True"),
    ({"resample": 2}, "image processor with resample 2 instead of 1"),
    ({"size": {"longest_edge": 16}}, "image processor with size.longest_edge 16, not above 16")])
def test_images_that_llama_cpp_prepares_differently_are_rejected(changes, reason, tmp_path):
    save_vision_model("smolvlm", tmp_path)
    path = tmp_path / "preprocessor_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))
    with pytest.raises(UserError, match=f"does not support this model's {reason}. Remove --gguf"):
        write_projector(tmp_path, tmp_path / "mmproj.gguf", "f32", "a model")


def test_an_unsupported_projector_is_rejected_by_its_type():
    find_family(CONFIG_MAPPING["llava_onevision"]())
    with pytest.raises(UserError, match="type llava_onevision is not supported, only idefics3, smolvlm, gemma3"):
        check_projector("llava_onevision")


# llama.cpp -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", FAMILIES)
def test_llama_cpp_computes_the_same_logits(family, tmp_path):
    llama_cpp = pytest.importorskip("llama_cpp")
    model, tokenizer = save_model(tmp_path, family, **STRICT.get(family, {}))
    ids = torch.randint(len(tokenizer), (1, 40))
    write_gguf(tmp_path, tmp_path / "model.gguf", "f32", "a model")
    reader = llama_cpp.Llama(str(tmp_path / "model.gguf"), n_ctx=64, logits_all=True, verbose=False, n_threads=1,
                             type_k=0, type_v=0)  # float32
    reader.eval(ids[0].tolist())
    exact = compute_logits(model.double(), ids).numpy()
    if "gemma" in family:  # llama.cpp reads GELU from a float16 table
        for layer in model.model.layers:
            layer.mlp.act_fn.register_forward_pre_hook(lambda _, inputs: (inputs[0].half().float(),))
            layer.mlp.act_fn.register_forward_hook(lambda _, inputs, output: output.half().float())
    assert_as_close(np.array(reader.scores[:40])[None], compute_logits(model.float(), ids).numpy(), exact)


@pytest.mark.parametrize("kind", ["bytes", "digits", "llama-bpe", "smaug-bpe", "qwen2", "scores"])
def test_llama_cpp_finds_the_same_tokens(kind, tmp_path):
    llama_cpp = pytest.importorskip("llama_cpp")
    _, tokenizer = save_model(tmp_path, kind=kind)
    write_gguf(tmp_path, tmp_path / "model.gguf", "f32", "a model")
    reader = llama_cpp.Llama(str(tmp_path / "model.gguf"), vocab_only=True, verbose=False)
    for text in [*PROMPTS, "</s>Hi </s> there"]:
        assert reader.tokenize(text.encode(), add_bos=True, special=True) == tokenizer(text)["input_ids"]


@pytest.mark.slow
def test_merge_writes_a_gguf_file_with_the_same_logits(finished, tmp_path, capsys):
    run = finished(model__init_args__quantize=None, model__init_args__lora={"rank": 4})
    out = tmp_path / "out"
    assert main(["merge", "--run", str(run.root), "--out", str(out), "--gguf", "f32"]) == 0
    assert f"llama.cpp     llama-server -m {out}/model.gguf" in capsys.readouterr().out
    assert (out / "Modelfile").read_text().startswith("FROM ./model.gguf\n")
    ids = torch.randint(len(AutoTokenizer.from_pretrained(out)), (2, 20))
    read = AutoModelForCausalLM.from_pretrained(out, gguf_file="model.gguf", dtype=torch.float32)
    assert torch.equal(compute_logits(read, ids), compute_logits(AutoModelForCausalLM.from_pretrained(out), ids))


@pytest.mark.slow
def test_merge_converts_a_full_fine_tuning_run_with_gguf_only(finished, tmp_path, capsys):
    run = finished(model__init_args__quantize=None, model__init_args__lora=None)
    out = tmp_path / "out"
    assert main(["merge", "--run", str(run.root), "--out", str(out)]) == 2
    assert main(["merge", "--run", str(run.root), "--out", str(out), "--gguf", "f32", "--dtype", "bfloat16"]) == 2
    error = capsys.readouterr().err
    assert "--gguf converts it" in error and "Remove --base, --dtype, --threshold and --force" in error
    assert not out.exists()
    assert main(["merge", "--run", str(run.root), "--out", str(out), "--gguf", "f32"]) == 0
    ids = torch.randint(len(AutoTokenizer.from_pretrained(out)), (2, 20))
    read = AutoModelForCausalLM.from_pretrained(out, gguf_file="model.gguf", dtype=torch.float32)
    expected = AutoModelForCausalLM.from_pretrained(run.model, dtype=torch.float32)
    assert torch.equal(compute_logits(read, ids), compute_logits(expected, ids))
    assert (out / "Modelfile").read_text().startswith("FROM ./model.gguf\n")
