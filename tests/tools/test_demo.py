"""The page of `cspd-jax demo` shows what the library makes, of both ways, and says what each cost."""

from __future__ import annotations

import argparse
import base64
import html
import io
import re
import shutil
import subprocess
import sys
import time

import numpy as np
import pytest
import tiny
from PIL import Image

import cspd_jax
from cspd_jax import masked, text
from cspd_jax.keys import seed_key
from cspd_jax.tools import demo

OVER_TOKENS, ALONG_CHAINS = "speculation over tokens", "speculation along denoising steps"
BLOCK, MOVES = "block verification", "self-speculation, 4 moves ahead"
PROMPT, NEW, SEED = "Return a list of", 16, 3


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    defaults = argparse.ArgumentParser()
    demo.add_flags(defaults)
    target = tiny.save_mar(tmp_path_factory.mktemp("models") / "target", sampling={"cfg": 2.0})
    return demo.load(defaults.parse_args(["--target", target]))


@pytest.fixture(autouse=True)
def _every_turn(monkeypatch):
    monkeypatch.setattr(demo, "_EVERY", 0.0)


def pictures(shown):
    found = re.findall(r'src="data:image/png;base64,([^"]*)"', shown)
    return [np.asarray(Image.open(io.BytesIO(base64.b64decode(one))).convert("RGB")) for one in found]


def written(shown):
    """The texts of both sides, without colours."""
    parts = re.findall(r"<pre>(.*?)</pre>", shown, re.S)
    return [html.unescape(re.sub(r"</?span[^>]*>", "", part)) for part in parts]


@pytest.mark.slow
@pytest.mark.parametrize("method", [OVER_TOKENS, pytest.param(ALONG_CHAINS, marks=pytest.mark.slow)])
def test_pictures_are_those_of_generate(models, method):
    turns = list(demo.told(demo.make_image, models, method, SEED, 2, 1.5))
    assert len(turns) > 3 and len(pictures(turns[0])) == 2
    calls, ways = [], [(cspd_jax.Plain(), "plain"), demo.image_methods(models.image)[method]]
    for i, (way, denoise) in enumerate(ways):
        options = cspd_jax.Options(cfg=1.5, denoise=denoise, final_noise=True)
        tokens, info = cspd_jax.generate(seed_key(SEED), models.image, [2], way, options)
        made = np.asarray(cspd_jax.picture(cspd_jax.to_images(models.image, tokens))).astype(int)
        assert np.max(np.abs(pictures(turns[-1])[i] - made)) <= 1  # another program rounds differently
        calls.append(tuple(int(info.calls[name].sequential) for name in ("backbone", "head")))
        assert "{} calls of the backbone and {} of the head".format(*calls[-1]) in turns[-1]
    assert calls[1] < calls[0] or calls[1][1] < calls[0][1]


def test_the_exact_way_is_complete_first(models):
    turns = list(demo.told(demo.make_image, models, OVER_TOKENS, SEED, 2, 1.5))
    sides = [turn.split("<b>")[1:] for turn in turns]
    assert any("complete" in exact and "complete" not in plain for plain, exact in sides)
    assert sides[-1][0].count(" s, complete") == sides[-1][1].count(" s, complete") == 1


@pytest.mark.slow
def test_texts_are_those_of_generate(models, temperature=0.8):
    *_, last = demo.told(demo.make_text, models, BLOCK, SEED, PROMPT, NEW, temperature)
    tokenizer, key = models.reads[0], seed_key(SEED)
    for i, (drafter, rule) in enumerate(((None, None), (models.drafter, "block"))):
        options = text.Options(max_new_tokens=NEW, temperature=temperature, rule=rule)
        tokens, info = text.generate(key, models.text, [tokenizer.encode(PROMPT)], drafter, options)
        assert written(last)[i] == tokenizer.decode(tokens[0, : info.trace.lengths[0]].tolist())
        target, draft = (info.calls[name].sequential for name in ("target", "draft"))
        assert f"{target} passes of the target and {draft} of the" in last


@pytest.mark.slow
def test_masked_texts_are_those_of_generate(models):
    first, *_, last = demo.told(demo.make_masked, models, MOVES, SEED, PROMPT, NEW, 0)
    tokenizer, options = models.reads[1], masked.Options(max_new_tokens=NEW)
    for i, method in enumerate((masked.Stepwise(), masked.SelfSpeculation(4))):
        tokens, info = masked.generate(None, models.masked, [tokenizer.encode(PROMPT)], method, options)
        assert written(last)[i] == PROMPT + tokenizer.decode(tokens[0].tolist())
        assert f"{NEW} of {NEW} tokens, {info.sequential} passes" in last
        assert written(first)[i].count("·") > 0


@pytest.fixture
def browser(tmp_path):
    chromium = shutil.which("chromium") or shutil.which("google-chrome")
    if chromium is None or shutil.which("chromedriver") is None:
        pytest.skip("needs chromium and chromedriver")
    pytest.importorskip("gradio", reason="needs the extra demo (gradio)")
    webdriver = pytest.importorskip("selenium.webdriver", reason="needs selenium")
    options = webdriver.ChromeOptions()
    options.binary_location = chromium
    for argument in (
        "headless",
        "no-sandbox",
        "disable-gpu",
        f"user-data-dir={tmp_path}",
        "window-size=1300,1000",
    ):
        options.add_argument(f"--{argument}")
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    found = webdriver.Chrome(options, webdriver.ChromeService(shutil.which("chromedriver")))
    yield found
    found.quit()


@pytest.fixture
def url():
    """The address of a page of the models that come with the package."""
    command = [sys.executable, "-m", "cspd_jax", "demo", "--port", "0"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as server:
        try:
            yield server.stdout.readline().strip()
        finally:
            server.terminate()


@pytest.mark.slow
def test_the_page_in_a_browser(browser, url):
    """A click on the button, both pictures with their calls, and letters on the screen."""

    def until(look):
        end = time.monotonic() + 240
        while not (found := look()):
            assert time.monotonic() < end, browser.page_source[:2000]
            time.sleep(0.2)
        return found

    shown = lambda selector: [e for e in browser.find_elements("css selector", selector) if e.is_displayed()]
    browser.get(url)
    until(lambda: [e for e in shown("button") if e.text == "Generate"])[0].click()
    until(lambda: [e for e in shown(".sides") if e.text.count(" s, complete") == 2])
    images = shown(".sides img")
    assert len(images) == 2 and "calls of the backbone" in shown(".sides")[0].text
    for image in images:
        pixels = np.asarray(Image.open(io.BytesIO(image.screenshot_as_png)).convert("L")).astype(int)
        inside = pixels[40:-40, 40:-40]
        assert np.mean(inside < 60) > 0.3 and np.mean(inside > 180) > 0.02  # white letters on black
    assert not [entry for entry in browser.get_log("browser") if entry["level"] == "SEVERE"]
