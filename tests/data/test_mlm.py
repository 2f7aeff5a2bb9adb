"""MLMData: mask fractions, fixed masks in evaluation, new ones in each epoch, the same after a resume."""

import numpy as np
import pytest
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers

from lmmods.core.errors import UserError
from lmmods.data.mlm import Masker, MLMData
from tests.data.conftest import CORPUS

LINE = "The quick brown fox jumps over the lazy dog, again and again."
TEXT = f"{LINE}\n" * 30


@pytest.fixture(scope="session")
def bert_folder(tmp_path_factory):
    """WordPiece tokenizer with [CLS] and [SEP]."""
    tokenizer = Tokenizer(models.WordPiece(unk_token="[UNK]"))
    tokenizer.normalizer = normalizers.BertNormalizer()
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    specials = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
    tokenizer.train_from_iterator(
        CORPUS, trainers.WordPieceTrainer(vocab_size=120, special_tokens=specials, show_progress=False)
    )
    tokenizer.decoder = decoders.WordPiece()
    tokenizer.post_processor = processors.BertProcessing(("[SEP]", 3), ("[CLS]", 2))
    folder = tmp_path_factory.mktemp("bert")
    tokenizer.save(str(folder / "tokenizer.json"))
    return str(folder)


def build(folder, tmp_path, **fields):
    (tmp_path / "a.txt").write_text(TEXT)
    data = MLMData(
        str(tmp_path / "a.txt"),
        tokenizer=folder,
        documents="line",
        **{"max_length": 32, "batch_size": 4, "val_size": 0.2, **fields},
    )
    data.setup("fit")
    return data


def test_mask_fractions_are_within_three_sigma():
    special = np.arange(1000) < 5
    masker = Masker(4, special, np.zeros(1000, bool), 0.15, False)
    ids = np.random.default_rng(1).integers(5, 1000, 200_000)
    masked, labels = masker(ids, np.random.default_rng(0))
    is_target = labels != -100
    count = is_target.sum()
    for result, fraction, total in (
        (count, 0.15, len(ids)),
        ((masked[is_target] == 4).sum(), 0.8, count),
        ((masked[is_target] == ids[is_target]).sum(), 0.1 + 0.1 / 995, count),
    ):
        assert abs(result - fraction * total) < 3 * np.sqrt(total * fraction * (1 - fraction))


@pytest.mark.parametrize("join", [True, False])
def test_rows_have_cls_and_sep_and_no_token_is_lost(join, bert_folder, tmp_path):
    data = build(bert_folder, tmp_path, join=join)
    items = data.items("train")
    original = [
        np.where(row["labels"] != -100, row["labels"], row["input_ids"])
        for row in map(items.__getitem__, range(len(items)))
    ]
    assert all(ids[0] == 2 and ids[-1] == 3 and len(ids) <= 32 for ids in original)
    text = data.tokenizer.decode(np.concatenate(original), skip_special_tokens=True).replace(" ", "")
    assert text == LINE.replace(" ", "").lower() * 24


def test_evaluation_masks_are_fixed_and_training_masks_are_not(bert_folder, tmp_path):
    data = build(bert_folder, tmp_path)
    first, second = ([b["input_ids"].tolist() for b in data.val_dataloader()] for _ in range(2))
    assert first == second
    other = build(bert_folder, tmp_path, eval_batch_size=1)
    rows = sorted(sum(map(sum, b["input_ids"].tolist()), 0) for b in other.val_dataloader())
    assert len(rows) == sum(map(len, first))
    loader = data.train_batches()
    epochs = [sorted(row for b in loader for row in b["labels"].flatten().tolist() if row != -100) for _ in range(2)]
    assert epochs[0] != epochs[1]


def test_a_resumed_run_has_the_same_masks(bert_folder, tmp_path):
    full = [
        b["input_ids"].tolist()
        for loader in [build(bert_folder, tmp_path).train_batches()]
        for _ in range(2)
        for b in loader
    ]
    half = build(bert_folder, tmp_path).train_batches()
    batches = iter(half)
    for _ in range(3):
        next(batches)
    data = build(bert_folder, tmp_path)
    data.load_state_dict(half.state_dict())
    loader = data.train_batches()
    assert [b["input_ids"].tolist() for _ in range(2) for b in loader][: len(full) - 3] == full[3:]


def test_only_mask_is_a_special_token_in_predicted_texts(bert_folder, tmp_path):
    (tmp_path / "ask.jsonl").write_text('{"text": "the quick [MASK] fox [SEP]"}\n')
    data = build(bert_folder, tmp_path, predict_source=str(tmp_path / "ask.jsonl"))
    ids = next(iter(data.predict_dataloader()))["input_ids"][0].tolist()
    assert ids.count(4) == 1 and ids.count(3) == 1 and ids[0] == 2


def test_a_tokenizer_without_a_mask_token_is_rejected(spm_folder, tmp_path):
    with pytest.raises(UserError, match="no mask token"):
        build(spm_folder, tmp_path)


def test_a_missing_padding_token_is_added_and_reported(byte_level_folder):
    data = MLMData("x", tokenizer=byte_level_folder)
    size = len(data.tokenizer)
    assert data.tokenizer.pad_token == "[PAD]" and not data.trainable_new_tokens
    result = data._tokenizer.loaded
    assert result.new_tokens == [size - 1] and result.notes == [
        f"pad_token [PAD] is new: the vocabulary grows from {size - 1} to {size}"]
