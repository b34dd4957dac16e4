"""Images from a model.

`sample` is the pure function, for your own `jit`, `vmap` and `scan`; its options are
settled by `resolve`, outside. `generate` is both in one call, in batches and on meshes.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import chex
import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from cspd_jax._utils.compilation import outermost_jit
from cspd_jax._utils.progress import Bar
from cspd_jax.check import UserError, check_draft, check_method, check_options
from cspd_jax.diffusion.flow import is_flow, of_kind
from cspd_jax.diffusion.schedule import sampling_schedule
from cspd_jax.image.calibration import drafter_for
from cspd_jax.image.chain import ChainSpeculation
from cspd_jax.image.counts import Made, info_of
from cspd_jax.image.known import of_every_image
from cspd_jax.image.lossy import Checkerboard
from cspd_jax.image.methods import METHODS, Method, Plain
from cspd_jax.image.options import Options
from cspd_jax.image.order import Raster, Spread
from cspd_jax.image.prompts import ask
from cspd_jax.image.protocol import CausalTokenModel, TokenModel
from cspd_jax.info import Calls, Exactness, Generated
from cspd_jax.keys import as_typed, keys_per_row
from cspd_jax.models import ImageModel
from cspd_jax.parallel import common_mesh, replicate, spread

Array = jax.Array
Labels = Sequence[int] | np.ndarray | jax.Array

PIECES = 8  # of a batch that somebody watches


class Request(NamedTuple):
    """The arguments of `generate`."""

    key: Array
    model: ImageModel
    labels: Labels
    method: Method = Plain()
    options: Options = Options()


def sample(
    network: TokenModel,
    params: Any,
    keys: Array,
    labels: Array,
    options: Options,
    method: Method = Plain(),
) -> Generated:
    """Generates B images: tokens [B, L, d] by position, and what happened. A pure
    function.

    keys: [B] one key for each image.
    labels: [B] class numbers; -1 is "no class".
    options: as `resolve` settles them. Their numbers may be replaced by traced ones:
        cfg ([] or [B]; guided says whether it counts), temperature, and known, if the
        options were settled with some.
    """
    keys = as_typed(keys)
    labels = jnp.asarray(labels)
    chex.assert_shape([keys, labels], (len(labels),))
    return _told(method.run(network, params, keys, labels, options), method, options)


def _told(made: Made, method: Method, options: Options) -> Generated:
    """Returns the tokens, and what is to be said of them."""
    known = None if options.known is None else options.known.mask
    info = _info(made, claim_of(method, options), method.ahead, known)
    return Generated(made.tokens, info)


def claim_of(method: Method, options: Options) -> Exactness:
    """Says whether the method is exact with these options, settled, and of which
    sampler's distribution."""
    exact, why = method.exactness(options)
    if exact and options.final_noise:
        why += (
            ", whose last denoising step has noise of standard deviation 0.006"
            " (`final_noise`)"
        )
    return Exactness(exact, why)


_info = jax.jit(info_of, static_argnums=(1, 2))


def resolve(
    model: ImageModel,
    method: Method = Plain(),
    options: Options = Options(),
    images: int = 1,
) -> Options:
    """Settles the options for so many images: what the model decides is filled in,
    drafters of denoising chains too; ValueError for what cannot be had."""
    options = settle(model, method, options, images)
    if options.chain is None:
        return options
    if options.chain_drafter is None:
        options = dataclasses.replace(
            options, chain_drafter=drafter_for(model, options)
        )
    draft = method.draft_model
    if draft is not None and options.draft_drafter is None:
        options = dataclasses.replace(
            options, draft_drafter=drafter_for(draft, options)
        )
    return options


def settle(
    model: ImageModel, method: Method, options: Options, images: int = 1
) -> Options:
    """Settles all options but the drafters of denoising chains; the model may have no
    parameters yet."""
    check_method(method, METHODS)
    check_options(options, Options)
    network = model.network
    draft = method.draft_model
    length = model.network.seq_len
    causal = isinstance(network, CausalTokenModel)
    _check(model, method, options, images)
    if causal:
        linear = options.cfg_schedule == "linear"
        schedule = network.linear_guidance if linear else options.cfg_schedule
        options = dataclasses.replace(
            options, order=Raster(), num_iter=length, cfg_schedule=schedule
        )
    if options.num_iter is None:
        own = (
            options.order.most_steps(length)
            if isinstance(options.order, Checkerboard)
            else length
        )
        options = dataclasses.replace(options, num_iter=own)
    respacing = model.config.respacing
    if options.respacing is not None:
        respacing = of_kind(str(options.respacing), respacing)
    elif draft is not None and draft.config.respacing != respacing:
        raise UserError(
            f"the draft denoises by {draft.config.respacing}, the target by"
            f" {respacing}; set the respacing"
            " (--steps), for both"
        )
    known = options.known
    if known is not None:
        known = of_every_image(known, images, length, network.token_dim, causal)
    # Each prefix is compiled: not worth it for short sequences, or where a cache is
    # read whole. A group that is known in part may know more than the encoder's prefix
    # has.
    few = length <= 64 or causal
    options = dataclasses.replace(
        options,
        respacing=respacing,
        denoise=_denoise(options, sampling_schedule(respacing).num_steps),
        final_noise=options.final_noise
        and not is_flow(respacing),  # whose last step has none
        known=known,
        prefix_buckets=1
        if known is not None
        else options.prefix_buckets or (1 if few else 4),
        guided=bool(np.any(np.asarray(options.cfg) != 1))
        if options.guided is None
        else options.guided,
    )
    if options.anneal is not None:
        options.respacings(length)
    options.groups(length)
    return options


def _denoise(options: Options, steps: int) -> ChainSpeculation | str:
    """Returns speculation along the chains with a window of at most all steps, or
    "plain"."""
    chain = ChainSpeculation() if options.denoise == "speculative" else options.chain
    if chain is None:
        return "plain"
    return dataclasses.replace(chain, window=min(chain.window, steps))


def _check(model: ImageModel, method: Method, options: Options, images: int) -> None:
    """Raises a UserError for what the method cannot do with this model and these
    options."""
    draft = method.draft_model
    noise = method.needs_final_noise
    if draft is not None:
        check_draft(model.config, draft.config)
    if isinstance(model.network, CausalTokenModel):
        if method.name != "plain":
            raise UserError(
                f"the method {method.name} does not go with a causal model, whose"
                " tokens come one by one; use plain, with denoise speculative"
            )
        if options.shortcuts or isinstance(options.order, Spread):
            raise UserError(
                "annealing, the checkerboard and the order spread are of MAR; this"
                " model is causal"
            )
    if noise is not None and options.final_noise is not noise:
        told = "needs" if noise else "cannot have"
        raise UserError(
            f"the criterion {method.criterion_name} {told} noise in the last denoising"
            f" step; set final_noise (--final-noise) {'on' if noise else 'off'}"
        )
    if noise is False and options.denoise != "plain":
        raise UserError("the released runner denoises step by step; use denoise plain")
    if options.shortcuts and (
        method.name != "plain" or (options.anneal and options.denoise != "plain")
    ):
        raise UserError(
            "annealing and the checkerboard are shortcuts of the plain sampler, and"
            " annealing denoises step by step; leave them out"
        )
    if np.ndim(options.cfg) and np.shape(options.cfg) != (images,):
        raise UserError(
            f"cfg has {np.size(options.cfg)} numbers for {images} images; give one, or"
            " one each"
        )


def generate(
    key: Array,
    model: ImageModel,
    labels: Labels | None = None,
    method: Method = Plain(),
    options: Options = Options(),
    *,
    prompts: Sequence[str] | None = None,
    rows: int | None = None,
    progress: bool = False,
) -> Generated:
    """Generates one image per label, or prompt: tokens [N, L, d] by position, and what
    happened.

    Compiled once per number of images and static options; other values of cfg (but 1,
    which switches guidance off) and temperature compile nothing new.

    key: one key (image i uses the i-th of `row_keys(key, N)`), or one key per image,
        [N].
    labels: class numbers, [N]; -1 is "no class".
    method: Plain(), SelfSpeculation(), DraftSpeculation(draft) or
        Released(draft).
    options: how, whatever the method; `cfg` may be one number for each image.
    prompts: texts in place of labels, for a model that makes images from text and has
        its tokenizer beside it.
    rows: images side by side (all); the last batch is filled up by its last image.
    progress: show a bar, for which a batch runs in some jitted calls in place of one.
    """
    if prompts is not None:
        model = ask(model, prompts)
        labels = range(len(prompts))
    found = as_labels(model, labels)
    settled = resolve(model, method, options, len(found))
    return run(
        keys_per_row(key, len(found)), model, found, method, settled, rows, progress
    )


def run(
    keys: Array,
    model: ImageModel,
    labels: np.ndarray,
    method: Method,
    options: Options,
    rows: int | None = None,
    progress: bool = False,
) -> Generated:
    """Generates images with these keys and labels [N], whose options are settled,
    `rows` side by side."""
    count = len(labels)
    parts = []
    length = model.network.seq_len
    size = min(rows or count, count)
    title = {"desc": f"{count} images", "unit": "token", "disable": not progress}
    with Bar(total=-(-count // size) * length, mininterval=0.5, **title) as bar:
        for first in range(0, count, size):
            index = np.minimum(first + np.arange(size), count - 1)
            batch = keys[index], labels[index], of_images(options, index)
            if progress and model.mesh is None:
                parts.append(_watched(bar, model, method, *batch))
            else:
                parts.append(_run(model, method, *batch))
                bar.update(length)
    return parts[0] if len(parts) == 1 else _joined(parts, count)


def as_labels(model: ImageModel, labels: Labels | None) -> np.ndarray:
    """Returns class numbers, int32 [N]; UserError for some that the model does not
    have."""
    if labels is None:
        raise UserError(
            "say what to make: give labels, or prompts where the model takes them"
        )
    found = np.asarray(labels, np.int32)
    classes = model.config.num_classes
    if not classes:
        raise UserError(f"{model.name} makes images from prompts; give prompts")
    if found.ndim != 1 or not found.size:
        raise UserError(
            "labels must be a list of at least one class number, for example [0, 1, 2]"
        )
    if (wrong := found[(found < -1) | (found >= classes)]).size:
        raise UserError(
            f"label {wrong[0]} is out of range: the model has classes 0 to"
            f" {classes - 1} (-1 is no class)"
        )
    return found


def of_images(options: Options, index: np.ndarray) -> Options:
    """Takes of what each image has for itself the images with these numbers."""
    own: dict[str, Any] = {}
    if np.ndim(options.cfg):
        own["cfg"] = jnp.asarray(options.cfg, float)[index]
    if options.known is not None:
        own["known"] = jax.tree.map(lambda a: a[index], options.known)
    return dataclasses.replace(options, **own)


def _run(
    model: ImageModel, method: Method, keys: Array, labels: Any, options: Options
) -> Generated:
    """Makes a batch, on the mesh that its models lie on."""
    draft = method.draft_model
    mesh = common_mesh(model, *([] if draft is None else [draft]))
    if mesh is None:
        return sample(model.network, model.params, keys, labels, options, method)
    by_row: dict[str, Any] = {
        "keys": keys,
        "labels": jnp.asarray(labels),
        "known": options.known,
    }
    by_row["cfg"] = jnp.broadcast_to(jnp.asarray(options.cfg, float), keys.shape)
    none: Any = None
    options = dataclasses.replace(
        options, known=none, cfg=none, temperature=jnp.asarray(options.temperature)
    )
    shared = model.params, None if draft is None else draft.params, options
    by_row, shared = replicate(mesh, (by_row, shared))
    return _on_mesh(by_row, shared, network=model.network, method=method, mesh=mesh)


@functools.partial(outermost_jit, static_argnames=("network", "method", "mesh"))
def _on_mesh(
    by_row: Any, shared: Any, *, network: TokenModel, method: Any, mesh: Mesh
) -> Generated:
    def by_group(by_row: Any, shared: Any) -> Generated:
        params, of_draft, options = shared
        options = dataclasses.replace(options, known=by_row["known"], cfg=by_row["cfg"])
        own = method
        if method.draft_model is not None:
            own = dataclasses.replace(
                method, draft=dataclasses.replace(method.draft, params=of_draft)
            )
        return sample(network, params, by_row["keys"], by_row["labels"], options, own)

    return spread(by_group, mesh, by_row, shared)


def _watched(
    bar: Bar,
    model: ImageModel,
    method: Method,
    keys: Array,
    labels: Any,
    options: Options,
) -> Generated:
    """Makes a batch in pieces, and moves the bar as they come, by the tokens that an
    image knows on average."""
    done = 0
    made = None
    for known, made in method.steps(
        model.network, model.params, keys, jnp.asarray(labels), options, PIECES
    ):
        made.tokens.block_until_ready()
        now = int(np.mean(np.asarray(known)))
        bar.update(now - done)
        done = now
    assert made is not None
    return _told(made, method, options)


def _joined(parts: list[Generated], count: int) -> Generated:
    """Joins batches: what is by image one after the other, and what is counted added
    up."""
    is_calls = lambda node: isinstance(node, Calls)

    def joined(*those: Any) -> Any:
        if is_calls(those[0]):
            return Calls(*(np.sum(numbers) for numbers in zip(*those)))
        return np.concatenate(those)[:count]

    return jax.tree.map(joined, *parts, is_leaf=is_calls)


def stream(
    key: Array,
    model: ImageModel,
    labels: Labels,
    method: Method = Plain(),
    options: Options = Options(),
) -> Iterator[Generated]:
    """Yields (tokens, info) after each step or round; the last one is what `generate`
    returns. Tokens that are not there yet are zero, and info.made counts those that
    are."""
    found = as_labels(model, labels)
    settled = resolve(model, method, options, len(found))
    keys = keys_per_row(key, len(found))
    steps = method.steps(model.network, model.params, keys, jnp.asarray(found), settled)
    length = model.network.seq_len
    for known, made in steps:
        tokens, info = _told(made, method, settled)
        missing = length - jnp.broadcast_to(known, info.made.shape)
        yield Generated(tokens, dataclasses.replace(info, made=info.made - missing))
