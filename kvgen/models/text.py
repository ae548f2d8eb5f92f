"""Token by token text: what a tokenizer makes of a growing list, given out as soon as it is sure."""

from __future__ import annotations

from typing import Any

from kvgen.errors import ArgumentError
from kvgen.models.folder_files import reason_of

UNFINISHED = "\ufffd"
"""What a tokenizer shows for bytes that are not yet a whole character."""


class TextStream:
    """The text of one answer, piece by piece. The pieces together are the decoded whole."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self.tokens: list[int] = []
        self._start = 0  # decoded together with what follows, because spaces depend on neighbours
        self._shown = 0  # tokens whose text has been given out

    def push(self, token: int) -> str:
        """The text that ``token`` completes; empty while a character is unfinished."""
        self.tokens.append(token)
        piece = self._rest()
        if piece.endswith(UNFINISHED):
            return ""
        self._advance()
        return piece

    def finish(self) -> str:
        """What is left, unfinished characters included."""
        piece = self._rest()
        self._advance()
        return piece

    def _rest(self) -> str:
        shown = self._decode(self._start, self._shown)
        return self._decode(self._start, len(self.tokens))[len(shown) :]

    def _decode(self, start: int, end: int) -> str:
        text: str = self._tokenizer.decode(
            self.tokens[start:end], skip_special_tokens=True, clean_up_tokenization_spaces=False
        )
        return text

    def _advance(self) -> None:
        self._start, self._shown = self._shown, len(self.tokens)


def prompt_tokens(tokenizer: Any, prompt: str, *, chat: bool) -> list[int]:
    """A prompt as tokens, inside the chat template where ``chat``; ``ArgumentError`` where there is none."""
    if not chat:
        return list(tokenizer(prompt)["input_ids"])
    if not getattr(tokenizer, "chat_template", None):
        raise ArgumentError("--chat: this model's tokenizer has no chat template; leave --chat out")
    message = [{"role": "user", "content": prompt}]
    try:
        text = tokenizer.apply_chat_template(message, tokenize=False, add_generation_prompt=True)
    except Exception as error:  # a template is a program of somebody else's
        reason = reason_of(error)
        raise ArgumentError(
            f"--chat: the model's chat template fails ({reason}); leave --chat out"
        ) from error
    # The template writes the special tokens itself.
    return list(tokenizer(text, add_special_tokens=False)["input_ids"])
