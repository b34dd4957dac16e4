"""Citations, as BibTeX, of the works that models, methods and options are based on."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator
from pathlib import Path

from cspd_jax import __version__
from cspd_jax.check import UserError, shown

_OWN = (
    "@software{cspd_jax,\n  author = {{The cspd_jax authors}},\n  title = {cspd_jax:"
    f" Exact Speculative Decoding in JAX}},\n  version = {{{__version__}}},\n}}"
)
# Block verification, of tokens and of denoising steps. A value can name several works.
_GAUSSIAN_BLOCKS = "block diffusions"
_OF_CLASS = {
    "image.chain.ChainSpeculation": _GAUSSIAN_BLOCKS,
    "image.lossy.Annealing": "disa",
    "image.lossy.Checkerboard": "gtr",
    "image.methods.DraftSpeculation": "cspd",
    "image.methods.Released": "cspd",
    "image.methods.SelfSpeculation": _GAUSSIAN_BLOCKS,
    "image.criterion.PathCriterion": _GAUSSIAN_BLOCKS,
    "masked.options.SelfSpeculation": "ssd",
    "networks.mar.MARConfig": "mar",
    "networks.sphere.SphereConfig": "sphere",
    "networks.eagle.EagleConfig": "eagle3",
    "text.methods.Tree": "specinfer",
}
_OF_VALUE = {  # (field of a configuration or of options, its value) -> works
    ("coupled", True): "coupled",
    ("denoise", "speculative"): _GAUSSIAN_BLOCKS,
    ("family", "dream"): "dream",
    ("family", "llada"): "llada",
    ("rule", "block"): "block",
    ("rule", "deepmind"): "chen",
    ("rule", "google"): "leviathan",
    ("rule", "tree"): "recursive",
}


def citation(*used: object) -> str:
    """Returns BibTeX entries for this library and for the works behind the arguments,
    which are models, methods and options in any order."""
    for one in used:
        if isinstance(one, str):
            raise UserError(f"{shown(one)} is a name; load the model first")
    works = json.loads(
        Path(__file__).with_name("works.json").read_text(encoding="utf-8")
    )
    keys = sorted({key for one in used for key in _keys(one)})
    return "\n\n".join([_OWN, *(_article(key, *works[key]) for key in keys)])


def _keys(used: object) -> Iterator[str]:
    place = f"{type(used).__module__}.{type(used).__name__}".removeprefix("cspd_jax.")
    if place in _OF_CLASS:
        yield from _OF_CLASS[place].split()
    if dataclasses.is_dataclass(used):
        of = vars(used)
    else:
        of = used._asdict() if hasattr(used, "_asdict") else {}
    for name, value in of.items():
        if isinstance(value, (str, bool)) and (name, value) in _OF_VALUE:
            yield from _OF_VALUE[name, value].split()
        yield from _keys(value)


def _article(key: str, author: str, title: str, arxiv: str) -> str:
    year = f"20{arxiv[:2]}"
    name = f"{author.partition(',')[0].lower()}{year}{key}"
    return (
        f"@article{{{name},\n  author = {{{author}}},\n  title = {{{title}}},\n"
        f"  year = {{{year}}},\n  eprint = {{{arxiv}}},\n"
        "  archiveprefix = {arXiv},\n}"
    )
