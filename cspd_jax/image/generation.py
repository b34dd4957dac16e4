"""The functions that generate images with a model.

`resolve` settles how images are made, and returns a `Recipe`. `prepare` takes keys and
labels as well, and returns a `Batch`: a pytree whose method `generate` can be called
inside your own `jit`, `vmap` and `scan`. The function `generate` does everything in one
call, in batches and on meshes.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from cspd_jax import shell
from cspd_jax._utils.progress import Bar
from cspd_jax.check import UserError, check_draft, check_kind, shown
from cspd_jax.diffusion.flow import is_flow, of_kind
from cspd_jax.diffusion.schedule import sampling_schedule
from cspd_jax.image.calibration import drafter_for
from cspd_jax.image.chain import ChainSpeculation
from cspd_jax.image.chain_drafters import frozen
from cspd_jax.image.known import of_every_image
from cspd_jax.image.lossy import Annealing, Checkerboard
from cspd_jax.image.methods import METHODS, Method, Plain
from cspd_jax.image.options import Options
from cspd_jax.image.order import Order, Random, Raster, Spread, prefix_lengths
from cspd_jax.image.prompts import ask
from cspd_jax.image.protocol import CausalTokenModel
from cspd_jax.image.recipe import Batch, Draft, Recipe
from cspd_jax.info import Calls, Exactness, Generated
from cspd_jax.keys import keys_per_row
from cspd_jax.language_models import concrete
from cspd_jax.models import ImageModel, check_model
from cspd_jax.parallel import common_mesh

Array = jax.Array
Labels = Sequence[int | str] | np.ndarray | jax.Array
# An image of at most this many tokens gets one prefix; more are not worth compiling.
_FEW = 64


def resolve(
    model: ImageModel,
    method: Method = Plain(),
    options: Options = Options(),
    images: int = 1,
) -> Recipe:
    """Returns the recipe for this many images. Raises a UserError if the model, the
    method and the options do not go together.

    The function measures nothing, so the model may have no parameters yet. The recipe's
    drafters of denoising steps are not calibrated; `prepare` calibrates them.
    """
    check_kind("the method is", method, *METHODS)
    check_kind("the options are", options, Options)
    if options.anneal is not None:
        check_kind("anneal is", options.anneal, Annealing)
    if options.order is not None:
        check_kind("order is", options.order, Spread, Checkerboard, Order)
    check_model(model, ImageModel)
    _check(model, method, options, images)
    network = model.network
    length = network.seq_len
    schedule = options.cfg_schedule
    causal = isinstance(network, CausalTokenModel)
    if causal:
        order: Order = Raster()
        schedule = network.linear_guidance if schedule == "linear" else schedule
    else:
        order = options.order or Random()
    num_iter = options.num_iter
    if num_iter is None or causal:
        num_iter = order.most_steps(length)
    groups = order.groups(length, num_iter)
    respacing = model.config.respacing
    if options.respacing is not None:
        respacing = of_kind(str(options.respacing), respacing)
    respacings = [respacing] * len(groups)
    if options.anneal is not None:
        respacings = options.anneal.respacings(respacing, len(groups))
    steps = sampling_schedule(respacing).num_steps
    drafter = frozen(steps, network.token_dim)
    known = options.known
    # The encoder is compiled for each prefix. That is not worth it for short sequences,
    # nor for a causal model, which reads its whole cache. With known tokens there is
    # one prefix: an image may know more tokens than the prefix of a group would hold.
    prefixes = options.prefix_buckets or (1 if length <= _FEW or causal else 4)
    if known is not None:
        known = of_every_image(known, images, length, network.token_dim, causal)
        prefixes = 1
    # A flow adds no noise in the last step.
    final_noise = options.final_noise and not is_flow(respacing)
    return Recipe(
        num_iter=num_iter,
        order=order,
        groups=groups,
        respacing=respacing,
        respacings=tuple(respacings),
        prefixes=tuple(prefix_lengths(length, prefixes)),
        chain=_chain(options, steps),
        guided=bool(np.any(np.asarray(options.cfg) != 1)),
        cfg_schedule=schedule,
        final_noise=final_noise,
        claim=_claim(method, options, final_noise),
        cfg=np.broadcast_to(np.asarray(options.cfg, float), (images,)),
        temperature=options.temperature,
        drafter=drafter,
        known=known,
    )


def _chain(options: Options, steps: int) -> ChainSpeculation | None:
    """Returns the speculation along the chains, with a window of at most `steps`. It is
    None if the chains run step by step."""
    if not options.chains:
        return None
    chain = options.denoise
    if not isinstance(chain, ChainSpeculation):
        chain = ChainSpeculation()
    return dataclasses.replace(chain, window=min(chain.window, steps))


def _claim(method: Method, options: Options, final_noise: bool) -> Exactness:
    """Returns the claim that the method is, or is not, exact with these options. If the
    plain sampler adds noise in the last denoising step, the reason says so."""
    exact, why = method.exactness(options)
    if exact and final_noise:
        why += (
            ", whose last denoising step has noise of standard deviation 0.006"
            " (`final_noise`)"
        )
    return Exactness(exact, why)


def _check(model: ImageModel, method: Method, options: Options, images: int) -> None:
    """Raises a UserError if the method does not work with this model and these
    options."""
    draft = method.draft
    length = model.network.seq_len
    noise = method.needs_final_noise
    criterion = getattr(method, "criterion", None)
    if criterion is not None and not hasattr(criterion, "verify"):
        raise UserError(f"{shown(criterion)} is no criterion; PathCriterion() is one")
    if draft is not None:
        check_model(draft, ImageModel)
        check_draft(model.config, draft.config)
        if len({is_flow(of.config.respacing) for of in (draft, model)}) > 1:
            raise UserError(
                f"the head of either {draft.name} or {model.name} is a flow, and the"
                " other one is not; give a draft of the target's kind"
            )
        alike = draft.config.respacing == model.config.respacing
        if options.respacing is None and not alike:
            raise UserError(
                f"the draft denoises by {draft.config.respacing}, the target by"
                f" {model.config.respacing}; set the respacing, for both"
            )
    if isinstance(model.network, CausalTokenModel):
        if method.name != "plain":
            raise UserError(
                f"the method {method.name} does not go with a causal model, whose"
                " tokens come one by one; use the method plain with denoise speculative"
                " (--method plain --denoise speculative)"
            )
        if (
            options.shortcuts
            or isinstance(options.order, Spread)
            or options.num_iter not in (None, length)
        ):
            raise UserError(
                "annealing, the checkerboard, the order spread and num_iter are of MAR;"
                " this model is causal and makes one token after the other"
            )
    if noise is not None and options.final_noise != noise:
        told = "needs" if noise else "cannot have"
        raise UserError(
            f"the criterion {method.criterion_name} {told} noise in the last denoising"
            f" step; set final_noise (--final-noise) {'on' if noise else 'off'}"
        )
    speculates = options.chains or method.name != "plain"
    if speculates and np.any(concrete(options.temperature) == 0):
        raise UserError(
            "at temperature 0 nothing is drawn that could be drafted; use the method"
            " plain, with denoise plain"
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
    if np.ndim(options.temperature):
        raise UserError("temperature has several numbers; images take one for all")
    if np.ndim(options.cfg) and np.shape(options.cfg) != (images,):
        raise UserError(
            f"cfg has {np.size(options.cfg)} numbers for {images} images; give one, or"
            " one each"
        )


def prepare(
    key: Array,
    model: ImageModel,
    labels: Labels | None,
    method: Method = Plain(),
    options: Options = Options(),
) -> Batch:
    """Checks the arguments of `generate`, settles the options that they leave open, and
    returns the images as a `Batch`. If the options speculate along the denoising
    chains, the drafters of denoising steps are read from a file, or fitted."""
    found = as_labels(model, labels)
    recipe = resolve(model, method, options, len(found))
    draft = method.draft
    alone: Any = method
    small = None
    if draft is not None:
        alone = dataclasses.replace(alone, draft=None)
        small = Draft(draft.network, draft.params)
    if recipe.chain is not None:
        if small is not None:
            fitted = drafter_for(draft, recipe)
            small = dataclasses.replace(small, drafter=fitted)
        recipe = dataclasses.replace(recipe, drafter=drafter_for(model, recipe))
    return Batch(
        network=model.network,
        method=alone,
        params=model.params,
        keys=keys_per_row(key, len(found)),
        labels=jnp.asarray(found),
        recipe=recipe,
        draft=small,
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
    """Generates one image for each label or prompt. Returns the tokens [N, L, d] by
    position, and the record of the generation (`Info`).

    Inside your own jit, use `image.prepare`, whose batch may have traced numbers.

    The program is compiled once for each number of images and each choice of static
    options. Another cfg or temperature compiles nothing new, unless the cfg switches
    guidance on or off (a cfg of 1 is off).

    key: one key, with which image i uses key i of `row_keys(key, N)`; or one key for
        each image, [N].
    model: a loaded `ImageModel`, or your own.
    labels: class numbers or names of classes, [N]; -1 is "no class".
    method: Plain(), SelfSpeculation(), DraftSpeculation(draft) or
        Released(draft).
    options: the options that do not depend on the method. `cfg` may be one number, or
        one number for each image.
    prompts: texts in place of labels. The model must make images from text, and have
        its tokenizer in its folder.
    rows: the number of images that are made side by side (default: all). The last
        image is repeated to fill up the last batch.
    progress: whether a progress bar is shown. If all images are made side by side, the
        bar makes each round a jitted call of its own. On a mesh there is no bar.
    """
    if prompts is not None:
        if labels is not None:
            raise UserError("labels and prompts exclude each other; give one of them")
        model = ask(model, prompts)
        labels = range(len(prompts))
    batch = prepare(key, model, labels, method, options)
    return make(batch, common_mesh(model, method.draft), rows, progress)


def make(
    batch: Batch, mesh: Mesh | None, rows: int | None = None, progress: bool = False
) -> Generated:
    """Makes the images of a batch, `rows` of them side by side.

    mesh: the mesh on which the models lie; None if they are not on a mesh.
    rows: as for `generate`.
    progress: as for `generate`.
    """
    if rows is not None and rows < 1:
        raise UserError(f"rows is {rows}; at least 1 image is made at a time")
    count = len(batch.labels)
    size = min(rows or count, count)
    numbers = [
        np.minimum(first + np.arange(size), count - 1)
        for first in range(0, count, size)
    ]
    bar = Bar(
        total=int(np.sum(batch.missing[np.concatenate(numbers)])),
        desc=f"{count} images",
        unit="token",
        mininterval=0.5,
        disable=not progress or mesh is not None,
    )
    made = shell.generate([batch[some] for some in numbers], mesh, bar)
    return made[0] if len(made) == 1 else _joined(made, count)


def _joined(parts: list[Generated], count: int) -> Generated:
    """Joins the results of several batches. Arrays with an entry for each image are
    concatenated and cut to `count` images; the numbers of calls are added up."""
    is_calls = lambda node: isinstance(node, Calls)

    def joined(*those: Any) -> Any:
        if is_calls(those[0]):
            return Calls(*(np.sum(numbers) for numbers in zip(*those)))
        return np.concatenate(those)[:count]

    return jax.tree.map(joined, *parts, is_leaf=is_calls)


def as_labels(model: ImageModel, labels: Labels | None) -> np.ndarray:
    """Returns the labels, numbers or names of classes, as class numbers, int32 [N].
    Raises a UserError for a class that the model does not have."""
    if labels is None:
        raise UserError(
            "say what to make: give labels, or prompts where the model takes them"
        )
    check_model(model, ImageModel)
    names = model.class_names
    found = np.asarray(labels)
    if found.dtype.kind == "U":
        if unknown := [str(name) for name in found.flat if name not in names]:
            raise UserError(
                f"no class is called {unknown[0]}; the classes are"
                f" {', '.join(names[:12])}"
            )
        found = np.asarray([names.index(name) for name in found.flat])
    classes = model.config.num_classes
    if not classes:
        raise UserError(f"{model.name} makes images from prompts; give prompts")
    if found.ndim != 1 or not found.size or found.dtype.kind not in "iu":
        raise UserError(
            "labels must be a list of class numbers, for example [0, 1, 2], or of"
            f" classes' names{': ' * bool(names)}{', '.join(names[:12])}"
        )
    if (wrong := found[(found < -1) | (found >= classes)]).size:
        raise UserError(
            f"label {wrong[0]} is out of range: the model has classes 0 to"
            f" {classes - 1} (-1 is no class)"
        )
    return found.astype(np.int32)


def stream(
    key: Array,
    model: ImageModel,
    labels: Labels,
    method: Method = Plain(),
    options: Options = Options(),
) -> Iterator[Generated]:
    """Yields (tokens, info) after each AR step or round; `Released` yields once, at the
    end. The last pair is the result of `generate`. Tokens that are not generated yet
    are zero, and info.made counts the tokens that are."""
    return prepare(key, model, labels, method, options).stream()
