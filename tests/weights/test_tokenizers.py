"""Tokenizers from files of strangers: what they ask for is done, or is one sentence."""

from __future__ import annotations

import copy
import json
import time

import pytest

from cspd_jax.errors import UserError
from cspd_jax.weights import tokenizers
from cspd_jax.weights.tokenizers import FileTokenizer

pytest.importorskip("tokenizers")

PLAIN = {
    "version": "1.0", "truncation": None, "padding": None, "added_tokens": [], "normalizer": None,
    "pre_tokenizer": None, "post_processor": None, "decoder": None,
    "model": {
        "type": "BPE", "dropout": None, "unk_token": None, "continuing_subword_prefix": None,
        "end_of_word_suffix": None, "fuse_unk": False, "byte_fallback": False,
        "vocab": {"a": 0, "b": 1, "ab": 2}, "merges": [["a", "b"]],
    },
}  # fmt: skip
PADDING = {
    "strategy": {"Fixed": 10**9}, "direction": "Right", "pad_to_multiple_of": None, "pad_id": 0,
    "pad_type_id": 0, "pad_token": "a",
}  # fmt: skip
TRUNCATION = {"max_length": 1, "strategy": "LongestFirst", "stride": 0, "direction": "Right"}
TEMPLATE = {"type": "TemplateProcessing", "pair": [], "special_tokens": {}}
TEXT = {"Sequence": {"id": "A", "type_id": 0}}


def split(pattern):
    return {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False}


def replace(pattern, content):
    return {"type": "Replace", "pattern": pattern, "content": content}


def steps(kind, *inner):
    return {"type": "Sequence", kind: list(inner)}


def opened(tmp_path, **changes):
    file = tmp_path / "tokenizer.json"
    file.write_text(json.dumps({**copy.deepcopy(PLAIN), **changes}))
    return FileTokenizer(file, 3)


def refused(tmp_path, sentence, **changes):
    with pytest.raises(UserError, match=rf"tokenizer\.json.*{sentence}"):
        opened(tmp_path, **changes)


def test_padding_and_truncation_are_not_obeyed(tmp_path):
    assert opened(tmp_path).encode("abb") == [2, 1]
    assert opened(tmp_path, padding=PADDING, truncation=TRUNCATION).encode("abb") == [2, 1]


@pytest.mark.parametrize(
    "changes, sentence",
    [
        ({"model": None}, "has no model with a vocabulary"),
        ({"model": {"type": "BPE"}}, "has no model with a vocabulary"),
        ({"model": {**PLAIN["model"], "merges": ["a z"]}}, "cannot be read as a tokenizer"),
        ({"model": {**PLAIN["model"], "vocab": {"a": -1}}}, "cannot be read as a tokenizer"),
        ({"model": {**PLAIN["model"], "unk_token": "u" * 201}}, "unk_token has 201 characters"),
        ({"pre_tokenizer": split("((((")}, "cannot be read as a tokenizer"),
        ({"pre_tokenizer": split("a" * 20_000)}, "has a pattern of 20000 characters"),
        ({"normalizer": replace({"String": "a"}, "a" * 10**6)}, r"a text 1e\+06 times as long; at most 64"),
        ({"normalizer": steps("normalizers", *[replace({"Regex": ""}, "a")] * 7)}, "128 times as long"),
        ({"decoder": replace({"String": "a"}, "a" * 1000)}, "1e.03 times as long"),
        ({"pre_tokenizer": steps("pretokenizers", *[{"type": "Digits"}] * 65)}, "66 steps for a text"),
        ({"pre_tokenizer": steps("pretokenizers", *[{"type": "ByteLevel"}] * 7)}, "128 times as long"),
        ({"post_processor": {**TEMPLATE, "single": [TEXT] * 65}}, "more than 64 tokens to every text"),
        (
            {"post_processor": steps("processors", *[{**TEMPLATE, "single": [TEXT] * 9}] * 2)},
            "81 times as long",
        ),
        (
            {"post_processor": {**TEMPLATE, "single": [{"SpecialToken": {"id": "z", "type_id": 0}}]}},
            "adds a token to every text that its special_tokens do not hold",
        ),
        (
            {"model": {"type": "WordPiece", "vocab": {}, "max_input_chars_per_word": 10**9}},
            "max_input_chars_per_word is 1000000000; it must be at most 4096",
        ),
    ],
)
def test_refused_when_opened(tmp_path, changes, sentence):
    refused(tmp_path, sentence, **changes)


def test_ordinary_steps_are_taken(tmp_path):
    space = replace({"String": " "}, "▁")
    quotes = [replace({"String": "``"}, '"'), replace({"Regex": " {2,}"}, " ")]
    template = {**TEMPLATE, "single": [{"SpecialToken": {"id": "a", "type_id": 0}}, TEXT]}
    template["special_tokens"] = {"a": {"id": "a", "ids": [0], "tokens": ["a"]}}
    made = opened(
        tmp_path,
        normalizer=steps("normalizers", {"type": "Prepend", "prepend": "▁"}, space, *quotes),
        pre_tokenizer=split(r"\p{N}{1,3}|\s+(?!\S)|\s+"),
        post_processor=template,
    )
    assert made.encode("ab") == [0, 2] and made.decode([2, 1]) == "ab b"


def test_what_the_library_says_while_it_works(tmp_path, capfd):
    """Errors of several types, and panics, which it also reports on its own."""
    word_level = {"type": "WordLevel", "vocab": {"a": 0}, "unk_token": "zz"}
    with pytest.raises(UserError, match="cannot encode this text of 3 characters"):
        opened(tmp_path, model=word_level).encode("xyz")
    with pytest.raises(UserError, match="retry-limit-in-match over"):
        opened(tmp_path, pre_tokenizer=split("(a+)+$")).encode("a" * 200 + "!")
    with pytest.raises(UserError, match="cannot encode this text of 1 characters"):
        opened(tmp_path).encode("\ud800")
    with pytest.raises(UserError, match="cannot decode these ids"):
        opened(tmp_path).decode([2**40])
    assert opened(tmp_path).decode([2, -1, 1]) == opened(tmp_path).decode([2, 1])
    assert capfd.readouterr().err == ""


def test_a_text_that_takes_too_long(tmp_path, monkeypatch):
    slow = opened(tmp_path, pre_tokenizer=split("a+$"))
    monkeypatch.setattr(tokenizers, "_SECONDS", 0.05)
    start = time.monotonic()
    with pytest.raises(UserError, match=r"of 12001 characters \(that takes longer than 0.05 s\)"):
        slow.encode("a" * 12_000 + "!")
    assert time.monotonic() - start < 5


def test_files_that_are_no_json(tmp_path):
    file = tmp_path / "tokenizer.json"
    for content, sentence in (
        (b"", "not readable JSON"),
        (b"\xff", "not readable JSON"),
        (b"[]", "JSON object"),
    ):
        file.write_bytes(content)
        with pytest.raises(UserError, match=sentence):
            FileTokenizer(file, 3)
