"""Several ways to make the same images, measured in one run."""

from __future__ import annotations

import dataclasses
import functools

import jax
import numpy as np

from cspd_jax.check import is_out_of_memory
from cspd_jax.image.chain import ChainSpeculation
from cspd_jax.image.coupled import CoupledCriterion
from cspd_jax.image.generation import Labels, Request, generate
from cspd_jax.image.lossy import Checkerboard
from cspd_jax.image.methods import Method, Plain, SelfSpeculation
from cspd_jax.image.options import Options
from cspd_jax.image.protocol import CausalTokenModel
from cspd_jax.info import Info
from cspd_jax.keys import independent_key
from cspd_jax.measure import Choice, fastest_of, median_seconds, timed
from cspd_jax.models import ImageModel

Array = jax.Array
_FEW = 2  # images on which ways are tried first
_WINDOWS = (8, 16)  # denoising steps drafted per head call
_SELF = (  # coupled drafts pay far ahead
    SelfSpeculation(8),
    SelfSpeculation(4),
    SelfSpeculation(16),
    SelfSpeculation(16, coupled=True),
    SelfSpeculation(24, coupled=True),
)


def compare(
    key: Array,
    model: ImageModel,
    labels: Labels,
    method: Method = SelfSpeculation(),
    options: Options = Options(),
    repeats: int = 3,
) -> dict[str, tuple[np.ndarray, Info]]:
    """Makes the same images by the method, by the plain sampler step by step, and by
    the draft model alone.

    Returns tokens and what happened by way, "plain", "draft alone" and the method's
    name (with the plain method "speculative along chains" or "lossy shortcut");
    `info.seconds` are of all images, without compilation.
    """
    order = None if isinstance(options.order, Checkerboard) else options.order
    plain = dataclasses.replace(options, denoise="plain", anneal=None, order=order)
    name = method.name
    if name == "plain":
        name = "lossy shortcut" if options.shortcuts else "speculative along chains"
    ways = {
        name: Request(key, model, labels, method, options),
        "plain": Request(key, model, labels, Plain(), plain),
    }
    if method.draft_model is not None:
        ways["draft alone"] = ways["plain"]._replace(model=method.draft_model)
    runs = {
        name: functools.partial(generate, *request) for name, request in ways.items()
    }
    return {
        name: (np.asarray(tokens), dataclasses.replace(info, seconds=seconds))
        for name, ((tokens, info), seconds) in timed(runs, repeats).items()
    }


def fastest(
    key: Array,
    model: ImageModel,
    labels: Labels,
    options: Options = Options(),
    methods: tuple[Method, ...] = (),
) -> Choice[Request]:
    """Returns what to give `generate` for these images: the fastest exact way on this
    machine.

    Tried on a few images are the plain sampler and, with speculation along the
    denoising chains, the plain sampler and (of models that are not causal)
    self-speculation; if one of these wins, its neighbours too, with other windows and
    gammas, coupled drafts, and step by step; what wins then, on all. `methods`: in
    place of these two. All have one distribution, and the measurement draws numbers of
    its own: a way chosen by the numbers that it is then run with would favour some
    images. `generate(*choice.request)` runs the fastest.
    """
    plain = Request(
        key, model, labels, Plain(), dataclasses.replace(options, denoise="plain")
    )
    ahead = not isinstance(model.network, CausalTokenModel) and options.final_noise
    tried = methods or ((Plain(), _SELF[0]) if ahead else (Plain(),))
    ways = {
        "plain": plain,
        **dict(_along_chains(plain, method, _WINDOWS[0]) for method in tried),
    }
    few = _measured(
        {name: way._replace(labels=labels[:_FEW]) for name, way in ways.items()}
    )
    best = fastest_of(few, "plain")
    if best != "plain":
        near = _near(ways[best], plain)
        ways |= near
        few |= _measured(
            {name: way._replace(labels=labels[:_FEW]) for name, way in near.items()}
        )
        best = fastest_of(few, "plain")
    last = best != "plain" and len(labels) > _FEW
    seconds = _measured({name: ways[name] for name in ("plain", best)}) if last else few
    way = fastest_of(seconds, "plain")
    return Choice(ways[way], way, seconds)


def _along_chains(plain: Request, method: Method, window: int) -> tuple[str, Request]:
    """Returns the way by the method with speculation along the chains, and its name."""
    options = dataclasses.replace(plain.options, denoise=ChainSpeculation(window))
    return f"{_name(method)}, window {window}", plain._replace(
        method=method, options=options
    )


def _near(way: Request, plain: Request) -> dict[str, Request]:
    """Returns the ways that differ from this one, which won, in one number, or denoise
    step by step."""
    ways = [_along_chains(plain, way.method, window) for window in _WINDOWS[1:]]
    if way.method.name != "plain":
        ways.append((_name(way.method), plain._replace(method=way.method)))
    if isinstance(way.method, SelfSpeculation):
        ways += [_along_chains(plain, method, _WINDOWS[0]) for method in _SELF[1:]]
    return dict(ways)


def _name(method: Method) -> str:
    told = method.describe()
    if told is None:
        return method.name
    coupled = method.criterion_name == CoupledCriterion.name
    return f"{method.name} {told['gamma']}" + " coupled" * coupled


def _measured(ways: dict[str, Request]) -> dict[str, float]:
    """Returns the seconds of each way; what does not fit into memory takes for ever."""
    seconds: dict[str, float] = {}
    for name, way in ways.items():
        run = functools.partial(generate, *way._replace(key=independent_key(way.key)))
        try:
            seconds |= median_seconds({name: run}, repeats=3, longest=3.0)
        except RuntimeError as error:
            if not is_out_of_memory(error):
                raise
            seconds[name] = float("inf")
    return seconds
