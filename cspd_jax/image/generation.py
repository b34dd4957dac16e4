"""Images from a model, in one call: fit for a notebook cell, and what the command line is made of."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import jax
import jax.numpy as jnp
import numpy as np

from cspd_jax._utils.progress import Bar
from cspd_jax._utils.typed import check_flag
from cspd_jax.errors import UserError, check_whole, shown
from cspd_jax.image import sharded
from cspd_jax.image.bound import Batch
from cspd_jax.image.counts import BatchOutput
from cspd_jax.image.given import Labels, outside_jit
from cspd_jax.image.info import Info, summarise
from cspd_jax.image.methods import Method, Plain
from cspd_jax.image.options import Options
from cspd_jax.image.plan import Plan, resolve
from cspd_jax.image.prompts import ask
from cspd_jax.keys import keys_per_row, row_keys
from cspd_jax.weights.checks import blaming_parameters
from cspd_jax.weights.models import ImageModel

Array = jax.Array

PIECES = 8  # of a batch that somebody watches


def generate(
    key: Array,
    model: ImageModel,
    labels: Labels | None = None,
    method: Method = Plain(),
    options: Options = Options(),
    *,
    prompts: Sequence[str] | None = None,
    progress: bool = False,
) -> tuple[Array, Info]:
    """Generates one image per label, or prompt: tokens [N, L, d] by position, and what happened.

    Compiled once per number of images and static options; other values of cfg (but 1, which switches guidance
    off) and temperature compile nothing new.

    key: one key (image i uses the i-th of `row_keys(key, N)`), or one key per image, [N].
    labels: class numbers, [N]; -1 is "no class".
    method: Plain(), SelfSpeculation(), DraftSpeculation(draft) or ReleasedRunner(draft).
    options: how, whatever the method; `cfg` may be one number for each image.
    prompts: texts in place of labels, for a model that makes images from text and has its tokenizer beside
        it; `info.plan.model` has them as classes.
    progress: show a bar, for which it runs in some jitted calls in place of one.
    """
    check_flag("progress", progress)
    with outside_jit("generate"), blaming_parameters(model, getattr(method, "draft_model", None)):
        if prompts is not None:
            if labels is not None:
                raise UserError("give labels or prompts, not both")
            model, labels = ask(model, prompts), range(len(prompts))
        if labels is None:
            raise UserError("say what to make: give labels, or prompts where the model takes them")
        plan = resolve(model, labels, method, options)
        shown = progress and not isinstance(key, jax.core.Tracer)
        return _shown(key, plan) if shown else run(key, plan)


def stream(
    key: Array,
    model: ImageModel,
    labels: Labels,
    method: Method = Plain(),
    options: Options = Options(),
) -> Iterator[tuple[float, Array]]:
    """`generate` step by step: yields (number of known tokens per image, on average; tokens [N, L, d], zero
    where unknown)."""
    with blaming_parameters(getattr(method, "draft_model", None)):
        plan = resolve(model, labels, method, options)
    steps = plan.method.steps(plan.batch_of(keys_per_row(key, len(plan.labels)), plan.labels))
    return ((known, out.tokens) for known, out in steps)


def run(key: Array, plan: Plan) -> tuple[Array, Info]:
    """All images of a plan side by side: tokens [N, L, d] by position, and what happened."""
    _check_plan(plan)
    out = _run(plan, plan.batch_of(keys_per_row(key, len(plan.labels)), plan.labels))
    return out.tokens, summarise(plan, [out])


def _shown(key: Array, plan: Plan) -> tuple[Array, Info]:
    """`run`, with a bar."""
    keys = keys_per_row(key, len(plan.labels))
    with Bar(total=plan.num_steps, desc=f"{len(plan.labels)} images", unit="step") as bar:
        out = generate_batch(plan, plan.batch_of(keys, plan.labels), bar.update, PIECES)
    return jnp.asarray(out.tokens), summarise(plan, [out])


def generate_batches(
    key: Array, plan: Plan, on_step: Callable[[int], object] | None = None, pieces: int = 1
) -> tuple[np.ndarray, Info]:
    """Any number of images, `plan.batch` side by side (the last batch is filled up, the surplus dropped).

    Image i depends on `key` and i only. `on_step` and `pieces` as for `generate_batch`. Returns tokens
    [N, L, d] and what happened.
    """
    _check_plan(plan)
    check_whole("pieces", pieces, 1)
    if on_step is not None and not callable(on_step):
        raise UserError(f"on_step is {shown(on_step)}; it must be a function")
    labels, count = plan.labels, len(plan.labels)
    outputs: list[BatchOutput] = []
    for first in range(0, count, plan.batch):
        index = first + np.arange(plan.batch)
        keys = row_keys(key, plan.batch, first)
        there = np.minimum(index, count - 1)
        batch = plan.batch_of(keys, labels[there], index < count, there)
        outputs.append(generate_batch(plan, batch, on_step, pieces))
    tokens = np.concatenate([out.tokens for out in outputs])[:count]
    return tokens, summarise(plan, outputs)


def generate_batch(
    plan: Plan, batch: Batch, on_step: Callable[[int], object] | None = None, pieces: int = 1
) -> BatchOutput:
    """The images of a batch; their tokens in numpy.

    on_step: is told how many AR steps' worth of tokens are new.
    pieces: 1 is one jitted call; for more, one call for about each.
    """
    starts = [group.start for group in plan.options.groups(plan.model.network.seq_len)]
    done = 0
    for known, out in _steps(plan, batch, pieces):
        out.tokens.block_until_ready()
        now = int(np.searchsorted(starts, known))  # AR steps whose tokens are known
        if on_step is not None:
            on_step(now - done)
        done = now
    return out._replace(tokens=np.asarray(out.tokens))


def _check_plan(plan: Plan) -> None:
    if not isinstance(plan, Plan):
        raise UserError(
            f"plan is of type {type(plan).__name__}; it must be a Plan, as cspd_jax.image.resolve makes one"
        )
    plan.check_settled()


def num_steps(plan: Plan) -> int:
    """How many steps `generate_batches` tells of."""
    return -(-len(plan.labels) // plan.batch) * plan.num_steps


def _run(plan: Plan, batch: Batch) -> BatchOutput:
    if plan.model.mesh is None:
        return plan.method.run(batch)
    return sharded.run(plan.method, sharded.mesh_of(plan.method, plan.model), batch)


def _steps(plan: Plan, batch: Batch, pieces: int) -> Iterator[tuple[float, BatchOutput]]:
    """A batch in pieces; on a mesh, where groups of devices go their own ways, in one."""
    if plan.model.mesh is None and pieces > 1:
        return plan.method.steps(batch, pieces)
    return iter([(plan.model.network.seq_len, _run(plan, batch))])
