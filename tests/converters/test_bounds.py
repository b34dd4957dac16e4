"""Sentences quote strangers' files in one short line, and damaged JSON is named."""

from __future__ import annotations

import json

import pytest

from cspd_jax.__main__ import main
from cspd_jax._utils.json_files import read_json
from cspd_jax.check import UserError, shown


def test_sentences_are_one_printable_line():
    assert str(UserError("größer: 大きい, a b")) == "größer: 大きい, a b"
    assert str(UserError("\x1b[2Jname\nforged \u202e \ud800")) == r"\x1b[2Jname\nforged \u202e \ud800"


def test_values_are_shown_short():
    deep: list = []
    for _ in range(100_000):
        deep = [deep]
    assert len(shown(deep)) < 80 and len(shown("x" * 10**6)) == 80
    assert shown("x") == "'x'" and shown(3) == "3" and shown([1, "a"]) == "[1, 'a']"


def test_the_command_line_prints_no_escape_sequences(tmp_path, capsys):
    (tmp_path / "config.json").write_text(json.dumps({"format_version": 1, "kind": "\x1b[2J"}))
    assert main(["info", str(tmp_path)]) == 2
    err = capsys.readouterr().err
    assert "\x1b" not in err and len(err.splitlines()) == 1


@pytest.mark.parametrize("content", [b"{", "{}".encode("utf-16"), b"[" * 100_000])
def test_a_file_that_is_no_json(tmp_path, content):
    (tmp_path / "x.json").write_bytes(content)
    with pytest.raises(UserError, match=r"x\.json is not readable JSON"):
        read_json(tmp_path / "x.json")
