"""Values of variables on the GPUs where replicas read them."""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Mapping
from typing import NamedTuple, Protocol
from weakref import WeakValueDictionary

from psclient._src.arrays.devices import Device, Upload, begin_uploads, packs
from pswire.model.plan import PlacedVariable as Handle
from pswire.model.tensor import Array


class DeviceCopy(NamedTuple):
    """A value on a GPU.

    Attributes:
        host: the value, as it was read.
        there: its copy.
    """

    host: Array
    there: Upload


class Copied(Protocol):
    """A variable, as far as its copies are concerned."""

    @property
    def handle(self) -> Handle:
        """Its number."""

    @property
    def _copies(self) -> dict[Device, DeviceCopy]:
        """Its values on GPUs."""


class DeviceCopies:
    """The variables that replicas have read on GPUs: small values that came together go there by one copy.

    May be used by any thread.

    Args:
        known: returns values that are here, of some variables, by their numbers.
    """

    def __init__(self, known: Callable[[Collection[int]], Mapping[int, Array]]) -> None:
        self._known = known
        self._lock = threading.Lock()  # guards which variables were read where
        self._read: dict[Device, WeakValueDictionary[int, Copied]] = {}

    def copy_to(self, device: Device, variable: Copied, value: Array) -> DeviceCopy:
        """Copies a variable's value to a GPU, and in the same copy the new values of others that were read there."""
        with self._lock:
            read = self._read.setdefault(device, WeakValueDictionary())
            read[variable.handle.id] = variable
            others = {id: each for id, each in read.items() if each is not variable}
        found = [(variable, value)]
        for id, host in self._known(others.keys()).items():
            copy = others[id]._copies.get(device)
            if copy is not None and copy.host is not host:
                found.append((others[id], host))
        (hosts, *_) = packs([host for _, host in found])
        made = [DeviceCopy(*each) for each in zip(hosts, begin_uploads(hosts, device), strict=True)]
        for (each, _), copy in zip(found, made, strict=False):
            each._copies[device] = copy
        return made[0]
