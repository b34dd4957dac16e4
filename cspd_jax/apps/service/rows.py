"""Images as rows of one running batch: each enters and leaves at any round, and one program runs all rounds.

The batch has B rows always. A row without an image is complete from the start, and frozen. An image depends
on its own key, label and scale alone, so it is the image that `cspd_jax.generate` makes of them in a batch
of B, but for the rounding of another program.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from cspd_jax.image.methods import Plain, SelfSpeculation
from cspd_jax.image.plan import make_request
from cspd_jax.image.rounds import PathCriterion, TokenSpeculation, begin, output, run_round
from cspd_jax.image.rounds.drafting import group_request
from cspd_jax.image.rounds.groups import by_image, put
from cspd_jax.image.rounds.paths import draw_paths
from cspd_jax.image.rounds.state import (
    Inputs,
    RoundInfo,
    SpeculationState,
    add_calls,
    backbone_calls,
    round_info,
)
from cspd_jax.keys import row_keys
from cspd_jax.weights.models import ImageModel

Array = jax.Array
Round = Callable[[Inputs, SpeculationState], tuple[SpeculationState, RoundInfo]]


@dataclasses.dataclass(frozen=True)
class ImageRequest:
    """One image.

    label: class number; -1 is "no class".
    seed: the image is that of `generate(jax.random.key(seed), model, [label], ...)`.
    cfg: guidance scale; 1 is none.
    method: "self" or "plain".
    """

    label: int
    seed: int = 0
    cfg: float = 1.0
    method: str = "self"

    @property
    def lane(self) -> str:
        return lane_name(self.method, self.cfg != 1)


def lane_name(method: str, guided: bool) -> str:
    return f"image-{method}{'-guided' if guided else ''}"


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
    keys: Array,
    labels: Array,
    cfg: Array,
    active: Array,
) -> tuple[Inputs, SpeculationState]:
    """Begins anew in `rows` [B]; the other rows go on as if nothing had happened.

    keys, labels, cfg: [B] of the new images, anything in other rows.
    active: [B] whether there is a new image; a row that is replaced by none is empty.
    """
    target = inputs.target
    fresh, nothing = begin(
        target.model, target.params, keys, labels,
        settings=inputs.settings, speculation=inputs.speculation, cfg=cfg, temperature=inputs.temperature,
        active=active,
    )  # fmt: skip
    old, new = target.batch, fresh.target.batch
    halves = jnp.tile(rows, old.reveal.shape[0] // inputs.images)
    batch = old._replace(
        keys=by_image(rows, new.keys, old.keys),
        reveal=by_image(halves, new.reveal, old.reveal),
        class_embedding=by_image(halves, new.class_embedding, old.class_embedding),
        active=by_image(rows, new.active, old.active),
    )
    inputs = dataclasses.replace(
        inputs,
        target=dataclasses.replace(target, batch=batch),
        scale=jnp.where(rows, fresh.scale, inputs.scale),
    )
    return inputs, by_image(rows, nothing, state)


def plain_round(inputs: Inputs, state: SpeculationState) -> tuple[SpeculationState, RoundInfo]:
    """The next group of every image, each at its own place, with nothing drafted."""
    unfinished, here = state.group < inputs.groups, state.group[:, None]
    request = group_request(inputs, inputs.target, state.tokens, here, unfinished)
    paths, calls, chains = draw_paths(inputs, inputs.target, request)
    info = round_info(
        inputs,
        rounds=unfinished.astype(jnp.int32),
        loop_rounds=jnp.int32(1),
        target=add_calls(calls, backbone_calls(inputs, inputs.images)),
        chains=chains,
    )
    tokens = put(inputs, state.tokens, here, paths.states[..., 0, :], request.wanted)
    return state._replace(tokens=tokens, group=state.group + unfinished), info


class ImageRows:
    """The running batch of one method, with guidance or without: a `Lane` of the engine.

    rows: B
    """

    def __init__(self, model: ImageModel, rows: int, method: SelfSpeculation | Plain, guided: bool):
        asked = make_request(
            model, [-1] * rows, method=method, cfg=2.0 if guided else 1.0, final_noise=True
        )  # the scale of guidance is each image's own
        self.rows = rows
        self._model, self._settings = model, asked.settings
        if isinstance(asked.method, SelfSpeculation):
            self._speculation, self._round = asked.method.options, run_round
        else:
            self._speculation, self._round = TokenSpeculation(PathCriterion(), gamma=1), plain_round
        self.reset()

    def reset(self) -> None:
        """Empties all rows; nothing is kept of them."""
        self._rounds, self._truncated = np.zeros(self.rows, int), np.zeros(self.rows, int)
        self._busy: set[int] = set()
        self._inputs: Inputs | None = None
        self._state: Any = None

    def enter(self, requests: Mapping[int, ImageRequest]) -> None:
        """Images into these rows, which must be empty."""
        self._replace(requests, requests)
        for row in requests:
            self._rounds[row] = self._truncated[row] = 0
        self._busy |= set(requests)

    def leave(self, rows: Sequence[int]) -> None:
        """Empties these rows, whatever they have got to."""
        unfinished = self._busy & set(rows)
        if unfinished:
            self._replace(sorted(unfinished), {})
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
        self._replace([0], {})
        _advance(self._inputs, self._state, round=self._round)[1].known.block_until_ready()

    def _replace(self, rows: Any, requests: Mapping[int, ImageRequest]) -> None:
        blank = ImageRequest(-1)
        asked = [requests.get(row, blank) for row in range(self.rows)]
        chosen = np.isin(np.arange(self.rows), list(rows))
        active = np.array([row in requests for row in range(self.rows)])
        if self._inputs is None:
            keys, labels, cfg = _columns([blank] * self.rows)
            self._inputs, self._state = _empty(
                self._model.network, self._model.params, keys, labels, cfg,
                settings=self._settings, speculation=self._speculation,
            )  # fmt: skip
        self._inputs, self._state = _replace_rows(self._inputs, self._state, chosen, *_columns(asked), active)


def _columns(requests: Sequence[ImageRequest]) -> tuple[Array, np.ndarray, np.ndarray]:
    """keys, labels, cfg: [B]"""
    keys = jnp.stack([jax.random.key(request.seed) for request in requests])
    labels = np.array([request.label for request in requests], np.int32)
    return _image_keys(keys), labels, np.array([request.cfg for request in requests], np.float32)


@jax.jit
def _image_keys(keys: Array) -> Array:
    """Of the first image of each run."""
    return jax.vmap(lambda key: row_keys(key, 1)[0])(keys)


@functools.partial(jax.jit, static_argnames=("network", "settings", "speculation"))
def _empty(network, params, keys, labels, cfg, *, settings, speculation):
    nobody = jnp.zeros(keys.shape, bool)
    return begin(
        network, params, keys, labels, settings=settings, speculation=speculation, cfg=cfg, active=nobody
    )


@functools.partial(jax.jit, static_argnames="round")
def _advance(inputs: Inputs, state: SpeculationState, *, round: Round) -> tuple[SpeculationState, View]:
    state, info = round(inputs, state)
    out = output(inputs, state, info)
    known = inputs.start[state.group]
    reveal = inputs.target.batch.reveal[: inputs.images]
    final = jnp.argsort(reveal, axis=1) < known[:, None]
    complete = state.group >= inputs.groups
    return state, View(known, out.tokens, final, out.tested, out.accepted, complete, info.truncated)


_replace_rows = jax.jit(replace_rows)
