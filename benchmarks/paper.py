"""Makes the tables, figures and the formula of Continuous Speculative Decoding (arXiv
2411.11925), by name, with the models of this package.

    python benchmarks/paper.py --list
    python benchmarks/paper.py table1 equation35 --out paper
    python benchmarks/paper.py --out paper  # all items
    # Makes the table that docs/images.md shows.
    python benchmarks/paper.py table1 --respacing ddim100 --gamma 3 8
    # Makes figures with two draft lengths.
    python benchmarks/paper.py figure11 figure13 figure14 figure15 --gamma 2 4

Each item is written as FOLDER/NAME.json, NAME.md and NAME.png. An item whose JSON
exists is not made again. Every row says exact or lossy. The paper itself was not at
hand: its tables are quoted from public pages about it, and the values of its figures
were not available. To save time, the models of the package take 25 denoising steps, and
ways whose draft model drafts anew after each rejection have only the two smallest
gammas.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from charts import lines
from PIL import Image
from toy import Parser, begin, load, machine, timed_images, write_results

from cspd_jax import hub
from cspd_jax._utils.files import write_text, written_beside
from cspd_jax.comparison import Request
from cspd_jax.coupling.draft_length import speedup
from cspd_jax.image import (
    DraftSpeculation,
    Known,
    PaperCriterion,
    Plain,
    Released,
    SelfSpeculation,
    prepare,
)
from cspd_jax.image.bound import bind
from cspd_jax.image.options import Options
from cspd_jax.keys import seed_key
from cspd_jax.reports.pictures import acceptance_maps, titled

# Both tables are by (target, draft, gamma). TABLE1 has the acceptance and the speed-ups
# at the batches 1, 8, 128 and 256. TABLE3 has the acceptance without and with
# alignment. The file also quotes acceptance and speed-up by prefill, which is table 4
# and is not made.
QUOTED = json.loads((Path(__file__).parent / "results" / "paper.json").read_text())
TABLE1 = {tuple(row[:3]): (row[3], row[4:]) for row in QUOTED["table1"]}
TABLE3 = {tuple(row[:3]): tuple(row[3:5]) for row in QUOTED["table3_and_4"]}
COST = 0.38  # the time of MAR-B divided by the time of MAR-H
PAIR = ("MAR-H", "MAR-B")  # the paper's pair with the largest gain, quoted beside ours
BESIDE = "paper (MAR-H, MAR-B)"

_PAPER = PaperCriterion()
METHODS: dict[str, Callable[..., Any]] = {
    "plain": lambda draft: Plain(),
    "self": lambda draft, **given: SelfSpeculation(**given),
    "path": DraftSpeculation,
    "released": Released,
    "paper": functools.partial(DraftSpeculation, criterion=_PAPER),
}
PLAIN: dict[str, Any] = {"method": "plain"}
SELF_CHAINS: dict[str, Any] = {"method": "self", "denoise": "speculative"}
RELEASED = "released: the published runner"
PAPER = "paper: Algorithm 1"
WAYS: dict[str, dict[str, Any]] = {
    RELEASED: {"method": "released"},
    PAPER: {"method": "paper"},
    "path, by the draft model": {"method": "path"},
    "self": {"method": "self"},
}
EMBEDDED = "ddim25"  # a quarter of the denoising steps of the package's models
FEW = 8  # images in a row
# The shares of known tokens, guidance scales and temperatures of figures 11, 13 and 14.
PREFILL = (0.0, 0.05, 0.15)
GUIDANCE = (1.0, 3.0, 5.0)
TEMPERATURES = (0.9, 1.0, 1.1)


class Table(NamedTuple):
    """A table with a title, the names of its columns, and rows of values. None is an
    empty cell."""

    title: str
    columns: Sequence[str]
    rows: list[Sequence[Any]]

    def markdown(self) -> str:
        """Returns the table as Markdown. Floats have three digits."""
        shown = lambda v: (
            "" if v is None else f"{v:.3g}" if isinstance(v, float) else str(v)
        )
        body = [
            self.columns,
            ["---"] * len(self.columns),
            *([shown(v) for v in row] for row in self.rows),
        ]
        return f"**{self.title}**\n\n" + "\n".join(
            f"| {' | '.join(row)} |" for row in body
        )


@dataclasses.dataclass(frozen=True)
class Made:
    """The images that one way made, with their info. `seconds` is the time per
    image."""

    tokens: np.ndarray
    request: Request
    info: Any
    seconds: float

    @property
    def verdict(self) -> str:
        """Whether the images have the target's distribution: exact or lossy."""
        return "exact" if self.info.exact else "lossy"

    @property
    def calls(self) -> int:
        """The number of sequential calls of all networks."""
        return self.info.sequential

    @property
    def acceptance(self) -> float | None:
        """The share of the tested drafts that were accepted."""
        return self.info.acceptance

    @property
    def marks(self) -> np.ndarray:
        """[N, L] the fate of each token's draft: above 0 it was accepted, below 0
        rejected."""
        return np.asarray(self.info.trace.marks)

    @property
    def error(self) -> float | None:
        """The standard error of the acceptance, if images are independent."""
        tested, accepted = (
            np.sum(a, axis=1).astype(float) for a in (self.marks != 0, self.marks > 0)
        )
        if self.acceptance is None or len(tested) < 2:
            return None
        errors = accepted - self.acceptance * tested
        return float(
            np.sqrt(np.sum(errors**2) * len(errors) / (len(errors) - 1)) / tested.sum()
        )


@dataclasses.dataclass(frozen=True, eq=False)
class Runs:
    """Makes images by a pair of models. Each way is run once, and its images are
    kept."""

    args: Any
    target: Any
    draft: Any
    kept: dict[str, Made] = dataclasses.field(default_factory=dict)

    def request(
        self, way: dict[str, Any], images: int, prefill: float = 0.0, **sampling: Any
    ) -> Request:
        """Returns the request for a way. The class of image i is i modulo the number of
        classes.

        prefill: the share of tokens that are known. They are at random positions, and
            come from images of the plain sampler.
        sampling: options, by name.
        """
        labels = np.arange(images) % self.target.config.num_classes
        given = dict(way)
        denoise = given.pop("denoise", "plain")
        make = METHODS[given.pop("method")]
        method = make(self.draft, **given)
        final_noise = method.needs_final_noise is not False
        if prefill:
            tokens = self(PLAIN, images).tokens
            number = round(prefill * tokens.shape[1])
            ranks = np.random.default_rng(0).permuted(
                np.tile(np.arange(tokens.shape[1]), (images, 1)), axis=1
            )
            sampling["known"] = Known(tokens, ranks < number)
        options = Options(
            denoise=denoise,
            final_noise=final_noise,
            respacing=self.args.respacing,
            **sampling,
        )
        return Request(seed_key(0), self.target, labels, method, options)

    def __call__(
        self, way: dict[str, Any], images: int = FEW, **sampling: float
    ) -> Made:
        """Returns the images of a way, which are made if they are not kept. Their
        seconds are the least of several runs."""
        images = min(images, self.args.images or images)
        key = str([sorted(way.items(), key=str), images, sampling])
        if key not in self.kept:
            request = self.request(way, images, **sampling)
            tokens, info, seconds = timed_images(request)
            times = [seconds]
            while not self.args.toy and sum(times) < 4 and len(times) < 6:
                times.append(timed_images(request)[2])
            self.kept[key] = Made(tokens, request, info, min(times) / images)
        return self.kept[key]

    def gammas(self, name: str) -> list[int]:
        """Returns the gammas of a way. A way that drafts anew after each rejection has
        only the two smallest gammas."""
        few = WAYS[name]["method"] in ("path", "paper")
        return self.args.gamma[: 2 if few else None]

    @property
    def least(self) -> int:
        return self.args.gamma[0]

    @property
    def middle(self) -> int:
        return self.args.gamma[:2][-1]


Item = tuple[list[Table], Image.Image]
ITEMS: dict[str, tuple[str, Callable[[Runs], Item]]] = {}


def item(name: str, title: str) -> Callable:
    """Registers a function that makes the item with this name."""
    return lambda make: ITEMS.setdefault(name, (title, make))[1]


def _published(name: str, gamma: int | None, batch: int | None = None) -> float | None:
    """Returns the paper's acceptance, or its speed-up at a batch, if the way is one of
    the paper's; else None."""
    if (
        name not in (RELEASED, PAPER)
        or (found := TABLE1.get((*PAIR, gamma or 0))) is None
    ):
        return None
    return (
        found[0] if batch is None else dict(zip((1, 8, 128, 256), found[1])).get(batch)
    )


def _timed(run: Runs, batch: int) -> list[tuple[str, int | None, Made]]:
    found = [
        ("plain", None, run(PLAIN, batch)),
        ("plain, with chains", None, run({**PLAIN, "denoise": "speculative"}, batch)),
    ]
    found += [(n, g, run(way, batch)) for n, g, way in _by_gamma(run)]
    both = run({**SELF_CHAINS, "gamma": run.middle}, batch)
    return [*found, ("self, with chains", run.middle, both)]


@item("table1", "Speed and acceptance by gamma and batch")
def table1(run: Runs) -> Item:
    rows: list[Sequence[Any]] = []
    charts = []
    backbones = lambda made: made.info.calls["backbone"].sequential
    for batch in run.args.batch:
        plain = run(PLAIN, batch)
        ratios: dict[str, list[float | None]] = {}
        for name, gamma, made in _timed(run, batch):
            backbone = float(backbones(plain) / backbones(made))
            faster = plain.seconds / made.seconds
            rows.append(
                (
                    name,
                    made.verdict,
                    gamma,
                    batch,
                    made.acceptance,
                    _published(name, gamma),
                    made.calls,
                    plain.calls / made.calls,
                    backbone,
                    made.seconds,
                    faster,
                    _published(name, gamma, batch),
                )
            )
            if name in WAYS:
                ratios.setdefault(f"{name} ({made.verdict})", []).append(faster)
        names = [str(gamma) for gamma in run.args.gamma]
        charts.append(
            ("", lines(ratios, f"seconds, plain / way, batch {batch}", "gamma", names))
        )
    columns = (
        "way",
        "exact or lossy",
        "gamma",
        "batch",
        "acceptance",
        f"acceptance, {BESIDE}",
        "calls in sequence",
        "fewer calls",
        "fewer calls of the target's backbone",
        "seconds per image",
        "speed-up in seconds",
        f"speed-up, {BESIDE}",
    )
    theirs = [(*pair, alpha, *speeds) for pair, (alpha, speeds) in TABLE1.items()]
    names = [
        "target",
        "draft",
        "gamma",
        "acceptance",
        "batch 1",
        "batch 8",
        "batch 128",
        "batch 256",
    ]
    return [Table("Ours", columns, rows), Table("The paper's", names, theirs)], titled(
        charts
    )


@item("table3", "Acceptance without and with alignment of the chains")
def table3(run: Runs) -> Item:
    rows = []
    series = {}
    paper = TABLE3.get((*PAIR, run.least), (None, None))
    for name, criterion in (
        (PAPER, _PAPER),
        ("paper, inner temperature 42", PaperCriterion(inner_temperature=42.0)),
    ):
        ways = (dataclasses.replace(criterion, align=align) for align in (False, True))
        off, on = (
            run({**WAYS[PAPER], "gamma": run.least, "criterion": way}) for way in ways
        )
        rows.append(
            (
                name,
                on.verdict,
                run.least,
                off.acceptance,
                off.error,
                on.acceptance,
                on.error,
                *paper,
            )
        )
        series[f"{name} ({on.verdict})"] = [off.acceptance, on.acceptance]
    columns = [
        "way",
        "exact or lossy",
        "gamma",
        "own noise",
        "standard error",
        "shared noise",
        "standard error",
        f"{BESIDE}, own",
        f"{BESIDE}, shared",
    ]
    theirs = [(*pair, *found) for pair, found in TABLE3.items()]
    whole = Table(
        "The paper's", ["target", "draft", "gamma", "own noise", "shared noise"], theirs
    )
    chart = lines(
        series, "acceptance", "noise of the two chains", ["own", "shared"], top=1.0
    )
    return [Table("Ours", columns, rows), whole], chart


def _by_gamma(run: Runs) -> list[tuple[str, int, dict[str, Any]]]:
    """Returns the name of each way, its gammas, and the way with this gamma."""
    return [
        (name, gamma, {**way, "gamma": gamma})
        for name, way in WAYS.items()
        for gamma in run.gammas(name)
    ]


# The acceptances of each setting of each way.
Lines = dict[str, dict[str, list[float | None]]]


def _line(found: Lines, way: str, made: Made, setting: str) -> list[float | None]:
    """Returns the acceptances of a setting, which may be none yet."""
    return found.setdefault(f"{way} ({made.verdict})", {}).setdefault(setting, [])


def _charts(found: Lines, below: str, names: Sequence[Any]) -> Image.Image:
    """Draws a chart of the acceptance for each way, with a line for each setting."""
    names = [str(name) for name in names]
    return titled(
        [
            ("", lines(of, f"acceptance, {way}", below, names, 1.0))
            for way, of in found.items()
        ]
    )


@item("figure11", "Acceptance and speed by the share of known tokens")
def figure11(run: Runs) -> Item:
    rows = []
    found: Lines = {}
    for name, gamma, way in _by_gamma(run):
        for share in PREFILL:
            plain = run(PLAIN, prefill=share)
            made = run(way, prefill=share)
            fewer = plain.calls / made.calls
            faster = plain.seconds / made.seconds
            known = f"{share:.0%}"
            rows.append(
                (
                    name,
                    made.verdict,
                    gamma,
                    known,
                    made.acceptance,
                    made.error,
                    fewer,
                    faster,
                )
            )
            _line(found, name, made, f"gamma {gamma}").append(made.acceptance)
    columns = [
        "way",
        "exact or lossy",
        "gamma",
        "known",
        "acceptance",
        "standard error",
        "fewer calls",
        "speed-up in seconds",
    ]
    return [Table("Ours", columns, rows)], _charts(
        found, "share of known tokens", PREFILL
    )


@item("figure13", "Acceptance by draft length and guidance scale")
def figure13(run: Runs) -> Item:
    rows = []
    found: Lines = {}
    for name, gamma, way in _by_gamma(run):
        for cfg in GUIDANCE:
            made = run(way, cfg=cfg)
            rows.append((name, made.verdict, cfg, gamma, made.acceptance, made.error))
            _line(found, name, made, f"guidance {cfg:g}").append(made.acceptance)
    columns = [
        "way",
        "exact or lossy",
        "guidance",
        "gamma",
        "acceptance",
        "standard error",
    ]
    return [Table("Ours", columns, rows)], _charts(found, "gamma", run.args.gamma)


@item("figure14", "Acceptance along the generation, by temperature")
def figure14(run: Runs) -> Item:
    rows = []
    found: Lines = {}
    for name, way in WAYS.items():
        for temperature in TEMPERATURES:
            made = run({**way, "gamma": run.least}, temperature=temperature)
            order = bind(prepare(*made.request)).order
            revealed = np.take_along_axis(made.marks, np.asarray(order), axis=1)
            shares = [
                float(np.sum(part > 0) / np.sum(part != 0)) if np.any(part) else None
                for part in np.array_split(revealed, 8, axis=1)
            ]
            rows.append((name, made.verdict, run.least, temperature, *shares))
            _line(found, name, made, f"temperature {temperature:g}").extend(shares)
    eighths = [f"{number}/8" for number in range(1, 9)]
    columns = ["way", "exact or lossy", "gamma", "temperature", *eighths]
    chart = _charts(found, "eighth of the tokens, as they are revealed", eighths)
    return [Table("Ours", columns, rows)], chart


@item("figure15", "Rejected drafts by draft length")
def figure15(run: Runs) -> Item:
    """After each rejected draft one token is drawn from the residual, or from what the
    way has in its place."""
    rows = []
    series: dict[str, list[float]] = {}
    for name, gamma, way in _by_gamma(run):
        made = run(way)
        rejected = float(np.mean(np.sum(made.marks < 0, axis=1)))
        rows.append((name, made.verdict, gamma, rejected))
        series.setdefault(f"{name} ({made.verdict})", []).append(rejected)
    columns = [
        "way",
        "exact or lossy",
        "gamma",
        "rejected drafts of an image",
    ]
    names = [str(gamma) for gamma in run.args.gamma]
    return [Table("Ours", columns, rows)], lines(
        series, "rejected drafts", "gamma", names
    )


@item("figure16", "Where in the image drafts are accepted")
def figure16(run: Runs) -> Item:
    rows = []
    pages = []
    for name, way in WAYS.items():
        made = run({**way, "gamma": min(run.middle, run.gammas(name)[-1])})
        tested = made.marks != 0
        accepted = made.marks > 0
        rows.append((name, made.verdict, made.acceptance))
        captions = [run.target.class_name(int(label)) for label in made.request.what]
        pages.append(
            (f"{name} ({made.verdict})", acceptance_maps(tested, accepted, captions))
        )
    return [Table("Ours", ["way", "exact or lossy", "acceptance"], rows)], titled(pages)


@item(
    "equation35",
    "The speed-up that the formula predicts, and the one that was measured",
)
def equation35(run: Runs) -> Item:
    """Compares the paper's formula (1 - alpha^(gamma + 1)) / ((1 - alpha) (gamma c +
    1)) with the speed-ups that the paper measured."""
    found = {gamma: of for (*pair, gamma), of in TABLE1.items() if tuple(pair) == PAIR}
    rows = [
        (
            gamma,
            alpha,
            float(speedup(alpha, gamma, COST)),
            speeds[3],
            1 / (COST + 1 / gamma),
        )
        for gamma, (alpha, speeds) in found.items()
    ]
    names = ["gamma", "alpha", "Eq. 35", "measured by the paper", "1 / (c + 1 / gamma)"]
    series = {
        name: [row[at] for row in rows] for at, name in ((2, names[2]), (3, names[3]))
    }
    chart = lines(
        series, f"speed-up, c = {COST}", "gamma", [str(gamma) for gamma in found]
    )
    return [
        Table(f"The paper's own numbers in its formula, c = {COST}", names, rows)
    ], chart


def write(name: str, run: Runs, folder: Path) -> None:
    """Makes an item, and writes its picture, its page and, at the end, its JSON."""
    title, make = ITEMS[name]
    begun = time.perf_counter()
    tables, drawn = make(run)
    told = {
        "name": name,
        "title": title,
        "target": run.target.name,
        "draft": run.draft.name,
        "steps": run.args.respacing,
        "seconds": time.perf_counter() - begun,
        "machine": machine(),
        "tables": [table._asdict() for table in tables],
    }
    with written_beside(folder / f"{name}.png") as partial:
        drawn.convert("RGB").quantize(32, dither=Image.Dither.NONE).save(
            partial, format="PNG", optimize=True
        )
    page = [
        f"# {name}: {title}",
        *(table.markdown() for table in tables),
        f"![{title}]({name}.png)",
    ]
    write_text(folder / f"{name}.md", "\n\n".join(page) + "\n")
    write_results(folder / f"{name}.json", told)


def make_parser() -> Parser:
    small = {
        "images": 2,
        "batch": [2],
        "gamma": [2],
        "respacing": "ddim5",
        "out": Path("paper"),
    }
    parser = Parser(__doc__, **small)
    parser.add_argument(
        "names",
        nargs="*",
        choices=[*ITEMS, "all"],
        default="all",
        metavar="NAME",
        help="(all)",
    )
    parser.add_argument(
        "--list", action="store_true", help="name the items, and make none"
    )
    parser.add_argument(
        "--out", type=Path, default=Path("paper"), metavar="FOLDER", help="(paper)"
    )
    parser.add_argument(
        "--target", default="default", help="a name or folder (default)"
    )
    parser.add_argument(
        "--draft", default="default-draft", help="the smaller model (default-draft)"
    )
    parser.add_argument("--images", type=int, help="at most so many in a row")
    parser.add_argument(
        "--batch", type=int, nargs="+", default=[1, 8], help="of table 1 (1 8)"
    )
    parser.add_argument(
        "--gamma", type=int, nargs="+", default=[4, 8, 32], help="(4 8 32)"
    )
    parser.add_argument(
        "--respacing", help=f"denoising steps (the model's own; embedded: {EMBEDDED})"
    )
    return parser


def main() -> None:
    args = begin(make_parser())
    if args.list:
        print("\n".join(f"{name:<12} {title}" for name, (title, _) in ITEMS.items()))
        return
    names = (
        args.names
        if "all" not in args.names
        else ["table3", "figure14", "figure15"]
        if args.toy
        else list(ITEMS)
    )
    args.respacing = args.respacing or (
        EMBEDDED if args.target in hub.DEFAULTS else None
    )
    args.gamma.sort()
    args.out.mkdir(parents=True, exist_ok=True)
    run = Runs(args, load(args.target, args.toy), load(args.draft, args.toy))
    for number, name in enumerate(names, 1):
        if not (args.out / f"{name}.json").exists():
            write(name, run, args.out)
        print(f"{args.out / name}.md ({number} of {len(names)})", flush=True)


if __name__ == "__main__":
    main()
