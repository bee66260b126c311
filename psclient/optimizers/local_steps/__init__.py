"""Local steps: workers train by themselves, and exchange how far they came once in many steps.

A worker sends a pseudo-gradient: the outer parameters, with which it began, minus its own. An outer optimizer on the
servers is given the mean over workers, weighted by tokens. An exchange is an ordinary step of that optimizer.

schedule    after which local steps a fragment of the parameters is exchanged
fragment    outer parameters on the servers, and what is sent of them
cadence     how fast a worker is, and how many local steps it makes between two exchanges
steps       counts local steps, and exchanges

`psclient.torch` and `psclient.jax` say how parameters become arrays, and back. Sources: DiLoCo, arXiv 2311.08105;
Streaming DiLoCo, arXiv 2501.18512; "Asynchronous Local-SGD Training for Language Modeling", arXiv 2401.09135.
"""
