"""Tokenizers from files: their own padding is not obeyed, and they must be the model's
own."""

import copy
import json

import pytest

from cspd_jax.check import UserError
from cspd_jax.tokenizers import FileTokenizer

pytest.importorskip("tokenizers")

PLAIN = {
    "version": "1.0",
    "truncation": None,
    "padding": None,
    "added_tokens": [],
    "normalizer": None,
    "pre_tokenizer": None,
    "post_processor": None,
    "decoder": None,
    "model": {
        "type": "BPE",
        "dropout": None,
        "unk_token": None,
        "continuing_subword_prefix": None,
        "end_of_word_suffix": None,
        "fuse_unk": False,
        "byte_fallback": False,
        "vocab": {"a": 0, "b": 1, "ab": 2},
        "merges": [["a", "b"]],
    },
}
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
    file.write_text(json.dumps({**copy.deepcopy(PLAIN), **changes}))
    return FileTokenizer(file, 3)


def test_padding_and_truncation_are_not_obeyed(tmp_path):
    assert opened(tmp_path).encode("abb") == [2, 1]
    assert opened(tmp_path, padding=PADDING, truncation=TRUNCATION).encode("abb") == [
        2,
        1,
    ]


def test_a_tokenizer_of_another_model_is_refused(tmp_path):
    opened(tmp_path)
    with pytest.raises(UserError, match="gives id 2, but the model has 2 ids"):
        FileTokenizer(tmp_path / "tokenizer.json", 2).encode("ab")
