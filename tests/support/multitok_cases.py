"""Corpora for the tests of MultiTok's dictionaries, and a dictionary's visible state."""

from hypothesis import strategies as st

from mlx_zip.vocab.multitok import Dictionary, Samples, Settings, Tokens

# Few units, so that phrases recur; sometimes many times the same, so that they grow long.
UNITS = st.integers(1, 6)
DRAWS = st.lists(st.lists(st.integers(0, 99), max_size=40) | st.integers(0, 60).map(lambda n: [0] * n), max_size=6)
WINDOWS = st.sampled_from([0, 0, 1, 2, 3, 5])
WHERE = st.integers(0, 10**6)


@st.composite
def corpora(draw, unknown=False):
    """Draws settings of a dictionary and samples of its units; `unknown` adds units it does not have."""
    n = draw(UNITS)
    first, limit = draw(st.integers(0, 9)), draw(st.none() | st.integers(0, 12))
    unk = draw(st.integers(0, first + n - 1)) if unknown else None
    samples = [[x % (n + unknown) for x in sample] for sample in draw(DRAWS)]
    given_limit = {} if limit is None else {"limit": limit}
    return Settings(Tokens(n), draw(WINDOWS), first, unk_id=unk, **given_limit), samples


def trained(made, samples):
    dictionary = Dictionary(made)
    return dictionary, dictionary.train(Samples.from_sequences(samples))


def state(dictionary):
    """The dictionary's visible state, for comparison."""
    return dictionary.rows.tolist(), dictionary.ids.tolist(), dictionary.uses.tolist(), dictionary.phrases
