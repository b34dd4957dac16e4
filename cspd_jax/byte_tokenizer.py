"""Text as bytes: the vocabulary of the embedded language models.

Ids 0..255 are the bytes of UTF-8; `END_OF_TEXT` begins a text and ends it; `MASK` stands for a byte to be
found, in masked-diffusion models only.
"""

from __future__ import annotations

import codecs
from collections.abc import Iterable

END_OF_TEXT = 256
MASK = 257
CAUSAL_SIZE = 257
MASKED_SIZE = 258


class ByteTokenizer:
    """Encodes and decodes whole texts."""

    def encode(self, text: str, begin: bool = True) -> list[int]:
        """The bytes of a text, after the id that begins one unless `begin` is false."""
        return [END_OF_TEXT] * begin + list(text.encode("utf-8", errors="surrogatepass"))

    def decode(self, ids: Iterable[int]) -> str:
        """Bytes that are no UTF-8 become replacement characters; ids that are no bytes are left out."""
        stream = StreamDecoder()
        return stream.feed(ids) + stream.finish()


class StreamDecoder:
    """Decodes ids as they come: a character appears when its last byte has arrived."""

    def __init__(self):
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def feed(self, ids: Iterable[int]) -> str:
        """The text that these ids complete."""
        return self._decoder.decode(bytes(i for i in ids if 0 <= i < END_OF_TEXT))

    def finish(self) -> str:
        """What is left when no more ids come: a replacement character for a half character."""
        return self._decoder.decode(b"", final=True)
