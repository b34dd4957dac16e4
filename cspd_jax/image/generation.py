"""Images from a model, in one call: fit for a notebook cell, and what the command line is made of."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import jax
import jax.numpy as jnp
import numpy as np

from cspd_jax.image import sharded
from cspd_jax.image.chain.drafters import ChainDrafter
from cspd_jax.image.chain.speculation import ChainSpeculation
from cspd_jax.image.info import BatchOutput, Info, summarise
from cspd_jax.image.lossy.shortcuts import Annealing, Checkerboard
from cspd_jax.image.methods import Method, Plain
from cspd_jax.image.plan import Plan, make_request, resolve
from cspd_jax.keys import keys_per_row, row_keys
from cspd_jax.weights.models import ImageModel

Array = jax.Array


def generate(
    key: Array,
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
) -> tuple[Array, Info]:
    """Generates one image per label: tokens [N, L, d] by position, and what happened.

    Compiled once per number of images and static options; other values of cfg (but 1, which switches guidance
    off) and temperature compile nothing new.

    key: one key (image i uses the i-th of `row_keys(key, N)`), or one key per image, [N].
    labels: class numbers, [N]; -1 is "no class".
    method: Plain(), SelfSpeculation(), DraftSpeculation(draft) or ReleasedRunner(draft).
    denoise: "plain" runs denoising steps one by one; a ChainSpeculation (or "speculative") drafts and
        verifies them, which has the same distribution in fewer head calls one after the other; "auto" takes
        what a short measurement finds faster here.
    num_iter: AR steps (one per token).
    respacing: which denoising steps are kept, for example "100" or "ddim50"; of a flow head the number of
        noisy steps, for example 50 (the model's own).
    cfg: guidance scale; 1 is none.
    cfg_schedule: "linear" or "constant" along the AR steps.
    temperature: factor of the standard deviation of every denoising step.
    final_noise: noise in the last denoising step too (off, as in MAR, wherever the method can do without).
    chain_drafter: drafts denoising steps, in place of the calibrated one.
    anneal: fewer denoising steps for later tokens, with Plain() only: lossy.
    reveal: a checkerboard that is completed in few AR steps, with Plain() only: lossy.
    """
    request = make_request(
        model, labels, method=method, denoise=denoise, num_iter=num_iter, respacing=respacing, cfg=cfg,
        cfg_schedule=cfg_schedule, temperature=temperature, final_noise=final_noise,
        chain_drafter=chain_drafter, anneal=anneal, reveal=reveal,
    )  # fmt: skip
    return run(key, resolve(model, request))


def stream(
    key: Array,
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
) -> Iterator[tuple[float, Array]]:
    """`generate` step by step: yields (number of known tokens per image, on average; tokens [N, L, d], zero
    where unknown)."""
    request = make_request(
        model, labels, method=method, denoise=denoise, num_iter=num_iter, respacing=respacing, cfg=cfg,
        cfg_schedule=cfg_schedule, temperature=temperature, final_noise=final_noise,
        chain_drafter=chain_drafter, anneal=anneal, reveal=reveal,
    )  # fmt: skip
    plan = resolve(model, request)
    keys = keys_per_row(key, len(request.labels))
    return ((known, out.tokens) for known, out in plan.method.steps(plan, keys, jnp.asarray(request.labels)))


def run(key: Array, plan: Plan) -> tuple[Array, Info]:
    """All images of a plan side by side: tokens [N, L, d] by position, and what happened."""
    labels = plan.request.labels
    out = _run_batch(plan, keys_per_row(key, len(labels)), jnp.asarray(labels))
    return out.tokens, summarise(plan, [out])


def _run_batch(plan: Plan, keys: Array, labels: Array, active: Array | None = None) -> BatchOutput:
    if plan.model.mesh is None:
        return plan.method.run(plan, keys, labels, active)
    return sharded.run(plan, keys, labels, active)


def _steps(plan: Plan, keys: Array, labels: Array, active: Array) -> Iterator[tuple[float, BatchOutput]]:
    """A batch step by step; on a mesh, where groups of devices go their own ways, in one step."""
    if plan.model.mesh is None:
        return plan.method.steps(plan, keys, labels, active)
    return iter([(plan.model.network.seq_len, _run_batch(plan, keys, labels, active))])


def generate_batches(
    key: Array, plan: Plan, on_step: Callable[[int], object] | None = None
) -> tuple[np.ndarray, Info]:
    """Any number of images, `plan.batch` side by side (the last batch is filled up, the surplus dropped).

    Image i depends on `key` and i only. `on_step` is told how many AR steps' worth of tokens are new. Returns
    tokens [N, L, d] and what happened.
    """
    labels, batch = plan.request.labels, plan.batch
    count = len(labels)
    outputs: list[BatchOutput] = []
    for first in range(0, count, batch):
        index = first + np.arange(batch)
        of_batch = labels[np.minimum(index, count - 1)]
        outputs.append(generate_batch(key, plan, first, of_batch, index < count, on_step))
    tokens = np.concatenate([out.tokens for out in outputs])[:count]
    return tokens, summarise(plan, outputs)


def generate_batch(
    key: Array,
    plan: Plan,
    first: int,
    labels: np.ndarray,
    wanted: np.ndarray,
    on_step: Callable[[int], object] | None = None,
) -> BatchOutput:
    """The images first, ..., first + B - 1 of a run with `key`, side by side; their tokens in numpy.

    labels: int32 [B].
    wanted: bool [B] images that are wanted; the others are surplus.
    on_step: is told how many AR steps' worth of tokens are new.
    """
    starts = [g.start for g in plan.settings.groups(plan.model.network.seq_len)]
    keys, done = row_keys(key, len(labels), first), 0
    for known, out in _steps(plan, keys, jnp.asarray(labels), jnp.asarray(wanted)):
        out.tokens.block_until_ready()
        now = int(np.searchsorted(starts, known))  # AR steps whose tokens are known
        if on_step is not None:
            on_step(now - done)
        done = now
    return out._replace(tokens=np.asarray(out.tokens))


def num_steps(plan: Plan) -> int:
    """How many steps `generate_batches` tells of."""
    return -(-len(plan.request.labels) // plan.batch) * plan.num_steps
