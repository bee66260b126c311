"""What tests of PyTorch share, besides `tests.kit.modules`."""

from __future__ import annotations

import pytest


@pytest.fixture
def pair(strategy):
    """A function that returns a module with its optimizer on servers, and its twin with torch's own.

    It takes the module, a class of `torch.optim`, its options, and `ours`, options that only we have; with `groups`, a
    function of a module, both have these groups of parameters.
    """
    import psclient.torch as pst
    from tests.kit.modules import twin

    def made(module, kind, groups=None, ours=(), **options):
        alone = twin(module)
        own, theirs = (groups(each) if groups else None for each in (module, alone))
        optimizer = pst.Optimizer(module, kind, own, strategy=strategy, **options, **dict(ours))
        return (module, optimizer), (alone, kind(theirs or alone.parameters(), **options))

    return made
