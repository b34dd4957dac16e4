"""`cspd-jax reproduce`: every table and figure is there, what is done is kept, and lossy is called lossy."""

import dataclasses
import functools
import json
import zlib
from types import SimpleNamespace

import jax
import numpy as np
import pytest
import tiny
from PIL import Image

import cspd_jax
from cspd_jax.apps import cli
from cspd_jax.apps.evaluation.equality import FALSE_ALARM, p_values
from cspd_jax.apps.evaluation.features import PUBLISHED_SHA256, FeatureNetwork
from cspd_jax.apps.evaluation.words import READER, make_reader
from cspd_jax.apps.paper import EXPERIMENTS, NAMES, figures_of_merit, published, quality, run, running
from cspd_jax.apps.paper.cells import Cell
from cspd_jax.apps.paper.experiment import NOT_AT_HAND, Joined
from cspd_jax.apps.paper.results import shown
from cspd_jax.apps.paper.setup import Setup
from cspd_jax.apps.paper.store import Store
from cspd_jax.errors import UserError
from cspd_jax.image.pixels import as_bytes
from cspd_jax.networks.registry import kind_of
from cspd_jax.training.data.words import Words
from cspd_jax.training.presets import PRESETS
from cspd_jax.training.settings_file import to_json
from cspd_jax.weights.models import ImageModel

OF_THE_PAPER = [
    *("table1", "table2", "table3", "table4"),
    *("figure7", "figure8", "figure9", "figure11", "figure12"),
    *("figure13", "figure14", "figure15", "figure16"),
    "equation35",
]
SMALL = {"images": 2, "batches": (1, 2), "gammas": (2, 4), "steps": "ddim5"}
P_VALUES = {"largest_z": 1.0, "moments": 0.5, "energy": 0.25, "classifier": 1e-5}
LENGTH, GROUPS = 16, 16


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory):
    folder = tmp_path_factory.mktemp("models")
    return tiny.save_mar(folder / "target"), tiny.save_mar(folder / "draft", seed=1)


@pytest.fixture(scope="module")
def pair(checkpoints):
    return tuple(map(cspd_jax.load, checkpoints))


def invented(setup, cell):
    """What `run_cell` returns, without running anything."""
    random = np.random.default_rng(zlib.crc32(json.dumps(cell.to_json(), sort_keys=True).encode()))
    lossless = cell.options.get("criterion") not in ("paper", "official")
    verdict = {"lossless": lossless, "why": "invented"}
    if cell.by_round:
        return {"images": cell.images, **verdict, "draws": [1, 2, 2, 30], "given_up": 0}, {}
    tested = np.ones((cell.images, LENGTH), bool)
    accepted = random.random(tested.shape) < 0.5
    calls = dict.fromkeys(
        ("target_backbone", "target_head", "draft_backbone", "draft_head"), 10 + cell.images
    )
    row = {
        "seconds": random.uniform(1, 2),
        "images": cell.images,
        **verdict,
        "rounds": 8.0,
        "tokens_per_round": 2.0,
        "sequential": calls,
        "total": calls,
        "truncated": 0,
        "tested_by_image": tested.sum(1).tolist(),
        "accepted_by_image": accepted.sum(1).tolist(),
        "tested_by_step": [cell.images] * GROUPS,
        "accepted_by_step": accepted.sum(0).tolist(),
    }
    tokens = random.standard_normal((cell.images, LENGTH, 16)).astype(np.float32)
    return row, {"tokens": tokens, "tested": tested, "accepted": accepted}


@pytest.fixture
def quick(monkeypatch):
    """Cells are invented; the list of those that were asked for."""
    asked = []

    def run_cell(setup, cell):
        asked.append(cell)
        return invented(setup, cell)

    monkeypatch.setattr(run, "run_cell", run_cell)
    monkeypatch.setattr(quality, "p_values", lambda *_: P_VALUES)
    return asked


DRAWN = ("figure7", "figure9", "figure15", "figure16")


def carried_out(names, setup, out, drawn=()):
    """With some pictures only: they take the longest. All are drawn by a slow test."""
    experiments = [EXPERIMENTS[name] for name in names]
    nothing = lambda results: None
    experiments = [
        one if one.name in drawn else dataclasses.replace(one, picture=nothing) for one in experiments
    ]
    told = lambda one: f"cspd-jax reproduce {one.name}"
    return run.carry_out(experiments, setup, out, told, progress=False)


def command(*arguments):
    try:
        return cli.main(["reproduce", *map(str, arguments)])
    except SystemExit as refused:  # by argparse
        return refused.code


def test_every_table_and_figure_is_there(capsys):
    assert list(NAMES) == OF_THE_PAPER
    assert command("--list", "--json") == 0
    assert [one["name"] for one in json.loads(capsys.readouterr().out)] == OF_THE_PAPER
    assert command("--list") == 0
    assert [line.split()[0] for line in capsys.readouterr().out.splitlines()] == OF_THE_PAPER


@pytest.fixture(scope="module")
def everything(pair, tmp_path_factory):
    """All experiments with invented cells: the folder and the reports."""
    out = tmp_path_factory.mktemp("all")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(run, "run_cell", invented)
        patch.setattr(quality, "p_values", lambda *_: P_VALUES)
        return out, carried_out(NAMES, Setup(*pair, **SMALL), out, DRAWN)


def test_tables_and_json_agree(everything):
    out, reports = everything
    assert [told["name"] for told in reports] == OF_THE_PAPER
    for told in reports:
        assert json.loads((out / f"{told['name']}.json").read_text()) == json.loads(json.dumps(told))
        page = (out / f"{told['name']}.md").read_text()
        lines = [line[2:-2].split(" | ") for line in page.splitlines() if line.startswith("| ")]
        expected = []
        for table in told["tables"]:
            expected += [table["columns"], *([shown(value) for value in row] for row in table["rows"])]
            assert all(len(row) == len(table["columns"]) for row in table["rows"])
        assert lines == expected
        for wanted in (told["title"], told["the_paper_shows"], told["why_ours_differs"], told["command"]):
            assert wanted in page
        assert "jax" in page and f"{told['images']} images" in page and " s, compilation included" in page
        if told["name"] in DRAWN:
            with Image.open(out / f"{told['name']}.png") as picture:
                assert picture.mode == "P" and f"]({told['name']}.png)" in page


def test_lossy_is_called_lossy(everything):
    _, reports = everything
    judged = 0
    for told in reports:
        for table in told["tables"]:
            if "exact or lossy" not in table["columns"]:
                continue
            at = table["columns"].index("exact or lossy")
            for row in table["rows"]:
                lossy = row[0].startswith(("official", "paper", "draft model alone"))
                assert row[at] == ("lossy" if lossy else "exact"), row
                judged += lossy
    assert judged > 50


def test_the_papers_numbers_are_beside_ours(everything):
    numbers = {told["name"]: json.dumps(told["tables"]) for told in everything[1]}
    assert "2.33" in numbers["table1"] and "2.36 \\u00b1 0.05" in numbers["table2"]
    assert "2.33" in numbers["equation35"] and "not at hand" in numbers["figure13"]
    assert published.TRIES in numbers["figure15"]
    table = next(told for told in everything[1] if told["name"] == "table1")["tables"][0]
    for row in table["rows"]:
        of_paper = row[table["columns"].index("speed-up, paper (MAR-H, MAR-B)")]
        way, gamma, batch = (row[table["columns"].index(c)] for c in ("way", "gamma", "batch"))
        if way.startswith(("official", "paper")):
            wanted = {(4, 1): 1.11}.get((gamma, batch), NOT_AT_HAND)
            assert of_paper == wanted
        else:
            assert of_paper is None


def test_what_is_finished_is_not_run_again(pair, tmp_path, monkeypatch, quick):
    setup, started = Setup(*pair, **SMALL), []

    def interrupted(setup, cell):
        if len(started) == 5:
            raise KeyboardInterrupt
        started.append(cell)
        return invented(setup, cell)

    with monkeypatch.context() as patch:
        patch.setattr(run, "run_cell", interrupted)
        with pytest.raises(KeyboardInterrupt):
            carried_out(["table1"], setup, tmp_path)
    assert run.cells_done(tmp_path) == 5 and not (tmp_path / "table1.json").exists()
    cells = EXPERIMENTS["table1"].cells(setup)
    first = carried_out(["table1"], setup, tmp_path)
    assert len(quick) == len(cells) - 5  # an interrupted one continues
    again = carried_out(["table1"], setup, tmp_path)
    assert len(quick) == len(cells) - 5 and again == first  # a second one computes nothing
    key = cells[0].key(setup.models)
    for name in (f"{key}.json", f"{key}.npz"):  # what is damaged is made again
        (tmp_path / "cells" / name).write_bytes(b"{")
        before = len(quick)
        carried_out(["table1"], setup, tmp_path)
        assert quick[before:] == cells[:1]
    before = len(quick)
    carried_out(["equation35"], setup, tmp_path)  # experiments share cells
    assert all(cell.by_draft for cell in quick[before:])
    before = len(quick)
    carried_out(["table1"], Setup(*pair, **SMALL, seed=1), tmp_path)
    assert len(quick) == before + len(cells)  # another seed shares nothing


def test_a_cell_is_known_by_everything_that_matters():
    one = Cell({"method": "cspd", "gamma": 2}, images=2)
    models = {"version": "1", "target": "a", "draft": "b"}
    others = [
        Cell({"method": "cspd", "gamma": 3}, images=2),
        Cell({"method": "self", "gamma": 2}, images=2),
        *(
            Cell(one.options, **{"images": 2, name: value})
            for name, value in {"images": 3, "first": 2, "seed": 1, "steps": "ddim5", "cfg": 2.0}.items()
        ),
        Cell(one.options, images=2, temperature=0.9),
        Cell(one.options, images=2, by_draft=True),
        Cell(one.options, images=2, by_round=True),
    ]
    keys = [cell.key(models) for cell in (one, *others)]
    keys += [one.key({**models, name: "c"}) for name in models]
    assert len(set(keys)) == len(keys)
    alone = Cell({"method": "self"}, images=2)
    assert alone.key(models) == alone.key({**models, "draft": "c"})
    assert Cell({"gamma": 2, "method": "cspd"}, images=2).key(models) == one.key(models)


def test_acceptance_and_its_error():
    rows = [
        {"images": 2, "lossless": True, "why": "", "tested_by_image": [4, 4], "accepted_by_image": [1, 3]},
        {"images": 1, "lossless": False, "why": "so", "tested_by_image": [8], "accepted_by_image": [4]},
    ]
    found = Joined(rows)
    assert (found.images, found.acceptance, found.verdict, found.why) == (3, 0.5, "lossy", "so")
    assert found.standard_error == pytest.approx(np.sqrt((1 + 1 + 0) * 3 / 2) / 16)
    assert Joined(rows[:1]).verdict == "exact"


@pytest.mark.parametrize(
    "arguments, sentence",
    [
        ([], "say which experiment"),
        (["table9"], "'table9' is unknown; it is all, table1, "),
        (["table1", "--gamma", "64"], "gamma 64 is too large"),
        (["table1", "--gamma", "4,x"], "'x' is not a positive whole number"),
        (["table1", "--batch", "0"], "'0' is not a positive whole number"),
        (["table1", "--images", "-1"], "'-1' is not a positive whole number"),
        (["table1", "--steps", "some"], "some"),
        (["table1", "--vae", "kl16"], "--vae does not apply"),
        (["table2", "--against", "x.npz"], "--against needs --inception"),
        (["table1", "--out", ""], "the name of the folder is empty"),
        (["table1", "--out", "full"], "holds no reproduction"),
        (["table1", "--target", "nowhere"], "nowhere"),
        (
            ["table3", "--target", "default-draft"],
            "table3 needs a draft model (--draft MODEL), as table3, figure9",
        ),
    ],
)
def test_what_cannot_be(arguments, sentence, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "mine").touch()
    assert command(*arguments) == 2
    told = capsys.readouterr().err
    assert sentence in told and "Traceback" not in told
    assert sorted(p.name for p in tmp_path.rglob("*")) == ["full", "mine"]


def test_the_command(checkpoints, tmp_path, monkeypatch, capsys, quick):
    target, draft = checkpoints
    monkeypatch.chdir(tmp_path)
    flags = ("--target", target, "--batch", "2", "--gamma", "2,3", "--images", "2")
    assert command("figure8", *flags, "--draft", draft, "--json") == 0
    told = json.loads(capsys.readouterr().out)
    assert (
        told["command"].endswith("--images 2 --batch 2 --gamma 2,3") and len(told["tables"][0]["rows"]) == 8
    )
    assert {p.name for p in (tmp_path / "reproduction").glob("figure8.*")} == {
        "figure8.json",
        "figure8.md",
        "figure8.png",
    }
    some, left_out = run.chosen("all", has_draft=False)
    assert left_out == ["table3", "figure9"] and len(some) == len(OF_THE_PAPER) - 2
    monkeypatch.setattr(run, "chosen", lambda name, has_draft: (some[:1], left_out))
    assert command("all", *flags) == 0
    printed = capsys.readouterr()
    assert "without --draft these are left out: table3, figure9" in printed.err
    assert printed.out == "reproduction/table1.md\n"
    table = json.loads((tmp_path / "reproduction" / "table1.json").read_text())["tables"][0]
    assert {row[0] for row in table["rows"]} == {"plain", "plain, with chains", "self", "self, with chains"}

    def interrupted(setup, cell):
        raise KeyboardInterrupt

    monkeypatch.setattr(run, "run_cell", interrupted)
    assert command("table1", *flags, "--seed", "5") == 130
    assert "finished cells are in reproduction; the same command continues" in capsys.readouterr().err


def test_latents_without_an_autoencoder(tmp_path, quick):
    target, draft = (
        cspd_jax.load(tiny.save_mar(tmp_path / name, tiny.LATENTS, seed=seed))
        for seed, name in enumerate(("target", "draft"))
    )
    (told,) = carried_out(["figure9"], Setup(target, draft, **SMALL), tmp_path / "out")
    assert "latents need an autoencoder" in told["tables"][0]["note"]
    assert not (tmp_path / "out" / "figure9.png").exists()


def test_fid_is_called_so_for_the_published_weights_only(pair, tmp_path, monkeypatch, quick):
    found = {"frechet": {"value": 12.5}, "inception_score": {"value": 7.5}}
    monkeypatch.setattr(figures_of_merit.evaluation_fid, "evaluate", lambda *_, **__: (found, None))
    for digest, names in ((PUBLISHED_SHA256, ["FID", "IS"]), ("other", None)):
        network = FeatureNetwork(tmp_path, None, None, digest)
        setup = Setup(*pair, **SMALL, inception=network)
        (told,) = carried_out(["table2"], setup, tmp_path / digest)
        table = told["tables"][0]
        assert all(row[-2:] == [12.5, 7.5] for row in table["rows"])
        assert table["columns"][-2:] == names if names else "not the published" in table["columns"][-2]


def test_the_test_of_equality_sees_a_shift():
    random = np.random.default_rng(0)
    x, y = random.standard_normal((2, 400, 8))
    labels = np.arange(400) % 4
    assert min(p_values(x, y, labels)[one] for one in ("moments", "energy", "classifier")) > FALSE_ALARM
    moved = p_values(x + 0.5, y, labels)
    assert moved["moments"] <= FALSE_ALARM and moved["energy"] <= FALSE_ALARM


def test_a_cell_is_the_images_of_generate(pair):
    setup = Setup(*pair, batches=(2,), gammas=(2,), seed=3, steps="ddim5")
    row, arrays = running.run_cell(setup, setup.cell({"final_noise": True}, first=4))
    keys = cspd_jax.row_keys(jax.random.key(3), 2, 4)
    tokens, info = cspd_jax.generate(
        keys, setup.target, [4, 0], options=cspd_jax.Options(respacing="ddim5", final_noise=True)
    )
    np.testing.assert_array_equal(arrays["tokens"], tokens)
    assert row["sequential"] == info.sequential._asdict() and row["lossless"] and row["seconds"] > 0


@pytest.mark.slow
@pytest.mark.parametrize("options", [{"proposals": 1}, {"criterion": "paper", "proposals": 1}])
def test_draws_of_resampling(pair, options):
    """Every rejected draft is replaced by a resampling, and their trips add up to those of the whole run."""
    setup = Setup(*pair, batches=(1,), gammas=(2,), steps="ddim5")
    cell = setup.cell({"method": "cspd", "gamma": 2, **options})
    row, arrays = running.run_cell(setup, cell)
    counted, nothing = running.run_cell(setup, setup.cell(cell.options, by_round=True))
    rejected = arrays["tested"].sum() - arrays["accepted"].sum()
    assert row["tested"] == sum(row["tested_by_image"]) == arrays["tested"].sum()
    assert len(counted["draws"]) == rejected and sum(counted["draws"]) == row["trips"] and not nothing
    assert min(counted["draws"]) >= 1 and row["lossless"] == counted["lossless"]


def test_a_setup_is_checked(pair):
    for wrong in ({"gammas": (16,)}, {"batches": (0,)}, {"gammas": ()}, {"images": 0}):
        with pytest.raises(UserError):
            Setup(*pair, **wrong)


@pytest.mark.slow
def test_everything_with_a_small_pair(checkpoints, tmp_path, capsys):
    target, draft = checkpoints
    flags = (
        "--batch",
        "1,2",
        "--gamma",
        "2",
        "--images",
        "2",
        "--steps",
        "ddim5",
        "--out",
        tmp_path / "out",
    )
    assert command("all", "--target", target, "--draft", draft, *flags) == 0
    assert len(capsys.readouterr().out.splitlines()) == len(OF_THE_PAPER)


@pytest.mark.slow
def test_pictures_of_words_are_read(tmp_path, monkeypatch):
    """Table 2 has the share of right words: most of held-out pages, few as words of another topic."""
    quick = dataclasses.replace(READER, steps=200, batch=256)
    monkeypatch.setattr(figures_of_merit, "make_reader", functools.partial(make_reader, settings=quick))
    run_settings = PRESETS["words"]
    metadata = {"extra": {"training": json.loads(json.dumps(to_json(run_settings)))}}
    network = kind_of(run_settings.model).network(run_settings.model)
    model = ImageModel("words", network, None, metadata, run_settings.data.topics)
    setup = SimpleNamespace(target=model)
    results = SimpleNamespace(setup=setup, store=Store(tmp_path / "kept"), progress=False)
    pages = Words(run_settings.data).batch(7, 64, split="held-out")
    images, labels = as_bytes(pages.images), pages.labels
    right, distance = figures_of_merit.of_the_domain(results, "right", images, labels)
    wrong, same = figures_of_merit.of_the_domain(results, "wrong", images, (labels + 1) % 8)
    assert right > 0.8 and wrong < 0.1 and distance == pytest.approx(same)
