"""`cspd-jax text` and `masked` by whole commands: what they print and report."""

import json

import jax
import numpy as np
import pytest
import word_models
from commands import printed, run
from hf_folder import DREAM, LLADA, LLAMA, V, tensors, write

PROMPTS = "--prompt-ids 1,2,3,4 --prompt-ids 5,6 --dtype float64"


@pytest.fixture(autouse=True)
def float32_again():
    yield
    jax.config.update("jax_enable_x64", False)


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    root = tmp_path_factory.mktemp("folders")
    near = {
        n: t * np.float32(1 + 0.03 * np.sin(len(n))) for n, t in tensors(LLAMA).items()
    }
    return {
        "llama": write(root / "llama", LLAMA),
        "draft": write(root / "draft", LLAMA, near),
        "llada": write(root / "llada", LLADA),
        "dream": write(root / "dream", DREAM),
    }


def asked(folders, new):
    return f"text --target {folders['llama']} {PROMPTS} --no-stop --new-tokens {new} "


@pytest.mark.slow
@pytest.mark.parametrize(
    "method, draft",
    [("speculation", "draft"), ("speculation", "int8"), ("tree", "draft")],
)
def test_text_is_that_of_plain_decoding(folders, capsys, method, draft):
    """Greedy, in float64; the report adds up."""
    common = asked(folders, 20)
    plain = printed(capsys, common + "--method plain")
    how = f"--draft {folders.get(draft, draft)} --method {method}"
    found = printed(capsys, common + how)
    wanted = {"ids": plain["ids"], "text": [None, None], "tokens": 40, "exact": True}
    wanted |= {"method": method, "truncated": 0}
    assert wanted.items() <= found.items()
    assert found["rounds"] < 20
    assert plain["acceptance"] is None and found["accepted"] > 0
    calls = {name: of["sequential"] for name, of in plain["calls"].items()}
    assert calls == {"target": 20, "draft": 0}
    assert found["calls"]["target"]["sequential"] < 20


@pytest.mark.slow
def test_match_repeats_plain_sampling(folders, capsys):
    how = "--temperature 1.3 --top-k 20 --top-p 0.9 --seed 4 --rule match --compare"
    line = f"{asked(folders, 16)} {how} --draft {folders['draft']}"
    found = printed(capsys, line)
    assert found["compared_to_plain"]["identical_rows"] == 2
    assert found["options"]["top_k"] == 20


@pytest.mark.slow
@pytest.mark.parametrize("model", ["llada", "dream"])
def test_masked_is_stepwise_decoding(folders, capsys, model):
    common = f"masked --model {folders[model]} {PROMPTS} --new-tokens 12 --block 6 "
    found = printed(capsys, common + "--gamma 3")
    stepwise = printed(capsys, common + "--method stepwise")
    assert found["ids"] == stepwise["ids"]
    assert found["compared_to_stepwise"]["identical_rows"] == 2
    assert found["exact"] and found["speculation"]["gamma"] == 3
    passes = [
        sum(of["sequential"] for of in one["calls"].values())
        for one in (found, stepwise)
    ]
    assert passes[0] <= passes[1] == 12


@pytest.mark.slow
def test_tokenizer_of_the_folder(folders, capsys, tmp_path):
    """A tokenizer.json is used for prompts and texts."""
    files = {"tokenizer.json": json.loads(word_models.tokenizer(ids=V))}
    line = f"text --target {write(tmp_path / 'own', LLAMA, others=files)} --no-stop "
    line += "--prompt 'w7 w8' --new-tokens 9"
    (text,) = printed(capsys, line)["text"]
    assert len(text.split()) == 9
    assert run(line + " --gamma 2 --compare") == 0
    out, err = capsys.readouterr()
    assert out.startswith("w7 w8") and "1 of 1 rows are identical" in err
