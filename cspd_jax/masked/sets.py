"""The table of texts that one pass reads. Each text is a set of drafted moves: the
places of these moves are filled, and all others are left as they are.

The logits of a text draft the steps that the rule would take after it, and rank the
tokens of each place by probability. A move is a pair (rank of the step, from 1 on;
number of the token, from 0 on): it fills the place of the step with that token. The
first text of a table has no moves. The walk over the texts is in `speculative`.

The chain of prefixes is the table {}, {(1, 0)}, {(1, 0), (2, 0)}, ...
"""

from __future__ import annotations

import collections
import dataclasses
import functools
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from cspd_jax._utils.files import write_text
from cspd_jax.check import UserError

Move = tuple[int, int]
MoveSet = tuple[Move, ...]  # in the order of the ranks

# One entry for each step of a text but the last: the moves that followed this step,
# named as the logits at this step draft them.
Run = Sequence[Sequence[Move]]

FILE = "moves.json"  # the tables' file in the folder of a model
_REFITS = 4
BEYOND: Move = (-1, -1)  # a move that no table has


@dataclasses.dataclass(frozen=True)
class MoveSets:
    """The table of R texts that a pass reads.

    texts: for each text, its moves by rank. The first text has none. For every other
        text, an earlier text of the table has all of its moves but one.
    """

    texts: tuple[MoveSet, ...]

    def __post_init__(self) -> None:
        known = set(self.texts[:1])
        if known != {()}:
            raise UserError("a table of moves begins with no moves")
        for text in self.texts[1:]:
            ranks = [rank for rank, _ in text]
            if (
                min(ranks) < 1
                or ranks != sorted(set(ranks))
                or text in known
                or not _parents(text) & known
            ):
                raise UserError(
                    f"the text {list(text)} of a table of moves cannot be: its moves"
                    " are (rank, token), from rank 1 on and each rank once, and a text"
                    " before it has all of them but one"
                )
            known.add(text)

    @functools.cached_property
    def ranks(self) -> int:
        """K, the highest rank in the table; at least 1."""
        return max((rank for text in self.texts for rank, _ in text), default=1)

    @functools.cached_property
    def tokens(self) -> int:
        """T, the number of most probable tokens that are tried at a place."""
        return 1 + max((which for text in self.texts for _, which in text), default=0)

    @functools.cached_property
    def sizes(self) -> np.ndarray:
        """[R] the number of moves that each text has."""
        return np.array([len(text) for text in self.texts], np.int32)

    @functools.cached_property
    def members(self) -> np.ndarray:
        """[R, ranks + 1] the number of the token that a text has at the place of each
        rank; -1 where the text leaves that place as it is. No step has rank 0.

        The text {(2, 1)} of a table with ranks = 2 has the row [-1, -1, 1].
        """
        table = np.full((len(self.texts), self.ranks + 1), -1, np.int32)
        for row, text in enumerate(self.texts):
            for rank, which in text:
                table[row, rank] = which
        return table

    def within(self, most: int) -> MoveSets:
        """Returns the table without the texts that have a move of a rank above
        `most`."""
        return MoveSets(
            tuple(text for text in self.texts if all(rank <= most for rank, _ in text))
        )

    def first(self, count: int) -> MoveSets:
        """Returns the table of the first `count` texts. In a fitted table these are the
        texts that help most."""
        return MoveSets(self.texts[:count])


def prefixes(gamma: int) -> MoveSets:
    """Returns the chain of prefixes with up to `gamma` moves.

    `prefixes(2).texts` is ((), ((1, 0),), ((1, 0), (2, 0))).
    """
    return MoveSets(
        tuple(tuple((rank, 0) for rank in range(1, k + 1)) for k in range(gamma + 1))
    )


def fit(runs: Sequence[Run], count: int) -> MoveSets:
    """Fits a table of up to `count` texts to the runs, the most helpful texts first.

    A walk stops when the table lacks the text that it would visit next. Fitting adds
    the text that most walks lack, and repeats this until the table is full.

    The walks themselves depend on the table, because each round begins where the walk
    of the round before it stopped. So several tables are fitted, each to the walks that
    the table before it makes, and the table that needs the fewest rounds is returned.
    """
    sets = _fit([walk for run in runs for walk in run], count)
    rounds, starts = _rounds(sets, runs)
    for _ in range(_REFITS):
        again = _fit(starts, count)
        fewer, starts = _rounds(again, runs)
        if fewer < rounds:
            sets = again
            rounds = fewer
    return sets


def _fit(walks: Sequence[Sequence[Move]], count: int) -> MoveSets:
    """Fits a table of up to `count` texts to walks that all have the same weight."""
    texts: list[MoveSet] = [()]
    known: set[MoveSet] = {()}
    # For each walk: the number of moves made so far, and the text reached by them.
    seen: list[tuple[int, MoveSet]] = [(0, ())] * len(walks)
    while len(texts) < count:
        wanted: collections.Counter[MoveSet] = collections.Counter()
        for i, walk in enumerate(walks):
            seen[i] = done, at = _walked(known, walk, *seen[i])
            if (then := _with(at, walk, done)) is not None:
                wanted[then] += 1
        if not wanted:
            break
        # On a tie, the text that sorts first is added.
        best = min(wanted, key=lambda text: (-wanted[text], text))
        texts.append(best)
        known.add(best)
    return MoveSets(tuple(texts))


def _rounds(sets: MoveSets, runs: Sequence[Run]) -> tuple[int, list[Sequence[Move]]]:
    """Returns the number of rounds that the runs take with a table, and the walks of
    these rounds.

    A round makes the moves of its walk and one more. For example, a run of two
    steps, [[(1, 0), (2, 0)], [(1, 0)]], takes 2 rounds with the table {}, {(1, 0)}: the
    first round makes the move (1, 0) after the certain one, and the second one has only
    the last move left.
    """
    known = set(sets.texts)
    begun = []
    rounds = 0
    for run in runs:
        step = 0
        while step <= len(run):
            rounds += 1
            if step < len(run):
                begun.append(run[step])
                step += _walked(known, run[step], 0, ())[0]
            step += 1
    return rounds, begun


def _walked(
    known: set[MoveSet], walk: Sequence[Move], done: int, at: MoveSet
) -> tuple[int, MoveSet]:
    """Goes on with a walk that made `done` moves and reached the text `at`, through
    known texts as far as possible. Returns the new (done, at)."""
    while (then := _with(at, walk, done)) in known:
        done = done + 1
        at = then
    return done, at


def _with(text: MoveSet, run: Sequence[Move], done: int) -> Any:
    """Returns the text with the next move of a walk, which is move number `done`; None
    if the walk has no such move or no table can have it."""
    if done >= len(run) or run[done] == BEYOND:
        return None
    return tuple(sorted((*text, run[done])))


def _parents(text: MoveSet) -> set[MoveSet]:
    """Returns the sets that lack exactly one move of a text."""
    return {tuple(other for other in text if other != move) for move in text}


def write(path: Path, tables: Mapping[int, MoveSets]) -> None:
    """Writes the tables into a file, each under its number of texts."""
    rows = (
        f'"{size}": {json.dumps(sets.texts)}' for size, sets in sorted(tables.items())
    )
    write_text(path, "{" + ",\n".join(rows) + "}\n")


def read(path: Path) -> dict[int, MoveSets]:
    """Returns the tables in a file, each under its number of texts."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        tables = [
            MoveSets(tuple(tuple(map(tuple, row)) for row in rows))
            for rows in content.values()
        ]
    except (ValueError, TypeError, AttributeError) as error:
        raise UserError(
            f"{path} holds no tables of moves; make it again with cspd-jax calibrate"
            f" ({error})"
        ) from None
    return {len(sets.texts): sets for sets in tables}


def tables_of(model: object) -> dict[int, MoveSets]:
    """Returns the tables in the model's folder. If there are none, returns the tables
    that come with the package."""
    folder = getattr(model, "folder", None)
    beside = None if folder is None else Path(folder) / FILE
    return read(
        beside
        if beside is not None and beside.is_file()
        else Path(__file__).parent / FILE
    )


def chosen(tables: Mapping[int, MoveSets], count: int) -> MoveSets:
    """Returns a table of `count` texts: the first ones of the smallest table that has
    as many. If no table has as many, returns the largest table."""
    larger = [size for size in tables if size >= count]
    return tables[min(larger)].first(count) if larger else tables[max(tables)]
