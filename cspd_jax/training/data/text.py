"""Texts to learn from: a corpus that every user has, as rows of byte ids; and prompts
from a file.

The corpus is the prose of Python's standard library. It has one document per module,
with the module's docstrings and blocks of comments in the order of the source. It
depends only on the running Python, and has about 3 MB. A row is a window into the
stream of all documents.
"""

from __future__ import annotations

import ast
import dataclasses
import functools
import hashlib
import inspect
import io
import itertools
import pathlib
import sysconfig
import tokenize
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np

from cspd_jax.check import UserError
from cspd_jax.models import TextModel
from cspd_jax.tokenizers import (
    END_OF_TEXT,
    ByteTokenizer,
    chat_ids,
    chat_template,
    load_tokenizer,
)
from cspd_jax.training.data.source import Split, generator

STANDARD_LIBRARY = pathlib.Path(sysconfig.get_path("stdlib"))
CORPUS = "docstrings and comments of Python's standard library"
# Names of folders that are left out of the corpus: tests, generated tables, copies of
# other projects, and packages that differ between installations.
_LEFT_OUT = {
    "test",
    "tests",
    "idle_test",
    "encodings",
    "pydoc_data",
    "site-packages",
    "_bundled",
}
_SHORTEST = 20  # characters of a passage; a shorter one is a label rather than prose
_HELD_OUT_ONE_IN = 20  # of this many documents, one is held out from training


@dataclasses.dataclass(frozen=True)
class Texts:
    """A data set of rows of `length` ids from the documentation of Python's standard
    library."""

    length: int = 256

    def batch(
        self, index: int, size: int, *, seed: int = 0, split: Split = "train"
    ) -> np.ndarray:
        """Makes batch number `index` of the endless sequence of (seed, split). It
        consists of windows [size, length] that start at uniformly drawn places."""
        stream = self.streams[split]
        starts = generator(seed, split, index).integers(
            len(stream) - self.length + 1, size=size
        )
        return stream[starts[:, None] + np.arange(self.length)].astype(np.int32)

    @functools.cached_property
    def streams(self) -> dict[Split, np.ndarray]:
        """The documents of each split as one array of ids, [N] int16. An end-of-text id
        stands before each document and after the last one."""
        encode = ByteTokenizer().encode
        ids: dict[Split, list[int]] = {"train": [], "held-out": []}
        for document in documents():
            ids["held-out" if document.held_out else "train"] += encode(document.text)
        return {
            split: np.array([*found, END_OF_TEXT], np.int16)
            for split, found in ids.items()
        }


class Document(NamedTuple):
    """The documentation of a module.

    module: the dotted name of the module.
    text: its passages, separated by blank lines.
    """

    module: str
    text: str

    @property
    def held_out(self) -> bool:
        """Whether the document is held out from training. A hash of the module's name
        decides, so the choice is the same in every version of Python."""
        digest = hashlib.sha256(self.module.encode()).digest()
        return int.from_bytes(digest[:8], "big") % _HELD_OUT_ONE_IN == 0


@functools.lru_cache(maxsize=4)
def documents(root: pathlib.Path = STANDARD_LIBRARY) -> tuple[Document, ...]:
    """Reads the documents below `root`, sorted and without repeated passages."""
    # The words of a passage -> (the first module that has it, the passage).
    first: dict[str, tuple[str, str]] = {}
    for name, path in modules(root):
        for passage in passages(path):
            first.setdefault(" ".join(passage.split()), (name, passage))
    by_module = itertools.groupby(first.values(), key=lambda found: found[0])
    return tuple(
        Document(name, "\n\n".join(text for _, text in found))
        for name, found in by_module
    )


def modules(root: pathlib.Path) -> list[tuple[str, pathlib.Path]]:
    """Returns the dotted name and the file of every module of the corpus, sorted by
    name."""
    found = []
    for path in root.rglob("*.py"):
        parts = path.relative_to(root).with_suffix("").parts
        generated = parts[-1].startswith("_sysconfigdata") or parts[0].startswith(
            "config-"
        )
        if not generated and _LEFT_OUT.isdisjoint(parts):
            found.append((".".join(part for part in parts if part != "__init__"), path))
    return sorted(found)


def passages(path: pathlib.Path) -> list[str]:
    """Returns the docstrings and blocks of comments of a file in the order of the
    source, without legal notices. If the file is not valid Python, as some are on
    purpose, returns an empty list."""
    try:
        with tokenize.open(path) as file:
            source = file.read()
        placed = sorted([*_docstrings(ast.parse(source)), *_comments(source)])
    except (SyntaxError, ValueError, OSError):
        return []
    return [
        text
        for _, text in placed
        if len(text) >= _SHORTEST and "copyright" not in text.lower()
    ]


def _docstrings(tree: ast.Module) -> Iterator[tuple[int, str]]:
    for node in ast.walk(tree):
        if isinstance(
            node, (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
        ):
            text = ast.get_docstring(node, clean=False)
            if text is not None:
                yield node.body[0].lineno, inspect.cleandoc(text)


def _comments(source: str) -> Iterator[tuple[int, str]]:
    """Yields (first line, text) for each block of comments. A block consists of
    adjacent comments that stand on lines of their own."""
    own = {
        token.start[0]: token.string.lstrip("#!:")
        for token in tokenize.generate_tokens(io.StringIO(source).readline)
        if token.type == tokenize.COMMENT and not token.line[: token.start[1]].strip()
    }
    for _, block in itertools.groupby(
        enumerate(own), key=lambda numbered: numbered[1] - numbered[0]
    ):
        rows = [row for _, row in block]
        yield rows[0], inspect.cleandoc("\n".join(own[row] for row in rows))


def read_lines(path: pathlib.Path) -> list[str]:
    """Returns the lines of a file that are not blank."""
    return [
        line.strip()
        for line in path.read_text(encoding="utf-8-sig").splitlines()
        if line.strip()
    ]


def prompt_ids(model: TextModel, texts: Sequence[str]) -> list[list[int]]:
    """Returns the ids of each text as a question to the model. If the model has a chat
    template, the text is put into it."""
    tokenizer = load_tokenizer(model)
    if tokenizer is None:
        raise UserError(
            f"{model.name} has no tokenizer.json, so it cannot read prompts"
        )
    template = chat_template(model.folder)
    if template is None:
        return [tokenizer.encode(text) for text in texts]
    return [
        chat_ids(tokenizer, template, [{"role": "user", "content": text}])
        for text in texts
    ]
