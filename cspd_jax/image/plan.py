"""What will run (`Plan`): what is asked, checked against the model, and settled for this machine."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from cspd_jax.diffusion.flow import is_flow, of_kind
from cspd_jax.diffusion.schedule import sampling_schedule
from cspd_jax.errors import UserError, check_range, check_whole, shown
from cspd_jax.image import known as knowing
from cspd_jax.image.bound import Batch
from cspd_jax.image.chain import calibration, choice, drafters
from cspd_jax.image.counts import BatchOutput
from cspd_jax.image.exactness import Exactness
from cspd_jax.image.given import (
    Labels,
    check_given,
    check_method,
    checked_active,
    checked_known,
    checked_labels,
    one_scale,
    outside_jit,
)
from cspd_jax.image.known import Known
from cspd_jax.image.lossy.shortcuts import Checkerboard
from cspd_jax.image.methods import Method, Plain
from cspd_jax.image.options import Options
from cspd_jax.image.order import Raster, Spread
from cspd_jax.image.protocol import CausalTokenModel
from cspd_jax.keys import as_typed
from cspd_jax.weights.checks import blaming_parameters, check_floats, check_image_model
from cspd_jax.weights.models import ImageModel

Array = jax.Array


@dataclasses.dataclass(frozen=True, eq=False)
class Plan:
    """What will run: everything is decided, and nothing random is in it.

    model: the target.
    labels: int32 [N] class numbers; -1 is "no class".
    method: how tokens are generated.
    options: without anything that is left open, drafters of denoising chains included.
    batch: images side by side.
    drafter_source: where the chain drafter is from: a file, "calibrated" or "given".
    measured_seconds: of a group of chains by way of denoising, if the choice was measured.
    scales: [N] guidance of each image, where there is not one for all; the options then have their mean.
    """

    model: ImageModel
    labels: np.ndarray
    method: Method
    options: Options
    batch: int
    drafter_source: str | None = None
    measured_seconds: dict[str, float] | None = None
    scales: np.ndarray | None = None

    def __post_init__(self) -> None:
        """UserError for what a plan edited by `dataclasses.replace` cannot have."""
        check_image_model(self.model)
        check_method(self.method)
        check_whole("batch", self.batch, 1)
        object.__setattr__(self, "labels", checked_labels(self.model, self.labels))
        if self.scales is not None and np.shape(self.scales) != self.labels.shape:
            raise UserError(f"scales are {shown(self.scales)}; there must be one for each label")
        options = self.options
        if not isinstance(options, Options) or None in (options.num_iter, options.respacing, options.guided):
            raise UserError(
                f"the options of a plan are {shown(options)}; they must be settled, as cspd_jax.image.resolve"
                " does"
            )
        _final_noise(self.method, options.checked().final_noise, str(options.respacing))
        if isinstance(self.model.network, CausalTokenModel) != isinstance(options.order, Raster):
            raise UserError(f"the options of a plan are not those of {self.model.name}; resolve it anew")
        if options.known is not None:
            found = checked_known(self.model, options.known, len(self.labels))
            object.__setattr__(self, "options", dataclasses.replace(options, known=found))
        if self.scales is not None:
            scales = [Options(cfg=scale).checked().cfg for scale in list(self.scales)]
            if not options.guided and any(scale != 1 for scale in scales):
                raise UserError(f"scales are {shown(self.scales)}, and the plan was made without guidance")
            object.__setattr__(self, "scales", np.asarray(scales, np.float32))

    def check_settled(self) -> None:
        """UserError for a plan that `settle` has not seen."""
        options = self.options
        if options.denoise == "auto" or (options.chain is not None and options.chain_drafter is None):
            raise UserError(
                f"denoise of the plan is {shown(options.denoise)} without a drafter; a plan that can be run"
                " is made by cspd_jax.image.resolve"
            )

    @property
    def num_steps(self) -> int:
        """AR steps of an image that reveal something."""
        return len(self.options.groups(self.model.network.seq_len))

    @property
    def chains_per_image(self) -> int:
        """Denoising chains of the target that run side by side for an image."""
        widest = max(group.size for group in self.options.groups(self.model.network.seq_len))
        return widest * self.method.chains_per_token()

    @property
    def exactness(self) -> Exactness:
        """What comes out if no draw is truncated."""
        return self.method.exactness(self.options)

    def report(self) -> dict[str, Any]:
        """The options as JSON."""
        own: dict[str, Any] = {} if self.scales is None else {"cfg": self.scales.tolist()}
        if self.options.known is not None:
            own["known"] = self.options.known.count.tolist()
        return self.options.report() | own

    def first(self, images: int) -> Plan:
        """The same for its first images, side by side."""
        check_whole("images", images, 1)
        known, scales = self.options.known, self.scales
        if known is not None:
            known = knowing.of_images(known, slice(images))
        options = dataclasses.replace(self.options, known=known)
        return dataclasses.replace(
            self,
            batch=images,
            labels=self.labels[:images],
            options=options,
            scales=None if scales is None else scales[:images],
        )

    def batch_of(
        self,
        keys: Array,
        labels: np.ndarray,
        active: np.ndarray | None = None,
        index: np.ndarray | None = None,
    ) -> Batch:
        """Images with these keys and labels, [B] each.

        active: [B] those that are wanted (all).
        index: [B] which of the plan's images they are, in what each has of its own (the first B).
        """
        wanted = None if active is None else jnp.asarray(active)
        options, index = self.options, np.arange(len(labels)) if index is None else index
        if self.scales is not None:
            options = dataclasses.replace(options, cfg=jnp.asarray(self.scales[index]))
        if options.known is not None:
            options = dataclasses.replace(options, known=knowing.of_images(options.known, index))
        return Batch(self.model.network, self.model.params, keys, jnp.asarray(labels), options, wanted)

    def sample(
        self,
        keys: Array,
        labels: Array,
        *,
        params: Any = None,
        cfg: Array | float | None = None,
        temperature: Array | float | None = None,
        known: Known | None = None,
        active: Array | None = None,
    ) -> BatchOutput:
        """A batch, as a pure function to be used inside `jax.jit`, `vmap` or `scan`.

        keys: [B] one typed key per image.
        labels: [B] class numbers, which may be traced; -1 is "no class".
        params: in place of the model's own.
        cfg: in place of the plan's, [] or [B]; the plan must have been made with a cfg other than 1.
        temperature: in place of the plan's.
        known: in place of the plan's, which must have been made with some; [B, L, d] and [B, L].
        active: [B] images that are wanted (default: all).
        """
        if cfg is not None and not self.options.guided:
            raise UserError("the plan was made without guidance; make it with the cfg that is used most")
        keys = as_typed(keys)
        if not isinstance(labels, jax.core.Tracer):
            labels = jnp.asarray(checked_labels(self.model, labels))
        if keys.ndim != 1 or np.shape(labels) != keys.shape:
            raise UserError(
                f"keys have shape {keys.shape}, labels {np.shape(labels)}; give one of each for every image"
            )
        if not jnp.issubdtype(jnp.asarray(labels).dtype, jnp.integer):
            raise UserError(f"labels are of type {jnp.asarray(labels).dtype}; they must be class numbers")
        check_given("cfg", cfg, ((), keys.shape))
        check_given("temperature", temperature, ((),))
        if temperature is not None and not isinstance(temperature, jax.core.Tracer):
            check_range("temperature", float(np.float32(temperature)), above=0.0)
        if active is not None:
            active = checked_active(active, keys.shape)
        params = self.model.params if params is None else params
        check_floats("the parameters", self.model.config, params)
        known = self._known(known, len(keys))
        given: dict[str, Any] = {"cfg": cfg, "temperature": temperature, "known": known}
        options = dataclasses.replace(self.options, **{n: v for n, v in given.items() if v is not None})
        with blaming_parameters((self.model.network, params)):
            return self.method.run(Batch(self.model.network, params, keys, labels, options, active))

    def _known(self, known: Known | None, images: int) -> Known | None:
        """What so many images begin with: what is given, or else the plan's."""
        if known is None:
            known = self.options.known
            if known is not None and len(known.mask) != images:
                raise UserError(f"the plan has known tokens of {len(known.mask)} images, not of {images}")
            return known
        if self.options.known is None:
            raise UserError("the plan was made without known tokens; make it with some of the same shapes")
        if not isinstance(known, Known):
            raise UserError(f"known is {shown(known)}; it must be a Known(tokens, mask)")
        if not any(isinstance(part, jax.core.Tracer) for part in (known.tokens, known.mask)):
            return checked_known(self.model, known, images)
        network = self.model.network
        if isinstance(network, CausalTokenModel):
            raise UserError("a causal model keeps a prefix, which is not seen of a traced mask; give numbers")
        return knowing.check_traced(known, images, network.seq_len, network.token_dim)


def resolve(
    model: ImageModel,
    labels: Labels,
    method: Method = Plain(),
    options: Options = Options(),
    batch: int | None = None,
) -> Plan:
    """The plan of these images, `batch` of them side by side (default: all)."""
    with outside_jit("resolve"):
        return settle(check(model, labels, method, options), batch)


def check(
    model: ImageModel,
    labels: Labels,
    method: Method = Plain(),
    options: Options = Options(),
) -> Plan:
    """The plan but for what is found or measured on this machine (`settle`); UserError for what no generation
    can have. The model may have no parameters yet."""
    check_image_model(model)
    classes = checked_labels(model, labels)
    options, scales = one_scale(options, len(classes))
    options = options.checked()
    if options.known is not None:
        options = dataclasses.replace(options, known=checked_known(model, options.known, len(classes)))
    check_method(method)
    length = model.network.seq_len
    if isinstance(model.network, CausalTokenModel):
        options = _causal(model, method, options)
    if options.num_iter is None:
        own = options.order.most_steps(length) if isinstance(options.order, Checkerboard) else length
        options = dataclasses.replace(options, num_iter=own)
    options = _with_denoising(model, method, options)
    if isinstance(options.order, Spread):
        options.order.check(length)
    _check_shortcuts(method, options, length)
    groups = options.groups(length)
    method.check(model)
    if method.needs_final_noise is False and options.denoise != "plain":
        raise UserError(
            f"the released runner (criterion {method.criterion_name}) denoises step by step; use"
            f" denoise plain"
        )
    return Plan(model, classes, method.fitted(len(groups)), options, len(classes), scales=scales)


def settle(plan: Plan, batch: int | None = None) -> Plan:
    """Finds, or makes once, what speculation along the chains needs: its drafters and, with "auto", whether
    it is worth it here for `batch` images side by side."""
    if batch is not None:
        check_whole("batch", batch, 1)
    batch = len(plan.labels) if batch is None else min(batch, len(plan.labels))
    plan = dataclasses.replace(plan, batch=batch)
    options, model = plan.options, plan.model
    if options.denoise == "plain":
        return plan
    source, seconds = "given", None
    if options.chain_drafter is None:
        fitted, source = calibration.get(model, options)
        if options.denoise == "auto":
            chosen = choice.choose(model, options, fitted, batch * plan.chains_per_image)
            seconds = chosen.seconds
            options = dataclasses.replace(options, denoise=chosen.speculation or "plain")
        if options.chain is None:
            return dataclasses.replace(plan, options=options, measured_seconds=seconds)
        options = dataclasses.replace(options, chain_drafter=fitted.drafter)
    draft = plan.method.draft_model
    if draft is not None and options.draft_drafter is None:
        of_draft = calibration.get(draft, options).calibration.drafter
        options = dataclasses.replace(options, draft_drafter=of_draft)
    return dataclasses.replace(plan, options=options, drafter_source=source, measured_seconds=seconds)


def _causal(model: ImageModel, method: Method, options: Options) -> Options:
    """The options for a causal model; UserError for what it cannot do."""
    length = model.network.seq_len
    if method.name != "plain":
        raise UserError(
            f"the method {method.name} does not go with a causal model, whose tokens come one by one; use"
            " plain, with denoise speculative"
        )
    if options.shortcuts:
        raise UserError("annealing and the checkerboard are shortcuts of MAR models; this model is causal")
    if isinstance(options.order, Spread):
        raise UserError("the order spread is one of MAR models; a causal model's tokens come row by row")
    if options.num_iter not in (None, length):
        raise UserError(
            f"num_iter is {options.num_iter}; a causal model makes its {length} tokens one by one, so leave"
            " it out"
        )
    linear = options.cfg_schedule == "linear"
    schedule = model.network.linear_guidance if linear else options.cfg_schedule
    return dataclasses.replace(options, order=Raster(), num_iter=length, cfg_schedule=schedule)


def _with_denoising(model: ImageModel, method: Method, options: Options) -> Options:
    """The options with everything said about the denoising steps, guidance and what is compiled."""
    draft, own = method.draft_model, model.config.respacing
    if draft is not None and options.respacing is None and draft.config.respacing != own:
        raise UserError(
            f"the draft denoises by {draft.config.respacing}, the target by {own}; set the respacing"
            " (--steps), for both"
        )
    respacing = own if options.respacing is None else of_kind(str(options.respacing), own)
    steps, denoise, chain = sampling_schedule(respacing).num_steps, options.denoise, options.chain
    if chain is not None:
        lengths = tuple(min(length, steps) for length in chain.draft_lengths[:steps])
        denoise = dataclasses.replace(chain, draft_lengths=lengths)
        if options.chain_drafter is not None and hasattr(model.config, "token_dim"):
            drafters.check_size(options.chain_drafter, model.config.token_dim)
    elif options.chain_drafter is not None:
        raise UserError(f"a chain_drafter goes with denoise speculative, not with denoise {denoise}")
    # Each prefix is compiled: not worth it for short sequences, or where a cache is read whole.
    few = model.network.seq_len <= 64 or isinstance(model.network, CausalTokenModel)
    return dataclasses.replace(
        options,
        respacing=respacing,
        denoise=denoise,
        final_noise=_final_noise(method, options.final_noise, respacing),
        # A group that is known in part may know more than the encoder's prefix has.
        prefix_buckets=1 if options.known is not None else options.prefix_buckets or (1 if few else 4),
        guided=bool(options.cfg != 1) if options.guided is None else options.guided,
    )


def _check_shortcuts(method: Method, options: Options, length: int) -> None:
    """UserError for lossy shortcuts that cannot be had, or not with this method."""
    if options.shortcuts and method.name != "plain":
        raise UserError(
            "annealing and the checkerboard are shortcuts of the plain sampler; they do not go with the"
            f" method {method.name}"
        )
    if isinstance(options.order, Checkerboard):
        options.order.check(length, options.num_iter or length)
    if options.anneal is not None:
        options.anneal.check()
        if options.denoise != "plain":
            raise UserError(
                "annealing changes the number of denoising steps, and speculation along them needs one;"
                " use denoise plain"
            )
        options.respacings(length)


def _final_noise(method: Method, asked: bool | None, respacing: str) -> bool:
    needed = method.needs_final_noise
    if is_flow(respacing):  # its last step has none, whatever the method
        if asked:
            raise UserError("the last step of a flow sampler has no noise; leave final_noise out")
        return False
    if needed is None or asked is None or asked == needed:
        return bool(asked if needed is None else needed)
    if needed:
        raise UserError(
            f"the criterion {method.criterion_name} needs noise in the last denoising step; leave final_noise"
            " out, or switch it on"
        )
    raise UserError(
        f"the released runner (criterion {method.criterion_name}) cannot have noise in the last"
        f" denoising step;"
        " leave final_noise out, or switch it off"
    )
