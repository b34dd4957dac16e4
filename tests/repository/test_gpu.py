"""What is measured on a GPU and counted without one: how it is replayed, and put onto
the pages."""

import importlib
import json
import re
import types
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


@pytest.fixture
def gpu(monkeypatch):
    monkeypatch.syspath_prepend(BENCHMARKS)
    names = ("accepted", "cases", "gpu", "kernels", "pages")
    found = {name: importlib.import_module(name) for name in names}
    return types.SimpleNamespace(**found)


def test_the_pages_say_what_was_measured_and_counted(gpu):
    """README.md and docs/benchmarks.md are as `gpu.py --pages` writes them."""
    measured = gpu.pages.rows_of(gpu.pages.MEASURED)
    counted = gpu.pages.rows_of(gpu.pages.COUNTED)
    for path, text in gpu.pages.pages(measured, counted).items():
        assert path.read_text() == text, path


def test_what_is_replayed_is_counted(gpu):
    """Of 6 steps, one chain keeps 2 and then 0 of its drafts, and so on; the other one
    everything. Of two images, one makes 2 tokens, then 1; the other one 1, then 3, and
    its paths go on."""
    kept = np.array([[0, 0], [0, 0], [1, 0], [0, 0], [0, 0], [2, 5]])
    assert gpu.accepted.calls_of(kept, np.array([6, 6]), [2, 1]) == {2: 1, 1: 2}
    assert gpu.accepted.chains_of(kept, 4, 6, 6).shape == (6, 4)
    images = [[[6, 1], [0, 6]], [[3, 0], [6, 6]]]
    blocks = gpu.accepted.table_of(images, 2, 6)
    assert blocks[0, :4].tolist() == [[6, 1], [0, 0], [0, 6], [6, 1]]
    # the first round of each is left out, or of one
    late = gpu.accepted.table_of(images, 2, 6, begin=2)
    assert late[:, :2].tolist() == [[[0, 6], [0, 6]], [[6, 6], [0, 0]]]
    chains = np.full((6, 6), 4)  # a call makes five steps
    dropped, coupled = (
        gpu.accepted.run_of(blocks, chains, 3, [6, 3], how) for how in (False, True)
    )
    assert dropped == (2, 3.5, {6: 2.0, 3: 0.0}) and coupled == (
        2,
        3.5,
        {6: 1.5, 3: 0.5},
    )


@pytest.mark.slow
def test_programs_accept_what_is_replayed(gpu):
    """A run makes the tokens that its row is divided by."""
    case = gpu.cases.image_case("mar-base", gpu.cases.Scale(toy=True), 16, 4, batch=2)
    _, made = jax.jit(case.function)(*case.real_args())
    assert np.mean(made) == case.tokens


def test_kernels_of_loops_are_added_up(gpu):
    """A loop of 3 trips that the compiler knows, in one that ends when the data say
    so."""

    def run(x):
        inner = lambda x: jax.lax.fori_loop(0, 3, lambda i, x: jnp.sin(x), x)
        return jax.lax.while_loop(lambda x: jnp.sum(x) > 1, inner, x)

    program = gpu.kernels.Program(jax.jit(run).lower(jnp.ones(8)).compile().as_text())
    few, many = (
        gpu.kernels.count_launches(program, [trips], {}) for trips in (1.0, 5.0)
    )
    assert (few.reads, many.reads) == (2, 6)
    assert many.kernels - few.kernels >= 4 * 3
    loops = set(re.findall(r"(\S+) = [^=]*? while\(", program.text))
    captured = program._replace(captured=frozenset(name.lstrip("%") for name in loops))
    by_the_device = gpu.kernels.count_launches(captured, [5.0], {})
    assert by_the_device.reads == 0 and by_the_device.kernels >= many.kernels + 6


def test_what_is_in_a_command_buffer_is_read_off_the_compiler(gpu, tmp_path):
    """Of two loops one is inside, with a condition in it; what follows the buffer is
    outside again."""
    (tmp_path / "jit_run.thunk_sequence_after_thunk_passes.txt").write_text(
        """000: kCommandBuffer [source | next=003 (1)]
    001: kWhile [source | sink]
condition:
        004: kCustomKernel [source | sink] loop_compare
      body:
        002: kConditional [source | sink]
003: kWhile [prev=000 (1) | sink]
"""
    )
    thunk = (
        'thunk_metadata {{\n  thunk_info {{\n    profile_annotation: "{}"\n   '
        " thunk_id: {}\n  }}\n}}\n"
    )
    names = ("while.5", "cond.1.clone", "while.7", "loop_compare")
    listed = "".join(thunk.format(name, at + 1) for at, name in enumerate(names))
    (tmp_path / "jit_run.thunk_metadata.txt").write_text(listed)
    assert gpu.kernels.captured_in(tmp_path) == {"while.5", "cond.1.clone"}


def test_a_process_that_ends_costs_no_other_row(gpu, tmp_path, monkeypatch):
    """The first attempt leaves a row and ends; the second is told not to try it
    again."""
    file = tmp_path / "gpu.json"
    asked = []

    def ends_once(command, check, timeout):
        asked.append(command)
        row = {"what": "row", "error": gpu.gpu.ENDED}
        file.write_text(json.dumps([row]))
        return types.SimpleNamespace(returncode=-11 if len(asked) == 1 else 0)

    monkeypatch.setattr(gpu.gpu.subprocess, "run", ends_once)
    run = gpu.gpu.Run(file, 1.0, False, "a device")
    gpu.gpu.measure_apart(run, gpu.gpu.FIRST)
    assert len(asked) == 2
    assert "--but-ended" not in asked[0]
    assert asked[1][-1] == "--but-ended"
    assert run.rows[0]["error"] == gpu.gpu.ENDED


def test_loops_of_the_device_must_be_right_and_faster(gpu, tmp_path):
    run = gpu.gpu.Run(tmp_path / "gpu.json", 1.0, False, "a device")
    host = gpu.cases.about("mar-base", "chains", "M 32")
    device = {**host, "options": "M 32, device loops"}
    for seconds, apart, pay in ((1.0, 0.0, True), (1.0, 1.0, False), (3.0, 0.0, False)):
        run.add({**host, "seconds": 2.0})
        run.add({**device, "seconds": seconds, "apart_from_host_loops": apart})
        assert gpu.gpu.device_loops_pay(run) is pay
    assert not gpu.gpu.device_loops_pay(
        gpu.gpu.Run(tmp_path / "none.json", 1.0, False, "a device")
    )
