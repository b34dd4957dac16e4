"""From text to the ids of a language model and back: by a tokenizer.json of its own, or as bytes.

The models that come with the package read bytes: ids 0..255 are the bytes of UTF-8, `END_OF_TEXT` begins and
ends a text, and `MASK` stands for a byte to be found, in masked-diffusion models only.
"""

from __future__ import annotations

import codecs
import contextlib
import os
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, Protocol

from cspd_jax._utils import limits
from cspd_jax._utils.arrays import whole_numbers
from cspd_jax._utils.threads import beside
from cspd_jax.converters.tokenizer_file import check_tokenizer
from cspd_jax.errors import UserError, shown
from cspd_jax.weights.models import TextModel

END_OF_TEXT = 256
MASK = 257
CAUSAL_SIZE = 257
MASKED_SIZE = 258

_SECONDS = 60  # for a text; a megabyte takes about one
_QUIET = threading.Lock()
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
        return [END_OF_TEXT] * begin + list(_text(text).encode("utf-8", errors="surrogatepass"))

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
        return self._decoder.decode(bytes(i for i in _ids(ids) if 0 <= i < END_OF_TEXT))

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
        check_tokenizer(path)
        self._path, self._known_ids = path, known_ids
        self._tokenizer = self._ask(
            lambda: tokenizers.Tokenizer.from_file(str(path)), "be read as a tokenizer"
        )
        # A file may ask for texts of a billion ids; what is encoded here is neither cut nor filled up.
        self._tokenizer.no_padding()
        self._tokenizer.no_truncation()

    def encode(self, text: str, begin: bool = True) -> list[int]:
        ids = self._ask(
            lambda: self._tokenizer.encode_batch([text], add_special_tokens=begin)[0].ids,
            f"encode this text of {len(_text(text))} characters",
        )
        if ids and max(ids) >= self._known_ids:
            raise UserError(
                f"{self._path} gives id {max(ids)}, but the model has {self._known_ids} ids: this tokenizer"
                " is not the model's"
            )
        return ids

    def decode(self, ids: Sequence[int]) -> str:
        real = [i for i in _ids(ids) if i >= 0]  # what is below stands for no token
        try:
            return self._tokenizer.decode(real, skip_special_tokens=False)
        except (KeyboardInterrupt, SystemExit):
            raise
        except BaseException as error:  # the package's panics are no Exceptions
            raise UserError(f"{self._path} cannot decode these ids ({error})") from None

    def _ask(self, call: Callable[[], Any], what: str) -> Any:
        """The result of the library; UserError if it fails or takes too long.

        A pattern can take time quadratic in the length of a text. The call runs in a thread of its own, for
        it cannot be interrupted: one that takes too long is left behind, and ends with the process. (Of the
        package's ways to encode, only that of batches lets other threads run meanwhile.)
        """
        with _no_reports():
            try:
                return beside(call)[0].result(_SECONDS)
            except (KeyboardInterrupt, SystemExit):
                raise
            except TimeoutError:
                reason: object = f"that takes longer than {_SECONDS} s"
            except BaseException as error:  # bare Exceptions, and panics, which are none
                reason = error
        raise UserError(f"{self._path} cannot {what} ({reason})")


@contextlib.contextmanager
def _no_reports() -> Iterator[None]:
    """Hides what the library writes to file descriptor 2 about a panic, which becomes a sentence."""
    with _QUIET, contextlib.ExitStack() as stack:
        with contextlib.suppress(OSError):
            kept = os.dup(2)
            stack.callback(os.close, kept)
            nothing = os.open(os.devnull, os.O_WRONLY)
            stack.callback(os.close, nothing)
            os.dup2(nothing, 2)
            stack.callback(os.dup2, kept, 2)
        yield


def load_tokenizer(model: TextModel) -> Tokenizer | None:
    """The model's own tokenizer; None if it has none, so that it only takes ids."""
    if not isinstance(model, TextModel):
        raise UserError(f"a tokenizer is a language model's, as load_text returns it, not {shown(model)}")
    if (found := read_tokenizer(model.folder, model.config.known_ids)) is not None:
        return found
    if model.config.vocab_size in (CAUSAL_SIZE, MASKED_SIZE) and model.config.eos_ids == (END_OF_TEXT,):
        return ByteTokenizer()
    return None


def read_tokenizer(folder: Path | None, known_ids: int) -> FileTokenizer | None:
    """The tokenizer.json in a model's folder; None without."""
    found = [folder / place for place in _PLACES if limits.is_there(folder / place)] if folder else []
    return FileTokenizer(found[0], known_ids) if found else None


def check_unicode(prompt: str) -> None:
    """UserError for a prompt with halves of characters, which come of bytes that are no UTF-8."""
    try:
        prompt.encode()
    except UnicodeEncodeError as error:
        raise UserError(
            f"the prompt {shown(prompt)} is no text: character {error.start} is not Unicode"
        ) from None


def _text(text: Any) -> str:
    """What is to be encoded; UserError if it is no text."""
    if not isinstance(text, str):
        raise UserError(f"a tokenizer encodes one text, not {shown(text)}")
    return text


def _ids(ids: Any) -> list[int]:
    """What is to be decoded; UserError if these are no ids."""
    try:
        return [int(i) for i in whole_numbers(ids if hasattr(ids, "__array__") else list(ids)).reshape(-1)]
    except (TypeError, ValueError, RuntimeError):  # the last of arrays that have been deleted
        raise UserError(f"a tokenizer decodes a list of ids, not {shown(ids)}") from None


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
