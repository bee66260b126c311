"""The residuals of this process, with what servers keep of them: created, saved with checkpoints, shared out after."""

from __future__ import annotations

from collections.abc import Callable, Collection

import numpy as np

from psclient._src.context import StrategyFace
from psclient._src.data.group import ReplicaGroup
from psclient._src.distribute.backend import Names
from psclient._src.distribute.destinations import ServerIds, ValueHome
from psclient._src.distribute.reduction import LocalValue
from psclient._src.variables.compression import Compressed, Compression, is_compressible
from psclient._src.variables.feedback import Feedback
from psclient._src.variables.kinds import ServerVariable
from psclient._src.variables.server_reader import ServerReader
from psclient._src.variables.sharded import ShardedVariable, shards_of
from psclient._src.variables.variable import Variable, VariableAggregation
from pswire.model.compression import Codec
from pswire.model.plan import VariableSpec
from pswire.model.tensor import DTYPES, Array


class Residuals:
    """The residuals of all variables to which contributions are compressed. Used by the thread that records.

    Beside each such variable there is another one, of its shape, on the same servers: the sum of all processes'
    residuals as of the last checkpoint, or of the one that was restored.

    Args:
        group: the processes that train together.
        reader: reads variables.
        create: creates a variable on servers that are known.
        names: of the strategy's variables.
        was_restored: tells of a variable, by its number, whether its first value was a restored checkpoint's.

    Attributes:
        default: how contributions are compressed to trained variables that do not say it; None for not at all.
    """

    default: Compression | None = None

    def __init__(
        self,
        group: ReplicaGroup,
        reader: ServerReader,
        create: Callable[[StrategyFace, VariableSpec, Array, ServerIds], ServerVariable],
        names: Names,
        was_restored: Callable[[int], bool],
    ) -> None:
        self._group = group
        self._was_restored = was_restored
        self._reader, self._create, self._names = reader, create, names
        self._all: list[Feedback] = []

    def compress(self, variable: Variable, given: Compressed) -> None:
        """Compresses the contributions to a new variable, if they travel; see `Backend.create`."""
        codec, first = self._codec_for(variable, given), f"{variable.name}/residual"
        if codec is not None:
            name = self._names.unique(first)
            self._names.take(first, name)
            self._add(variable, codec, name)

    def _codec_for(self, variable: Variable, given: Compressed) -> Codec | None:
        """Returns how contributions to a new variable are compressed; None for not at all."""
        if given is False or not isinstance(variable, ServerVariable | ShardedVariable):
            return None
        chosen = given
        if given is None and variable.trainable and is_compressible(variable.spec.dtype):
            chosen = self.default
        return chosen._codec if chosen else None

    def _add(self, variable: Variable, codec: Codec, name: str) -> None:
        """Creates the variable of a name that keeps the sum of the residuals."""
        strategy, spec = variable.strategy, VariableSpec(name, Feedback.spec_of(variable.spec), trainable=False)
        cut = variable if isinstance(variable, ShardedVariable) else None
        specs = [spec] if cut is None else cut.sharding.specs(spec)
        made = []
        for part, own in zip(shards_of(variable), specs, strict=True):
            zeros = np.zeros(own.tensor.shape, DTYPES[own.tensor.dtype])
            made.append(self._create(strategy, own, zeros, part.place))
            part.feedback = Feedback(codec, made[-1], self._first)
            self._all.append(part.feedback)
        none = VariableAggregation.NONE
        variable._residual = (
            made[0] if cut is None else ShardedVariable._stored(strategy, spec, none, cut.sharding, made, self._reader)
        )

    def restored(self, chosen: Collection[Variable]) -> None:
        """Shares out what a checkpoint had for some variables; of those that got a value without it, there is none.

        Args:
            chosen: the variables that got a value.
        """
        ids = {id(each) for each in chosen}
        for variable in chosen:
            for part in shards_of(variable):
                if part.feedback is None:
                    continue
                part.feedback.begin(self._share(part.feedback) if id(variable._residual) in ids else None)

    def _first(self, feedback: Feedback) -> Array | None:
        """Returns the residual to begin with of a variable that is new here; None for nothing.

        Who comes to a running job has none: what the servers have is the others'.
        """
        restored = not self._group.late and self._was_restored(feedback.saved.handle.id)
        return self._share(feedback) if restored else None

    def _share(self, feedback: Feedback) -> Array | None:
        """Returns this process's share of a restored sum, by its replicas.

        Where each process updates alone the first one has all of it.
        """
        group = self._group
        if group.alone and not group.leads:
            return None
        whole = np.array(self._reader.read_all([feedback.saved.handle])[0])
        if not group.alone:
            whole /= whole.dtype.type(group.replicas)
            whole *= whole.dtype.type(len(group.devices))
        return whole

    def save(self, reduce: Callable[[LocalValue, ValueHome], object]) -> None:
        """Records that servers keep the sums of the residuals of now, which a checkpoint is to have.

        Args:
            reduce: records a reduction; returns its value.
        """
        for feedback in self._all:
            saved: ServerVariable = feedback.saved
            local = LocalValue("sum", 1.0, saved.spec, feedback.residual)
            total = reduce(local, ValueHome(saved.place, repr(saved.name)))
            saved.strategy.extended.update(saved, lambda v, x: v.assign(x), (total,))
