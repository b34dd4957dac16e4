"""What a run began with besides its settings. It is kept in the run's config.json and holds when resumed."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Mapping
from typing import Any

from cspd_jax._utils.files import fingerprint
from cspd_jax.errors import UserError, shown

_LEADING = 4096  # numbers of each parameter that tell models apart
_FLAGS = {"origin": "from"}


@dataclasses.dataclass(frozen=True)
class Provenance:
    """command: train or distill. The other fields are the options of that name; None if not given.

    origin: data, target or both.
    weights: by option, a fingerprint of the model that it named.
    data: what its source says of what it learns from, with its `sha256`; None if it depends on nothing.
    """

    command: str
    init: str | None = None
    target: str | None = None
    origin: str | None = None
    samples: int | None = None
    vae: str | None = None
    ids: int | None = None
    prompts: str | None = None
    questions: int | None = None
    weights: Mapping[str, str] = dataclasses.field(default_factory=dict)
    data: Mapping[str, Any] | None = None

    @classmethod
    def from_json(cls, values: Any) -> Provenance:
        """The inverse of `to_json`. TypeError if that is not what it is."""
        if not isinstance(values, dict) or not {"command"} <= values.keys() <= {*cls.__dataclass_fields__}:
            raise TypeError("what it began with is not a command and its options")
        begun = cls(**values)
        texts = (begun.command, begun.init, begun.target, begun.origin, begun.vae, begun.prompts)
        numbers = all(n is None or type(n) is int for n in (begun.samples, begun.ids, begun.questions))
        if not (all(t is None or isinstance(t, str) for t in texts) and numbers and begun.command):
            raise TypeError("what it began with is not made of names and numbers")
        if not (isinstance(begun.weights, dict) and isinstance(begun.data, dict | None)):
            raise TypeError("the weights or data it began with are not an object")
        return begun

    def to_json(self) -> dict[str, Any]:
        return dataclasses.asdict(self)

    def resumed(self, asked: Provenance, where: str) -> Provenance:
        """This beginning, for a run that is resumed with the options `asked`; None there asks for nothing.

        UserError where the two differ.
        """
        if asked.command != self.command:
            raise UserError(
                f"the run in {where} was begun by cspd-jax {self.command}; continue it with that command"
            )
        for name in ("init", "target", "origin", "samples", "vae", "ids", "prompts", "questions"):
            was, wanted = getattr(self, name), getattr(asked, name)
            if wanted is not None and not _same(was, wanted):
                flag = _FLAGS.get(name, name)
                began = f"with --{flag} {was}" if was is not None else f"without --{flag}"
                raise UserError(
                    f"--{flag} is {wanted}, but the run in {where} was begun {began}; leave the option out,"
                    " or choose another folder"
                )
        return self

    def with_weights(self, where: str, **models: tuple[Any, Any] | None) -> Provenance:
        """With the fingerprints of (config, params) by option; UserError if another one is recorded."""
        found = {
            name: fingerprint(*model, leading=_LEADING) for name, model in models.items() if model is not None
        }
        for name, value in found.items():
            if self.weights.get(name, value) != value:
                raise UserError(
                    f"{getattr(self, name)} has other weights than when the run in {where} was begun with it"
                    f" (--{name}); restore them, or choose another folder"
                )
        return dataclasses.replace(self, weights={**self.weights, **found})

    def with_data(self, where: str, source: Any) -> Provenance:
        """With what a source says of its data, if it does; UserError if something else is recorded."""
        told = source.describe() if hasattr(source, "describe") else None
        if told is None:
            return self
        was = self.data or told
        if was.get("sha256") != told["sha256"]:
            name = next(name for name in told if was.get(name) != told[name])
            raise UserError(
                f"the data of the run in {where} has {name} {shown(told[name])} now, and had"
                f" {shown(was.get(name))} when it was begun; restore it, or start another run"
            )
        return dataclasses.replace(self, data=was)


def _same(a: Any, b: Any) -> bool:
    if a == b or a is None:
        return a == b
    both = isinstance(a, str) and isinstance(b, str) and os.path.exists(a) and os.path.exists(b)
    return both and os.path.samefile(a, b)
