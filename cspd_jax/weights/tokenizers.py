"""From text to the ids of a language model and back: by a tokenizer.json of its own, or as bytes.

The models that come with the package read bytes: ids 0..255 are the bytes of UTF-8, `END_OF_TEXT` begins and
ends a text, and `MASK` stands for a byte to be found, in masked-diffusion models only.
"""

from __future__ import annotations

import codecs
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Protocol

from cspd_jax.errors import UserError, shown
from cspd_jax.weights.models import TextModel

END_OF_TEXT = 256
MASK = 257
CAUSAL_SIZE = 257
MASKED_SIZE = 258

_PLACES = ("tokenizer/tokenizer.json", "tokenizer.json")  # in our checkpoint folders, and in Hugging Face's


class Tokenizer(Protocol):
    """Encodes and decodes whole texts. begin: whether what begins a text (and ends it, of some tokenizers) is
    added."""

    def encode(self, text: str, begin: bool = True) -> list[int]: ...

    def decode(self, ids: Sequence[int]) -> str: ...


class ByteTokenizer:
    """Text as the bytes of UTF-8."""

    def encode(self, text: str, begin: bool = True) -> list[int]:
        """The bytes of a text, preceded by END_OF_TEXT unless `begin` is false."""
        return [END_OF_TEXT] * begin + list(text.encode("utf-8", errors="surrogatepass"))

    def decode(self, ids: Iterable[int]) -> str:
        """Invalid UTF-8 becomes replacement characters, and ids that are not bytes are left out."""
        stream = StreamDecoder()
        return stream.feed(ids) + stream.finish()


class StreamDecoder:
    """Decodes ids as they come; a character appears when its last byte has arrived."""

    def __init__(self):
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def feed(self, ids: Iterable[int]) -> str:
        """The characters that these ids complete."""
        return self._decoder.decode(bytes(int(i) for i in ids if 0 <= i < END_OF_TEXT))

    def finish(self) -> str:
        """What is left at the end: a replacement character if a character is incomplete."""
        return self._decoder.decode(b"", final=True)


class FileTokenizer:
    """A tokenizer.json, read by the `tokenizers` package."""

    def __init__(self, path: Path, known_ids: int):
        try:
            import tokenizers
        except ImportError:
            raise UserError(
                f"{path} needs the package tokenizers; install it with: pip install tokenizers"
            ) from None
        self._path, self._known_ids = path, known_ids
        try:
            self._tokenizer = tokenizers.Tokenizer.from_file(str(path))
        except Exception as error:  # the package raises no other kind
            raise UserError(f"{path} cannot be read as a tokenizer ({error})") from None
        self._tokenizer.no_padding()  # what is encoded here is neither cut nor filled up
        self._tokenizer.no_truncation()

    def encode(self, text: str, begin: bool = True) -> list[int]:
        ids = self._tokenizer.encode(text, add_special_tokens=begin).ids
        if ids and max(ids) >= self._known_ids:
            raise UserError(
                f"{self._path} gives id {max(ids)}, but the model has {self._known_ids} ids: this tokenizer"
                " is not the model's"
            )
        return ids

    def decode(self, ids: Sequence[int]) -> str:
        """Decodes ids; what is below 0 stands for no token."""
        return self._tokenizer.decode([int(i) for i in ids if i >= 0], skip_special_tokens=False)


def load_tokenizer(model: TextModel) -> Tokenizer | None:
    """The model's own tokenizer; None if it has none, so that it only takes ids."""
    if (found := read_tokenizer(model.folder, model.config.known_ids)) is not None:
        return found
    if model.config.vocab_size in (CAUSAL_SIZE, MASKED_SIZE) and model.config.eos_ids == (END_OF_TEXT,):
        return ByteTokenizer()
    return None


def read_tokenizer(folder: Path | None, known_ids: int) -> FileTokenizer | None:
    """The tokenizer.json in a model's folder; None without."""
    found = [folder / place for place in _PLACES if (folder / place).is_file()] if folder else []
    return FileTokenizer(found[0], known_ids) if found else None


def check_unicode(prompt: str) -> None:
    """UserError for a prompt with halves of characters, which come of bytes that are no UTF-8."""
    try:
        prompt.encode()
    except UnicodeEncodeError as error:
        raise UserError(
            f"the prompt {shown(prompt)} is no text: character {error.start} is not Unicode"
        ) from None


def pieces(tokenizer: Tokenizer, ids: Sequence[int]) -> list[str]:
    """What each id adds to the text, "" while a character is incomplete. Joined, they are the text."""
    whole, found = "", []
    start = 0
    for i in range(len(ids)):
        text = tokenizer.decode(ids[start : i + 1])
        complete = not text.endswith("�") or i == len(ids) - 1
        found.append(text[len(whole) :] if complete else "")
        if complete:
            whole = text
            if not text[-1:].isspace() and i - start >= 64:  # ids far back no longer matter
                start, whole = i, tokenizer.decode(ids[i : i + 1])
    return found
