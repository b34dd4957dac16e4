"""Chosen sets of moves: whatever the table, the text is that of stepwise decoding; how
tables are fitted."""

import dataclasses
import shutil

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny
from commands import printed, run
from masked_models import LLADA

from cspd_jax import hub, masked
from cspd_jax.masked import calibration
from cspd_jax.masked.sets import MoveSets, prefixes
from cspd_jax.networks.lm import LM, abstract_params


def table(seed, count):
    """A short chain and random texts, some of which may be reached in several
    orders."""
    random = np.random.default_rng(seed)
    texts = [*prefixes(2).texts]
    while len(texts) < count:
        before = texts[random.integers(len(texts))]
        move = int(random.integers(1, 7)), int(random.integers(3))
        text = tuple(sorted((*before, move)))
        if move[0] not in dict(before) and text not in texts:
            texts.append(text)
    return MoveSets(tuple(texts))


def undecided():
    """A model in float32 in which other shapes of passes round otherwise, and every id
    has another one that is as probable but for rounding."""
    config = dataclasses.replace(
        LLADA, width=512, mlp_width=640, heads=8, kv_heads=8, head_dim=64
    )
    params = jax.tree.map(np.float32, tiny.params(abstract_params(config), scale=0.05))
    head = params["head"]["kernel"]
    head[:, 1:10:2] = head[:, 0:10:2] * (1 + 1e-7)
    return LM(config, jnp.float32), params


@pytest.mark.slow
@pytest.mark.parametrize(
    "method",
    [masked.SelfSpeculation(3), masked.SelfSpeculation(texts=table(2, 12))],
    ids=["chain", "table"],
)
def test_the_same_bits_in_float32(method):
    model = undecided()
    prompts = [[1, 2, 3], [4], [5, 6]] * 4
    options = masked.Options(max_new_tokens=24, block=8)
    found, info = masked.generate(None, model, prompts, method, options)
    stepwise, spent = masked.generate(
        None, model, prompts, masked.Stepwise(method), options
    )
    chex.assert_trees_all_equal(found, stepwise)
    chex.assert_trees_all_equal(info.trace.steps, spent.trace.steps)
    assert spent.sequential == 24 and int(spent.accepted.sum()) == 0 < int(
        info.accepted.sum()
    )


@pytest.mark.slow
def test_the_command(tmp_path, capsys):
    """Tables fitted by `calibrate` are kept beside the model, and used."""
    folder = tmp_path / "model"
    shutil.copytree(hub.shipped_folder("masked-whole"), folder)
    (tmp_path / "prompts.txt").write_text("Return a list\nWrite to a file\n")
    calibrate = f"calibrate {folder} --prompts {tmp_path}/prompts.txt --new-tokens "
    assert printed(capsys, calibrate + "8") == {
        "out": str(folder / "moves.json"),
        "prompts": 2,
        "texts": list(calibration.COUNTS),
    }
    asked = f"masked --model {folder} --prompt Return --new-tokens 8 --texts 8"
    report = printed(capsys, asked)
    assert report["exact"] and report["compared_to_stepwise"]["identical_rows"] == 1
    rows = sum(calls["rows"] for calls in report["calls"].values())
    # The first pass reads one text.
    assert report["speculation"]["texts"] == 8 and rows % 8 == 1
    made = (folder / "moves.json").read_bytes()
    for line, sentence in (
        (calibrate + "1", "none of 0 moves"),
        (calibrate + "400", "positions that the model was made for"),
        (asked + " --temperature 1", "texts are for temperature 0"),
    ):
        assert run(line) == 2
        assert sentence in capsys.readouterr().err
    assert (folder / "moves.json").read_bytes() == made
    (folder / "moves.json").write_text("[]")
    assert run(asked) == 2
    assert "holds no tables of moves" in capsys.readouterr().err
