"""Arrays that grow without moving, in memory and in files: what is written stays, whatever leaves memory."""

from __future__ import annotations

import gc
import os
import resource
import signal
import sys
import threading
from pathlib import Path

import numpy as np
import pytest

from psserver.tables import reserved
from psserver.tables.native import Native
from psserver.tables.reserved import CHUNK, ReservedArray
from psserver.tiers import paging
from psserver.tiers.mapped import STEP, DiskFull, MappedFile, Use
from psserver.tiers.paging import PAGE
from psserver.tiers.tier import Tier
from pstesting import forks
from pswire.errors import ConfigError
from pswire.model.tables import SlotTensor, TableSpec
from pswire.model.tensor import address_of
from tests.kit.storage import disk, on_small_disk
from tests.kit.tables import Table
from tests.kit.transports import eventually

ROWS, WIDTH = 40_000, 300
BOUND = 4 << 20


@pytest.fixture
def directory():
    with disk() as found:
        yield found


@pytest.fixture
def tier(directory):
    made = Tier(str(directory), BOUND)
    yield made
    made.close()


def array_of(tier: Tier, rows: int = ROWS) -> ReservedArray:
    """Rows of 1,200 bytes, which lie across pages."""
    array = ReservedArray((WIDTH,), np.dtype(np.float32), 1 << 24, tier=tier)
    array.resize(rows)
    return array


def here(array: ReservedArray) -> np.ndarray:
    """Of each page of the rows if it is in memory, by the system's word."""
    return paging.are_resident(address_of(array.array), array.array.nbytes // PAGE)


def truly_resident(array: ReservedArray) -> int:
    return PAGE * int(here(array).sum())


def test_rows_are_as_they_were_written_wherever_they_lie(tier):
    """Ten times the bound is written and read in random order; every row is its own, and the bound is kept."""
    array, rng = array_of(tier), np.random.default_rng(0)
    expected = np.zeros(ROWS, np.float32)
    for number in range(1, 16):
        rows = rng.integers(0, ROWS, 700)
        array.touch(rows, Use.UPDATE)
        assert (array.array[rows] == expected[rows, None]).all()
        array.array[rows] = expected[rows] = number
    for piece in array.pieces():
        assert (array.array[piece] == expected[piece, None]).all()
    tier.settle()
    assert tier.resident <= BOUND
    assert truly_resident(array) <= 1.05 * BOUND
    assert tier.nbytes >= 11 * BOUND
    assert tier.left > 5 * BOUND
    assert (array.array == expected[:, None]).all()


def test_what_lies_beside_rows_in_files_takes_no_memory(tier):
    """A server that has none left takes it."""
    table = Table(TableSpec((2,)), native=Native(tier=tier))
    table.begin(1, np.arange(100))
    table.commit()
    assert table.put_beside(SlotTensor("m", "float32", (2,)), room=0) == 1


@pytest.mark.parametrize("told", [True, False])
def test_pages_leave_by_themselves(tier, told):
    """What was touched and is not touched again leaves memory without a call; pages that are touched without a word are
    counted, and leave."""
    array = array_of(tier)
    if told:
        array.fill(3)
    else:
        array.array[:] = 3
    eventually(lambda: truly_resident(array) <= BOUND)
    assert tier.left > 2 * BOUND
    assert (array.array == 3).all()


def test_what_is_updated_often_stays(tier):
    """A pass over everything leaves in memory what rounds update."""
    array, hot = array_of(tier), np.arange(0, 600)
    for _ in range(8):
        array.touch(hot, Use.UPDATE)
        array.array[hot] += 1
    for rows in range(0, ROWS, 500):
        array.touch(np.arange(rows, min(rows + 500, ROWS)), Use.PASS)
        array.array[rows : rows + 500] += 1
        if not rows % 5000:
            array.touch(hot, Use.UPDATE)
    tier.settle()
    assert here(array)[: 600 * WIDTH * 4 // PAGE].mean() > 0.9


def test_read_ahead_brings_rows_into_memory(tier):
    """Rows that are to be looked up are read before, and no others."""
    array = array_of(tier)
    array.fill(1)
    rows = np.arange(100, ROWS, 2000)
    tier.settle()
    first = rows * WIDTH * 4 // PAGE
    before = here(array)
    array.touch(rows, Use.LOOKUP, later=True)
    eventually(lambda: here(array)[first].all())
    after = here(array)
    assert not before[first].all()
    assert np.count_nonzero(after & ~before) <= 2 * len(rows)


def pages_of(rows: np.ndarray) -> np.ndarray:
    return np.unique(np.concatenate([rows * WIDTH * 4 // PAGE, (rows * WIDTH * 4 + WIDTH * 4 - 1) // PAGE]))


def on_the_disk(array: ReservedArray, tier: Tier, step: int) -> np.ndarray:
    """Writes all rows; returns some of which each lies on the disk alone."""
    array.fill(1)
    tier.settle()
    rows, there = np.arange(0, ROWS - 10, step), here(array)
    return rows[~(there[rows * WIDTH * 4 // PAGE] | there[(rows * WIDTH * 4 + WIDTH * 4 - 1) // PAGE])]


def test_a_hint_brings_rows_into_memory_and_no_lookup_waits_for_them(tier):
    """They stay while others come and go, until they are looked up; what came is counted, and what it was good for."""
    array = array_of(tier)
    rows = on_the_disk(array, tier, 400)
    pages, before = pages_of(rows), tier.outcomes["waited"]
    array.hint(rows)
    eventually(lambda: tier.outcomes["hinted"] == pages.size)
    assert here(array)[pages].all()
    for first in range(0, ROWS, 2000):  # a pass over everything, ten times the bound
        array.touch(np.arange(first, first + 2000), Use.PASS)
        array.array[first : first + 2000] += 1
    tier.settle()
    assert here(array)[pages].mean() > 0.99
    array.touch(rows, Use.LOOKUP, later=True)
    assert tier.outcomes == {"hinted": pages.size, "hit": pages.size, "waited": before}
    array.touch(rows, Use.UPDATE)
    array.touch(rows, Use.LOOKUP, later=True)
    assert tier.outcomes["hit"] == pages.size


def test_a_hint_has_the_room_that_lookups_leave(tier):
    """Half of the bound, less what is looked up first; that stays, and so does the bound."""
    array = array_of(tier)
    rows = on_the_disk(array, tier, 5)
    first, more = rows[: BOUND // PAGE // 8], rows[BOUND // PAGE // 8 :]
    array.touch(first, Use.LOOKUP, later=True)
    for piece in np.array_split(more, 30):  # ten times as many as there is room for
        array.hint(piece)
    eventually(lambda: tier.resident <= BOUND and not tier._untaken)
    assert 0 < tier.outcomes["hinted"] <= BOUND // PAGE // 2 - pages_of(first).size
    assert here(array)[pages_of(first)].mean() > 0.99
    tier.settle()
    assert truly_resident(array) <= 1.05 * BOUND


def test_a_hint_that_was_wrong_is_forgotten(tier):
    """After many updates of other rows its pages leave, and hints have room again."""
    array = array_of(tier)
    rows = on_the_disk(array, tier, 40)
    wrong, right = rows[:80], rows[-80:]
    array.hint(wrong)
    eventually(lambda: tier.outcomes["hinted"] == pages_of(wrong).size)
    hot = np.arange(2000, 2600)
    for _ in range(40):
        array.touch(hot, Use.UPDATE)
        array.array[hot] += 1
    for first in range(0, ROWS, 2000):
        array.touch(np.arange(first, first + 2000), Use.PASS)
        array.array[first : first + 2000] += 1
    tier.settle()
    assert here(array)[pages_of(wrong)].mean() < 0.5
    before = tier.outcomes["hinted"]
    array.hint(right)
    eventually(lambda: tier.outcomes["hinted"] > before)
    before = tier.outcomes["hinted"]
    tier.close()  # as a server ends while its members still push
    array.hint(wrong)
    assert tier.outcomes["hinted"] == before


def test_the_tail_is_given_back_and_comes_back_zero(tier):
    """Rows that are not shown any more take nothing of the disk."""
    array = array_of(tier)
    array.fill(1)
    full = tier.nbytes
    array.resize(100)
    assert full - tier.nbytes > 40 << 20
    assert tier.nbytes <= CHUNK
    assert tier.resident <= CHUNK
    array.resize(ROWS)
    assert (array.array[:100] == 1).all()
    assert not array.array[CHUNK // 1200 + 1 :].any()


def test_an_array_without_room_moves_into_another_file(tier, monkeypatch):
    """All values stay, and nothing of it is in memory without a bound."""
    monkeypatch.setattr("psserver.tables.reserved.FILE_ROOM", 64 << 10)
    array = array_of(tier, 40)
    array.array[:] = np.arange(40)[:, None]
    array.resize(400)
    array.array[40:] = 7
    assert array.moves == 1
    assert array.array[:40, 0].tolist() == [*range(40)]
    assert tier.nbytes >= 400 * 1200
    gc.collect()
    assert len(tier.files()) == 1


@pytest.mark.parametrize("rows", [2, 5])
def test_a_file_may_end_within_a_page(tier, monkeypatch, rows):
    """So it does where the process has no address space for more; rows of 1,200 bytes."""
    monkeypatch.setattr(reserved, "ROOM_OF_ALL", reserved._space.taken + 7000)
    array = array_of(tier, rows)
    array.touch(np.arange(rows), Use.UPDATE)
    array.array[:] = 7
    assert tier.resident == PAGE * -(-rows * 1200 // PAGE)
    assert (array.array == 7).all()


# ---- What may be wrong ----


def test_a_directory_is_looked_at_before_training(directory):
    """Each error says what is wrong with which directory, and what to do."""
    with pytest.raises(ConfigError, match=r"--tier-path .*/none is not a directory; create it"):
        Tier(str(directory / "none"), BOUND)
    (directory / "file").touch()
    with pytest.raises(ConfigError, match="is not a directory"):
        Tier(str(directory / "file"), BOUND)
    with pytest.raises(
        ConfigError, match=r"--tier-path /proc cannot hold memory-mapped files .*; check its permissions"
    ):
        Tier("/proc", BOUND)
    with pytest.raises(ConfigError, match=r"/dev/shm is in memory \(tmpfs\); name a directory on a disk"):
        Tier("/dev/shm", BOUND)


FULL = """
import os, sys
import numpy as np
from psserver.tables.reserved import ReservedArray
from psserver.tiers import tier
from psserver.tiers.mapped import DiskFull

try:
    tier.Tier(sys.argv[1], 1 << 20)
except tier.ConfigError as error:
    print(error)
tier.IN_MEMORY = ()  # a small file system of memory stands for a small disk
tier.TRIAL = 1 << 20
made = tier.Tier(sys.argv[1], 1 << 20)
with open(sys.argv[1] + "/other", "wb") as other:
    other.write(bytes(3 << 20))
array = ReservedArray((256,), np.dtype(np.float32), 1 << 24, tier=made)
array.resize(4000)
array.fill(5)
try:
    array.resize(7000)
except DiskFull as error:
    print(error)
print(len(array.array), (array.array == 5).all())
os.unlink(sys.argv[1] + "/other")
array.resize(7000)
array.fill(6)
print((array.array == 6).all(), made.nbytes >> 10)
made.close()
"""


def test_a_full_disk_is_told_before_anything_is_touched(tmp_path):
    """Room is reserved first: what a disk of 8 MiB has no room for is refused, and what was there is used on."""
    no_disk, full, kept, used = on_small_disk(FULL, tmp_path, "8m")
    assert "is in memory (tmpfs)" in no_disk
    assert full.startswith(f"2.93 MiB more in {tmp_path} (No space left on device); free disk space there")
    assert (kept, used) == ("4000 True", "True 8192")


def test_a_limit_of_files_is_told_as_a_full_disk_is(tier):
    """A process that may not make files of that size gets an error, and no signal."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, hard))
    try:
        array = ReservedArray((256,), np.dtype(np.float32), 1 << 24, tier=tier)
        with pytest.raises(DiskFull, match="File too large"):
            array.resize(4000)
        assert len(array.array) == 0
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


KILLED = """
import os, sys, signal
import numpy as np
from psserver.tables.reserved import ReservedArray
from psserver.tiers.tier import Tier

array = ReservedArray((256,), np.dtype(np.float32), 1 << 24, tier=Tier(sys.argv[1], 1 << 20))
array.resize(4000)
array.fill(5)
print(os.listdir(sys.argv[1]), os.statvfs(sys.argv[1]).f_bfree, flush=True)
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_a_killed_process_leaves_nothing(directory):
    """The files have no names, while it runs as after its death."""
    done = forks.run([sys.executable, "-c", KILLED, str(directory)], capture_output=True, text=True, check=False)
    assert done.returncode == -signal.SIGKILL, done.stderr
    assert done.stdout.startswith("[] ")
    assert os.listdir(directory) == []


def test_a_file_system_without_nameless_files_serves_as_well(directory, monkeypatch):
    """Then a file loses its name at once."""
    monkeypatch.setattr(os, "O_TMPFILE", os.O_DIRECTORY | os.O_WRONLY)  # what a kernel that has none takes it for
    file = MappedFile(str(directory), 1 << 20)
    file.reserve(PAGE)
    file.memory[:3] = b"abc"
    assert os.listdir(directory) == []
    assert file.reserved == min(STEP, 1 << 20)


def test_systems_without_one_call_for_many_runs_get_one_each(tier, monkeypatch):
    """An older kernel, or one that forbids it, is given advice run by run."""
    paging._own_process.cache_clear()
    monkeypatch.setattr(paging, "_vectored", lambda process, runs, advice: False)
    try:
        array = array_of(tier)
        array.fill(2)
        tier.settle()
        assert truly_resident(array) <= 1.05 * BOUND
        assert (array.array == 2).all()
    finally:
        paging._own_process.cache_clear()


def test_files_go_with_their_arrays(tier):
    """A tier keeps no array alive, and closes the files of those that are gone."""
    before = len(list(Path("/proc/self/fd").iterdir()))
    array = array_of(tier, 100)
    assert tier.nbytes > 0
    del array
    gc.collect()
    assert tier.nbytes == 0
    assert len(list(Path("/proc/self/fd").iterdir())) <= before


def test_a_tier_that_nobody_uses_has_no_thread(directory):
    """It ends without being closed, as the arrays of a server that is dropped."""
    array = array_of(Tier(str(directory), BOUND), 100)
    array.fill(1)
    (thread,) = [each for each in threading.enumerate() if each.name == "tier"]
    del array
    gc.collect()
    eventually(lambda: not thread.is_alive())


def status(name: str) -> int:
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(name))
    return int(line.split()[1]) << 10


@pytest.mark.parametrize("share", [0.5, 4.0])
def test_a_tier_that_is_too_small_says_so_once(tier, caplog, share):
    """Where rounds need more pages than may stay, most of them are read again and again; not where they fit, nor where
    rows are new, are passed over, or were looked up before their update."""
    rows = int(share * BOUND) // (WIDTH * 4)
    array = array_of(tier, rows)
    for number in range(int(40 / share)):
        for first in range(0, rows, 200):
            some = np.arange(first, min(first + 200, rows))
            array.touch(some, Use.LOOKUP)
            array.touch(some, Use.UPDATE)
            array.array[some] = number
            array.touch(some, Use.PASS)
        tier.settle()
    told = [record.getMessage() for record in caplog.records if "from disk too often" in record.getMessage()]
    if share < 1:
        assert tier.hit_rate == 1.0
        assert not told
    else:
        assert tier.hit_rate < 0.3
        (line,) = told
        assert "--tier-memory, 4 MiB; raise it" in line


def test_growth_moves_nothing_and_reserves_no_memory():
    """Room for 256 GiB costs none of it; an old view sees what is written through a new one."""
    before = status("VmRSS")
    array = ReservedArray((64,), np.dtype(np.float32), 1 << 40, 256 << 30)
    array.resize(10)
    first = array.array
    first[:] = 1
    array.resize(100_000)
    assert address_of(array.array) == address_of(first)
    array.array[5] = 2
    assert first[5].tolist() == [2] * 64
    assert not array.array[10:].any()
    assert array.moves == 0
    assert array.touched == 100_000 * 256
    assert status("VmRSS") - before < 100_000 * 256 + (64 << 20)


def test_the_tail_is_given_back():
    """Memory of rows that are not shown any more returns to the system, and they are zero afterwards."""
    array = ReservedArray((1024,), np.dtype(np.float64), 1 << 30)
    array.resize(10_000)
    array.array[:] = 1
    full = status("VmRSS")
    array.resize(100)
    assert full - status("VmRSS") > 70 << 20
    assert array.touched == CHUNK  # of which the rows that are left take a part
    array.resize(10_000)
    assert array.array[:100].all()
    assert not array.array[256:].any()


def test_it_is_released_with_its_last_view():
    """Address space is given back as soon as nobody holds a view."""
    gc.collect()
    before = status("VmSize")
    array = ReservedArray((), np.dtype(np.uint32), 1 << 40, 256 << 30)
    array.resize(5)
    view = array.array
    view[:] = 3
    del array
    gc.collect()
    assert status("VmSize") - before > 200 << 30
    assert view.tolist() == [3] * 5
    del view
    gc.collect()
    assert status("VmSize") - before < 1 << 30


def test_hundreds_of_arrays_leave_address_space_for_others(monkeypatch):
    """What they reserve together has a bound; those beyond it reserve nothing until some are gone."""
    room = 1 << 30
    monkeypatch.setattr(reserved, "ROOM_OF_ALL", reserved._space.taken + 3 * room + CHUNK)
    before = status("VmSize")
    arrays = [ReservedArray((2,), np.dtype(np.float32), 1 << 40, room) for _ in range(300)]
    assert status("VmSize") - before < 4 * room
    for array in arrays[::100]:
        array.resize(100)
        array.array[:] = 7
        array.resize(200_000)
        assert array.array[:100].tolist() == [[7, 7]] * 100
    assert [array.moves for array in arrays[::100]] == [0, 1, 1]
    del array, arrays
    gc.collect()
    late = ReservedArray((2,), np.dtype(np.float32), 1 << 40, room)
    late.resize(100)
    late.resize(200_000)
    assert late.moves == 0


@pytest.mark.parametrize("refuses", [True, False])
def test_without_room_it_is_copied_into_twice_as_much(monkeypatch, refuses):
    """Where the system reserves nothing, or too little was reserved, all values stay."""

    def refused(nbytes: int):
        raise OSError

    if refuses:
        monkeypatch.setattr(reserved._space, "reserve", refused)
    array = ReservedArray((2,), np.dtype(np.int16), 8)
    expected = np.zeros((0, 2), np.int16)
    for size in (3, 9, 20, 21, 500, 400, 900):
        new = np.full((max(size - len(expected), 0), 2), size, np.int16)
        expected = np.concatenate([expected, new])[:size]
        array.resize(size)
        array.array[size - len(new) : size] = new
        assert array.array.tolist() == expected.tolist()
    assert 3 <= array.moves <= 6
