"""The residuals of this process, with what servers keep of them: created, saved with checkpoints, shared out after."""

from __future__ import annotations

from collections.abc import Callable, Collection

import numpy as np

from psclient._src.context import StrategyFace
from psclient._src.distribute.backend import Beside
from psclient._src.distribute.reduction import LocalValue
from psclient._src.rounds.creation import Creation
from psclient._src.rounds.membership import Group
from psclient._src.rounds.reader import VariableReader
from psclient._src.variables.compression import Compressed, Compression, is_compressible
from psclient._src.variables.feedback import Feedback
from psclient._src.variables.kinds import ServerVariable
from psclient._src.variables.sharded import ShardedVariable, shards_of
from psclient._src.variables.variable import Variable, VariableAggregation
from pswire.model.compression import Codec
from pswire.model.plan import VariableSpec
from pswire.model.tensor import DTYPES, Array

Create = Callable[[StrategyFace, VariableSpec, Array, tuple[int, ...], bool], ServerVariable]
"""Creates a variable on servers, as `RemoteBackend.create_shard`."""


class Residuals:
    """The residuals of all variables to which contributions are compressed. Used by the thread that records.

    Beside each such variable there is another one, of its shape, on the same servers: the sum of all processes'
    residuals as of the last checkpoint, or of the one that was restored.

    Args:
        group: this process's place among the members.
        creation: creates variables.
        create: creates a variable on given servers.
        reader: reads variables.
        default: how contributions are compressed to variables that do not say it; None for not at all.
    """

    def __init__(
        self, group: Group, creation: Creation, create: Create, reader: VariableReader, default: Compression | None
    ) -> None:
        self._group = group
        self._creation = creation
        self._create = create
        self._reader = reader
        self._default = default
        self._all: list[Feedback] = []
        self._new: list[Feedback] = []

    def codec_for(self, variable: Variable, given: Compressed) -> Codec | None:
        """Returns how contributions to a new variable are compressed; None for not at all."""
        if given is False or not isinstance(variable, ServerVariable | ShardedVariable):
            return None
        chosen = given
        if given is None and variable.trainable and is_compressible(variable.spec.dtype):
            chosen = self._default
        return chosen.codec if chosen else None

    def add(self, variable: Variable, codec: Codec, name: str) -> None:
        """Compresses the contributions to a variable from now on.

        Args:
            variable: a new variable on servers, whole or cut.
            codec: how.
            name: of the variable that keeps the sum of the residuals.
        """
        strategy, spec = variable.strategy, VariableSpec(name, Feedback.spec_of(variable.spec), trainable=False)
        cut = variable if isinstance(variable, ShardedVariable) else None
        specs = [spec] if cut is None else cut.sharding.specs(spec)
        made = []
        for part, own in zip(shards_of(variable), specs, strict=True):
            zeros = np.zeros(own.tensor.shape, DTYPES[own.tensor.dtype])
            made.append(self._create(strategy, own, zeros, part.place, False))
            part.feedback = Feedback(codec, made[-1], lambda: None)
            self._new.append(part.feedback)
        none = VariableAggregation.NONE
        variable.residual = (
            made[0] if cut is None else ShardedVariable.stored(strategy, spec, none, cut.sharding, made, self._reader)
        )

    def settle(self) -> None:
        """Gives new residuals their share of what was restored before their variables were created."""
        if not self._new:
            return
        new, self._new = self._new, []
        for feedback in new:
            self._all.append(feedback)
            if self._creation.was_restored(feedback.saved.handle.id):
                self._share_out(feedback)

    def restored(self, chosen: Collection[Variable]) -> None:
        """Shares out what a checkpoint had for some variables; of those that got a value without it, there is none.

        Args:
            chosen: the variables that got a value.
        """
        self.settle()
        ids = {id(each) for each in chosen}
        for variable in chosen:
            for part in shards_of(variable):
                if part.feedback is None:
                    continue
                if id(variable.residual) in ids:
                    self._share_out(part.feedback)
                else:
                    part.feedback.begin(None)

    def _share_out(self, feedback: Feedback) -> None:
        """Begins with this process's share of a sum: by its replicas; where updates are one process's, with all of it.

        Who comes to a running job begins with nothing: what the servers have is the others'.
        """
        group = self._group
        if group.late or (group.alone and not group.leads):
            feedback.begin(None)
            return
        whole = np.array(self._reader.read(feedback.saved.handle))
        if not group.alone:
            whole /= whole.dtype.type(group.replicas)
            whole *= whole.dtype.type(len(group.devices))
        feedback.begin(whole)

    def save(self, reduce: Callable[[LocalValue, Beside], object]) -> None:
        """Records that servers keep the sums of the residuals of now, which a checkpoint is to have.

        Args:
            reduce: records a reduction; returns its value.
        """
        self.settle()
        for feedback in self._all:
            saved: ServerVariable = feedback.saved
            local = LocalValue("sum", 1.0, saved.spec, feedback.residual.copy())
            total = reduce(local, Beside(saved.place, repr(saved.name)))
            saved.strategy.extended.update(saved, lambda v, x: v.assign(x), (total,))
