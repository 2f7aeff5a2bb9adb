"""`chat` about images: the answers of transformers on both engines, and rejected files."""

import pytest
import torch
from test_chat import get_error, run_chat, terminal  # noqa: F401 - a fixture
from transformers import AutoModelForImageTextToText

from lmmods.core.errors import UserError
from lmmods.core.settings import Generation
from lmmods.extras.chat import Session, read_model
from lmmods.torch_engine.answering import TextModel
from tests.data.test_images import part, text, with_paths, write_rows
from tests.torch_engine.test_images import accepted
from tests.vision_models import make_processor, save_vision_model

OPTIONS = ["--generation.max_new_tokens", "6"]


@pytest.fixture
def folder(shared):
    return shared("vision_idefics3", lambda folder: save_vision_model("idefics3", folder))


@pytest.fixture
def pictures(tmp_path):
    write_rows(tmp_path / "rows", [])
    return tmp_path / "rows"


def expected_answer(folder, pictures, messages) -> str:
    processor, model = make_processor("idefics3"), AutoModelForImageTextToText.from_pretrained(folder).eval()
    inputs = processor.apply_chat_template(with_paths(messages, pictures), tokenize=True, return_dict=True,
                                           return_tensors="pt", add_generation_prompt=True)
    with torch.no_grad():
        tokens = model.generate(**accepted(model, inputs), max_new_tokens=6, do_sample=False)
    return processor.tokenizer.decode(tokens[0, inputs["input_ids"].shape[1]:], skip_special_tokens=True)


@pytest.mark.parametrize("engine", ["torch", "jax"])
def test_the_answer_about_an_image_is_that_of_transformers(engine, folder, pictures, capsys):
    answers = [run_chat(capsys, "--model", str(folder), "--engine", engine, "--prompt", "What?", "--image",
                        str(pictures / f"{index}.png"), *OPTIONS) for index in range(2)]
    for index, answer in enumerate(answers):
        question = [{"role": "user", "content": [part(index), text("What?")]}]
        assert answer.strip() == expected_answer(folder, pictures, question).strip()


def test_a_conversation_keeps_its_images(folder, pictures, capsys):
    source = read_model(str(folder), None, None, None, images=True)
    model = TextModel(source.model, source.data, precision="32-true", device=torch.device("cpu"), seed=0, frozen=True)
    talk = Session(source, {"tuned": model}, Generation(max_new_tokens=6), 0, None)
    messages = []
    for index, images in enumerate([[0], [], [1, 2]]):
        talk.pictures = [source.open_image(str(pictures / f"{image}.png")) for image in images]
        talk.ask(f"question {index}")
        messages.append({"role": "user", "content": [*map(part, images), text(f"question {index}")]})
        answer = talk.turns["tuned"][-1]["content"]
        assert answer == expected_answer(folder, pictures, messages) and not talk.pictures
        messages.append({"role": "assistant", "content": [text(answer)]})


def test_a_terminal_adds_images_to_the_next_question(folder, pictures, terminal):  # noqa: F811
    source = read_model(str(folder), None, None, None, images=True)
    asked = []

    class Recorder:
        def answer(self, prompt, settings, stop_token_ids, seed, row, on_token, images=None):
            asked.append(None if images is None else {name: tuple(column.shape) for name, column in images.items()})
            return True

    shown = terminal(Session(source, {"tuned": Recorder()}, Generation(), 0, None), *[
        (">>> ", line) for line in (f"/image {pictures}/none.png\n", f"/image {pictures}/0.png\n", "What?\n", "/new\n",
                                    "Hello\n", "\x04")])
    assert b"none.png cannot be read" in shown and b"The next question has this image." in shown
    assert len(asked) == 2 and asked[0]["per_row/pixel_values"][0] == 1 and asked[1] is None


def test_unusable_images_are_errors(folder, pictures, llama_folder, capsys):
    (pictures / "broken.png").write_bytes(b"no picture")
    source = read_model(str(folder), None, None, None, images=True)
    for name, message in (("missing.png", "cannot be read"), ("broken.png", "an image is broken"), ("", "cannot be")):
        with pytest.raises(UserError, match=message):
            source.open_image(str(pictures / name))
    with pytest.raises(UserError, match="loaded without images"):
        read_model(str(folder), None, None, None).open_image(str(pictures / "0.png"))
    assert "a model of type llama cannot be trained on images" in get_error(
        capsys, "--model", str(llama_folder), "--prompt", "a", "--image", str(pictures / "0.png"))
