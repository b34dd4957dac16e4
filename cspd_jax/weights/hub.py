"""Published weights by name, through huggingface_hub: downloaded once, then cached."""

from __future__ import annotations

import functools
import logging
import os
import re
import socket
import sys
import urllib.parse
from pathlib import Path
from typing import NamedTuple

from cspd_jax._utils.json_files import read_json
from cspd_jax.converters import hf
from cspd_jax.converters.safetensors_file import open_safetensors
from cspd_jax.errors import UserError

_ENDINGS = (".pth", ".pt", ".ckpt", ".bin", ".safetensors")  # of files alone: repositories may end in gguf
REPOSITORY = "jadechoghari/mar"
FILES = {
    "mar-base": "mar-base.safetensors",
    "mar-large": "mar-large.safetensors",
    "mar-huge": "mar-huge.safetensors",
    "kl16": "kl16.safetensors",
}
# The default revision. A branch moves; to pin the files, pass the 40 digits of a commit as `revision` or in
# CSPD_HUB_REVISION. `Fetched.commit` is the commit that a name resolved to.
REVISION = "main"
REVISION_VARIABLE = "CSPD_HUB_REVISION"


class Fetched(NamedTuple):
    """A downloaded file or folder.

    path: the file in the local cache, or the folder of a language model.
    repository: OWNER/NAME.
    file: its name in the repository; empty for a folder.
    commit: the commit that the revision resolved to.
    """

    path: Path
    repository: str
    file: str
    commit: str


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
    revision = revision or os.environ.get(REVISION_VARIABLE) or REVISION
    path = _download(REPOSITORY, FILES[name], revision, endpoint, cache_dir)
    assert path is not None  # it is required
    return Fetched(path, REPOSITORY, FILES[name], path.parent.name)


def is_repository(name: str) -> bool:
    """Whether a name has the form owner/name, and not that of a file in a folder."""
    if name.lower().endswith(_ENDINGS):
        return False
    return re.fullmatch(r"[\w.-]{1,96}/[\w.-]{1,96}", name) is not None and ".." not in name


def fetch_model(
    repository: str,
    *,
    revision: str | None = None,
    endpoint: str | None = None,
    cache_dir: str | os.PathLike | None = None,
) -> Fetched:
    """The folder of a language model, owner/name: config.json, the .safetensors files, the tokenizer."""
    revision = revision or os.environ.get(REVISION_VARIABLE) or REVISION

    def get(file: str, required: bool = True) -> Path | None:
        return _download(repository, file, revision, endpoint, cache_dir, required)

    config = get(hf.CONFIG)
    assert config is not None  # it is required
    folder = config.parent
    if get(hf.SINGLE, required=False) is None:
        get(hf.INDEX)
        for file in hf.shards(folder):
            get(file)
    for file in hf.COMPANIONS:
        get(file, required=False)
    return Fetched(folder, repository, "", folder.name)


def _download(repository, file: str, revision, endpoint, cache_dir, required: bool = True) -> Path | None:
    """A file in the local cache; None if it is not required and the repository has none.

    A file there that was damaged after its download, or by it, is downloaded once more.
    """
    path = _cached(repository, file, revision, endpoint, cache_dir, required, force=False)
    try:
        if path is not None:
            _check_whole(path)
    except UserError as error:
        print(f"cspd-jax: {error}; it is downloaded again", file=sys.stderr)
        path = _cached(repository, file, revision, endpoint, cache_dir, required, force=True)
    return path


def _check_whole(path: Path) -> None:
    """UserError if a file is cut off or is not of its format; nearly free, so not every byte is looked at."""
    if path.suffix == ".safetensors":
        open_safetensors(path)
    elif path.suffix == ".json":
        read_json(path)


def _cached(repository, file: str, revision, endpoint, cache_dir, required: bool, force: bool) -> Path | None:
    try:
        import huggingface_hub
        from huggingface_hub.errors import EntryNotFoundError, LocalEntryNotFoundError
    except ImportError:
        raise UserError(
            f"fetching {repository} needs the package huggingface_hub; install it with:"
            " pip install huggingface_hub"
        ) from None
    try:
        return Path(
            huggingface_hub.hf_hub_download(
                repository,
                file,
                revision=revision,
                endpoint=endpoint,
                cache_dir=cache_dir,
                force_download=force,
                local_files_only=not force and _is_unknown(endpoint or huggingface_hub.constants.ENDPOINT),
            )
        )
    except Exception as error:  # the library and its HTTP client raise many types
        absent = isinstance(error, EntryNotFoundError) and not isinstance(error, LocalEntryNotFoundError)
        if absent and not required:
            return None
        reason = " ".join(str(error).split())[:300] or type(error).__name__
        raise UserError(
            f"{file} of {repository} at revision {revision} could not be fetched ({reason});"
            " check the connection, or give the path of a file you have"
        ) from error


@functools.cache
def _is_unknown(endpoint: str) -> bool:
    """Whether this machine cannot even find the hub's address: then the library's many tries are in vain."""
    if any(os.environ.get(name) for name in ("HTTPS_PROXY", "https_proxy", "ALL_PROXY", "all_proxy")):
        return False  # the proxy finds it
    address = urllib.parse.urlsplit(endpoint)
    try:
        socket.getaddrinfo(address.hostname, address.port or 443)
    except OSError:
        logging.getLogger("cspd_jax").warning(
            "%s is not known on this machine; only the local cache is used", address.hostname
        )
        return True
    return False
