"""Published files that are no repository of the hub, by name: downloaded once, then kept."""

from __future__ import annotations

import functools
import http.client
import os
import urllib.error
import urllib.request
from pathlib import Path
from typing import NamedTuple

from tqdm import tqdm

from cspd_jax._utils.files import cache_folder, file_sha256, write_errors, written_beside
from cspd_jax.converters.inception import PUBLISHED_SHA256
from cspd_jax.errors import UserError

_PIECE = 2**20  # bytes
_PATIENCE = 60  # seconds without a byte


class Published(NamedTuple):
    """A file on the web.

    url: where it is.
    most: bytes that it has at most.
    sha256: of its bytes; None if nobody has published one.
    """

    url: str
    most: int
    sha256: str | None


FILES = {
    "pytorch-fid": Published(
        "https://github.com/mseitzer/pytorch-fid/releases/download/fid_weights/pt_inception-2015-12-05-6726825d.pth",
        2**27,
        PUBLISHED_SHA256,
    ),
    **{
        f"adm-imagenet-{size}": Published(
            f"https://openaipublic.blob.core.windows.net/diffusion/jul-2021/ref_batches/imagenet/{size}/{file}",
            2**35,
            None,
        )
        for size, file in ((256, "VIRTUAL_imagenet256_labeled.npz"), (512, "VIRTUAL_imagenet512.npz"))
    },
}


def resolve(name: str | os.PathLike, folder: Path | None = None) -> Path:
    """The path of a file: `name` itself if there is one, else the published file of this name.

    folder: where files are kept (default: the user's cache).
    """
    found = None if os.path.exists(name) else FILES.get(os.fspath(name))
    if found is None:
        return Path(name)
    path = (folder or cache_folder() / "files") / found.url.rpartition("/")[2]
    if not path.exists():
        with write_errors(path.parent):
            path.parent.mkdir(parents=True, exist_ok=True)
        _download(found, path)
    return path


def _download(published: Published, path: Path) -> None:
    problem = functools.partial(_problem, published, path)
    try:
        with (
            urllib.request.urlopen(published.url, timeout=_PATIENCE) as answer,
            written_beside(path) as partial,
            open(partial, "wb") as file,
        ):
            size = answer.headers.get("Content-Length")
            total = int(size) if size else None
            with tqdm(total=total, desc=path.name, unit="B", unit_scale=True) as progress:
                while piece := answer.read(_PIECE):
                    file.write(piece)
                    progress.update(len(piece))
                    if progress.n > published.most:
                        raise problem(f"it has more than {published.most} bytes")
            if total is not None and progress.n != total:
                raise problem(f"{progress.n} of {total} bytes came")
            file.flush()
            if published.sha256 not in (None, file_sha256(partial)):
                raise problem(f"its SHA-256 is not {published.sha256}")
    except (urllib.error.URLError, http.client.HTTPException, TimeoutError, ConnectionError) as error:
        raise problem(" ".join(str(error).split())[:200] or type(error).__name__) from None


def _problem(published: Published, path: Path, reason: str) -> UserError:
    return UserError(
        f"{published.url} could not be fetched ({reason}); check the connection, or download it by other"
        f" means and give its path, or put it at {path}"
    )
