"""The parts that all benchmarks share: their arguments, the flag `--toy`, timing, and
the writing of results.

`--toy` runs all of a program's code in seconds, on tiny random models, to check that it
runs. The resulting numbers have no meaning. A toy model has the name of a model that
comes with the package, with few and narrow layers, 16 tokens and 5 denoising steps. A
toy run writes into a temporary folder that is deleted when the process ends, unless a
file is named.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import json
import os
import re
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from cspd_jax import hub, models, weights
from cspd_jax._utils.compilation import compile_seconds
from cspd_jax._utils.files import write_text
from cspd_jax.comparison import Request
from cspd_jax.image.generation import generate
from cspd_jax.info import Info
from cspd_jax.networks import lm
from cspd_jax.networks.lm import LMConfig
from cspd_jax.networks.registry import kind_name, kind_of
from cspd_jax.reports.report import device, versions
from cspd_jax.tokenizers import ByteTokenizer
from cspd_jax.training.data.text import documents

STEPS = 5
_NARROW = {
    "mar": {
        "seq_len": 16,
        "token_dim": 64,
        "patch_size": 8,
        "buffer_size": 2,
        "encoder_width": 16,
        "encoder_depth": 1,
        "encoder_heads": 2,
        "decoder_width": 16,
        "decoder_depth": 1,
        "decoder_heads": 2,
        "head_depth": 1,
        "head_width": 16,
        "respacing": f"ddim{STEPS}",
    },
    "sphere": {
        "seq_len": 16,
        "token_dim": 64,
        "patch_size": 8,
        "class_tokens": 2,
        "width": 16,
        "depth": 1,
        "heads": 2,
        "head_depth": 1,
        "head_width": 16,
        "respacing": f"flow{STEPS}",
    },
    "lm": {
        "width": 16,
        "depth": 1,
        "heads": 2,
        "kv_heads": 2,
        "head_dim": 8,
        "mlp_width": 16,
    },
}


class Parser(argparse.ArgumentParser):
    """The parser of a program's arguments, which include --toy.

    about: the description of the program.
    small: values by name that --toy gives to arguments that the caller does not give. A
        path is put into a temporary folder.
    """

    def __init__(self, about: str | None, **small: Any):
        super().__init__(
            description=about, formatter_class=argparse.RawDescriptionHelpFormatter
        )
        self._small = small
        self.add_argument(
            "--toy",
            action="store_true",
            help="all of it in seconds, on tiny random models",
        )

    def parse_args(self, args=None, namespace=None):
        given = sys.argv[1:] if args is None else list(args)
        for action in self._actions if "--toy" in given else ():
            if action.dest in self._small:
                value = self._small[action.dest]
                action.default = scratch() / value if isinstance(value, Path) else value
                action.required = False
                action.nargs = action.nargs if action.option_strings else "?"
        return super().parse_args(given, namespace)


def begin(parser: Parser, quick: bool = True) -> argparse.Namespace:
    """Returns the arguments. With --toy, programs are compiled with few optimisations,
    and caches are in the temporary folder."""
    args = parser.parse_args()
    if args.toy:
        os.environ["XDG_CACHE_HOME"] = str(scratch() / "cache")
        if quick:
            jax.config.update("jax_disable_most_optimizations", True)
    return args


def say(line: str) -> None:
    """Prints a line on standard error."""
    print(line, file=sys.stderr, flush=True)


def results(file: Path | None) -> Any:
    """Returns the JSON value in a file. If there is no file, returns an empty list."""
    return json.loads(file.read_text()) if file is not None and file.exists() else []


def write_results(file: Path | None, found: Any) -> None:
    """Writes results into a file, if one is named. If the program is stopped meanwhile,
    the old file stays complete."""
    if file is not None:
        write_text(file, json.dumps(found, indent=1) + "\n")


def machine() -> dict[str, Any]:
    """Returns a description of the machine on which seconds are measured."""
    file = Path("/proc/cpuinfo")
    names = re.findall(
        r"model name\s*: (.*)", file.read_text() if file.exists() else ""
    )
    return {
        **device(),
        "versions": versions(),
        "processor": [*names, ""][0],
        "cores": os.cpu_count(),
    }


_SCRATCH = tempfile.TemporaryDirectory(prefix="toy-")  # deleted when the process ends


def scratch() -> Path:
    return Path(_SCRATCH.name)


def load(name: str, toy: bool = True) -> Any:
    """Loads a model. With `toy`, makes a tiny random model with the same name, and the
    same data set or vocabulary."""
    if not toy:
        return hub.load(name)
    network, params, metadata = _random(name)
    if name in hub.DEFAULTS:
        return models.ImageModel(
            name, network, params, metadata, class_names=tuple("0123456789")
        )
    return models.TextModel(
        name, network, params, metadata, folder=hub.shipped_folder(name)
    )


@functools.cache
def _random(name: str) -> tuple[Any, Any, dict[str, Any]]:
    """Returns the network, random parameters and metadata of a toy.

    The parameters of a draft are the parameters of its target plus small random
    numbers, so that the draft is often right.
    """
    metadata = weights.read_description(hub.shipped_folder(name))
    config = narrow(metadata.pop("config"))
    network = (
        lm.LM(config)
        if isinstance(config, LMConfig)
        else kind_of(config).network(config)
    )
    return (
        network,
        random_params(config, 0.02 if name.endswith("-draft") else 0.0),
        metadata,
    )


def narrow(config: Any) -> Any:
    """Returns a configuration with tiny layers. A language model keeps its vocabulary,
    and an image model keeps the size of its images."""
    if isinstance(config, LMConfig):
        return dataclasses.replace(config, **_NARROW["lm"])
    small = _NARROW[kind_name(config)]
    side = config.grid * config.patch_size // small["patch_size"]
    return dataclasses.replace(config, **small | {"seq_len": side**2})


def random_params(config: Any, apart: float = 0.0) -> Any:
    random = np.random.default_rng(0)
    other = np.random.default_rng(1)

    def drawn(shape):
        values = 0.2 * random.standard_normal(shape.shape, np.float32)
        return values + np.float32(apart) * other.standard_normal(
            shape.shape, np.float32
        )

    module = lm if isinstance(config, LMConfig) else kind_of(config)
    return jax.tree.map(
        lambda shape: jnp.asarray(drawn(shape)), module.abstract_params(config)
    )


def held_out_prompts(count: int, length: int, toy: bool) -> list[list[int]]:
    """Returns the ids of the first `length` bytes of held-out texts that are more than
    four times as long.

    Reading the corpus of the package's models takes a while, so a toy run uses other
    texts.
    """
    if toy:
        lines = (
            (Path(__file__).parent / "prompts" / "train.txt").read_text().splitlines()
        )
        texts = ["\n".join(lines[i : i + 20]) for i in range(0, len(lines) - 20, 20)]
    else:
        texts = [document.text for document in documents() if document.held_out]
    texts = [text for text in texts if len(text.encode()) > 4 * length]
    return [ByteTokenizer().encode(text)[:length] for text in texts[:count]]


def timed_images(request: Request) -> tuple[np.ndarray, Info, float]:
    """Returns the tokens, the info, and the seconds of the run without tracing and
    compiling."""
    compiled = compile_seconds()
    start = time.perf_counter()
    made, info = generate(*request)
    tokens = np.asarray(made)
    seconds = time.perf_counter() - start - (compile_seconds() - compiled)
    return tokens, info, max(seconds, 0.0)
