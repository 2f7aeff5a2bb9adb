"""Preferences with images: layouts, dropped rows and turns, against transformers' processor."""

import numpy as np
import pytest

from lmmods.data.preference import PreferenceData
from lmmods.recipe.tasks.preference import PreferenceFields
from tests.data.test_images import dropped, part, text, turns, with_paths, write_rows
from tests.vision_models import make_processor, save_vision_model

PROMPT, ANSWERS = turns([part(1), text(" and "), part(0), text(" differ?")]), ("Yes, they do.", "No.")


@pytest.fixture
def load(shared, tmp_path):
    """Return a function that reads rows of preferences with images; the model is a tiny Idefics 3."""
    folder = shared("vision_idefics3", lambda folder: save_vision_model("idefics3", folder))

    def read(rows, **fields):
        model = PreferenceFields(pretrained=str(folder), images=True)
        data = PreferenceData(source=write_rows(tmp_path / "rows", rows), cache_dir=str(tmp_path / "cache"),
                              shuffle=False, **{"max_length": 256, **fields})
        model.check_data(data)
        data.connect(**model.data_facts("fit", None))
        data.prepare_data()
        data.setup("fit")
        return data

    return read


def expected_ids(messages, tmp_path) -> list[list[int]]:
    """Return the tokens of both answers to the turns, by transformers."""
    return [make_processor("idefics3").apply_chat_template(
        with_paths([*messages, {"role": "assistant", "content": [text(answer)]}], tmp_path / "rows"), tokenize=True,
        return_dict=True)["input_ids"][0] for answer in ANSWERS]


@pytest.mark.parametrize("row", [
    {"prompt": PROMPT, "chosen": ANSWERS[0], "rejected": ANSWERS[1]},
    {"prompt": "<image> and <image> differ?", "chosen": ANSWERS[0], "rejected": ANSWERS[1],
     "images": ["1.png", "0.png"]},
    {"prompt": [{"role": "user", "content": [{"type": "image"}, text(" and "), {"type": "image"}, text(" differ?")]}],
     "chosen": [{"role": "assistant", "content": ANSWERS[0]}],
     "rejected": [{"role": "assistant", "content": ANSWERS[1]}], "images": ["1.png", "0.png"]},
    {name: [*PROMPT, {"role": "assistant", "content": answer}]
     for name, answer in zip(("chosen", "rejected"), ANSWERS, strict=True)},
    {"conversations": [{"from": "human", "value": "<image> and <image> differ?"}],
     "chosen": {"from": "gpt", "value": ANSWERS[0]}, "rejected": {"from": "gpt", "value": ANSWERS[1]},
     "images": ["1.png", "0.png"]},
    {"prompt": PROMPT, "completions": [{"response": ANSWERS[1], "score": 1}, {"response": ANSWERS[0], "score": 2}]}],
    ids=["parts", "marks", "trl", "whole", "sharegpt", "scores"])
def test_layouts_give_the_tokens_and_images_of_the_processor(row, load, tmp_path):
    item = load([row, row]).items("train")[0]
    expected = expected_ids(PROMPT, tmp_path)
    assert [answer["input_ids"].tolist() for answer in item["answers"]] == expected
    inputs = make_processor("idefics3").apply_chat_template(with_paths(PROMPT, tmp_path / "rows"), tokenize=True,
                                                            return_dict=True)
    assert np.array_equal(item["image_inputs"]["pixel_values"], inputs["pixel_values"][0])


def test_a_long_pair_loses_turns_with_their_images(load, tmp_path):
    write_rows(tmp_path / "rows", [])
    messages = [*turns([part(2), text("First?")], "one"), *PROMPT]
    lengths = [len(ids) for ids in expected_ids(PROMPT, tmp_path)]
    row = {"prompt": messages, "chosen": ANSWERS[0], "rejected": ANSWERS[1]}
    item = load([row, row], max_length=max(lengths)).items("train")[0]
    assert [answer["input_ids"].tolist() for answer in item["answers"]] == expected_ids(PROMPT, tmp_path)
    assert item["images"].tolist() == [1, 2]


def test_unusable_rows_are_counted(load):
    good = {"prompt": PROMPT, "chosen": ANSWERS[0], "rejected": ANSWERS[1]}
    more = [[{"role": "assistant", "content": answer}, *turns([part(index), text("And?")]),
             {"role": "assistant", "content": "So."}] for index, answer in enumerate(ANSWERS)]
    rows = [good, {**good, "prompt": turns([{"type": "image", "path": "none.png"}])},
            {"prompt": PROMPT, "chosen": more[0], "rejected": more[1]},
            {"chosen": [*PROMPT, {"role": "assistant", "content": "a"}],
             "rejected": [*turns([part(0), text(" and "), part(0), text(" differ?")]),
                          {"role": "assistant", "content": "b"}]}]
    assert dropped(load(rows)) == {"an image file is missing or cannot be read": 1,
                                   "the two answers have different images": 1,
                                   "the two conversations differ before the answer": 1}
