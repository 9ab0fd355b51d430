"""The workflows of the hosted runners: what must pass runs on the CPU, what runs on Metal may fail."""

import yaml

from support.places import REPO

JOBS = yaml.safe_load((REPO / ".github/workflows/ci.yml").read_text())["jobs"]


def commands(job: str) -> list[str]:
    return [step["run"] for step in JOBS[job]["steps"] if "run" in step]


def test_the_slow_tests_run_wherever_the_quick_ones_run():
    script = (REPO / ".ci/run").read_text().splitlines()
    assert any(line.startswith("make test QUICK= ") for line in script)  # both in one run
    for run in map(commands, JOBS):
        assert ("make test" in run) == ("make test-slow" in run)


def test_the_required_job_on_a_mac_computes_on_the_cpu():
    job = JOBS["test"]
    assert "macos-15" in job["strategy"]["matrix"]["os"]
    assert job["env"]["MLX_ZIP_DEVICE"] == "cpu"
    assert "continue-on-error" not in job


def test_no_required_job_on_a_mac_computes_on_the_gpu():
    for job in JOBS.values():
        macs = "macos" in str(job["runs-on"]) or "macos" in str(job.get("strategy"))
        assert not macs or job.get("continue-on-error") or job["env"]["MLX_ZIP_DEVICE"] == "cpu"


def test_another_job_runs_metal_and_may_fail():
    job = JOBS["metal"]
    assert job["runs-on"].startswith("macos")
    assert (job["env"]["MLX_ZIP_DEVICE"], job["continue-on-error"]) == ("gpu", True)
    assert "make test" in commands("metal")


def test_the_report_of_selftest_is_kept_even_if_a_check_fails():
    assert ".venv/bin/mlx_zip selftest --out selftest.md" in commands("metal")
    (upload,) = [step for step in JOBS["metal"]["steps"] if "upload-artifact" in step.get("uses", "")]
    assert upload["if"] == "always()"
    assert upload["with"]["path"] == "selftest*"
