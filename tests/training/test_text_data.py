"""The corpus of Python's documentation, and bytes as ids."""

import chex
import numpy as np

from cspd_jax.tokenizers import END_OF_TEXT, ByteTokenizer
from cspd_jax.training.data import text as corpus
from cspd_jax.training.data.text import Document, Texts

SOURCE = '''#!/usr/bin/env python
# Copyright 1999, somebody. All rights reserved and so on.

"""The module's docstring: the first passage."""

# A block of comments
#   that has two lines.
def f(x):  # a remark behind code is no passage of its own
    """What f does, indented
    as docstrings are.
    """
    # short
    text = """just a string, however long it may be"""
'''
PASSAGES = (
    "The module's docstring: the first passage.",
    "A block of comments\nthat has two lines.",
    "What f does, indented\nas docstrings are.",
)


def test_passages_of_the_modules_in_their_order(tmp_path):
    """Those of tests, of generated modules, and that were there before are left out."""
    (tmp_path / "a" / "test").mkdir(parents=True)
    (tmp_path / "encodings").mkdir()
    for name in ("b", "a/c", "a/test/t", "encodings/x", "_sysconfigdata__linux"):
        (tmp_path / f"{name}.py").write_text(
            f'"""A docstring that is long enough, of {name}."""'
        )
    (tmp_path / "z.py").write_text('"""A docstring that is  long\nenough, of b."""')
    (tmp_path / "broken.py").write_text("def f(:")
    (tmp_path / "m.py").write_text(SOURCE)
    found = {document.module: document.text for document in corpus.documents(tmp_path)}
    assert list(found) == ["a.c", "b", "m"]
    assert found["b"] == "A docstring that is long enough, of b."
    assert corpus.passages(tmp_path / "m.py") == list(PASSAGES)


CORPUS = tuple(
    Document(name, f"The text of {name}, né {i}.")
    for i, name in enumerate(["tempfile", "b", "c", "d"])
)


def test_streams_and_windows(monkeypatch):
    monkeypatch.setattr(corpus, "documents", lambda: CORPUS)
    texts = Texts(8)
    decode = ByteTokenizer().decode
    stream = texts.streams["train"]
    assert decode(stream) == "".join(d.text for d in CORPUS[1:])
    assert decode(texts.streams["held-out"]) == CORPUS[0].text
    assert (stream == END_OF_TEXT).sum() == 4 and stream[0] == stream[-1] == END_OF_TEXT
    rows = np.concatenate([texts.batch(i, 50) for i in range(20)])
    windows = np.lib.stride_tricks.sliding_window_view(stream, 8)
    assert rows.dtype == np.int32
    assert {tuple(row) for row in rows} == {tuple(row) for row in windows}
    chex.assert_trees_all_equal(texts.batch(3, 50), rows[150:200])
    assert not np.array_equal(texts.batch(3, 50, seed=1), rows[150:200])
