"""What gpu.py asks of a device before it times anything: how fast it is, and whether every method runs on it
and gives what it gives on a CPU in the same process."""

from __future__ import annotations

import concurrent.futures
import functools
import math
import statistics
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from toy import held_out_prompts, load, load_text

import cspd_jax
from cspd_jax import ChainSpeculation, DraftSpeculation, Plain, SelfSpeculation
from cspd_jax.image import PaperCriterion, ReleasedRunner
from cspd_jax.masked import generation as masked_generation
from cspd_jax.text import generation as text_generation

ALARM = 1e-4  # of each moment test: how often it rejects what is right


def speeds(toy: bool) -> dict[str, float]:
    """Gigabytes a second of a copy, read and written, and teraflops a second of matrix products."""
    numbers, side, times = (2**16, 128, 3) if toy else (2**29, 8192, 20)

    def seconds(function: Callable, *args: jax.Array) -> float:
        """Returns those of one call; the device has several to do at a time."""
        program = jax.jit(function)
        jax.block_until_ready(program(*args))
        found = []
        for _ in range(3):
            start = time.perf_counter()
            jax.block_until_ready([program(*args) for _ in range(times)])
            found.append((time.perf_counter() - start) / times)
        return statistics.median(found)

    x = jnp.ones(numbers, jnp.bfloat16)
    rows = {"copy_gigabytes_per_second": 4 * numbers / seconds(lambda x: -x, x) / 1e9}
    for name, dtype, precision in (
        ("bfloat16", "bfloat16", None), ("float32", "float32", None), ("full_float32", "float32", "highest")
    ):  # fmt: skip
        a = jax.random.normal(jax.random.key(0), (side, side), jnp.float32).astype(dtype)
        product = functools.partial(jnp.matmul, precision=precision)
        rows[f"{name}_teraflops_per_second"] = 2 * side**3 / seconds(product, a, a) / 1e12
    return rows


class Check(NamedTuple):
    """Holds a method on the embedded models.

    function: pure, of `args`; returns tokens.
    against: the exact method whose law it has, or None where the same is expected as on a CPU.
    """

    name: str
    function: Callable[..., jax.Array]
    args: Callable[[int], tuple]
    against: str | None

    @property
    def about(self) -> dict[str, Any]:
        return {"what": "runs", "method": self.name}


def image_checks(toy: bool) -> list[Check]:
    """Makes every method for images. What takes decisions at random is compared by its law."""
    images, window = (4, 3) if toy else (16, 16)
    chains, labels = ChainSpeculation((window,)), [i % 10 for i in range(images)]
    draft = load("default-draft", toy)
    ways: dict[str, tuple[str, Any, Any, str | None]] = {
        "plain": ("default", Plain(), "plain", None),
        "chains": ("default", Plain(), chains, "plain"),
        "self": ("default", SelfSpeculation(4), "plain", "plain"),
        "self+chains": ("default", SelfSpeculation(4), chains, "plain"),
        "draft": ("default", DraftSpeculation(draft, gamma=4), "plain", "plain"),
        "draft, paper's criterion": (
            "default",
            DraftSpeculation(draft, PaperCriterion(), 4),
            "plain",
            "itself",
        ),
        "released runner": ("default", ReleasedRunner(draft), "plain", "itself"),
        "causal, plain": ("default-causal", Plain(), "plain", None),
        "causal, chains": ("default-causal", Plain(), chains, "causal, plain"),
    }
    return [_image_check(name, labels, *way, toy) for name, way in ways.items()]


def _image_check(
    name: str, labels: list[int], model: str, method: Any, way: Any, against: str | None, toy: bool
) -> Check:
    target = load(model, toy)
    asked = cspd_jax.Options(denoise=way, final_noise=name != "released runner")
    options = cspd_jax.image.resolve(target, method, asked, len(labels))

    def run(params, keys, labels):
        keys = jax.random.wrap_key_data(keys)
        return cspd_jax.image.sample(target.network, params, keys, labels, options, method)[0]

    def args(seed: int) -> tuple:
        keys = cspd_jax.row_keys(jax.random.key(seed), len(labels))
        return target.params, jax.random.key_data(keys), jnp.asarray(labels, jnp.int32)

    return Check(name, run, args, against)


def text_checks(toy: bool) -> list[Check]:
    """Makes greedy text and masked text, which are equal token for token."""
    count, prompts = (8, held_out_prompts(2, 16, toy)) if toy else (64, held_out_prompts(4, 64, toy))
    target, small = load_text("text-default", toy), load_text("text-default-draft", toy)
    asked = cspd_jax.text.Options(rule="block", max_new_tokens=count, gamma=4, stop_ids=())
    found = []
    for name, drafter in (
        ("text, plain", None),
        ("text, draft", small),
        ("text, look-up", cspd_jax.text.PromptLookup()),
    ):
        inputs = text_generation.prepare(None, target, prompts, drafter, asked)
        found.append(Check(name, lambda i: text_generation.run(i).tokens, lambda seed, i=inputs: (i,), None))
    model, places = load_text("masked-default", toy), cspd_jax.masked.Options(max_new_tokens=count)
    ways = {"masked, stepwise": cspd_jax.masked.Stepwise(), "masked, ssd": cspd_jax.masked.SelfSpeculation(4)}
    for name, way in ways.items():
        inputs = masked_generation.prepare(None, model, prompts, way, places)
        found.append(
            Check(name, lambda i: masked_generation.run(i).tokens, lambda seed, i=inputs: (i,), None)
        )
    return found


def does_it_run(run: Any, toy: bool) -> None:
    """Adds a row for every method: whether it runs, and whether it gives what it gives on a CPU."""
    devices = {"here": jax.devices()[0], "cpu": jax.devices("cpu")[-1]}
    checks, programs, start = [], {}, time.monotonic()
    for make in (image_checks, text_checks):
        try:
            checks += make(toy)
        except Exception as error:
            run.failed({"what": "making", "method": make.__name__}, error)
    wanted = [check for check in checks if not run.there(check.about)]
    if run.over or not wanted:
        return
    needed = {check.against for check in wanted}
    with concurrent.futures.ThreadPoolExecutor(32) as pool, jax.default_matmul_precision("highest"):
        for check in checks:
            for where, device in devices.items():
                if check not in wanted and not (check.name in needed and where == "cpu"):
                    continue
                try:
                    args = jax.device_put(check.args(0), device)
                    with jax.default_device(device):
                        lowered = jax.jit(check.function).lower(*args)
                    programs[check.name, where] = pool.submit(lowered.compile)
                except Exception as error:
                    run.failed(check.about, error)
        concurrent.futures.wait(programs.values())
    run.compiling += time.monotonic() - start
    made: dict[tuple[str, str, int], np.ndarray] = {}

    def tokens(check: Check, where: str, seed: int) -> np.ndarray:
        """Returns what the method makes there with a seed."""
        if (found := made.get((check.name, where, seed))) is None:
            program = programs[check.name, where].result()
            args = jax.device_put(check.args(seed), devices[where])
            found = made[check.name, where, seed] = np.asarray(program(*args))
        return found

    by_name = {check.name: check for check in checks}
    for check in wanted:
        if run.over:
            return
        if (check.name, "here") not in programs:
            continue
        try:
            if check.against is None:
                verdict = alike(tokens(check, "here", 0), tokens(check, "cpu", 0))
            else:
                other = check if check.against == "itself" else by_name[check.against]
                verdict = same_moments(tokens(check, "here", 0), tokens(other, "cpu", 1))
            run.add(check.about | verdict)
        except Exception as error:
            run.failed(check.about, error)


def alike(here: np.ndarray, cpu: np.ndarray) -> dict[str, Any]:
    """Says whether ids are equal, and numbers up to rounding that a chain of steps may carry on."""
    if np.issubdtype(here.dtype, np.integer):
        return {"as_on_a_cpu": bool(np.array_equal(here, cpu)), "equal_ids": float(np.mean(here == cpu))}
    apart = float(np.mean(np.abs(here - cpu))) / float(np.std(cpu))
    return {"as_on_a_cpu": bool(apart < 1e-2), "mean_difference": apart}


def same_moments(here: np.ndarray, cpu: np.ndarray) -> dict[str, Any]:
    """Compares mean and mean square of the images of two independent samples; false alarms: 1e-4."""
    least = 1.0
    for power in (1, 2):
        one, other = (np.mean(np.float64(a) ** power, axis=(1, 2)) for a in (here, cpu))
        error = math.sqrt(one.var(ddof=1) / len(one) + other.var(ddof=1) / len(other))
        least = min(least, math.erfc(abs(one.mean() - other.mean()) / error / math.sqrt(2)))
    return {
        "as_on_a_cpu": bool(min(1.0, 2 * least) > ALARM and np.all(np.isfinite(here))),
        "p_value": 2 * least,
    }
