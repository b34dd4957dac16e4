"""The service for hours, under mixed requests: see tests/soak.py.

A few clients send images of all methods, texts through the page, garbage, floods, and requests that they
leave or never finish. The same request must have the same answer each time, also after a restart. Memory,
threads and open files of the server must not grow from the second tenth of the run to the last.
"""

from __future__ import annotations

import collections
import contextlib
import http.client
import json
import os
import random
import re
import statistics
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import demo_server
import numpy as np
from demo_server import JSON

CLIENTS, ROWS, QUEUE = 5, 4, 16
RESTARTS = (0.02, 0.04)  # when, as parts of the run; the last process is the one that is measured
MOST_GROWTH = {"RSS, MB": 50.0, "threads": 4, "open files": 8}  # of RSS, 5 % if that is more
FULL = "requests are waiting already; try again"
ROUTES = (
    "/nothing", "/v1", "/v1/images/1", "/gradio_api/file=/etc/passwd", "/../../etc/passwd", "/docs", "/%00",
)  # fmt: skip
KINDS = {  # how often, one relative to another
    "image": 60, "text": 6, "masked text": 4, "image on the page": 3, "left": 8, "page left": 2,
    "garbage": 12, "stranger": 5, "no sentence of HTTP": 3, "on the page, refused": 2, "slow": 0.4,
    "flood": 0.6, "health": 6, "metrics": 6, "page": 2,
}  # fmt: skip


class Unexpected(Exception):
    """An answer that should have been another."""


def check(holds: bool, told: object) -> None:
    if not holds:
        raise Unexpected(str(told)[:400])


class Service:
    """The server, what its clients have found, and the measurements of its process."""

    def __init__(self, work: Path, seconds: float, seed: int):
        options = ("--rows", str(ROWS), "--queue", str(QUEUE))
        self._options = ("--target", demo_server.save_target(work / "target", 36), *options)
        self.seconds, self.seed = seconds, seed
        self.counts: collections.Counter = collections.Counter()
        self.problems: list[str] = []
        self.latencies: list[float] = []
        self.samples: list[tuple[float, ...]] = []
        self._answers: dict = {}  # by request: the first answer, which the later ones must equal
        self._restarts = 0  # begun and ended: odd in the middle of one
        self._stop = threading.Event()
        self.server = demo_server.Server(*self._options)

    def image(self, rng: random.Random, server: demo_server.Server, timed: bool = False) -> str:
        asked: dict[str, object] = {"label": rng.randrange(-1, 5), "seed": rng.randrange(6)}
        asked |= {"cfg": rng.choice((1, 2.5)), "method": rng.choice(("self", "plain"))}
        begin = time.monotonic()
        status, answer = server.image(**asked)
        if status == 503 and FULL in answer["error"]:
            return "503, the queue is full"
        check(status == 200, (status, answer))
        if timed:
            self.latencies.append(time.monotonic() - begin)
        report = {name: value for name, value in answer["report"].items() if "seconds" not in name}
        check(all(report[name] == value for name, value in asked.items()), (asked, report))
        self._same(("image", *asked.values()), (answer["png"], report))
        return "200, the right image"

    def on_the_page(self, rng: random.Random, server: demo_server.Server, tab: int, leave=False) -> str:
        size = (None, rng.choice((8, 40)), rng.choice((16, 32)))[tab]
        prompt = rng.choice(("Return a list of", "def ", "x = 1\n" * 9))
        values = [prompt, size, rng.choice((0, 0.8)), rng.randrange(3), rng.random() < 0.7]
        if tab == 0:
            values = [rng.randrange(-1, 5), rng.randrange(6), rng.choice((1, 2.5)), rng.random() < 0.5]
        shown, visit = "", server.visit(tab, values, f"{rng.getrandbits(60):x}")
        for shown in visit:  # noqa: B007
            if leave:
                visit.close()
                return "gone"
        if FULL in shown:
            return "refused, the queue is full"
        check("cspd-error" not in shown and "cspd-report" in shown and "running" not in shown, shown[-400:])
        self._same((tab, *values), re.sub(r"<table.*?</table>", "", shown, flags=re.DOTALL))
        return "the right text" if tab else "the right image"

    def request(self, kind: str, rng: random.Random) -> str:
        """What became of one request; Unexpected if it is not what it should be."""
        server = self.server
        if kind == "image":
            return self.image(rng, server, timed=True)
        elif kind in ("health", "metrics", "page"):
            status, content = server.get({"health": "/healthz", "metrics": "/metrics", "page": "/"}[kind])
            check(status == 200 and len(content) > 20, (status, content))
        elif kind in ("text", "masked text", "image on the page"):
            return self.on_the_page(rng, server, ("image on the page", "text", "masked text").index(kind))
        elif kind == "page left":
            return self.on_the_page(rng, server, rng.randrange(3), leave=True)
        elif kind == "left":
            whole = demo_server.whole_request(label=1, seed=rng.randrange(9), cfg=rng.choice((1, 3)))
            server.raw(whole[: rng.choice((-5, None))], rng.choice((0, 0.02, 0.1)))
            return "gone"
        elif kind == "garbage":
            body, expected, sentence = rng.choice(demo_server.GARBAGE)
            status, content = server.ask("POST", "/v1/images", body, JSON)
            refused = status == expected and sentence in json.loads(content)["error"]
            check(refused, (body[:50], status, content))
            return f"{status}, a sentence"
        elif kind == "stranger":
            return self.stranger(rng, server)
        elif kind == "on the page, refused":
            shown = [*server.visit(1, ["", 8, 0, 0, True], f"{rng.getrandbits(60):x}")][-1]
            check("the prompt is empty" in shown, shown)
            return "a sentence"
        elif kind in ("slow", "no sentence of HTTP"):
            head = b"POST /v1/images HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Length: 50\r\n\r\n{"
            sent, status = head[: rng.choice((0, 30, None))], "408"
            if kind != "slow":
                sent, status = rng.choice((b"\x00\xff\r\n\r\n", b"A" * 100_000)), "400"
            answer = server.told(sent)
            check(answer.startswith(b"HTTP/1.1 " + status.encode()), answer)
            return f"{status}, closed"
        elif kind == "flood":
            with ThreadPoolExecutor(3 * QUEUE) as pool:
                asked = [pool.submit(self.image, rng, server) for _ in range(3 * QUEUE)]
            for each in asked:
                self.counts["image of a flood", each.result()] += 1
        return "200"

    def stranger(self, rng: random.Random, server: demo_server.Server) -> str:
        """Other headers, hosts, routes and methods than there are."""
        method, path, body, headers, expected = rng.choice((
            ("POST", "/v1/images", b'{"label": 0}', {"Content-Type": "text/plain"}, (415,)),
            ("POST", "/v1/images", b" " * (2**16 + 1), JSON, (413,)),
            ("POST", "/v1/images", b'{"label": 0}', {**JSON, "Host": "evil.example"}, (421,)),
            ("POST", "/v1/images", b'{"label": 0}', {**JSON, "Origin": "https://evil.example"}, (421,)),
            ("GET", "/", None, {"Host": ""}, (421,)),
            (rng.choice(("DELETE", "PUT", "GET")), "/v1/images", None, {}, (404, 405)),
            ("GET", rng.choice(ROUTES), None, {}, (403, 404)),
            ("POST", "/gradio_api/queue/join", rng.choice((b"{", b"[]", b"{}")), JSON, (422,)),
        ))  # fmt: skip
        status, content = server.ask(method, path, body, headers)
        check(status in expected, (method, path, headers, status, content))
        return f"{status}, refused"

    def _same(self, key: object, answer: object) -> None:
        first = str(self._answers.setdefault(key, answer))
        at = next((i for i, (a, b) in enumerate(zip(first, str(answer))) if a != b), len(first))
        here = slice(max(0, at - 80), at + 80)
        check(first == str(answer), f"{key}: before ...{first[here]}... now ...{str(answer)[here]}...")

    def client(self, number: int) -> None:
        rng = random.Random(f"{self.seed} {number}")
        while not self._stop.wait(rng.expovariate(8)):
            while self._restarts % 2 and not self._stop.wait(0.05):
                pass
            before, kind = self._restarts, rng.choices([*KINDS], [*KINDS.values()])[0]
            try:
                outcome = self.request(kind, rng)
            except (OSError, http.client.HTTPException, ValueError, Unexpected, AssertionError) as error:
                outcome = "cut off by a restart"
                if self._restarts == before and not before % 2:
                    outcome = "UNEXPECTED"
                    self.problem(f"{kind}: {type(error).__name__}: {error}")
            self.counts[kind, outcome] += 1

    def stop(self) -> None:
        """Ends the server as a service manager does: in good order, with nothing to be explained."""
        try:
            told = self.server.stop()
            code = self.server.process.returncode
            check(code == 143, f"the server ended with {code}: {told[-300:]}")
            known = ("compiling;", "Invalid HTTP request", "cspd-jax: terminated", "WARNING: ")
            lines = [line for line in told.splitlines() if not any(each in line for each in known)]
            check(not lines, f"{len(lines)} lines in the log: " + " | ".join(lines))
        except (Unexpected, subprocess.TimeoutExpired, ValueError) as error:
            self.problem(str(error))

    def problem(self, told: str) -> None:
        self.problems.append(told)
        print(f"\n{told}", flush=True)

    def measure(self) -> tuple[float, ...]:
        """RSS in MB, threads, open files."""
        proc = Path("/proc") / str(self.server.process.pid)
        status = dict(line.split(":", 1) for line in (proc / "status").read_text().splitlines())
        return int(status["VmRSS"].split()[0]) / 1000, int(status["Threads"]), len(os.listdir(proc / "fd"))

    def run(self) -> None:
        clients = [threading.Thread(target=self.client, args=(i,)) for i in range(CLIENTS)]
        begin, restarts = time.monotonic(), [part * self.seconds for part in RESTARTS]
        for each in clients:
            each.start()
        with contextlib.suppress(KeyboardInterrupt):
            while (now := time.monotonic() - begin) < self.seconds:
                if restarts and now > restarts[0]:
                    restarts.pop(0)
                    self._restarts += 1
                    self.stop()
                    self.server = demo_server.Server(*self._options)
                    self._restarts += 1
                if now > len(self.samples) * min(60.0, self.seconds / 60):
                    self.samples.append(self.measure())
                rss, threads, files = self.samples[-1]
                told = (
                    f"{now / 60:.1f} min, {self.counts.total()} requests, {len(self.problems)} unexpected, "
                )
                told += f"{rss:.0f} MB, {threads:g} threads, {files:g} files  "
                print(f"\r{told}", end="", file=sys.stderr)
                time.sleep(min(1.0, self.seconds / 60))
        self._stop.set()
        for each in clients:
            each.join(150)
        try:
            self.server.until_idle()
            ends = sum(self.server.count(name) for name in ("finished", "cancelled", "timed_out", "failed"))
            check(ends == self.server.count("accepted"), "a request has no end")
            check(not self.server.count("failed") + self.server.count("timed_out"), "requests failed")
        except (OSError, Unexpected, AssertionError) as error:
            self.problem(f"at the end: {error}")
        self.stop()

    def table(self) -> str:
        """What was asked and what became of it, and what grew, which counts as unexpected."""
        lines = [f"{'requests':<24}{'outcome':<24}count"]
        lines += [f"{kind:<24}{end:<24}{n}" for (kind, end), n in sorted(self.counts.items())]
        if self.latencies:
            times = "  ".join(f"p{p} {np.percentile(self.latencies, p):.3f} s" for p in (50, 95, 99))
            lines.append(f"latency of {len(self.latencies)} images: {times}")
        tenth = max(1, len(self.samples) // 10)
        for name, values in zip(MOST_GROWTH, zip(*self.samples)):
            begin, end = map(statistics.median, (values[tenth : 2 * tenth] or values, values[-tenth:]))
            most = max(MOST_GROWTH[name], 0.05 * begin if "MB" in name else 0)
            lines.append(f"{name}: {begin:g} at the beginning, {end:g} at the end, {max(values):g} at most")
            if end - begin > most:
                self.problems.append(f"{name} grew by {end - begin:g}, more than {most:g}")
        return "\n".join([*lines, *self.problems, f"unexpected: {len(self.problems)}"])
