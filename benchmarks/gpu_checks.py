"""The checks that gpu.py makes on a device in addition to timing cases: the speed of
the device, whether every method gives the same results as on a CPU in the same process,
and where the time of one run goes."""

from __future__ import annotations

import collections
import dataclasses
import functools
import math
import statistics
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from toy import held_out_prompts, load

import cspd_jax
from cspd_jax import ChainSpeculation, DraftSpeculation, Plain, SelfSpeculation, shell
from cspd_jax.image import PaperCriterion, Released
from cspd_jax.masked import generation as masked_generation
from cspd_jax.measure import median_seconds
from cspd_jax.text import generation as text_generation

ALARM = 1e-4  # the probability with which a moment test rejects a correct method


def speeds(toy: bool) -> dict[str, float]:
    """Measures the speed of a device: the gigabytes per second of a copy, read and
    written bytes together, and the teraflops per second of matrix products."""
    numbers, side, times = (2**16, 128, 3) if toy else (2**29, 8192, 20)

    def seconds(function: Callable, *args: jax.Array) -> float:
        """Returns the seconds of one call, measured over several calls in a row."""
        program = jax.jit(function)
        return (
            median_seconds({"": lambda: [program(*args) for _ in range(times)]}, 3)[""]
            / times
        )

    x = jnp.ones(numbers, jnp.bfloat16)
    rows = {"copy_gigabytes_per_second": 4 * numbers / seconds(lambda x: -x, x) / 1e9}
    for dtype, precision in (
        ("bfloat16", None),
        ("float32", None),
        ("float32", "highest"),
    ):
        a = jax.random.normal(jax.random.key(0), (side, side), jnp.float32).astype(
            dtype
        )
        product = functools.partial(jnp.matmul, precision=precision)
        name = f"{'full_' if precision else ''}{dtype}_teraflops_per_second"
        rows[name] = 2 * side**3 / seconds(product, a, a) / 1e12
    return rows


class Check(NamedTuple):
    """The check of one method, on the models that come with the package.

    name: the name of the method.
    function: a pure function of `args(seed)`. It returns tokens.
    args: a function of a seed. It returns the arguments of `function`.
    against: the name of a method with the same distribution, whose results on a CPU are
        compared by moments. None if the results must equal the CPU's results.
    """

    name: str
    function: Callable[..., jax.Array]
    args: Callable[[int], tuple]
    against: str | None = None

    @property
    def about(self) -> dict[str, Any]:
        return {"what": "runs", "method": self.name}


def image_checks(toy: bool) -> list[Check]:
    """Returns a check for every image method. A method that makes random decisions is
    compared by its distribution."""
    window = 3 if toy else 16
    model = load("default", toy)
    draft = load("default-draft", toy)
    chains = ChainSpeculation(window)
    causal = load("default-causal", toy)
    alone = Plain()
    paper = DraftSpeculation(draft, PaperCriterion(), 4)
    ways: list[tuple] = [
        ("plain", model, alone, "plain", None),
        ("chains", model, alone, chains, "plain"),
        ("self", model, SelfSpeculation(4), "plain", "plain"),
        ("self+chains", model, SelfSpeculation(4), chains, "plain"),
        (
            "self, coupled+chains",
            model,
            SelfSpeculation(4, coupled=True),
            chains,
            "plain",
        ),
        ("draft", model, DraftSpeculation(draft, gamma=4), "plain", "plain"),
        ("draft, paper's criterion", model, paper, "plain", "draft, paper's criterion"),
        ("released runner", model, Released(draft), "plain", "released runner"),
        ("causal, plain", causal, alone, "plain", None),
        ("causal, chains", causal, alone, chains, "causal, plain"),
    ]
    labels = [i % 10 for i in range(4 if toy else 16)]
    return [_image_check(name, labels, *way) for name, *way in ways]


def _image_check(
    name: str, labels: list[int], target, method, denoise, against: str | None
) -> Check:
    asked = cspd_jax.Options(denoise=denoise, final_noise=name != "released runner")
    batch = cspd_jax.image.prepare(jax.random.key(0), target, labels, method, asked)

    def run(params, keys, labels):
        keys = jax.random.wrap_key_data(keys)
        own = {"params": params, "keys": keys, "labels": labels}
        return dataclasses.replace(batch, **own).generate().tokens

    def args(seed: int) -> tuple:
        keys = cspd_jax.row_keys(jax.random.key(seed), len(labels))
        return target.params, jax.random.key_data(keys), jnp.asarray(labels, jnp.int32)

    return Check(name, run, args, against)


def text_checks(toy: bool) -> list[Check]:
    """Returns checks for greedy text and masked text, whose tokens must all be
    equal."""
    count, prompts = (
        (8, held_out_prompts(2, 16, toy)) if toy else (64, held_out_prompts(4, 64, toy))
    )
    target = load("text-default", toy)
    model = load("masked-default", toy)
    small = load("text-default-draft", toy)
    asked = cspd_jax.text.Options(max_new_tokens=count, stop_ids=())
    plain = cspd_jax.text.Plain()
    drafted = cspd_jax.text.Speculation(small)
    copied = cspd_jax.text.Speculation(cspd_jax.text.PromptLookup())
    places = cspd_jax.masked.Options(max_new_tokens=count)
    masked = cspd_jax.masked

    def check(name: str, module: Any, *given: Any) -> Check:
        inputs = module.prepare(None, given[0], prompts, *given[1:])
        run = lambda inputs: shell.run(inputs).tokens
        return Check(name, run, lambda seed: (inputs,))

    return [
        check("text, plain", text_generation, target, plain, asked),
        check("text, draft", text_generation, target, drafted, asked),
        check("text, look-up", text_generation, target, copied, asked),
        check("masked, stepwise", masked_generation, model, masked.Stepwise(), places),
        check(
            "masked, ssd", masked_generation, model, masked.SelfSpeculation(4), places
        ),
    ]


def does_it_run(run: Any, compiling: Callable, toy: bool) -> None:
    """Adds a row for every method, which says whether it runs on the device and gives
    the same results as on a CPU."""
    devices = {"here": jax.devices()[0], "cpu": jax.devices("cpu")[-1]}
    checks: dict[str, Check] = {}
    for make in (image_checks, text_checks):
        with run.trying({"what": f"making {make.__name__}"}):
            checks |= {check.name: check for check in make(toy)}
    wanted = [check for check in checks.values() if not run.row(check.about)]

    @functools.cache
    def program(name: str, where: str) -> Callable[[], Any]:
        check = checks[name]
        device = devices[where]
        with jax.default_matmul_precision("highest"), jax.default_device(device):
            return compiling(
                lambda: jax.jit(check.function).lower(
                    *jax.device_put(check.args(0), device)
                )
            )

    def tokens(name: str, where: str, seed: int) -> np.ndarray:
        """Returns the tokens that a method makes on a device with a seed."""
        args = jax.device_put(checks[name].args(seed), devices[where])
        return np.asarray(program(name, where)()(*args))

    for check in wanted:  # all programs are compiled side by side
        program(check.name, "here"), program(check.against or check.name, "cpu")
    for check in wanted:
        if run.over:
            return
        with run.trying(check.about):
            here = tokens(check.name, "here", 0)
            if check.against is None:
                verdict = alike(here, tokens(check.name, "cpu", 0))
            else:
                verdict = same_moments(here, tokens(check.against, "cpu", 1))
            run.add(check.about | verdict)


def alike(here: np.ndarray, cpu: np.ndarray) -> dict[str, Any]:
    """Compares the results of one method on two devices. Ids must be equal. Numbers may
    differ by rounding, which a chain of steps may increase."""
    if np.issubdtype(here.dtype, np.integer):
        return {
            "as_on_a_cpu": bool(np.array_equal(here, cpu)),
            "equal_ids": float(np.mean(here == cpu)),
        }
    apart = float(np.mean(np.abs(here - cpu))) / float(np.std(cpu))
    return {"as_on_a_cpu": bool(apart < 1e-2), "mean_difference": apart}


def same_moments(here: np.ndarray, cpu: np.ndarray) -> dict[str, Any]:
    """Compares the means and mean squares of two independent samples of images. The
    probability of a false alarm is 1e-4."""
    least = 1.0
    for power in (1, 2):
        one, other = (np.mean(np.float64(a) ** power, axis=(1, 2)) for a in (here, cpu))
        error = math.sqrt(one.var(ddof=1) / len(one) + other.var(ddof=1) / len(other))
        least = min(
            least, math.erfc(abs(one.mean() - other.mean()) / error / math.sqrt(2))
        )
    return {
        "as_on_a_cpu": bool(min(1.0, 2 * least) > ALARM and np.all(np.isfinite(here))),
        "p_value": 2 * least,
    }


def profile(call: Callable[[], Any]) -> dict[str, Any]:
    """Runs `call` once under jax.profiler. Returns the time in kernels, the time that
    the device waits between kernels, and the longest kernels."""
    with tempfile.TemporaryDirectory() as folder:
        with jax.profiler.trace(folder):
            call()
        file = next(Path(folder).rglob("*.xplane.pb"))
        planes = list(jax.profiler.ProfileData.from_file(str(file)).planes)
    on_device = [plane for plane in planes if "GPU" in plane.name]
    # A CPU has no plane of its own.
    lines = [line for plane in on_device or planes for line in plane.lines]
    events = [
        event
        for line in lines
        if "Stream" in line.name or not on_device
        for event in line.events
    ]
    kernels = sorted(
        (event.start_ns, event.duration_ns, event.name) for event in events
    )
    end = 0.0
    gaps = []
    by_name = collections.defaultdict(list)
    for start, duration, name in kernels:
        gaps += [start - end] if 0 < end < start else []
        end = max(end, start + duration)
        by_name[name].append(duration)
    longest = sorted(by_name.items(), key=lambda item: -sum(item[1]))[:10]
    micro = lambda ns: round(ns / 1e3, 2)
    return {
        "kernels_run": len(kernels),
        "in_kernels_us": micro(sum(duration for _, duration, _ in kernels)),
        "between_kernels_us": micro(sum(gaps)),
        "median_gap_us": micro(statistics.median(gaps or [0.0])),
        "longest": [
            {"kernel": name[:80], "calls": len(d), "us": micro(sum(d))}
            for name, d in longest
        ],
    }
