"""The tiny NextStep-1 model whose numbers were recorded, as a Hugging Face folder and
as a model.

    # With a tokenizer of three words and an autoencoder; all of it random.
    python tests/support/nextstep_tiny.py FOLDER
"""

import dataclasses
import json
import shutil
import sys
from pathlib import Path

import jax.numpy as jnp
import numpy as np

from cspd_jax.image.options import Options
from cspd_jax.image.prompts import with_prompts

GOLDEN = Path(__file__).parents[1] / "golden_causal"
DESCRIPTION = json.loads((GOLDEN / "nextstep_tiny.json").read_text())
CONFIG = DESCRIPTION["config"]
RUNS = ("cfg1", "cfg3", "cfg3_linear_norm", "cfg3_repeat1", "cfg3_pos_norm_shift")


def write(path, config=CONFIG):
    path.mkdir(exist_ok=True)
    (path / "config.json").write_text(json.dumps(config))
    shutil.copyfile(GOLDEN / "nextstep_tiny.safetensors", path / "model.safetensors")
    return path


def with_tokenizer(folder):
    """Adds a tokenizer that knows the words red and x."""
    words = {"?": 0, "red": 5, "<|image_area|>": 86, "1*2": 7, "2*2": 7, "x": 92}
    vocabulary = {"type": "WordLevel", "vocab": words, "unk_token": "?"}
    pieces = {
        "type": "Split",
        "pattern": {"String": " "},
        "behavior": "Removed",
        "invert": False,
    }
    unset = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    added = {"id": 86, "content": "<|image_area|>", "special": True, **unset}
    tokenizer = {
        "version": "1.0",
        "model": vocabulary,
        "pre_tokenizer": pieces,
        "added_tokens": [added],
    }
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    return folder


def recorded():
    with np.load(GOLDEN / "nextstep_tiny.npz") as file:
        return dict(file)


def run(model, arrays, name):
    """Of a recorded generation of two images of 2 x 3 tokens: the model with its
    prompts, the options and the noise that repeat it."""
    at = f"gen/{name}/"
    calls, cfg, _, shift, _, linear, norm, positions = arrays[at + "settings"]
    ids = [
        list(row[seen > 0])
        for row, seen in zip(arrays[at + "input_ids"], arrays[at + "attention_mask"])
    ]
    config = dataclasses.replace(model.config, positions=bool(positions))
    network = dataclasses.replace(model.network, config=config)
    model = dataclasses.replace(model, network=network)
    model = with_prompts(model, ids[:2], ids[-1], grid=(2, 3), normalise=bool(norm))
    options = Options(
        num_iter=6,
        respacing=f"flow-calls{int(calls)}-shift{shift:.1f}",
        cfg=float(cfg),
        cfg_schedule="linear" if linear else "constant",
    )
    of_tokens = arrays[at + "noise"]  # [L, N, images or 1, d], the initial noise first
    of_tokens = np.repeat(of_tokens, 2 // of_tokens.shape[2], axis=2)
    by_step = of_tokens.transpose(1, 2, 0, 3)
    noise = np.concatenate([np.zeros_like(by_step[:1]), by_step[:0:-1], by_step[:1]])
    return model, options, jnp.asarray(noise)


if __name__ == "__main__":
    made = with_tokenizer(write(Path(sys.argv[1])))
    shutil.copytree(GOLDEN.parent / "golden" / "flux", made / "vae")
