"""`psctl vars` and `psctl read`: the variables of a running job, and their values as they are now."""

from __future__ import annotations

import fnmatch
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import click
import numpy as np

from psclient.psctl.output import plain, table_of
from psclient.psctl.settings import WATCH, CommandSettings, command, connected
from pswire.cluster import Task
from pswire.errors import ConfigError
from pswire.limits import refuse_unknown
from pswire.model.plan import PlacedVariable
from pswire.model.tensor import DTYPES, Array
from pswire.telemetry.views.numbers import shape, short
from pswire.telemetry.views.variable_list import ServerTotal, VariableView, beside, slots, totals


@command(
    WATCH,
    ("List all variables of a job on this machine", "psctl vars --local"),
    ("List some of them as JSON", "psctl vars 'dense*' --json"),
    name="vars",
)
@click.argument("pattern", default="*")
def variables(settings: CommandSettings, pattern: str) -> int:
    """List the variables of a job.

    List variables whose names match PATTERN, such as 'dense*', each with its optimizer slots.
    """
    with connected(settings) as servers:
        known = servers.variables()
    primaries = slots(known)
    found = [v for v in beside(known, primaries) if _matches(v, primaries, pattern)]
    listed, sums = [VariableView.of(variable, primaries) for variable in found], totals(found)
    said = {"variables": listed, "servers": sums, "bytes": sum(variable.spec.nbytes for variable in found)}
    if not found:
        return settings.tell(said, f"no variable matches {pattern!r}; the job has {len(known)}")
    return settings.tell(said, table_of(VariableView, listed), table_of(ServerTotal, sums))


def _matches(variable: PlacedVariable, primaries: Mapping[str, str], pattern: str) -> bool:
    name = variable.spec.name
    return any(fnmatch.fnmatchcase(each, pattern) for each in (name, primaries.get(name, name)))


# ---- One value ----


@command(
    WATCH,
    ("Print statistics of a variable", "psctl read dense/kernel --stats"),
    ("Save its value for NumPy", "psctl read dense/kernel --npy kernel.npy"),
)
@click.argument("name")
@click.option(
    "--stats",
    is_flag=True,
    help="Print minimum, maximum, mean, standard deviation, and number of non-finite values.",
)
@click.option("--npy", type=click.Path(dir_okay=False, path_type=Path), help="Write the value to a NumPy file.")
def read(settings: CommandSettings, name: str, stats: bool, npy: Path | None) -> int:
    """Print the current value of a variable.

    NAME is a name that psctl vars lists. Training does not wait.
    """
    if npy is not None and not npy.parent.is_dir():
        raise ConfigError(f"there is no directory {npy.parent} for {npy.name}; create it first")
    with connected(settings) as servers:
        known = {variable.spec.name: variable for variable in servers.variables()}
        refuse_unknown([name], known, "variable")
        round, value = servers.read(known[name])
    said: dict[str, object] = {"name": name, "dtype": known[name].spec.tensor.dtype, "shape": list(value.shape)}
    said |= {"server": str(Task("ps", known[name].servers[0])), "round": round}
    if npy is not None:
        said["file"] = str(_write(npy, value))
    if stats:
        said["stats"] = stats_of(value)
    if settings.json:
        whole = {} if npy is not None or stats else {"value": plain(value.tolist())}
        return settings.tell(said | whole)
    return settings.tell(said, *_lines(said, value))


def _lines(said: Mapping[str, Any], value: Array) -> Iterator[str]:
    where = f"after round {said['round']}, from {short(said['server'])}"
    yield f"{said['name']}: {said['dtype']}{shape(value.shape)} {where}"
    if "file" not in said and "stats" not in said:
        yield np.array2string(value, max_line_width=100)
    for key, number in said.get("stats", {}).items():
        yield f"{key:>10}  {number if isinstance(number, int | str) or number is None else format(number, '.6g')}"
    if "file" in said:
        yield f"written to {said['file']}"


def _write(path: Path, value: Array) -> Path:
    """Writes a file of NumPy's, which knows no bfloat16: that is float32 there, exactly."""
    with path.open("wb") as file:
        np.save(file, value.astype("float32") if value.dtype == DTYPES["bfloat16"] else value, allow_pickle=False)
    return path


def stats_of(value: Array) -> dict[str, Any]:
    """Returns what the elements of an array are like: numbers as JSON knows them, None where there is no such number.

    Least, greatest, mean and deviation are of the finite elements; of complex ones of their absolute values.
    """
    numbers = np.abs(value) if value.dtype.kind == "c" else value.astype("float64")
    finite = numbers[np.isfinite(numbers)]
    said: dict[str, Any] = {"count": value.size}
    with np.errstate(over="ignore"):  # a deviation may be too large for a number
        for name in ("min", "max", "mean", "std"):
            said[name] = plain(float(getattr(finite, name)())) if finite.size else None
    counts = {"nan": np.isnan(numbers), "infinite": np.isinf(numbers), "zeros": numbers == 0}
    return said | {name: int(which.sum()) for name, which in counts.items()}
