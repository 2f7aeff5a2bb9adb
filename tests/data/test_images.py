"""Rows with images: layouts, what is dropped and why, and tokens and pixels against transformers' processors."""

import base64
import io
import json
import os

import numpy as np
import PIL.Image
import pyarrow as pa
import pyarrow.parquet
import pytest
import torch

from lmmods.core.errors import UserError
from lmmods.core.image_models import COUNT, IMAGE_FAMILIES, find_image_family
from lmmods.core.labels import IGNORED, PER_ROW
from lmmods.data.read.conversation import RowProblem
from lmmods.data.read.formats import read_conversation
from lmmods.data.read.images import FOLDER, IMAGE, decode_image, read_bytes
from lmmods.data.sft import SFTData
from lmmods.recipe.tasks.sft import SFTFields
from tests.vision_models import FAMILIES, make_processor, picture, save_vision_model

SIZES = [(40, 28), (30, 50), (28, 28)]


@pytest.fixture(scope="module", params=list(FAMILIES))
def family(request, shared):
    """Name, folder with a checkpoint, and processor of a family."""
    processors = {}
    folder = shared(f"vision_{request.param}", lambda folder: processors.setdefault(
        0, save_vision_model(request.param, folder)))
    return request.param, folder, processors.get(0) or make_processor(request.param)


@pytest.fixture(scope="module")
def gemma(shared):
    return shared("vision_gemma3", lambda folder: save_vision_model("gemma3", folder))


def text(value):
    return {"type": "text", "text": value}


def part(index):
    return {"type": "image", "path": f"{index}.png"}


def turns(*contents):
    return [{"role": "assistant" if index % 2 else "user", "content": content if isinstance(content, list) else [
        text(content)]} for index, content in enumerate(contents)]


CONVERSATIONS = [
    turns([part(0), text("What is this?")], "a dog."),
    turns([text("Compare "), part(1), text(" and "), part(2)], "b", "More", "the end"),
    turns("no picture", "Indeed"),
    turns([text("First"), part(0)], "one", [part(2), text("two?")], "two"),
]


def write_rows(folder, rows, name="rows.jsonl"):
    folder.mkdir(parents=True, exist_ok=True)
    for index, size in enumerate(SIZES):
        picture(index, *size).save(folder / f"{index}.png")
    (folder / name).write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(folder / name)


def load(model_folder, source, tmp_path, **fields):
    """Return a connected data module that has read its training rows."""
    model = SFTFields(pretrained=str(model_folder), images=True)
    data = SFTData(source=source, **{"max_length": 256, "cache_dir": str(tmp_path / "cache"), "shuffle": False,
                                     **fields})
    model.check_data(data)
    data.connect(**model.data_facts("fit", None))
    data.prepare_data()
    data.setup("fit")
    return data


def dropped(data):
    return {reason: entry["rows"] for store in data.sets["train"].stores
            for reason, entry in store.info["dropped"].items()}


# ---- tokens and pixels ----

def with_paths(messages, folder):
    messages = json.loads(json.dumps(messages))
    for message in messages:
        for item in message["content"]:
            if "path" in item:
                item["path"] = str(folder / item["path"])
    return messages


def test_tokens_and_inputs_are_those_of_the_processor(family, tmp_path):
    name, folder, processor = family
    source = write_rows(tmp_path / "rows", [{"messages": messages} for messages in CONVERSATIONS])
    data = load(folder, source, tmp_path, batch_size=4)
    items = [data.items("train")[index] for index in range(len(CONVERSATIONS))]
    expected = [processor.apply_chat_template(with_paths(messages, tmp_path / "rows"), tokenize=True, return_dict=True)
                for messages in CONVERSATIONS]
    assert [item["input_ids"].tolist() for item in items] == [list(output["input_ids"][0]) for output in expected]
    assert all(item["input_ids"][0] != item["input_ids"][1] for item in items)  # one begin token, if any
    batch, whole = next(iter(data.train_batches())), IMAGE_FAMILIES[name].whole_rows
    keys = {key for output in expected for key in output if key.startswith(("pixel", "image", "batch"))}
    assert {column.removeprefix(PER_ROW) for column in batch if column.startswith(PER_ROW)} == keys | {
        f"num_{key}" for key in keys if key not in whole}
    for key in keys:
        for index, output in enumerate(expected):
            if key not in output:  # the row without an image
                assert not batch[PER_ROW + key][index].any()
                continue
            values = output[key][0] if key in whole else output[key]
            saved = batch[PER_ROW + key][index]
            if key not in whole:
                assert batch[COUNT + key][index] == len(values)
            arrays = values if isinstance(values, list) else [values] if np.ndim(values) == 0 else list(values)
            for saved_array, array in zip(saved.reshape(-1, *saved.shape[1:]) if saved.ndim else [saved], arrays):
                array = torch.as_tensor(np.asarray(array))
                assert torch.equal(saved_array[tuple(slice(size) for size in array.shape)], array.to(saved_array))


def test_prompts_are_those_of_the_processor(family, tmp_path):
    name, folder, processor = family
    source = write_rows(tmp_path / "rows", [{"messages": CONVERSATIONS[3]}])
    data = load(folder, source, tmp_path)
    expected = processor.apply_chat_template(with_paths(CONVERSATIONS[3][:3], tmp_path / "rows"), tokenize=True,
                                             add_generation_prompt=True)[0]
    item = data.items("train")[0]
    assert item["input_ids"][: item["prompt_length"]].tolist() == list(expected)
    assert data.inference_prompts(0)[-1] == list(expected)


@pytest.mark.parametrize("train_on", ["responses", "all"])
def test_image_tokens_are_no_targets(family, tmp_path, train_on):
    name, folder, processor = family
    source = write_rows(tmp_path / "rows", [{"messages": CONVERSATIONS[1]}])
    item = load(folder, source, tmp_path, train_on=train_on).items("train")[0]
    is_image = np.isin(item["input_ids"], processor.image_token_ids)
    assert is_image.sum() >= 8 and (item["labels"][is_image] == IGNORED).all()
    assert (item["labels"][~is_image] == item["input_ids"][~is_image]).all() == (train_on == "all")


def test_targets_are_those_of_trls_collator(gemma, tmp_path):
    """But for the line break after a turn, which TRL's models learn, too."""
    trl = pytest.importorskip("trl.trainer.sft_trainer", reason="an extra of developers (dev)")
    rows = [{"prompt": [{"role": "user", "content": "What is this?"}], "images": [f"{index}.png"],
             "completion": [{"role": "assistant", "content": answer}]} for index, answer in enumerate(("a dog.", "b"))]
    data, processor = load(gemma, write_rows(tmp_path / "rows", rows), tmp_path), make_processor("gemma3")
    collator = trl.DataCollatorForVisionLanguageModeling(processor, completion_only_loss=True)
    batch = collator([{**row, "images": [picture(index, *SIZES[index])]} for index, row in enumerate(rows)])
    for index in range(2):
        item, length = data.items("train")[index], int(batch["attention_mask"][index].sum())
        assert item["input_ids"].tolist() == batch["input_ids"][index, :length].tolist()
        expected = batch["labels"][index, :length].tolist()
        end = expected.index(processor.tokenizer.eos_token_id)
        assert processor.tokenizer.decode(expected[end + 1:]) == "\n"
        assert item["labels"].tolist() == expected[:end + 1] + [IGNORED] * (length - end - 1)
        assert np.array_equal(item["image_inputs"]["pixel_values"][0], batch["pixel_values"][index])


def test_a_users_image_token_stays_text(gemma, tmp_path):
    messages = [turns([part(0), text("a <start_of_image> <image_soft_token> b")], "c"), turns("<image>", "d")]
    data = load(gemma, write_rows(tmp_path / "rows", [{"messages": message} for message in messages]), tmp_path)
    token = data.tokenizer.convert_tokens_to_ids("<image_soft_token>")
    assert [(data.items("train")[index]["input_ids"] == token).sum() for index in (0, 1)] == [4, 0]


# ---- layouts ----

LAYOUTS = {
    "parts": ("messages", {"messages": CONVERSATIONS[1][:2]}),
    "parts_and_column": ("messages", {
        "messages": turns([text("Compare "), {"type": "image"}, text(" and "), {"type": "image"}], "b"),
        "images": ["1.png", {"path": "2.png"}]}),
    "image_url": ("messages", {"messages": turns([
        text("Compare "), {"type": "image_url", "image_url": {"url": "1.png"}}, text(" and "),
        {"type": "image", "image": "2.png"}], "b")}),
    "llava": ("sharegpt", {"conversations": [{"from": "human", "value": "Compare <image> and <image>"},
                                             {"from": "gpt", "value": "b"}], "image": ["1.png", "2.png"]}),
    "sharegpt": ("sharegpt", {"conversations": [{"from": "human", "value": "Compare <image> and <image>"},
                                                {"from": "gpt", "value": "b"}], "images": ["1.png", "2.png"]}),
    "alpaca": ("alpaca", {"instruction": "Compare <image> and <image>", "output": "b", "images": ["1.png", "2.png"]}),
    "pair": ("prompt-completion", {"prompt": "Compare <image> and <image>", "completion": "b",
                                   "images": ["1.png", "2.png"]}),
}


@pytest.mark.parametrize(("layout", "row"), LAYOUTS.values(), ids=list(LAYOUTS))
def test_layouts_give_the_same_turns(layout, row):
    user, assistant = read_conversation(layout, row, {}, reads_images=True).messages
    assert user == {"role": "user", "content": f"Compare {IMAGE} and {IMAGE}", "images": [(0, "1.png"), (1, "2.png")]}
    assert assistant == {"role": "assistant", "content": "b"}
    with pytest.raises(RowProblem, match=r"model\.images"):
        read_conversation(layout, row, {})


def test_images_without_places_precede_the_first_question():
    """As in TRL's `prepare_multimodal_messages`."""
    row = {"messages": [{"role": "system", "content": "s"}, {"role": "user", "content": "a"},
                        {"role": "assistant", "content": "b"}], "images": ["1.png", "2.png"]}
    system, user, _ = read_conversation("messages", row, {}, reads_images=True).messages
    assert "images" not in system and user["content"] == f"{IMAGE}{IMAGE}a" and len(user["images"]) == 2


@pytest.mark.parametrize(("row", "reason"), [
    ({"messages": turns("<image> a", "b"), "images": ["1.png", "2.png"]}, "more images than places"),
    ({"messages": turns("<image> a <image>", "b"), "image": "1.png"}, "fewer images than places"),
    ({"messages": turns([{"type": "image"}, text("a")], "b")}, "fewer images than places"),
    ({"messages": turns("a", [part(0), text("b")])}, "turn of the assistant"),
    ({"messages": turns(f"a {IMAGE}", "b"), "images": ["1.png"]}, "not a character"),
    ({"messages": turns("a", "b"), "images": [3]}, "neither a path nor bytes"),
    ({"messages": turns("<image>", "b"), "images": [{"bytes": None, "path": None}]}, "is empty"),
    ({"messages": turns([{"type": "video", "video": "a.mp4"}, text("a")], "b")}, "a video"),
])
def test_images_and_places_must_match(row, reason):
    with pytest.raises(RowProblem, match=reason):
        read_conversation("messages", row, {}, reads_images=True)


def png(size=(28, 28), **options):
    buffer = io.BytesIO()
    picture(1, *size).save(buffer, "PNG", **options)
    return buffer.getvalue()


def test_bytes_and_data_urls_give_the_pixels_of_the_file(gemma, tmp_path):
    """Parquet as the hub writes its Image column, a bare column of bytes, a data: URL and base64."""
    write_rows(tmp_path / "rows", [])
    data_bytes = (tmp_path / "rows" / "0.png").read_bytes()
    encoded = base64.b64encode(data_bytes).decode()
    rows = [{"messages": turns("<image>What?", "b"), "images": [image]} for image in (
        "0.png", f"data:image/png;base64,{encoded}", {"base64": encoded})]
    sources = [write_rows(tmp_path / "rows", rows)]
    for index, image in enumerate(({"bytes": data_bytes, "path": "0.png"}, data_bytes)):
        sources.append(str(tmp_path / f"{index}.parquet"))
        question = [{"role": "user", "content": "<image>What?"}, {"role": "assistant", "content": "b"}]
        pa.parquet.write_table(pa.Table.from_pylist([{"messages": question, "image": image}]), sources[-1])
    data = load(gemma, sources, tmp_path, num_proc=2)
    first, *others = [data.items("train")[index] for index in range(5)]
    for item in others:
        assert item["input_ids"].tolist() == first["input_ids"].tolist()
        assert np.array_equal(item["image_inputs"]["pixel_values"], first["image_inputs"]["pixel_values"])


def test_image_columns_of_the_hub(gemma, tmp_path, monkeypatch):
    import datasets

    features = datasets.Features({
        "messages": datasets.List({"role": datasets.Value("string"), "content": datasets.Value("string")}),
        "images": datasets.List(datasets.Image())})
    rows = [{"messages": [{"role": "user", "content": "What?"}, {"role": "assistant", "content": "b"}],
             "images": [picture(0, *SIZES[0])]}]
    monkeypatch.setattr(datasets, "load_dataset", lambda *_, **__: datasets.Dataset.from_list(rows, features))
    local = write_rows(tmp_path / "rows", [{"messages": turns([part(0), text("What?")], "b")}])
    first, second = [load(gemma, [local, "someone/pictures"], tmp_path).items("train")[index] for index in (0, 1)]
    assert second["input_ids"].tolist() == first["input_ids"].tolist()
    assert np.array_equal(second["image_inputs"]["pixel_values"], first["image_inputs"]["pixel_values"])


# ---- rows that cannot be used ----

def test_unusable_images_are_counted(gemma, tmp_path):
    folder = tmp_path / "rows"
    write_rows(folder, [])
    (folder / "cut.png").write_bytes(png()[:-40])
    (folder / "text.png").write_text("not an image")
    (folder / "inner").mkdir()
    (tmp_path / "outside.png").write_bytes(png())
    os.symlink(tmp_path / "outside.png", folder / "link.png")
    os.mkfifo(folder / "pipe.png")
    frames = [picture(index) for index in range(2)]
    frames[0].save(folder / "moving.gif", save_all=True, append_images=frames[1:])
    PIL.Image.new("1", (2000, 2000)).save(folder / "large.png")
    reasons = {
        "cut.png": "an image is broken, or in a format that is not supported",
        "text.png": "an image is broken, or in a format that is not supported",
        "data:image/png;base64,@@": "an image is broken, or in a format that is not supported",
        "missing.png": "an image file is missing or cannot be read",
        "inner": "an image is not a regular file",
        "pipe.png": "an image is not a regular file",
        "../outside.png": "an image is outside the folder of the data file: use a path relative to the data file",
        "link.png": "an image is outside the folder of the data file: use a path relative to the data file",
        str(folder / "0.png"): "an image is outside the folder of the data file: use a path relative to the data file",
        "https://example.com/a.png": "an image is a URL, and nothing is downloaded: save it next to the data file",
        "moving.gif": "an image is animated",
        "large.png": "an image has more pixels than data.max_image_pixels",
    }
    rows = [{"messages": turns("<image>a", "b"), "images": [path]} for path in [*reasons, "0.png"]]
    data = load(gemma, write_rows(folder, rows), tmp_path, max_image_pixels=1_000_000)
    assert dropped(data) == {reason: list(reasons.values()).count(reason) for reason in reasons.values()}
    assert len(data.rows("train")) == 1


def test_a_picture_is_decoded_as_by_transformers(tmp_path):
    from transformers.image_utils import load_image

    for index, options in enumerate(({}, {"exif": turned()}, {"mode": "L"}, {"mode": "RGBA"}, {"mode": "P"})):
        image = picture(3, 24, 40).convert(options.pop("mode", "RGB"))
        image.save(tmp_path / f"{index}.png", **options)
        expected = load_image(str(tmp_path / f"{index}.png"))
        decoded = decode_image(read_bytes(f"{index}.png", str(tmp_path)), 10**6)
        assert decoded.size == expected.size and np.array_equal(np.asarray(decoded), np.asarray(expected))


def turned():
    exif = PIL.Image.Exif()
    exif[0x0112] = 6  # turned by 90 degrees
    return exif


def test_a_long_conversation_loses_whole_turns_with_their_images(gemma, tmp_path):
    long = turns([part(0), text("First " * 20)], "one", [part(2), text("two?")], "two")
    source = write_rows(tmp_path / "rows", [{"messages": long}])
    data = load(gemma, source, tmp_path, max_length=60)
    item, short = data.items("train")[0], load(gemma, write_rows(tmp_path / "short", [{"messages": long[2:]}]), tmp_path
                                               ).items("train")[0]
    assert item["images"].tolist() == [1] and item["input_ids"].tolist() == short["input_ids"].tolist()
    assert np.array_equal(item["image_inputs"]["pixel_values"], short["image_inputs"]["pixel_values"])


def test_rows_of_equal_texts_with_other_images_are_no_duplicates(gemma, tmp_path):
    rows = [{"messages": turns([part(index), text("How many red circles are there in this picture?")], "two")}
            for index in (0, 1, 0)]
    source = write_rows(tmp_path / "rows", rows)
    for method in ("exact", "minhash"):
        assert len(load(gemma, source, tmp_path, deduplicate=method).rows("train")) == 2


def test_shapes_of_a_batch_are_known_without_its_images(family, tmp_path):
    """With other sizes and numbers of images, also after turns were removed, and with rows that only pad."""
    rows = [{"messages": messages} for messages in (
        *CONVERSATIONS, turns([part(2), text("q " * 80)], "r", [part(0), text("s")], "t"))]
    source = write_rows(tmp_path / "rows", rows)
    for packing in (False, True) if find_image_family(family[0]).can_pack else (False,):
        data = load(family[1], source, tmp_path, max_length=260 if packing else 130, packing=packing)
        items, collate = data.items("train"), data.collator()
        assert len(items) < len(rows) if packing else len(items) == len(rows) and items.truncated[-1] > 0
        last = len(items) - 1
        for indices in ([0], [last, 0], [last, -1, 0], [-1], list(range(len(items)))):
            batch = collate([items[index] for index in indices])
            shapes = {name: (tuple(x.shape), x.numpy().dtype) for name, x in batch.items() if name.startswith(PER_ROW)}
            outline = items.outline([[index] if index >= 0 else [] for index in indices])
            assert {name: (x.shape, x.dtype) for name, x in outline.items()} == shapes


def test_a_changed_image_is_an_error(gemma, tmp_path):
    source = write_rows(tmp_path / "rows", [{"messages": turns([part(0), text("a")], "b")}])
    data = load(gemma, source, tmp_path)
    assert len(data.items("train")[0]["image_inputs"]["pixel_values"]) == 1
    picture(9, *SIZES[0]).save(tmp_path / "rows" / "0.png")
    for change in (lambda: None, (tmp_path / "rows" / "0.png").unlink):
        change()
        with pytest.raises(UserError, match=r"rows\.jsonl:1: an image has changed"):
            data.items("train")[0]


def test_a_row_does_not_choose_its_folder(gemma, tmp_path, monkeypatch):
    """Rows of the hub have no folder, whatever their columns say."""
    import datasets

    write_rows(tmp_path / "rows", [])
    rows = [{"messages": [{"role": "user", "content": "What?"}, {"role": "assistant", "content": "b"}], "image": image,
             FOLDER: str(tmp_path / "rows")} for image in ("0.png", "")]
    monkeypatch.setattr(datasets, "load_dataset", lambda *_, **__: datasets.Dataset.from_list(rows))
    assert dropped(load(gemma, "someone/paths", tmp_path)) == {
        "an image is a path, but the data file is not on this machine": 1}


@pytest.mark.parametrize("packing", [False, True])
def test_a_stream_gives_the_batches_of_stored_rows(gemma, packing, tmp_path):
    """A stream's rows stay in memory as read; an item may be made twice."""
    source = write_rows(tmp_path / "rows", [{"messages": messages} for messages in CONVERSATIONS])
    stored, stream = (load(gemma, source, tmp_path, packing=packing, batch_size=1, **options)
                      for options in ({}, {"streaming": True, "stream_window": 4}))
    first, second = (stream.items("train")[0]["image_inputs"]["pixel_values"] for _ in range(2))
    assert np.array_equal(first, second)
    for expected, batch in zip(stored.train_batches(), stream.train_batches()):
        assert batch.keys() - expected.keys() == {"loss_weights"}
        assert all(torch.equal(batch[name], value) for name, value in expected.items())


# ---- options ----

def test_options_of_the_image_processor(shared, tmp_path):
    folder = shared("vision_qwen3_vl", lambda folder: save_vision_model("qwen3_vl", folder))
    source = write_rows(tmp_path / "rows", [{"messages": CONVERSATIONS[0]}])
    plain, small = (load(folder, source, tmp_path, image_options=options).items("train")[0]
                    for options in (None, {"max_pixels": 16 * 16}))
    assert small["image_inputs"]["image_grid_thw"].prod() < plain["image_inputs"]["image_grid_thw"].prod()
    assert len(small["input_ids"]) < len(plain["input_ids"])
    with pytest.raises(UserError, match=r"data\.image_options\.colour: .* has no such field"):
        load(folder, source, tmp_path, image_options={"colour": 1})


def test_a_model_type_that_is_not_supported(shared):
    with pytest.raises(UserError, match=r"model\.images: a model of type llama cannot be trained on images"):
        SFTFields(pretrained="demo/llama", images=True).data_facts("fit", None)


@pytest.mark.parametrize(("model", "data", "message"), [
    ({}, {"on_overflow": "truncate"}, r"data\.on_overflow is truncate"),
    ({"images": False}, {"image_options": {"size": 1}}, r"data\.image_options .* must be null without model\.images"),
    ({"images": False}, {"max_image_pixels": 10}, r"data\.max_image_pixels is 10, but must be 89478485, its default"),
    ({"compile": True}, {}, r"model\.compile is true, but must be false with model\.images"),
    ({"neftune_alpha": 5.0}, {}, r"model\.neftune_alpha"),
])
def test_keys_that_do_not_work_with_images(model, data, message):
    with pytest.raises(UserError, match=message):
        SFTFields(**{"pretrained": "demo/llama", "images": True, **model}).check_data(SFTData(source="a.jsonl", **data))
