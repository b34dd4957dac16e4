"""The notebooks run from top to bottom in a small configuration, without the network,
and are kept with what they show."""

import importlib.util
import io
import json
import re
import subprocess
import sys
import urllib.request
from pathlib import Path
from types import SimpleNamespace
from urllib.parse import quote

import nbformat
import pytest
from nbclient import NotebookClient

NOTEBOOKS = Path(__file__).parents[2] / "notebooks"
FEW_STEPS = {"num_iter": 4, "respacing": "ddim5"}
TINY = [
    "data.classes=01",
    "model.num_classes=2",
    "model.encoder_width=16",
    "model.encoder_depth=1",
    "model.encoder_heads=2",
    "model.decoder_width=16",
    "model.decoder_depth=1",
    "model.decoder_heads=2",
    "model.head_width=16",
    "model.head_depth=1",
    "model.respacing=ddim5",
    "batch=2",
]
SMALL = {
    "1_mar": {
        "AR_STEPS": 4,
        "LABELS": [0, 1],
        "FEW": 2,
        "REPEATS": 1,
        "OPTIONS": {"respacing": "ddim5"},
    },
    "2_exact_speculation": {"DRAWS": 500, "IMAGES": 4, "OPTIONS": FEW_STEPS},
    "3_your_own_pair": {
        "TARGET_STEPS": 2,
        "DRAFT_STEPS": 2,
        "DISTILL_STEPS": 2,
        "SETTINGS": TINY,
        "DRAFT_SETTINGS": TINY,
    },
    "4_text": {"NEW_TOKENS": 8, "MASKED_TOKENS": 8, "GAMMAS": [1, 2]},
}
NAMES = sorted(path.stem for path in NOTEBOOKS.glob("*.ipynb"))


def read(name):
    notebook = nbformat.read(NOTEBOOKS / f"{name}.ipynb", as_version=4)
    nbformat.validate(notebook)
    return notebook, [cell for cell in notebook.cells if cell.cell_type == "code"]


def pictures(cells):
    return [
        out
        for cell in cells
        for out in cell.outputs
        if "image/png" in out.get("data", {})
    ]


@pytest.mark.parametrize("name", NAMES)
def test_kept_with_its_pictures(name):
    notebook, cells = read(name)
    assert all(cell.execution_count for cell in cells), "run notebooks/execute.py"
    assert not any(out.output_type == "error" for cell in cells for out in cell.outputs)
    assert pictures(cells)
    text = json.dumps(notebook)
    assert len(text) < 1_000_000 and not re.search(r"/(home|root|tmp|work)/", text)


@pytest.fixture
def install(monkeypatch, tmp_path):
    """Runs the first cell where cspd_jax is missing, in a folder beside which there may
    be a checkout. Returns the arguments of pip."""
    (source,) = {read(name)[1][0].source for name in NAMES}
    (tmp_path / "notebooks").mkdir()
    monkeypatch.chdir(tmp_path / "notebooks")
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    asked = []

    def run(command, **_):
        asked.append(command[1:])
        return SimpleNamespace(returncode=run.code, stderr="no such place")

    def install(opened=None, code=0):
        run.code = code
        told = json.dumps([{"path": opened}] if opened else [])
        monkeypatch.setattr(
            urllib.request, "urlopen", lambda *_, **__: io.StringIO(told)
        )
        exec(source, {})
        return asked[-1][4:]

    monkeypatch.setattr(subprocess, "run", run)
    return install


def test_the_first_cell_of_all_installs_a_checkout(install, tmp_path):
    (tmp_path / "pyproject.toml").touch()
    assert install() == ["..", "matplotlib"]


def test_the_first_cell_of_all_installs_what_colab_opened(install):
    opened = (
        f"fileId={quote('https://github.com/me/copy/blob/a/b/notebooks/1_mar.ipynb')}"
    )
    assert install(opened) == ["git+https://github.com/me/copy@a/b", "matplotlib"]
    with pytest.raises(SystemExit, match="no such place"):
        install(opened, code=1)
    for elsewhere in (None, "fileId=1dXy"):  # no Colab; a notebook in somebody's Drive
        with pytest.raises(SystemExit, match="Set SOURCE to a copy"):
            install(elsewhere)


@pytest.mark.slow
def test_the_shortest_proof(monkeypatch, capsys, tmp_path):
    monkeypatch.syspath_prepend(NOTEBOOKS)
    monkeypatch.setattr("sys.argv", ["exactness.py", str(tmp_path / "picture.png")])
    __import__("exactness").main()
    lines = capsys.readouterr().out.splitlines()
    refuted = ["REFUTED" in line for line in lines if " p = " in line]
    assert refuted == [False, True, True, False, True]
    assert (tmp_path / "picture.png").exists()


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_runs(name, tmp_path, monkeypatch):
    notebook, cells = read(name)
    kept = len(pictures(cells))
    (parameters,) = (
        cell for cell in cells if "parameters" in cell.metadata.get("tags", [])
    )
    smaller = "\n".join(f"{key} = {value!r}" for key, value in SMALL[name].items())
    assert set(SMALL[name]) <= set(
        re.findall(r"^(\w+) =", parameters.source, flags=re.M)
    )
    parameters.source += f"\n{smaller}"
    _offline(monkeypatch, tmp_path)
    resources = {"metadata": {"path": tmp_path}}
    NotebookClient(
        notebook, timeout=600, kernel_name="python3", resources=resources
    ).execute()
    assert len(pictures(cells)) == kept


def _offline(monkeypatch, folder):
    """This interpreter as the kernel, no network, quick compilation."""
    kernel = folder / "kernels" / "python3"
    kernel.mkdir(parents=True)
    argv = [sys.executable, "-m", "ipykernel_launcher", "-f", "{connection_file}"]
    spec = {"argv": argv, "display_name": "Python 3", "language": "python"}
    (kernel / "kernel.json").write_text(json.dumps(spec))
    monkeypatch.setenv("JUPYTER_PATH", str(folder))
    for name in ("http_proxy", "https_proxy", "HTTP_PROXY", "HTTPS_PROXY"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setenv("JAX_DISABLE_MOST_OPTIMIZATIONS", "true")
