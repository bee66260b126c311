"""psctl as tests run it: in this process."""

from __future__ import annotations

import json
from typing import Any, NamedTuple

import pytest

from psclient import psctl


class Done(NamedTuple):
    """How a command ended, and what it printed."""

    code: Any
    out: str
    err: str

    @property
    def json(self) -> Any:
        return json.loads(self.out)


@pytest.fixture
def call(capsys):

    def called(*args: Any) -> Done:
        capsys.readouterr()
        with pytest.raises(SystemExit) as ended:
            psctl.main(list(map(str, args)))
        return Done(ended.value.code, *capsys.readouterr())

    return called


@pytest.fixture
def bare(monkeypatch):
    """An environment that says nothing to psctl."""
    for name in ("TF_CONFIG", "PS_TOKEN", "PS_TOKEN_FILE", "PS_TLS_CERT", "PS_TLS_KEY", "PS_TLS_CA", "COLUMNS"):
        monkeypatch.delenv(name, raising=False)
