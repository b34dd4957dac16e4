"""What is asked of a generation (`Request`, checked), and what will run (`Plan`, resolved)."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

from cspd_jax.diffusion.flow import is_flow, of_kind
from cspd_jax.diffusion.schedule import sampling_schedule
from cspd_jax.errors import UserError, check_whole
from cspd_jax.image.chain import calibration, choice
from cspd_jax.image.chain.drafters import ChainDrafter
from cspd_jax.image.chain.speculation import ChainSpeculation
from cspd_jax.image.info import BatchOutput
from cspd_jax.image.lossy.shortcuts import Annealing, Checkerboard
from cspd_jax.image.methods import Method, Plain
from cspd_jax.image.order import Raster, guidance_scale
from cspd_jax.image.protocol import CausalTokenModel
from cspd_jax.image.sampler import SamplerSettings
from cspd_jax.weights.models import ImageModel, check_image_model

Array = jax.Array

DENOISE = ("plain", "speculative", "auto")


@dataclasses.dataclass(frozen=True, eq=False)
class Request:
    """What was asked for, checked against the model.

    labels: int32 [N] class numbers; -1 is "no class".
    method: how tokens are generated.
    settings: of the sampler; `settings.chain` is still None where denoise is "auto".
    cfg: guidance scale.
    temperature: factor of the standard deviation of every denoising step.
    denoise: "plain", "speculative" or "auto".
    chain_drafter: given by the caller, in place of the calibrated one.
    """

    labels: np.ndarray
    method: Method
    settings: SamplerSettings
    cfg: float
    temperature: float
    denoise: str = "plain"
    chain_drafter: ChainDrafter | None = None


@dataclasses.dataclass(frozen=True, eq=False)
class Plan:
    """What will run: everything is decided, and nothing random is in it.

    model: the target.
    request: what was asked for.
    settings: of the sampler.
    batch: images side by side.
    drafter: of the target's denoising chains; None without speculation along them.
    drafter_source: where it is from: a file, "calibrated" or "given".
    draft_drafter: of the draft model's chains.
    measured_seconds: of a group of chains by way of denoising, if the choice was measured.
    cfg: in place of the request's; may be traced.
    temperature: in place of the request's; may be traced.
    """

    model: ImageModel
    request: Request
    settings: SamplerSettings
    batch: int
    drafter: ChainDrafter | None = None
    drafter_source: str | None = None
    draft_drafter: ChainDrafter | None = None
    measured_seconds: dict[str, float] | None = None
    cfg: Array | float | None = None
    temperature: Array | float | None = None

    @property
    def method(self) -> Method:
        return self.request.method

    @property
    def common(self) -> dict[str, Any]:
        """Arguments that every sampler takes."""
        return {
            "settings": self.settings,
            "cfg": self.request.cfg if self.cfg is None else self.cfg,
            "temperature": self.request.temperature if self.temperature is None else self.temperature,
        }

    @property
    def num_steps(self) -> int:
        """AR steps of an image that reveal something."""
        return len(self.settings.groups(self.model.network.seq_len))

    def sample(
        self,
        keys: Array,
        labels: Array,
        *,
        params: Any = None,
        cfg: Array | float | None = None,
        temperature: Array | float | None = None,
        active: Array | None = None,
    ) -> BatchOutput:
        """A batch, as a pure function to be used inside `jax.jit`, `vmap` or `scan`.

        keys: [B] one typed key per image.
        labels: [B] class numbers, which may be traced; -1 is "no class".
        params: in place of the model's own.
        cfg: in place of the plan's, [] or [B]; the plan must have been made with a cfg other than 1.
        temperature: in place of the plan's.
        active: [B] images that are wanted (default: all).
        """
        if cfg is not None and not self.settings.guided:
            raise UserError("the plan was made without guidance; make it with the cfg that is used most")
        model = self.model if params is None else dataclasses.replace(self.model, params=params)
        plan = dataclasses.replace(self, model=model, cfg=cfg, temperature=temperature)
        return self.method.run(plan, keys, labels, active)


def make_request(
    model: ImageModel,
    labels: Sequence[int] | Array,
    *,
    method: Method = Plain(),
    denoise: ChainSpeculation | str = "plain",
    num_iter: int | None = None,
    respacing: str | int | None = None,
    cfg: float = 1.0,
    cfg_schedule: str = "linear",
    temperature: float = 1.0,
    final_noise: bool | None = None,
    chain_drafter: ChainDrafter | None = None,
    anneal: Annealing | None = None,
    reveal: Checkerboard | None = None,
) -> Request:
    """The arguments of `generate`, checked against the model; UserError for what no generation can have."""
    check_image_model(model)
    _check_kinds(anneal, reveal)
    classes = _checked_labels(model, labels)
    _check_method(method)
    cfg, temperature = _number("cfg", cfg), _number("temperature", temperature)
    if cfg < 0:
        raise UserError(f"cfg is {cfg}; guidance must be 0 or more (1 switches it off)")
    if temperature <= 0:
        raise UserError(f"temperature is {temperature}; it must be above 0")
    length = model.network.seq_len
    order: Checkerboard | Raster | None = reveal
    causal = isinstance(model.network, CausalTokenModel)
    if causal:
        _check_causal(length, method, num_iter, anneal, reveal)
        order, num_iter = Raster(), length
    if num_iter is None:
        num_iter = length if reveal is None else reveal.most_steps(length)
    check_whole("num_iter", num_iter, -(2**63))
    guidance_scale((), 1.0, cfg_schedule)
    if causal and cfg_schedule == "linear":
        cfg_schedule = model.network.linear_guidance
    draft = method.draft_model
    if draft is not None:
        check_image_model(draft, "draft")
    if draft is not None and respacing is None and draft.config.respacing != model.config.respacing:
        raise UserError(
            f"the draft denoises by {draft.config.respacing}, the target by {model.config.respacing}; set the"
            " respacing (--steps), for both"
        )
    own = model.config.respacing
    respacing = own if respacing is None else of_kind(str(respacing), own)
    steps = sampling_schedule(respacing).num_steps
    settings = SamplerSettings(
        num_iter=num_iter,
        respacing=respacing,
        guided=cfg != 1,
        cfg_schedule=cfg_schedule,
        final_noise=_final_noise(method, final_noise, respacing),
        # Each is compiled: not worth it for short sequences, or where a cache is read whole.
        prefix_buckets=1 if length <= 64 or causal else 4,
        chain=_chain_speculation(denoise, chain_drafter, steps),
        anneal=anneal,
        reveal=order,
    )
    _check_shortcuts(method, settings, length, denoise)
    groups = settings.groups(length)
    method.check(model, settings)
    if method.needs_final_noise is False and denoise != "plain":
        raise UserError(
            f"the released runner (criterion {method.criterion_name}) denoises step by step; use"
            f" denoise plain"
        )
    return Request(
        labels=classes,
        method=method.fitted(len(groups)),
        settings=settings,
        cfg=cfg,
        temperature=temperature,
        denoise=denoise if isinstance(denoise, str) else "speculative",
        chain_drafter=chain_drafter,
    )


def _number(name: str, value: Any) -> float:
    """A number, or an array of one, as a float."""
    if isinstance(value, jax.core.Tracer):
        raise UserError(f"{name} is traced; give it to the `sample` of a plan, which is made outside jit")
    array = np.asarray(value)
    if array.size != 1 or not np.issubdtype(array.dtype, np.number) or not np.isfinite(array).all():
        raise UserError(f"{name} is {value!r:.80}; it must be a finite number")
    return float(array.reshape(()))


def _checked_labels(model: ImageModel, labels) -> np.ndarray:
    labels = np.asarray(labels)
    if labels.ndim != 1 or not labels.size or not np.issubdtype(labels.dtype, np.integer):
        raise UserError("labels must be a list of at least one class number, for example [0, 1, 2]")
    classes = model.config.num_classes
    if not classes:
        raise UserError(f"{model.name} makes images from prompts; bind some (cspd_jax.image.prompts.bind)")
    wrong = labels[(labels < -1) | (labels >= classes)]
    if wrong.size:
        raise UserError(
            f"label {wrong[0]} is out of range: the model has classes 0 to {classes - 1} (-1 is no class)"
        )
    return labels.astype(np.int32)


def _check_method(method: Any) -> None:
    if isinstance(method, type) or not hasattr(method, "summarise"):
        raise UserError(
            f"method is {method!r}; it must be a method object such as Plain(), SelfSpeculation() or"
            " DraftSpeculation(draft)"
        )


def _check_kinds(anneal: Any, reveal: Any) -> None:
    if not isinstance(anneal, Annealing | None):
        raise UserError(f"anneal is {anneal!r:.80}; it must be an Annealing, for example Annealing(50, 5)")
    if not isinstance(reveal, Checkerboard | None):
        raise UserError(f"reveal is {reveal!r:.80}; it must be a Checkerboard, for example Checkerboard(1)")


def _check_shortcuts(method: Method, settings: SamplerSettings, length: int, denoise: Any) -> None:
    """UserError for lossy shortcuts that cannot be had, or not with this method."""
    if settings.shortcuts and method.name != "plain":
        raise UserError(
            "annealing and the checkerboard are shortcuts of the plain sampler; they do not go with the"
            f" method {method.name}"
        )
    if isinstance(settings.reveal, Checkerboard):
        settings.reveal.check(length, settings.num_iter)
    if settings.anneal is not None:
        settings.anneal.check()
        if denoise != "plain":
            raise UserError(
                "annealing changes the number of denoising steps, and speculation along them needs one;"
                " use denoise plain"
            )
        settings.respacings(length)


def _check_causal(length: int, method: Method, num_iter: int | None, anneal: Any, reveal: Any) -> None:
    """UserError for what a causal model cannot do."""
    if method.name != "plain":
        raise UserError(
            f"the method {method.name} does not go with a causal model, whose tokens come one by one; use"
            " plain, with denoise speculative"
        )
    if anneal is not None or reveal is not None:
        raise UserError("annealing and the checkerboard are shortcuts of MAR models; this model is causal")
    if num_iter not in (None, length):
        raise UserError(
            f"num_iter is {num_iter}; a causal model makes its {length} tokens one by one, so leave it out"
        )


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


def _chain_speculation(denoise: Any, drafter: ChainDrafter | None, steps: int) -> ChainSpeculation | None:
    """Speculation along the denoising chains of T steps; None also where `resolve` is to decide."""
    if isinstance(denoise, str) and denoise == "speculative":
        denoise = ChainSpeculation()
    if isinstance(denoise, ChainSpeculation):
        if isinstance(denoise.draft_lengths, int):
            denoise = dataclasses.replace(denoise, draft_lengths=(denoise.draft_lengths,))
        if not denoise.draft_lengths:
            raise UserError("draft_lengths is empty; it must hold at least one number of steps")
        for length in denoise.draft_lengths:
            check_whole("a draft length (window)", length, 1)
        check_whole("proposals", denoise.proposals, 1)
        check_whole("max_trips", denoise.max_trips, 1)
        lengths = tuple(min(length, steps) for length in denoise.draft_lengths[:steps])
        return dataclasses.replace(denoise, draft_lengths=lengths)
    if not (isinstance(denoise, str) and denoise in DENOISE):
        raise UserError(f"denoise {denoise!r} is unknown; it is {', '.join(DENOISE)}, or a ChainSpeculation")
    if drafter is not None:
        raise UserError(f"a chain_drafter goes with denoise speculative, not with denoise {denoise}")
    return None


def resolve(model: ImageModel, request: Request, batch: int | None = None) -> Plan:
    """Finds, or makes once, what speculation along the chains needs: its drafter and, with "auto", whether it
    is worth it here for `batch` images side by side."""
    if batch is not None:
        check_whole("batch", batch, 1)
    batch = len(request.labels) if batch is None else min(batch, len(request.labels))
    plan = Plan(model, request, request.settings, batch)
    if request.denoise == "plain":
        return plan
    settings, cfg, temperature = request.settings, request.cfg, request.temperature
    if request.chain_drafter is not None:
        plan = dataclasses.replace(plan, drafter=request.chain_drafter, drafter_source="given")
    else:
        found = calibration.get(model, settings, cfg, temperature)
        plan = dataclasses.replace(plan, drafter=found.calibration.drafter, drafter_source=found.source)
        if request.denoise == "auto":
            rows = batch * chains_per_image(model, request)
            chosen = choice.choose(model, settings, found.calibration, rows, cfg, temperature)
            if chosen.speculation is None:
                return Plan(model, request, request.settings, batch, measured_seconds=chosen.seconds)
            sped_up = dataclasses.replace(settings, chain=chosen.speculation)
            plan = dataclasses.replace(plan, settings=sped_up, measured_seconds=chosen.seconds)
    draft = request.method.draft_model
    if draft is not None:
        of_draft = calibration.get(draft, settings, cfg, temperature)
        plan = dataclasses.replace(plan, draft_drafter=of_draft.calibration.drafter)
    return plan


def chains_per_image(model: ImageModel, request: Request) -> int:
    """Denoising chains of the target that run side by side for an image."""
    widest = max(group.size for group in request.settings.groups(model.network.seq_len))
    return widest * request.method.chains_per_token()
