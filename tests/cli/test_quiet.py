"""Commands silence the libraries that they use."""

import os
import warnings

import pytest

from mlx_zip.cli import silence_library_warnings


@pytest.fixture(autouse=True)
def environment(monkeypatch):
    """Restores the variables and the filters of warnings after each test."""
    monkeypatch.setattr(os, "environ", {"TRANSFORMERS_VERBOSITY": "info"})
    with warnings.catch_warnings():
        yield


def test_libraries_are_silenced_unless_the_user_asked_them_to_speak():
    silence_library_warnings()
    assert os.environ["TRANSFORMERS_VERBOSITY"] == "info"
    assert os.environ["HF_HUB_VERBOSITY"] == "error"


def test_without_a_terminal_downloads_draw_no_bars():
    silence_library_warnings()
    assert os.environ["HF_HUB_DISABLE_PROGRESS_BARS"] == "1"
