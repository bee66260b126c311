"""Arrays in which replicas compute, where nothing is sent from them."""

from __future__ import annotations

from psclient._src.arrays.devices import Device, empty_host
from psclient._src.variables.variable import Variable
from pswire.model.tensor import DTYPES, Array


class HostBuffers:
    """One array of each variable and replica. May be used by any thread."""

    def __init__(self) -> None:
        self._arrays: dict[tuple[int, int], tuple[Variable, Array]] = {}
        """With what has the id, which is a name as long as that is kept."""

    def give(self, variable: Variable, replica: int, device: Device) -> Array:
        """Returns the array of a replica, a local number, whose device is given: always the same."""
        found = self._arrays.get((id(variable), replica))
        if found is None:
            spec = variable.spec
            made = variable, empty_host(device, DTYPES[spec.dtype], spec.shape)
            found = self._arrays.setdefault((id(variable), replica), made)
        return found[1]
