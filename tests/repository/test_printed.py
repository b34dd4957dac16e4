"""What the pages print can be typed: commands and Python run page by page, in their
order, at toy sizes.

A block that cannot run here says why in a comment before it, `<!-- not run: ... -->`;
its commands are read by the real parser all the same. Programs in benchmarks/ are run
by test_benchmarks.py.
"""

import argparse
import dataclasses
import json
import re
import shlex
import shutil
from pathlib import Path
from typing import NamedTuple

import hf_folder
import inception_random
import jax
import nextstep_tiny
import numpy as np
import pytest
import tiny
import torch_writer
import word_models
from PIL import Image
from test_links import text_of

from cspd_jax import hub, weights
from cspd_jax.cli import main, make_parser, parser_of
from cspd_jax.converters import kl16, mar
from cspd_jax.networks.inception import InceptionConfig
from cspd_jax.networks.registry import kind_name
from cspd_jax.training import presets
from cspd_jax.training.data.text import Document

ROOT = Path(__file__).parents[2]
PAGES = [
    ROOT / "README.md",
    ROOT / "CONTRIBUTING.md",
    *sorted((ROOT / "docs").glob("*.md")),
]
FENCED = re.compile(r"^((?:<!--[^\n]*-->\n)*)```([^\n]*)\n(.*?)^```$", re.M | re.S)
ELSEWHERE = (
    "python3 -m venv",
    ". .venv",
    "pip install",
    "python benchmarks/",
    "bash benchmarks/",
)

# How small it all is: flags that commands which begin so are given besides; the last of
# two values counts.
SMALLER = {
    "generate": "--n 1",
    "generate --target runs": "--num-iter 4",
    "generate --target words": "--num-iter 4",
    "generate --target FOLDER": "--grid 1x2 --respacing flow-calls4",
    "generate --target mar-base": "--labels 0,1 --num-iter 4",
    "generate --target sphere-b": "--labels 0,1",
    "sample": "--n 8 --batch 4",
    "sample --target": "--num-iter 4",
    "text": "--new-tokens 8",
    "masked": "--new-tokens 8",
    "masked --method schedule": "--steps 4",
    "train": "--steps 2 --batch 2",
    "distill": "--steps 2 --batch 2",
    "distill --preset text": "--samples 64",
    "distill --states": "--ids 20 --samples 64",
    "evaluate --samples": "--batch 4",
    "calibrate": "--n 2 --new-tokens 8",
    "convert sphere-b.pth": "--heads 2",
}
IN_PYTHON = {
    "50_000": "4",
    "max_new_tokens=64": "max_new_tokens=8",
    "respacing=28": "respacing=4",
    "grid=(16, 16)": "grid=(1, 2)",
    'jax.config.update("jax_compilation_cache_dir", "compiled")': "",
}
CORPUS = tuple(
    Document(name, f"{name}: {'abcab ' * 400}") for name in ("tempfile", "b", "c")
)


class Block(NamedTuple):
    """A fenced block of a page."""

    language: str
    code: str
    runs: bool

    def commands(self):
        """Words of each command, without comments."""
        for line in self.code.replace("\\\n", " ").replace("&&", "\n").splitlines():
            words = shlex.split(line, comments=True)
            if words and not " ".join(words).startswith(ELSEWHERE):
                yield words


def blocks(page):
    found = FENCED.findall(text_of(page))
    return [
        Block(language, code, "not run:" not in before)
        for before, language, code in found
    ]


def test_every_file_that_the_docs_name_exists():
    inside = (ROOT / name for name in ("cspd_jax", "tests", "docs", "benchmarks"))
    places = (ROOT, *inside)
    pattern = re.compile(
        r"`([\w.-]+/[\w./*-]+\.(?:py|md|json|txt|ipynb|toml))`|\]\(([\w./-]+)(?:#[\w-]+)?\)"
    )
    for page in PAGES:
        for named in pattern.findall(page.read_text(encoding="utf-8")):
            found = [[*p.glob("".join(named))] for p in (page.parent, *places)]
            assert any(found), (page.name, named)


def test_commands_are_understood():
    """By the parser of the command, also those that are not run, and those that
    notebooks speak of."""
    pages = [*PAGES, *(ROOT / "notebooks").glob("*.ipynb")]
    asked = [
        words for page in pages for block in blocks(page) for words in block.commands()
    ]
    asked = [words[1:] for words in asked if words[0] == "cspd-jax"]
    for words in asked:
        begun = make_parser().parse_args(words)
        parser_of(begun.command)[1].parse_args(begun.arguments)
    assert len(asked) > 50


# What pages take for given: the names of files, and what makes them.


def torch_checkpoint(path, entries, **told):
    random = np.random.default_rng(0)
    tensors = {
        e.name: 0.1 * random.standard_normal(e.source_shape, np.float32)
        for e in entries
    }
    torch_writer.write(path, {"model": tensors, "args": argparse.Namespace(**told)})


def mar_checkpoint(path):
    heads = {"encoder_num_heads": 2, "decoder_num_heads": 2}
    torch_checkpoint(
        path, mar.FORMAT.wanted(tiny.LATENTS), **heads, patch_size=1, vae_stride=2
    )


def language_model(config):
    def make(path):
        path.parent.mkdir(exist_ok=True)
        hf_folder.write(path, config)
        (path / "tokenizer.json").write_text(word_models.tokenizer(ids=hf_folder.V))
        template = {
            "chat_template": "w1 {% for m in messages %}{{ m['content'] }} {% endfor %}"
        }
        (path / "tokenizer_config.json").write_text(json.dumps(template))

    return make


def gguf(path):
    pytest.importorskip("gguf")
    import gguf_file

    gguf_file.write(path, gguf_file.LLAMA, gguf_file.weights(gguf_file.LLAMA))


def pictures(path):
    path.mkdir()
    for i, image in enumerate(inception_random.images(8)):
        Image.fromarray(image).save(path / f"{i}.png")


def questions(path):
    path.parent.mkdir(parents=True)
    whole = (ROOT / path.relative_to(Path.cwd())).read_text()
    path.write_text("\n".join(whole.splitlines()[:18]))


LLAMA = language_model(hf_folder.LLAMA | {"max_position_embeddings": 256})
# As random as the others it would never draft the next move.
TRAINED = hub.shipped_folder("masked-whole")
INCEPTION = "pt_inception-2015-12-05-6726825d.pth"
GIVEN = {
    "README": {
        "checkpoint-last.pth": mar_checkpoint,
        "kl16.ckpt": lambda path: torch_checkpoint(path, kl16.FORMAT.wanted(tiny.KL)),
    },
    "checkpoints": {
        "SRC": mar_checkpoint,
        "FOLDER": LLAMA,
        "OWNER/NAME": LLAMA,
        "model.gguf": gguf,
    },
    "images": {
        "mar-base": lambda path: tiny.save_mar(path, tiny.LATENTS),
        "kl16": tiny.save_kl16,
        "dataset": pictures,
        INCEPTION: lambda path: torch_writer.write(
            path, inception_random.weights(InceptionConfig(16, 10))
        ),
        "FOLDER": lambda path: nextstep_tiny.with_tokenizer(nextstep_tiny.write(path)),
        "sphere-b.pth": lambda p: shutil.copy(
            ROOT / "tests/golden_causal/sphere_tiny2_ar.pth", p
        ),
    },
    "masked": {
        "OWNER/NAME": language_model(hf_folder.LLADA),
        "models/masked": lambda path: shutil.copytree(TRAINED, path),
    },
    "text": {f"EleutherAI/pythia-{size}-deduped": LLAMA for size in ("1.4b", "160m")},
    "training": {
        "pictures": pictures,
        "DIR": LLAMA,
        "benchmarks/prompts/train.txt": questions,
    },
}


@pytest.fixture
def small(tmp_path, monkeypatch):
    """A folder to be in, in which every model is as narrow as the toy of its name in
    benchmarks/."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    toy = __import__("toy")
    (tmp_path / "shipped").mkdir()
    for name, place in (hub.DEFAULTS | hub.TEXT_DEFAULTS).items():
        model = toy.load(name)
        kind = "lm" if name in hub.TEXT_DEFAULTS else kind_name(model.config)
        extra = model.metadata.get("extra")
        weights.save(
            tmp_path / "shipped" / place, kind, model.config, model.params, extra=extra
        )
    monkeypatch.setattr(hub, "SHIPPED", tmp_path / "shipped")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr("cspd_jax.training.data.text.documents", lambda: CORPUS)
    for name, run in presets.PRESETS.items():
        fewer = {"warmup": 1, "decay": 1}
        if not hasattr(run.model, "entering"):
            fewer["model"] = toy.narrow(run.model)
        if hasattr(run, "buckets"):
            fewer["buckets"] = 1
        shorter = dataclasses.replace(run, **fewer)
        monkeypatch.setitem(presets.PRESETS, name, shorter)
    return tmp_path


def run(words):
    assert words[0] == "cspd-jax", f"{words} is neither run nor marked so"
    words = words[1:]
    for beginning, flags in SMALLER.items():
        if shlex.join(words).startswith(beginning) and "--list" not in words:
            words += flags.split()
    if words[0] == "convert":
        shutil.rmtree(words[2], ignore_errors=True)  # of the command before
    assert main(words) == 0, shlex.join(words)


@pytest.mark.slow
@pytest.mark.parametrize(
    "page", [page for page in PAGES if blocks(page)], ids=lambda page: page.stem
)
def test_the_page_runs(page, small):
    for name, make in GIVEN.get(page.stem, {}).items():
        make(small / name)
    names = {"__name__": page.stem}
    for block in blocks(page):
        if block.runs and block.language == "python":
            code = block.code
            for printed, smaller in IN_PYTHON.items():
                code = code.replace(printed, smaller)
            exec(compile(code, page.name, "exec", dont_inherit=True), names)
        elif block.runs and block.language != "text":
            for words in block.commands():
                run(words)
    jax.clear_caches()
