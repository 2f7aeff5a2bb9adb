"""Write demo/shapes/ and demo/shapes*.jsonl: questions about pictures of coloured shapes, and a tiny model to train.

The model is an Idefics3 with random weights: only its configuration, tokenizer and processor are written. No held-out
picture is a training picture.
"""

from __future__ import annotations

import base64
import io
import json
from pathlib import Path
from random import Random

from generate import make_random, to_json_lines, write_text
from PIL import Image, ImageDraw
from transformers import AutoTokenizer, Idefics3Config

TRAIN_ROWS, HELD_OUT_ROWS, QUESTIONS = 3_000, 200, 6
CELL, CELLS = 12, 3  # pixels of a cell, cells in a row of a picture
COLOURS = {"red": (220, 40, 40), "green": (40, 170, 60), "blue": (50, 80, 220)}
SHAPES = ("circle", "square", "triangle")
TOKENS = ["<|im_start|>", "<end_of_utterance>", "<fake_token_around_image>", "<image>", "<global-img>"]
TEMPLATE = """<|im_start|>{% for message in messages %}{{ message['role'] | capitalize }}:
{%- for part in message['content'] %}
{%- if part['type'] == 'image' %}<image>{% else %}{{ ' ' + part['text'] }}{% endif %}
{%- endfor %}<end_of_utterance>
{% endfor %}{% if add_generation_prompt %}Assistant:{% endif %}"""

Things = dict[int, tuple[str, str]]  # cell -> colour and shape


def draw(things: Things) -> str:
    """Return a picture as a data: URL."""
    image = Image.new("RGB", (CELL * CELLS, CELL * CELLS), (255, 255, 255))
    canvas = ImageDraw.Draw(image)
    for cell, (colour, shape) in things.items():
        left, top = cell % CELLS * CELL + 1, cell // CELLS * CELL + 1
        box = (left, top, left + CELL - 3, top + CELL - 3)
        if shape == "circle":
            canvas.ellipse(box, COLOURS[colour])
        elif shape == "square":
            canvas.rectangle(box, COLOURS[colour])
        else:
            canvas.polygon([(box[0], box[3]), (box[2], box[3]), ((box[0] + box[2]) // 2, box[1])], COLOURS[colour])
    buffer = io.BytesIO()
    image.quantize(8, dither=Image.Dither.NONE).save(buffer, "PNG")
    return "data:image/png;base64," + base64.b64encode(buffer.getvalue()).decode()


def ask(things: Things, rng: Random) -> tuple[str, str]:
    """Return a question about a picture and its answer."""
    shapes = [shape for _, shape in things.values()]
    single = [thing for thing in things.values() if shapes.count(thing[1]) == 1]
    if single and rng.random() < 0.4:
        colour, shape = rng.choice(single)
        return f"Which colour is the {shape}?", colour
    colour, shape = rng.choice([*things.values(), (rng.choice(list(COLOURS)), rng.choice(SHAPES))])
    return f"How many {colour} {shape}s?", str(list(things.values()).count((colour, shape)))


def make_row(rng: Random, num_questions: int, used: set[str]) -> dict:
    """Return a conversation about a new picture."""
    while True:
        cells = rng.sample(range(CELLS**2), rng.randint(1, 4))
        kinds = [(rng.choice(list(COLOURS)), rng.choice(SHAPES)) for _ in range(3)]
        things = {cell: rng.choice(kinds) for cell in sorted(cells)}
        if (picture := draw(things)) not in used:
            break
    used.add(picture)
    questions = dict(ask(things, rng) for _ in range(num_questions))
    messages = [{"role": role, "content": text} for pair in questions.items()
                for role, text in zip(("user", "assistant"), pair)]
    messages[0]["content"] = "<image>" + messages[0]["content"]
    return {"messages": messages, "images": [picture]}


def write_model(folder: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(folder.parent / "llama")
    tokenizer.add_special_tokens({"additional_special_tokens": TOKENS})
    tokenizer.eos_token, tokenizer.chat_template = "<end_of_utterance>", TEMPLATE
    tokenizer.save_pretrained(folder)
    size, patch, scale = CELL * CELLS, CELL, 1  # a token for each cell
    text = {"model_type": "llama", "vocab_size": len(tokenizer), "hidden_size": 128, "intermediate_size": 384,
            "num_hidden_layers": 3, "num_attention_heads": 4, "num_key_value_heads": 4, "max_position_embeddings": 512,
            "initializer_range": 0.08,
            "bos_token_id": tokenizer.bos_token_id, "eos_token_id": tokenizer.eos_token_id,
            "pad_token_id": tokenizer.pad_token_id}
    vision = {"hidden_size": 96, "intermediate_size": 192, "num_hidden_layers": 1, "num_attention_heads": 4,
              "image_size": size, "patch_size": patch, "initializer_range": 0.08}
    Idefics3Config(text_config=text, vision_config=vision, scale_factor=scale, pad_token_id=tokenizer.pad_token_id,
                   image_token_id=tokenizer.convert_tokens_to_ids("<image>"), tie_word_embeddings=True,
                   architectures=["Idefics3ForConditionalGeneration"]).save_pretrained(folder)
    processor = {"processor_class": "Idefics3Processor", "image_seq_len": (size // patch // scale) ** 2}
    images = {"image_processor_type": "Idefics3ImageProcessor", "do_image_splitting": False,
              "size": {"longest_edge": size}, "max_image_size": {"longest_edge": size}}
    write_text(folder / "processor_config.json", json.dumps(processor, indent=2) + "\n")
    write_text(folder / "preprocessor_config.json", json.dumps(images, indent=2) + "\n")


if __name__ == "__main__":
    demo, used = Path(__file__).parent, set()
    for name, count, num_questions in (("shapes_heldout", HELD_OUT_ROWS, 1), ("shapes", TRAIN_ROWS, QUESTIONS)):
        rng = make_random(name)
        write_text(demo / f"{name}.jsonl", to_json_lines([make_row(rng, num_questions, used) for _ in range(count)]))
    write_model(demo / "shapes")
