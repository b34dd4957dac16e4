"""Ways to damage a file: as bytes, and by what they mean (JSON, pickles, zip, safetensors, GGUF)."""

from __future__ import annotations

import io
import itertools
import json
import pickletools
import random
import re
import struct
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

Mutation = Callable[[bytes, random.Random], bytes]

_NUMBERS = [
    0, 1, -1, 2, 3, 127, 255, 256, 65_535, 10**4, 20_000, 2**31 - 1, 2**31, 2**32, 2**53, 10**9, 10**12,
    2**62, 2**63 - 1, 2**63, 2**64, -(2**63), 10**40, 10**400,
]  # fmt: skip
_TEXTS = ["", "x", "\x1b[2J\n", "\ud800", "../../x", "/", "\0", "0", "1e9", "x" * 10**5, "/" * 10**5]
_LISTS = [[], {}, [[]], {"type": "x"}, [0] * 10_000, ["x"], [None], [2**40] * 8]
_VALUES: list[Callable[[random.Random], Any]] = [
    lambda r: r.choice(_NUMBERS),
    lambda r: r.choice(_NUMBERS),
    lambda r: r.choice([0.5, -0.5, 1e-300, 1e308, -1e308, 1e-9]),
    lambda r: r.choice([True, False, None]),
    lambda r: r.choice(_TEXTS),
    lambda r: r.choice(_LISTS),
    lambda r: r.choice([_nested(5), _nested(70), _nested(500), float("nan"), float("inf"), 0, 1, 2, 3]),
]


def _nested(depth: int) -> list:
    value: list = []
    for _ in range(depth):
        value = [value]
    return value


def of_bytes(content: bytes, r: random.Random) -> bytes:
    """Flips, cuts, splices, and numbers replaced by extremes, one or a few of them."""
    data = bytearray(content)
    for _ in range(r.choice([1, 1, 1, 2, 5, 20])):
        at = r.randrange(len(data) + 1)
        match r.randrange(8):
            case 0 | 1 if at < len(data):
                data[at] ^= 1 << r.randrange(8)
            case 2:
                del data[at:]
            case 3:
                del data[at : at + r.choice([1, 4, 100])]
            case 4:
                start = r.randrange(len(data) + 1)
                data[at:at] = data[start : start + r.choice([1, 8, 200])]
            case 5:
                data[at:at] = bytes(r.randrange(256) for _ in range(r.choice([1, 4, 30])))
            case 6:
                width = r.choice(["<H", "<I", "<Q", ">I"])
                number = r.choice(_NUMBERS) % 2 ** (8 * struct.calcsize(width))
                data[at : at + struct.calcsize(width)] = struct.pack(width, number)
            case 7:
                data[at : at + 16] = bytes(len(data[at : at + 16]))
    return bytes(data)


def of_json(content: bytes, r: random.Random) -> bytes:
    """A value replaced, taken away, moved or repeated, wherever it lies."""
    try:
        value = json.loads(content)
    except ValueError:
        return of_bytes(content, r)
    for _ in range(r.choice([1, 1, 2, 4])):
        value = _changed(value, r)
    return json.dumps(value).encode()


def _changed(value: Any, r: random.Random) -> Any:
    places = list(_places(value))
    if not places:
        return r.choice(_VALUES)(r)
    owner, key = r.choice(places)
    match r.randrange(7):
        case 0:
            del owner[key]
        case 1:
            other, place = r.choice(places)
            owner[key] = json.loads(json.dumps(other[place]))
        case 2 if isinstance(owner, dict):
            owner[r.choice(["", "x", "type", "\x1b[2J", "x" * 1000])] = owner.pop(key)
        case 3 if isinstance(owner[key], int | float):
            owner[key] = r.choice([owner[key] + 1, -owner[key], owner[key] * 2, str(owner[key])])
        case _:
            owner[key] = r.choice(_VALUES)(r)
    return value


def _places(value: Any):
    inner = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, child in list(inner):
        yield value, key
        yield from _places(child)


_HOSTILE = [
    b"cos\nsystem\n", b"cbuiltins\neval\n", b"cbuiltins\nexec\n", b"cposix\nsystem\n", b"ctorch\nload\n",
    b"csubprocess\nPopen\n", b"cnumpy\nfromfile\n", b"\x8c\x02os\x8c\x06system\x93", b"cbuiltins\ngetattr\n",
]  # fmt: skip
_INSTRUCTIONS = [
    b"]", b"}", b")", b"(", b"N", b"0", b"2", b"u", b"e", b"a", b"s", b"t", b"\x85", b"\x86", b"\x87", b"R",
    b"b", b"\x81", b"Q", b"h\x00", b"q\x00", b"j\xff\xff\xff\x7f", b"r\xff\xff\xff\xff", b"\x94", b"d", b"l",
    b".", b"1", b"X\x05\x00\x00\x00model", b"\x8b\xff\xff\xff\x7f", b"\x8a\xff" + b"\x7f" * 255,
    b"B\xff\xff\xff\xff", b"\x8e" + b"\xff" * 8, b"ccollections\nOrderedDict\n", b"cargparse\nNamespace\n",
    b"ctorch\nFloatStorage\n", b"ctorch._utils\n_rebuild_tensor_v2\n", b"ctorch\nSize\n",
    b"I999999999999999999999\n", b"G" + b"\x7f" * 8,
]  # fmt: skip


def of_pickle(content: bytes, r: random.Random) -> bytes:
    """Instructions taken away, repeated, exchanged, put in; numbers changed; hostile names."""
    places = [position for _, _, position in pickletools.genops(content)] + [len(content)]
    parts = [content[a:b] for a, b in itertools.pairwise(places)]
    for _ in range(r.choice([1, 1, 2, 3, 8])):
        at = r.randrange(len(parts))
        match r.randrange(8):
            case 0:
                parts[at] = b""
            case 1:
                parts[at] *= r.choice([2, 3, 1000])
            case 2:
                other = r.randrange(len(parts))
                parts[at], parts[other] = parts[other], parts[at]
            case 3:
                parts[at] = r.choice(_HOSTILE) + r.choice([b"", b")R", b"X\x02\x00\x00\x00id\x85R"])
            case 4:
                piece = b"".join(parts[at : at + r.choice([3, 30])])
                parts[at] += piece * r.choice([1, 10, 1000])
            case 5:
                parts[at] = _number(parts[at], r)
            case _:
                parts[at] += r.choice(_INSTRUCTIONS) * r.choice([1, 1, 1, 100, 30_000])
    return b"".join(parts)


def _number(part: bytes, r: random.Random) -> bytes:
    number = r.choice(_NUMBERS)
    if part[:1] not in (b"K", b"M", b"J", b"\x8a") or abs(number) > 2**200:
        return part
    data = number.to_bytes(number.bit_length() // 8 + 1, "little", signed=True)
    return b"\x8a" + bytes([len(data)]) + data


def of_zip(content: bytes, r: random.Random) -> bytes:
    """A field of a header changed, or the members written again: compressed, renamed, twice, not at all."""
    if r.random() < 0.6:
        return _header_field(content, r)
    made = io.BytesIO()
    with zipfile.ZipFile(io.BytesIO(content)) as old, zipfile.ZipFile(made, "w") as new:
        names = old.namelist()
        victim, method = (
            r.choice(names),
            r.choice([zipfile.ZIP_DEFLATED, zipfile.ZIP_BZIP2, zipfile.ZIP_LZMA]),
        )
        what = r.randrange(5)
        for name in names:
            data = old.read(name)
            if name != victim:
                new.writestr(name, data)
            elif what == 0:
                new.writestr(name, data, method)
            elif what == 1:
                new.writestr(r.choice(["../" + name, "/x", "x" * 60_000, name + "/", "\x1b[2J"]), data)
            elif what == 2:
                new.writestr(name, data * r.choice([0, 2, 100]))
            elif what == 3:
                new.writestr(name, bytes(30_000_000), zipfile.ZIP_DEFLATED)
    return made.getvalue()


def _header_field(content: bytes, r: random.Random) -> bytes:
    data = bytearray(content)
    starts = [
        i
        for mark in (b"PK\x01\x02", b"PK\x03\x04", b"PK\x05\x06", b"PK\x06\x06")
        for i in _all(content, mark)
    ]
    for _ in range(r.choice([1, 1, 2])):
        at = r.choice(starts) + 4 + r.randrange(42)
        width = r.choice(["<H", "<I", "<I", "<Q"])
        size = struct.calcsize(width)
        number = r.choice([*_NUMBERS, *starts]) % 2 ** (8 * size)
        data[at : at + size] = struct.pack(width, number)
    return bytes(data)


def _all(content: bytes, mark: bytes) -> list[int]:
    found, at = [], content.find(mark)
    while at >= 0:
        found.append(at)
        at = content.find(mark, at + 1)
    return found


def within_zip(name: str, mutation: Mutation) -> Mutation:
    """Changes the member whose name ends so, and writes an undamaged zip file around it."""

    def mutate(content: bytes, r: random.Random) -> bytes:
        made = io.BytesIO()
        with zipfile.ZipFile(io.BytesIO(content)) as old, zipfile.ZipFile(made, "w") as new:
            victim = r.choice([n for n in old.namelist() if n.endswith(name)])
            for member in old.namelist():
                data = old.read(member)
                new.writestr(member, mutation(data, r) if member == victim else data)
        return made.getvalue()

    return mutate


def of_safetensors(content: bytes, r: random.Random) -> bytes:
    """The description changed as JSON, with the right or a wrong length before it."""
    length = int.from_bytes(content[:8], "little")
    header = of_json(content[8 : 8 + length], r)
    said = len(header) if r.random() < 0.9 else r.choice(_NUMBERS) % 2**64
    return struct.pack("<Q", said) + header + content[8 + length :]


def of_tensors(content: bytes, r: random.Random) -> bytes:
    """A consistent description of other tensors: of another type or shape, or with each other's names."""
    length = int.from_bytes(content[:8], "little")
    header = json.loads(content[8 : 8 + length])
    names = [name for name in header if name != "__metadata__"]
    for _ in range(r.choice([1, 2, 5])):
        name, other = r.choice(names), r.choice(names)
        tensor = header[name]
        match r.randrange(5):
            case 0 if tensor["dtype"] == "F32":
                tensor["dtype"] = r.choice(["I32", "U32", "F32"])
            case 1:
                r.shuffle(tensor["shape"])
            case 2:
                tensor["shape"] = tensor["shape"] + [1] * r.choice([1, 20, 100])
            case 3:
                header[name], header[other] = header[other], tensor
            case 4 if len(names) > 2:
                renamed = r.choice([name + "x", "x", "/" * 1000, "\x1b[2J", name.replace("0", "999999")])
                header[renamed] = header.pop(name)
                names[names.index(name)] = renamed
    text = json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + content[8 + length :]


def of_gguf(content: bytes, r: random.Random) -> bytes:
    """What lies behind a name changed: a type, a count, a length, a size, a place."""
    data = bytearray(content)
    names = [m.end() for m in re.finditer(rb"(general|llama|tokenizer|blk|token_embd|output)[\w.]*", content)]
    for _ in range(r.choice([1, 1, 2, 5])):
        at = r.choice([4, 8, 16, *names]) + r.choice([0, 4, 8, 12, 20])
        width = r.choice(["<I", "<Q", "<f"])
        number = r.choice([*_NUMBERS, *range(16), 32, 264]) % 2 ** (8 * struct.calcsize(width))
        data[at : at + struct.calcsize(width)] = struct.pack(width, number)
    return bytes(data)


def mutate(file: Path, r: random.Random) -> bytes:
    """The content of a file, damaged."""
    content = file.read_bytes()
    try:
        return r.choice(mutations_of(file))(content, r)
    except Exception:  # it was damaged before, so that it has no structure any more
        return of_bytes(content, r)


def mutations_of(file: Path) -> list[Mutation]:
    """What is worth trying on a file, by its name."""
    match file.suffix:
        case ".json" | ".zarray":
            return [of_json, of_json, of_json, of_bytes]
        case ".pth":
            return [of_zip, within_zip("data.pkl", of_pickle), within_zip("data.pkl", of_bytes), of_bytes]
        case ".npz":
            return [of_zip, within_zip(".npy", of_bytes), of_bytes]
        case ".safetensors":
            return [of_safetensors, of_tensors, of_bytes]
        case ".gguf":
            return [of_gguf, of_gguf, of_bytes]
    return [of_json, of_bytes] if file.name in ("_METADATA", "_CHECKPOINT_METADATA") else [of_bytes]
