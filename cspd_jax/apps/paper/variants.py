"""The ways that are compared, by name, and the request that each stands for."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from cspd_jax.image.lossy.shortcuts import Annealing, Checkerboard
from cspd_jax.image.methods import DraftSpeculation, Plain, ReleasedRunner, SelfSpeculation
from cspd_jax.image.plan import Request, make_request
from cspd_jax.image.rounds import PaperCriterion, PathCriterion
from cspd_jax.weights.models import ImageModel

_OF_REQUEST = ("num_iter", "final_noise", "denoise", "anneal", "reveal")
_SHORTCUTS = {"anneal": Annealing, "reveal": Checkerboard}
_OF_CRITERION = ("proposals", "max_trips", "sigma", "align", "inner_temperature")

PLAIN: dict[str, Any] = {"final_noise": True}
CHAINS: dict[str, Any] = {"final_noise": True, "denoise": "speculative"}
OFFICIAL: dict[str, Any] = {"method": "cspd", "criterion": "official"}
PAPER: dict[str, Any] = {"method": "cspd", "criterion": "paper"}
WIDENED: dict[str, Any] = {**PAPER, "inner_temperature": 42.0}
PATH: dict[str, Any] = {"method": "cspd", "proposals": 8}
SELF: dict[str, Any] = {"method": "self"}
SELF_CHAINS: dict[str, Any] = {"method": "self", "denoise": "speculative"}

# The lossy ways of the paper, then the exact ones; as tables and legends call them.
SPECULATIVE: dict[str, dict[str, Any]] = {
    "official: the released runner": OFFICIAL,
    "paper: Algorithm 1": PAPER,
    "path, by the draft model": PATH,
    "self": SELF,
}
WITH_CHAINS = {**SPECULATIVE, "self, with chains": SELF_CHAINS}


def available(ways: Mapping[str, dict[str, Any]], has_draft: bool) -> dict[str, dict[str, Any]]:
    """Those that can be run: without a draft model, the ones that need none."""
    return {name: way for name, way in ways.items() if has_draft or way.get("method") != "cspd"}


def request_of(
    target: ImageModel,
    draft: ImageModel | None,
    labels: Sequence[int],
    options: Mapping[str, Any],
    **sampling: Any,
) -> Request:
    """The request that options, which JSON can hold, stand for. sampling: arguments of `make_request`."""
    options = dict(options)
    asked = {name: options.pop(name) for name in _OF_REQUEST if name in options}
    asked |= {name: kind(*asked[name]) for name, kind in _SHORTCUTS.items() if name in asked}
    name, criterion = options.pop("method", "plain"), options.pop("criterion", "path")
    method: Any
    if name == "plain":
        method = Plain()
    elif name == "self":
        method = SelfSpeculation(**options)
    elif criterion == "official":
        method = ReleasedRunner(draft, **options)  # type: ignore[arg-type]
    else:
        kind: Any = {"path": PathCriterion, "paper": PaperCriterion}[criterion]
        own = {name: options.pop(name) for name in _OF_CRITERION if name in options}
        method = DraftSpeculation(draft, kind(**own), **options)  # type: ignore[arg-type]
    return make_request(target, labels, method=method, **asked, **sampling)
