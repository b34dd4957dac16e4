"""The fastest exact method on this machine, by measurement."""

from __future__ import annotations

import dataclasses
import time

import jax

from cspd_jax.errors import UserError, is_out_of_memory
from cspd_jax.image.chain import calibration, choice
from cspd_jax.image.comparison import beside_plain
from cspd_jax.image.given import Labels, outside_jit
from cspd_jax.image.methods import Plain, SelfSpeculation
from cspd_jax.image.options import Options
from cspd_jax.image.plan import Plan, check, resolve, settle
from cspd_jax.image.protocol import CausalTokenModel
from cspd_jax.keys import independent_key
from cspd_jax.weights.models import ImageModel

Array = jax.Array

GAMMAS = (8, 4, 16)  # that are tried, the others if the first is faster than plain
PATIENCE = 45.0  # seconds after which no other gamma is tried
_NOT_ALL = 1.5  # times the rounds if every draft were accepted; 13 / 8 of the embedded model


def fastest(
    key: Array,
    model: ImageModel,
    labels: Labels,
    options: Options = Options(denoise="auto"),
    *,
    batch: int | None = None,
) -> Plan:
    """The fastest exact way to generate these images, `batch` side by side (all): a plan for `image.run`.

    Tried are the plain sampler and (of models that are not causal) self-speculation with some `GAMMAS`, as
    `PATIENCE` allows, each with and without speculation along the denoising chains (or as `options.denoise`
    says), of several windows and drafters. Without `final_noise` the two differ in it: self-speculation needs
    noise in the last denoising step, of standard deviation 0.006, which the plain sampler leaves out; say
    final_noise=False to have the plain sampler alone considered, or True to compare like with like.
    """
    with outside_jit("fastest"):
        if isinstance(key, jax.core.Tracer):
            raise UserError("fastest measures, which it cannot with a traced key; call it outside jit")
        plain = resolve(model, labels, Plain(), options, batch)
        if options.final_noise is False or isinstance(model.network, CausalTokenModel):
            return plain
        return faster_of(key, plain, check(model, labels, SelfSpeculation(), options))


def faster_of(key: Array, plain: Plan, ahead: Plan) -> Plan:
    """The plan `ahead` (of self-speculation, from `plan.check`), settled and with the fastest gamma, if it is
    faster than `plain`, else `plain`.

    The chains of `plain` may be speculated too, so both are measured beside the plain sampler step by step.
    """
    key = independent_key(key)  # a way chosen by the numbers that it is run with would favour some images
    methods = [SelfSpeculation(gamma).fitted(plain.num_steps) for gamma in GAMMAS]
    first, *others = [dataclasses.replace(ahead, method=method) for method in dict.fromkeys(methods)]
    if not self_speculation_can_win(plain, first):
        return plain
    begun = time.monotonic()
    best, most = plain, 1.0 if plain.options.chain is None else _gain(key, plain)
    for one in (first, *others):
        candidate = settle(one, plain.batch)
        gain = _gain(key, candidate)
        if gain > most:
            best, most = candidate, gain
        if best is plain or time.monotonic() - begun > PATIENCE:
            break  # the others would have to be far better than the middle one
    return best


def _gain(key: Array, plan: Plan) -> float:
    """How many times faster than the plain sampler step by step; what does not fit into memory is not."""
    try:
        return beside_plain(key, one_batch(plan)).faster
    except Exception as error:
        if not is_out_of_memory(error):
            raise
        return 0.0


def one_batch(plan: Plan, batch: int | None = None) -> Plan:
    """The same plan for its first `batch` images (as many as are generated side by side)."""
    batch = plan.batch if batch is None else min(batch, len(plan.labels))
    return plan.first(batch)


def self_speculation_can_win(plain: Plan, ahead: Plan) -> bool:
    """Whether rounds of self-speculation could be faster than AR steps.

    A round commits gamma + 1 groups at most, and fewer in the end (`_NOT_ALL`). If its pass over the
    denoising chains alone takes longer than the plain passes that it saves, it cannot: then the machine is
    bound by arithmetic.
    """
    options = dataclasses.replace(plain.options, denoise="plain")
    fitted = calibration.get(plain.model, options).calibration
    once, in_a_round = (
        choice.measure(plain.model, options, fitted, plain.batch * plan.chains_per_image, ways=("plain",))[
            "plain"
        ]
        for plan in (plain, ahead)
    )
    assert isinstance(ahead.method, SelfSpeculation)
    rounds = -(-plain.num_steps // (ahead.method.gamma + 1))
    return _NOT_ALL * in_a_round * rounds < once * plain.num_steps
