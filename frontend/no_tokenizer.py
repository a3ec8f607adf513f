"""What stands in the tokenizer's place with --skip-tokenizer-init: token ids in, token ids out."""

from collections.abc import Sequence
from pathlib import Path

from ..engine_core.refusal import Refused, RefusedError
from .tokenizer import Tokenizer

_REASON = "needs the tokenizer that --skip-tokenizer-init left out; send token ids"


class NoTokenizer(Tokenizer):
    """Answers have no text, and what would need one is refused. ``folder``: the model's."""

    def __init__(self, folder: str | Path) -> None:
        self.folder = Path(folder)
        self.special_tokens = {}
        self.special_ids = frozenset()
        self.chat_template = None
        self.max_id = -1

    @property
    def has_text(self) -> bool:
        """False."""
        return False

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Raises RefusedError."""
        raise RefusedError(Refused("prompt", f"text {_REASON}", 501))

    def decode(self, ids: Sequence[int], skip_special: bool = True) -> str:
        """No text."""
        return ""

    def token_text(self, token: int) -> str:
        """``token_id:N``, as vLLM names tokens whose text is not wanted."""
        return f"token_id:{token}"

    def token_bytes(self, token: int) -> bytes:
        """The bytes of :meth:`token_text`."""
        return self.token_text(token).encode()

    def is_special(self, text: str) -> bool:
        """False: no text is a token."""
        return False

    def render_chat(
        self,
        messages: Sequence[dict[str, object]],
        add_generation_prompt: bool = True,
        tools: Sequence[dict[str, object]] | None = None,
    ) -> str:
        """Raises RefusedError."""
        raise RefusedError(Refused("messages", f"a conversation {_REASON} to a completion", 501))
