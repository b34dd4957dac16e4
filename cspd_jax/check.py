"""`UserError`, the exception for wrong input from the caller; and checks of methods,
options and pairs of models that several packages share."""

from __future__ import annotations

import contextlib
import dataclasses
import reprlib
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

# The most ids by which two vocabularies of one tokenizer may differ. Published models
# differ by some hundreds.
_MOST_PADDING = 1024
_SHOWN = 80


class UserError(ValueError):
    """The caller's input is wrong. The message is one sentence, which says what is
    wrong, where, and what would be right. The command line prints it and exits with
    2."""

    def __init__(self, sentence: object = ""):
        super().__init__(printable(str(sentence)))


def printable(text: str) -> str:
    """Returns the text with every unprintable character escaped as in Python's strings.
    These include line ends and the characters that control a terminal."""
    return "".join(
        c if c.isprintable() else c.encode("unicode_escape").decode() for c in text
    )


@contextlib.contextmanager
def naming(where: object) -> Iterator[None]:
    """Puts `where`, such as the name of a file, before the message of a UserError that
    is raised within the block."""
    try:
        yield
    except UserError as error:
        raise UserError(f"{where}: {error}") from None


def shown(value: object) -> str:
    """Returns a short repr of a value, to quote in a message."""
    return _QUOTE.repr(value)[:_SHOWN]


_QUOTE = reprlib.Repr()
_QUOTE.maxstring = _QUOTE.maxother = _QUOTE.maxlong = _SHOWN
_QUOTE.maxlevel = 3


def is_out_of_memory(error: BaseException) -> bool:
    """Returns whether the error is XLA's report that the device has too little
    memory."""
    return isinstance(error, RuntimeError) and "RESOURCE_EXHAUSTED" in str(error)


def check_draft(target: object, draft: object) -> None:
    """Raises UserError unless the image model `draft` generates the same kind of token
    sequence as `target`."""
    for field, meaning in (
        ("token_dim", "tokens of dimension {}"),
        ("seq_len", "{} tokens per image"),
        ("num_classes", "{} classes"),
        ("patch_size", "patches of size {}"),
        ("vae_stride", "a stride of {} pixels per latent"),
    ):
        have = getattr(draft, field, None)
        want = getattr(target, field, None)
        if have != want:
            raise UserError(
                f"the draft does not fit the target: it has {meaning.format(have)}, the"
                f" target {meaning.format(want)}"
            )


def check_head_ids(where: str, config: Any, ids: Any) -> None:
    """Raises UserError unless the ids of a head are distinct ids of its target."""
    ids = np.asarray(ids)
    most = config.target_ids
    if ids.min() < 0 or ids.max() >= most or len(np.unique(ids)) < len(ids):
        raise UserError(
            f"the ids of {where} are not different ones of the target's {most}"
        )


def check_vocabularies(target: Any, draft: Any) -> None:
    """Raises UserError if two language models cannot have the same ids. Their numbers
    of ids must be equal, or differ by no more than padding if a model does not say how
    many of its ids are padding."""
    t = target.config
    d = draft.config
    unknown = any(c.known_ids == c.vocab_size for c in (t, d))
    if t.known_ids == d.known_ids or (
        unknown and abs(t.known_ids - d.known_ids) <= _MOST_PADDING
    ):
        return
    raise UserError(
        f"the vocabularies differ: {target.name} has {t.known_ids} ids and {draft.name}"
        f" {d.known_ids}, which is more than padding; a draft needs the target's tokens"
    )


def check_kind(what: str, value: object, *kinds: type) -> None:
    """Raises UserError unless `value` is an instance of one of the classes `kinds`, and
    its fields are right: none is a class. The message begins with `what`, and says what
    to write."""
    if not isinstance(value, kinds):
        names = " or ".join(
            f"{'.'.join(kind.__module__.split('.')[:2])}.{kind.__name__}(...)"
            for kind in kinds
        )
        raise UserError(f"{what} {shown(value)}; write {names}")
    for name, given in vars(value).items():
        if isinstance(given, type):
            raise UserError(f"{name} is a class; write {given.__name__}(...)")
    check_fields(value)


def check_fields(of: Any) -> None:
    """Raises UserError unless each field of a dataclass, and of the dataclasses in it,
    is one of the field's choices and lies within its range. Each entry of an array
    must. Traced numbers are not checked, nor is None if the field's type allows it."""
    for field in dataclasses.fields(of):
        value = getattr(of, field.name)
        if dataclasses.is_dataclass(value) and not isinstance(value, type):
            check_fields(value)
            continue
        if field.type == "bool" and not isinstance(value, bool):
            raise UserError(f"{field.name} is {shown(value)}; it must be True or False")
        choices = field.metadata.get("of_flag", {}).get("choices")
        if choices and value not in choices:
            raise UserError(
                f"{field.name} is {shown(value)}; it must be one of"
                f" {', '.join(choices)}"
            )
        within = field.metadata.get("within")
        absent = value is None and "None" in str(field.type)
        if not within or absent or isinstance(value, jax.core.Tracer):
            continue
        numbers = np.asarray(value)
        whole = "float" not in str(field.type)
        if not jnp.issubdtype(numbers.dtype, jnp.integer if whole else jnp.number):
            raise UserError(
                f"{field.name} is {shown(value)}; it must be a {'whole ' * whole}number"
            )
        low, high = within
        most = np.inf if high is None else high
        right = np.isfinite(numbers) & (numbers >= low) & (numbers <= most)
        if not right.all():
            bounds = f"at least {low}" if high is None else f"from {low} to {high}"
            raise UserError(
                f"{field.name} is {numbers[~right][0]}; it must be {bounds}"
            )
