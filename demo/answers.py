"""Compare a tuned model's answers on held-out rows with its base's: `python demo/answers.py --run runs/sft_qlora`.

The run is loaded with transformers and PEFT alone.
"""

import argparse
import json
import logging
import os
import warnings
from pathlib import Path

os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
logging.getLogger("bitsandbytes.backends.cpu.ops").setLevel(logging.ERROR)  # suggests kernels from a hub at import

import torch  # noqa: E402
import yaml  # noqa: E402
from peft import PeftModel  # noqa: E402
from transformers import AutoModelForCausalLM, AutoTokenizer, BitsAndBytesConfig  # noqa: E402

HERE = Path(__file__).parent
PROMPT = ("Below is an instruction that describes a task{paired}. Write a response that appropriately completes the "
          "request.\n\n### Instruction:\n{instruction}{input}\n\n### Response:")


def render_prompt(row: dict[str, str]) -> str:
    """Return the alpaca prompt that the recipe trains on."""
    paired = ", paired with an input that provides further context" if row["input"] else ""
    context = f"\n\n### Input:\n{row['input']}" if row["input"] else ""
    return PROMPT.format(paired=paired, instruction=row["instruction"], input=context)


def generate_answers(model: torch.nn.Module, tokenizer, rows: list[dict[str, str]]) -> list[str]:
    """Generate greedy answers, 40 rows at a time."""
    texts = []
    for start in range(0, len(rows), 40):
        inputs = tokenizer([render_prompt(row) for row in rows[start : start + 40]], return_tensors="pt", padding=True,
                           padding_side="left", return_token_type_ids=False)
        with torch.no_grad():
            output = model.generate(**inputs, max_new_tokens=32, do_sample=False, pad_token_id=tokenizer.pad_token_id)
        texts += tokenizer.batch_decode(output[:, inputs["input_ids"].shape[1]:], skip_special_tokens=True)
    return [text.strip() for text in texts]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--run", type=Path, default=Path("runs/sft_qlora"))
    parser.add_argument("--show", type=int, default=8, help="number of rows to print")
    options = parser.parse_args()
    warnings.filterwarnings("ignore")
    recipe = yaml.safe_load((options.run / "config.yaml").read_text())["model"]["init_args"]
    rows = [json.loads(line) for line in (HERE / "instructions_heldout.jsonl").read_text().splitlines()]
    tokenizer = AutoTokenizer.from_pretrained(options.run / "model")
    quantization = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type=recipe["quantize"],
                                      bnb_4bit_use_double_quant=recipe["double_quant"])
    base = AutoModelForCausalLM.from_pretrained(recipe["pretrained"], quantization_config=quantization)
    model = PeftModel.from_pretrained(base, options.run / "model").eval()
    tuned_answers = generate_answers(model, tokenizer, rows)
    with model.disable_adapter():
        base_answers = generate_answers(model, tokenizer, rows)
    examples = list(zip(rows, base_answers, tuned_answers, strict=True))
    for row, base_answer, tuned_answer in examples[:: max(len(rows) // options.show, 1)]:
        print(f"\n{row['instruction']}" + (f"\n  given: {row['input']}" if row["input"] else ""))
        print(f"  right: {row['output']!r}\n  base:  {base_answer[:60]!r}\n  tuned: {tuned_answer[:60]!r}")
    for name, texts in (("base", base_answers), ("tuned", tuned_answers)):
        num_correct = sum(text == row["output"] for text, row in zip(texts, rows, strict=True))
        print(f"\nexact match on {len(rows)} held-out rows, {name}: {num_correct / len(rows):.1%}", end="")
    print()


if __name__ == "__main__":
    main()
