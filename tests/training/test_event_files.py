"""Event files for TensorBoard: what is written can be read, and a resumed run has every step once."""

import json
import struct

import pytest
from test_text_training import CORPUS, TINY

from cspd_jax._utils.event_files import EventFile, checksum
from cspd_jax.training.config import with_settings
from cspd_jax.training.data.text import Texts
from cspd_jax.training.run import RunOptions
from cspd_jax.training.text.trainer import train_text


def fields(data):
    """The (number, value) pairs of a protocol buffer."""
    at = 0

    def varint():
        nonlocal at
        number = shift = 0
        while True:
            byte = data[at]
            at, number, shift = at + 1, number | (byte & 0x7F) << shift, shift + 7
            if byte < 0x80:
                return number

    while at < len(data):
        key = varint()
        if key & 7 == 0:
            yield key >> 3, varint()
            continue
        size = {1: 8, 2: None, 5: 4}[key & 7] or varint()
        value, at = data[at : at + size], at + size
        yield key >> 3, value if key & 7 == 2 else struct.unpack("<d" if size == 8 else "<f", value)[0]


def events(path):
    """The events of a file, as dictionaries of fields by number; checksums are verified."""
    data = path.read_bytes()
    while data:
        size, crc = data[:8], data[8:12]
        length = struct.unpack("<Q", size)[0]
        event, crc_of_event, data = (
            data[12 : 12 + length],
            data[12 + length : 16 + length],
            data[16 + length :],
        )
        assert struct.pack("<II", checksum(size), checksum(event)) == crc + crc_of_event
        yield dict(fields(event))


def scalars(folder):
    """{step: {name: value}} of a folder, as TensorBoard takes it: a start forgets later steps before it."""
    found = {}
    for path in sorted(folder.iterdir()):
        for event in events(path):
            step = event.get(2, 0)
            if 7 in event:
                assert dict(fields(event[7])) == {1: 1}
                found = {s: values for s, values in found.items() if s < step}
            for _, value in fields(event.get(5, b"")):
                value = dict(fields(value))
                found.setdefault(step, {})[value[1].decode()] = value[2]
    return found


def test_checksum():
    """CRC-32C of "123456789" is e3069283; the mask is TFRecord's."""
    assert checksum(b"123456789") == ((0xE3069283 >> 15 | 0xE3069283 << 17) + 0xA282EAD8) % 2**32


def test_what_is_written_is_read(tmp_path):
    file = EventFile(tmp_path, 1)
    file.write(1, {"loss": 0.5, "rate": 1e-30})
    file.write(2**40, {"loss": float("inf")})
    file.close()
    (path,) = tmp_path.iterdir()
    assert next(events(path))[3] == b"brain.Event:2"
    found = scalars(tmp_path)
    assert found[1] == {"loss": 0.5, "rate": pytest.approx(1e-30)} and found[2**40] == {"loss": float("inf")}


def test_files_are_in_the_order_of_their_beginning(tmp_path):
    for step in (1, 5, 3):
        file = EventFile(tmp_path, step)
        for later in range(step, 10):
            file.write(later, {"begun": step})
        file.close()
    assert {step: values["begun"] for step, values in scalars(tmp_path).items()} == {
        **dict.fromkeys((1, 2), 1),
        **dict.fromkeys(range(3, 10), 3),
    }


def test_a_resumed_run_has_every_step_once(tmp_path):
    """Stopped after 7 steps, of which a checkpoint has 7; one more file, with the steps from 8 on."""
    config = with_settings(TINY, ["steps=12", "decay=4", "checkpoint_every=5"])
    for stop in (7, 12, 12):
        options = {"resume": True, "stop_at": stop, "progress": False, "tensorboard": True}
        train_text(config, Texts(TINY.data, CORPUS), tmp_path, RunOptions(**options))
    assert len(list((tmp_path / "tensorboard").iterdir())) == 2  # nothing is left to do the third time
    found = scalars(tmp_path / "tensorboard")
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert list(found) == list(range(1, 13)) == [line["step"] for line in lines]
    for line in lines:
        step = line.pop("step")
        assert found[step] == pytest.approx(line, rel=1e-6)
