"""How many ids are proposed: by the cost of passes as it was timed, and by how many proposed ids are accepted."""

import random
from types import SimpleNamespace

import pytest

from mlx_zip.engine import pass_costs
from mlx_zip.engine.draft_sources import Acceptance, LookupSource
from mlx_zip.engine.drafts import Drafter, choose_drafts, expects_draft
from mlx_zip.engine.pass_costs import TRY_EVERY, PassClock, PassCosts, expected_ids
from support.chip_costs import CHIPS
from support.slow_cases import slow_but

M4_PRO, M4_PRO_SLOWER, M3_ULTRA_4_BIT, M3_ULTRA_BF16, M1_ULTRA = CHIPS.values()
ROW_BY_ROW = {n: float(n) for n in (1, 2, 4, 8, 16)}
CURVES = [M4_PRO, M4_PRO_SLOWER, M3_ULTRA_4_BIT, M3_ULTRA_BF16, M1_ULTRA, ROW_BY_ROW]


def timed(curve, held=100):
    costs = PassCosts()
    for width, ratio in curve.items():
        costs.note_pass(width, held, 0.01 * ratio, known=True)
    costs.note_pass(1, held, 0.01)
    return costs


def rate(curve, share, proposed):
    return expected_ids([share], proposed) / curve[proposed + 1]


@pytest.mark.parametrize("curve", CURVES)
@pytest.mark.parametrize("share", [0.1, 0.5, 0.7, 0.85, 0.95, 1.0])
def test_the_width_of_the_best_rate_is_chosen_if_it_gains(curve, share):
    chosen = timed(curve).choose_draft_length([share], 100, 15)
    best = max((0, 1, 3, 7, 15), key=lambda proposed: rate(curve, share, proposed))
    if rate(curve, share, best) > 1.02:
        assert chosen == best
    else:
        assert chosen <= 1  # a trial
        assert timed(curve).choose_draft_length([min(share, 0.79)], 100, 15) == 0


@pytest.mark.parametrize(
    ("curve", "expected"),
    [(M4_PRO, 3), (M4_PRO_SLOWER, 3), (M3_ULTRA_4_BIT, 0), (M3_ULTRA_BF16, 7), (M1_ULTRA, 3), (ROW_BY_ROW, 0)],
)
def test_with_seven_of_ten_accepted_each_machine_gets_its_own_width(curve, expected):
    assert timed(curve).choose_draft_length([0.7], 100, 7) == expected


def test_nothing_is_proposed_before_a_pass_over_one_id_was_timed():
    assert PassCosts().choose_draft_length([1.0], 100, 15) == 0


def run(curve, is_right, passes, most=15, noise=0.0, seed=0, slow=1.0):
    """Simulates an answer; returns the ids emitted per second, in relation to passes over one id.

    is_right: called before each proposed id, whether it is the one chosen. slow: by how much the machine is slower in
    about half of the time.
    """
    costs, rng, seconds, emitted, pace = PassCosts(), random.Random(seed), 0.0, 0, 1.0
    acceptance = Acceptance()
    for _ in range(passes):
        if slow > 1 and rng.random() < 1 / 40:
            pace = slow if pace == 1 else 1.0
        width = costs.choose_draft_length([acceptance.share_after_match(40)], 100, most)
        accepted = 0
        while accepted < width and is_right(rng):
            accepted += 1
        took = curve[width + 1] * (1 + noise * rng.random())
        costs.note_pass(width + 1, 100, pace * took)
        if width:
            acceptance.note_draft(40, width, accepted)
        seconds, emitted = seconds + took, emitted + 1 + accepted
    return emitted / seconds * (1 + noise / 2)


@pytest.mark.parametrize("curve", CURVES)
@pytest.mark.parametrize("noise", [0.0, 0.2])
def test_drafts_that_are_never_right_cost_at_most_two_percent(curve, noise):
    assert run(curve, lambda rng: False, 2000, noise=noise) > 0.98


SHARES = [0.3, 0.6, 0.9, 1.0]
MACHINES = [(curve, share) for curve in CURVES for share in SHARES]
QUICK = [(curve, SHARES[n % len(SHARES)]) for n, curve in enumerate(CURVES)]  # each machine with one share


@pytest.mark.parametrize(("curve", "share"), slow_but(MACHINES, *QUICK))
def test_a_machine_reaches_nearly_the_rate_of_its_best_width(curve, share):
    if curve is M3_ULTRA_BF16 and share == 0.6:
        best = 1.0  # two ids cost twice as much there, and wider passes are tried for surer drafts only
    else:
        best = max(1.0, *(rate(curve, share, proposed) for proposed in (1, 3, 7, 15)))
    assert run(curve, lambda rng: rng.random() < share, 4000) > 0.93 * best


@pytest.mark.parametrize("share", [0.3, 0.6, 0.8])
def test_a_machine_that_is_slower_at_times_loses_little_where_passes_cost_row_by_row(share):
    rates = [run(ROW_BY_ROW, lambda rng: rng.random() < share, 80, 3, 0.1, seed, slow=1.7) for seed in range(20)]
    assert sum(rates) / len(rates) > 0.975


def test_a_trial_whose_ids_take_long_to_propose_is_not_made_to_save_time():
    costs = timed({1: 1.0, 2: 1.01, 4: 1.02, 8: 1.03})
    for _ in range(600):
        costs.note_pass(1, 100, 0.01)
    assert costs.choose_draft_length([0.85], 100, 15, seconds=0.03) == 1


def test_no_trial_is_made_before_a_pass_over_one_id_of_its_kind():
    costs = PassCosts()
    costs.note_pass(1, 100, 0.01)
    assert costs.choose_draft_length([0.99], 1000, 15) == 0
    costs.note_pass(1, 1000, 0.01)
    assert costs.choose_draft_length([0.99], 1000, 15) == 1


def test_a_pass_over_one_id_comes_now_and_then_though_drafts_gain():
    costs, widths = timed(M4_PRO), []
    for _ in range(1000):
        widths.append(1 + costs.choose_draft_length([0.9], 100, 15))
        costs.note_pass(widths[-1], 100, 0.01 * M4_PRO[widths[-1]])
    assert 3 <= widths.count(1) <= 4


def test_curves_of_other_contexts_are_taken_over_as_ratios():
    costs = timed(M4_PRO, held=200)
    costs.note_pass(1, 4000, 0.05)
    assert costs.ratios(4000)[4] == pytest.approx(1.14)
    costs.note_pass(4, 4000, 0.10, known=True)
    assert costs.ratios(4000)[4] == pytest.approx(2.0)
    assert costs.ratios(200)[4] == pytest.approx(1.14)


def test_a_pause_of_the_reader_changes_no_cost():
    costs = timed(M4_PRO)
    for seconds in [0.01] * 9 + [3.0] * 4:
        costs.note_pass(1, 100, seconds)
    assert costs.ratios(100)[2] == pytest.approx(1.03)


def test_a_width_that_was_never_timed_is_reached_step_by_step():
    costs = PassCosts()
    costs.note_pass(1, 100, 1.0)
    widths = []
    for _ in range(5):
        widths.append(costs.choose_draft_length([0.99], 100, 15))
        costs.note_pass(widths[-1] + 1, 100, 1.0)
    assert widths == [1, 3, 7, 15, 15]


@pytest.mark.parametrize("slow", [2, 4, 8, 16])
def test_a_first_pass_that_waited_decides_only_until_it_is_tried_again(slow):
    costs, passes = PassCosts(), []
    for _ in range(24 * TRY_EVERY):
        width = 1 + costs.choose_draft_length([0.99], 100, 15)
        first = width == slow and slow not in passes
        costs.note_pass(width, 100, 0.01 * M4_PRO[width] * (40 if first else 1))
        passes.append(width)
    assert passes[-1] == 1 + timed(M4_PRO).choose_draft_length([0.99], 100, 15)


def test_the_clock_leaves_out_passes_at_which_running_ahead_begins_or_ends(monkeypatch):
    now, noted = [1.0], []
    monkeypatch.setattr(pass_costs.time, "perf_counter", lambda: now[0])
    clock, costs = PassClock(), SimpleNamespace(note_pass=lambda ids, held, seconds, rows: noted.append(seconds))
    # on a CPU a read waits for the pass that was begun: two passes until ahead begins, and hardly any when it ends
    for ahead, seconds in ((False, 0.1), (False, 0.1), (True, 0.2), (True, 0.1), (False, 0.0), (False, 0.1)):
        now[0] += seconds
        clock.ids = clock.rows = 1
        clock.note_pass_end(costs, 100, ahead)
    assert noted == pytest.approx([0.1] * 3)


def test_the_clock_notes_a_pass_with_the_last_id_that_is_chosen_from_it(monkeypatch):
    now, noted = [1.0], []
    monkeypatch.setattr(pass_costs.time, "perf_counter", lambda: now[0])
    clock, costs = PassClock(), SimpleNamespace(note_pass=lambda ids, held, seconds, rows: noted.append((ids, seconds)))
    for ids, goes_on, seconds in ((1, False, 0.1), (4, True, 0.3), (4, True, 0.01), (4, False, 0.01), (1, False, 0.1)):
        now[0] += seconds
        clock.ids = clock.rows = ids
        clock.note_pass_end(costs, 100, goes_on=goes_on)
    assert noted == [(4, pytest.approx(0.32)), (1, pytest.approx(0.1))]


@pytest.mark.parametrize("passes", [64, 300, 2000])
def test_trials_cost_at_most_two_percent_even_if_drafts_are_much_less_sure_than_they_seem(passes):
    costs, took = PassCosts(), 0.0
    for _ in range(passes):
        width = 1 + costs.choose_draft_length([0.85], 100, 15)
        costs.note_pass(width, 100, ROW_BY_ROW[width])
        took += ROW_BY_ROW[width]
    assert passes < took <= 1.02 * passes


def test_a_width_that_is_proposed_but_never_noted_is_tried_less_and_less():
    costs = PassCosts()
    tried = []
    for _ in range(30 * TRY_EVERY):
        tried.append(costs.choose_draft_length([0.99], 100, 15))
        costs.note_pass(1, 100, 0.01)
    assert set(tried) == {0, 1}
    assert [n for n, ids in enumerate(tried) if ids] == [1, 129, 385, 897, 1409]


def test_a_width_that_was_timed_once_at_this_length_has_the_ratio_at_which_it_is_known_and_is_tried_again():
    costs, widths = timed(M4_PRO, held=200), []
    costs.note_pass(1, 400, 0.01)
    for width in (8, 4, 2):
        costs.note_pass(width, 400, 40.0)
    assert costs.ratios(400)[8] == pytest.approx(M4_PRO[8])
    for _ in range(3 * TRY_EVERY):
        widths.append(1 + costs.choose_draft_length([0.99], 400, 15))
        costs.note_pass(widths[-1], 400, 0.01 * M4_PRO[widths[-1]])
    assert widths[-1] == 8


class Proposes:
    """A source that is always there."""

    width = None

    def __init__(self, share, seconds, most=15):
        self.acceptance_share, self.seconds_per_id, self.most = lambda: share, lambda: seconds, most


def test_with_two_sources_a_trial_is_run_although_the_other_source_seems_to_gain_more():
    costs, widths = PassCosts(), []
    drafter = Drafter([Proposes(0.85, 0.0), Proposes(0.95, 0.004)], costs)
    for _ in range(40 * TRY_EVERY):
        width = 1 + choose_drafts([drafter], [15], 100)[0][1]
        costs.note_pass(width, 100, 0.01 * M4_PRO[width] * (40 if width > 1 and width not in widths else 1))
        widths.append(width)
    assert widths[-1] == 1 + timed(M4_PRO).choose_draft_length([0.85], 100, 15)


def weighed_passes(monkeypatch, ask, rises_at=()):
    """At which of 40 passes a draft is weighed that does not pay. ask: `choose_drafts` or `expects_draft`.

    The share of the second of two sources, which is the less likely one, rises before the passes `rises_at`.
    """
    costs, found = timed(ROW_BY_ROW), []
    costs.take_trial([0.9], 100, 15)  # so that none is due
    head, lookup = Proposes(0.78, 0.004), Proposes(0.3, 0.0)
    drafter, best_draft_length, begin = Drafter([head, lookup], costs), costs.best_draft_length, costs.passes
    monkeypatch.setattr(
        costs, "best_draft_length", lambda *words: found.append(costs.passes - begin) or best_draft_length(*words)
    )
    for number in range(40):
        if number in rises_at:
            share = lookup.acceptance_share() + 0.1
            lookup.acceptance_share = lambda share=share: share
        assert ask([drafter], 100) in (False, [(None, 0)])
        costs.note_pass(1, 100, 0.01)
    return sorted(set(found))


@pytest.mark.parametrize("ask", [lambda drafters, held: choose_drafts(drafters, [15], held), expects_draft])
def test_ids_that_do_not_pay_are_weighed_every_eighth_pass_and_when_a_share_rises(monkeypatch, ask):
    assert weighed_passes(monkeypatch, ask) == [0, 8, 16, 24, 32]
    assert weighed_passes(monkeypatch, ask, rises_at=(3, 14)) == [0, 3, 11, 14, 22, 30, 38]


def test_ids_are_weighed_in_the_next_pass_again_if_a_pass_over_one_id_has_to_come_first():
    assert PassCosts().next_weighing_pass(100, 1) == 1
    costs = timed(M4_PRO)
    drafter, widths = Drafter([Proposes(0.9, 0.0)], costs), []
    for _ in range(3 * pass_costs.COMPARE_EVERY):
        widths.append(1 + choose_drafts([drafter], [15], 100)[0][1])
        costs.note_pass(widths[-1], 100, 0.01 * M4_PRO[widths[-1]])
    assert 2 <= widths.count(1) <= 4


def test_a_source_is_asked_for_no_more_than_it_can_give():
    drafter = Drafter([Proposes(0.99, 0.0, most=3)], timed(M4_PRO))
    assert choose_drafts([drafter], [15], 100)[0][1] == 3
    unknown = PassCosts()
    unknown.note_pass(1, 100, 0.01)
    drafter, widths = Drafter([Proposes(0.99, 0.0, most=3)], unknown), []
    for _ in range(20 * TRY_EVERY):
        widths.append(choose_drafts([drafter], [15], 100)[0][1])
        unknown.note_pass(1 + widths[-1], 100, 0.01 * ROW_BY_ROW[1 + widths[-1]])
    assert set(widths) == {0, 1, 3}


def test_a_drafter_with_costs_proposes_by_them():
    def drafter(costs, text=(1, 2, 3, 4, 5, 6, 7, 8) * 6):
        return Drafter([LookupSource(text)], costs)

    assert choose_drafts([drafter(timed(M4_PRO))], [100], 100)[0][1] == 7
    assert choose_drafts([drafter(timed(M4_PRO), [1, 2, 3])], [100], 100) == [(None, 0)]
    assert expects_draft([drafter(timed(M3_ULTRA_4_BIT))], 100)
    wide = timed(ROW_BY_ROW)
    assert expects_draft([drafter(wide)], 100)  # a trial is due
    wide.choose_draft_length([0.9], 100, 15)
    assert not expects_draft([drafter(wide)], 100)


def test_the_curve_of_as_many_rows_decides_for_a_batch():
    costs = timed(M4_PRO)
    assert costs.choose_draft_length([0.9] * 4, 100, 15) == 0  # no batch was timed
    for width, ratio in M1_ULTRA.items():
        costs.note_pass(width, 100, ratio, rows=4, known=True)
    costs.note_pass(1, 100, M1_ULTRA[1], rows=4)
    assert costs.choose_draft_length([0.9] * 4, 100, 15) == timed(M1_ULTRA).choose_draft_length([0.9], 100, 15)
    assert costs.choose_draft_length([0.9] * 3, 100, 15) == costs.choose_draft_length([0.9] * 4, 100, 15)
    assert costs.choose_draft_length([0.9], 100, 15) == timed(M4_PRO).choose_draft_length([0.9], 100, 15)


def test_rows_without_a_draft_pay_for_the_pass_too():
    costs = PassCosts()
    for width, ratio in M4_PRO.items():
        costs.note_pass(width, 100, ratio, rows=4, known=True)
    costs.note_pass(1, 100, M4_PRO[1], rows=4)
    widths = [costs.choose_draft_length([0.9] * n + [0.0] * (4 - n), 100, 15) for n in range(5)]
    assert widths == sorted(widths)
    assert (widths[0], widths[4]) == (0, timed(M4_PRO).choose_draft_length([0.9], 100, 15))


def test_what_takes_no_time_proposes_where_it_gives_more_tokens_per_second():
    class Slow(LookupSource):
        def acceptance_share(self):
            return 0.85

        def seconds_per_id(self):
            return 0.3

    costs, text = PassCosts(), (1, 2, 3, 4, 5, 6, 7, 8) * 3
    for width, seconds in {1: 1.0, 2: 1.1, 4: 1.3, 8: 1.7, 16: 2.5}.items():
        costs.note_pass(width, 100, seconds, known=True)
    costs.note_pass(1, 100, 1.0)
    lookup, slow = LookupSource(text), Slow([1, 2, 3])
    for _ in range(4):
        lookup.propose(1)
        lookup.note_draft(4, 3)
    assert 0.6 < lookup.acceptance_share() < slow.acceptance_share()
    assert choose_drafts([Drafter([lookup, slow], costs)], [100], 100)[0][0] is lookup
    assert choose_drafts([Drafter([LookupSource([1, 2, 3]), slow], costs)], [100], 100)[0][0] is slow
