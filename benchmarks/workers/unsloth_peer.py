# ruff: noqa: E402  Unsloth must be imported before the libraries that it patches
"""TRL's SFTTrainer with Unsloth's patches; on a GPU also with those of its kernels that compile."""

import contextlib
import sys

sys.modules["torchvision"] = None  # only for images; a build for another torch would break the import
with contextlib.redirect_stdout(sys.stderr):  # it prints a banner, and the driver reads stdout
    import unsloth

import torch
from rounds import read_settings
from torch_peers import make_rounds, run_sft


def main() -> None:
    settings = read_settings()
    rounds, rank = make_rounds(settings), settings.get("rank", 16)
    model, tokenizer = unsloth.FastLanguageModel.from_pretrained(
        f"{settings['folder']}/model", max_seq_length=settings["length"], load_in_4bit=settings["method"] == "qlora",
        dtype=torch.bfloat16 if settings["bf16"] else torch.float32)
    model = unsloth.FastLanguageModel.get_peft_model(model, r=rank, lora_alpha=2 * rank,
                                                     use_gradient_checkpointing=False)
    run_sft(settings, rounds, model, tokenizer)


if __name__ == "__main__":
    main()
