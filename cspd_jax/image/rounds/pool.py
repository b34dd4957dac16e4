"""Images as rows of one running batch: each enters and leaves at any round, and one program runs all rounds.

The batch has B rows always. A row without an image is complete from the start, and frozen. An image depends
on its own key, label and scale alone, so it is the image that `image.generate` makes of them in a batch of B,
but for the rounding of another program. Every row may have known tokens; most have none.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from cspd_jax.image import sampler
from cspd_jax.image.known import Known
from cspd_jax.image.options import Options
from cspd_jax.image.protocol import TokenModel
from cspd_jax.image.rounds.groups import by_image
from cspd_jax.image.rounds.loop import begin, final_tokens, output, run_round
from cspd_jax.image.rounds.path_criterion import PathCriterion
from cspd_jax.image.rounds.state import Inputs, RoundInfo, SpeculationState, TokenSpeculation, round_info
from cspd_jax.keys import row_keys, seed_key

Array = jax.Array
Round = Callable[[Inputs, SpeculationState], tuple[SpeculationState, RoundInfo]]


class PoolImage(NamedTuple):
    """An image that enters: the first one of a run with `seed`.

    label: class number; -1 is "no class".
    seed: of its key.
    cfg: guidance scale; 1 is none.
    known: tokens [L, d] that stay, by a mask [L]; None is none.
    """

    label: int
    seed: int = 0
    cfg: float = 1.0
    known: Known | None = None


class Entering(NamedTuple):
    """The same for all rows; anything in rows that nothing enters.

    keys: [B]
    labels: [B]
    cfg: [B]
    known: [B, L, d] and [B, L]
    """

    keys: Array
    labels: Array
    cfg: Array
    known: Known


class ImageProgress(NamedTuple):
    """An image so far, by position.

    known: final tokens.
    tokens: [L, d] zero where unknown.
    final: [L] which are known.
    tested: [L] tokens that were tested drafts.
    accepted: [L] drafts that passed; what was tested and did not pass was drawn anew.
    rounds: that the image took part in.
    truncated: residual draws that were given up in these rounds, by any image of the batch.
    complete: whether the image is finished.
    """

    known: int
    tokens: np.ndarray
    final: np.ndarray
    tested: np.ndarray
    accepted: np.ndarray
    rounds: int
    truncated: int
    complete: bool

    @property
    def drafts(self) -> tuple[int, int]:
        """(tested, accepted)"""
        return int(self.tested.sum()), int(self.accepted.sum())


class View(NamedTuple):
    """What the host reads after a round: as `ImageProgress`, with a leading axis [B].

    truncated: []
    """

    known: Array
    tokens: Array
    final: Array
    tested: Array
    accepted: Array
    complete: Array
    truncated: Array


def replace_rows(
    inputs: Inputs,
    state: SpeculationState,
    rows: Array,
    images: Entering,
    active: Array,
) -> tuple[Inputs, SpeculationState]:
    """Begins anew in `rows` [B]; the other rows go on as if nothing had happened.

    active: [B] whether there is a new image; a row that is replaced by none is empty.
    """
    old, (keys, labels, cfg, known) = inputs.target, images
    options = dataclasses.replace(old.options, cfg=cfg, known=known)
    fresh, nothing = begin(
        old.network, old.params, keys, labels, options, active, speculation=inputs.speculation
    )
    new = fresh.target
    halves = jnp.tile(rows, old.order.shape[0] // inputs.images)
    target = dataclasses.replace(
        old,
        options=dataclasses.replace(old.options, cfg=by_image(rows, cfg, old.options.cfg)),
        keys=by_image(rows, new.keys, old.keys),
        order=by_image(halves, new.order, old.order),
        class_embedding=by_image(halves, new.class_embedding, old.class_embedding),
        active=by_image(rows, new.active, old.active),
        kept=by_image(rows, new.kept, old.kept),
    )
    inputs = dataclasses.replace(inputs, target=target, scale=jnp.where(rows, fresh.scale, inputs.scale))
    return inputs, by_image(rows, nothing, state)


def plain_round(inputs: Inputs, state: SpeculationState) -> tuple[SpeculationState, RoundInfo]:
    """An AR step of the plain sampler, every image at its own place."""
    unfinished, lanes = state.group < inputs.groups, jnp.arange(inputs.images)
    segment = sampler.Segment(inputs.length, inputs.width, str(inputs.options.respacing))
    here = sampler.GroupArrays(
        inputs.start[state.group], inputs.size[state.group], inputs.scale[state.group, lanes]
    )
    plain, _ = sampler.ar_step(inputs.target, segment, sampler.PlainState(state.tokens), here)
    info = round_info(inputs, rounds=unfinished.astype(jnp.int32), loop_rounds=jnp.int32(1))
    return state._replace(tokens=plain.tokens, group=state.group + unfinished), info


class ImagePool:
    """The running batch of one method, with guidance or without.

    rows: B
    """

    def __init__(
        self,
        network: TokenModel,
        params: Any,
        rows: int,
        options: Options,
        speculation: TokenSpeculation | None = None,
    ):
        """options: resolved; the scale of guidance is each image's own. speculation: by the network itself;
        None is the plain sampler."""
        self.rows = rows
        self._model = network, params
        self._options = dataclasses.replace(options, cfg=1.0)
        self._round: Round = run_round if speculation else plain_round
        self._speculation = speculation or TokenSpeculation(PathCriterion(), gamma=1)
        self.reset()

    def reset(self) -> None:
        """Empties all rows; nothing is kept of them."""
        self._rounds, self._truncated = np.zeros(self.rows, int), np.zeros(self.rows, int)
        self._busy: set[int] = set()
        self._inputs: Inputs | None = None
        self._state: Any = None

    def enter(self, images: Mapping[int, PoolImage]) -> None:
        """Images into these rows, which must be empty."""
        self._replace(images.keys(), images)
        for row in images:
            self._rounds[row] = self._truncated[row] = 0
        self._busy |= set(images)

    def leave(self, rows: Sequence[int]) -> None:
        """Empties these rows, whatever they have got to."""
        unfinished = self._busy & set(rows)
        if unfinished:
            self._replace(unfinished, {})
        self._busy -= unfinished

    def advance(self) -> dict[int, ImageProgress]:
        """A round; where the images of the busy rows are after it."""
        self._state, view = _advance(self._inputs, self._state, round=self._round)
        seen = jax.device_get(view)
        busy = sorted(self._busy)
        self._rounds[busy] += 1
        self._truncated[busy] += seen.truncated
        self._busy -= {row for row in busy if seen.complete[row]}
        return {
            row: ImageProgress(
                known=int(seen.known[row]),
                tokens=seen.tokens[row],
                final=seen.final[row],
                tested=seen.tested[row],
                accepted=seen.accepted[row],
                rounds=int(self._rounds[row]),
                truncated=int(self._truncated[row]),
                complete=bool(seen.complete[row]),
            )
            for row in busy
        }

    def warm(self) -> None:
        """Compiles everything, with a round of empty rows."""
        self._replace({0}, {})
        _advance(self._inputs, self._state, round=self._round)[1].known.block_until_ready()

    def _replace(self, rows: Collection[int], images: Mapping[int, PoolImage]) -> None:
        chosen = np.isin(np.arange(self.rows), list(rows))
        active = np.array([row in images for row in range(self.rows)])
        network, params = self._model
        if self._inputs is None:
            keys, labels, cfg, known = self._columns({})
            options = dataclasses.replace(self._options, cfg=cfg, known=known)
            nobody = np.zeros(self.rows, bool)
            self._inputs, self._state = _begin(
                network, params, keys, labels, options, nobody, speculation=self._speculation
            )
        self._inputs, self._state = _replace_rows(
            self._inputs, self._state, chosen, self._columns(images), active
        )

    def _columns(self, images: Mapping[int, PoolImage]) -> Entering:
        network, blank = self._model[0], PoolImage(-1)
        entering = [images.get(row, blank) for row in range(self.rows)]
        mask = np.zeros((self.rows, network.seq_len), bool)
        tokens = np.zeros((*mask.shape, network.token_dim), np.float32)
        for row, image in images.items():
            if image.known is not None:
                tokens[row], mask[row] = image.known.tokens, image.known.mask
        return Entering(
            _image_keys(jnp.stack([seed_key(image.seed) for image in entering])),
            jnp.array([image.label for image in entering], jnp.int32),
            jnp.array([image.cfg for image in entering], jnp.float32),
            Known(tokens, mask),
        )


@jax.jit
def _image_keys(keys: Array) -> Array:
    """Of the first image of each run."""
    return jax.vmap(lambda key: row_keys(key, 1)[0])(keys)


@functools.partial(jax.jit, static_argnames="round")
def _advance(inputs: Inputs, state: SpeculationState, *, round: Round) -> tuple[SpeculationState, View]:
    state, info = round(inputs, state)
    out = output(inputs, state, info)
    known = final_tokens(inputs, state)
    order = inputs.target.order[: inputs.images]
    final = jnp.argsort(order, axis=1) < known[:, None]
    complete = state.group >= inputs.groups
    return state, View(known, out.tokens, final, out.tested, out.accepted, complete, info.truncated)


_begin = jax.jit(begin, static_argnames=("network", "speculation"))
_replace_rows = jax.jit(replace_rows)
