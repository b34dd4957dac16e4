"""The quickstart notebook runs from top to bottom, without the network."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import nbformat
import pytest
import tiny
from nbclient import NotebookClient

from cspd_jax import models

NOTEBOOK = Path(__file__).parent.parent / "notebooks" / "quickstart.ipynb"


@pytest.mark.slow
def test_quickstart(tmp_path, monkeypatch):
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    nbformat.validate(notebook)
    code = [cell for cell in notebook.cells if cell.cell_type == "code"]
    assert all(cell.execution_count is None and not cell.outputs for cell in code)
    if not (models._SHIPPED / "target").is_dir():  # a checkout without the default model
        path = tiny.save_mar(tmp_path / "target")
        for cell in code:
            cell.source = cell.source.replace('"default"', repr(path))
    _offline(monkeypatch, tmp_path)
    resources = {"metadata": {"path": tmp_path}}
    NotebookClient(notebook, timeout=300, kernel_name="python3", resources=resources).execute()
    pictures = [o for cell in code for o in cell.outputs if "image/png" in o.get("data", {})]
    assert len(pictures) == 3
    assert code[-1].outputs[0].data["text/plain"] == "(3, 4, 4, 16)"


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
