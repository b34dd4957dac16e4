"""`cspd-jax text` and `masked`: what they print, what they report, what they refuse."""

from __future__ import annotations

import argparse
import json

import jax
import numpy as np
import pytest
from hf_folder import DREAM, LLADA, LLAMA, V, tensors, write

import cspd_jax
from cspd_jax.__main__ import main
from cspd_jax.cli._prompts import add_prompt_options, read_prompts
from cspd_jax.weights.tokenizers import ByteTokenizer

PROMPTS = ("--prompt-ids", "1,2,3,4", "--prompt-ids", "5,6")
EXACT = ("--dtype", "float64", "--no-stop")


@pytest.fixture(autouse=True)
def float32_again():
    yield
    jax.config.update("jax_enable_x64", False)


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    root = tmp_path_factory.mktemp("folders")
    near = {n: t * np.float32(1 + 0.03 * np.sin(len(n))) for n, t in tensors(LLAMA).items()}
    return {
        "llama": write(root / "llama", LLAMA),
        "draft": write(root / "draft", LLAMA, near),
        "llada": write(root / "llada", LLADA),
        "dream": write(root / "dream", DREAM),
    }


def run(capsys, *argv):
    code = main([str(a) for a in argv])
    return (code, *capsys.readouterr())


def printed(capsys, *argv):
    code, out, err = run(capsys, *argv, "--json")
    assert code == 0, err
    return json.loads(out)


@pytest.mark.slow
def test_a_tree_of_drafts_gives_the_text_of_plain_decoding(folders, capsys):
    """Greedy, in float64; the report says what the tree was."""
    common = ("text", "--target", folders["llama"], *PROMPTS, "--new-tokens", 20, *EXACT)
    plain = printed(capsys, *common, "--method", "plain")
    found = printed(capsys, *common, "--method", "tree", "--tree", "2,2,1", "--draft", folders["draft"])
    assert found["ids"] == plain["ids"] and found["lossless"]
    assert found["plan"]["tree"] == [2, 2, 1] and found["plan"]["gamma"] is None
    assert found["tokens_per_target_pass"] > 1 and found["expected_tokens_per_target_pass"] is None


@pytest.mark.slow
@pytest.mark.parametrize(
    "draft", ["lookup", "draft", *(pytest.param(d, marks=pytest.mark.slow) for d in ("int8", "int4"))]
)
def test_text_is_that_of_plain_decoding(folders, capsys, draft):
    """Greedy, in float64, for every kind of draft; the report adds up."""
    common = ("text", "--target", folders["llama"], *PROMPTS, "--new-tokens", 20, *EXACT)
    plain = printed(capsys, *common, "--method", "plain")
    common += ("--draft", folders.get(draft, draft), "--gamma", 3)
    found = printed(capsys, *common, "--method", "block")
    assert found["ids"] == plain["ids"] and found["text"] == [None, None]
    assert [len(ids) for ids in found["ids"]] == [20, 20] and found["tokens"] == 40
    assert found["lossless"] and plain["lossless"] and found["method"] == "block"
    assert plain["acceptance"] is None and plain["sequential"] == {"target": 20, "draft": 0}
    assert sum(found["tokens_from"].values()) == 40
    assert found["tokens_from"]["accepted"] > 0 and found["sequential"]["target"] < 20
    assert found["plan"]["gamma"] == 3 and found["truncated"] == 0


@pytest.mark.slow
def test_match_repeats_plain_sampling(folders, capsys):
    common = ("text", "--target", folders["llama"], *PROMPTS, "--new-tokens", 16, *EXACT)
    common += ("--temperature", 1.3, "--top-k", 20, "--top-p", 0.9, "--seed", 4)
    plain = printed(capsys, *common, "--method", "plain")
    found = printed(capsys, *common, "--method", "match", "--draft", folders["draft"], "--compare", "--adapt")
    assert found["ids"] == plain["ids"]
    assert found["compared_to_plain"]["identical_rows"] == 2
    assert found["reference"]["top_k"] == 20 and found["plan"]["adapt"]


@pytest.mark.slow
def test_prompts_some_at_a_time(folders, capsys):
    """Texts come back in the order of their prompts, whatever batch they were in."""
    prompts = [arg for ids in ("1,2,3,4", "5", "7,8,9", "5,6", "2,2,2") for arg in ("--prompt-ids", ids)]
    common = ("text", "--target", folders["llama"], *prompts, "--new-tokens", 20, *EXACT)
    plain = printed(capsys, *common, "--method", "plain")
    found = printed(capsys, *common, "--draft", folders["draft"], "--rows", 2)
    assert found["ids"] == plain["ids"] and found["lossless"] and found["method"] == "block"
    assert found["plan"] | {"rows": 2, "gamma": 4} == found["plan"]
    assert sum(found["tokens_from"].values()) == 100 == found["tokens"]


@pytest.mark.quick("more1-match")
@pytest.mark.parametrize("more, method", [((), "block"), (("--temperature", 1), "match")])
def test_exact_bits_choose_a_method_that_has_them(folders, capsys, more, method):
    found = printed(
        capsys, "text", "--target", folders["llama"], *PROMPTS, "--new-tokens", 8, "--exact-bits", *more
    )
    assert found["method"] == method


@pytest.mark.slow
def test_what_people_see(folders, capsys):
    common = ("text", "--target", folders["llama"], *PROMPTS, "--new-tokens", 8)
    code, out, err = run(capsys, *common, "--compare", "--draft", "int8", "--method", "block")
    assert code == 0 and len(out.splitlines()) == 2
    assert (
        "compared with plain decoding" in err
        and "by the formula" in err
        and "identical to plain decoding" in err
    )


@pytest.mark.slow
@pytest.mark.parametrize(
    "model, cached", [("llada", False), pytest.param("dream", True, marks=pytest.mark.slow)]
)
def test_masked_is_stepwise_decoding(folders, capsys, tmp_path, model, cached):
    common = ("masked", "--model", folders[model], *PROMPTS, "--new-tokens", 12, "--dtype", "float64")
    common += ("--block", 6)
    common += ("--cache",) if cached else ()
    found = printed(capsys, *common, "--draft-len", 3, "--out", tmp_path / "out")
    stepwise = printed(capsys, *common, "--method", "stepwise")
    assert found["ids"] == stepwise["ids"] and found["compared_to_stepwise"]["identical_rows"] == 2
    assert found["lossless"] and found["cached"] == cached and found["steps"] == 12
    assert found["plan"]["draft_len"] == found["plan"]["gamma"] == 3
    assert sum(found["passes"].values()) <= sum(stepwise["passes"].values()) == 12
    assert found["least_passes"] <= sum(found["passes"].values())
    assert json.loads((tmp_path / "out" / "report.json").read_text())["ids"] == found["ids"]
    assert (tmp_path / "out" / "order.png").stat().st_size > 100
    code, _, err = run(capsys, *common, "--out", tmp_path / "out")
    assert code == 2 and "is not empty" in err


@pytest.mark.slow
def test_lossy_ways_say_so(folders, capsys):
    common = ("masked", "--model", folders["llada"], *PROMPTS, "--new-tokens", 8, "--no-compare")
    lossy = printed(capsys, *common, "--accept", "top-k", "--top-k", 4)
    assert not lossy["lossless"] and lossy["compared_to_stepwise"] is None and lossy["accept"] == "top-k"
    scheduled = printed(capsys, *common, "--method", "schedule", "--steps", 4)
    assert not scheduled["lossless"] and scheduled["passes"] == {"whole": 4, "block": 0}
    code, _, err = run(capsys, *common, "--accept", "top-k", "--top-k", 4, "--animate")
    assert code == 0 and "·" in err and "lossy: it accepts moves" in err


def test_prompts_come_in_their_order(tmp_path):
    """Texts, then files, of which there may be several, then ids."""
    parser = argparse.ArgumentParser()
    add_prompt_options(parser)
    argv = ["--prompt-ids", "1,2", "--prompt", "a"]
    for name in ("b", "c"):
        (tmp_path / name).write_text(name, "utf-8-sig")
        argv += ["--prompt-file", str(tmp_path / name)]
    config = cspd_jax.load_text("text-default").config
    rows = read_prompts(parser.parse_args(argv), ByteTokenizer(), config, 4, ["d"])
    assert rows == [*map(ByteTokenizer().encode, "abc"), [1, 2]]


def test_vocabularies_beyond_padding(folders, capsys, tmp_path):
    config = {**LLAMA, "vocab_size": V + 2000}
    own = tensors(LLAMA)
    for name in ("model.embed_tokens.weight", "lm_head.weight"):
        own[name] = np.concatenate([own[name], np.zeros((2000, own[name].shape[1]), np.float32)])
    other = write(tmp_path / "wide", config, own)
    command = ("text", "--target", folders["llama"], *PROMPTS, "--new-tokens", 4, "--draft")
    code, _, err = run(capsys, *command, other)
    assert code == 2 and "the vocabularies differ" in err and "more than padding" in err


@pytest.mark.slow
def test_tokenizer_of_the_folder(folders, capsys, tmp_path):
    """A byte-pair tokenizer.json is used for prompts and texts, through the package that reads such files."""
    tokenizers = pytest.importorskip("tokenizers")
    vocab = {chr(97 + i): i for i in range(26)} | {"<unk>": 26, " ": 27}
    made = tokenizers.Tokenizer(tokenizers.models.BPE(vocab, [], unk_token="<unk>"))
    made.decoder = tokenizers.decoders.Fuse()
    folder = write(tmp_path / "own", LLAMA, others={"tokenizer.json": json.loads(made.to_str())})
    found = printed(capsys, "text", "--target", folder, "--prompt", "abc", "--new-tokens", 9, "--no-stop")
    assert found["config"]["known_ids"] == 28 and max(found["ids"][0]) < 28
    assert len(found["text"][0]) == 9 or "<unk>" in found["text"][0]
    code, out, _ = run(capsys, "text", "--target", folder, "--prompt", "abc", "--new-tokens", 12, "--no-stop",
                       "--color", "always", "--gamma", 2, "--method", "block")  # fmt: skip
    assert code == 0 and out.startswith("abc") and "\x1b[3" in out
    assert run(capsys, "convert", folder, tmp_path / "converted")[0] == 0
    again = printed(capsys, "text", "--target", tmp_path / "converted", "--prompt", "abc", "--new-tokens", 9,
                    "--no-stop")  # fmt: skip
    assert again["text"] == found["text"]
