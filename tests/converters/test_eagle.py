"""Published EAGLE-3 heads: read in each of their forms, equal to PyTorch, refused where
they are wrong."""

import pathlib
import zipfile

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import text_models
from commands import printed

import cspd_jax
from cspd_jax import text

GOLDEN = pathlib.Path(__file__).parents[1] / "golden" / "eagle.zip"
ENTERING = {"research": (), "specforge": (2, 5, 8), "speculators": (2, 5, 8)}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    found = tmp_path_factory.mktemp("heads")
    with zipfile.ZipFile(GOLDEN) as archive:
        archive.extractall(found)
    return found


@pytest.mark.quick("speculators")
@pytest.mark.parametrize("name", ENTERING)
def test_logits_are_pytorch_s(folder, name, tmp_path, capsys):
    """Of places that read the target's states, and of drafts that read the head's
    own."""
    printed(capsys, f"convert {folder / name} {tmp_path}/head")
    head = cspd_jax.load(tmp_path / "head")
    recorded = np.load(folder / name / "recorded.npz")
    assert head.network.config.entering == ENTERING[name]
    chex.assert_trees_all_equal(head.params["ids"], recorded["ids"])
    params = {"embedding": recorded["table"], **head.params}
    tokens = recorded["tokens"]
    drafted = recorded["drafted"]
    count = len(tokens) - 1

    @jax.jit
    def logits():
        net = head.network
        found = []
        cache = net.empty_cache(1, count + len(drafted))
        state = net.joined(params, recorded["states"][None])
        at = jnp.arange(count)[None]
        state, cache = net.apply(params, tokens[None, 1:], state, at, cache)
        found.append(net.logits(params, state[0]))
        for step in range(len(drafted)):
            at = jnp.full((1, 1), count + step)
            token = drafted[None, step : step + 1]
            state, cache = net.apply(params, token, state[:, -1:], at, cache)
            found.append(net.logits(params, state[0]))
        return jnp.concatenate(found)

    chex.assert_trees_all_close(logits(), recorded["logits"], atol=2e-5)
    assert printed(capsys, f"info {folder / name}")["kind"] == "eagle"


@pytest.mark.slow
def test_it_drafts_as_it_is_published(folder):
    """A folder that was not converted; without named layers they are the published ones
    of its target."""
    lm = text_models.model(40, dtype=jnp.float32, width=24, depth=8, head_dim=6)
    target = lm, text_models.params(lm, scale=0.4)
    head = cspd_jax.load(folder / "research")
    drafter = text.draft_from_states(head, target, confidence=0)
    assert drafter.drafter.entering == (2, 4, 5)
    options = text.Options(max_new_tokens=8, stop_ids=())
    method = text.Speculation(drafter, gamma=2)
    tokens, info = text.generate(None, target, [[3, 7, 1]], method, options)
    plain = text.generate(None, target, [[3, 7, 1]], options=options)
    chex.assert_trees_all_equal(tokens, plain.tokens)
    assert info.tested.sum() > 0
