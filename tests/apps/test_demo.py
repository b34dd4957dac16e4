"""The demo as its users meet it: a server in a process of its own, under load, with careless clients, and
in a browser."""

from __future__ import annotations

import base64
import concurrent.futures
import contextlib
import dataclasses
import http.client
import io
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.parse

import hypothesis
import jax
import numpy as np
import pytest
import tiny
from hypothesis import strategies as st
from PIL import Image

import cspd_jax
from cspd_jax.apps.service.config import SELF

gradio = pytest.importorskip("gradio", reason="needs the extra demo (gradio)")
pytestmark = pytest.mark.slow

JSON = {"Content-Type": "application/json"}
ROWS, QUEUE = 4, 40
TOKENS = 144


class Server:
    """`cspd-jax demo` in a process."""

    def __init__(self, *options, **environment):
        command = [sys.executable, "-m", "cspd_jax", "demo", "--port", "0", *options]
        self.process = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
            env={**os.environ, **environment},
        )  # fmt: skip
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
        self.process.send_signal(signal.SIGTERM)
        return self.process.communicate(timeout=30)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    config = dataclasses.replace(tiny.PIXELS, seq_len=TOKENS, respacing="ddim50")  # takes a moment
    return tiny.save_mar(tmp_path_factory.mktemp("models") / "target", config)


@pytest.fixture(scope="module")
def server(folder):
    only = ("--text-target", "none", "--masked-model", "none")
    found = Server("--target", folder, *only, "--rows", str(ROWS), "--queue", str(QUEUE))
    yield found
    found.stop()


def pixels_of(answer):
    return np.asarray(Image.open(io.BytesIO(base64.b64decode(answer["png"]))))


@pytest.mark.parametrize("asked", [{}, {"method": "plain"}, {"cfg": 2.5}], ids=str)
def test_an_image_is_that_of_the_library(server, folder, asked):
    model = cspd_jax.load(folder)
    status, answer = server.image(label=3, seed=11, **asked)
    assert status == 200
    method = cspd_jax.Plain() if "method" in asked else SELF
    key, cfg = jax.random.key(11), asked.get("cfg", 1.0)
    tokens, info = cspd_jax.generate(key, model, [3], method, cspd_jax.Options(cfg=cfg, final_noise=True))
    expected = cspd_jax.to_images(model, tokens)[0, ..., 0].astype(int)
    assert np.abs(pixels_of(answer).astype(int) - expected).max() <= 1
    report = answer["report"]
    assert (report["class"], report["tokens"]) == ("dog", TOKENS)
    assert (report["tested"], report["accepted"]) == (int(info.tested.sum()), int(info.accepted.sum()))


def test_a_hundred_users_at_once_all_have_an_answer(server):
    """An image or a clear refusal for everyone; the same seed is the same image, whoever is beside it."""
    reference = {seed: server.image(label=seed % 5, seed=seed)[1]["png"] for seed in range(5)}
    before = {name: server.count(name) for name in ("accepted", "refused", "finished")}
    begin = threading.Barrier(100)

    def user(number):
        begin.wait(30)
        start = time.monotonic()
        seed = number % 5
        status, answer = server.image(label=seed, seed=seed)
        return status, answer, seed, time.monotonic() - start

    with concurrent.futures.ThreadPoolExecutor(100) as users:
        answers = list(users.map(user, range(100)))
    finished = [a for a in answers if a[0] == 200]
    refused = [a for a in answers if a[0] == 503]
    assert len(finished) + len(refused) == 100 and len(finished) >= QUEUE
    assert all("try again" in answer["error"] for _, answer, _, _ in refused)
    assert all(answer["png"] == reference[seed] for _, answer, seed, _ in finished)
    seconds = np.percentile([a[3] for a in finished], [50, 95, 99])
    print(f"{len(finished)} images, {len(refused)} refused; p50, p95, p99: {np.round(seconds, 2)} s")
    assert seconds[-1] < 60
    after = {name: server.count(name) - before[name] for name in before}
    assert after == {"accepted": len(finished), "refused": len(refused), "finished": len(finished)}


def raw(server, content, wait=0.0):
    """Sends bytes and goes away."""
    with socket.create_connection((server.host, server.port), timeout=10) as connection:
        connection.sendall(content)
        time.sleep(wait)


def test_clients_that_vanish_leave_nothing_behind(server):
    body = json.dumps({"label": 1, "seed": 5, "method": "plain", "cfg": 3.0}).encode()
    head = b"POST /v1/images HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: "
    whole = head + str(len(body)).encode() + b"\r\n\r\n" + body
    accepted = server.count("accepted")
    for content in (
        b"",
        b"\x00\xff" * 50,
        b"GET / HT",
        head,
        whole[:-5],
        b"POST /v1/images HTTP/9.9\r\n\r\n",
    ):
        raw(server, content)
    with concurrent.futures.ThreadPoolExecutor(20) as clients:
        list(clients.map(lambda _: raw(server, whole, 0.05), range(20)))
    server.until_idle()
    asked = server.count("accepted") - accepted
    assert 1 <= asked <= 20
    ends = [server.count(name) for name in ("finished", "cancelled", "timed_out", "failed")]
    assert sum(ends) == server.count("accepted") and ends[3] == 0 and ends[1] > 0
    assert server.image(label=0)[0] == 200


@pytest.mark.parametrize(
    "body, status, sentence",
    [
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
        (b'{"label": 0, "method": null}', 422, "method is"),
    ],
    ids=lambda value: repr(value)[:30],
)
def test_garbage_is_refused_in_a_sentence(server, body, status, sentence):
    found, content = server.ask("POST", "/v1/images", body, JSON)
    assert found == status and sentence in json.loads(content)["error"]
    assert len(content) < 4000 and b"\n" not in content


ANYTHING = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=5,
)


@hypothesis.settings(max_examples=200, deadline=None, database=None, derandomize=True)
@hypothesis.given(
    st.binary(max_size=50).map(lambda body: (body, None))
    | st.fixed_dictionaries(
        {}, optional=dict.fromkeys(("label", "seed", "cfg", "method", "x"), ANYTHING)
    ).map(lambda asked: (json.dumps(asked).encode(), asked))
)
def test_no_body_breaks_it(server, sent):
    body, asked = sent
    status, content = server.ask("POST", "/v1/images", body, JSON)
    assert status in (200, 422) and isinstance(json.loads(content), dict)
    if status == 200:
        assert asked is not None and "x" not in asked


def test_other_refusals(server):
    assert server.ask("POST", "/v1/images", b'{"label": 0}', {"Content-Type": "text/plain"})[0] == 415
    assert server.get("/v1/images")[0] in (404, 405)
    with contextlib.suppress(OSError):  # the server closes while the client still sends
        assert server.ask("POST", "/v1/images", b" " * 2**22, JSON)[0] == 413
    assert server.ask("POST", "/v1/images", b" " * (2**16 + 1), JSON)[0] == 413
    endless = (b" " * 1024 for _ in range(100_000))
    with contextlib.suppress(OSError):
        assert server.ask("POST", "/gradio_api/queue/join", endless, JSON)[0] == 413
    assert server.get("/healthz")[0] == 200


def test_a_body_that_does_not_come_is_not_waited_for(server):
    with socket.create_connection((server.host, server.port), timeout=30) as connection:
        connection.sendall(b"POST /v1/images HTTP/1.1\r\nHost: x\r\nContent-Length: 50\r\n\r\n{")
        assert connection.recv(1000).startswith(b"HTTP/1.1 408")


def test_the_page_loads_nothing_from_elsewhere(server):
    connection = http.client.HTTPConnection(server.host, server.port, timeout=30)
    connection.request("GET", "/")
    answer = connection.getresponse()
    page = answer.read().decode()
    policy = answer.headers["content-security-policy"]
    connection.close()
    assert "default-src 'self'" in policy and "http" not in policy
    assert "fonts.googleapis" not in page


def test_login(folder):
    only = ("--text-target", "none", "--masked-model", "none", "--rows", "1", "--login")
    server = Server("--target", folder, *only, CSPD_JAX_LOGIN="ann:se:cret")
    try:
        good = {"Authorization": "Basic " + base64.b64encode(b"ann:se:cret").decode()}
        bad = {"Authorization": "Basic " + base64.b64encode(b"ann:other").decode()}
        for headers in ({}, bad, {"Authorization": "Basic"}, {"Authorization": "Bearer \xe9"}):
            assert server.image(headers={**JSON, **headers}, label=0)[0] == 401
            assert server.get("/metrics", **headers)[0] == 401
        assert server.image(headers={**JSON, **good}, label=0)[0] == 200
        assert server.get("/metrics", **good)[0] == 200
        assert server.get("/config")[0] == 401  # of the page
    finally:
        _, complaints = server.stop()
    assert "se:cret" not in complaints and "Traceback" not in complaints


def test_a_request_that_takes_too_long_is_told_so(folder):
    only = ("--text-target", "none", "--masked-model", "none", "--rows", "1", "--timeout", "0.05")
    server = Server("--target", folder, *only)
    try:
        status, answer = server.image(label=0, method="plain")
        assert status == 504 and answer["error"] == "the request was not finished within 0.05 seconds"
        server.until_idle()
        assert server.count("timed_out") == 1 and server.get("/healthz")[0] == 200
    finally:
        server.stop()
    assert server.process.returncode == 143  # ended by SIGTERM, in good order


def test_what_cannot_be_served_is_one_sentence(folder):
    def told(*options, **environment):
        ended = subprocess.run(
            [sys.executable, "-m", "cspd_jax", "demo", *options],
            capture_output=True, text=True, timeout=120, env={**os.environ, **environment},
        )  # fmt: skip
        assert ended.returncode == 2 and ended.stderr.count("\n") == 1
        return ended.stderr

    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        assert "cannot listen at 127.0.0.1" in told("--port", str(taken.getsockname()[1]))
    assert "CSPD_JAX_LOGIN" in told("--login", "--port", "0", CSPD_JAX_LOGIN="nobody")
    none = ("--target", "none", "--text-target", "none", "--masked-model", "none")
    assert "nothing to serve" in told(*none, "--port", "0")
    assert "--timeout" in told("--timeout", "nan")


CHROMIUM = shutil.which("chromium") or shutil.which("google-chrome")


@pytest.fixture
def browser(tmp_path):
    if CHROMIUM is None or shutil.which("chromedriver") is None:
        pytest.skip("needs chromium and chromedriver")
    webdriver = pytest.importorskip("selenium.webdriver", reason="needs selenium")
    options = webdriver.ChromeOptions()
    options.binary_location = CHROMIUM
    for argument in (
        "headless", "no-sandbox", "disable-gpu", "disable-quic", "no-first-run",
        "disable-background-networking", "disable-component-update", "disable-sync",
        f"user-data-dir={tmp_path / 'browser'}", "window-size=1200,1000",
    ):  # fmt: skip
        options.add_argument(f"--{argument}")
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    found = webdriver.Chrome(options, webdriver.ChromeService(shutil.which("chromedriver")))
    yield found
    found.quit()


class Page:
    """What a user does with the page."""

    def __init__(self, driver, url):
        self.driver = driver
        driver.get(url)

    def shown(self, selector):
        return [e for e in self.driver.find_elements("css selector", selector) if e.is_displayed()]

    def until(self, condition, seconds=60):
        from selenium.common.exceptions import StaleElementReferenceException as Stale

        end = time.monotonic() + seconds
        while time.monotonic() < end:
            try:
                if found := condition():
                    return found
            except Stale:  # replaced while it was read
                pass
            time.sleep(0.05)
        raise AssertionError("it does not come")

    def click(self, name, selector="button"):
        self.until(lambda: [e for e in self.shown(selector) if e.text == name])[0].click()

    def report(self):
        tables = self.shown(".cspd-report")
        return tables[0].text if tables else ""


def test_images_in_a_browser(server, browser, tmp_path):
    page = Page(browser, server.url)
    page.click("Generate")
    page.until(lambda: page.report().count("finished") == 2)
    pictures = page.shown(".cspd img")
    assert len(pictures) == 2 and len(page.shown(".cspd rect")) == TOKENS
    assert all(browser.execute_script("return arguments[0].naturalWidth", p) == 48 for p in pictures)
    assert not [entry for entry in browser.get_log("browser") if entry["level"] == "SEVERE"]
    assert not page.shown(".cspd-error")
    browser.save_screenshot(str(tmp_path / "images.png"))


def test_text_in_a_browser_and_a_visitor_who_leaves(browser):
    """With the models that come with the package, whose images take seconds."""
    server = Server("--rows", "4")
    try:
        page = Page(browser, server.url)
        page.click("Generate")
        partial = page.until(lambda: [e.text for e in page.shown(".cspd figcaption") if " of 64" in e.text])
        assert not partial[0].endswith("64 of 64 tokens")
        page.click("Cancel")
        server.until_idle()
        assert server.count("cancelled") >= 1
        page.click("Text", "button[role=tab]")
        page.click("Generate")
        page.until(lambda: "128" in page.report())
        assert len(page.shown(".cspd-text span")) > 10
        page.click("Masked text", "button[role=tab]")
        page.click("Generate")
        page.until(lambda: page.report().startswith("tokens 64"))
        before = server.count("cancelled")
        page.click("Images", "button[role=tab]")
        page.click("Generate")
        page.until(lambda: server.metric("rows_busy"))
        browser.get("about:blank")
        server.until_idle()
        print(f"{server.count('cancelled') - before:g} of 2 cancelled by leaving")
    finally:
        server.stop()
