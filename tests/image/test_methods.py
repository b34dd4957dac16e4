"""Methods: which are lossless, what they can be asked for, and the fastest of them."""

from __future__ import annotations

import dataclasses

import jax
import pytest
import tiny

import cspd_jax
from cspd_jax.image import generate, resolve
from cspd_jax.image.chain import ChainSpeculation
from cspd_jax.image.methods import DraftSpeculation, Plain, ReleasedRunner, SelfSpeculation
from cspd_jax.image.options import Options
from cspd_jax.image.paper import PaperCriterion
from cspd_jax.info import judged
from cspd_jax.networks.mar import MARModel

KEY = jax.random.key(3)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("models")
    tiny.save_mar(folder / "target")
    tiny.save_mar(folder / "draft", seed=5)
    return folder


@pytest.mark.parametrize("denoise", ["plain", ChainSpeculation((4,))])
def test_what_is_lossless(denoise):
    """Of the methods, however they denoise; and nothing of which draws were given up."""
    paper = lambda **options: DraftSpeculation(None, PaperCriterion(**options))
    exact = (Plain(), SelfSpeculation(), SelfSpeculation(draft_cost=0.1), DraftSpeculation(None))
    exact += (paper(sigma=False),)
    lossy = (
        paper(),
        paper(sigma=False, inner_temperature=42.0),
        paper(sigma=False, inner_temperature=0.5),
        ReleasedRunner(None),
    )
    for method in exact + lossy:
        found = method.exactness(Options(denoise=denoise))
        assert found.lossless == (method in exact) and judged(found, 0) == found
        assert not judged(found, 1).lossless and ("1 draws" in judged(found, 1).why) == (method in exact)


@pytest.mark.slow
def test_fastest_is_a_request_that_runs(folder):
    model = cspd_jax.load(folder / "target")
    found = cspd_jax.fastest(KEY, model, [0, 1], Options(num_iter=2))
    tokens, info = generate(*found.request)
    assert tokens.shape == (2, 16, 16) and info.exact and min(found.seconds.values()) > 0
    alone = cspd_jax.fastest(KEY, model, [0], Options(num_iter=2, final_noise=False))
    assert alone.request.method == Plain()


def test_the_same_options_have_one_distribution(folder):
    """Every method has noise in the last step, or says that it cannot do without (or with) it."""
    model, draft = (cspd_jax.load(folder / name) for name in ("target", "draft"))
    for method in (Plain(), SelfSpeculation(), DraftSpeculation(draft)):
        assert resolve(model, method).final_noise is True
    assert resolve(model, Plain(), Options(final_noise=False)).final_noise is False
    with pytest.raises(ValueError, match="path needs noise in the last denoising step"):
        resolve(model, SelfSpeculation(), Options(final_noise=False))
    with pytest.raises(ValueError, match="cannot have noise in the last denoising step"):
        resolve(model, ReleasedRunner(draft))
    small = dataclasses.replace(draft, network=MARModel(dataclasses.replace(tiny.PIXELS, num_classes=3)))
    with pytest.raises(ValueError, match="does not fit the target"):
        resolve(model, DraftSpeculation(small))
