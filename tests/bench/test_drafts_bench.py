"""`mlx_zip bench drafts`: its texts, passes replayed without a model, and timed runs."""

import json
from types import SimpleNamespace

import pytest
from mlx_lm.models.cache import make_prompt_cache

from mlx_zip.bench.engines.workloads import Turn
from mlx_zip.bench.generation import draft_replay, drafts
from mlx_zip.bench.generation.draft_replay import KINDS, ROW_BY_ROW, TEXTS, read_messages, read_workloads, replay
from mlx_zip.bench.generation.drafts import DraftedEngine, PassNotes, replay_figures
from mlx_zip.bench.tables.drafts import TABLES, time_table
from mlx_zip.engine import Emitted
from support import tiny, tiny_bench
from support.chip_costs import CHIPS
from support.tiny_bench import run

AGAIN = [i for i in tiny.base_ids(120, seed=3) if i > 2][:40]
TURN = Turn(tuple(AGAIN), 55, (*AGAIN[:20], *[i for i in tiny.base_ids(60, seed=5) if i > 2][:15], *AGAIN[20:]))


@pytest.fixture(autouse=True)
def _small(monkeypatch, tmp_path):
    tiny_bench.small(monkeypatch)
    monkeypatch.setattr(draft_replay, "TEXTS", tmp_path)
    for kind in ("story", "edit"):
        (tmp_path / f"{kind}-1.txt").write_text(
            f"@user\na {kind}, again. a dog.\n@assistant\na {kind}, again. a dog ran.\n"
        )


def book_of(model):
    return make_prompt_cache(model)[-1].books[0]


# ---- texts


def test_every_kind_has_texts_that_end_with_an_answer():
    for kind in KINDS:
        found = [read_messages(file) for file in TEXTS.glob(f"{kind}-*.txt")]
        assert found
        for messages in found:
            assert [message["role"] for message in messages[-2:]] == ["user", "assistant"]
            assert all(message["content"].strip() for message in messages)


def test_the_edited_files_differ_from_the_given_ones_in_about_ten_lines():
    for file in TEXTS.glob("edit-*.txt"):
        asked, answer = read_messages(file)
        new = [line for line in answer["content"].splitlines() if line not in asked["content"].splitlines()]
        assert 8 <= len(new) <= 12


def test_a_workload_has_a_texts_prompt_and_its_answer():
    tokenizer = tiny_bench.models().tokenizer
    (found,) = read_workloads(["edit"], tokenizer, "replay")
    assert (found.domain, found.data, found.mode) == ("edit", "edit-1", "replay")
    assert tokenizer.decode(list(found.turns[0].text)) == "a edit, again. a dog ran.\n"
    (free,) = read_workloads(["edit"], tokenizer, "free")
    assert free.turns[0] == Turn(found.turns[0].prompt, len(found.turns[0].text))


# ---- passes


@pytest.mark.parametrize("kind", ["plain", "zip"])
def test_replayed_passes_are_those_of_a_model(kind):
    models = tiny_bench.models()
    engine = DraftedEngine(models, kind, "lookup", {})
    found = engine.run(TURN.prompt, TURN.tokens, TURN.text)
    assert found.base_ids == list(TURN.text)
    expected = replay(TURN, book_of(engine.model) if kind == "zip" else None, ahead=kind == "plain")
    widths = [len(ids) for ids in found.ids[1:]]
    assert len(expected.widths) == len(widths) < len(TURN.text) - 10
    assert all(read >= emitted for read, emitted in zip(expected.widths, widths, strict=True))


def test_the_more_passes_cost_the_less_drafts_bring():
    curves = [{1: 1.0, 16: 1.0}, *list(CHIPS.values())[:2], ROW_BY_ROW]
    for book in (None, book_of(tiny_bench.models().zipped())):
        costs = [replay(TURN, book, curve=curve).cost for curve in curves]
        assert costs == sorted(costs)
        assert costs[0] < costs[-1]


def test_figures_count_what_comes_after_the_first_id():
    book = book_of(tiny_bench.models().zipped())
    for one in (None, book):
        found = replay_figures(TURN, one)
        counts = found["counts"]
        assert counts["passes"] < counts["ids"] <= counts["base_tokens"] < len(TURN.text)
        assert counts["ids"] <= counts["passes"] + counts["proposed"]
        assert 0.9 < found["row_by_row"] <= 1
        assert all(us > 0 for us in found["host_us"].values())


def test_ids_of_a_draft_belong_to_the_pass_that_checked_them():
    found = tiny_bench.made_run(steps=0)
    note = PassNotes(found, 0.0)
    for one, from_draft in [(1, False), (2, True), (3, True), (4, False), (5, False), (6, True)]:
        note(Emitted(one, (one, one), from_draft=from_draft))
    assert found.ids == [[1], [2, 3, 4], [5], [6]]
    assert found.base_ids == [one for one in range(1, 7) for _ in range(2)]


# ---- the bench


@pytest.fixture
def _models(monkeypatch):
    monkeypatch.setattr(drafts, "models_from_folders", lambda *names: tiny_bench.models())


@pytest.mark.usefixtures("_models")
def test_passes_are_counted_without_running_a_model(capsys, monkeypatch):
    monkeypatch.setattr(drafts, "time_drafts", None)
    assert run("drafts", "--mode", "passes", "--kinds", "story", "edit") == 0
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [(line["workload"]["data"], line["engine"]) for line in lines] == [
        (data, kind) for data in ("story-1", "edit-1") for kind in ("plain", "zip")
    ]
    records = SimpleNamespace(lines=lambda name: lines)
    for name in ("drafts-passes", "drafts-host"):
        assert TABLES[name](records).count("| tiny | ") == 2


@pytest.mark.usefixtures("_models")
def test_greedy_answers_are_counted_for_every_way_that_a_model_has(capsys):
    assert run("drafts", "--mode", "greedy", "--kinds", "story") == 0
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    ways = ["plain off", "plain lookup", "zip off", "zip lookup", "zip draft model"]  # the tiny model has no head
    assert [line["engine"] for line in lines] == ways
    counts = {line["engine"]: line["counts"] for line in lines}
    assert counts["plain off"]["base_tokens"] == counts["plain off"]["passes"]
    assert counts["zip off"]["base_tokens"] == counts["zip draft model"]["base_tokens"]
    shown = TABLES["drafts-greedy"](SimpleNamespace(lines=lambda name: lines))
    assert shown.count("| tiny | story |") == 2
    assert all(row.endswith("| - |") == ("plain" in row) for row in shown.splitlines()[2:])


@pytest.mark.usefixtures("_models")
@pytest.mark.parametrize("mode", ["replay", "free"])
def test_ways_to_draft_run_in_turns_on_the_same_text(mode, capsys):
    assert run("drafts", "--mode", mode, "--kinds", "story", "--trials", "1", "--rows", "cold", "--tokens", "12") == 0
    out, err = capsys.readouterr()
    lines = [json.loads(line) for line in out.splitlines()]
    assert [line["engine"] for line in lines] == [f"{k} {d}" for k in ("plain", "zip") for d in drafts.DRAFTS]
    assert len({(line["engine"].split()[0], line["counts"]["base_tokens"]) for line in lines}) == 2
    for line in lines:
        assert line["counts"]["base_tokens"] <= 12
        assert (line["bench"], line["mode"], line["setting"]["rows"]) == ("drafts", mode, "cold")
        assert line["counts"]["emitted_ids"] >= line["counts"]["steps"]
    assert err.count("| tiny | story-1") == len(lines)


def test_a_cold_run_knows_nothing_of_what_passes_cost(monkeypatch, tmp_path):
    monkeypatch.setattr("mlx_zip.engine.pass_costs.costs_folder", lambda: tmp_path / "pass-costs")
    engine = DraftedEngine(tiny_bench.models(), "plain", "auto", {})
    served = drafts.Served(engine.model, engine.tokenizer, drafts.RunOptions(draft="auto"))
    for width in (1, 16):
        served.pass_costs.note_pass(width, 100, 1.0, known=True)
    served.settle()  # writes them to their file, where another model object finds them
    assert drafts.Served(engine.make(), engine.tokenizer, drafts.RunOptions()).pass_costs.ratios(100)[16]
    engine.forget_encoded_rows()
    engine.run(TURN.prompt, 2, TURN.text[:2])
    after = drafts.Served(engine.model, engine.tokenizer, drafts.RunOptions())
    assert 16 not in after.pass_costs.ratios(100)


def test_warm_runs_know_what_earlier_warm_runs_found_though_a_cold_one_came_between():
    engine, passes = DraftedEngine(tiny_bench.models(), "plain", "auto", {}), []
    served = drafts.Served(engine.model, engine.tokenizer, drafts.RunOptions(draft="auto"))
    for cold in (False, True, False):
        if cold:
            engine.forget_encoded_rows()
        engine.run(TURN.prompt, 6, TURN.text[:6])
        passes.append(served.pass_costs.passes)
    assert 0 < passes[0] == passes[1] < passes[2] == 2 * passes[0]


def test_a_ratio_is_to_the_same_model_without_drafts_and_to_the_plain_one():
    lines = [
        {**tiny_bench.record(steps_s=(step,)), "engine": engine}
        for engine, step in (("plain off", 0.1), ("plain auto", 0.05), ("zip off", 0.2), ("zip auto", 0.1))
    ]
    cells = [[cell.strip() for cell in line.split("|")[-3:-1]] for line in time_table(lines).splitlines()[2:]]
    assert cells == [
        ["", ""],
        ["2.00 (2.00 to 2.00)"] * 2,
        ["", "0.50 (0.50 to 0.50)"],
        ["2.00 (2.00 to 2.00)", "1.00 (1.00 to 1.00)"],
    ]
