"""Which texts a pass reads: sets of drafted moves, each a text with these places
filled.

The logits of a text rank its open places by the order in which the rule would take
them, and each place's tokens by probability. A drafted move is (rank of the place,
which of its most probable tokens). The first place, rank 0, with its most probable
token is the certain move, which every text has. The rule, asked at one text, names the
next move; if the text with that move too is among those read, it is visited next. So a
walk from the certain move visits the texts of stepwise decoding, for as long as the
table has them.

The chain of prefixes is the table {}, {1}, {1, 2}, ... with the most probable tokens.
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

# Of each step of a text but the last: the moves after it, as drafted there.
Run = Sequence[Sequence[Move]]

FILE = "moves.json"  # beside a model
_REFITS = 4
BEYOND: Move = (-1, -1)  # a move that no table has


@dataclasses.dataclass(frozen=True)
class MoveSets:
    """The texts of a pass.

    texts: the moves of each after the certain one. The first has none, and each other
        one a text before it that lacks one of its moves.
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
        """The highest rank, at least 1."""
        return max((rank for text in self.texts for rank, _ in text), default=1)

    @functools.cached_property
    def tokens(self) -> int:
        """How many of a place's most probable tokens are tried."""
        return 1 + max((which for text in self.texts for _, which in text), default=0)

    @functools.cached_property
    def sizes(self) -> np.ndarray:
        """[R] moves after the certain one."""
        return np.array([len(text) for text in self.texts], np.int32)

    @functools.cached_property
    def members(self) -> np.ndarray:
        """[R, ranks + 1] which token of each rank's place a text has; -1 where it
        leaves the place open."""
        table = np.full((len(self.texts), self.ranks + 1), -1, np.int32)
        table[:, 0] = 0  # the certain move
        for row, text in enumerate(self.texts):
            for rank, which in text:
                table[row, rank] = which
        return table

    @functools.cached_property
    def after(self) -> np.ndarray:
        """[R, ranks + 1, tokens] the text with one move more; -1 if it is not read."""
        number = {text: i for i, text in enumerate(self.texts)}
        table = np.full((len(self.texts), self.ranks + 1, self.tokens), -1, np.int32)
        for text, i in number.items():
            for move in text:
                before = number.get(tuple(other for other in text if other != move))
                if before is not None:
                    table[before, *move] = i
        return table

    def within(self, most: int) -> MoveSets:
        """Returns those texts whose places are among the first `most` + 1."""
        return MoveSets(
            tuple(text for text in self.texts if all(rank <= most for rank, _ in text))
        )

    def first(self, count: int) -> MoveSets:
        """Returns the first texts: of a fitted table those that help most."""
        return MoveSets(self.texts[:count])


def prefixes(gamma: int) -> MoveSets:
    """Returns the chain of this many moves after the certain one."""
    return MoveSets(
        tuple(tuple((rank, 0) for rank in range(1, k + 1)) for k in range(gamma + 1))
    )


def fit(runs: Sequence[Run], count: int) -> MoveSets:
    """Fits a table of this many texts, the better ones first.

    Again and again the text is added at which most walks stop. Walks begin where rounds
    with a table begin, so a table is made for those of the one before it, and the one
    with the fewest rounds is taken.
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
    """Fits a table for walks that all begin equally often."""
    texts: list[MoveSet] = [()]
    known: set[MoveSet] = {()}
    # Moves made, the text reached.
    seen: list[tuple[int, MoveSet]] = [(0, ())] * len(walks)
    while len(texts) < count:
        wanted: collections.Counter[MoveSet] = collections.Counter()
        for i, walk in enumerate(walks):
            seen[i] = done, at = _walked(known, walk, *seen[i])
            if (then := _with(at, walk, done)) is not None:
                wanted[then] += 1
        if not wanted:
            break
        # Of several the simplest.
        best = min(wanted, key=lambda text: (-wanted[text], text))
        texts.append(best)
        known.add(best)
    return MoveSets(tuple(texts))


def _rounds(sets: MoveSets, runs: Sequence[Run]) -> tuple[int, list[Sequence[Move]]]:
    """Returns how many rounds the runs take with a table, and the walks of these
    rounds."""
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
    """Returns the moves made and the text reached from there, by texts that are
    known."""
    while (then := _with(at, walk, done)) in known:
        done = done + 1
        at = then
    return done, at


def _with(text: MoveSet, run: Sequence[Move], done: int) -> Any:
    """Returns the text with the run's next move; None at its end."""
    if done >= len(run) or run[done] == BEYOND:
        return None
    return tuple(sorted((*text, run[done])))


def _parents(text: MoveSet) -> set[MoveSet]:
    return {tuple(other for other in text if other != move) for move in text}


def write(path: Path, tables: Mapping[int, MoveSets]) -> None:
    """Writes tables by their number of texts."""
    rows = (
        f'"{size}": {json.dumps(sets.texts)}' for size, sets in sorted(tables.items())
    )
    write_text(path, "{" + ",\n".join(rows) + "}\n")


def read(path: Path) -> dict[int, MoveSets]:
    """Returns the tables in a file."""
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
    """Returns those beside the model, or else those fitted to the model that comes with
    the package."""
    folder = getattr(model, "folder", None)
    beside = None if folder is None else Path(folder) / FILE
    return read(
        beside
        if beside is not None and beside.is_file()
        else Path(__file__).parent / FILE
    )


def chosen(tables: Mapping[int, MoveSets], count: int) -> MoveSets:
    """Returns the table of this many texts, or as many of a larger one, or the
    largest."""
    larger = [size for size in tables if size >= count]
    return tables[min(larger)].first(count) if larger else tables[max(tables)]
