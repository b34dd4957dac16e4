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


class C:
    "The docstring of a class, in one line."
'''


def write(root, **files):
    for name, text in files.items():
        path = root / (name.replace(".", "/") + ".py")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


def test_passages_in_the_order_of_the_source(tmp_path):
    write(tmp_path, m=SOURCE)
    assert corpus.passages(tmp_path / "m.py") == [
        "The module's docstring: the first passage.",
        "A block of comments\nthat has two lines.",
        "What f does, indented\nas docstrings are.",
        "The docstring of a class, in one line.",
    ]


def test_what_is_left_out(tmp_path):
    text = '"""A docstring that is long enough, number {}."""'
    inside = {
        name: text.format(i)
        for i, name in enumerate(
            ["b", "a.c", "a.__init__", "a.test.t", "encodings.x", "_sysconfigdata__linux"]
        )
    }
    repeated = '"""A docstring that is  long\nenough, number 0."""'
    write(tmp_path, **inside, broken="def f(:", z=repeated)
    found = corpus.documents(tmp_path)
    assert [d.module for d in found] == ["a", "a.c", "b"]
    assert found[2].text == "A docstring that is long enough, number 0."


def test_the_running_python_has_these_passages():
    path = dict(corpus.modules(corpus.STANDARD_LIBRARY))
    assert path["heapq"].name == "heapq.py" and not any("site-packages" in str(p) for p in path.values())
    assert len(path) > 300 and "test.support" not in path
    assert corpus.passages(path["heapq"])[0].startswith("Heap queue algorithm")


CORPUS = tuple(
    Document(name, f"The text of {name}, né {i}.") for i, name in enumerate(["tempfile", "b", "c", "d"])
)


def test_streams_and_windows(monkeypatch):
    monkeypatch.setattr(corpus, "documents", lambda: CORPUS)
    texts = Texts(8)
    decode, stream = ByteTokenizer().decode, texts.streams["train"]
    assert decode(stream) == "".join(d.text for d in CORPUS[1:])
    assert decode(texts.streams["held-out"]) == CORPUS[0].text
    assert (stream == END_OF_TEXT).sum() == 4 and stream[0] == stream[-1] == END_OF_TEXT
    rows = np.concatenate([texts.batch(i, 50) for i in range(20)])
    windows = np.lib.stride_tricks.sliding_window_view(stream, 8)
    assert rows.dtype == np.int32 and {tuple(r) for r in rows} == {tuple(w) for w in windows}
    chex.assert_trees_all_equal(texts.batch(3, 50), rows[150:200])
    assert not np.array_equal(texts.batch(3, 50, seed=1), rows[150:200])
