"""The page of `cspd-jax demo` shows what the library makes, of both ways, and says what
each cost."""

import argparse

import numpy as np
import pytest
import tiny

import cspd_jax
from cspd_jax import masked, text
from cspd_jax.keys import seed_key
from cspd_jax.tools import demo

OVER_TOKENS = "speculation over tokens"
ALONG_CHAINS = "speculation along denoising steps"
BLOCK = "block verification"
MOVES = "self-speculation, 4 moves ahead"
PROMPT = "Return a list of"
NEW = 16
SEED = 3


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    defaults = argparse.ArgumentParser()
    demo.add_flags(defaults)
    target = tiny.save_mar(
        tmp_path_factory.mktemp("models") / "target", sampling={"cfg": 2.0}
    )
    return demo.load(defaults.parse_args(["--target", target]))


def turns_of(make, models, *asked):
    """What is shown at each turn: (content, what it cost) of plain and of exact."""
    turns = [(turn[:2], turn[2:]) for turn in demo.told(make, models, *asked)]
    assert len(turns) > 3
    return turns


@pytest.mark.slow
@pytest.mark.parametrize("method", [OVER_TOKENS, ALONG_CHAINS])
def test_pictures_are_those_of_generate(models, method):
    turns = turns_of(demo.make_image, models, method, SEED, 2, 1.5)
    ended = [["complete" in told for _, told in turn] for turn in turns]
    # The exact way is complete first.
    assert method == ALONG_CHAINS or [False, True] in ended
    ways = [(cspd_jax.Plain(), "plain"), demo.image_methods(models.image)[method]]
    for (way, denoise), (picture, told) in zip(ways, turns[-1]):
        options = cspd_jax.Options(cfg=1.5, denoise=denoise, final_noise=True)
        tokens, info = cspd_jax.generate(
            seed_key(SEED), models.image, [2], way, options
        )
        made = cspd_jax.to_images(models.image, tokens)[0].astype(int)
        zoom = len(picture) // len(made)
        # Another program rounds differently.
        assert np.max(np.abs(picture[::zoom, ::zoom, :1] - made)) <= 1
        backbone, head = (info.calls[name].sequential for name in ("backbone", "head"))
        assert f"{backbone} calls of the backbone and {head} of the head" in told
        assert "complete" in told


@pytest.mark.slow
def test_texts_are_those_of_generate(models):
    turns = turns_of(demo.make_text, models, BLOCK, SEED, PROMPT, NEW, 0.8)
    tokenizer = models.reads[0]
    key = seed_key(SEED)
    options = text.Options(max_new_tokens=NEW, temperature=0.8)
    prompts = [tokenizer.encode(PROMPT)]
    ways = (text.Plain(), text.Speculation(models.drafter))
    for way, (parts, told) in zip(ways, turns[-1]):
        tokens, info = text.generate(key, models.text, prompts, way, options)
        written = "".join(part for part, _ in parts)
        assert written == tokenizer.decode(tokens[0, : info.trace.lengths[0]].tolist())
        assert {mark for _, mark in parts} <= {None, *demo.MARKS.values()}
        target, draft = (info.calls[name].sequential for name in ("target", "draft"))
        assert f"{target} passes of the target and {draft} of the" in told


@pytest.mark.slow
def test_masked_texts_are_those_of_generate(models):
    first, *_, last = turns_of(demo.make_masked, models, MOVES, SEED, PROMPT, NEW, 0)
    tokenizer = models.reads[1]
    options = masked.Options(max_new_tokens=NEW)
    for i, method in enumerate((masked.Stepwise(), masked.SelfSpeculation(4))):
        tokens, info = masked.generate(
            None, models.masked, [tokenizer.encode(PROMPT)], method, options
        )
        assert last[i][0] == [(PROMPT + tokenizer.decode(tokens[0].tolist()), None)]
        assert f"{NEW} of {NEW} tokens, {info.sequential} passes" in last[i][1]
        assert "·" in first[i][0][0][0]
