"""What ends a command: requests that cannot be, the system's refusals, signals, readers that go away."""

import errno
import json
import logging
import os
import re
import signal
import subprocess
import sys
import threading
import time

import pytest
import tiny

from cspd_jax._utils import files
from cspd_jax.apps import cli
from cspd_jax.cli import _failures, info
from cspd_jax.errors import UserError


def command(*arguments):
    try:
        return cli.main([str(a) for a in arguments])
    except SystemExit as refused:  # by argparse
        return refused.code


DIGITS = "9" * 5000


@pytest.mark.parametrize(
    "arguments, sentence",
    [
        (["generate", "--n", "1000000000"], "images would take"),
        (["generate", "--n", DIGITS], "'9999999999999999999999999999999999999999...' is not a positive"),
        (["generate", "--seed", DIGITS], "...' is not a whole number from 0 to 4294967295"),
        (["generate", "--labels", DIGITS], "... is out of range: the model has classes 0 to 9"),
        (["generate", "--labels", "x" * 5000], "...' is unknown"),
        (["generate", "--out", ""], "the name of the folder for the results is empty"),
        (["generate", "--gamma", "4"], "--gamma needs a method to go with: add --method self or cspd"),
        (["generate", "--sigma", "off"], "--sigma needs a method to go with: add --method cspd"),
        (["evaluate", "--n", "1000000000"], "ask for fewer (--n)"),
        (["evaluate", "--train-images", "1000000000"], "search fewer (--train-images)"),
        (["evaluate", "--out", ""], "the name of the folder is empty"),
        (["train", "--out", ""], "the name of the folder is empty"),
        (["train", "--out", "/proc/nowhere/run"], "/proc/nowhere/run cannot be written"),
        (["train", "--out", "run", "--data", "here"], "it goes with --preset mar-base"),
        (["text", "--prompt-file", "/dev/zero"], "/dev/zero has more than 16 MiB"),
        (["text", "--prompt-ids", "1,x" * 5000], "...' is not a list of whole numbers"),
    ],
)
def test_what_cannot_be(arguments, sentence, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert command(*arguments) == 2
    told = capsys.readouterr().err
    assert sentence in told and "Traceback" not in told and len(told) < 4000
    assert list(tmp_path.iterdir()) == []


def no_space(*_, **__):
    raise OSError(errno.ENOSPC, "No space left on device", "samples")


def wrapped(*_):
    try:
        no_space()
    except OSError as error:
        raise ValueError("a library's own words") from error


def too_long(*_):
    os.stat("x" * 5000)


def refused(*_):
    raise PermissionError(errno.EACCES, "Permission denied", "there")


def orbax(*_):
    raise ValueError("OUT_OF_RANGE: Error writing local file: No space left [os_error_code='28']")


def memory(*_):
    raise MemoryError


def pipe(*_):
    raise BrokenPipeError(errno.EPIPE, "Broken pipe")


@pytest.mark.parametrize(
    "raised, sentence",
    [
        (no_space, "samples: the disk is full"),
        (wrapped, "samples: the disk is full"),
        (orbax, "the disk is full"),
        (too_long, "File name too long"),
        (refused, "there: Permission denied"),
        (memory, "too little memory"),
        (pipe, "nobody reads the output any more"),
    ],
)
def test_refusals_of_the_system(raised, sentence, monkeypatch, capsys):
    monkeypatch.setattr(info, "run", raised)
    monkeypatch.setattr(_failures, "silence_output", lambda: None)
    assert command("info", "default") == 2
    told = capsys.readouterr().err
    assert told.startswith("cspd-jax: error: ") and sentence in told and told.count("\n") == 1


def test_what_takes_less_is_an_option_of_the_command(capsys):
    parser = cli.make_parser()
    for name, advice in _failures._LESS.items():
        with pytest.raises(SystemExit):
            parser.parse_args([name, "--help"])
        known = capsys.readouterr().out
        options = re.findall(r"--[a-z-]+", advice)
        assert options and all(option in known for option in options)
        assert advice in _failures.user_message(MemoryError(), name)


def test_a_mistake_of_the_program_is_not_hidden(monkeypatch):
    def missing(*_):
        try:
            os.stat("/nowhere/at/all")
        except OSError as error:
            raise KeyError("mistake") from error

    monkeypatch.setattr(info, "run", missing)
    with pytest.raises(KeyError):
        command("info", "default")


SLEEPS = """
import signal, sys, time
signal.signal(signal.SIGINT, signal.default_int_handler)  # ignored where tests run in the background
from cspd_jax.apps import cli
from cspd_jax._utils.files import written_beside
from cspd_jax.cli import info
def wait(args):
    with written_beside(args.path) as partial:
        partial.write_text("half")
        print("ready", flush=True)
        time.sleep(60)
info.run = wait
sys.exit(cli.main(["info", sys.argv[1]]))
"""


@pytest.mark.parametrize(
    "number, code, word",
    [(signal.SIGTERM, 143, "terminated"), (signal.SIGINT, 130, "interrupted"), (signal.SIGKILL, -9, "")],
)
def test_signals(tmp_path, number, code, word):
    """What is half written is removed; after SIGKILL by the next who writes there."""
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    process = subprocess.Popen([sys.executable, "-c", SLEEPS, tmp_path / "result"], **pipes)
    assert process.stdout.readline() == "ready\n"
    process.send_signal(number)
    _, told = process.communicate(timeout=30)
    assert process.returncode == code and word in told and "Traceback" not in told
    assert len(list(tmp_path.iterdir())) == (number == signal.SIGKILL)
    files.write_text(tmp_path / "result", "whole")
    assert [f.name for f in tmp_path.iterdir()] == ["result"]


SWALLOWS = """
import sys, time
from cspd_jax.apps import cli
from cspd_jax.cli import _failures, info
_failures._AGAIN = 0.3
class Callback:
    def __del__(self):
        print("ready", flush=True)
        time.sleep(0.5)
def wait(args):
    if sys.argv[1] == "collector":
        callback = Callback()
        del callback
    else:
        try:
            print("ready", flush=True)
            time.sleep(60)
        except BaseException:
            pass
    time.sleep(60)
info.run = wait
sys.exit(cli.main(["info", "x"]))
"""


@pytest.mark.parametrize("where", ["collector", "library"])
def test_a_signal_is_not_lost(where):
    """In a destructor, where exceptions are ignored; and in a library that ignores them."""
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    process = subprocess.Popen([sys.executable, "-c", SWALLOWS, where], **pipes)
    assert process.stdout.readline() == "ready\n"
    process.send_signal(signal.SIGTERM)
    _, told = process.communicate(timeout=30)
    assert process.returncode == 143 and told == "cspd-jax: terminated\n"


@pytest.mark.parametrize("raised, told", [(no_space, False), (None, True)])
def test_complaints_of_other_threads(raised, told, monkeypatch, capsys):
    """They are consequences where the command ends with a sentence, and are told otherwise."""

    def complain(*_):
        thread = threading.Thread(target=lambda: 1 / 0)
        thread.start()
        thread.join()
        logging.getLogger("absl").error("it went wrong")
        logging.getLogger("absl").warning("careful")
        if raised is not None:
            raised()

    monkeypatch.setattr(info, "run", complain)
    command("info", "default")
    err = capsys.readouterr().err
    assert ("ZeroDivisionError" in err) == told == ("it went wrong" in err)


def test_what_another_process_writes_stays(tmp_path):
    with files.written_beside(tmp_path / "result") as mine:
        mine.touch()
        files.write_text(tmp_path / "result", "other")
        assert mine.exists()
        mine.write_text("mine")
    assert (tmp_path / "result").read_text() == "mine"


def test_a_reader_that_goes_away():
    script = f"{sys.executable} -m cspd_jax info default | head -c 5"
    done = subprocess.run(["bash", "-c", script], capture_output=True, text=True)
    assert done.stdout == "path:"[:5] and "Traceback" not in done.stderr and "Exception" not in done.stderr


def test_an_ascii_terminal(tmp_path):
    environment = {**os.environ, "PYTHONIOENCODING": "ascii", "PYTHONUTF8": "0"}
    folder = tiny.save_mar(tmp_path / "café", tiny.PIXELS)
    argv = [sys.executable, "-m", "cspd_jax", "info", str(folder)]
    done = subprocess.run(argv, capture_output=True, text=True, env=environment)
    assert done.returncode == 0 and "caf\\xe9" in done.stdout


def test_images_are_written_before_they_are_compared(tmp_path, monkeypatch, capsys):
    """Ctrl-C in the comparison loses nothing."""
    from cspd_jax.image import comparison

    monkeypatch.chdir(tmp_path)
    folder = tiny.save_mar(tmp_path / "model", tiny.PIXELS)

    def interrupted(*_):
        time.sleep(0.01)
        raise KeyboardInterrupt

    monkeypatch.setattr(comparison, "beside_plain", interrupted)
    argv = ("generate", "--target", folder, "--method", "self", "--gamma", "1", "--compare", "--n", "1")
    assert command(*argv, "--labels", "0", "--num-iter", "2", "--out", "made") == 130
    assert {f.name for f in (tmp_path / "made").iterdir()} >= {"samples.npz", "samples.png", "report.json"}
    report = json.loads((tmp_path / "made" / "report.json").read_text())
    assert report["images"] == 1
    assert "the images are in made; comparing self with the plain sampler" in capsys.readouterr().err


def test_sizes_that_fit_are_not_refused():
    from cspd_jax.cli._arguments import check_fits

    check_fits("little", 2**20, "ask for less")
    with pytest.raises(UserError, match="much would take 1,048,576 GiB"):
        check_fits("much", 2**50, "ask for less")
