"""What servers of fault tests import: they compile rounds of arrays of any size, and count them.

A server compiles rounds of small arrays only after hundreds of them, and the jobs of tests are shorter. Imported by the
process that is forked, within `pstesting.forks.having`; see the fixture `compiled_rounds`.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

from psserver.execution.compiled import CompiledRound
from psserver.programs.kernels import kernels
from tests.kit.fixtures import COMPILED_ROUNDS


def _counted(run: Callable[..., Any]) -> Callable[..., Any]:
    def counted(*args: Any) -> Any:
        found = run(*args)
        if found is not None and COMPILED_ROUNDS in os.environ:
            with open(os.environ[COMPILED_ROUNDS], "ab") as file:
                file.write(b".")
        return found

    return counted


kernels.SMALL_PATIENCE, kernels.LARGE = 1, 0  # so a round waits for its kernels, and no test for the compiler
CompiledRound.run = _counted(CompiledRound.run)  # type: ignore[method-assign]
