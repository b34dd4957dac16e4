"""Tokenizers from files: their own padding is not obeyed, and they must be the model's
own."""

import json

import pytest

from cspd_jax.check import UserError
from cspd_jax.tokenizers import FileTokenizer

pytest.importorskip("tokenizers")

MODEL = {"type": "BPE", "vocab": {"a": 0, "b": 1, "ab": 2}, "merges": [["a", "b"]]}
PADDING = {
    "strategy": {"Fixed": 10**9},
    "direction": "Right",
    "pad_to_multiple_of": None,
    "pad_id": 0,
    "pad_type_id": 0,
    "pad_token": "a",
}
TRUNCATION = {
    "max_length": 1,
    "strategy": "LongestFirst",
    "stride": 0,
    "direction": "Right",
}


def opened(tmp_path, **changes):
    file = tmp_path / "tokenizer.json"
    file.write_text(json.dumps({"version": "1.0", "model": MODEL, **changes}))
    return FileTokenizer(file, 3)


def test_padding_and_truncation_are_not_obeyed(tmp_path):
    for how in ({}, {"padding": PADDING, "truncation": TRUNCATION}):
        assert opened(tmp_path, **how).encode("abb") == [2, 1]


def test_a_tokenizer_of_another_model_is_refused(tmp_path):
    opened(tmp_path)
    with pytest.raises(UserError, match="gives id 2, but the model has 2 ids"):
        FileTokenizer(tmp_path / "tokenizer.json", 2).encode("ab")
