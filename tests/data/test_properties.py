"""Properties that hold for any text and any lengths: no token lost or added, no label misplaced, every row once."""

import itertools

import numpy as np
import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st
from transformers import AutoTokenizer

from lmmods.core.labels import IGNORED
from lmmods.data.batch.numbered import NumberedSet
from lmmods.data.batch.packing import PackedSet, best_fit_decreasing
from lmmods.data.encode.chat_renderer import ChatTemplateRenderer
from lmmods.data.encode.chat_template import MARKS
from lmmods.data.encode.conversations import Limits, SFTEncoder
from lmmods.data.encode.encoder import TextEncoder
from lmmods.data.encode.templates import TEMPLATES, TemplateRenderer
from lmmods.data.encode.tokenizer import TokenizerOptions, load_tokenizer
from lmmods.data.mlm import Masker
from lmmods.data.order.sampler import (
    PADDING_ROW,
    SORTED_TOGETHER,
    OrderRule,
    batches_of_rank,
    training_order,
)
from lmmods.data.read.conversation import Conversation

SPECIAL = [
    "<s>",
    "</s>",
    "<|im_end|>",
    "<|im_start|>",
    "<|endoftext|>",
    "[INST]",
    "{{ x }}",
    "{% if %}",
    "{content}",
    "\n\n",
]
TEXT = st.lists(
    st.one_of(st.text(st.characters(codec="utf-8", exclude_characters="▁"), max_size=12), st.sampled_from(SPECIAL)),
    max_size=5,
).map("".join)
RESPONSE = TEXT.filter(lambda text: text.strip())
QUICK = settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
LENGTHS = st.lists(st.integers(1, 50), min_size=1, max_size=80).map(np.array)


def make_encoder(folder, template, **fields):
    tokenizer = load_tokenizer(TokenizerOptions(folder)).tokenizer
    text = TextEncoder(tokenizer)
    renderer = (
        ChatTemplateRenderer(tokenizer, text, tokenizer.eos_token)
        if template is None
        else TemplateRenderer(template, text, tokenizer.eos_token, tokenizer.bos_token)
    )
    return tokenizer, SFTEncoder("messages", renderer, text, Limits(100_000, None, None, "error"), **fields)


@pytest.mark.parametrize("template", [*TEMPLATES, "tokenizer"])
@pytest.mark.parametrize("tokenizer_name", ["byte_level", "spm", "chat"])
def test_any_conversation_is_encoded_with_its_responses_as_targets(tokenizer_name, template, request):
    if template == "tokenizer" and tokenizer_name != "chat":
        pytest.skip("has no chat template")
    folder = request.getfixturevalue(f"{tokenizer_name}_folder")
    name = None if template == "tokenizer" else template
    tokenizer, encoder = make_encoder(folder, name)
    _, prompt_encoder = make_encoder(folder, name, prompts_only=True)
    special = {token for token in tokenizer.all_special_ids
               if token != tokenizer.unk_token_id or tokenizer_name == "byte_level"}

    @QUICK
    @given(st.lists(st.tuples(TEXT, RESPONSE), min_size=1, max_size=3))
    def check(turns):
        # Rows with the marks of chat templates are dropped: tests/data/test_chat_templates.py.
        assume(name is not None or not any(mark in text for turn in turns for text in turn for mark in MARKS))
        if name in ("plain", "qlora-plain"):  # templates without text between turns
            turns = [("x" + ask, reply) for ask, reply in turns]
        messages = [
            message
            for ask, reply in turns
            for message in ({"role": "user", "content": ask}, {"role": "assistant", "content": reply})
        ]
        columns = encoder([{"messages": messages}]).columns
        ids, labels = columns["input_ids"].values, columns["labels"].values
        is_target = labels != IGNORED
        assert (labels[is_target] == ids[is_target]).all()
        # One terminator per response; special tokens come only from the template.
        starts = np.flatnonzero(is_target & ~np.r_[False, is_target[:-1]])
        ends = np.flatnonzero(is_target & ~np.r_[is_target[1:], False])
        assert len(starts) == len(turns)
        for start, end, (_, reply) in zip(starts, ends, turns, strict=False):
            assert ids[end] in encoder.stop_token_ids
            assert not special & set(ids[start:end].tolist())
            text = tokenizer.decode(ids[start:end], clean_up_tokenization_spaces=False)
            if tokenizer_name != "spm":  # its decoder drops a leading space
                assert text == (reply.strip() if name is None else reply)
            else:
                assert text.strip() == reply.strip()
        # The prompt of the last turn is a prefix.
        prompt = prompt_encoder([{"messages": messages[:-1]}]).columns["input_ids"].values
        assert prompt.tolist() == ids[: columns["prompt_length"][0]].tolist()

    check()


@pytest.mark.parametrize("tokenizer_name", ["byte_level", "chat"])
def test_a_prompt_has_the_tokens_of_transformers(tokenizer_name, request):
    tokenizer, encoder = make_encoder(
        request.getfixturevalue(f"{tokenizer_name}_folder"), "alpaca" if tokenizer_name == "byte_level" else None,
        prompts_only=True
    )
    plain = AutoTokenizer.from_pretrained(request.getfixturevalue(f"{tokenizer_name}_folder"))

    @QUICK
    @given(st.text(st.characters(codec="utf-8", exclude_characters="<"), max_size=40))
    def check(ask):
        messages = [{"role": "user", "content": ask}]
        prompt_ids = encoder([{"messages": messages}]).columns["input_ids"].values.tolist()
        segments = encoder.renderer.prompt(Conversation(messages))
        text = (
            plain.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
            if tokenizer_name == "chat"
            else "".join(segment.text for segment in segments)
        )
        assert prompt_ids == plain(text, add_special_tokens=False).input_ids

    check()


class Items:
    """Rows of given lengths, all targets; token ids encode row and position."""

    def __init__(self, lengths):
        self.lengths = lengths

    def __getitem__(self, index):
        ids = index * 1000 + np.arange(self.lengths[index])
        return {"input_ids": ids, "labels": ids, "index": index}

    def __len__(self):
        return len(self.lengths)


@QUICK
@given(LENGTHS, st.integers(50, 120))
def test_packing_keeps_every_row_whole_and_separate(lengths, capacity):
    packed = PackedSet(NumberedSet(Items(lengths), redrawn=False), capacity, seed=1)
    assert packed.lengths.max() <= capacity
    packed_rows = []
    for index in range(len(packed)):
        row = packed[index]
        firsts = row["position_ids"] == 0
        assert (row["labels"][firsts] == IGNORED).all() and (
            row["labels"][~firsts] == row["input_ids"][~firsts]
        ).all()
        for segment in np.unique(row["segment_ids"]):
            inside = row["segment_ids"] == segment
            ids = row["input_ids"][inside]
            assert (ids // 1000 == ids[0] // 1000).all() and (row["position_ids"][inside] == np.arange(len(ids))).all()
            assert ids.tolist() == Items(lengths)[ids[0] // 1000]["input_ids"].tolist()
            packed_rows.append(int(ids[0] // 1000))
    assert sorted(packed_rows) == list(range(len(lengths)))
    repacked = PackedSet(NumberedSet(Items(lengths), redrawn=False), capacity, seed=1)
    assert [repacked[n]["input_ids"].tolist() for n in range(len(repacked))] == [
        packed[n]["input_ids"].tolist() for n in range(len(packed))
    ]


def test_packs_are_99_percent_full_on_lengths_like_alpacas():
    lengths = np.clip(np.random.default_rng(0).lognormal(4.6, 0.5, 20_000).astype(int), 20, 1024)
    _, bounds = best_fit_decreasing(lengths, 1024)
    assert lengths.sum() / (1024 * (len(bounds) - 1)) > 0.99


@QUICK
@given(st.lists(st.integers(0, 30), min_size=1, max_size=200), st.integers(30, 90))
def test_packs_equal_a_plain_best_fit_decreasing(lengths, capacity):
    packs, space_left = [], []
    for row in sorted(range(len(lengths)), key=lambda row: -lengths[row]):
        fitting = [pack for pack, space in enumerate(space_left) if space >= lengths[row]]
        fullest = min((space_left[pack] for pack in fitting), default=None)
        # Of several, the one that got to this space last.
        tied = [pack for pack in fitting if space_left[pack] == fullest]
        pack = max(tied, key=lambda pack: packs[pack][-1][1], default=-1)
        if not fitting:
            packs.append([])
            space_left.append(capacity)
        packs[pack].append((row, sum(map(len, packs))))
        space_left[pack] -= lengths[row]
    rows, bounds = best_fit_decreasing(np.array(lengths), capacity)
    assert [part.tolist() for part in np.split(rows, bounds[1:-1])] == [[row for row, _ in pack] for pack in packs]


@QUICK
@given(LENGTHS, st.integers(1, 9), st.integers(0, 12))
def test_group_by_length_sorts_rows_within_parts_of_the_shuffled_order(lengths, size, rows_done):
    lengths = np.concatenate([lengths] * 40)
    random = np.random.default_rng([3, 1])
    shuffled = random.permutation(len(lengths)).tolist()
    start = min(-rows_done % size, len(shuffled))
    end = start + (len(shuffled) - start) // size * size
    steps = []
    for first in range(start, end, size * SORTED_TOGETHER):
        stretch = sorted(shuffled[first : min(first + size * SORTED_TOGETHER, end)], key=lambda row: -lengths[row])
        steps += [stretch[first_row : first_row + size] for first_row in range(0, len(stretch), size)]
    steps = [steps[index] for index in random.permutation(len(steps))]
    ends = [sorted(rows, key=lambda row: -lengths[row]) for rows in (shuffled[:start], shuffled[end:])]
    order = training_order(lengths, 2, [3, 1], OrderRule(size), True, True, rows_done)
    assert order.rows.tolist() == [*ends[0], *sum(steps, []), *ends[1]]


@QUICK
@given(LENGTHS, st.integers(1, 9), st.integers(0, 3), st.booleans(), st.integers(1, 5))
def test_the_order_has_every_row_once_on_any_number_of_ranks(lengths, batch_size, epoch, group, world_size):
    order = training_order(lengths, batch_size, [3, epoch], OrderRule(2 * batch_size), True, group)
    ranks = [list(batches_of_rank(order, 0, rank, world_size)) for rank in range(world_size)]
    assert len({len(batches) for batches in ranks}) == 1
    rows = [row for batches in ranks for batch in batches for row in batch if row != PADDING_ROW]
    assert sorted(rows) == list(range(len(lengths)))
    # The order of a run does not depend on the number of ranks.
    dealt = [batch for round_ in zip(*ranks, strict=False) for batch in round_ if batch != [PADDING_ROW]]
    assert dealt == [order[n] for n in range(len(order))]
    # Starting later gives the remaining batches.
    start = min(world_size, len(order))
    later = list(
        itertools.chain.from_iterable(
            zip(*(batches_of_rank(order, start, rank, world_size) for rank in range(world_size)), strict=False)
        )
    )
    assert [batch for batch in later if batch != [PADDING_ROW]] == dealt[start:]


@QUICK
@given(st.lists(st.integers(0, 59), min_size=1, max_size=60).map(np.array), st.booleans(), st.integers(0, 99))
def test_masks_never_cover_special_tokens(ids, whole_words, seed):
    special, continues = np.arange(60) < 5, np.arange(60) % 3 == 0
    masker = Masker(4, special, continues, 0.4, whole_words)
    masked, labels = masker(ids, np.random.default_rng(seed))
    is_target = labels != IGNORED
    assert (labels[is_target] == ids[is_target]).all() and (masked[~is_target] == ids[~is_target]).all()
    assert not special[ids[is_target]].any()
    changed = masked != ids
    assert ((masked[changed] == 4) | ~special[masked[changed]]).all()
    if whole_words:
        joined = continues[ids] & ~special[ids]
        for position in range(1, len(ids)):
            if joined[position] and not special[ids[position - 1]]:
                assert is_target[position] == is_target[position - 1]
