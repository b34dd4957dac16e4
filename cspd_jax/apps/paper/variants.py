"""The ways that are compared, by name, and the method and options that each stands for."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from cspd_jax.image.lossy.shortcuts import Annealing, Checkerboard
from cspd_jax.image.methods import DraftSpeculation, Method, Plain, ReleasedRunner, SelfSpeculation
from cspd_jax.image.options import FIELDS, Options
from cspd_jax.image.order import Spread
from cspd_jax.image.rounds import PaperCriterion, PathCriterion
from cspd_jax.weights.models import ImageModel

# Names in stored cells, where they are not those of today.
_NAMES = {"reveal": "order", "adapt": "draft_cost", "max_trips": "max_resamples"}
_MEANT: dict[str, Callable[[Any], Any]] = {
    "anneal": lambda value: Annealing(*value),
    "order": lambda value: Spread() if value == "spread" else Checkerboard(*value),
}
# The others stored them too, before drafts were verified as one block, for which nothing is proposed.
_OF_PAPER = ("proposals", "max_resamples")
_OF_CRITERION = (*_OF_PAPER, "sigma", "align", "inner_temperature")

PLAIN: dict[str, Any] = {"final_noise": True}
CHAINS: dict[str, Any] = {"final_noise": True, "denoise": "speculative"}
OFFICIAL: dict[str, Any] = {"method": "cspd", "criterion": "official"}
PAPER: dict[str, Any] = {"method": "cspd", "criterion": "paper"}
WIDENED: dict[str, Any] = {**PAPER, "inner_temperature": 42.0}
PATH: dict[str, Any] = {"method": "cspd"}
SELF: dict[str, Any] = {"method": "self"}
SELF_CHAINS: dict[str, Any] = {"method": "self", "denoise": "speculative"}

# The lossy ways of the paper, then the exact ones; as tables and legends call them.
SPECULATIVE: dict[str, dict[str, Any]] = {
    "official: the released runner": OFFICIAL,
    "paper: Algorithm 1": PAPER,
    "path, by the draft model": PATH,
    "self": SELF,
}


def available(ways: Mapping[str, dict[str, Any]], has_draft: bool) -> dict[str, dict[str, Any]]:
    """Those that can be run: without a draft model, the ones that need none."""
    return {name: way for name, way in ways.items() if has_draft or way.get("method") != "cspd"}


def asked(draft: ImageModel | None, values: Mapping[str, Any], **sampling: Any) -> tuple[Method, Options]:
    """The method and the options that values, which JSON can hold, stand for. sampling: more `Options`."""
    values = {_NAMES.get(name, name): value for name, value in values.items()}
    given = {name: values.pop(name) for name in FIELDS if name in values}
    given |= {name: meant(given[name]) for name, meant in _MEANT.items() if name in given}
    name, criterion = values.pop("method", "plain"), values.pop("criterion", "path")
    if criterion == "path":
        values = {name: value for name, value in values.items() if name not in _OF_PAPER}
    method: Any
    if name == "plain":
        method = Plain()
    elif name == "self":
        method = SelfSpeculation(**values)
    elif criterion == "official":
        method = ReleasedRunner(draft, **values)  # type: ignore[arg-type]
    else:
        kind: Any = {"path": PathCriterion, "paper": PaperCriterion}[criterion]
        own = {name: values.pop(name) for name in _OF_CRITERION if name in values}
        method = DraftSpeculation(draft, kind(**own), **values)  # type: ignore[arg-type]
    return method, Options(**given, **sampling)
