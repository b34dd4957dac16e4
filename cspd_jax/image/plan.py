"""What is asked of a generation: options checked against the model, and settled for this machine."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import NamedTuple

import jax
import numpy as np

from cspd_jax.diffusion.schedule import sampling_schedule
from cspd_jax.errors import UserError
from cspd_jax.image import autotune, calibration, chain_speculation, plain
from cspd_jax.image.chain_drafters import Drafter
from cspd_jax.image.plain import PlainSettings
from cspd_jax.image.released import Official
from cspd_jax.image.reveal import reveal_groups
from cspd_jax.image.speculation import Ahead
from cspd_jax.models import ImageModel, check_draft

Array = jax.Array

METHODS = ("plain", "cspd", "self")
CRITERIA = ("path", "paper", "official")
DENOISE = ("plain", "speculative", "auto")
WINDOWS = (16,)
GAMMA, PROPOSALS = 8, 16
_MOST_PROPOSALS = 1024
_ONLY_FOR = {  # options that mean something for some criteria only
    "verify": ("path", "paper"),
    "adapt": ("path", "paper"),
    "sigma": ("paper",),
    "align": ("paper",),
    "inner_temperature": ("paper", "official"),
    "proposals": ("path",),
}


class Request(NamedTuple):
    """A checked request. labels: int [N]. denoise: "plain", "speculative", or "auto" until `settle`d.

    drafter: for speculation along the chains, with `gains` saying where it is from. measured: seconds of a
    group of chains by way, when the choice was measured. criterion: None for the method "plain". ahead: the
    options of speculation over AR steps; draft: the smaller model of "cspd", with a drafter of its own.
    """

    labels: np.ndarray
    settings: PlainSettings
    cfg: float
    temperature: float
    denoise: str = "plain"
    drafter: Drafter | None = None
    gains: str | None = None
    measured: dict[str, float] | None = None
    method: str = "plain"
    criterion: str | None = None
    ahead: Ahead | Official | None = None
    draft: ImageModel | None = None
    draft_drafter: Drafter | None = None

    @property
    def common(self) -> dict:
        return {"settings": self.settings, "cfg": self.cfg, "temperature": self.temperature}


def make_request(
    model: ImageModel,
    labels: Sequence[int] | Array,
    *,
    num_iter: int | None = None,
    steps: str | int | None = None,
    cfg: float = 1.0,
    cfg_schedule: str = "linear",
    temperature: float = 1.0,
    final_noise: bool | None = None,
    denoise: str = "plain",
    windows: Sequence[int] | None = None,
    drafter: Drafter | None = None,
    method: str = "plain",
    draft: ImageModel | None = None,
    criterion: str | None = None,
    gamma: int | None = None,
    prefill: float | None = None,
    **more,
) -> Request:
    """The options of `generate`, checked against the model; UserError for what no generation can have."""
    labels = np.asarray(labels)
    if labels.ndim != 1 or not labels.size or not np.issubdtype(labels.dtype, np.integer):
        raise UserError("labels must be a list of at least one class number, for example [0, 1, 2]")
    for name, value in (("cfg", cfg), ("temperature", temperature)):
        if not math.isfinite(value):
            raise UserError(f"{name} is {value}; it must be a finite number")
    for name, value in (("num_iter", num_iter), ("gamma", gamma), ("proposals", more.get("proposals"))):
        _check_whole(name, value)
    criterion, ahead = _ahead(method, criterion, gamma, prefill, more)
    _check_draft(model, method, draft, steps)
    length = model.model.seq_len
    num_iter = length if num_iter is None else num_iter
    if isinstance(ahead, Ahead):  # more groups than that there are not; the first is not drafted by itself
        most = len(reveal_groups(length, num_iter)) - (method == "self")
        ahead = dataclasses.replace(ahead, gamma=min(ahead.gamma, max(1, most)))
    respacing = model.config.respacing if steps is None else str(steps)
    settings = PlainSettings(
        num_iter=num_iter,
        respacing=respacing,
        guided=cfg != 1,
        cfg_schedule=cfg_schedule,
        final_noise=_final_noise(criterion, final_noise, denoise),
        encoder_sizes=1 if length <= 64 else 4,  # each size is compiled: not worth it for short sequences
        speculation=_along_chains(denoise, windows, drafter, respacing),
    )
    plain.check_request(model.model, labels, model.config.num_classes, settings, cfg, temperature)
    return Request(
        labels=labels.astype(np.int32),
        settings=settings,
        cfg=float(cfg),
        temperature=float(temperature),
        denoise=denoise,
        drafter=drafter,
        gains=None if drafter is None else "given",
        method=method,
        criterion=criterion,
        ahead=ahead,
        draft=draft,
    )


def _check_whole(name: str, value) -> None:
    if value is not None and not isinstance(value, (int, np.integer)):
        raise UserError(f"{name} is {value!r}; it must be a whole number")


def _final_noise(criterion: str | None, asked: bool | None, denoise: str) -> bool:
    needed = criterion in ("path", "paper")
    if needed and asked is False:
        raise UserError(
            f"the criterion {criterion} needs noise in the last denoising step; leave final_noise out, or set"
            " it to on"
        )
    if criterion == "official" and (asked or denoise != "plain"):
        raise UserError(
            "the criterion official has denoise plain and no noise in the last step (final_noise off)"
        )
    return needed if asked is None else asked


def _along_chains(
    denoise: str, windows: Sequence[int] | None, drafter: Drafter | None, respacing: str
) -> chain_speculation.Speculation | None:
    """Speculation along the denoising chains; None also where `settle` is to decide."""
    if denoise not in DENOISE:
        raise UserError(f"denoise {denoise!r} is unknown; it is {', '.join(DENOISE)}")
    for window in windows or ():
        _check_whole("a window", window)
    if windows is not None and (denoise != "speculative" or not windows or min(windows) < 1):
        raise UserError("windows are whole numbers from 1, and go with denoise speculative only")
    if drafter is not None and denoise != "speculative":
        raise UserError(f"a drafter goes with denoise speculative, not with denoise {denoise}")
    if denoise != "speculative":
        return None
    T = sampling_schedule(respacing).num_steps  # longer windows, or more of them, there cannot be
    return chain_speculation.Speculation(tuple(min(window, T) for window in (windows or WINDOWS)[:T]))


def _ahead(
    method: str, criterion: str | None, gamma: int | None, prefill: float | None, more: dict
) -> tuple[str | None, Ahead | Official | None]:
    """The criterion, and the options of speculation over AR steps."""
    if method not in METHODS:
        raise UserError(f"method {method!r} is unknown; it is {', '.join(METHODS)}")
    given = {name: value for name, value in more.items() if value is not None}
    unknown = sorted(given.keys() - _ONLY_FOR.keys())
    if unknown:
        raise TypeError(f"generate has no option {unknown[0]!r}")
    if method == "plain":
        named = {"criterion": criterion, "gamma": gamma, "prefill": prefill, **given}
        wrong = [name for name, value in named.items() if value is not None]
        if wrong:
            raise UserError(
                f"{wrong[0].replace('_', '-')} goes with the methods cspd and self, not with plain"
            )
        return None, None
    criterion = criterion or "path"
    if criterion not in CRITERIA:
        raise UserError(f"criterion {criterion!r} is unknown; it is {', '.join(CRITERIA)}")
    if method == "self" and criterion != "path":
        raise UserError(f"the criterion {criterion} needs a draft model: method cspd; self has path only")
    for name in given:
        if criterion not in _ONLY_FOR[name]:
            listed = " and ".join(_ONLY_FOR[name])
            raise UserError(f"{name.replace('_', '-')} goes with the criteria {listed}, not with {criterion}")
    gamma = GAMMA if gamma is None else gamma
    if gamma < 1:
        raise UserError(f"gamma is {gamma}; at least 1 group must be drafted ahead")
    if prefill is not None and not 0 <= prefill <= 1:
        raise UserError(f"prefill is {prefill}; it is a share of the AR steps, from 0 to 1")
    if given.get("proposals", 0) > _MOST_PROPOSALS:
        raise UserError(f"proposals is {given['proposals']}; it must be at most {_MOST_PROPOSALS}")
    for name, least in (("inner_temperature", 0.0), ("adapt", 0.0), ("proposals", 0)):
        if name in given and not (math.isfinite(given[name]) and given[name] > least):
            raise UserError(f"{name.replace('_', '-')} is {given[name]}; it must be above {least:g}")
    if criterion == "official":
        share = {} if prefill is None else {"prefill": prefill}
        return criterion, Official(gamma=gamma, **share, **given)
    verify = given.pop("verify", "each")
    if verify not in ("each", "joint"):
        raise UserError(f"verify {verify!r} is unknown; it is each or joint")
    given.setdefault("proposals", PROPOSALS)
    return criterion, Ahead(
        gamma=gamma, prefill=prefill or 0.0, criterion=criterion, joint=verify == "joint", **given
    )


def _check_draft(model: ImageModel, method: str, draft: ImageModel | None, steps) -> None:
    if (method == "cspd") != (draft is not None):
        if draft is None:
            raise UserError("the method cspd needs a draft: a smaller model of the same tokens")
        raise UserError(f"the method {method} uses no draft; leave it out, or take method cspd")
    if draft is not None:
        check_draft(model.config, draft.config)
        if steps is None and draft.config.respacing != model.config.respacing:
            raise UserError(
                f"the draft denoises by {draft.config.respacing}, the target by {model.config.respacing}; set"
                " steps, for both"
            )


def settle(model: ImageModel, request: Request, batch: int) -> Request:
    """Finds (or makes, once) what speculation needs: its drafter and, with "auto", whether it is worth it."""
    if request.denoise == "plain":
        return request
    settings, cfg, temperature = request.settings, request.cfg, request.temperature
    if request.gains is None:
        found = calibration.get(model, settings, cfg, temperature)
        request = request._replace(drafter=found.calibration.drafter, gains=found.source)
        if request.denoise == "auto":
            rows = batch * chains_per_image(model, request)
            chosen = autotune.choose(model, settings, found.calibration, rows, cfg, temperature)
            settings = dataclasses.replace(settings, speculation=chosen.speculation)
            request = request._replace(settings=settings, measured=chosen.seconds)
            if chosen.speculation is None:
                return request._replace(drafter=None, gains=None)
    if request.draft is not None and request.draft_drafter is None:
        of_draft = calibration.get(request.draft, settings, cfg, temperature)
        request = request._replace(draft_drafter=of_draft.calibration.drafter)
    return request


def chains_per_image(model: ImageModel, request: Request) -> int:
    """Denoising chains of the target that run side by side for an image."""
    widest = max(group.size for group in reveal_groups(model.model.seq_len, request.settings.num_iter))
    ahead = request.ahead
    if not isinstance(ahead, Ahead):
        return widest
    if ahead.criterion == "paper":
        return widest * (ahead.gamma + 1)
    return widest * (ahead.proposals + (ahead.gamma if request.method == "self" else 0))
