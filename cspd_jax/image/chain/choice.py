"""Whether to speculate along the denoising chains, decided by a short measurement on this machine.

Speculation trades sequential calls for arithmetic: it wins where a head call on one row costs nearly as much
as on many (large heads, accelerators, small batches) and loses elsewhere. Both have the same distribution.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from cspd_jax._utils import files
from cspd_jax._utils.json_files import read_object
from cspd_jax._utils.timing import fastest_of, median_seconds
from cspd_jax.diffusion.chain import Chains, sample_chain
from cspd_jax.diffusion.gaussian import coefficients
from cspd_jax.diffusion.schedule import sampling_schedule
from cspd_jax.errors import UserError
from cspd_jax.image.bound import embed_time
from cspd_jax.image.chain import calibration
from cspd_jax.image.chain.calibration import Calibration
from cspd_jax.image.chain.jacobian import drafter_of
from cspd_jax.image.chain.speculation import ChainCounts, ChainRandomness, ChainSpeculation, speculate_chain
from cspd_jax.image.options import Options
from cspd_jax.image.protocol import TokenModel
from cspd_jax.keys import seed_key
from cspd_jax.weights.models import ImageModel

Array = jax.Array

_HOPELESS = 2.0  # if the first way tried is slower than plain by this factor, no other draft lengths will win


class Choice(NamedTuple):
    """What is fastest here.

    speculation: along the chains; None is step by step.
    seconds: of one group of chains, by way: "plain", or draft lengths as `name_of` writes them. Those that
        had no chance were not tried.
    """

    speculation: ChainSpeculation | None
    seconds: dict[str, float]


def candidates(steps: int) -> dict[str, ChainSpeculation | None]:
    """The ways tried. Accepted runs are long at the start of the chain and short at its end."""
    if steps <= 16:
        return {"plain": None, **_named(ChainSpeculation((min(8, steps),)))}
    long = (min(32, steps),) * -(-steps // 32)
    by_gains = [ChainSpeculation(lengths) for lengths in ((8,), (16,), (*long, 8))]
    return {"plain": None, **_named(*by_gains, ChainSpeculation((min(32, steps),), "jacobian"))}


def _named(*ways: ChainSpeculation) -> dict[str, ChainSpeculation | None]:
    kind = lambda way: "" if way.drafter == "gains" else f" {way.drafter}"
    return {name_of(way.draft_lengths) + kind(way): way for way in ways}


def name_of(draft_lengths: tuple[int, ...]) -> str:
    """How draft lengths are written: runs of equal ones as count x length, for example 4x32,8."""
    parts: list[list[int]] = []
    for n in draft_lengths:
        if parts and parts[-1][1] == n:
            parts[-1][0] += 1
        else:
            parts.append([1, n])
    return ",".join(f"{count}x{n}" if count > 1 else str(n) for count, n in parts)


def choose(model: ImageModel, options: Options, fitted: Calibration, rows: int) -> Choice:
    """The fastest way for groups of `rows` chains: measured, or as found when it was measured before."""
    path = _file(model, options, rows)
    ways = candidates(sampling_schedule(str(options.respacing)).num_steps)
    seconds = _read(path, ways)
    if seconds is None:
        seconds = _measure_promising(ways, lambda some: measure(model, options, fitted, rows, some))
        _write(path, seconds)
    return Choice(ways[fastest_of(seconds, "plain")], seconds)


def _measure_promising(
    ways: dict[str, ChainSpeculation | None], measured: Callable[[list[str]], dict[str, float]]
) -> dict[str, float]:
    """All ways, but for those that have no chance: each is a program to be compiled.

    Plain and the middle window come first; the Jacobian's many rows only where a window of the gains wins.
    """
    plain, *others = ways
    by_gains = [name for name in others if "jacobian" not in name]
    first = [plain, by_gains[(len(by_gains) - 1) // 2]]
    seconds = measured(first)
    if seconds[first[1]] > _HOPELESS * seconds[plain]:
        return seconds
    if len(by_gains) > 1:
        seconds = measured([plain, *by_gains])
    if fastest_of(seconds, plain) == plain or len(by_gains) == len(others):
        return seconds
    return measured(list(ways))


def measure(
    model: ImageModel, options: Options, fitted: Calibration, rows: int, ways: Sequence[str] | None = None
) -> dict[str, float]:
    """Median seconds of one group of chains of each way (of the `candidates`), the ways taking turns."""
    key = seed_key(0)
    steps = sampling_schedule(str(options.respacing)).num_steps
    noise = jax.random.normal(jax.random.fold_in(key, 1), (steps + 1, rows, model.config.token_dim))
    keys = jax.random.split(jax.random.fold_in(key, 2), rows)
    z = fitted.contexts
    z = z[:, jnp.arange(rows) % z.shape[1]].reshape(-1, z.shape[-1])
    z = z.astype(getattr(model.network, "dtype", jnp.float32))
    options = dataclasses.replace(options, chain_drafter=fitted.drafter, draft_drafter=None, known=None)
    runs = {
        name: functools.partial(
            run_chains,
            model.network,
            model.params,
            z,
            noise,
            keys,
            dataclasses.replace(options, denoise=way or "plain"),
        )
        for name, way in candidates(steps).items()
        if ways is None or name in ways
    }
    return median_seconds(runs)


@functools.partial(jax.jit, static_argnames=("network",))
def run_chains(
    network: TokenModel, params: Any, z: Array, noise: Array, keys: Array, options: Options
) -> tuple[Array, ChainCounts | None]:
    """The chains of one group, z [R or 2R, D], noise [T + 1, R, d] and keys [R] given: x_0 [R, d], and counts
    with speculation."""
    chains = Chains(
        network,
        params,
        embed_time(network, params, str(options.respacing)),
        z,
        coefficients(sampling_schedule(str(options.respacing)), noise.dtype),
        options.temperature,
        scale=options.cfg if options.guided else None,
        final_noise=bool(options.final_noise),
    )
    if options.chain is None or options.chain_drafter is None:
        return sample_chain(chains, noise), None
    random = ChainRandomness(noise[-1], keys)
    drafter = drafter_of(options.chain.drafter, options.chain_drafter, str(options.respacing), noise.dtype)
    found = speculate_chain(chains, random, drafter, options.chain)
    return found.x, found.counts


def _file(model: ImageModel, options: Options, rows: int) -> Path:
    device = f"{jax.devices()[0].device_kind}-jax{jax.__version__}".replace(" ", "_").replace("/", "_")
    name = calibration.file_name(options).removesuffix(".npz")
    folder = files.cache_folder() / "choices" / calibration.digest(model)
    return folder / f"{name}-rows{rows}-blocks-{device}.json"


def _read(path: Path, ways) -> dict[str, float] | None:
    """Earlier measurements; None unless they are of these ways."""
    if not path.exists():
        return None
    try:
        seconds = read_object(path)
        if not all(isinstance(s, float) and s > 0 for s in seconds.values()):
            raise UserError(f"{path} does not hold seconds")
    except UserError as error:
        files.report_remade(error)
        return None
    return seconds if {"plain"} < seconds.keys() <= ways.keys() else None


def _write(path: Path, seconds: dict[str, float]) -> None:
    with contextlib.suppress(OSError):  # then it is measured again next time
        path.parent.mkdir(parents=True, exist_ok=True)
        files.write_text(path, json.dumps(seconds))
