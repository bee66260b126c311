"""Reads of whole dynamic tables: in pages of some buckets each, of all servers at once."""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

import numpy as np

from psclient._src.rounds.read_cache import ReadCache
from psclient._src.variables.sharded import TableContent, TableQuestion
from pswire.api import TableRead
from pswire.limits import PART_BYTES
from pswire.model.plan import PlacedVariable
from pswire.model.rows import ID_BYTES, row_bytes, row_specs
from pswire.model.tables import TablePart
from pswire.model.tensor import DTYPES, Array

PAGE_BYTES = PART_BYTES
"""Size of an answer, about: how many keys a bucket has is known on average."""


def contents(reads: ReadCache, parts: Sequence[PlacedVariable], what: TableQuestion, waits: bool) -> list[TableContent]:
    """Returns what parts of dynamic tables have, as of the last round of this process.

    Args:
        reads: asks the servers.
        parts: the parts.
        what: what is asked.
        waits: True to wait for rounds under way that assign them.
    """
    sizes = [size for size, _ in reads.ask_tables([(part, TableRead(part.id, "size")) for part in parts], waits)]
    found: list[list[list[Array]]] = [[_empty(part)] for part in parts]
    ahead = [[] if what == "size" else _pages(*each, what) for each in zip(parts, sizes, strict=True)]
    for nth in range(max(map(len, ahead))):
        asked = [(number, pages[nth]) for number, pages in enumerate(ahead) if nth < len(pages)]
        answers = reads.ask_tables([(parts[number], page) for number, page in asked], waits)
        for (number, _), (_, arrays) in zip(asked, answers, strict=True):
            found[number].append(arrays)
    return [_joined(each, size) for each, size in zip(found, sizes, strict=True)]


def _pages(part: PlacedVariable, size: int, what: TableQuestion) -> list[TableRead]:
    buckets = cast(TablePart, part.spec.part).buckets
    nbytes = size * (ID_BYTES + (row_bytes(part.spec.tensor) if what == "rows" else 0))
    step = max(1, PAGE_BYTES * len(buckets) // max(nbytes, 1))
    pages = [buckets[first : first + step] for first in range(0, len(buckets), step)] if size else []
    return [TableRead(part.id, what, page.start, len(page)) for page in pages]


def _empty(part: PlacedVariable) -> list[Array]:
    return [np.empty(spec.shape, DTYPES[spec.dtype]) for spec in row_specs(part.spec.tensor, 0)]


def _joined(pages: Sequence[Sequence[Array]], size: int) -> TableContent:
    (keys, rows), *more = pages
    keys = np.concatenate([keys, *(page[0] for page in more)])
    rows = np.concatenate([rows, *(page[1] for page in more if len(page) > 1)])
    return TableContent(size, keys, rows)
