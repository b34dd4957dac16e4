"""`--toy`: all of a program's code in seconds, on tiny random models, to see that it runs.

Numbers that come out mean nothing. A toy model is the shipped one of its name with few and narrow layers, 16
tokens and 5 denoising steps. What a program writes goes into a temporary folder that ends with the process,
unless a file is named.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import os
import sys
import tempfile
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from inputs import among, say_why

from cspd_jax import weights
from cspd_jax.cli._arguments import positive
from cspd_jax.networks import lm
from cspd_jax.networks.lm_config import LMConfig
from cspd_jax.networks.registry import kind_name, kind_of
from cspd_jax.training.data.text import documents
from cspd_jax.weights import models
from cspd_jax.weights.tokenizers import ByteTokenizer

STEPS = 5
_NARROW = {
    "mar": {
        "seq_len": 16, "token_dim": 64, "patch_size": 8, "buffer_size": 2, "encoder_width": 16,
        "encoder_depth": 1, "encoder_heads": 2, "decoder_width": 16, "decoder_depth": 1, "decoder_heads": 2,
        "head_depth": 1, "head_width": 16, "respacing": f"ddim{STEPS}",
    },
    "sphere": {
        "seq_len": 16, "token_dim": 64, "patch_size": 8, "class_tokens": 2, "width": 16, "depth": 1,
        "heads": 2, "head_depth": 1, "head_width": 16, "respacing": f"flow{STEPS}",
    },
    "lm": {"width": 16, "depth": 1, "heads": 2, "kv_heads": 2, "head_dim": 8, "mlp_width": 16},
}  # fmt: skip


class Parser(argparse.ArgumentParser):
    """The arguments of a program, --toy among them.

    small: by name, what --toy gives to arguments that are not given; a path lies in a temporary folder.
    """

    def __init__(self, about: str | None, **small: Any):
        super().__init__(description=about, formatter_class=argparse.RawDescriptionHelpFormatter)
        self._small = small
        self._named: list[argparse.Action] = []
        self.add_argument("--toy", action="store_true", help="all of it in seconds, on tiny random models")

    def add_argument(self, *names: str, **options: Any) -> argparse.Action:
        if options.get("type") is int and options.get("default", 1) != 0:
            options["type"] = positive
        action = super().add_argument(*names, **options)
        if names[0] not in ("-h", "--toy"):
            self._named.append(action)
        return action

    def add_names(self, flag: str, known: Iterable[str], default: str | None = None) -> None:
        """An argument that lists some of these names."""
        told = "some of them, by name, separated by ;"
        self.add_argument(flag, type=among(known), default=default, help=told)

    def parse_args(self, args=None, namespace=None):
        given = sys.argv[1:] if args is None else list(args)
        if "--toy" in given:
            for action in self._named:
                if action.dest in self._small:
                    action.default, action.required = _placed(self._small[action.dest]), False
                    action.nargs = action.nargs if action.option_strings else "?"
        return super().parse_args(given, namespace)


def begin(parser: Parser, quick: bool = True) -> argparse.Namespace:
    """The arguments of this process. With --toy programs are compiled quickly, and caches are its own."""
    sys.excepthook = say_why
    args = parser.parse_args()
    for name in ("file", "picture", "rows"):
        path = getattr(args, name, None)
        if isinstance(path, Path) and not path.absolute().parent.is_dir():
            parser.error(f"{path.parent}, where {path.name} would be written, is no folder")
    if args.toy:
        os.environ["XDG_CACHE_HOME"] = str(scratch() / "cache")
        if quick:
            jax.config.update("jax_disable_most_optimizations", True)
    return args


@functools.cache
def _folder() -> tempfile.TemporaryDirectory:
    return tempfile.TemporaryDirectory(prefix="toy-")


def scratch() -> Path:
    """A folder that ends with the process."""
    return Path(_folder().name)


def _placed(value: Any) -> Any:
    return scratch() / value if isinstance(value, Path) else value


def left_out(what: str, why: str) -> None:
    print(f"left out: {what} ({why})", file=sys.stderr, flush=True)


def load(name: str, toy: bool = True) -> models.ImageModel:
    """`models.load`; a toy of the same name and data."""
    if not toy:
        return models.load(name)
    network, params, metadata = _random(name)
    return models.ImageModel(name, network, params, metadata, tuple("0123456789"))


def load_text(name: str, toy: bool = True) -> models.TextModel:
    """`models.load_text`; a toy of the same vocabulary."""
    if not toy:
        return models.load_text(name)
    return models.TextModel(name, *_random(name), folder=models.shipped_folder(name))


@functools.cache
def _random(name: str) -> tuple[Any, Any, dict[str, Any]]:
    """The network, random parameters and metadata of a toy; drafts are the models that they draft for, with
    other last digits, so that they are often right."""
    metadata = weights.read_description(models.shipped_folder(name))
    config = narrow(metadata.pop("config"))
    network = lm.LM(config) if isinstance(config, LMConfig) else kind_of(config).network(config)
    return network, random_params(config, 0.02 if name.endswith("-draft") else 0.0), metadata


def narrow(config: Any) -> Any:
    """The same kind of model, tiny: text keeps its vocabulary, images keep their size."""
    if isinstance(config, LMConfig):
        return dataclasses.replace(config, **_NARROW["lm"])
    small = _NARROW[kind_name(config)]
    side = config.grid * config.patch_size // small["patch_size"]
    return dataclasses.replace(config, **small | {"seq_len": side**2})


def random_params(config: Any, apart: float = 0.0) -> Any:
    random, other = np.random.default_rng(0), np.random.default_rng(1)

    def drawn(shape):
        values = 0.2 * random.standard_normal(shape.shape, np.float32)
        return values + np.float32(apart) * other.standard_normal(shape.shape, np.float32)

    module = lm if isinstance(config, LMConfig) else kind_of(config)
    return jax.tree.map(lambda shape: jnp.asarray(drawn(shape)), module.abstract_params(config))


def sizes(presets: dict[str, Any], name: str, toy: bool) -> Any:
    """A published model's configuration, or a tiny one of its kind."""
    return narrow(presets[name]) if toy else presets[name]


def held_out_texts(toy: bool) -> list[str]:
    """Held-out documents of the corpus of the shipped models, which takes a while to read; or other texts."""
    if not toy:
        return [document.text for document in documents() if document.held_out]
    lines = (Path(__file__).parent / "prompts" / "train.txt").read_text().splitlines()
    return ["\n".join(lines[i : i + 20]) for i in range(0, len(lines) - 20, 20)]


def held_out_prompts(count: int, length: int, toy: bool) -> list[list[int]]:
    """The beginnings of held-out texts that are several times as long, as the shipped models' ids."""
    texts = [text for text in held_out_texts(toy) if len(text.encode()) > 4 * length]
    return [ByteTokenizer().encode(text)[:length] for text in texts[:count]]
