"""The deliberate breaks of tests/breaks still have a place in the product, and a test that is to notice them."""

import re

import pytest
from breaks.run import Break, read_breaks
from conftest import REPO


@pytest.mark.parametrize("broken", read_breaks(), ids=lambda broken: broken.what)
def test_a_break_has_a_place_and_a_test(broken: Break) -> None:
    broken.place(REPO)  # raises where there is none, or several
    file, _, name = broken.test.partition("::")
    assert re.search(rf"^def {re.escape(name.partition('[')[0])}\(", (REPO / file).read_text(), re.MULTILINE), name
