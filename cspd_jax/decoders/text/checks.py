"""What no generation can do, said in one sentence. Values that are being traced are not looked at."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from cspd_jax.decoders.text.model_drafter import ModelDrafter
from cspd_jax.decoders.text.rules import RULES
from cspd_jax.errors import UserError
from cspd_jax.networks.lm import LM
from cspd_jax.networks.lm_config import LMConfig


def concrete(value: Any) -> np.ndarray | None:
    """The value as numpy, if it is known."""
    return None if isinstance(value, jax.core.Tracer) else np.asarray(value)


def check_prompts(config: LMConfig, prompts, lengths) -> None:
    batch, longest = np.shape(prompts)
    _require(config.causal, "the model is not causal: a masked-diffusion model writes in another way")
    _require(np.shape(lengths) == (batch,), f"there must be one length for each of {batch} prompts")
    _require(_all(lengths, lambda n: n >= 1), "a prompt is empty; it needs at least one token to begin with")
    _require(_all(lengths, lambda n: n <= longest), f"a prompt is longer than the {longest} tokens given")
    prompts, lengths = concrete(prompts), concrete(lengths)
    if prompts is not None and lengths is not None:
        ids = prompts[np.arange(longest) < lengths[:, None]]
        for wrong in ids[(ids < 0) | (ids >= config.known_ids)]:
            raise UserError(f"id {wrong} in a prompt is none of the model's {config.known_ids} ids")


def check_rows(batch: int, **options) -> None:
    """Options that are one number, or one for each row."""
    for name, value in options.items():
        _require(
            value is None or np.shape(value) in ((), (batch,)),
            f"{name} has shape {np.shape(value)}; it must be one number, or one for each of {batch} rows",
        )


def check_sampling(keys, batch: int, temperature, top_k, top_p) -> None:
    _number("temperature", temperature, lambda t: (t >= 0) & (t < np.inf), "0 (greedy) or more")
    _number("top_k", top_k, lambda k: k >= 1, "at least 1 (None is off)")
    _number("top_p", top_p, lambda p: (p > 0) & (p <= 1), "above 0 and at most 1 (None is off)")
    _require(keys is not None or _all(temperature, lambda t: t == 0, False), "sampling needs keys")
    typed = keys is None or jnp.issubdtype(getattr(keys, "dtype", None), jax.dtypes.prng_key)
    _require(
        typed and np.shape(keys) in ((), (batch,)),
        f"keys must be one key, or one for each of {batch} rows, as jax.random.key makes them",
    )


def check_speculation(drafter, draft_params, rule, gamma, max_gamma, cost, confidence) -> None:
    _require(rule in RULES, f"rule is {rule!r}; it must be one of {', '.join(RULES)}")
    _require(
        draft_params is not None or not isinstance(drafter, LM | ModelDrafter),
        "the draft model needs draft_params",
    )
    _require(max_gamma is not None or concrete(gamma) is not None, "gamma is traced: max_gamma must be given")
    most = np.inf if max_gamma is None else max_gamma
    _number("gamma", gamma, lambda g: (g >= 0) & (g <= most), "from 0 to max_gamma")
    _number("cost", cost, lambda c: c >= 0, "0 or more (None is off)")
    _number("confidence", confidence, lambda c: (c >= 0) & (c <= 1), "from 0 to 1 (None is off)")


def check_room(longest: int, max_new_tokens, max_len) -> None:
    _number("max_new_tokens", max_new_tokens, lambda n: n >= 0, "0 or more")
    _require(
        max_len is not None or concrete(max_new_tokens) is not None,
        "max_new_tokens is traced: max_len must be given",
    )
    _require(
        max_len is None or max_len >= longest, f"max_len is {max_len}, but the prompts have {longest} tokens"
    )


def _require(condition: bool, sentence: str) -> None:
    if not condition:
        raise UserError(sentence)


def _number(name: str, value, test: Callable, right: str) -> None:
    _require(_all(value, test), f"{name} is {value}; it must be {right}")


def _all(value, test: Callable, unknown: bool = True) -> bool:
    """Whether `test` is true of all of the value; `unknown` where there is none, or it is not known."""
    known = None if value is None else concrete(value)
    return unknown if known is None else bool(np.all(test(known)))
