"""Text as rows of byte ids: windows into one long stream of documents."""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import platform

import numpy as np

from cspd_jax.byte_tokenizer import END_OF_TEXT, ByteTokenizer
from cspd_jax.data.source import Split, generator
from cspd_jax.data.stdlib import Document, documents
from cspd_jax.errors import UserError


@dataclasses.dataclass(frozen=True)
class TextConfig:
    """The documentation of Python's standard library. length: ids in a row."""

    length: int = 256

    def __post_init__(self):
        if self.length < 2:
            raise UserError(f"rows of {self.length} ids cannot be learnt from; the least length is 2")


class Texts:
    """Rows of a `TextConfig`, from the standard library unless other documents are given."""

    def __init__(self, config: TextConfig, corpus: tuple[Document, ...] | None = None):
        self.config = config
        self._corpus = corpus

    def batch(self, index: int, size: int, *, seed: int = 0, split: Split = "train") -> np.ndarray:
        """Batch `index` of the endless sequence that belongs to (seed, split): windows [size, length] int32
        at places drawn uniformly."""
        stream, length = self.streams[split], self.config.length
        if len(stream) < length:
            raise UserError(f"the {split} texts hold {len(stream)} ids, fewer than a row of {length}")
        starts = generator(seed, split, index).integers(len(stream) - length + 1, size=size)
        return stream[starts[:, None] + np.arange(length)].astype(np.int32)

    @functools.cached_property
    def streams(self) -> dict[Split, np.ndarray]:
        """All documents of a split in their order, each after an end-of-text id, and one more at the end:
        int16."""
        encode, ids = ByteTokenizer().encode, {"train": [], "held-out": []}
        for document in documents() if self._corpus is None else self._corpus:
            ids["held-out" if document.held_out else "train"] += encode(document.text)
        return {split: np.array([*found, END_OF_TEXT], np.int16) for split, found in ids.items()}

    def describe(self) -> dict[str, object]:
        """What a checkpoint keeps about its corpus, which depends on the version of Python."""
        train, held_out = self.streams["train"], self.streams["held-out"]
        return {
            "corpus": "docstrings and comments of Python's standard library",
            "python": platform.python_version(),
            "train_ids": len(train),
            "held_out_ids": len(held_out),
            "sha256": hashlib.sha256(train.tobytes() + held_out.tobytes()).hexdigest(),
        }
