"""Several processes, on one host or many, as one program on all their devices.

JAX's runtime connects them. Every process runs the same program; the first one speaks and writes. If one
fails or vanishes, the others would wait for it: a thread in each looks for that, and ends its process.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import functools
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any, NoReturn, TextIO

import jax

from cspd_jax._utils.threads import beside
from cspd_jax.errors import UserError, shown

_FAILED = "cspd_jax/failed"
_LOOK = 0.5  # seconds between looks for a process that failed
_A_WHILE = 3  # seconds of waiting of which nothing is said
_SILENCE = 10  # seconds after which a process that says nothing is gone
_OF_CONNECTIONS = ("Gloo", "NCCL", "Connection closed by peer", "coordination service", "UNAVAILABLE")
_ALONE = (
    "the processes did not meet within {:g} s; start all of them, with the same HOST:PORT of the first one"
    " and N, and another I for each"
)
_ending = threading.Lock()
_connected: dict[str, Any] = {}


def initialize(where: str, patience: float = 120.0) -> None:
    """Connects this process to the others, before any device is used.

    where: "auto" finds them as jax.distributed does (SLURM, Open MPI, Cloud TPU, Kubernetes, or the variables
        JAX_COORDINATOR_ADDRESS, JAX_NUM_PROCESSES and JAX_PROCESS_ID); or HOST:PORT,I,N: process I of N, the
        first of which can be reached at HOST:PORT.
    patience: seconds to wait for the others.
    """
    given = {} if where == "auto" else _parse(where)
    with contextlib.suppress(AttributeError):  # the runtime of older versions ends the others by itself
        jax.config.update("jax_enable_recoverability", True)
    impatience = threading.Timer(patience, _end, (_ALONE.format(patience), sys.stderr))  # the runtime aborts
    impatience.daemon = True
    impatience.start()
    connect = functools.partial(
        jax.distributed.initialize,
        **given,
        initialization_timeout=10 * int(patience),
        heartbeat_timeout_seconds=_SILENCE,
    )
    try:
        _in_a_thread(connect, f"waiting for the other processes, for up to {patience:g} s")
    except (RuntimeError, ValueError) as error:
        reason = " ".join(str(error).split())[:200]
        raise UserError(
            f"the processes cannot be connected ({reason}); give --distributed HOST:PORT,I,N to each of them"
        ) from None
    finally:
        impatience.cancel()
    if jax.process_count() == 1:
        return
    _connected.update(client=_client(), stderr=_only_the_first_speaks())
    threading.Thread(target=_watch, daemon=True).start()


def _in_a_thread(call: Callable[[], Any], waiting: str) -> None:
    """Calls what waits in native code, where it would hear no signal; says so if it takes a while."""
    connected, begun = beside(call)[0], time.monotonic()
    while not concurrent.futures.wait([connected], _LOOK).done:
        if waiting and time.monotonic() - begun > _A_WHILE:
            print(waiting, file=sys.stderr, flush=True)
            waiting = ""
    connected.result()


def _only_the_first_speaks() -> TextIO:
    """Silences the others, and keeps what the runtime prints out of the results. Returns the stream for
    errors."""
    stderr = os.fdopen(os.dup(2), "w", buffering=1)
    if jax.process_index() == 0:
        sys.stdout = os.fdopen(os.dup(1), "w")
        os.dup2(2, 1)
        return stderr
    nowhere = os.open(os.devnull, os.O_WRONLY)
    for stream in (1, 2):
        os.dup2(nowhere, stream)
    return stderr


def _parse(where: str) -> dict[str, Any]:
    parts = where.split(",")
    numbers = [int(n) for n in parts[1:] if n.isascii() and n.isdecimal() and len(n) < 7]
    host, colon, port = parts[0].rpartition(":")
    good_port = port.isascii() and port.isdecimal() and len(port) < 6 and 0 < int(port) < 2**16
    if len(numbers) != 2 or len(parts) != 3 or not (host and colon and good_port):
        raise UserError(
            f"--distributed is {shown(where)}; it must be auto, or HOST:PORT,I,N for process I (from 0) of N"
        )
    if numbers[0] >= numbers[1]:
        raise UserError(f"--distributed names process {numbers[0]} of {numbers[1]}; they are counted from 0")
    return {"coordinator_address": parts[0], "process_id": numbers[0], "num_processes": numbers[1]}


def is_alone() -> bool:
    """Whether this is the only process."""
    return not _connected


def is_first() -> bool:
    """Whether this is the process that speaks and writes."""
    return not _connected or jax.process_index() == 0


def fail(sentence: str, code: int) -> None:
    """Ends this process, and with it the others; the first process says the sentence. Returns if this is the
    only process."""
    if not _connected:
        return
    with contextlib.suppress(Exception):  # unless it is another that failed first
        _connected["client"].key_value_set(_FAILED, f"process {jax.process_index()}: {sentence}")
    if jax.process_index() == 0:
        _end(sentence, _connected["stderr"], code)
    time.sleep(4 * _LOOK)  # for the first process to hear of it
    os._exit(code)


def lost(error: BaseException) -> str | None:
    """What to say of an error that comes from another process's end; None if it does not."""
    if not _connected or not any(word in str(error) for word in _OF_CONNECTIONS):
        return None
    time.sleep(2 * _LOOK)  # the thread that looks for the reason may find it
    return "the connection to another process was lost"


def meet(where: str) -> None:
    """Waits until all processes are here."""
    if _connected:
        from jax.experimental import multihost_utils

        multihost_utils.sync_global_devices(where)


@contextlib.contextmanager
def first_alone(what: str) -> Iterator[None]:
    """The first process runs the block before the others do, who then find on disk what it left there."""
    if not is_first():
        meet(what)
    yield
    if is_first():
        meet(what)


def finish() -> None:
    """At the end: waits for all processes. The first one, which connects the others, leaves last."""
    if not _connected:
        return
    meet("the end")
    _connected["ended"] = True
    if jax.process_index() == 0:
        time.sleep(2 * _LOOK)
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    os._exit(0)


def _client():
    from jax._src import distributed  # the coordination service has no public name

    return distributed.global_state.client


def _watch() -> None:
    """Ends this process when another one has failed (one sentence, from the first process) or is gone."""
    client, stderr = _connected["client"], _connected["stderr"]
    everyone = list(range(jax.process_count()))
    looked = time.monotonic()
    while True:
        time.sleep(_LOOK)
        if "ended" in _connected:
            return
        told = _ask(lambda: client.key_value_try_get(_FAILED))
        if told:
            _end(told if jax.process_index() == 0 else None, stderr)
        if time.monotonic() - looked < _SILENCE / 4:
            continue
        looked = time.monotonic()
        try:
            alive = client.get_live_nodes(everyone)
        except Exception:  # nobody answers
            _end("process 0, which connects the others, is gone", stderr)
        gone = [i for i in everyone if i not in alive]
        if gone:
            _end(f"process {gone[0]} is gone" if jax.process_index() == 0 else None, stderr)


def _ask(question: Callable[[], Any]) -> Any:
    """The answer; None if there is none."""
    try:
        return question()
    except Exception:  # not there (yet); whether anybody answers is found out by other means
        return None


def _end(sentence: str | None, stderr: TextIO, code: int = 2) -> NoReturn:
    _ending.acquire()  # whoever comes second has nothing to add
    if sentence is not None:
        print(f"cspd-jax: error: {sentence}", file=stderr, flush=True)
        time.sleep(2 * _LOOK)  # of the first process, which the others ask why
    os._exit(code)
