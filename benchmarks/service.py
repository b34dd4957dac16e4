"""The service under load: images of many users as rows of one running batch, over HTTP on the loopback.

    python benchmarks/service.py [--rows 8] [--requests 32]      # --file FILE keeps what it found

Clients send the next request as soon as they have the answer to the one before. One client is "one by one";
as many as there are rows keep the batch full; four times as many keep requests waiting. Beside it: the
library's `generate` for one image at a time, without a service. Everything is compiled before it is timed.
"""

from __future__ import annotations

import base64
import concurrent.futures
import contextlib
import http.client
import importlib.util
import itertools
import json
import os
import platform
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import numpy as np
from toy import Parser, begin, left_out
from toy import load as load_model

import cspd_jax
from cspd_jax import Plain
from cspd_jax.apps.service.config import SELF, ServiceConfig

METHODS = {"self": SELF, "plain": Plain()}


@contextlib.contextmanager
def served(offer: ServiceConfig, rows: int, waiting: int) -> Iterator[tuple[Any, int]]:
    """An engine and the port at which it is served."""
    import uvicorn

    from cspd_jax.apps.service.web import make_app

    engine = offer.engine(rows, queue=waiting, timeout=600).start(warm=True)
    assert engine.wait_until_ready(600)
    server = uvicorn.Server(uvicorn.Config(make_app(offer, engine), log_level="error"))
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        listening.listen(1000)
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listening]}, daemon=True)
        thread.start()
        try:
            yield engine, listening.getsockname()[1]
        finally:
            server.should_exit = True
            thread.join(20)
            engine.stop()


def ask(port: int, method: str, number: int) -> tuple[int, float]:
    """(status, seconds) of a request."""
    start = time.perf_counter()
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=600)
    body = json.dumps({"label": number % 10, "seed": number, "method": method})
    connection.request("POST", "/v1/images", body, {"Content-Type": "application/json"})
    answer = connection.getresponse()
    content = json.loads(answer.read())
    connection.close()
    if answer.status == 200:
        assert base64.b64decode(content["png"]).startswith(b"\x89PNG")
    return answer.status, time.perf_counter() - start


def load(engine: Any, port: int, method: str, clients: int, requests: int) -> dict[str, Any]:
    numbers = itertools.count()
    answers: list[tuple[int, float]] = []

    def client() -> None:
        while (number := next(numbers)) < requests:
            answers.append(ask(port, method, number))

    before = engine.metrics.of_lane(f"image-{method}")
    start = time.perf_counter()
    with concurrent.futures.ThreadPoolExecutor(clients) as pool:
        for done in [pool.submit(client) for _ in range(clients)]:
            done.result()
    seconds = time.perf_counter() - start
    after = engine.metrics.of_lane(f"image-{method}")
    p50, p95, p99 = np.percentile([s for _, s in answers], [50, 95, 99])
    return {
        "method": method,
        "clients": clients,
        "requests": requests,
        "answered": sum(status == 200 for status, _ in answers),
        "images_per_second": requests / seconds,
        "p50": p50,
        "p95": p95,
        "p99": p99,
        "rows_busy": (after[0] - before[0]) / (after[1] - before[1]),
    }


def library(model: Any, method: str, requests: int) -> dict[str, Any]:
    """One image at a time, without a service."""

    def one(seed: int) -> float:
        start = time.perf_counter()
        key = jax.random.key(seed)
        tokens, _ = cspd_jax.generate(
            key, model, [seed % 10], METHODS[method], cspd_jax.Options(final_noise=True)
        )
        tokens.block_until_ready()
        return time.perf_counter() - start

    one(0)
    seconds = [one(seed) for seed in range(requests)]
    p50, p95, p99 = np.percentile(seconds, [50, 95, 99])
    speed = requests / sum(seconds)
    return {"method": method, "images_per_second": speed, "p50": p50, "p95": p95, "p99": p99}


def can_serve() -> bool:
    return all(importlib.util.find_spec(name) for name in ("fastapi", "uvicorn"))


def rows_of(model: Any, rows: int, requests: int) -> list[dict[str, Any]]:
    found = []
    with served(ServiceConfig(image=model), rows, 4 * rows) as (engine, port):
        for method in METHODS:
            for clients in (1, rows, 4 * rows):
                row = load(engine, port, method, clients, requests * (1 if clients == 1 else 2))
                found.append(row)
                print(shown(row, f"service, {clients} clients"), flush=True)
    return found


def make_parser() -> Parser:
    parser = Parser(__doc__, rows=2, requests=2, file=Path("service.json"))
    parser.add_argument("--rows", type=int, default=8)
    parser.add_argument("--requests", type=int, default=32)
    parser.add_argument("--target", default="default")
    parser.add_argument("--file", type=Path, help="where what is found is written (nowhere)")
    return parser


def main() -> None:
    args = begin(make_parser())
    model = load_model(args.target, args.toy)
    here = {
        "machine": platform.machine(),
        "cores": os.cpu_count(),
        "device": jax.devices()[0].device_kind,
        "jax": jax.__version__,
    }
    found: dict[str, Any] = {
        "here": here,
        "rows": args.rows,
        "target": args.target,
        "library": [],
        "service": [],
    }
    for method in METHODS:
        found["library"].append(library(model, method, args.requests))
        print(shown(found["library"][-1], "library, one at a time"), flush=True)
    if args.toy and not can_serve():
        left_out("the service", "it needs the extra `demo`")
    else:
        found["service"] = rows_of(model, args.rows, args.requests)
    if args.file is not None:
        args.file.write_text(json.dumps(found, indent=1) + "\n")


def shown(row: dict[str, Any], name: str) -> str:
    times = "  ".join(f"{p} {row[p]:.2f} s" for p in ("p50", "p95", "p99"))
    busy = f"  rows busy {row['rows_busy']:.0%}" if "rows_busy" in row else ""
    return f"{row['method']:>5}, {name:<24} {row['images_per_second']:.2f} images/s  {times}{busy}"


if __name__ == "__main__":
    main()
