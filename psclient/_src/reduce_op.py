"""How values are combined across replicas."""

from __future__ import annotations

import enum

from pswire.model.plan import ReduceOp as OpName


class ReduceOp(enum.Enum):
    """SUM, or MEAN: the sum over the number of contributing replicas, or of elements where an axis is reduced."""

    SUM = "sum"
    MEAN = "mean"

    @property
    def wire(self) -> OpName:
        """Its name in plans."""
        return "sum" if self is ReduceOp.SUM else "mean"

    @classmethod
    def parse(cls, op: ReduceOp | str) -> ReduceOp:
        """The op of a name in any case; raises `ValueError` for an unknown one."""
        if isinstance(op, cls):
            return op
        try:
            return cls(str(getattr(op, "value", op)).lower())
        except ValueError:
            raise ValueError(f"unknown reduction {op!r}; use ps.ReduceOp.SUM or MEAN") from None
