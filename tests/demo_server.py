"""`cspd-jax demo` in a process of its own, and what clients do to it: for tests/apps/test_demo.py and
tests/soak.py."""

from __future__ import annotations

import contextlib
import dataclasses
import http.client
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.parse
from collections.abc import Generator

import tiny

JSON = {"Content-Type": "application/json"}
GARBAGE = [  # body, status, part of the sentence
    (b"", 422, "not JSON"),
    (b"\xff\xfe\x00", 422, "not JSON"),
    (b"[" * 60_000, 422, "not JSON"),
    (b"[1, 2]", 422, "JSON object"),
    (b"null", 422, "JSON object"),
    (b"{}", 422, "has a label"),
    (b'{"label": 0, "steps": 3}', 422, "'steps' is no field"),
    (b'{"label": "0"}', 422, "whole number"),
    (b'{"label": true}', 422, "whole number"),
    (b'{"label": 99}', 422, "at most 4"),
    (b'{"label": 1e99}', 422, "whole number"),
    (b'{"label": 0, "seed": -1}', 422, "at least 0"),
    (b'{"label": 0, "seed": ' + b"9" * 4000 + b"}", 422, "at most"),
    (b'{"label": 0, "cfg": NaN}', 422, "finite"),
    (b'{"label": 0, "cfg": 1e400}', 422, "finite"),
    (b'{"label": 0, "method": {"a": []}}', 422, "method is"),
    (b'{"label": null, "method": null}', 422, "has a label"),
    (b'{"label": 0, "keep": "left-half"}', 422, "keep is about the picture of image"),
    (b'{"label": 0, "image": "QUJD", "keep": "left-half"}', 422, "cannot be read as a PNG or JPEG"),
    (b'{"label": 0, "image": 3, "mask": null, "keep": "border"}', 422, "in base64"),
]


def save_target(path, tokens=144):
    """A tiny model of images that takes a moment."""
    return tiny.save_mar(path, dataclasses.replace(tiny.PIXELS, seq_len=tokens, respacing="ddim50"))


class Server:
    """`cspd-jax demo` in a process. Ctrl-C in a terminal does not reach it."""

    def __init__(self, *options, **environment):
        command = [sys.executable, "-m", "cspd_jax", "demo", "--port", "0", *options]
        # a pipe that nobody reads would fill up
        self._told = tempfile.TemporaryFile("w+")  # noqa: SIM115
        self.process = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=self._told, text=True, process_group=0,
            env={**os.environ, **environment},
        )  # fmt: skip
        try:
            self._wait()
        except BaseException:
            self.process.kill()
            raise

    def _wait(self):
        """Until it is ready."""
        self.url = self.process.stdout.readline().strip()
        self.host, self.port = urllib.parse.urlsplit(self.url).hostname, urllib.parse.urlsplit(self.url).port
        end = time.monotonic() + 300
        while self.get("/healthz")[0] != 200:
            assert time.monotonic() < end and self.process.poll() is None
            time.sleep(0.2)

    def ask(self, method, path, body=None, headers=None, timeout=120):
        """(status, content)"""
        connection = http.client.HTTPConnection(self.host, self.port, timeout=timeout)
        try:
            connection.request(method, path, body, headers or {})
            answer = connection.getresponse()
            return answer.status, answer.read()
        finally:
            connection.close()

    def get(self, path, **headers):
        return self.ask("GET", path, headers=headers)

    def image(self, headers=JSON, **asked):
        status, content = self.ask("POST", "/v1/images", json.dumps(asked), headers)
        return status, json.loads(content)

    def visit(self, tab: int, values: list, session: str) -> Generator[str, None, None]:
        """Presses "Generate" in a tab of the page (0, 1, 2) with the values of its fields, as a browser does,
        and yields what is shown. Whoever stops reading has closed the page."""
        from gradio_client.utils import apply_diff

        config = json.loads(self.get("/config")[1])
        button = [event for event in config["dependencies"] if len(event["inputs"]) > 1][tab]
        values = [*values, *[None] * (len(button["inputs"]) - len(values))]
        asked = {"data": values, "fn_index": button["id"], "session_hash": session}
        with contextlib.ExitStack() as streams:
            self._stream(streams, f"/gradio_api/heartbeat/{session}")
            status, content = self.ask("POST", "/gradio_api/queue/join", json.dumps(asked), JSON)
            if status != 200:
                raise ValueError(f"the page does not take a request: {status} {content[:200]!r}")
            shown = None
            for line in self._stream(streams, f"/gradio_api/queue/data?session_hash={session}"):
                news = json.loads(line.removeprefix(b"data: ")) if line.startswith(b"data: ") else {}
                if news.get("msg") in ("process_generating", "process_completed"):
                    if not news["success"]:
                        raise ValueError(f"the page failed: {news}")
                    data = news["output"]["data"]
                    if news["msg"] == "process_generating":
                        shown = data[0] if shown is None else apply_diff(shown, data[0])
                        yield shown
                if news.get("msg") == "process_completed":
                    return
            raise ValueError("the page was cut off")

    def _stream(self, streams, path):
        connection = http.client.HTTPConnection(self.host, self.port, timeout=120)
        streams.callback(connection.close)
        connection.request("GET", path)
        return connection.getresponse()

    def raw(self, content, wait=0.0):
        """Sends bytes and goes away."""
        with socket.create_connection((self.host, self.port), timeout=10) as connection:
            connection.sendall(content)
            time.sleep(wait)

    def told(self, content):
        """Sends bytes, and waits for an answer and the end of the connection."""
        with socket.create_connection((self.host, self.port), timeout=30) as connection:
            connection.sendall(content)
            answer = connection.recv(1000)
            with contextlib.suppress(ConnectionResetError):  # what was sent has not been read
                while connection.recv(1000):
                    pass
        return answer

    def metric(self, name):
        lines = self.get("/metrics")[1].decode().splitlines()
        return float(next(line for line in lines if line.startswith(f"cspd_jax_{name} ")).split()[-1])

    def count(self, outcome):
        return self.metric(f'requests_total{{outcome="{outcome}"}}')

    def until_idle(self):
        end = time.monotonic() + 60
        while self.metric("rows_busy") or self.metric("requests_waiting"):
            assert time.monotonic() < end
            time.sleep(0.1)

    def stop(self):
        """What it has complained of, after SIGTERM."""
        self.process.send_signal(signal.SIGTERM)
        self.process.communicate(timeout=30)
        with self._told as told:
            told.seek(0)
            return told.read()


def whole_request(**asked) -> bytes:
    """All bytes of a request for an image."""
    body = json.dumps(asked).encode()
    head = "POST /v1/images HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: application/json\r\nContent-Length: "
    return f"{head}{len(body)}\r\n\r\n".encode() + body
