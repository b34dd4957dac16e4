"""The PyTorch checkpoint reader: what it reads, and everything it refuses."""

import argparse
import collections
import contextlib
import os
import pickle

import chex
import numpy as np
import pytest
import torch_writer
from torch_writer import Call, Tensor

from cspd_jax.check import UserError
from cspd_jax.converters import torch_file
from cspd_jax.converters.torch_file import LazyTensor, Namespace, open_checkpoint


def read(tmp_path, tree, write=torch_writer.write, **options):
    write(tmp_path / "x.pth", tree, **options)
    return open_checkpoint(tmp_path / "x.pth")


@pytest.mark.parametrize("write", [torch_writer.write, torch_writer.write_old])
def test_types_strides_offsets_and_shared_storages(tmp_path, write):
    """Of today's format, and of that before PyTorch 1.6."""
    base = np.arange(24, dtype=np.float32)
    tree = {
        str(dtype): np.arange(6).reshape(2, 3).astype(dtype)
        for dtype in torch_writer.NAMES
    }
    expected = tree | {
        "transposed": base.reshape(6, 4).T,
        "slice": np.float32([[7, 9, 11], [13, 15, 17]]),
        "expanded": np.float32([[22, 23]] * 3),
        "last": np.array(23, np.float32),
        "empty": np.zeros((0, 5), np.float32),
    }
    tree |= {
        "transposed": Tensor(base, (4, 6), (1, 4)),
        "slice": Tensor(base, (2, 3), (6, 2), offset=7),
        "expanded": Tensor(base, (3, 2), (0, 1), offset=22),
        "last": Tensor(base, (), (), offset=23),
        "empty": Tensor(base, (0, 5), (5, 1), offset=24),
    }
    lazy = read(tmp_path, tree, write)
    assert all(isinstance(value, LazyTensor) for value in lazy.values())
    found = {name: value.numpy() for name, value in lazy.items()}
    chex.assert_trees_all_equal_dtypes(found, expected)
    chex.assert_trees_all_equal(found, expected)
    assert not found["slice"].flags.writeable


def test_training_checkpoint_with_everything_in_it(tmp_path):
    weight = np.ones((2, 2), np.float32)
    parameter = Call(
        "torch._utils", "_rebuild_parameter", (weight, True, collections.OrderedDict())
    )
    state = collections.OrderedDict(w=weight, p=parameter)
    state._metadata = collections.OrderedDict()
    told = {
        "lr": 1e-4,
        "name": "mar",
        "resume": None,
        "amp": True,
        "betas": (0.9, 0.95),
        "big": 2**40,
    }
    tree = {
        "model": state,
        "optimizer": {
            "state": {0: {"step": np.array(3.0), "exp_avg": weight}},
            "param_groups": [{}],
        },
        "args": argparse.Namespace(**told),
        "size": Call("torch", "Size", ((2, 3),)),
    }
    result = read(tmp_path, tree)
    chex.assert_trees_all_equal(result["model"]["p"].numpy(), weight)
    assert isinstance(result["model"], dict) and "_metadata" not in result["model"]
    assert isinstance(result["args"], Namespace) and result["args"] == told
    assert result["optimizer"]["state"][0]["step"].numpy() == 3
    assert result["size"] == (2, 3)


class Evil:
    def __reduce__(self):
        return os.system, ("echo evil > /dev/null",)


HOSTILE = {
    "os.system": pickle.dumps(Evil(), 2),
    "builtins.eval by"
    " stack_global": b"\x80\x04\x8c\x08builtins\x8c\x04eval\x93\x8c\x011\x85R.",
    "getattr": b"\x80\x02cbuiltins\ngetattr\n.",
    "dotted attribute": (
        b"\x80\x04\x8c\x0bcollections\x8c\x16OrderedDict.__init__.x\x93."
    ),
    "numpy": pickle.dumps(np.float64(1.0), 2),
    "inst": b"(ios\nsystem\n.",
}


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_pickles_are_refused(tmp_path, name):
    with pytest.raises(UserError, match="not among the few names"):
        read(tmp_path, {}, pickle=HOSTILE[name])


def test_a_pickle_changes_nothing_of_the_reader(tmp_path):
    """It sets attributes of the class and of the function that it is given: a state of
    slots does."""
    for name in (b"argparse\nNamespace", b"torch._utils\n_rebuild_parameter"):
        slots = b"\x80\x02c" + name + b"\nN}X\x01\x00\x00\x00xK\x01s\x86b0}."
        with contextlib.suppress(UserError):
            read(tmp_path, {}, pickle=slots)
    assert not hasattr(Namespace, "x") and not hasattr(torch_file._parameter, "x")


@pytest.mark.parametrize(
    "shape, strides, offset",
    [
        ((11,), (1,), 0),
        ((10,), (1,), 1),
        ((2, 5), (6, 1), 0),
        ((), (), 10),
        ((2**40, 2**40), (2**40, 1), 0),
    ],
)
def test_tensors_beyond_their_storage(tmp_path, shape, strides, offset):
    with pytest.raises(UserError, match="does not fit its storage"):
        read(tmp_path, {"w": Tensor(np.zeros(10, np.float32), shape, strides, offset)})


@pytest.mark.parity
@pytest.mark.parametrize("zipped", [True, False])
def test_against_torch(tmp_path, zipped):
    torch = pytest.importorskip("torch")
    base = torch.arange(60.0).reshape(3, 4, 5)
    module = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.BatchNorm1d(4))
    optimizer = torch.optim.AdamW(module.parameters())
    module(torch.ones(2, 3)).sum().backward()
    optimizer.step()
    kinds = (torch.float16, torch.float64, torch.int8, torch.bool)
    tensors = {str(kind): (base % 7).to(kind) for kind in kinds}
    tensors |= {
        "transposed": base.permute(2, 0, 1),
        "slice": base[1:, ::2, 1::3],
        "scalar": base[2, 3, 4],
        "parameter": torch.nn.Parameter(base),
        "expanded": base[:1].expand(5, 4, 5),
        **module.state_dict(),
    }
    tree = {
        "tensors": tensors,
        "optimizer": optimizer.state_dict(),
        "args": argparse.Namespace(lr=0.1),
    }
    torch.save(tree, tmp_path / "x.pth", _use_new_zipfile_serialization=zipped)
    result = open_checkpoint(tmp_path / "x.pth")
    assert result["args"] == {"lr": 0.1} and len(result["optimizer"]["state"]) == 4
    found = {name: value.numpy() for name, value in result["tensors"].items()}
    expected = {name: value.detach().numpy() for name, value in tensors.items()}
    chex.assert_trees_all_equal_dtypes(found, expected)
    chex.assert_trees_all_equal(found, expected)
