"""`cspd-jax convert` and `info` by whole commands, and how soon the command line answers."""

from __future__ import annotations

import hashlib
import json
import subprocess
import sys
from pathlib import Path

import pytest

from cspd_jax import __version__, weights
from cspd_jax._utils import files
from cspd_jax.cli import main

GOLDEN = Path(__file__).parents[1] / "golden"
TINY = str(GOLDEN / "mar_tiny.pth")


def printed(capsys, *argv):
    assert main([str(a) for a in (*argv, "--json")]) == 0
    return json.loads(capsys.readouterr().out)


@pytest.mark.slow
def test_convert_and_info(tmp_path, capsys):
    converted = printed(capsys, "convert", TINY, tmp_path / "tiny", "--heads", "4,4")
    digest = hashlib.sha256(Path(TINY).read_bytes()).hexdigest()
    assert converted["kind"] == "mar" and converted["source_sha256"] == digest
    assert converted["config"]["respacing"] == "8" and converted["source"] == "mar_tiny.pth"
    assert printed(capsys, "info", tmp_path / "tiny") == converted
    source = printed(capsys, "info", TINY)
    assert (source["kind"], source["params"], source["dtype"]) == ("mar", 101856, "float32")
    assert source["source_sha256"] == digest
    assert main(["info", "default"]) == 0 and "params:" in capsys.readouterr().out


@pytest.mark.slow
def test_bfloat16_and_other_weights(tmp_path, capsys, monkeypatch):
    """Large tensors lie in files meanwhile; nothing is left beside the folder."""
    monkeypatch.setattr(files, "_SMALL", 0)
    argv = ["convert", TINY, tmp_path / "x", "--heads", "4,4", "--dtype", "bfloat16", "--weights", "model"]
    assert printed(capsys, *argv)["dtype"] == "bfloat16"
    assert str(weights.load(tmp_path / "x").params["backbone"]["mask_token"].dtype) == "bfloat16"
    assert [path.name for path in tmp_path.iterdir()] == ["x"]


def test_the_command_line_answers_without_jax():
    code = "import sys, cspd_jax.cli as c; c.make_parser(); sys.exit('jax' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0
    told = subprocess.run([sys.executable, "-m", "cspd_jax", "--version"], capture_output=True, text=True)
    assert told.stdout.strip() == f"cspd-jax {__version__}"
