"""Measures several ways to generate the same images or texts in one run, to compare
them or to find the fastest. Images, text and masked text share these functions."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from types import ModuleType
from typing import Any, NamedTuple

import jax
import numpy as np

from cspd_jax import image, masked, text
from cspd_jax.check import UserError, shown
from cspd_jax.image.generation import as_labels, make
from cspd_jax.image.lossy import Checkerboard
from cspd_jax.info import Generated
from cspd_jax.keys import independent_key
from cspd_jax.language_models import as_prompts
from cspd_jax.measure import Choice, fastest_of, median_seconds, timed
from cspd_jax.models import ImageModel, TextModel, check_model
from cspd_jax.parallel import common_mesh

Array = jax.Array
_IMAGES = 2  # images in the first trial of each way
FIRST_TOKENS = 32  # tokens of each text in the first trial of each way
_LITTLE = 0.3  # seconds of all ways together, below which a trial is too short
_LONGEST = 3.0  # seconds after which no way has another turn
_WINDOWS = (8, 16)  # denoising steps drafted per head call
# (gamma, coupled) of self-speculation. Coupled drafts pay if gamma is large.
_SELF = ((8, False), (2, False), (4, False), (16, False), (16, True), (24, True))


class Request(NamedTuple):
    """The arguments of a family's `generate`.

    key: one key, or one per row [B]; None if nothing is drawn.
    model: the model that generates.
    what: the labels of the images, or the prompts of the texts.
    method: the way to generate.
    options: the family's options.
    """

    key: Any
    model: Any
    what: Any
    method: Any
    options: Any


def family_of(model: Any) -> ModuleType:
    """Returns the module that generates with this model: `image`, `text` or
    `masked`."""
    if isinstance(model, ImageModel):
        return image
    check_model(model, ImageModel, TextModel, tuple)
    network = model[0] if isinstance(model, tuple) else model.network
    return text if network.config.causal else masked


def compare(
    key: Array | None,
    model: Any,
    what: Any,
    method: Any,
    options: Any = None,
    repeats: int = 3,
) -> dict[str, Generated]:
    """Generates the same images or texts by the method and by its reference; and, if an
    image method has a draft model, by the draft model alone.

    Returns (tokens, info) by name: the name of the method; the name of the reference,
    which is "plain", or "stepwise" for masked text; and "draft alone". If the method is
    the plain one for images, its options may give it the name "speculative along
    chains" or "lossy shortcut". `info.seconds` is the time for all rows, without
    compilation.
    """
    family = family_of(model)
    options = options or family.Options()
    request = Request(key, model, what, method, options)
    family.prepare(*request)
    name = method.name
    if family is image:
        if name == "plain" and options.chains:
            name = "speculative along chains"
        if name == "plain" and options.shortcuts:
            name = "lossy shortcut"
        order = None if isinstance(options.order, Checkerboard) else options.order
        options = dataclasses.replace(
            options, denoise="plain", anneal=None, order=order
        )
    reference = request._replace(method=_reference(family), options=options)
    ways = {name: request}
    ways.setdefault(reference.method.name, reference)
    if family is image and method.draft is not None:
        ways["draft alone"] = reference._replace(model=method.draft)
    if len(ways) < 2:
        raise UserError(f"{name} is the reference itself; compare another method")
    return side_by_side(ways, repeats)


def side_by_side(ways: Mapping[str, Request], repeats: int = 3) -> dict[str, Generated]:
    """Generates every request, and measures its seconds. These are the least seconds of
    `repeats` runs, which follow a first run that compiles."""
    runs = {
        name: functools.partial(family_of(way.model).generate, *way)
        for name, way in ways.items()
    }
    return {
        name: found._replace(info=dataclasses.replace(found.info, seconds=seconds))
        for name, (found, seconds) in timed(runs, repeats).items()
    }


def fastest(
    key: Array | None,
    model: Any,
    what: Any,
    methods: Sequence[Any] = (),
    options: Any = None,
) -> Choice[Request]:
    """Returns the fastest way on this machine: the reference or one of the methods.
    `generate(*choice.request)` runs it.

    The ways take turns on a small part of the request: on two images, or on the first
    tokens of every text, with more tokens if that takes too little time to compare. All
    ways have the same distribution. The measurement uses random numbers of its own; if
    it used the numbers of the run, the choice would depend on them and favour some
    rows.

    methods: the methods that compete. Without any, self-speculation competes for images
        and masked text, and look-up for text.

    For images, every method denoises with speculation along the chains. If a method
    wins against the reference, its neighbours compete, too: the same method with other
    windows, with other gammas, and with step-by-step denoising. The winner then
    competes with the reference on all images.
    """
    family = family_of(model)
    options = options or family.Options()
    what = as_labels(model, what) if family is image else what
    own = None if key is None else independent_key(key)
    plain = Request(key, model, what, _reference(family), options)
    methods = methods or _usual(family, plain)
    if not isinstance(methods, Sequence):
        raise UserError(f"the methods are {shown(methods)}; write a list of them")
    for method in methods:
        prepared = family.prepare(*plain._replace(method=method))
        if isinstance(method, masked.Schedule) or (
            family is image and not prepared.recipe.claim.exact
        ):
            raise UserError(
                f"{_name(method)} is lossy with these options; give exact methods"
            )
    if family is image:
        plain = plain._replace(options=dataclasses.replace(options, denoise="plain"))
        ways = _along_chains(plain, methods, _WINDOWS[0])
    else:
        ways = {_name(method): plain._replace(method=method) for method in methods}
    if len(ways) < len(methods):
        raise UserError(
            f"two of the methods have one name: {', '.join(map(_name, methods))}"
        )
    first = plain.method.name
    ways = {first: plain, **ways}

    def measured(ways: Mapping[str, Request], size: int) -> dict[str, float]:
        return median_seconds(
            {
                name: _little(family, way._replace(key=own), size)
                for name, way in ways.items()
            },
            longest=_LONGEST,
        )

    if family is not image:
        size = FIRST_TOKENS
        most = int(np.max(options.max_new_tokens))
        seconds = measured(ways, size)
        while size < most and sum(seconds.values()) < _LITTLE:
            size *= 4
            seconds = measured(ways, size)
        best = fastest_of(seconds, first)
        return Choice(ways[best], best, seconds)
    seconds = measured(ways, _IMAGES)
    best = fastest_of(seconds, first)
    if best != first:
        near = _near(ways[best], plain)
        ways |= near
        seconds |= measured(near, _IMAGES)
        best = fastest_of(seconds, first)
    if best != first and len(what) > _IMAGES:
        seconds = measured({first: plain, best: ways[best]}, len(what))
        best = fastest_of(seconds, first)
    return Choice(ways[best], best, seconds)


def _reference(family: ModuleType) -> Any:
    return masked.Stepwise() if family is masked else family.Plain()


def _usual(family: ModuleType, plain: Request) -> list[Any]:
    """Returns the methods that usually pay for a family of models."""
    if family is text:
        return [text.Speculation(text.PromptLookup(), gamma) for gamma in (2, 4)]
    if family is image:
        causal = isinstance(plain.model.network, image.CausalTokenModel)
        if causal or not plain.options.final_noise:
            return [image.Plain()]
        # A round with many drafts is much arithmetic, for which a CPU takes long.
        gamma = 2 if jax.default_backend() == "cpu" else 8
        return [image.Plain(), image.SelfSpeculation(gamma)]
    usual = [masked.SelfSpeculation(gamma) for gamma in (2, 4, 8)]
    if masked.prepare(*plain).canvas.keys is None:  # nothing is drawn
        usual += [masked.SelfSpeculation(texts=texts) for texts in (4, 16)]
    return usual


def _name(method: Any) -> str:
    """Returns the name of a method with what distinguishes methods of one kind: its
    numbers, and for text the rule and the drafter."""
    words = [method.name]
    if getattr(method, "texts", None) is not None:
        words.append(f"texts {method.texts}")
    elif hasattr(method, "gamma"):
        words.append(f"gamma {int(np.max(method.gamma))}")
    if isinstance(method, text.Speculation):
        words += [method.rule, type(method.drafting().drafter).__name__]
    return " ".join(words + ["coupled"] * getattr(method, "coupled", False))


def _little(family: ModuleType, way: Request, size: int) -> Callable[[], Generated]:
    """Returns a function that generates the first `size` images, or the first `size`
    tokens of every text."""
    if family is image:
        first = np.arange(len(way.what))[:size]
        mesh = common_mesh(way.model, way.method.draft)
        return functools.partial(make, image.prepare(*way)[first], mesh)
    options = way.options
    most = int(np.max(options.max_new_tokens))
    if family is text:  # max_len is the whole texts', since it decides a pass's time
        longest = np.shape(as_prompts(way.what).tokens)[1] + most
        short = {
            "max_new_tokens": min(size, most),
            "max_len": options.max_len or longest,
            "stop_ids": (),
        }
    else:
        block = masked.prepare(*way).canvas.block
        short = {"max_new_tokens": min(most, max(block, size // block * block))}
    options = dataclasses.replace(options, **short)
    return functools.partial(family.generate, *way._replace(options=options))


def _along_chains(
    plain: Request, methods: Sequence[Any], window: int
) -> dict[str, Request]:
    """Returns the requests, by name, for these methods with speculation along the
    chains and this window."""
    options = dataclasses.replace(plain.options, denoise=image.ChainSpeculation(window))
    return {
        f"{_name(method).replace('plain', 'chains')}, window {window}": plain._replace(
            method=method, options=options
        )
        for method in methods
    }


def _near(way: Request, plain: Request) -> dict[str, Request]:
    """Returns the neighbours of the way that won: requests that differ from it in one
    number, or that denoise step by step."""
    method = way.method
    ways = _along_chains(plain, [method], _WINDOWS[1])
    if method.name != "plain":
        ways[_name(method)] = plain._replace(method=method)
    if isinstance(method, image.SelfSpeculation):
        others = [
            dataclasses.replace(method, gamma=gamma, coupled=coupled)
            for gamma, coupled in _SELF
        ]
        ways |= _along_chains(
            plain, [other for other in others if other != method], _WINDOWS[0]
        )
    return ways
