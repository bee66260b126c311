"""Names that people write are checked against those that are known."""

from __future__ import annotations

import pytest

from pswire.errors import ConfigError
from pswire.limits import refuse_unknown


@pytest.mark.parametrize(
    ("known", "hint"),
    [(["lease", "round"], "did you mean lease?"), (["b", "a"], "known are a, b"), ([], "known are none")],
)
def test_a_name_that_is_not_known_is_refused(known, hint):
    """With the one that may be meant, or all that there are, be it none."""
    with pytest.raises(ConfigError) as caught:
        refuse_unknown(["leese"], known, "key")
    assert str(caught.value) == f"key leese is unknown; {hint}"


def test_names_that_are_known_pass():
    """All of them, or none at all."""
    refuse_unknown(["b", "a"], ["a", "b", "c"], "key")
    refuse_unknown([], [], "key")
