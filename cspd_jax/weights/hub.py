"""Published weights by name: downloaded once, then cached."""

from __future__ import annotations

import os
import re
import sys
import urllib.error
import urllib.request
from pathlib import Path
from typing import NamedTuple

from cspd_jax._utils.files import cache_folder, file_sha256, written_beside
from cspd_jax.converters import hf
from cspd_jax.converters.inception import PUBLISHED_SHA256
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
    """Returns a file in the local cache; None if it is not required and the repository has none."""
    try:
        import huggingface_hub
        from huggingface_hub.errors import EntryNotFoundError, LocalEntryNotFoundError
    except ImportError:
        raise UserError(
            f"fetching {repository} needs the package huggingface_hub; install it with:"
            " pip install huggingface_hub"
        ) from None
    where = {"revision": revision, "endpoint": endpoint, "cache_dir": cache_dir}
    try:
        return Path(huggingface_hub.hf_hub_download(repository, file, **where))
    except Exception as error:  # the library and its HTTP client raise many types
        absent = isinstance(error, EntryNotFoundError) and not isinstance(error, LocalEntryNotFoundError)
        if absent and not required:
            return None
        reason = " ".join(str(error).split())[:300] or type(error).__name__
        raise UserError(
            f"{file} of {repository} at revision {revision} could not be fetched ({reason});"
            " check the connection, or give the path of a file you have"
        ) from error


class Published(NamedTuple):
    """A file on the web that is in no repository of the hub. sha256: of its bytes, if one is published."""

    url: str
    sha256: str | None


PUBLISHED = {
    "pytorch-fid": Published(
        "https://github.com/mseitzer/pytorch-fid/releases/download/fid_weights/pt_inception-2015-12-05-6726825d.pth",
        PUBLISHED_SHA256,
    ),
    **{
        f"adm-imagenet-{size}": Published(
            f"https://openaipublic.blob.core.windows.net/diffusion/jul-2021/ref_batches/imagenet/{size}/{file}",
            None,
        )
        for size, file in ((256, "VIRTUAL_imagenet256_labeled.npz"), (512, "VIRTUAL_imagenet512.npz"))
    },
}


def resolve(name: str | os.PathLike, folder: Path | None = None) -> Path:
    """Returns the path of a file: `name` itself if there is one, else the published file of this name.

    folder: where files are kept (default: the user's cache).
    """
    found = None if os.path.exists(name) else PUBLISHED.get(os.fspath(name))
    if found is None:
        return Path(name)
    path = (folder or cache_folder() / "files") / found.url.rpartition("/")[2]
    if path.exists():
        return path
    print(f"fetching {found.url}", file=sys.stderr)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with written_beside(path) as partial:
            urllib.request.urlretrieve(found.url, partial)
            if found.sha256 not in (None, file_sha256(partial)):
                raise OSError(f"its SHA-256 is not {found.sha256}")
    except (OSError, urllib.error.ContentTooShortError) as error:
        raise UserError(
            f"{found.url} could not be fetched ({error}); check the connection, or download it by other means"
            f" and give its path, or put it at {path}"
        ) from None
    return path
