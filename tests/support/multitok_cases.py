"""Corpora for the tests of MultiTok's dictionaries, and what can be seen of one."""

from hypothesis import strategies as st

from mlx_zip.vocab.multitok import Dictionary, Samples, Settings, Tokens

# Few units, so that phrases recur; sometimes many times the same, so that they grow long.
UNITS = st.integers(1, 6)
DRAWS = st.lists(st.lists(st.integers(0, 99), max_size=40) | st.integers(0, 60).map(lambda n: [0] * n), max_size=6)
WINDOWS = st.sampled_from([0, 0, 1, 2, 3, 5])
WHERE = st.integers(0, 10**6)


@st.composite
def corpora(draw, unknown=False):
    """Settings of a dictionary, and samples of its units; `unknown`: with units among them that are none."""
    n = draw(UNITS)
    first, limit = draw(st.integers(0, 9)), draw(st.none() | st.integers(0, 12))
    unk = draw(st.integers(0, first + n - 1)) if unknown else None
    samples = [[x % (n + unknown) for x in sample] for sample in draw(DRAWS)]
    given_limit = {} if limit is None else {"limit": limit}
    return Settings(Tokens(n), draw(WINDOWS), first, unk_id=unk, **given_limit), samples


def trained(made, samples):
    dictionary = Dictionary(made)
    return dictionary, dictionary.train(Samples.of(samples))


def state(dictionary):
    """All that can be seen of what it has learnt."""
    return dictionary.rows.tolist(), dictionary.ids.tolist(), dictionary.uses.tolist(), dictionary.phrases
