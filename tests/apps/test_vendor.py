"""What the page and its tests bring with them is as its packages hold it, with their licences."""

import re
from hashlib import sha256
from pathlib import Path

import pytest

from support.places import REPO, TESTS

FOLDERS = [REPO / "apps/chat/vendor", TESTS / "apps/vendor"]


def listed(folder: Path) -> dict[str, str]:
    """Path -> checksum, as the folder's page lists them."""
    lines = re.findall(r"^([0-9a-f]{64})  \./(\S+)$", (folder / "VENDOR.md").read_text(), re.MULTILINE)
    return {name: digest for digest, name in lines}


@pytest.mark.parametrize("folder", FOLDERS, ids=lambda folder: folder.parent.name)
def test_every_file_is_as_its_package_holds_it(folder):
    files = [path for path in folder.rglob("*") if path.is_file() and path.name != "VENDOR.md"]
    assert {path.relative_to(folder).as_posix(): sha256(path.read_bytes()).hexdigest() for path in files} == listed(
        folder
    )


@pytest.mark.parametrize("folder", FOLDERS, ids=lambda folder: folder.parent.name)
def test_every_package_has_its_licence_beside_it(folder):
    folders = {path.parts[0] if len(path.parts) > 1 else "." for path in map(Path, listed(folder))}
    assert [name for name in folders if not list((folder / name).glob("LICENSE*"))] == []
