"""`cspd-jax demo`: a page and an HTTP interface, in which many users share one running batch."""

from __future__ import annotations

import argparse
import importlib.util
import ipaddress
import os
import socket
from typing import Any

from cspd_jax.cli._arguments import positive
from cspd_jax.cli._output import progress
from cspd_jax.errors import UserError, check_range

LOGIN = "CSPD_JAX_LOGIN"
_NONE = "none"
_CONNECTIONS = 1000
_STOPPING = 2.0  # seconds for a round to end, when the service stops


def add_parser(subparsers) -> None:
    parser = subparsers.add_parser(
        "demo",
        help="serve a page and an HTTP interface",
        description="Serves a page on which images, text and masked text appear while they are made, and a"
        ' JSON interface for images. Needs the extra "demo". Without arguments it serves the models that'
        " come with the package, to this machine only.",
    )
    what = parser.add_argument_group("models (none leaves one out)")
    what.add_argument("--target", default="default", metavar="MODEL", help="image model (default: default)")
    what.add_argument("--vae", metavar="MODEL", help="autoencoder of a model of latents")
    what.add_argument("--text-target", default="text-default", metavar="MODEL", help="causal language model")
    what.add_argument(
        "--text-draft", metavar="MODEL",
        help="drafts for it: another model, a head that reads its states, int8, int4 or lookup (default:"
        " text-default-draft for text-default, otherwise lookup)",
    )  # fmt: skip
    what.add_argument(
        "--masked-model", default="masked-default", metavar="MODEL", help="masked-diffusion language model"
    )
    what.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    how = parser.add_argument_group("service")
    how.add_argument("--host", default="127.0.0.1", help="address to listen at (default: 127.0.0.1)")
    how.add_argument("--port", type=_port, default=7860, help="0 takes a free one (default: 7860)")
    how.add_argument(
        "--allow-host", action="append", default=[], metavar="NAME", type=_host_name,
        help="a name by which the service is reached, besides its address and localhost; * stands for any"
        " characters; may be repeated",
    )  # fmt: skip
    how.add_argument("--rows", type=positive, default=8, help="images side by side (default: 8)")
    how.add_argument("--queue", type=positive, default=64, help="requests that may wait (default: 64)")
    how.add_argument(
        "--timeout", type=float, default=120.0, metavar="SECONDS", help="for a request (default: 120)"
    )
    how.add_argument(
        "--login", action="store_true", help=f"ask for the USER:PASSWORD in the environment variable {LOGIN}"
    )
    parser.set_defaults(func=run)


def run(args: argparse.Namespace) -> None:
    for name, goes_with in (("vae", "target"), ("text_draft", "text_target")):
        if getattr(args, name) is not None and getattr(args, goes_with) == _NONE:
            flag, other = (f"--{one.replace('_', '-')}" for one in (name, goes_with))
            raise UserError(f"{flag} goes with {other}, which is {_NONE}; leave {flag} out")
    for module in ("gradio", "fastapi", "uvicorn", "prometheus_client"):
        if importlib.util.find_spec(module) is None:
            raise UserError(f'{module} is missing; the page needs pip install "cspd-jax[demo]"')
    check_range("--timeout", args.timeout, above=0.0, most=86400.0)
    login = _login() if args.login else None
    listening = _listen(args.host, args.port)
    with listening:
        _serve(args, login, listening)


def _serve(args: argparse.Namespace, login: tuple[str, str] | None, listening: socket.socket) -> None:
    os.environ["GRADIO_ANALYTICS_ENABLED"] = "False"
    import uvicorn

    from cspd_jax._utils import compilation
    from cspd_jax.apps.service.connections import PoliteServer, Punctual
    from cspd_jax.apps.service.page import end_streams
    from cspd_jax.apps.service.web import make_app

    compilation.use_cache()
    offer = _offer(args)
    engine = offer.engine(args.rows, queue=args.queue, timeout=args.timeout)
    app = make_app(offer, engine, login=login, hosts=args.allow_host)
    config = uvicorn.Config(
        app, log_level="warning", timeout_keep_alive=10, timeout_graceful_shutdown=3,
        limit_concurrency=_CONNECTIONS, server_header=False, http=Punctual, ws="none",
    )  # fmt: skip
    host, port = listening.getsockname()[:2]
    shown = f"[{host}]" if ":" in host else host
    if login is None and not ipaddress.ip_address(host).is_loopback:
        progress(
            "warning: everyone who reaches this machine can use the service; --login asks for a password"
        )
    try:
        engine.start(warm=True)
        print(f"http://{shown}:{port}", flush=True)
        progress("compiling; requests wait until it is done. Ctrl-C stops the service.")
        server = PoliteServer(config, lambda: engine.stop(_STOPPING), lambda: end_streams(app))
        server.run(sockets=[listening])
    finally:
        engine.stop(10)


def _offer(args: argparse.Namespace) -> Any:
    from cspd_jax.apps.service.config import ServiceConfig
    from cspd_jax.cli.text import load_drafter
    from cspd_jax.image import pixels
    from cspd_jax.weights import models

    def wanted(name: str) -> bool:
        return name != _NONE

    found: dict[str, Any] = {}
    if wanted(args.target):
        found["image"] = models.load(args.target, args.dtype)
        if vae := args.vae or models.own_vae(found["image"]):
            found["vae"] = models.load_vae(vae, args.dtype)
            pixels.check_vae(found["image"], found["vae"])
    if wanted(args.text_target):
        found["text"] = target = models.load_text(args.text_target, args.dtype)
        if not target.config.causal:
            raise UserError(f"{args.text_target} is a masked-diffusion model; give it as --masked-model")
        found["drafter"] = load_drafter(args.text_draft, target, args.dtype)[1]
    if wanted(args.masked_model):
        found["masked"] = model = models.load_text(args.masked_model, args.dtype)
        if model.config.causal or not model.config.mask_ids:
            raise UserError(f"{args.masked_model} is not a masked-diffusion model; give it as --text-target")
    if not found:
        raise UserError("every model is none, so there is nothing to serve")
    return ServiceConfig(**found)


def _login() -> tuple[str, str]:
    user, colon, password = os.environ.get(LOGIN, "").partition(":")
    if not (user and colon and password):
        raise UserError(f"--login needs USER:PASSWORD in the environment variable {LOGIN}")
    return user, password


def _listen(host: str, port: int) -> socket.socket:
    """A socket that is bound, so that a port that is taken is told before anything is loaded."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        listening = socket.socket(family, kind, protocol)
        try:
            listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listening.bind(address)
            listening.listen(_CONNECTIONS)
        except BaseException:
            listening.close()
            raise
    except OSError as error:
        raise UserError(
            f"cannot listen at {host}, port {port} ({error.strerror}); choose another --host or --port"
        ) from None
    return listening


def _host_name(text: str) -> str:
    if not text or any(character in text for character in " /:@"):
        raise argparse.ArgumentTypeError(f"{text!r:.80} is no name of a host; write one such as example.org")
    return text


def _port(text: str) -> int:
    if not (text.isascii() and text.isdecimal() and len(text) <= 5 and int(text) < 2**16):
        raise argparse.ArgumentTypeError(f"{text!r:.40} is not a port from 0 to 65535")
    return int(text)
