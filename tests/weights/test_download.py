"""Published files by name: fetched once and verified, from a small local server."""

from __future__ import annotations

import hashlib
import http.server
import threading

import pytest
from PIL import Image

from cspd_jax.__main__ import main
from cspd_jax.errors import UserError
from cspd_jax.weights import download

BODY = b"weights" * 1000
SHA256 = hashlib.sha256(BODY).hexdigest()


class Server(http.server.BaseHTTPRequestHandler):
    requests: list[str]

    def do_GET(self):
        self.requests.append(self.path)
        self.send_response(404 if self.path == "/absent" else 200)
        self.send_header("Content-Length", str(len(BODY) + (self.path == "/cut")))
        self.end_headers()
        self.wfile.write(BODY)

    def log_message(self, *_):
        pass


@pytest.fixture
def published(monkeypatch):
    """A function that publishes a file as `file`, and tells what was asked of the server."""
    handler = type("Handler", (Server,), {"requests": []})
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    for variable in ("http_proxy", "HTTP_PROXY"):
        monkeypatch.delenv(variable, raising=False)

    def publish(name="good", most=2**20, sha256=SHA256):
        url = f"http://127.0.0.1:{server.server_port}/{name}"
        monkeypatch.setitem(download.FILES, "file", download.Published(url, most, sha256))
        return handler.requests

    yield publish
    server.shutdown()
    server.server_close()


def test_fetched_once(published, tmp_path):
    requests = published()
    path = download.resolve("file", tmp_path / "kept")
    assert path.read_bytes() == BODY and path.parent == tmp_path / "kept"
    assert download.resolve("file", tmp_path / "kept") == path and requests == ["/good"]


def test_a_path_is_itself(published, tmp_path, monkeypatch):
    requests = published()
    monkeypatch.chdir(tmp_path)
    (tmp_path / "file").write_bytes(b"mine")
    assert download.resolve("file").read_bytes() == b"mine"
    assert str(download.resolve("other")) == "other" and not requests


@pytest.mark.parametrize(
    "options,reason",
    [
        ({"name": "absent"}, "404"),
        ({"name": "cut"}, "7000 of 7001 bytes came"),
        ({"most": 100}, "more than 100 bytes"),
        ({"sha256": "0" * 64}, "its SHA-256 is not 0000"),
    ],
)
def test_what_is_wrong_leaves_nothing(published, tmp_path, options, reason):
    published(**options)
    with pytest.raises(UserError, match=f"could not be fetched.*{reason}.*give its path"):
        download.resolve("file", tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_the_command_takes_a_name(published, tmp_path, monkeypatch, capsys):
    """What it fetched is no network, and it says so."""
    published()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    (tmp_path / "images").mkdir()
    Image.new("RGB", (8, 8)).save(tmp_path / "images" / "0.png")
    samples = str(tmp_path / "images")
    code = main(["evaluate", "--samples", samples, "--against", samples, "--inception", "file"])
    told = capsys.readouterr().err
    assert code == 2 and "good" in told, told


def test_published_names():
    weights = download.FILES["pytorch-fid"]
    assert weights.url.endswith("-6726825d.pth") and weights.sha256.startswith("6726825d")
    assert all(file.url.startswith("https://") for file in download.FILES.values())
