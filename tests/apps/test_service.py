"""The engine of the service: rows of one running batch, and what happens to requests."""

from __future__ import annotations

import base64
import dataclasses
import importlib.util
import io
import json
import re
import subprocess
import sys
import threading
import time
import types

import jax
import jax.numpy as jnp
import masked_models
import numpy as np
import pytest
import text_models
import tiny
from linear_tokens import LinearTokens
from PIL import Image

import cspd_jax
from cspd_jax import Plain, SelfSpeculation
from cspd_jax.apps import cli
from cspd_jax.apps.service import brush, jobs, render, repaint
from cspd_jax.apps.service.config import ServiceConfig
from cspd_jax.apps.service.engine import Engine
from cspd_jax.apps.service.hosts import refusal
from cspd_jax.apps.service.jobs import Busy, Cancelled, Failed, Job, TimedOut
from cspd_jax.apps.service.rows import ImageRequest, ImageRows
from cspd_jax.apps.service.streams import MaskedRequest, TextProgress, TextRequest, padded
from cspd_jax.errors import UserError
from cspd_jax.image.options import Options
from cspd_jax.image.pixels import to_tokens
from cspd_jax.image.plan import check
from cspd_jax.image.regions import keep, size_of
from cspd_jax.image.rounds.pool import ImagePool, PoolImage
from cspd_jax.keys import row_keys
from cspd_jax.networks.lm import LM
from cspd_jax.weights.models import ImageModel, TextModel
from cspd_jax.weights.tokenizers import ByteTokenizer

B = 3
METHOD = SelfSpeculation(gamma=2)


class Toy(LinearTokens):
    """The toy model with what `ImageModel` asks of a network without a config."""

    num_classes = 3
    respacing = "ddim10"

    def embed_class(self, params, labels, unconditional):
        return jnp.where(unconditional, 0.0, 1.0 + 0.5 * labels)[:, None]


@pytest.fixture(scope="module")
def toy():
    return ImageModel("toy", Toy(), {})


@pytest.fixture(scope="module")
def mar(tmp_path_factory):
    return cspd_jax.load(tiny.save_mar(tmp_path_factory.mktemp("models") / "target"))


def run_rows(lane, arrivals):
    """arrivals: round -> requests, which enter the first free rows or wait for one."""
    waiting, busy, done, n = [], {}, {}, 0
    while arrivals.keys() - set(range(n)) or waiting or busy:
        waiting += arrivals.get(n, [])
        free = [row for row in range(lane.rows) if row not in busy]
        entering = {row: waiting.pop(0) for row in free[: len(waiting)]}
        if entering:
            lane.enter(entering)
            busy |= entering
        for row, progress in (lane.advance() if busy else {}).items():
            if progress.complete:
                done[busy.pop(row)] = progress
        n += 1
    return done


def alone(model, request, method, rows=B):
    """The image of a request as the library makes it, in a batch of as many rows, in the first."""
    keys = jnp.concatenate(
        [row_keys(jax.random.key(request.seed), 1), row_keys(jax.random.key(99), rows - 1)]
    )
    labels = [request.label] + [0] * (rows - 1)
    known = None
    if request.known is not None:  # by its row alone
        mask = np.zeros((rows, len(request.known.mask)), bool)
        mask[0] = request.known.mask
        known = cspd_jax.Known(request.known.tokens, mask)
    options = cspd_jax.Options(cfg=request.cfg, final_noise=True, known=known)
    tokens, info = cspd_jax.generate(keys, model, labels, method, options)
    return np.asarray(tokens[0]), info.tested[0], info.accepted[0]


ARRIVALS = {0: [(0, 1), (1, 2)], 1: [(2, 3)], 3: [(1, 4), (0, 5), (-1, 6)], 30: [(2, 7)]}


@pytest.mark.parametrize("cfg", [pytest.param(1.0, marks=pytest.mark.slow), 2.0])
@pytest.mark.parametrize("method", [METHOD, Plain()], ids=lambda m: m.name)
@pytest.mark.parametrize("which", ["toy", "mar"])
def test_an_image_that_enters_at_any_round_is_the_image_of_the_library(which, method, cfg, request):
    model = request.getfixturevalue(which)
    lane = ImageRows(model, B, method, guided=cfg != 1)
    arrivals = {
        when: [ImageRequest(label, seed, cfg + 0.5 * (cfg > 1) * seed, method.name) for label, seed in who]
        for when, who in ARRIVALS.items()
    }
    done = run_rows(lane, arrivals)
    assert len(done) == 7
    for asked, progress in done.items():
        tokens, tested, accepted = alone(model, asked, method)
        np.testing.assert_allclose(progress.tokens, tokens, rtol=2e-4, atol=2e-5)  # another program
        np.testing.assert_array_equal(progress.tested, tested)
        np.testing.assert_array_equal(progress.accepted, accepted)
        assert progress.known == len(tokens) and progress.final.all() and progress.truncated == 0
    first = arrivals[3][0]  # the same program: the same numbers, whatever the other rows do
    (by_itself,) = run_rows(lane, {0: [first]}).values()
    for one, other in zip(by_itself._replace(rounds=0), done[first]._replace(rounds=0)):  # places are shared
        np.testing.assert_array_equal(one, other)


@pytest.mark.parametrize("method", [METHOD, Plain()], ids=lambda m: m.name)
def test_a_row_with_known_tokens_among_others(toy, method):
    """All, some, one and none of the tokens, side by side; and a row that had some is used again."""
    length, lane = toy.network.seq_len, ImageRows(toy, B, method, guided=True)
    random = np.random.default_rng(0)
    tokens = random.normal(size=(length, toy.network.token_dim)).astype(np.float32)
    masks = [random.permutation(length) < many for many in (0, 1, length // 2, length - 1, length, 2)]
    asked = [
        ImageRequest(i % 3, i, 2.0, method.name, cspd_jax.Known(tokens, mask)) for i, mask in enumerate(masks)
    ]
    asked.append(ImageRequest(1, 7, 2.0, method.name))
    done = run_rows(lane, {0: asked[:2], 1: asked[2:]})
    assert len(done) == 7
    for request, progress in done.items():
        expected, tested, accepted = alone(toy, request, method)
        np.testing.assert_allclose(progress.tokens, expected, rtol=2e-4, atol=2e-5)
        np.testing.assert_array_equal(progress.tested, tested)
        np.testing.assert_array_equal(progress.accepted, accepted)
        if request.known is not None:
            kept = request.known.mask
            np.testing.assert_array_equal(progress.tokens[kept], tokens[kept])
            assert not progress.tested[kept].any()
    assert done[asked[4]].rounds == 1 < done[asked[2]].rounds < done[asked[6]].rounds


def test_rows_whose_groups_are_known_in_part(toy):
    """Several tokens a step, of which some are known, where the row had another image before."""
    length, kept = toy.network.seq_len, []
    options = Options(num_iter=3, final_noise=True)
    plan = check(toy, [0], Plain(), options)
    pool = ImagePool(toy.network, toy.params, B, plan.options)
    random = np.random.default_rng(0)
    for seed in range(4):
        tokens = random.normal(size=(length, toy.network.token_dim)).astype(np.float32)
        known = cspd_jax.Known(tokens, random.permutation(length) < (2 * seed + 1) % length)
        pool.enter({1: PoolImage(seed % 3, seed, known=known)})
        while not (found := pool.advance()[1]).complete:
            kept.append(found.known)
        mask = np.zeros((B, length), bool)
        mask[1] = known.mask
        keys = jnp.stack([row_keys(jax.random.key(seed), 1)[0]] * B)
        given = dataclasses.replace(options, known=cspd_jax.Known(tokens, mask))
        expected, _ = cspd_jax.generate(keys, toy, [seed % 3] * B, Plain(), given)
        np.testing.assert_allclose(found.tokens, expected[1], rtol=2e-4, atol=2e-5)
        np.testing.assert_array_equal(found.tokens[known.mask], tokens[known.mask])
    assert kept


def test_a_wrong_label_in_another_row_is_seen(toy):
    """The negative control: the comparison above can fail."""
    asked = ImageRequest(1, 5, 2.0)
    right = run_rows(ImageRows(toy, B, METHOD, True), {0: [asked]})
    wrong = alone(toy, ImageRequest(2, 5, 2.0), METHOD)[0]
    assert not np.allclose(right[asked].tokens, wrong, rtol=2e-4, atol=2e-5)


def test_a_row_that_is_emptied_midway_disturbs_nobody(toy):
    lane = ImageRows(toy, B, METHOD, True)
    kept, dropped = ImageRequest(0, 1, 2.0), ImageRequest(1, 2, 2.0)
    lane.enter({0: dropped, 2: kept})
    lane.advance()
    lane.leave([0])
    assert lane._pool._state.group[0] == lane._pool._inputs.groups  # frozen: it takes no places
    lane.enter({0: ImageRequest(2, 9, 2.0)})
    news = {}
    while not (2 in news and news[2].complete):
        news |= lane.advance()
    np.testing.assert_allclose(news[2].tokens, alone(toy, kept, METHOD)[0], rtol=2e-4, atol=2e-5)


def test_rounds_compile_once(toy):
    """Requests that come and go, with other labels, seeds and scales, are no new programs."""
    from cspd_jax.image.rounds import pool

    lane = ImageRows(toy, B, METHOD, True)
    run_rows(lane, {0: [ImageRequest(0, 1, 2.0)]})
    before = pool._advance._cache_size(), pool._replace_rows._cache_size()
    run_rows(lane, {0: [ImageRequest(1, 2, 3.0)], 1: [ImageRequest(2, 4, 1.5), ImageRequest(-1, 4, 0.0)]})
    assert (pool._advance._cache_size(), pool._replace_rows._cache_size()) == before


class Counting:
    """A lane whose requests take `request.length` rounds; a round waits for `gate`."""

    def __init__(self, rows=2):
        self.rows, self.gate, self.broken = rows, threading.Semaphore(0), None
        self.entered = []
        self.reset()

    def reset(self):
        self.now = {}

    def warm(self):
        pass

    def enter(self, requests):
        assert not self.now.keys() & requests.keys() and len(self.now) + len(requests) <= self.rows
        if any(request.length < 0 for request in requests.values()):
            raise UserError("a length is negative")
        self.entered += requests.values()
        self.now |= {row: [request, 0] for row, request in requests.items()}

    def leave(self, rows):
        for row in rows:
            del self.now[row]

    def advance(self):
        assert self.gate.acquire(timeout=20)
        if self.broken:
            raise self.broken
        news = {}
        for row, entry in list(self.now.items()):
            entry[1] += 1
            news[row] = Counted(entry[1], entry[1] >= entry[0].length)
            if news[row].complete:
                del self.now[row]
        return news

    def let(self, rounds):
        self.gate.release(rounds)


class Counted:
    def __init__(self, count, complete):
        self.count, self.complete, self.drafts = count, complete, (2 * count, count)


class Asked:
    lane = "counting"

    def __init__(self, length):
        self.length = length


@pytest.fixture
def lane():
    return Counting()


@pytest.fixture
def engine(lane):
    with Engine({"counting": lane}, queue=3, timeout=30).start() as engine:
        yield engine
        lane.let(1000)


def until(condition):
    end = time.monotonic() + 10
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.002)


def test_requests_wait_and_are_refused_when_too_many_do(engine, lane):
    first = [engine.submit(Asked(2)) for _ in range(2)]
    until(lambda: engine.busy == 2)
    waiting = [engine.submit(Asked(1)) for _ in range(3)]
    with pytest.raises(Busy, match="3 requests are waiting already"):
        engine.submit(Asked(1))
    lane.let(100)
    assert [job.result().count for job in first + waiting] == [2, 2, 1, 1, 1]
    assert lane.entered == [job.request for job in first + waiting]  # in the order of their coming
    counts = engine.metrics.requests
    assert (counts("accepted"), counts("refused"), counts("finished")) == (5, 1, 5)


def test_progress_is_told_round_by_round(engine, lane):
    job = engine.submit(Asked(3))
    seen = []
    lane.let(1)
    for progress in job.follow():
        seen.append(progress.count)
        lane.let(1)
    assert seen == [1, 2, 3] and job.status == jobs.FINISHED


def test_a_cancelled_request_gives_its_row_to_the_next(engine, lane):
    jobs_ = [engine.submit(Asked(1000)) for _ in range(2)]
    until(lambda: engine.busy == 2)
    waiting = engine.submit(Asked(1))
    never = engine.submit(Asked(1))
    never.cancel()
    jobs_[0].cancel()
    with pytest.raises(Cancelled):
        jobs_[0].result()
    lane.let(3)
    assert waiting.result().complete
    assert never.request not in lane.entered
    jobs_[1].cancel()
    until(lambda: engine.metrics.requests("cancelled") == 3)


def test_a_request_that_takes_too_long_ends(lane):
    with Engine({"counting": lane}, timeout=0.2).start() as engine:
        running, waiting = engine.submit(Asked(1000)), [engine.submit(Asked(1000)) for _ in range(2)][1]
        with pytest.raises(TimedOut, match=r"not finished within 0\.2 seconds"):
            running.result()
        with pytest.raises(TimedOut):
            waiting.result()
        lane.let(1)
        until(lambda: engine.busy == 0)
        assert engine.metrics.requests("timed out") >= 2
        lane.let(1000)


@pytest.mark.parametrize(
    "error, sentence", [(UserError("a sentence"), "a sentence"), (ValueError("inside"), "the service failed")]
)
def test_a_round_that_raises_fails_its_requests_and_no_others(engine, lane, error, sentence):
    both = [engine.submit(Asked(5)) for _ in range(2)]
    until(lambda: engine.busy == 2)
    lane.broken = error
    lane.let(1)
    for job in both:
        with pytest.raises(Failed, match=sentence):
            job.result()
    lane.broken = None
    lane.let(10)
    assert engine.submit(Asked(1)).result().complete
    assert engine.metrics.requests("failed") == 2 and engine.state == "ready"


def test_a_request_that_may_not_enter_fails_alone(engine, lane):
    first = [engine.submit(Asked(2)) for _ in range(2)]
    until(lambda: engine.busy == 2)
    second = [engine.submit(Asked(length)) for length in (1, -1)]  # they enter together
    lane.let(1000)
    assert [job.result().count for job in (*first, second[0])] == [2, 2, 1]
    with pytest.raises(Failed, match="a length is negative"):
        second[1].result()


def test_a_stopped_service_leaves_nobody_waiting(lane):
    engine = Engine({"counting": lane}, timeout=30).start()
    left = [engine.submit(Asked(50)) for _ in range(4)]
    until(lambda: engine.busy == 2)
    stopping = threading.Thread(target=engine.stop)
    stopping.start()
    until(lambda: engine.state == "stopped")
    lane.let(1)
    stopping.join(10)
    for job in left:
        with pytest.raises(Failed, match="stopped before"):
            job.result()
    with pytest.raises(Busy, match="stopping"):
        engine.submit(Asked(1))


def test_a_round_that_does_not_end_keeps_nobody_waiting(lane):
    engine = Engine({"counting": lane}, timeout=30).start()
    left = [engine.submit(Asked(50)) for _ in range(4)]
    until(lambda: engine.busy == 2)
    engine.stop(0.05)
    try:
        assert engine._thread.is_alive()
        for job in left:
            assert job.over
            with pytest.raises(Failed, match="stopped before"):
                job.result()
    finally:
        lane.let(1000)
    engine._thread.join(10)
    assert engine.busy == 0 and engine.metrics.requests("failed") == 4


def test_whatever_users_do_every_request_ends_once_and_every_row_is_free_again():
    """Users who give up at random moments, rounds that fail at random, a queue that is often full."""
    lane = Counting(rows=3)
    lane.let(10**6)
    advance, random = lane.advance, np.random.default_rng(0)

    def sometimes_fails():
        if random.random() < 0.03:
            raise ValueError("on purpose")
        time.sleep(0.0005)
        return advance()

    lane.advance = sometimes_fails
    ended, refused, lock = [], [], threading.Lock()
    with Engine({"counting": lane}, queue=5, timeout=0.05).start() as engine:

        def user(number):
            own = np.random.default_rng(number)
            for _ in range(60):
                try:
                    job = engine.submit(Asked(int(own.choice([1, 5, 20, 1000]))))
                except Busy:
                    with lock:
                        refused.append(number)
                    time.sleep(0.005)
                    continue
                job.when_ended(lambda job: ended.append(job.status))
                if own.random() < 0.3:
                    time.sleep(own.random() * 0.01)
                    job.cancel()
                try:
                    assert job.result().complete and job.status == jobs.FINISHED
                except (Cancelled, TimedOut, Failed):
                    assert job.status != jobs.FINISHED

        users = [threading.Thread(target=user, args=(number,)) for number in range(16)]
        for thread in users:
            thread.start()
        for thread in users:
            thread.join(60)
        until(lambda: engine.busy == engine.waiting == 0)
        counts = engine.metrics.requests
        assert counts("accepted") + counts("refused") == 16 * 60 and counts("refused") == len(refused)
        until(lambda: counts("accepted") == len(ended))
        ways = (jobs.FINISHED, jobs.CANCELLED, jobs.TIMED_OUT, jobs.FAILED)
        assert {way: counts(way) for way in ways} == {way: ended.count(way) for way in ways}
        assert {way: counts(way) > 0 for way in ways} == dict.fromkeys(ways, True), ended
        assert engine.state == "ready"
        assert not lane.now


def test_a_job_ends_once():
    told = []
    job = Job(Asked(1), 5)
    job.when_ended(lambda job: told.append(job.status))
    assert job.cancel() and not job.end(jobs.FINISHED) and not job.begin()
    job.when_ended(lambda job: told.append("late"))
    assert told == ["cancelled", "late"] and job.status == jobs.CANCELLED


def test_many_users_at_once_lose_nothing(toy):
    """Every request has an answer, and it is the library's image of its seed."""
    offer = ServiceConfig(image=toy, method=METHOD)
    with offer.engine(rows=B, queue=8, timeout=60).start() as engine:
        answers, lock = {}, threading.Lock()

        def user(seed):
            asked = offer.image_request(seed % 3, seed)
            try:
                found = engine.submit(asked).result()
            except Busy:
                found = None
            with lock:
                answers[asked] = found

        users = [threading.Thread(target=user, args=(seed,)) for seed in range(24)]
        for thread in users:
            thread.start()
        for thread in users:
            thread.join(60)
        done = {asked: found for asked, found in answers.items() if found is not None}
        assert len(answers) == 24 and len(done) >= 8
        counts = engine.metrics.requests
        assert counts("finished") == len(done) and counts("refused") == 24 - len(done)
        for asked in list(done)[:3]:
            expected = alone(toy, asked, METHOD)[0]
            np.testing.assert_allclose(done[asked].tokens, expected, rtol=2e-4, atol=2e-5)


@pytest.fixture(scope="module")
def lm():
    network = text_models.model(dtype=jnp.float32)
    return TextModel("tiny", network, text_models.params(network))


@pytest.mark.parametrize("temperature, drafts", [(0.0, 4), (0.0, 0), (1.0, 4)])
def test_text_is_that_of_the_library(lm, temperature, drafts):
    prompt = (3, 1, 4, 1, 5)
    asked = TextRequest(prompt, 12, temperature, seed=7, drafts=drafts)
    with ServiceConfig(text=lm, drafter=cspd_jax.text.PromptLookup()).engine(timeout=60).start() as engine:
        first, second = (engine.submit(asked) for _ in range(2))  # in rows of one batch
        other = engine.submit(dataclasses.replace(asked, prompt=(2, 7), new_tokens=5))
        told = list(first.follow())
        assert second.result() == told[-1] and other.result().complete
    key = jax.random.key(7) if temperature else None
    options = cspd_jax.text.Options(gamma=4, temperature=temperature, max_new_tokens=12)
    drafter = cspd_jax.text.PromptLookup() if drafts else None
    tokens, info = cspd_jax.text.generate(key, lm, [prompt], drafter, options)
    assert told[-1].complete and told[-1].ids == tokens[0, 5 : int(info.lengths[0])].tolist()
    assert told[-1].rounds == int(info.rounds[0]) and len(told[-1].marks) == len(told[-1].ids)


def test_masked_text_is_that_of_the_library():
    network = LM(masked_models.LLADA)
    params = jax.tree.map(jnp.float32, masked_models.params_of(masked_models.LLADA, 0))
    model = TextModel("tiny", network, params)
    with ServiceConfig(masked=model).engine(timeout=60).start() as engine:
        job = engine.submit(MaskedRequest((1, 2, 3), 16))
        told = list(job.follow())
    tokens, info = cspd_jax.masked.generate(
        None, model, [[1, 2, 3]], options=cspd_jax.masked.Options(max_new_tokens=16)
    )
    assert told[-1].complete and told[-1].ids == tokens[0].tolist() and told[-1].passes == info.passes
    filled = [sum(i != network.config.mask_ids[0] for i in progress.ids) for progress in told]
    assert filled == sorted(filled) and filled[-1] == 16


@pytest.mark.parametrize(
    "asked, sentence",
    [
        ({"label": 3}, "label is 3; it must be at most 2"),
        ({"label": -2}, "label is -2; it must be at least -1"),
        ({"label": 1.0}, "label is 1.0; it must be a whole number"),
        ({"label": True}, "whole number"),
        ({"label": 0, "seed": 2**32}, "seed is"),
        ({"label": 0, "cfg": float("nan")}, "cfg is nan"),
        ({"label": 0, "cfg": 21}, "cfg is 21"),
        ({"label": 0, "cfg": "2"}, "cfg is '2'"),
        ({"label": 0, "method": ["self"]}, "method is"),
    ],
)
def test_requests_have_limits(toy, asked, sentence):
    with pytest.raises(UserError, match=sentence):
        ServiceConfig(image=toy).image_request(**asked)


@pytest.mark.parametrize(
    "ids, sentence",
    [
        ([], "has no tokens"),
        ([masked_models.MASK], "id 10, the mask's"),
        (["w"], "whole"),
        ([99], "has id 99"),
    ],
)
def test_prompts_are_refused_before_they_enter(ids, sentence):
    offer = ServiceConfig(masked=TextModel("toy", LM(masked_models.LLADA), {}))
    with pytest.raises(UserError, match=sentence):
        offer.masked_request(types.SimpleNamespace(encode=lambda text: ids), "   ", 16, 0.0, 0, True)


def png(pixels):
    file = io.BytesIO()
    Image.fromarray(pixels).save(file, "PNG")
    return base64.b64encode(file.getvalue()).decode()


@pytest.fixture(scope="module")
def pixel_model(tmp_path_factory):
    return cspd_jax.load(tiny.save_mar(tmp_path_factory.mktemp("models") / "pixels", tiny.PIXELS))


def test_a_request_that_begins_with_a_picture(pixel_model):
    """By a region, by a mask and as the page sends it: the same tokens stay."""
    height, width = size_of(pixel_model)
    picture = np.random.default_rng(0).integers(0, 256, (height, width), np.uint8)
    left = np.zeros((height, width), np.uint8)
    left[:, : width // 2] = 255
    opaque = np.stack([picture] * 3 + [np.full_like(picture, 255)], axis=-1)  # as some browsers write
    fields = lambda **asked: repaint.from_fields(pixel_model, None, {"image": png(picture)} | asked)
    found = [
        fields(keep="left-half"),
        fields(mask=png(left)),
        fields(mask=png(left.repeat(2, 0)), resize=True),
        fields(keep="left-half", image=png(picture)[:20] + "\n" + png(picture)[20:] + "\n"),
        brush.from_page(pixel_model, None, json.dumps({"image": png(opaque), "mask": png(left)})),
    ]
    expected = to_tokens(pixel_model, picture[None, ..., None])[0]
    for known in found:
        np.testing.assert_array_equal(known.mask, keep("left-half", pixel_model))
        np.testing.assert_array_equal(known.tokens, expected)
    for seed in (3, 4):  # which tokens a share is, is by the seed, as for the command
        share = fields(keep="50%", seed=seed).mask
        np.testing.assert_array_equal(share, keep("50%", pixel_model, seed))
    assert repaint.from_fields(pixel_model, None, {}) is None
    assert brush.from_page(pixel_model, None, "") is None


@pytest.mark.parametrize(
    "asked, sentence",
    [
        ({"keep": "left-half"}, "keep is about the picture of image; send one"),
        ({"image": "R"}, "goes with either keep"),
        ({"image": "R", "keep": "left-half", "mask": "R"}, "goes with either keep"),
        ({"image": "R", "keep": 5}, "keep is 5; it must be a text"),
        ({"image": "R", "keep": "all"}, "what to keep is 'all'"),
        ({"image": "R", "keep": "left-half"}, "image is 'R'; it must be a PNG or JPEG file in base64"),
        ({"image": 5, "keep": "left-half"}, "image is 5; it must be a PNG or JPEG file in base64"),
        ({"image": "é", "keep": "left-half"}, "in base64"),
        ({"image": "QUJD", "keep": "left-half"}, "the picture cannot be read as a PNG or JPEG"),
        ({"image": png(np.zeros((3, 5), np.uint8)), "keep": "left-half"}, "is 5x3 and the model's pictures"),
        ({"image": "R", "keep": "left-half", "resize": 1}, "resize is 1; it must be true or false"),
        ({"image": png(np.zeros((9, 9), np.uint8)), "keep": "0,0,1,1", "resize": True}, "no whole token"),
    ],
)
def test_pictures_that_cannot_be_begun_with(pixel_model, asked, sentence):
    with pytest.raises(UserError, match=re.escape(sentence)):
        repaint.from_fields(pixel_model, None, asked)


def test_what_the_page_does_not_send(pixel_model):
    for drawn in ("{", "[]", '{"label": 3}', 5):
        with pytest.raises(UserError, match="the picture of the page cannot be read"):
            brush.from_page(pixel_model, None, drawn)
    white = png(np.full(size_of(pixel_model), 255, np.uint8))
    with pytest.raises(UserError, match="nothing of the picture is painted over"):
        brush.from_page(pixel_model, None, json.dumps({"image": white, "mask": white}))


@pytest.mark.slow
def test_latents_become_a_picture_when_they_are_complete(tmp_path):
    model = cspd_jax.load(tiny.save_mar(tmp_path / "target", tiny.LATENTS))
    vae = cspd_jax.load_vae(tiny.save_kl16(tmp_path / "vae"))
    offer = ServiceConfig(image=model, vae=vae, method=METHOD)
    with offer.engine(rows=1, timeout=60).start() as engine:
        job = engine.submit(offer.image_request(1, 2))
        told = list(job.follow())
    before = told[-1]._replace(complete=False)  # what `follow` may have skipped
    assert render.picture(offer, before) != render.picture(offer, told[-1])
    pixels = render.png(cspd_jax.to_images(model, told[-1].tokens[None], vae)[0])
    assert base64.b64encode(pixels).decode() in render.images(offer, [job])


def test_what_users_write_is_escaped(lm):
    """Prompts and sentences come back as text, never as elements of the page."""
    progress = TextProgress([ord(c) for c in "<b>&"], [1, 2, 3, 4], 2, (2, 1), True)
    job = Job(TextRequest((60,)), 5)
    shown = render.text(ByteTokenizer(), [ord(c) for c in "<script>"], progress, job)
    assert "<script>" not in shown and "&lt;script&gt;" in shown and "<b>" not in shown
    assert "<i>" not in render.error("<i>")


def test_a_long_prompt_is_padded_to_what_the_model_has():
    rooms = [padded(range(n), 300).tokens.shape[1] for n in (1, 32, 33, 128, 129, 300)]
    assert rooms == [32, 32, 128, 128, 300, 300]


def test_the_command_without_its_extra_is_one_sentence(monkeypatch, capsys):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert cli.main(["demo"]) == 2
    assert capsys.readouterr().err.count('pip install "cspd-jax[demo]"') == 1


def test_other_commands_do_not_load_the_extra():
    code = "import sys, cspd_jax.apps.cli as c, cspd_jax; c.make_parser(); print(*sys.modules)"
    loaded = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert not {"gradio", "fastapi", "uvicorn", "cspd_jax.apps.service"} & set(loaded.split())


def test_metrics_are_what_prometheus_reads(engine, lane):
    parser = pytest.importorskip("prometheus_client.parser")
    lane.let(10)
    engine.submit(Asked(2)).result()
    until(lambda: engine.busy == 0)
    told = engine.metrics.text(waiting=engine.waiting, busy=engine.busy)
    samples = {
        (sample.name, *sample.labels.values()): sample.value
        for family in parser.text_string_to_metric_families(told)
        for sample in family.samples
    }
    for name, value in (
        (("cspd_jax_requests_total", "finished"), 1),
        (("cspd_jax_requests_total", "timed_out"), 0),
        (("cspd_jax_rounds_total", "counting"), 2),
        (("cspd_jax_busy_rows_total", "counting"), 2),
        (("cspd_jax_drafts_tested_total",), 4),
        (("cspd_jax_drafts_accepted_total",), 2),
        (("cspd_jax_latency_seconds_bucket", "+Inf"), 1),
        (("cspd_jax_latency_seconds_count",), 1),
        (("cspd_jax_requests_waiting",), 0),
    ):
        assert samples[name] == value, name
    assert engine.metrics.of_lane("counting")[:2] == (2, 4)


@pytest.mark.parametrize(
    "host, origin, known",
    [
        ("127.0.0.1:7860", None, True),
        ("LOCALHOST:7860", "http://localhost:7860", True),
        ("[::1]:7860", "http://[::1]:7860", True),
        ("10.0.0.7", "http://10.0.0.7", True),
        (None, None, True),
        ("a.example:1", None, True),
        ("a.example.", "https://a.example", True),
        ("127.0.0.1", "https://b.a.example", True),
        ("evil.example", None, False),
        ("127.0.0.1.evil.example", None, False),
        ("", None, False),
        ("[::1", None, False),
        ("127.0.0.1", "https://evil.example", False),
        ("127.0.0.1", "http://10.0.0.7", False),
        ("127.0.0.1", "null", False),
        ("evil.example", "http://evil.example", False),
    ],
)
def test_hosts(host, origin, known):
    given = {b"host": host, b"origin": origin}
    headers = {name: value.encode() for name, value in given.items() if value is not None}
    assert (refusal(headers, ("a.example", "*.A.example")) is None) == known


def test_guidance_is_the_models_own_where_none_is_asked_for(toy):
    own = dataclasses.replace(toy, metadata={"extra": {"sampling": {"cfg": 2.5}}})
    assert ServiceConfig(image=own).image_request(0).cfg == 2.5
    assert ServiceConfig(image=own).image_request(0, cfg=1).cfg == 1
    assert ServiceConfig(image=toy).image_request(0).cfg == 1
