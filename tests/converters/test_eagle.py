"""Published EAGLE-3 heads: read in each of their forms, equal to PyTorch, refused where they are wrong."""

import json
import pathlib
import shutil
import zipfile

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import text_models
from safetensors import numpy as arrays

import cspd_jax
from cspd_jax import text
from cspd_jax.__main__ import main
from cspd_jax.errors import UserError

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
    """Of places that read the target's states, and of drafts that read the head's own."""
    assert main(["convert", str(folder / name), str(tmp_path / "head")]) == 0
    capsys.readouterr()
    head, recorded = cspd_jax.load_head(tmp_path / "head"), np.load(folder / name / "recorded.npz")
    assert head.network.config.entering == ENTERING[name]
    np.testing.assert_array_equal(head.params["ids"], recorded["ids"])
    params = {"embedding": recorded["table"], **head.params}
    tokens, drafted = recorded["tokens"], recorded["drafted"]
    count = len(tokens) - 1

    @jax.jit
    def logits():
        net, found = head.network, []
        cache = net.empty_cache(1, count + len(drafted))
        state = net.joined(params, recorded["states"][None])
        state, cache = net.apply(params, tokens[None, 1:], state, jnp.arange(count)[None], cache)
        found.append(net.logits(params, state[0]))
        for step, token in enumerate(drafted):
            at = jnp.full((1, 1), count + step)
            state, cache = net.apply(params, jnp.full((1, 1), token), state[:, -1:], at, cache)
            found.append(net.logits(params, state[0]))
        return jnp.concatenate(found)

    np.testing.assert_allclose(logits(), recorded["logits"], atol=2e-5)
    assert main(["info", str(folder / name)]) == 0 and "eagle" in capsys.readouterr().out


def test_it_drafts_as_it_is_published(folder):
    """A folder that was not converted; without named layers they are the published ones of its target."""
    lm = text_models.model(40, dtype=jnp.float32, width=24, depth=8, head_dim=6)
    target = lm, text_models.params(lm, scale=0.4)
    drafter = text.draft_from_states(cspd_jax.load_head(folder / "research"), target, confidence=0)
    assert drafter.drafter.entering == (2, 4, 5)
    options = text.Options(gamma=2, max_new_tokens=8, stop_ids=())
    tokens, info = text.generate(None, target, [[3, 7, 1]], drafter, options)
    np.testing.assert_array_equal(tokens, text.generate(None, target, [[3, 7, 1]], None, options).tokens)
    assert info.tested.sum() > 0


def changed(folder, tmp_path, config=None, tensors=None):
    """A copy of the head of speculators with other contents."""
    shutil.copytree(folder / "speculators", tmp_path / "head")
    path = tmp_path / "head" / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | (config or {})))
    file = tmp_path / "head" / "model.safetensors"
    found = arrays.load_file(file) | (tensors or {})
    arrays.save_file({name: tensor for name, tensor in found.items() if tensor is not None}, file)
    return tmp_path / "head"


@pytest.mark.parametrize(
    "config, tensors, sentence",
    [
        ({}, {"d2t": None}, "no tensor d2t"),
        ({}, {"d2t": np.zeros(31, np.float32)}, "d2t is float32"),
        ({}, {"d2t": np.full(31, 20)}, "does not give each id another of the target's 40"),
        ({}, {"t2d": np.ones(40, bool)}, "t2d does not say the same ids"),
        ({}, {"fc.weight": None}, "no matrix fc.weight"),
        ({}, {"norm.weight": np.ones(7, np.float32)}, "misshapen"),
        ({"draft_vocab_size": 41}, {}, "41 ids, more than the target's 40"),
        ({"draft_vocab_size": "x"}, {}, "draft_vocab_size is 'x'"),
        ({"transformer_layer_config": 3}, {}, "it must be an object"),
        ({"transformer_layer_config": {"model_type": "gpt2"}}, {}, "model_type is 'gpt2'"),
        ({"eagle_aux_hidden_state_layer_ids": [-1]}, {}, "a list of at most 16 layers"),
        ({"norm_before_residual": 1}, {}, "it must be true or false"),
    ],
)
def test_what_is_wrong_is_said(folder, tmp_path, capsys, config, tensors, sentence):
    head = changed(folder, tmp_path, config, tensors)
    assert main(["convert", str(head), str(tmp_path / "out")]) == 2
    message = capsys.readouterr().err
    assert sentence in message and message.strip().count("\n") <= 1
    assert not (tmp_path / "out").exists()


def test_a_language_model_is_no_head(tmp_path):
    with pytest.raises(UserError, match="the head must be of kind eagle"):
        cspd_jax.load_head(pathlib.Path(cspd_jax.__file__).parent / "defaults" / "text-target")
