"""What tests share. A test takes names from these modules, and from `pstesting`; the inside of the packages it takes
from `internals` alone, so that a change of the inside changes one file.

Worlds
    strategies       strategies of every kind, by name; `kinds` says on which a test runs
    fixtures         the fixtures of all folders: `strategy`, `shared`, and what a test changes for its own time
    rig              servers without a network or behind one, and a job on them that a test drives by hand
    workers          workers in threads of this process, a coordinator's too; the script `learn` of real processes
    simulated        whole jobs in simulated time, which a test makes fail
    transports       one server behind a transport, and networks that break
    small_kernels    servers that compile rounds of small arrays, imported by processes that are forked
    interrupted      loops that SIGINT interrupts at random moments
    children         processes that workers start, or that die at a point of a save, or hold a read back
    shell            commands as a user types them; terminals; other hosts; what may be left behind
    storage          disks, an object store, checkpoints that were written by other means
    certificates     certificates of a cluster, and others

Cases and references
    cases            pairwise choices, and how long searches are
    references       optimizers, compression and local steps in plain NumPy
    programs         update programs, random ones too
    contributions    contributions as workers send them
    tables           dynamic tables, their states and files, and a model of them
    modules          modules of PyTorch
    samples          calls of every verb with all fields
    tap              ears on the wire
    attacks          hostile messages and connections

Readers
    telemetry        metrics, event files and spans, as others read them; status pages, and a browser
    kubernetes       manifests as a cluster sees them

The house
    internals        names of the inside that tests outside the unit folders need
    house            the plan of the packages, and the calls that wait
"""
