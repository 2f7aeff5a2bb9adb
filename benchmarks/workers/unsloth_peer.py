# ruff: noqa: E402  Unsloth must be imported before what it patches
"""TRL's SFTTrainer as Unsloth makes it on a CPU."""

import contextlib
import sys

sys.modules["torchvision"] = None  # for images only; one that was built for another torch would stop the import
with contextlib.redirect_stdout(sys.stderr):  # it greets, and the driver reads what is printed
    import unsloth

import torch
from rounds import Rounds, settings
from torch_peers import sft_run


def main() -> None:
    asked = settings()
    rounds = Rounds(asked)
    model, tokenizer = unsloth.FastLanguageModel.from_pretrained(
        f"{asked['folder']}/model", max_seq_length=asked["length"], load_in_4bit=asked["method"] == "qlora",
        dtype=torch.bfloat16 if asked["bf16"] else torch.float32)
    model = unsloth.FastLanguageModel.get_peft_model(model, r=16, lora_alpha=32, use_gradient_checkpointing=False)
    sft_run(asked, rounds, model, tokenizer)


if __name__ == "__main__":
    main()
