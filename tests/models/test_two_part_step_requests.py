"""Random requests: steps that run ahead, steps that wait, trims, copies and saved caches, in any order."""

import copy

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule, run_state_machine_as_test
from mlx_lm.models.cache import load_prompt_cache, save_prompt_cache, trim_prompt_cache

from mlx_zip.models.rows.row_store import RowStore
from mlx_zip.models.two_part_step import TwoPartStep
from support import tiny
from support.slow_cases import slow_but

PACK = [[5, 6], [7, 8, 9], [5, 6, 7]]
FEW = [3, 4, 5, 6, 7, 8, 1, tiny.PAD]  # base ids, so few that entries occur again; the last two never merge
LAST = 30  # numbers up to this one stand for base ids, then for entries


def model_of(policy, size, family="llama", long_context=None, **changes):
    sizes = {"initial_vocab_size": tiny.VOCAB, "max_codebook_size": size, "max_subtokens": tiny.MERGE}
    compression = {**sizes, "disabled_ids": [0, 1, tiny.PAD], "policy": policy}
    model = tiny.tiny_model(family, compression=compression, **changes).eval()
    if long_context is not None:
        model.traits = type(model.traits)(**{**vars(model.traits), "long_context": long_context})
    model.row_source.store = RowStore()
    return model


MODELS = {
    "freeze": lambda: model_of("freeze", 64, position_mode="base_token_end"),
    "lru": lambda: model_of("lru", 8),
    "use-count, rows tied": lambda: model_of("use-count", 8, "gemma", tie_encoders=True),
    "longrope": lambda: model_of("freeze", 64, "phi3", long_context=9),
}


class Requests(RuleBasedStateMachine):
    """One request, with a copy of it that may take its place. The logits of each step equal those of one whole call."""

    model, folder = None, None

    def __init__(self):
        super().__init__()
        self.cache, self.ids = self.model.make_cache(pack=PACK), []
        self.other = copy.deepcopy(self.cache), []

    def chosen(self, number):
        """An id that the codebook can read: a base id, an entry's, or one that is installed by being read."""
        book = self.cache[-1].books[0]
        one = FEW[number] if number < len(FEW) else tiny.VOCAB + (LAST - number) % (len(book) + 1)
        try:
            book.copy().push(one)
        except ValueError:
            return FEW[0]
        return one

    def read(self, ids, logits):
        self.ids = [*self.ids, *ids]
        expected = np.array(self.model(mx.array([self.ids]), cache=self.model.make_cache(pack=PACK))[0, -1])
        np.testing.assert_allclose(np.array(logits)[0, -1], expected, atol=1e-4, rtol=1e-4)

    @rule(numbers=st.lists(st.integers(0, LAST), min_size=4, max_size=8), copied=st.booleans())
    def steps_ahead(self, numbers, copied):
        for number in numbers:
            self.step_ahead(number, copied and number == numbers[-1])

    def step_ahead(self, number, copied):
        one = mx.array([self.chosen(number)])
        h = TwoPartStep(self.model, self.cache).run_body(one)
        if h is None:
            return self.read(one.tolist(), self.model(one[None], cache=self.cache))
        if copied:
            self.cache = copy.deepcopy(self.cache)
        return self.read(one.tolist(), TwoPartStep(self.model, self.cache).compute_logits(h, one))

    @rule(number=st.integers(0, LAST))
    def step_that_waits(self, number):
        one = self.chosen(number)
        self.read([one], self.model(mx.array([[one]]), cache=self.cache))

    @rule(ids=st.lists(st.sampled_from(FEW), min_size=2, max_size=4))
    def call_of_several_ids(self, ids):
        self.read(ids, self.model(mx.array([ids]), cache=self.cache))

    @rule(number=st.integers(0, LAST))
    def body_without_its_end(self, number):
        TwoPartStep(self.model, self.cache).run_body(mx.array([self.chosen(number)]))
        self.model.trim_cache(self.cache, len(self.ids))

    @precondition(lambda self: len(self.ids) > 1)
    @rule(n=st.integers(1, 4))
    def trim(self, n):
        n = min(n, len(self.ids) - 1)
        trim_prompt_cache(self.cache, n)
        self.ids = self.ids[:-n]

    @rule()
    def keep_a_copy(self):
        self.other = copy.deepcopy(self.cache), self.ids

    @rule()
    def go_on_with_the_other(self):
        self.other, (self.cache, self.ids) = (self.cache, self.ids), self.other

    @precondition(lambda self: self.ids)
    @rule()
    def save_and_load(self):
        path = str(self.folder / "cache.safetensors")
        save_prompt_cache(path, self.cache)
        self.cache = load_prompt_cache(path)

    @invariant()
    def codebook_and_kv_caches_are_even(self):
        assert self.cache[-1].books[0].ids.tolist() == self.ids
        assert {entry.offset for entry in self.cache} == {len(self.ids)}


@pytest.mark.parametrize("name", slow_but(MODELS, "freeze"))
def test_a_request_in_any_order_gives_the_logits_of_one_call(name, tmp_path):
    machine = type("Machine", (Requests,), {"model": MODELS[name](), "folder": tmp_path})
    run_state_machine_as_test(
        machine,
        settings=settings(max_examples=8, stateful_step_count=8, derandomize=True, phases=[Phase.generate]),
    )
