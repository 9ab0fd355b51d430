"""`mlx_zip selftest`, on this machine."""

import json
import re
import subprocess
import sys
import time

import pytest

from mlx_zip.bench import machine
from mlx_zip.bench.engines import model_making as shapes
from mlx_zip.bench.steps import selftest_steps as steps
from mlx_zip.cli import main, selftest
from mlx_zip.cli.selftest import checks, speed
from support import tiny_bench

FAILED = checks.Check("codec", False, "3 of 4 equal")


@pytest.fixture(scope="module")
def page(tmp_path_factory):
    file = tmp_path_factory.mktemp("selftest") / "report.md"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(speed, "TRIALS", 1)  # speed is not what these tests are about
        patch.setattr(steps, "TRIALS", 1)
        patch.setattr(steps, "TOKENS", 32)
        patch.setattr(steps, "HOST_TOKENS", 24)
        patch.setattr(steps, "HOST_ROUNDS", 1)
        assert main(["selftest", "--out", str(file)]) == 0
    return file.read_text()


@pytest.fixture(scope="module")
def figures(page, tmp_path_factory):
    return json.loads(next(tmp_path_factory.getbasetemp().glob("selftest*/report.json")).read_text())


@pytest.mark.slow
def test_the_report_says_that_all_checks_passed(page):
    assert page.startswith("# mlx_zip selftest\n\nAll checks passed.\n")


@pytest.mark.slow
@pytest.mark.parametrize("check", ["codec: encode cases", "llama_transformer_tied_lora: logits", "step, plain"])
def test_the_report_has_a_line_for_each_check(page, check):
    assert check in page


@pytest.mark.slow
def test_the_report_names_versions(page):
    assert re.search(r"versions: mlx \d+\.\d+.*mlx-lm \d+", page)


@pytest.mark.slow
def test_the_report_fits_on_a_page(page):
    assert len(page.splitlines()) < 50


def only(monkeypatch, *found):
    """Replaces the real checks."""
    monkeypatch.setattr(selftest, "check_codec", lambda golden: list(found))
    monkeypatch.setattr(selftest, "check_models", lambda golden, folder: [])
    monkeypatch.setattr(selftest, "measure_rough_speeds", lambda golden, folder: [])
    monkeypatch.setattr(selftest, "measure_steps", lambda limit, data: [])


def test_a_failed_check_is_in_the_report_with_its_figure():
    assert "| FAILED | codec | 3 of 4 equal |" in selftest.markdown_report([FAILED])


def test_the_report_says_first_that_a_check_failed():
    assert selftest.markdown_report([FAILED]).startswith("# mlx_zip selftest\n\n**1 checks failed.**\n")


def test_a_failed_check_gives_exit_status_1(monkeypatch, tmp_path):
    only(monkeypatch, FAILED)
    assert main(["selftest", "--out", str(tmp_path / "report.md")]) == 1


def test_an_error_in_a_check_is_a_failure_with_its_message():
    def broken():
        raise RuntimeError("no device\nfound")

    assert checks.run_check("a", broken) == checks.Check("a", False, "RuntimeError: no device found")


def test_not_a_number_is_worse_than_any_tolerance():
    assert not checks._larger_difference(0.0, float("nan")) <= 1.0


def test_a_wrong_recorded_case_is_named():
    case = {"name": "odd", "ok": False}
    assert checks._count_agreeing(lambda case: case["ok"], [case]) == (False, "0 of 1 equal; not: odd")


def test_a_report_that_cannot_be_written_is_an_error(monkeypatch, tmp_path):
    only(monkeypatch)
    assert main(["selftest", "--out", str(tmp_path / "no" / "report.md")]) == 2


def test_a_report_that_cannot_be_written_is_refused_before_the_checks(monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(selftest, "check_codec", None)
    assert main(["selftest", "--out", str(tmp_path)]) == 2
    assert capsys.readouterr().err == f"error: --out {tmp_path}: is a folder or device, not a file\n"


@pytest.mark.slow
def test_the_json_file_has_the_checks_the_machine_and_the_steps(figures):
    assert figures["selftest"] == selftest.SCHEMA
    assert {"name", "passed", "figure"} == set(figures["checks"][0])
    assert figures["machine"]["versions"]
    assert figures["surroundings"]["versions"]["mlx"]
    assert {"state_before", "state_after", "bandwidth"} <= set(figures)


@pytest.mark.slow
def test_the_bundled_model_runs_cold_and_warm_ahead_and_not(figures, page):
    found = figures["stories"]
    assert {(way["rows"], way["ahead"]) for way in found["ways"]} == set(steps.WAYS)
    assert all(way["step_ms"] > 0 and way["over_mlx_lm"] > 0 for way in found["ways"])
    assert [way["second_bodies"] is None for way in found["ways"]] == [not ahead for _, ahead in steps.WAYS]
    assert found["base_tokens_per_step"] > 1
    assert "stories: step, warm, ahead |" in page


@pytest.mark.slow
def test_what_is_left_out_says_why(page):
    assert "smollm2: steps | skipped: on a CPU" in page
    assert "1B, 4 bit: steps | skipped: on a CPU" in page


@pytest.fixture
def tiny_shape(monkeypatch):
    tiny_bench.small(monkeypatch)
    monkeypatch.setitem(shapes.SHAPES, "tiny", {**tiny_bench.SHAPE, "hidden_size": 64, "intermediate_size": 64})
    monkeypatch.setattr(steps, "SHAPE", "tiny")
    monkeypatch.setattr(steps, "TRIALS", 1)
    monkeypatch.setattr(steps, "TOKENS", 24)
    monkeypatch.setattr(steps, "default_device_is_gpu", lambda: True)


@pytest.mark.slow
def test_a_shape_of_random_weights_is_timed_with_encoders_of_8_bits(tiny_shape, monkeypatch):
    seen, step_figures = [], steps.measure_steps

    def watched(models, *rest):
        seen.append(models.zipped())
        return step_figures(models, *rest)

    monkeypatch.setattr(steps, "measure_steps", watched)
    found = steps.measure_random_shape(60)
    assert found["model"] == "tiny"
    assert len(found["ways"]) == 4
    encoder = seen[0].input_encoder.layers[0]
    assert {one.bits for _, one in encoder.named_modules() if hasattr(one, "bits")} == {8}
    assert seen[0].model.embed_tokens.bits == 4


@pytest.mark.slow
def test_a_model_by_name_is_timed_only_if_it_was_made_before(tiny_shape, monkeypatch, tmp_path):
    monkeypatch.setattr(steps.named, "find_made_model", lambda name: None)
    assert "were not used on this machine before" in steps.measure_smollm2(60)["skipped"]
    monkeypatch.setattr(steps.named, "find_made_model", lambda name: tmp_path)
    opened = steps.models_from_folders
    monkeypatch.setattr(
        steps, "models_from_folders", lambda *names: opened(*(n.replace("smollm2", "stories") for n in names))
    )
    assert len(steps.measure_smollm2(60)["ways"]) == 4


def test_a_machine_without_the_memory_leaves_the_shape_out(tiny_shape, monkeypatch):
    monkeypatch.setattr(steps, "host_memory_bytes", lambda: 4 << 30)
    assert steps.measure_random_shape(60) == {"skipped": "it needs a machine with 6 GB of memory"}


@pytest.mark.slow
def test_rounds_end_at_the_limit(tiny_shape, monkeypatch):
    monkeypatch.setattr(steps, "TRIALS", 50)
    assert steps.measure_random_shape(0.0)["trials"] == 1


def test_a_part_for_which_no_time_is_left_is_skipped_and_says_so():
    data = {}
    found = speed._check_steps("1B", None, steps.report_lines, speed._seconds_left(time.monotonic() + 5, 40), data)
    assert [(one.passed, one.figure) for one in found] == [
        (None, "skipped: the limit of 110 seconds is nearly reached")
    ]
    assert "skipped" in data["1B"]


def test_a_part_that_fails_is_a_failed_check():
    def broken(limit_s):
        raise RuntimeError("out of memory")

    found = speed._check_steps("1B", broken, steps.report_lines, 40, {})
    assert found == [checks.Check("1B: steps", False, "RuntimeError: out of memory")]


def test_bandwidth_is_measured_on_a_gpu_only(tiny_shape, monkeypatch):
    assert steps.measure_bandwidth()["gb_per_s"] > 0
    monkeypatch.setattr(steps, "default_device_is_gpu", lambda: False)
    assert "skipped" in steps.measure_bandwidth()


def test_the_figures_lie_next_to_the_report(tmp_path):
    assert selftest.json_report_path(tmp_path / "a.md") == tmp_path / "a.json"
    assert selftest.json_report_path(tmp_path / "a.json") == tmp_path / "a.figures.json"


def test_the_last_line_says_what_to_do_with_both_files(monkeypatch, tmp_path, capsys):
    only(monkeypatch)
    assert main(["selftest", "--out", str(tmp_path / "report.md")]) == 0
    *_, files, last = capsys.readouterr().out.splitlines()
    assert f"report: {tmp_path}/report.md, figures: {tmp_path}/report.json" in files
    assert last == "Please attach both files to a report on the project's issue tracker."


# ---- the machine's state


def test_linux_reports_heat_and_power_where_it_has_sensors(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "platform", "linux")
    zone, supply = tmp_path / "sys/class/thermal/thermal_zone0", tmp_path / "sys/class/power_supply/BAT0"
    for folder, name, text in ((zone, "temp", "45000"), (supply, "status", "Discharging")):
        folder.mkdir(parents=True)
        (folder / name).write_text(text + "\n")
    found = machine.power_and_thermal_state(tmp_path)
    assert (found["thermal"], found["power"]) == ("45000", "Discharging")
    assert "governor" not in found


def test_a_mac_reports_what_pmset_prints_without_the_batterys_number(monkeypatch):
    printed = {"therm": "Note: No thermal warning level has been recorded\n"}
    printed["batt"] = "Now drawing from 'AC Power'\n -InternalBattery-0 (id=1234)\t100%; charged\n"

    def run(command, **options):
        assert options["timeout"] == 10
        if command[-1] not in printed:
            raise FileNotFoundError(command[0])
        return subprocess.CompletedProcess(command, 0, printed[command[-1]], "")

    monkeypatch.setattr(sys, "platform", "darwin")
    monkeypatch.setattr(subprocess, "run", run)
    found = machine.power_and_thermal_state()
    assert found["thermal"] == "Note: No thermal warning level has been recorded"
    assert found["power"] == "Now drawing from 'AC Power'; -InternalBattery-0 100%; charged"
    assert "chip" not in found


def test_a_mac_reports_its_gpu_cores_power_mode_and_which_wheel_of_kernels_it_has(monkeypatch, tmp_path):
    printed = {  # as macOS 26 prints it
        "SPDisplaysDataType": "Graphics/Displays:\n    Apple M4 Pro:\n      Chipset Model: Apple M4 Pro\n"
        "      Total Number of Cores: 20\n      Vendor: Apple (0x106b)\n      Metal Support: Metal 4\n",
        "-g": " standby              1\n lowpowermode         1\n womp                 0\n",
        "therm": "CPU Power notify\n\tCPU_Scheduler_Limit\t= 100\n\tCPU_Speed_Limit\t\t= 87\n",
    }

    def run(command, **options):
        if command[-1] not in printed:
            raise FileNotFoundError(command[0])
        return subprocess.CompletedProcess(command, 0, printed[command[-1]], "")

    info = tmp_path / "mlx_metal-0.32.4.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: mlx-metal\nVersion: 0.32.4\n")
    (info / "WHEEL").write_text("Wheel-Version: 1.0\nTag: py3-none-macosx_26_0_arm64\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(sys, "platform", "darwin")
    monkeypatch.setattr(subprocess, "run", run)
    found = machine.power_and_thermal_state()
    assert found["gpu"] == "Chipset Model: Apple M4 Pro; Total Number of Cores: 20; Metal Support: Metal 4"
    assert found["low power mode"] == "lowpowermode 1"
    assert found["thermal"].endswith("CPU_Speed_Limit = 87")
    assert found["metal wheel"] == "0.32.4 macosx_26_0_arm64"


def test_a_machine_without_metal_names_no_wheel(monkeypatch):
    monkeypatch.setattr(machine, "METAL", "not-installed-anywhere")
    assert "metal wheel" not in machine.power_and_thermal_state()


# ---- the parts of a step


@pytest.mark.slow
def test_the_report_has_the_parts_of_a_step_and_the_file_has_every_sample(figures, page):
    ways = figures["host"]["ways"]
    assert set(ways) == {"cold", "warm"}
    for way in ways.values():
        assert set(way["parts_ms"]) == set(steps.PARTS)
        assert {len(samples) for samples in way["samples_us"].values()} == {way["steps"]}
        assert way["parts_ms"]["blocks"].keys() == steps.QUANTILES.keys()
        assert way["steps"] > 1
    assert "host: parts of a step, warm | stalls: " in page
