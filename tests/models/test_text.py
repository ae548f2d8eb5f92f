"""Text that grows token by token is the text of all tokens."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvgen.errors import ArgumentError
from kvgen.models.text import TextStream, prompt_tokens


class Bytes:
    """A tokenizer of bytes, as byte-level BPE is at its worst: letters outside ASCII take several tokens."""

    chat_template = None

    def decode(self, tokens, **_):
        return bytes(tokens).decode("utf-8", "replace")

    def __call__(self, text, **_):
        return {"input_ids": list(text.encode())}


@given(st.text(max_size=30))
def test_pieces_join_to_the_whole(text: str) -> None:
    stream = TextStream(Bytes())
    pieces = [stream.push(token) for token in text.encode()]
    assert "".join([*pieces, stream.finish()]) == text


def test_a_letter_comes_when_it_is_whole() -> None:
    stream = TextStream(Bytes())
    assert [stream.push(token) for token in "aé€".encode()] == ["a", "", "é", "", "", "€"]


def test_what_never_becomes_a_letter_is_shown_at_the_end() -> None:
    stream = TextStream(Bytes())
    assert stream.push(0xE2) == ""
    assert stream.finish() == "\ufffd"


def test_chat_needs_a_template() -> None:
    assert prompt_tokens(Bytes(), "ab", chat=False) == [97, 98]
    with pytest.raises(ArgumentError, match="no chat template"):
        prompt_tokens(Bytes(), "ab", chat=True)


def test_a_template_that_fails_is_named() -> None:
    jinja2 = pytest.importorskip("jinja2")

    class Failing(Bytes):
        chat_template = "{{ x"

        def apply_chat_template(self, message, **_):
            return jinja2.Template(self.chat_template).render(messages=message)

    with pytest.raises(ArgumentError, match=r"--chat: the model's chat template fails \(TemplateSyntaxError"):
        prompt_tokens(Failing(), "ab", chat=True)
