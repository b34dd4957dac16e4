"""Records which drafts are accepted in runs of the models that come with the package,
and replays them in programs whose weights are random.

    # Records the rounds of self-speculation anew. Version 0.6 recorded the rest.
    python benchmarks/accepted.py
"""

from __future__ import annotations

import dataclasses
import itertools
import json
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from toy import Parser, begin, load, say

import cspd_jax
from cspd_jax.coupling.block import VerifiedBlock
from cspd_jax.image.chain import ChainSpeculation
from cspd_jax.image.criterion import PathCriterion
from cspd_jax.image.generation import prepare
from cspd_jax.image.state import State

RECORDED = Path(__file__).parent / "results" / "accepted.json"
PLACES = 96  # places of an image in a table
IMAGES = 16
LATE = 24  # 3/8 of the 64 places of `default`; tokens after this place are timed
way_name = lambda gamma, coupled: "coupled, " * coupled + f"gamma {gamma}"


def recorded() -> dict[str, Any]:
    """Returns the recorded runs, which have these entries:

    chains: by model and window, [T, R] lists. Row t has the number of drafts that a
        head call kept when t + 1 steps were left.
    rounds: by way, a list of images. An image is a list of its rounds, and a round is a
        list with the number of transitions kept of each drafted token.
    text: the share of drafts that the text models of the package accept.
    """
    return json.loads(RECORDED.read_text())


class Run(NamedTuple):
    """The cost of a replayed run.

    rounds: the number of rounds until every image has the wanted tokens.
    tokens: the mean number of tokens that an image has after these rounds.
    calls: the mean number of head calls in a round, by the number of chains that a call
        is compiled for.
    """

    rounds: int
    tokens: float
    calls: dict[int, float]


def record(name: str, gamma: int, coupled: bool, toy: bool) -> list[list[list[int]]]:
    """Makes images. Returns, for each image and each of its rounds, the number of
    transitions kept of each drafted token. Rounds with drafts beyond the end of the
    image are left out."""
    model = load(name, toy)
    method = cspd_jax.SelfSpeculation(gamma, coupled=coupled)
    options = cspd_jax.Options(**model.sampling)
    labels = np.arange(IMAGES) % model.config.num_classes
    batch = prepare(jax.random.key(0), model, labels, method, options)
    begun = method.rounds(batch)
    inputs = begun.inputs
    state = begun.begin()

    @jax.jit
    def run(state):
        drafted, _ = begun.criterion.read(inputs, state)
        partial, stayed, _ = begun.criterion.verify(inputs, state, drafted)
        kept = jnp.maximum(inputs.steps - 1 - partial.left, 0)
        steps = jnp.where(stayed, inputs.steps, kept)
        return steps[..., 0], begun.advance(state)

    seen: list[list[list[int]]] = [[] for _ in range(IMAGES)]
    state = run(state)[1]  # the first round drafts nothing
    while np.any(state.group + gamma <= inputs.groups):
        inside = np.asarray(state.group) + gamma <= inputs.groups
        kept, state = run(state)
        for image in np.flatnonzero(inside):
            seen[image].append(np.asarray(kept[image]).tolist())
    say(f"{way_name(gamma, coupled)}: {sum(map(len, seen))} rounds of {IMAGES} images")
    return seen


def whole(kept: np.ndarray, steps: int) -> np.ndarray:
    """Returns [...], how many of the drafts [..., gamma] are kept whole before the
    first one that is not. For example, kept = [4, 4, 2, 4] with 4 steps gives 2."""
    return np.cumprod(kept == steps, axis=-1).sum(axis=-1)


def table_of(
    images: list[list[list[int]]], batch: int, steps: int, begin: int = 0
) -> np.ndarray:
    """Returns [B, places, gamma], the number of transitions kept of each draft, by the
    place at which a round begins.

    The rounds are taken from the B images with the most typical numbers of rounds. The
    rounds of an image are repeated until they fill all places.

    begin: rounds that began at an earlier place of their image are left out.
    """
    table = np.zeros((batch, PLACES, len(images[0][0])), np.int32)
    late = [rounds_from(begin, image, steps) for image in images]
    first = max(0, (len(images) - batch) // 2)
    typical = sorted(late, key=len)[first : first + batch]
    for of_image, its_rounds in zip(table, itertools.cycle(typical)):
        place = 0
        for kept in itertools.cycle(its_rounds):
            if place >= PLACES:
                break
            of_image[place] = np.minimum(kept, steps)
            place += whole(of_image[place], steps) + 1
    return table


def rounds_from(begin: int, its_rounds: list[list[int]], steps: int) -> list[list[int]]:
    """Returns the rounds of an image that began at the place `begin` or later."""
    place = 1  # the first token of an image is not drafted
    found = []
    for kept in its_rounds:
        if place >= begin:
            found.append(kept)
        place += int(whole(np.minimum(kept, steps), steps)) + 1
    return found


def chains_of(table: Any, rows: int, steps: int, window: int) -> np.ndarray:
    """Returns [T, rows], the drafts that each head call keeps, for `rows` recorded
    chains side by side. Of all groups of this size, the group is chosen whose slowest
    chain takes a typical number of calls."""
    kept = np.minimum(np.asarray(table, np.int32)[-steps:], window - 1)
    kept = np.tile(kept, (1, -(-rows // kept.shape[1])))
    groups = [kept[:, i : i + rows] for i in range(0, kept.shape[1] - rows + 1, rows)]
    slowest = [
        sum(calls_of(group, np.full(rows, len(group)), [rows]).values())
        for group in groups
    ]
    return groups[int(np.argsort(slowest, kind="stable")[len(groups) // 2])]


def calls_of(chains: np.ndarray, left: np.ndarray, sizes: list[int]) -> dict[int, int]:
    """Returns the number of head calls until all chains [T, R] are finished, when the
    chains have `left` [R] steps left. The calls are counted by the number of chains
    that they are compiled for, which is one of `sizes`."""
    calls = dict.fromkeys(sizes, 0)
    while active := np.count_nonzero(left):
        calls[min(size for size in sizes if size >= active)] += 1
        left = np.maximum(
            left - chains[np.maximum(left - 1, 0), np.arange(len(left))] - 1, 0
        )
    return calls


def run_of(
    blocks: np.ndarray, chains: np.ndarray, wanted: int, sizes: list[int], coupled: bool
) -> Run:
    """Returns the cost of rounds until every image has as many tokens as are wanted."""
    (images, places, gamma) = blocks.shape
    steps = len(chains)
    made = np.zeros(images, int)
    calls = dict.fromkeys(sizes, 0)
    image = np.arange(images)
    behind = 1 + gamma
    for number in itertools.count():
        if np.all(made >= wanted):
            return Run(
                number,
                float(made.mean()),
                {size: count / number for size, count in calls.items()},
            )
        kept = blocks[image, np.minimum(made, places - 1)]
        place = whole(kept, steps)[:, None] + np.arange(behind)
        left = np.where(kept == steps, 0, steps - 1 - kept)[
            image[:, None], np.minimum(place, gamma - 1)
        ]
        goes_on = (place < gamma) & (coupled | (np.arange(behind) == 0))
        left = np.where(goes_on, left, steps).reshape(-1)
        for size, count in calls_of(chains, left, sizes).items():
            calls[size] += count
        made += place[:, 0] + 1


def replayed(recorded: jax.Array, own: jax.Array) -> jax.Array:
    """Returns the recorded numbers, which are never negative. The compiler cannot know
    this, so it does not remove what the program finds itself."""
    return jnp.where(recorded < 0, own, recorded)


@dataclasses.dataclass(frozen=True, eq=False)
class ReplayedChains(ChainSpeculation):
    """Speculation along chains that keeps the recorded drafts. The programs still
    compute their own verdicts.

    kept: [T, R] the drafts that each head call keeps, see `chains_of`.
    """

    kept: Any = None

    def verify_steps(self, inputs: Any, draft: Any, *given: Any) -> VerifiedBlock:
        block = super().verify_steps(inputs, draft, *given)
        kept = self.kept[draft.steps[0], inputs.lanes]
        return block._replace(kept=replayed(kept, block.kept))


def replaying(criterion: PathCriterion, kept: jax.Array, first: int) -> PathCriterion:
    """Returns a criterion that keeps the recorded drafts and still computes its own
    verdict.

    kept: [B, places, gamma] the transitions that a round keeps, by the number of tokens
        after `first` at which the round begins.
    """

    class Replaying(type(criterion)):  # type: ignore[misc]
        def verify_blocks(self, state: State, *given: Any) -> VerifiedBlock:
            block = super().verify_blocks(state, *given)
            at = jnp.clip(state.group - first, 0, kept.shape[1] - 1)
            of_round = kept[jnp.arange(len(at)), at]
            of_blocks = jnp.sum(of_round.reshape(len(block.kept), -1), axis=1)
            return block._replace(kept=replayed(of_blocks, block.kept))

    return Replaying()


def make_parser() -> Parser:
    parser = Parser(__doc__, file=Path("accepted.json"))
    parser.add_argument("--file", type=Path, default=RECORDED, help="that is written")
    return parser


def main() -> None:
    args = begin(make_parser())
    found = {
        way_name(gamma, coupled): record("default", gamma, coupled, args.toy)
        for gamma in (2, 4, 8, 16, 24)
        for coupled in (False, True)
    }
    args.file.write_text(json.dumps({**recorded(), "rounds": found}) + "\n")


if __name__ == "__main__":
    main()
