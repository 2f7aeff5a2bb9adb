"""Tiny tokenizers trained here, and a separate cache for each test. Needs no network and no files."""

import json

import pytest
from fsspec.implementations.memory import MemoryFileSystem
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

CORPUS = [
    "Below is an instruction that describes a task. Write a response that appropriately completes the request.",
    "### Instruction:\nAdd the numbers.\n\n### Input:\n12 and 30\n\n### Response:\nThe sum is 42.\n",
    "A chat between a curious user and an assistant. USER: hello ASSISTANT: hello, how are you?",
    "The quick brown fox jumps over the lazy dog, again and again; numbers 0 1 2 3 4 5 6 7 8 9.",
    "Größe, naïve, 東京 and 数字 too.",
] * 4

CHAT_TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}<|im_start|>{{ message['role'] }}\n"
    "{{ message['content'] | trim }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def train_byte_level(specials: list[str], vocab_size: int = 500) -> Tokenizer:
    """Train a byte-level BPE tokenizer without a BOS token, like GPT-2's."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=specials,
        show_progress=False,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    return tokenizer


def train_sentencepiece_like(vocab_size: int = 600) -> Tokenizer:
    """Train a tokenizer like Llama's: spaces as ▁, one before every text, byte fallback, a BOS token."""
    tokenizer = Tokenizer(models.BPE(byte_fallback=True, unk_token="<unk>"))
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    specials = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size, special_tokens=specials, show_progress=False, max_token_length=8
    )
    tokenizer.train_from_iterator([line.replace(" ", "▁") for line in CORPUS], trainer)
    # Bytes are ordinary vocabulary, not special tokens.
    state = json.loads(tokenizer.to_str())
    state["added_tokens"] = [token for token in state["added_tokens"] if token["id"] < 3]
    tokenizer = Tokenizer.from_str(json.dumps(state))
    tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    return tokenizer


@pytest.fixture(scope="session")
def byte_level_folder(tmp_path_factory):
    """Byte-level tokenizer with the same BOS and EOS token, like GPT-2's."""
    folder = tmp_path_factory.mktemp("byte_level")
    backend = train_byte_level(["<|endoftext|>"])
    PreTrainedTokenizerFast(
        tokenizer_object=backend, bos_token="<|endoftext|>", eos_token="<|endoftext|>", unk_token="<|endoftext|>"
    ).save_pretrained(folder)
    return str(folder)


@pytest.fixture(scope="session")
def spm_folder(tmp_path_factory):
    """Llama-like tokenizer as a bare tokenizer.json: no special token has a role."""
    folder = tmp_path_factory.mktemp("spm")
    train_sentencepiece_like().save(str(folder / "tokenizer.json"))
    return str(folder)


@pytest.fixture(scope="session")
def chat_folder(tmp_path_factory):
    """Byte-level tokenizer with BOS, EOS and turn tokens and a chat template."""
    folder = tmp_path_factory.mktemp("chat")
    backend = train_byte_level(["<pad>", "<s>", "</s>", "<|im_start|>", "<|im_end|>"])
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend, bos_token="<s>", eos_token="<|im_end|>", pad_token="<pad>"
    )
    tokenizer.chat_template = CHAT_TEMPLATE
    tokenizer.save_pretrained(folder)
    return str(folder)


@pytest.fixture(params=["byte_level", "spm", "chat"])
def any_folder(request):
    """Each tokenizer folder in turn."""
    return request.getfixturevalue(f"{request.param}_folder")


@pytest.fixture(autouse=True)
def _own_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("LMMODS_CACHE", str(tmp_path / "cache"))


@pytest.fixture
def alpaca_rows():
    """Rows of unequal length, with and without input."""
    rows = []
    for n in range(40):
        row = {
            "instruction": "Add the numbers. " * (1 + n % 5),
            "input": f"{n} and {n * 7}" if n % 2 else "",
            "output": f"The sum is {n * 8}." + " again" * (n % 11),
        }
        rows.append(row)
    return rows


@pytest.fixture
def write_jsonl(tmp_path):
    """A function that writes rows as JSON Lines and returns the path."""

    def write(rows, name="rows.jsonl"):
        path = tmp_path / name
        path.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows), encoding="utf-8")
        return str(path)

    return write


@pytest.fixture(autouse=True)
def no_files_left_in_memory():
    """Empty fsspec's in-memory file system, which is one for the whole process."""
    yield
    MemoryFileSystem.store.clear()
    MemoryFileSystem.pseudo_dirs[:] = [""]
