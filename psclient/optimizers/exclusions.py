"""Which variables are left out of weight decay."""

from __future__ import annotations

import re
from collections.abc import Iterable

from psclient._src.variables.variable import Variable


class Exclusions:
    """Variables that are left out, themselves or by their names."""

    def __init__(self) -> None:
        self._variables: dict[int, Variable] = {}  # by the id of one that is in it
        self._names: set[str] = set()

    def add(self, variables: Iterable[Variable], names: Iterable[str]) -> None:
        """Leaves out more.

        Args:
            variables: these.
            names: regular expressions; variables whose name has one in it.

        Raises:
            TypeError: the names are one word, of which each letter would be a name.
        """
        if isinstance(names, str):
            raise TypeError(f"var_names is {names!r}, and must be a list of names; write var_names=[{names!r}]")
        self._variables |= {id(v): v for v in variables}
        self._names |= {re.compile(name).pattern for name in names}

    def __contains__(self, v: Variable) -> bool:
        return id(v) in self._variables or any(re.search(name, v.name) for name in self._names)
