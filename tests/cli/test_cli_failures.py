"""What ends a command: requests that cannot be, the system's refusals, signals, readers that go away."""

import argparse
import errno
import io
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

from cspd_jax import __main__ as cli
from cspd_jax._utils import files
from cspd_jax._utils import progress as bars
from cspd_jax.cli import _failures, generate, info
from cspd_jax.cli._generate_options import say_what_is_less
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
        (["train", "--preset", "", "--out", "made"], "preset '' is unknown"),
        (["distill", "--preset", "", "--out", "made"], "preset '' is unknown"),
        (["generate", "--n", DIGITS], "'9999999999999999999999999999999999999999...' is not a positive"),
        (["generate", "--seed", DIGITS], "...' is not a whole number from 0 to 4294967295"),
        (["generate", "--labels", DIGITS], "... is out of range: the model has classes 0 to 7"),
        (["generate", "--labels", "x" * 5000], "...' is unknown"),
        (["generate", "--out", ""], "the name of the folder for the results is empty"),
        (["generate", "--gamma", "4"], "--gamma needs a method to go with: add --method self or cspd"),
        (["generate", "--sigma", "off"], "--sigma needs a method to go with: add --method cspd"),
        (["train", "--out", ""], "the name of the folder is empty"),
        (["train", "--out", "/proc/nowhere/run"], "/proc/nowhere/run cannot be written"),
        (["train", "--out", "run", "--data", "here"], "the image folder 'here' does not exist"),
        (
            ["train", "--out", "run", "--data", ".", "--preset", "glyphs"],
            "it goes with the presets folder and",
        ),
        (["train", "--out", "run", "--preset", "folder"], "say where they are with --data DIR"),
        (["masked", "--out", ""], "the name of the folder is empty"),
        (["convert", "here", ""], "the new folder is ''; it must be named by a string or a path"),
        (["convert", "", "there"], "the name of what should be converted is empty"),
        (["text", "--prompt-file", "/dev/null"], "/dev/null is empty; a prompt needs"),
        (
            ["masked", "--texts", "4", "--confidence", "random"],
            "not with --temperature, --place-temperature or",
        ),
        (["text", "--prompt", "a\udcff"], "is no text: character 1 is not Unicode"),
        (["masked", " "], "unrecognized arguments: ' '"),
        (["generate", "--metod", "plain"], "unrecognized arguments: --metod plain; is --method meant?"),
        (["genrate"], "is generate meant?"),
        (["generate", "--cfg", "１２"], "'１２' is not a number"),
        (["generate", "--temperature", "1_0"], "'1_0' is not a number"),
        (["text", "--method", "tree", "--tree", ",".join(["2"] * 40)], "a tree may have 4096 drafts"),
        (
            ["train", "--preset", "glyphs", "--out", "x", "--batch", "2", "--set", "batch=64"],
            "--batch and --set batch say",
        ),
        (["text", "--prompt-ids", "１２"], "'１２' is not a list of whole"),
        (["text", "--prompt-ids", "1099511627776"], "1099511627776 in a prompt is no id"),
        (["text", "--prompt", "a", "--new-tokens", "1000000000"], "more than the 1024 positions"),
        (["text", "--draft", "nosuch"], "--draft nosuch is none of lookup, int8, int4, text-default"),
        (["text", "--target", "default"], "default is an image model; it goes with cspd-jax generate"),
        (["generate", "--target", "text-default"], "text-default is a language model; it goes with cspd-jax"),
        (["generate", "--out", "/proc/xx"], "/proc/xx cannot be made: /proc is not writable"),
        (["convert", "default", "/proc/xx"], "/proc/xx cannot be made: /proc is not writable"),
        (["text", "--prompt-file", "/dev/zero"], "/dev/zero has more than 16 MiB"),
        (["text", "--prompt-ids", "1,x" * 5000], "...' is not a list of whole numbers"),
        (["generate", "--cfg", "1e39"], "cfg is 1e+39; it must be at most 3e+38"),
        (["text", "--method", "plain", "--gamma", "3"], "--gamma is for the methods that draft"),
        (["text", "--method", "plain", "--adapt"], "--adapt is for the methods that draft"),
        (
            ["train", "--out", "run", "--preset", "text-draft", "--set", "data_share=0.5"],
            "data_share is for drafts that are",
        ),
        (
            ["train", "--out", "run", "--preset", "text-draft", "--set", "model.known_ids=3"],
            "texts are bytes, and have 257",
        ),
        (
            ["train", "--out", "run", "--preset", "words", "--set", "steps=1_0"],
            "steps is a whole number, not '1_0'",
        ),
        (
            ["train", "--out", "run", "--preset", "mar-base", "--set", "data.held_out=1"],
            "held_out is 1, which holds out",
        ),
        (
            ["distill", "--out", "run", "--preset", "text-states"],
            "a head learns from a target's answers to prompts; --target is missing",
        ),
        (["train", "--out", "run", "--steps", "2", "--stop-at", "5"], "--stop-at 5 is beyond the run"),
        (["train", "--out", "run", "--stream", "99999"], "99999 is more than 256 processes"),
        (["distill", "--out", "run", "--samples", "10"], "add --from target or both"),
        (["text", "--method", "tree", "--gamma", "3"], "--gamma is not for draft trees"),
        (
            ["distill", "--out", "run", "--samples", "1000000000"],
            "--samples is 1000000000; it must be at most 1048576",
        ),
    ],
)
def test_what_cannot_be(arguments, sentence, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert command(*arguments) == 2
    told = capsys.readouterr().err
    assert sentence in told.splitlines()[-1] and told.count("\n") <= 2 and len(told) < 4000
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


def test_a_prompt_that_nobody_writes(tmp_path, capsys):
    os.mkfifo(tmp_path / "pipe")
    assert cli.main(["text", "--prompt-file", str(tmp_path / "pipe")]) == 2
    assert "pipe is empty; a prompt needs" in capsys.readouterr().err


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


@pytest.mark.quick("JAX_PLATFORMS-nowhere", "JAX_ENABLE_X64-maybe")
@pytest.mark.parametrize(
    "name, value",
    [
        ("JAX_PLATFORMS", "nowhere"),
        ("JAX_ENABLE_X64", "maybe"),
        ("JAX_TRANSFER_GUARD", "disallow"),
        ("JAX_NUMPY_RANK_PROMOTION", "raise"),
    ],
)
def test_what_the_environment_tells_jax(name, value, tmp_path):
    command = [sys.executable, "-m", "cspd_jax", "generate", "--method", "plain", "--labels", "0"]
    ended = subprocess.run(
        command, cwd=tmp_path, env={**os.environ, name: value}, capture_output=True, text=True, timeout=60
    )
    assert ended.returncode == 2 and ended.stderr.count("\n") == 1, ended.stderr
    assert f"{name} is '{value}'" in ended.stderr or f"{name.lower()} is '{value}'" in ended.stderr
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
@pytest.mark.parametrize("closed", [">&-", "2>&-", "<&- >&- 2>&-"])
@pytest.mark.parametrize(
    "asked", ["info default", pytest.param("generate --target model", marks=pytest.mark.slow)]
)
def test_closed_streams(asked, closed, tmp_path):
    """What was asked for is made, and nothing is written into it in their place."""
    tiny.save_mar(tmp_path / "model", tiny.PIXELS)
    how = " --method plain --num-iter 2 --steps 4 --out made" * asked.startswith("generate")
    line = f"'{sys.executable}' -m cspd_jax {asked}{how} {closed}"
    assert subprocess.run(["bash", "-c", line], cwd=tmp_path, timeout=120).returncode == 0
    if how:
        assert json.loads((tmp_path / "made" / "report.json").read_text())["lossless"]


def test_a_working_directory_that_was_removed(tmp_path):
    line = f"mkdir gone && cd gone && rmdir ../gone && '{sys.executable}' -m cspd_jax generate"
    ended = subprocess.run(["bash", "-c", line], cwd=tmp_path, capture_output=True, text=True, timeout=60)
    assert ended.returncode == 2 and "the working directory has been removed" in ended.stderr


def test_a_name_of_matplotlib_that_is_none():
    """Charts are drawn all the same: no window is opened."""
    code = "from cspd_jax._utils import plotting; plotting.prepare(); from matplotlib.figure import Figure"
    environment = {**os.environ, "MPLBACKEND": "nonsense"}
    ended = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True)
    assert not ended.returncode, ended.stderr


def test_charts_that_cannot_be_drawn_cost_no_images(monkeypatch, capsys):
    def fails(*_):
        raise ValueError("no such font")

    monkeypatch.setattr("cspd_jax.reports.pages", fails)
    assert generate._charts(None, []) == {}
    assert "warning: the charts are left out" in capsys.readouterr().err


def test_a_run_is_not_resumed_among_other_files(tmp_path, capsys):
    (tmp_path / "holiday.png").write_bytes(b"")
    assert command("train", "--preset", "digits", "--resume", "--out", tmp_path) == 2
    assert "holds other files, and no run that could be resumed" in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["holiday.png"]


def test_alarms_of_others_reach_them():
    heard = []
    before = signal.signal(signal.SIGALRM, lambda number, frame: heard.append(number))
    try:
        with pytest.raises(_failures.Terminated), _failures.terminable():
            signal.raise_signal(signal.SIGALRM)
        assert heard == [signal.SIGALRM]
    finally:
        signal.signal(signal.SIGALRM, before)


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="no /dev/full")
def test_a_full_standard_error_costs_no_results():
    """Code 2 of a refusal, and the output of what is done."""
    for arguments, code in ((["info", "nosuch"], 2), (["info", "default"], 0)):
        with open("/dev/full", "w") as full:
            made = [sys.executable, "-m", "cspd_jax", *arguments]
            ended = subprocess.run(made, stdout=subprocess.PIPE, stderr=full, timeout=120)
        assert ended.returncode == code and bool(ended.stdout) == (code == 0)


def test_bars_count_no_step_that_was_compiled(monkeypatch):
    spent, now = [0.0], [0.0]
    monkeypatch.setattr(bars, "compile_seconds", lambda: spent[0])
    bar = bars.Bar(total=4, file=io.StringIO())
    monkeypatch.setattr(bars.time, "time", lambda: now[0])
    monkeypatch.setattr(bar, "_time", lambda: now[0])
    bar.start_t = bar._since = bar.last_print_t = 0.0
    assert "compiling" in bar.fp.getvalue()
    for seconds, compiled in ((60.0, 50.0), (2.0, 0.0), (30.0, 28.0), (2.0, 0.0)):
        now[0] += seconds
        spent[0] += compiled
        bar.update()
    told = bar.format_dict
    assert told["n"] == 4 and told["elapsed"] == 4.0 and told["initial"] == 2
    bar.close()


def test_numbers_that_jax_was_told_to_refuse_are_a_sentence():
    told = _failures.user_message(FloatingPointError("invalid value (nan) encountered in scan"))
    assert "which JAX was told to refuse: invalid value (nan)" in told


SLEEPS = """
import signal, sys, time
signal.signal(signal.SIGINT, signal.default_int_handler)  # ignored where tests run in the background
from cspd_jax import __main__ as cli
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
import signal, sys, time
signal.signal(signal.SIGINT, signal.default_int_handler)
from cspd_jax import __main__ as cli
from cspd_jax.cli import _failures, generate, info
from cspd_jax.cli._generate_options import say_what_is_less
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


@pytest.mark.parametrize(
    "number, ended", [(signal.SIGTERM, (143, "terminated")), (signal.SIGINT, (130, "interrupted"))]
)
@pytest.mark.parametrize("where", ["collector", "library"])
def test_a_signal_is_not_lost(where, number, ended):
    """In a destructor, where exceptions are ignored; and in a library that ignores them."""
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    process = subprocess.Popen([sys.executable, "-c", SWALLOWS, where], **pipes)
    assert process.stdout.readline() == "ready\n"
    process.send_signal(number)
    _, told = process.communicate(timeout=30)
    assert (process.returncode, told) == (ended[0], f"cspd-jax: {ended[1]}\n")


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


@pytest.mark.slow
def test_a_reader_that_goes_away():
    script = f"{sys.executable} -m cspd_jax info default | head -c 5"
    done = subprocess.run(["bash", "-c", script], capture_output=True, text=True)
    assert done.stdout == "path:"[:5] and "Traceback" not in done.stderr and "Exception" not in done.stderr


@pytest.mark.slow
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


def test_ctrl_c_while_the_program_is_loaded_is_one_sentence():
    code = """
import runpy, sys
class Interrupted:
    def find_spec(self, name, *_):
        if name == "cspd_jax.tools":
            raise KeyboardInterrupt
sys.meta_path.insert(0, Interrupted())
runpy.run_module("cspd_jax", run_name="__main__")
"""
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert (ended.returncode, ended.stderr) == (130, "cspd-jax: interrupted\n")


@pytest.mark.parametrize(
    "cfg, labels, said", [(3.0, [-1, -1], True), (3.0, [-1, 0], False), (1.0, [-1], False)]
)
def test_guidance_of_images_without_a_class(capsys, cfg, labels, said):
    say_what_is_less(argparse.Namespace(num_iter=None, gamma=None, cfg=cfg), 2, labels)
    assert ("--cfg guides towards a class, and the images have none" in capsys.readouterr().err) is said
