"""What files may declare: sizes are checked before anything of that size is made."""

from __future__ import annotations

import json

import numpy as np
import pytest

from cspd_jax.__main__ import main
from cspd_jax._utils.files import read_arrays
from cspd_jax._utils.json_files import read_json
from cspd_jax.converters.safetensors_file import open_safetensors
from cspd_jax.errors import UserError, one_line, shown


def test_sentences_are_one_printable_line_of_sane_length():
    assert str(UserError("größer: 大きい, a b")) == "größer: 大きい, a b"
    assert str(UserError("\x1b[2Jname\nforged \u202e \ud800")) == r"\x1b[2Jname\nforged \u202e \ud800"
    long = str(UserError("file x: " + "\x1b" * 10**7 + " is wrong"))
    assert long.startswith("file x: ") and long.endswith(" is wrong") and len(long) < 10_000
    assert one_line("a" * 2000) == "a" * 2000 and "left out" in one_line("a" * 2001)


def test_values_are_shown_short():
    deep: list = []
    for _ in range(100_000):
        deep = [deep]
    assert len(shown(deep)) < 80 and len(shown("x" * 10**6)) == 80
    assert shown("x") == "'x'" and shown(3) == "3" and shown([1, "a"]) == "[1, 'a']"


def test_the_command_line_prints_no_escape_sequences(tmp_path, capsys):
    (tmp_path / "config.json").write_text(json.dumps({"format_version": 1, "kind": "\x1b[2J" + "k" * 10**6}))
    assert main(["info", str(tmp_path)]) == 2
    err = capsys.readouterr().err
    assert "\x1b" not in err and len(err) < 2500 and len(err.splitlines()) == 1


@pytest.mark.parametrize("read", [read_json, open_safetensors])
def test_pointers_of_git_lfs(tmp_path, read):
    file = tmp_path / "x"
    file.write_bytes(b"version https://git-lfs.github.com/spec/v1\noid sha256:0\n")
    with pytest.raises(UserError, match="x is a pointer of Git LFS; fetch the file itself by git lfs pull"):
        read(file)


@pytest.mark.parametrize("content", [b"{", "{}".encode("utf-16"), b"[" * 100_000])
def test_a_file_that_is_no_json(tmp_path, content):
    (tmp_path / "x.json").write_bytes(content)
    with pytest.raises(UserError, match=r"x\.json is not readable JSON"):
        read_json(tmp_path / "x.json")


def test_arrays_are_read(tmp_path):
    np.savez_compressed(tmp_path / "x.npz", a=np.arange(3), b="text")
    found = read_arrays(tmp_path / "x.npz", ["a", "b"])
    assert found["a"].tolist() == [0, 1, 2] and str(found["b"]) == "text"
    with pytest.raises(UserError, match=r"there is no such array in it \('c is not a file"):
        read_arrays(tmp_path / "x.npz", ["c"])
    whole = (tmp_path / "x.npz").read_bytes()
    for content in (whole[:-30], b"hello", b""):
        (tmp_path / "x.npz").write_bytes(content)
        with pytest.raises(UserError, match=r"x\.npz is damaged"):
            read_arrays(tmp_path / "x.npz", ["a"])
