"""The reader of the format before PyTorch 1.6 (live against torch: test_torch_zip.py)."""

from __future__ import annotations

import numpy as np
import pytest
import torch_file
from torch_file import Global, Tensor, namespace, ordered_dict, storage, tensor

from cspd_jax.converters.torch_zip import open_checkpoint
from cspd_jax.errors import UserError

VALUES = np.arange(24, dtype=np.float32)


def read(tmp_path, tree, **options):
    torch_file.write_old(tmp_path / "x.pth", tree, **options)
    return open_checkpoint(tmp_path / "x.pth")


def test_what_it_holds(tmp_path):
    shared = storage(VALUES)
    tree = {
        "model": ordered_dict({"w": Tensor(shared, (4, 6), (6, 1)), "t": Tensor(shared, (2, 3), (1, 2), 5)}),
        "count": tensor(np.array([7, 8])),
        "args": namespace(lr=0.5),
    }
    found = read(tmp_path, tree)
    np.testing.assert_array_equal(found["model"]["w"].numpy(), VALUES.reshape(4, 6))
    np.testing.assert_array_equal(found["model"]["t"].numpy(), [[5, 7, 9], [6, 8, 10]])
    np.testing.assert_array_equal(found["count"].numpy(), [7, 8])
    assert found["args"] == {"lr": 0.5}


@pytest.mark.parametrize(
    "match, tree, options",
    [
        ("unknown version", {}, {"version": 1002}),
        ("little-endian", {}, {"facts": {"little_endian": False}}),
        ("little-endian", {}, {"facts": {}}),
        ("list of storages", {"w": tensor(VALUES)}, {"keys": []}),
        ("list of storages", {"w": tensor(VALUES)}, {"keys": ["0", "0"]}),
        ("list of storages", {"w": tensor(VALUES)}, {"keys": [0]}),
        ("os.system", {"w": Global("os system")}, {}),
        ("does not fit its storage", {"w": Tensor(storage(VALUES), (25,), (1,))}, {}),
        ("more than the file has", {"w": Tensor(storage(VALUES), (2**30, 32), (0, 0))}, {}),
    ],
)
def test_what_is_refused(tmp_path, match, tree, options):
    with pytest.raises(UserError, match=match):
        read(tmp_path, tree, **options)


def test_a_storage_of_another_size(tmp_path):
    read(tmp_path, {"w": tensor(VALUES)})
    whole = (tmp_path / "x.pth").read_bytes()
    count = len(whole) - 4 * len(VALUES) - 8
    (tmp_path / "x.pth").write_bytes(whole[:count] + (25).to_bytes(8, "little") + whole[count + 8 :])
    with pytest.raises(UserError, match="larger or smaller"):
        open_checkpoint(tmp_path / "x.pth")


def test_truncations_and_flipped_bytes(tmp_path):
    read(tmp_path, {"model": ordered_dict({"w": tensor(VALUES)})})
    whole, rng = (tmp_path / "x.pth").read_bytes(), np.random.default_rng(0)
    for end in range(0, len(whole) - 1, 7):
        (tmp_path / "x.pth").write_bytes(whole[:end])
        with pytest.raises(UserError):
            open_checkpoint(tmp_path / "x.pth")
    for position in rng.integers(0, len(whole), 300):
        damaged = bytearray(whole)
        damaged[position] ^= int(rng.integers(1, 256))
        (tmp_path / "x.pth").write_bytes(damaged)
        try:
            tree = open_checkpoint(tmp_path / "x.pth")
            for value in tree.get("model", {}).values() if isinstance(tree, dict) else ():
                value.numpy()
        except UserError:
            pass
