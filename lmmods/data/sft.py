"""Supervised fine-tuning: conversations with a loss on the responses."""

from typing import Any

from lmmods.data.conversation_data import ConversationData
from lmmods.data.encode.conversations import Choices
from lmmods.data.fields import SFTDataFields


class SFTData(SFTDataFields, ConversationData):
    """Conversations for supervised fine-tuning; one row of a batch is one conversation."""

    def _choices(self) -> Choices:
        return Choices(self.train_on, self.turns, self.reasoning, self.system_prompt, self.replace_system_prompt)

    def _encoding_settings(self) -> dict[str, Any]:
        return {**super()._encoding_settings(), "train_on": self.train_on, "turns": self.turns}
