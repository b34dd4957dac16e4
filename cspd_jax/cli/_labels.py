"""`--labels`: a list of class numbers, names and ranges."""

from __future__ import annotations

from cspd_jax.errors import UserError

NO_CLASS = "none"


def parse_labels(text: str, num_classes: int, class_names: tuple[str, ...] = ()) -> list[int]:
    """`0-9`, `3,5,7`, `A,C-F`, `none` -> class numbers. A number is a class number, whatever the names."""
    labels: list[int] = []
    for part in (p.strip() for p in text.split(",")):
        single = _number(part, num_classes, class_names)
        labels += [single] if single is not None else _range(part, num_classes, class_names)
    return labels


def _number(text: str, num_classes: int, class_names: tuple[str, ...]) -> int | None:
    """The class a text stands for; None if it stands for none."""
    if text in (NO_CLASS, "-1") and text not in class_names:
        return -1
    if text.isascii() and text.isdecimal():
        number = int(text)
        if number >= num_classes:
            raise UserError(f"label {text} is out of range: the model has classes 0 to {num_classes - 1}")
        return number
    return class_names.index(text) if text in class_names else None


def _range(text: str, num_classes: int, class_names: tuple[str, ...]) -> list[int]:
    for i, character in enumerate(text):
        if character != "-":
            continue
        first, last = (_number(t.strip(), num_classes, class_names) for t in (text[:i], text[i + 1 :]))
        if first is None or last is None or first < 0 or last < 0:
            continue
        if first > last:
            raise UserError(f"the range {text} of --labels runs backwards; write {last}-{first}")
        return list(range(first, last + 1))
    names = f", or a name such as {class_names[0]}" if class_names else ""
    raise UserError(
        f"label {text!r} is unknown; write class numbers from 0 to {num_classes - 1}, for example 0-2 or"
        f" 0,2{names}"
    )
