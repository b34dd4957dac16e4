"""One way down: cli -> reports, comparison, evaluation, training -> generation -> methods -> algorithms ->
coupling, diffusion. Algorithms import no network."""

import re

import import_graph
import pytest

# A room may import itself and the rooms that are named; the first pattern that fits a module is its room.
ROOMS = {
    "errors": (r"errors", ()),
    "helpers": (
        r"_utils(\.(files|json_files|zip_files|bounds|typed|timing|chunks|compilation|loops|accelerators|event_files))?",
        ("errors",),
    ),
    "parallel": (r"parallel(\..*)?", ("errors",)),
    "diffusion": (r"diffusion(\..*)?", ("errors", "helpers")),
    "coupling": (r"coupling(\..*)?", ("errors", "diffusion")),
    "keys": (r"_utils\.random", ("errors", "coupling")),
    "algorithms": (
        r"image\.(protocol|reveal|shortcuts|plain|chain_drafters|chain_head|chain_speculation|speculation(\..*)?|released(\..*)?)"
        r"|text\.(protocol|checks|info|prompts|sampling|drafters|rules|rounds|tree|tree_drafter|tree_rounds)"
        r"|masked\.(protocol|info|canvas|passes|rule|sureness|stepwise|speculative)",
        ("errors", "helpers", "diffusion", "coupling", "keys"),
    ),
    "networks": (r"networks(\..*)?", ("errors", "helpers")),
    "converters": (r"converters(\..*)?", ("errors", "helpers", "networks", "diffusion")),
    "checkpoints": (r"checkpoints(\..*)?", ("errors", "helpers", "parallel", "networks", "converters")),
    "models": (
        r"models|tokenizers",
        ("errors", "helpers", "parallel", "networks", "checkpoints", "converters", "models"),
    ),
    "image": (
        r"image(\..*)?",
        (
            "errors",
            "helpers",
            "parallel",
            "keys",
            "diffusion",
            "coupling",
            "algorithms",
            "models",
            "networks",
        ),
    ),
    "text": (r"text(\..*)?", ("errors", "helpers", "parallel", "keys", "coupling", "algorithms", "models")),
    "masked": (r"masked(\..*)?", ("errors", "helpers", "parallel", "keys", "algorithms", "models", "text")),
    "data": (r"data(\..*)?", ("errors", "helpers", "models")),
    "training": (
        r"training(\..*)?",
        (
            "errors",
            "helpers",
            "parallel",
            "keys",
            "diffusion",
            "algorithms",
            "networks",
            "checkpoints",
            "models",
            "image",
            "data",
        ),
    ),
    "reports": (
        r"reports(\..*)?",
        ("errors", "helpers", "diffusion", "coupling", "models", "image", "text", "masked", "algorithms"),
    ),
    "evaluation": (
        r"evaluation(\..*)?",
        (
            "errors",
            "helpers",
            "keys",
            "networks",
            "converters",
            "checkpoints",
            "models",
            "image",
            "data",
            "training",
            "reports",
            "samples",
        ),
    ),
    "samples": (
        r"samples(\..*)?",
        ("errors", "helpers", "keys", "diffusion", "models", "image"),
    ),
    "reproduction": (
        r"reproduction(\..*)?",
        (
            "errors",
            "helpers",
            "keys",
            "diffusion",
            "coupling",
            "algorithms",
            "models",
            "image",
            "data",
            "training",
            "reports",
            "evaluation",
        ),
    ),
    "service": (
        r"service(\..*)?",
        ("errors", "helpers", "keys", "algorithms", "models", "image", "text", "masked", "reports"),
    ),
    "cli": (r"cli(\..*)?|__main__", None),
}


def room_of(module: str) -> str:
    name = module.removeprefix("cspd_jax.")
    return next(room for room, (pattern, _) in ROOMS.items() if re.fullmatch(pattern, name))


EDGES = import_graph.graph(late=True)


@pytest.mark.parametrize("module", sorted(EDGES.keys() - {"cspd_jax"}))
def test_a_room_imports_the_rooms_below_it(module):
    room = room_of(module)
    below = ROOMS[room][1]
    for other in EDGES[module] - {"cspd_jax"}:
        assert below is None or room_of(other) in (room, *below), f"{module} imports {other}"


def test_imports_have_no_cycle():
    assert import_graph.cycle(import_graph.graph()) == []


def test_an_import_upwards_is_found():
    """The negative control of the tests above."""
    assert room_of("cspd_jax.image.plain") == "algorithms" and room_of("cspd_jax.networks.mar") == "networks"
    assert "networks" not in ROOMS["algorithms"][1]
    assert import_graph.cycle({"a": {"b"}, "b": {"c"}, "c": {"b"}}) == ["b", "c"]
