"""`cspd-jax convert` and `cspd-jax info`: what machines rely on."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
import time
from pathlib import Path

import hf_folder
import ml_dtypes
import numpy as np
import pytest
import torch_writer
from safetensors.numpy import save_file

from cspd_jax import __version__, weights
from cspd_jax._utils import files
from cspd_jax.cli import convert, main

GOLDEN = Path(__file__).parents[1] / "golden"
TINY = str(GOLDEN / "mar_tiny.pth")


def run(capsys, *argv):
    """(exit code, standard output, standard error)."""
    try:
        code = main([str(a) for a in argv])
    except SystemExit as exit:
        code = exit.code
    return (code, *capsys.readouterr())


@pytest.mark.slow
def test_convert_and_info(tmp_path, capsys):
    code, out, err = run(capsys, "convert", TINY, tmp_path / "tiny", "--heads", "4,4", "--json")
    assert code == 0 and "converting 101,856 parameters" in err
    converted = json.loads(out)
    digest = hashlib.sha256(Path(TINY).read_bytes()).hexdigest()
    assert converted["kind"] == "mar" and converted["source_sha256"] == digest
    assert converted["config"]["respacing"] == "8" and converted["source"] == "mar_tiny.pth"
    code, out, err = run(capsys, "info", tmp_path / "tiny", "--json")
    assert code == 0 and json.loads(out) == converted and err == ""
    code, out, _ = run(capsys, "info", tmp_path / "tiny")
    assert code == 0 and "101,856" in out and digest in out
    code, out, _ = run(capsys, "info", TINY, "--json")
    source = json.loads(out)
    assert code == 0 and (source["kind"], source["params"], source["dtype"]) == ("mar", 101856, "float32")
    assert source["source_sha256"] == digest and "encoder_heads" not in source["config"]


@pytest.mark.slow
def test_bfloat16_and_other_weights(tmp_path, capsys):
    argv = ["convert", TINY, tmp_path / "x", "--heads", "4,4", "--dtype", "bfloat16", "--weights", "model"]
    assert run(capsys, *argv)[0] == 0
    loaded = weights.load(tmp_path / "x")
    assert loaded.metadata["dtype"] == "bfloat16"
    assert str(loaded.params["backbone"]["mask_token"].dtype) == "bfloat16"
    assert run(capsys, "info", GOLDEN / "kl16_g16.ckpt")[0] == 0


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("wrong", ["missing", "extra", "shape", "integers", None])
def test_info_refuses_what_convert_refuses(tmp_path, capsys, wrong, tied):
    config = {**hf_folder.LLAMA, "tie_word_embeddings": tied}
    tensors = hf_folder.tensors(config)
    if tied:
        tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"]
    name = "model.layers.1.mlp.up_proj.weight"
    if wrong == "missing":
        del tensors[name]
    elif wrong == "extra":
        tensors["model.layers.1.mlp.more.weight"] = tensors[name]
    elif wrong == "shape":
        tensors[name] = tensors[name][:-1]
    elif wrong == "integers":
        tensors[name] = tensors[name].astype(np.int32)
    (tmp_path / "config.json").write_text(json.dumps(config))
    save_file(tensors, tmp_path / "model.safetensors")
    (code, _, told), (of_info, _, told_by_info) = (
        run(capsys, *argv) for argv in (("convert", tmp_path, tmp_path / "made"), ("info", tmp_path))
    )
    assert code == of_info == (0 if wrong is None else 2)
    assert wrong is None or told.splitlines()[-1] == told_by_info.splitlines()[-1]


def bad_files(folder):
    (folder / "text.pth").write_text("hello")
    (folder / "short.pth").write_bytes(Path(TINY).read_bytes()[:300_000])
    evil = b"\x80\x02cposix\nsystem\nX\x02\x00\x00\x00id\x85R."
    torch_writer.write(folder / "evil.pth", {}, pickle=evil)
    nan = {"z_proj.weight": torch_writer.tensor(np.full((8, 16), np.nan, np.float32))}
    torch_writer.write(folder / "part.pth", {"model_ema": nan})
    (folder / "results").mkdir()
    (folder / "results" / "report.json").write_text("{}")
    hf_folder.write(folder / "llama", hf_folder.LLAMA)


@pytest.mark.parametrize(
    "argv, sentence",
    [
        (["convert", "none.pth", "out"], "none.pth does not exist"),
        (["convert", "text.pth", "out"], "or no PyTorch checkpoint"),
        (["convert", "short.pth", "out"], "is damaged, or no PyTorch checkpoint"),
        (["convert", "evil.pth", "out"], "posix.system, which is not among"),
        (["convert", "part.pth", "out"], "missing decoder_embed.weight"),
        (["convert", TINY, "out"], "--heads ENC,DEC"),
        (["convert", TINY, "out", "--heads", "4"], "two numbers ENC,DEC"),
        (["convert", TINY, "out", "--revision", "x"], "--revision is for models fetched by name"),
        (["convert", TINY, "text.pth", "--heads", "4,4"], "text.pth exists already"),
        (["info", "none"], "none does not exist"),
        (
            ["distill", "--target", "llama", "--out", "d"],
            "llama is a checkpoint of kind lm; the model must be of kind mar",
        ),
        (["info", "results"], "results is not a checkpoint, which is a folder with config.json and"),
        (["convert", "llama/model.safetensors", "out"], "one file of a model folder; give the folder, llama"),
        (["fly"], "invalid choice"),
        ([], "required"),
    ],
)
def test_mistakes(tmp_path, capsys, monkeypatch, argv, sentence):
    monkeypatch.chdir(tmp_path)
    bad_files(tmp_path)
    before = sorted(os.listdir(tmp_path))
    code, out, err = run(capsys, *argv)
    assert code == 2 and out == ""
    assert sentence in err and "cspd-jax" in err and "error: " in err and "Traceback" not in err
    assert sorted(os.listdir(tmp_path)) == before


def test_version_is_quick():
    start = time.perf_counter()
    out = subprocess.run(
        [sys.executable, "-m", "cspd_jax", "--version"], capture_output=True, text=True, check=True
    )
    assert out.stdout.strip() == f"cspd-jax {__version__}"
    assert time.perf_counter() - start < 5
    code = "import sys, cspd_jax.cli as c; c.make_parser(); sys.exit('jax' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0


def test_large_parameters_go_through_files(tmp_path, monkeypatch):
    """The same numbers; nothing is left beside the folder."""
    put = files.mapped_files(tmp_path)
    large = np.arange(2**17).reshape(2, -1).astype(ml_dtypes.bfloat16)
    mapped = put(("head", "kernel"), large)
    assert isinstance(mapped, np.memmap) and mapped.dtype == large.dtype and np.array_equal(mapped, large)
    assert not isinstance(put((), np.zeros(3)), np.memmap)
    hf_folder.write(tmp_path / "llama", hf_folder.LLAMA)
    monkeypatch.setattr(files, "_SMALL", 0)
    digests = []
    for limit in (2**30, 0):
        monkeypatch.setattr(convert, "_IN_MEMORY", limit)
        assert main(["convert", str(tmp_path / "llama"), str(tmp_path / f"out-{limit}")]) == 0
        digests.append(files.file_sha256(tmp_path / f"out-{limit}" / weights.FILE))
    assert digests[0] == digests[1] and not list(tmp_path.glob(".*"))
