"""Pictures of words are read as what was written, and tests of their words see what is
wrong with them."""

import numpy as np
import pytest
import word_reader as measures
from classifier import ClassifierConfig
from equality import FALSE_ALARM

from cspd_jax.image.pixels import as_bytes
from cspd_jax.training.data.words import Words, words

DATA = Words(topics=("animals", "music"), fonts=("DejaVuSans-Bold",))
LABELS = np.arange(200) % 2


@pytest.fixture(scope="module")
def reader():
    settings = ClassifierConfig(
        steps=240, batch=256, learning_rate=1e-2, width=8, features=32
    )
    return measures.make_reader(DATA, settings)


@pytest.mark.slow
def test_the_reader_reads_what_is_written(reader):
    batch = DATA.batch(0, 200, split="held-out")
    reading = reader(as_bytes(batch.images), batch.labels)
    assert 1 - reading.right.mean() <= 0.002
    topic = DATA.topics[batch.labels[0]]
    assert [words(topic)[i] for i in reading.words[0]] == [
        line.strip() for line in reading.text[0]
    ]
    # Of the other topic no word is right.
    assert not reader(as_bytes(batch.images), 1 - batch.labels).right.any()


@pytest.mark.slow
def test_letters_that_change_places_are_seen(reader):
    batch = DATA.batch(1, 50, split="held-out")
    images = as_bytes(batch.images)
    mixed = images.copy()
    mixed[:, :8, 32:] = images[:, 8:16, 32:]  # the first line ends as the second one
    reading = reader(mixed, batch.labels)
    assert reading.right[:, 1:].mean() > 0.99 and reading.right[:, 0].mean() < 0.5


def drawn(seed, misspelt):
    """200 pictures whose words are uniform."""
    random = np.random.default_rng(seed)
    found = random.choice(32, (200, 8))
    found[random.random(found.shape) < misspelt] = measures.MISSPELT
    return found


def test_misspelt_words_are_refuted():
    first = drawn(0, 0.01)
    for seed in (1, 2, 3):
        assert measures.as_often_right(first, drawn(seed, 0.01), LABELS) > FALSE_ALARM
    assert measures.as_often_right(first, drawn(1, 0.05), LABELS) <= FALSE_ALARM
    # Words that come in pairs are no more frequent, and pictures are permuted as a
    # whole.
    pairs = np.repeat(drawn(4, 0.01)[:, :4], 2, axis=1)
    assert measures.as_often_right(first, pairs, LABELS) > FALSE_ALARM
