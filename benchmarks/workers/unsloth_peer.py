"""TRL's SFTTrainer as Unsloth makes it on a CPU."""

import os

os.environ["UNSLOTH_SKIP_TORCHVISION_CHECK"] = "1"  # a torchvision built for another torch matters to images only
import unsloth  # noqa: E402, F401, I001  before what it patches
import torch  # noqa: E402
from rounds import Rounds, settings  # noqa: E402
from torch_peers import sft_run  # noqa: E402


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
