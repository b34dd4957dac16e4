"""The demo as its users meet it: a server in a process of its own, under load, with careless clients, and
in a browser."""

from __future__ import annotations

import base64
import concurrent.futures
import contextlib
import http.client
import io
import json
import os
import shutil
import socket
import subprocess
import sys
import threading
import time

import hypothesis
import jax
import numpy as np
import pytest
from demo_server import GARBAGE, JSON, Server, save_target, whole_request
from hypothesis import strategies as st
from PIL import Image

import cspd_jax
from cspd_jax.apps.service.config import SELF

gradio = pytest.importorskip("gradio", reason="needs the extra demo (gradio)")
pytestmark = pytest.mark.slow

ROWS, QUEUE = 4, 40
TOKENS = 144


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return save_target(tmp_path_factory.mktemp("models") / "target", TOKENS)


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


def test_the_rest_of_a_picture(server, folder):
    model = cspd_jax.load(folder)
    _, whole = server.image(label=3, seed=11)
    status, answer = server.image(label=1, seed=12, image=whole["png"], keep="top-half")
    assert status == 200 and answer["report"]["known"] == TOKENS // 2
    assert answer["report"]["rounds"] < whole["report"]["rounds"]
    given = pixels_of(whole)
    np.testing.assert_array_equal(pixels_of(answer)[: len(given) // 2], given[: len(given) // 2])
    mask = cspd_jax.image.keep("top-half", model)
    known = cspd_jax.Known(cspd_jax.image.to_tokens(model, given[None, ..., None]), mask)
    options = cspd_jax.Options(final_noise=True, known=known)
    tokens, _ = cspd_jax.generate(jax.random.key(12), model, [1], SELF, options)
    expected = cspd_jax.to_images(model, tokens)[0, ..., 0].astype(int)
    assert np.abs(pixels_of(answer).astype(int) - expected).max() <= 1


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


def test_clients_that_vanish_leave_nothing_behind(server):
    whole = whole_request(label=1, seed=5, method="plain", cfg=3.0)
    accepted = server.count("accepted")
    for content in (
        b"",
        b"\x00\xff" * 50,
        b"GET / HT",
        whole[: whole.index(b"\r\n\r\n") - 2],
        whole[:-5],
        b"POST /v1/images HTTP/9.9\r\n\r\n",
    ):
        server.raw(content)
    with concurrent.futures.ThreadPoolExecutor(20) as clients:
        list(clients.map(lambda _: server.raw(whole, 0.05), range(20)))
    server.until_idle()
    asked = server.count("accepted") - accepted
    assert 1 <= asked <= 20
    ends = [server.count(name) for name in ("finished", "cancelled", "timed_out", "failed")]
    assert sum(ends) == server.count("accepted") and ends[3] == 0 and ends[1] > 0
    assert server.image(label=0)[0] == 200


@pytest.mark.parametrize(
    "body, status, sentence",
    GARBAGE,
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
        {},
        optional=dict.fromkeys(
            ("label", "seed", "cfg", "method", "image", "keep", "mask", "resize", "x"), ANYTHING
        ),
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
    for method, path, status in (
        ("GET", "/v1/images", 405),
        ("POST", "/healthz", 405),
        ("GET", "/v1/nothing", 404),
        ("POST", "/nothing", 404),
        ("PUT", "/v1/images", 405),
    ):
        found, content = server.ask(method, path)
        assert found == status and list(json.loads(content)) == ["error"]
    with contextlib.suppress(OSError):  # the server closes while the client still sends
        assert server.ask("POST", "/v1/images", b" " * 2**22, JSON)[0] == 413
    assert server.ask("POST", "/v1/images", b" " * (2**20 + 1), JSON)[0] == 413
    endless = (b" " * 1024 for _ in range(100_000))
    with contextlib.suppress(OSError):
        assert server.ask("POST", "/gradio_api/queue/join", endless, JSON)[0] == 413
    assert server.get("/healthz")[0] == 200


def test_a_body_that_does_not_come_is_not_waited_for(server):
    with socket.create_connection((server.host, server.port), timeout=30) as connection:
        connection.sendall(b"POST /v1/images HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Length: 50\r\n\r\n{")
        assert connection.recv(1000).startswith(b"HTTP/1.1 408")


@pytest.mark.parametrize("sent", [b"", b"GET / HTTP/1.1\r\nHost: 127.0.0.1\r\nX-A: b"])
def test_headers_that_do_not_come_are_not_waited_for(server, sent):
    with socket.create_connection((server.host, server.port), timeout=30) as connection:
        connection.sendall(sent)
        begun = time.monotonic()
        assert connection.recv(1000).startswith(b"HTTP/1.1 408") and not connection.recv(1)
        assert 5 < time.monotonic() - begun < 20


def test_pages_of_strangers_are_refused(server):
    for headers in ({"Host": "evil.example"}, {"Origin": "https://evil.example"}):
        status, answer = server.image(headers={**JSON, **headers}, label=0)
        assert status == 421 and "evil.example" in answer["error"] and "--allow-host" in answer["error"]
    assert server.image(headers={**JSON, "Origin": server.url}, label=0)[0] == 200


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
        complaints = server.stop()
    assert "se:cret" not in complaints and "Traceback" not in complaints


def test_who_is_there_at_the_end_is_told_so(folder):
    """Images in rows and in the queue, an open page, and a body that does not come."""
    server = Server("--target", folder, "--text-target", "none", "--masked-model", "none", "--rows", "1")
    body = b"POST /v1/images HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Length: 50\r\n\r\n{"
    with (
        concurrent.futures.ThreadPoolExecutor(9) as clients,
        socket.create_connection((server.host, server.port), timeout=30) as slow,
    ):
        slow.sendall(body)
        asked = [clients.submit(server.image, label=0, seed=i, method="plain", cfg=2) for i in range(8)]
        end = time.monotonic() + 60
        for there in (8, 10):  # the page asks for two images, one of which waits behind all others
            while server.count("accepted") < there:
                assert time.monotonic() < end
            if there == 8:
                page = clients.submit(lambda: [*server.visit(0, [0, 1, 2, True], "visitor")])
        complaints = server.stop()
        answers = [each.result() for each in asked]
        assert slow.recv(1000).startswith(b"HTTP/1.1 503")
        shown = page.result()[-1]
    assert "Traceback" not in complaints
    assert {status for status, _ in answers} <= {200, 500}
    assert all("stopped before" in answer["error"] for status, answer in answers if status == 500)
    assert "stopped before" in shown and server.process.returncode == 143


def test_few_visitors_are_remembered(folder):
    """Gradio keeps what each of them saw until there are so many others."""
    from cspd_jax.apps.service.config import ServiceConfig
    from cspd_jax.apps.service.page import make_page

    offer = ServiceConfig(image=cspd_jax.load(folder))
    assert make_page(offer, offer.engine(1)).state_session_capacity <= 200


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


def test_a_picture_that_is_painted_on(server, browser, tmp_path):
    """The last image, a stroke of the brush, and the rest of it as it was."""
    from selenium.webdriver.common.action_chains import ActionChains

    page = Page(browser, server.url)
    page.click("Generate")
    page.until(lambda: page.report().count("finished") == 2)
    before = page.report()
    page.until(lambda: [e for e in page.shown("button") if e.text.startswith("Begin with a picture")])[
        0
    ].click()
    page.click("Take the last image")
    board = page.until(lambda: page.shown("#cspd-board"))[0]
    source = lambda: browser.execute_script("return document.querySelector('.cspd img').src")
    pixels = lambda: np.asarray(Image.open(io.BytesIO(base64.b64decode(source().partition(",")[2])))).astype(
        int
    )
    first = pixels()
    stroke = ActionChains(browser).move_to_element_with_offset(board, -100, -100).click_and_hold()
    stroke.move_by_offset(120, 0).release().perform()
    browser.save_screenshot(str(tmp_path / "painted.png"))
    page.click("Generate")
    page.until(lambda: page.report().count("finished") == 2 and page.report() != before)
    rounds = [int(line.split()[2]) for line in page.report().splitlines()[1:]]
    assert 0 < rounds[1] <= 6  # tokens under the stroke, which the plain sampler draws one by one
    changed = (pixels() != first).reshape(12, 4, 12, 4).any(axis=(1, 3))
    assert changed.sum() <= rounds[1] and len(set(np.nonzero(changed)[0])) <= 1  # in a row
    assert not [entry for entry in browser.get_log("browser") if entry["level"] == "SEVERE"]


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
