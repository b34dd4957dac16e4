"""The fastest exact method on this machine, by measurement."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax

from cspd_jax.errors import is_out_of_memory
from cspd_jax.image.chain import calibration, choice
from cspd_jax.image.chain.speculation import ChainSpeculation
from cspd_jax.image.comparison import compare
from cspd_jax.image.methods import Plain, SelfSpeculation
from cspd_jax.image.order import reveal_groups
from cspd_jax.image.plan import Plan, Request, chains_per_image, make_request, resolve
from cspd_jax.image.protocol import CausalTokenModel
from cspd_jax.keys import apart
from cspd_jax.weights.models import ImageModel

Array = jax.Array


def fastest(
    key: Array,
    model: ImageModel,
    labels: Sequence[int] | Array,
    *,
    batch: int | None = None,
    denoise: ChainSpeculation | str = "auto",
    num_iter: int | None = None,
    respacing: str | int | None = None,
    cfg: float = 1.0,
    cfg_schedule: str = "linear",
    temperature: float = 1.0,
    final_noise: bool | None = None,
) -> Plan:
    """The fastest exact way to generate these images, `batch` side by side (all): a plan for `run`.

    Tried are the plain sampler and (of models that are not causal) self-speculation, each with and without
    speculation along the denoising chains (or as `denoise` says). Without `final_noise` the two differ in it:
    self-speculation needs noise in the last denoising step, of standard deviation 0.006, which the plain
    sampler leaves out; say final_noise=False to have the plain sampler alone considered, or True to compare
    like with like. The other arguments are those of `generate`.
    """
    options: dict[str, Any] = {
        "num_iter": num_iter,
        "respacing": respacing,
        "cfg": cfg,
        "cfg_schedule": cfg_schedule,
        "temperature": temperature,
        "final_noise": final_noise,
        "denoise": denoise,
    }
    plain = resolve(model, make_request(model, labels, method=Plain(), **options), batch)
    if final_noise is False or isinstance(model.network, CausalTokenModel):
        return plain
    ahead = make_request(model, labels, method=SelfSpeculation(), **options)
    return faster_of(key, plain, ahead)


def faster_of(key: Array, plain: Plan, ahead: Request) -> Plan:
    """The plan of `ahead` (a request for self-speculation) if it is faster than `plain`, else `plain`.

    The chains of `plain` may be speculated too, so both are measured beside the plain sampler step by step.
    What does not fit into memory is not faster.
    """
    if not self_speculation_can_win(plain, ahead):
        return plain
    key = apart(key)  # a way chosen by the numbers that it is then run with would favour some images
    candidate = resolve(plain.model, ahead, plain.batch)
    rival = 1.0 if plain.settings.chain is None else compare(key, one_batch(plain)).faster
    try:
        return candidate if compare(key, one_batch(candidate)).faster > rival else plain
    except RuntimeError as error:
        if not is_out_of_memory(error):
            raise
        return plain


def one_batch(plan: Plan, batch: int | None = None) -> Plan:
    """The same plan for its first `batch` images (as many as are generated side by side)."""
    batch = plan.batch if batch is None else min(batch, len(plan.request.labels))
    request = dataclasses.replace(plan.request, labels=plan.request.labels[:batch])
    return dataclasses.replace(plan, request=request, batch=batch)


def self_speculation_can_win(plain: Plan, ahead: Request) -> bool:
    """Whether rounds of self-speculation could be faster than AR steps if every draft were accepted.

    A round commits gamma + 1 groups at most. If its pass over the denoising chains alone takes longer than
    as many plain passes, it cannot: then the machine is bound by arithmetic.
    """
    model, request, settings = plain.model, plain.request, plain.request.settings
    fitted = calibration.get(model, settings, request.cfg, request.temperature).calibration
    once, in_a_round = (
        choice.measure(
            model, settings, fitted, plain.batch * chains_per_image(model, of), request.cfg,
            request.temperature, ways=("plain",),
        )["plain"]
        for of in (request, ahead)
    )  # fmt: skip
    assert isinstance(ahead.method, SelfSpeculation)
    groups = len(reveal_groups(model.network.seq_len, settings.num_iter))
    rounds = -(-groups // (ahead.method.gamma + 1))
    return in_a_round * rounds < once * groups
