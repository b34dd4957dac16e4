"""What files may declare: sizes are checked before anything of that size is made."""

from __future__ import annotations

import json
import os
import struct
import zipfile

import numpy as np
import pytest

from cspd_jax.__main__ import main
from cspd_jax._utils import limits
from cspd_jax._utils.json_files import read_json, read_object
from cspd_jax._utils.typed import read_fields
from cspd_jax._utils.zip_files import array_names, read_arrays
from cspd_jax.converters.safetensors_file import open_safetensors
from cspd_jax.errors import UserError, one_line, shown
from cspd_jax.networks.config import MAR_PRESETS, KLConfig, MARConfig
from cspd_jax.networks.lm_config import LMConfig


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


@pytest.mark.parametrize(
    "content, reason",
    [
        (b"{", "Expecting property name"),
        ("{}".encode("utf-16"), "it must be in UTF-8, and is not"),
        (b"[" * 100_000, "recursion"),
        (b"[" * 65 + b"]" * 65, "nested more than 64 deep"),
        (b'{"a":' * 65 + b"1" + b"}" * 65, "nested more than 64 deep"),
        (b"[NaN]", "NaN is not JSON"),
        (b"[-Infinity]", "-Infinity is not JSON"),
        (b"[1e999]", "the number 1e999 is too large"),
        (b"1" * 5000, "Exceeds the limit"),
        (b"[" + b"[]," * 2**21 + b"1]", "more than 4194304 values"),
    ],
)
def test_json_beyond_the_bounds(tmp_path, content, reason):
    (tmp_path / "x.json").write_bytes(content)
    with pytest.raises(UserError, match=f"x.json is not readable JSON .*{reason}"):
        read_json(tmp_path / "x.json")


@pytest.mark.parametrize("read", [read_json, open_safetensors, array_names])
def test_pointers_of_git_lfs(tmp_path, read):
    file = tmp_path / "x"
    file.write_bytes(b"version https://git-lfs.github.com/spec/v1\noid sha256:0\n")
    with pytest.raises(UserError, match="x is a pointer of Git LFS; fetch the file itself by git lfs pull"):
        read(file)


def test_json_within_the_bounds(tmp_path):
    (tmp_path / "x.json").write_bytes(b"[" * 64 + b"]" * 64)
    read_json(tmp_path / "x.json")
    (tmp_path / "x.json").write_bytes(b"\xef\xbb\xbf[1]")  # as Windows writes it
    assert read_json(tmp_path / "x.json") == [1]
    (tmp_path / "x.json").write_bytes(b'{"a": 1, "a": 2}')
    assert read_object(tmp_path / "x.json") == {"a": 2}
    with pytest.raises(UserError, match="has 16 bytes; such a file has at most 15"):
        read_json(tmp_path / "x.json", 15)
    with pytest.raises(UserError, match=r"y\.json does not exist"):
        read_json(tmp_path / "y.json")
    with pytest.raises(UserError, match="is not a regular file"):
        read_json(tmp_path)
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(UserError, match="is not a regular file"):
        read_json(tmp_path / "pipe")


def npz(path, compression=zipfile.ZIP_STORED, **members):
    with zipfile.ZipFile(path, "w", compression) as archive:
        for name, content in members.items():
            archive.writestr(f"{name}.npy", content)


def npy(shape, content=b"", descr="<f4"):
    header = repr({"descr": descr, "fortran_order": False, "shape": shape}).encode()
    header += b" " * (-(len(header) + 11) % 64) + b"\n"
    return b"\x93NUMPY\x01\x00" + struct.pack("<H", len(header)) + header + content


@pytest.mark.parametrize(
    "content, reason",
    [
        (npy((10**12,)), "does not have the bytes of float32"),
        (npy((2**40, 2**40), b"x"), "does not have the bytes of float32"),
        (npy((1,) * 17, b"1234"), "does not have the bytes"),
        (npy((-1,), b"1234"), "does not have the bytes"),
        (npy((1,), b"12345678", "|O"), "does not have the bytes of object"),
        (npy((1,), b"1234")[:-2], "does not have the bytes"),
        (b"hello", "magic string"),
        (b"", "magic"),
        (b"\x93NUMPY\x01\x00" + struct.pack("<H", 9000) + b"(" * 9000, "x.npz is damaged"),
        (b"\x93NUMPY\x02\x00" + struct.pack("<I", 2**31), "header of version"),
    ],
)
def test_arrays_that_are_not_what_they_declare(tmp_path, content, reason):
    npz(tmp_path / "x.npz", x=content)
    with pytest.raises(UserError, match=reason):
        read_arrays(tmp_path / "x.npz", {"x": None})


@pytest.mark.slow
def test_a_bomb_is_not_unpacked(tmp_path):
    npz(tmp_path / "x.npz", zipfile.ZIP_DEFLATED, x=npy((2**24,), bytes(2**26)))
    assert (tmp_path / "x.npz").stat().st_size < 100_000
    with pytest.raises(UserError, match="array x has 67108992 bytes; it should have at most"):
        read_arrays(tmp_path / "x.npz", {"x": None})
    with pytest.raises(UserError, match="it should have at most 400"):
        read_arrays(tmp_path / "x.npz", {"x": 400})
    assert read_arrays(tmp_path / "x.npz", {"x": 2**26})["x"].shape == (2**24,)


def test_arrays_are_read(tmp_path):
    np.savez_compressed(tmp_path / "x.npz", a=np.arange(3), b="text")
    found = read_arrays(tmp_path / "x.npz", {"a": 24, "b": 16})
    assert found["a"].tolist() == [0, 1, 2] and str(found["b"]) == "text"
    with pytest.raises(UserError, match=r"there is no array c in it"):
        read_arrays(tmp_path / "x.npz", {"c": None})
    (tmp_path / "x.npz").write_bytes((tmp_path / "x.npz").read_bytes()[:-30])
    with pytest.raises(UserError, match=r"x\.npz is damaged"):
        read_arrays(tmp_path / "x.npz", {"a": None})


def safetensors_file(path, header, content=b""):
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + content)
    return path


def entry(shape, start, end, dtype="F32"):
    return {"dtype": dtype, "shape": shape, "data_offsets": [start, end]}


@pytest.mark.parametrize(
    "header, reason",
    [
        ({"w": entry([2**62, 2**62], 0, 4)}, "not a complete safetensors file"),
        ({"w": entry([10**9], 0, 4 * 10**9)}, "not a complete safetensors file"),
        ({"v": entry([2], 0, 8), "w": entry([2], 4, 12)}, "not a complete safetensors file"),
        ({"w": entry([1] * 17, 0, 4), "v": entry([2], 4, 12)}, "tensor w has 17 dimensions"),
        ({"w": entry([1], 0, 8, "C64"), "v": entry([1], 8, 12)}, "tensor w has type C64, which is not"),
        ({"\x1b[2J": entry([3], 0, 12)}, r"'\\x1b\[2J' is not a tensor's name"),
        ({"/" * 10**6: entry([3], 0, 12)}, "is not a tensor's name"),
        (b"[" * 100_000, "not a complete safetensors file"),
    ],
)
def test_safetensors_headers(tmp_path, header, reason):
    with pytest.raises(UserError, match=reason):
        open_safetensors(safetensors_file(tmp_path / "x.safetensors", header, bytes(12)))


def test_safetensors_headers_beyond_the_bounds(tmp_path, monkeypatch):
    path = safetensors_file(tmp_path / "x.safetensors", {"w": entry([3], 0, 12)}, bytes(12))
    assert list(open_safetensors(path)) == ["w"]
    monkeypatch.setattr(limits, "TENSORS", 1)
    with pytest.raises(UserError, match="lists more than 1 tensors"):
        open_safetensors(path)
    monkeypatch.setattr(limits, "HEADER_BYTES", 20)
    with pytest.raises(UserError, match="describes its tensors in 62 bytes; at most 20 are read"):
        open_safetensors(path)


def test_published_sizes_are_within_the_bounds():
    """The largest models that there are, by each of their sizes."""
    assert len(MAR_PRESETS) == 3 and KLConfig().blocks == 20
    common = {"family": "llama", "activation": "silu", "rope_theta": 500_000.0}
    llama_405b = {
        "width": 16_384,
        "depth": 126,
        "heads": 128,
        "kv_heads": 8,
        "head_dim": 128,
        "mlp_width": 53_248,
    }
    LMConfig(vocab_size=128_256, known_ids=128_256, max_positions=131_072, **llama_405b, **common)
    gemma = {"width": 5376, "depth": 62, "heads": 32, "kv_heads": 16, "head_dim": 128, "mlp_width": 21_504}
    LMConfig(vocab_size=262_208, known_ids=262_144, max_positions=10_485_760, **gemma, **common)


@pytest.mark.parametrize(
    "changes, sentence",
    [
        ({"groups": 3}, "128 channels, which 3 groups do not divide"),
        ({"channel_mult": ()}, "has 0 levels"),
        ({"channel_mult": (1,) * 13}, "has 13 levels"),
        ({"channel_mult": (10**9,)}, "channel_mult is 1000000000; it must be at most 1024"),
        ({"channels": 0}, "channels is 0; it must be at least 1"),
        ({"num_res_blocks": 20_000}, "num_res_blocks is 20000; it must be at most"),
    ],
)
def test_autoencoders_of_impossible_sizes(changes, sentence):
    with pytest.raises(UserError, match=sentence):
        KLConfig(**changes)


def test_lists_and_texts_of_a_configuration(tmp_path):
    with pytest.raises(UserError, match=r"x field respacing is 'aaaa.*; it must be a string of at most 4096"):
        read_fields(MARConfig, {"respacing": "a" * 5000}, "x", every=False)
    with pytest.raises(UserError, match="x field channel_mult lists 2000 values; it may list 1024"):
        read_fields(KLConfig, {"channel_mult": [1] * 2000}, "x", every=False)
    with pytest.raises(UserError, match="the model's eos_ids are 2000, more than 1024"):
        LMConfig("llama", 9, 9, 8, 1, 1, 1, 8, 8, 8, eos_ids=(1,) * 2000)
