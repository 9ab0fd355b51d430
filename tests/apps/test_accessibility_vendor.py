"""What the tests of the page bring with them is as its package holds it."""

import re
from hashlib import sha256

from support.places import TESTS

VENDOR = TESTS / "apps/vendor"


def test_every_file_is_as_its_package_holds_it():
    lines = re.findall(r"^([0-9a-f]{64})  \./(\S+)$", (VENDOR / "VENDOR.md").read_text(), re.MULTILINE)
    wanted = {name: digest for digest, name in lines}
    found = {path.name: sha256(path.read_bytes()).hexdigest() for path in VENDOR.iterdir() if path.name != "VENDOR.md"}
    assert found == wanted
