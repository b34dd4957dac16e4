"""Fetching by name: the real download code against a small local server."""

from __future__ import annotations

import functools
import hashlib
import http.server
import json
import threading
from pathlib import Path

import hf_folder
import numpy as np
import pytest
from safetensors.numpy import save

from cspd_jax import hub
from cspd_jax.__main__ import main
from cspd_jax.converters.torch_file import open_checkpoint

COMMIT = "0123456789abcdef0123456789abcdef01234567"
GOLDEN = Path(__file__).parents[1] / "golden"

pytest.importorskip("huggingface_hub")


class FakeHub(http.server.BaseHTTPRequestHandler):
    """Answers GET and HEAD of /<repository>/resolve/<revision>/<file>, and lists files, as the hub does."""

    repository = hub.REPOSITORY
    files: dict[str, bytes]
    requests: list[str]

    def do_HEAD(self):
        self.answer(send_body=False)

    def do_GET(self):
        self.answer(send_body=True)

    def answer(self, send_body: bool):
        self.requests.append(f"{self.command} {self.path}")
        revision, _, name = self.path.removeprefix(f"/{self.repository}/resolve/").partition("/")
        headers, body = {"X-Error-Code": "EntryNotFound"}, b"{}"
        if listed := self.path.startswith(f"/api/models/{self.repository}/"):
            told = {"id": self.repository, "sha": COMMIT, "siblings": [{"rfilename": n} for n in self.files]}
            tree = [{"type": "file", "path": n, "size": len(b), "oid": n} for n, b in self.files.items()]
            headers, body = {}, json.dumps(tree if "/tree/" in self.path else told).encode()
        elif found := revision in ("main", COMMIT) and name in self.files:
            body = self.files[name]
            headers = {"ETag": f'"{hashlib.sha256(body).hexdigest()}"', "X-Repo-Commit": COMMIT}
        self.send_response(200 if listed or found else 404)
        for key, value in {"Content-Length": str(len(body)), **headers}.items():
            self.send_header(key, value)
        self.end_headers()
        if send_body:
            self.wfile.write(body)

    def log_message(self, *_):
        pass


@pytest.fixture
def server():
    state = open_checkpoint(GOLDEN / "mar_tiny.pth")["model_ema"]
    weights = {name: np.array(tensor.numpy()) for name, tensor in state.items()}
    strange = {"net.transformer.weight": np.zeros((2, 2), np.float32)}
    FakeHub.files = {"mar-base.safetensors": save(weights), "kl16.safetensors": save(strange)}
    FakeHub.requests = []
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), FakeHub) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


def test_fetch_and_cache(server, tmp_path):
    fetched = hub.fetch("mar-base", endpoint=server, cache_dir=tmp_path)
    assert fetched.path.read_bytes() == FakeHub.files["mar-base.safetensors"]
    assert fetched.origin == f"{hub.REPOSITORY}@{COMMIT}/mar-base.safetensors"
    hub.fetch("mar-base", endpoint=server, cache_dir=tmp_path)
    assert sum(r.startswith("GET") and "/resolve/" in r for r in FakeHub.requests) == 1


@pytest.mark.slow
def test_convert_by_name(server, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    fetch = hub.fetch
    monkeypatch.setattr(hub, "fetch", lambda name: fetch(name, endpoint=server, cache_dir="cache"))
    assert main(["convert", "mar-base", "out", "--heads", "4,4", "--json"]) == 0
    description = json.loads(capsys.readouterr().out)
    assert description["source"] == f"jadechoghari/mar@{COMMIT}/mar-base.safetensors"
    assert description["source_sha256"] == hashlib.sha256(FakeHub.files["mar-base.safetensors"]).hexdigest()
    assert main(["convert", "kl16", "other"]) == 2
    error = capsys.readouterr().err
    assert "an S-VAE nor an Inception checkpoint; its tensors are: net.transformer.weight" in error
    assert not Path("other").exists()


@pytest.mark.slow
@pytest.mark.parametrize("files", [1, 2])
def test_language_models_by_name(server, tmp_path, monkeypatch, capsys, files):
    """Config, weights in one or several files; then `text` and `convert`."""
    folder = hf_folder.write(tmp_path / "made", hf_folder.LLAMA, files=files)
    FakeHub.files = {file.name: file.read_bytes() for file in folder.iterdir()}
    monkeypatch.setattr(FakeHub, "repository", "someone/tiny-1.5b")
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "cache"))
    fetch = functools.partial(hub.fetch, endpoint=server, cache_dir=tmp_path / "cache")
    monkeypatch.setattr(hub, "fetch", fetch)
    monkeypatch.chdir(tmp_path)
    command = ["--prompt-ids", "1,2", "--new-tokens", "4", "--method", "plain", "--json"]
    assert main(["text", "--target", "someone/tiny-1.5b", *command]) == 0
    by_name = json.loads(capsys.readouterr().out)
    assert main(["text", "--target", str(folder), *command]) == 0
    assert json.loads(capsys.readouterr().out)["ids"] == by_name["ids"]
    assert main(["convert", "someone/tiny-1.5b", "out", "--json"]) == 0
    description = json.loads(capsys.readouterr().out)
    assert description["source"] == f"someone/tiny-1.5b@{COMMIT}" and description["kind"] == "lm"
