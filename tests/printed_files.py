"""The files that pages take for given, tiny and random, by the names that they have there."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import hf_folder
import inception_reference
import nextstep_tiny
import numpy as np
import pytest
import tiny
import torch_writer
from PIL import Image

from cspd_jax import hub
from cspd_jax.converters import kl16, mar

ROOT = Path(__file__).parents[1]
TRAINED = hub.shipped_folder("masked-default")  # as random as the others it would never draft the next move


def torch_checkpoint(path: Path, entries, **told) -> None:
    random = np.random.default_rng(0)
    tensors = {e.name: 0.1 * random.standard_normal(e.source_shape, np.float32) for e in entries}
    state = torch_writer.ordered_dict({name: torch_writer.tensor(array) for name, array in tensors.items()})
    torch_writer.write(path, {"model": state, "args": torch_writer.namespace(**told)})


def mar_checkpoint(path: Path) -> None:
    told = {"encoder_num_heads": 2, "decoder_num_heads": 2, "patch_size": 1, "vae_stride": 2}
    torch_checkpoint(path, mar.FORMAT.wanted(tiny.LATENTS), **told)


def write_tokenizer(folder: Path, words: dict[str, int], special: tuple[str, ...] = ()) -> None:
    """Of whole words; the first one stands for all that are not there."""
    vocabulary = {"type": "WordLevel", "vocab": words, "unk_token": next(iter(words))}
    pieces = {"type": "Split", "pattern": {"String": " "}, "behavior": "Removed", "invert": False}
    unset = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    added = [{"id": words[name], "content": name, "special": True, **unset} for name in special]
    tokenizer = {"version": "1.0", "model": vocabulary, "pre_tokenizer": pieces, "added_tokens": added}
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))


def image_from_text(path: Path) -> None:
    nextstep_tiny.write(path)
    write_tokenizer(path, {"?": 0, "red": 5, "<|image_area|>": 86, "1*2": 7, "x": 92}, ("<|image_area|>",))


def language_model(config: dict):
    def make(path: Path) -> None:
        path.parent.mkdir(exist_ok=True)
        hf_folder.write(path, config)
        write_tokenizer(path, {f"w{i}": i for i in range(hf_folder.V)})

    return make


def gguf(path: Path) -> None:
    pytest.importorskip("gguf")
    import gguf_file

    gguf_file.write(path, gguf_file.LLAMA, gguf_file.weights(gguf_file.LLAMA))


def pictures(path: Path) -> None:
    path.mkdir()
    for i, image in enumerate(inception_reference.images(8)):
        Image.fromarray(image).save(path / f"{i}.png")


def inception(path: Path) -> None:
    tensors = inception_reference.weights(16, classes=10)
    tree = {name: torch_writer.tensor(array) for name, array in tensors.items()}
    torch_writer.write_old(path, torch_writer.ordered_dict(tree))


def questions(path: Path) -> None:
    path.parent.mkdir(parents=True)
    lines = (ROOT / "benchmarks/prompts/train.txt").read_text().splitlines()
    path.write_text("\n".join(lines[:18]))


def chat_model(path: Path) -> None:
    LLAMA(path)
    template = "w1 {% for m in messages %}{{ m['content'] }} {% endfor %}"
    (path / "tokenizer_config.json").write_text(json.dumps({"chat_template": template}))


LATENTS = {"mar-base": lambda path: tiny.save_mar(path, tiny.LATENTS), "kl16": tiny.save_kl16}
LLAMA = language_model(hf_folder.edited(hf_folder.LLAMA, max_position_embeddings=256))
LLADA = language_model(hf_folder.LLADA)
# What a page takes for given: the names of files, and what makes them.
GIVEN = {
    "README": {
        "checkpoint-last.pth": mar_checkpoint,
        "kl16.ckpt": lambda path: torch_checkpoint(path, kl16.FORMAT.wanted(tiny.KL)),
    },
    "checkpoints": {"SRC": mar_checkpoint, "FOLDER": LLAMA, "OWNER/NAME": LLAMA, "model.gguf": gguf},
    "images": {
        **LATENTS,
        "dataset": pictures,
        "pt_inception-2015-12-05-6726825d.pth": inception,
        "FOLDER": image_from_text,
        "sphere-b.pth": lambda p: shutil.copy(ROOT / "tests/golden_causal/sphere_tiny2_ar.pth", p),
    },
    "masked": {
        "OWNER/NAME": LLADA,
        "models/masked": lambda path: shutil.copytree(TRAINED, path),
    },
    "text": {
        "EleutherAI/pythia-1.4b-deduped": LLAMA,
        "EleutherAI/pythia-160m-deduped": LLAMA,
    },
    "training": {"pictures": pictures, "DIR": chat_model, "benchmarks/prompts/train.txt": questions},
}
