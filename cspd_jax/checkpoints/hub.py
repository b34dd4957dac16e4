"""Published weights by name, through huggingface_hub: downloaded once, then cached."""

from __future__ import annotations

import os
from pathlib import Path
from typing import NamedTuple

from cspd_jax.errors import UserError

REPOSITORY = "jadechoghari/mar"
FILES = {
    "mar-base": "mar-base.safetensors",
    "mar-large": "mar-large.safetensors",
    "mar-huge": "mar-huge.safetensors",
    "kl16": "kl16.safetensors",
}
# What is fetched unless the caller says otherwise. A branch name moves; put the 40 digits of a commit here
# (or in CSPD_HUB_REVISION, or pass `revision`) to pin the files. `Fetched.commit` tells what a name meant.
REVISION = "main"
REVISION_VARIABLE = "CSPD_HUB_REVISION"


class Fetched(NamedTuple):
    path: Path  # the file in the local cache
    repository: str
    file: str
    commit: str  # the commit that the revision stood for


def fetch(
    name: str,
    *,
    revision: str | None = None,
    endpoint: str | None = None,
    cache_dir: str | os.PathLike | None = None,
) -> Fetched:
    """The file of a published model, from the cache or the network.

    `revision` defaults to the environment variable CSPD_HUB_REVISION, then to `REVISION`; `endpoint` to
    huggingface_hub's own (its HF_ENDPOINT).
    """
    if name not in FILES:
        raise UserError(f"no published model is called {name!r}; the names are {', '.join(FILES)}")
    try:
        import huggingface_hub
    except ImportError:
        raise UserError(
            f"fetching {name} needs the package huggingface_hub; install it with: pip install 'cspd-jax[hub]'"
        ) from None
    revision = revision or os.environ.get(REVISION_VARIABLE) or REVISION
    try:
        path = huggingface_hub.hf_hub_download(
            REPOSITORY, FILES[name], revision=revision, endpoint=endpoint, cache_dir=cache_dir
        )
    except Exception as error:  # the library and its HTTP client raise many types
        reason = " ".join(str(error).split())[:300] or type(error).__name__
        raise UserError(
            f"{FILES[name]} of {REPOSITORY} at revision {revision} could not be fetched ({reason});"
            " check the connection, or give the path of a file you have"
        ) from error
    return Fetched(Path(path), REPOSITORY, FILES[name], Path(path).parent.name)
