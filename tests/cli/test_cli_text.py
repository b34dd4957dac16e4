"""`cspd-jax text` and `masked` by whole commands: what they print and report."""

import json

import jax
import numpy as np
import pytest
from hf_folder import DREAM, LLADA, LLAMA, tensors, write

from cspd_jax.__main__ import main

PROMPTS = ("--prompt-ids", "1,2,3,4", "--prompt-ids", "5,6")
EXACT = ("--dtype", "float64", "--no-stop")


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


def printed(capsys, *argv):
    assert main([str(a) for a in (*argv, "--json")]) == 0
    return json.loads(capsys.readouterr().out)


@pytest.mark.slow
@pytest.mark.parametrize(
    "method, draft",
    [("speculation", "draft"), ("speculation", "int8"), ("tree", "draft")],
)
def test_text_is_that_of_plain_decoding(folders, capsys, method, draft):
    """Greedy, in float64; the report adds up."""
    common = (
        "text",
        "--target",
        folders["llama"],
        *PROMPTS,
        "--new-tokens",
        20,
        *EXACT,
    )
    plain = printed(capsys, *common, "--method", "plain")
    found = printed(
        capsys, *common, "--draft", folders.get(draft, draft), "--method", method
    )
    assert (
        found["ids"] == plain["ids"]
        and found["text"] == [None, None]
        and found["tokens"] == 40
    )
    assert found["exact"] and found["method"] == method and found["rounds"] < 20
    assert (
        plain["acceptance"] is None
        and found["accepted"] > 0
        and found["truncated"] == 0
    )
    calls = {name: of["sequential"] for name, of in plain["calls"].items()}
    assert (
        calls == {"target": 20, "draft": 0}
        and found["calls"]["target"]["sequential"] < 20
    )


@pytest.mark.slow
def test_match_repeats_plain_sampling(folders, capsys):
    common = (
        "text",
        "--target",
        folders["llama"],
        *PROMPTS,
        "--new-tokens",
        16,
        *EXACT,
    )
    common += ("--temperature", 1.3, "--top-k", 20, "--top-p", 0.9, "--seed", 4)
    found = printed(
        capsys, *common, "--rule", "match", "--draft", folders["draft"], "--compare"
    )
    assert (
        found["compared_to_plain"]["identical_rows"] == 2
        and found["options"]["top_k"] == 20
    )


@pytest.mark.slow
@pytest.mark.parametrize("model", ["llada", "dream"])
def test_masked_is_stepwise_decoding(folders, capsys, model):
    common = (
        "masked",
        "--model",
        folders[model],
        *PROMPTS,
        "--new-tokens",
        12,
        "--dtype",
        "float64",
    )
    common += ("--block", 6)
    found = printed(capsys, *common, "--gamma", 3)
    stepwise = printed(capsys, *common, "--method", "stepwise")
    assert (
        found["ids"] == stepwise["ids"]
        and found["compared_to_stepwise"]["identical_rows"] == 2
    )
    assert found["exact"] and found["speculation"]["gamma"] == 3
    passes = [
        sum(of["sequential"] for of in one["calls"].values())
        for one in (found, stepwise)
    ]
    assert passes[0] <= passes[1] == 12


@pytest.mark.slow
def test_tokenizer_of_the_folder(folders, capsys, tmp_path):
    """A byte-pair tokenizer.json is used for prompts and texts, through the package
    that reads such files."""
    tokenizers = pytest.importorskip("tokenizers")
    vocab = {chr(97 + i): i for i in range(26)} | {"<unk>": 26, " ": 27}
    made = tokenizers.Tokenizer(tokenizers.models.BPE(vocab, [], unk_token="<unk>"))
    made.decoder = tokenizers.decoders.Fuse()
    folder = write(
        tmp_path / "own", LLAMA, others={"tokenizer.json": json.loads(made.to_str())}
    )
    found = printed(
        capsys,
        "text",
        "--target",
        folder,
        "--prompt",
        "abc",
        "--new-tokens",
        9,
        "--no-stop",
    )
    assert max(found["ids"][0]) < 28
    assert len(found["text"][0]) == 9 or "<unk>" in found["text"][0]
    flags = (
        "--new-tokens",
        12,
        "--no-stop",
        "--gamma",
        2,
        "--compare",
    )
    assert (
        main(["text", "--target", str(folder), "--prompt", "abc", *map(str, flags)])
        == 0
    )
    out, err = capsys.readouterr()
    assert out.startswith("abc") and "1 of 1 rows are identical" in err
