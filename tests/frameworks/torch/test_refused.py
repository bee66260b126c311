"""What is wrong is told in a sentence: what it is, and what to write instead. It leaves all as it was."""

from __future__ import annotations

import pytest
import torch

import psclient as ps
import psclient.torch as pst
from tests.kit.modules import apart, batches, job, mlp, sgd_of_torch, steps
from tests.kit.strategies import opened, refused

SIZE = 20


def made(module=None, kind=torch.optim.SGD, params=None, **options):
    """An optimizer in the scope of the test's strategy."""
    return pst.Optimizer(mlp() if module is None else module, kind, params, **options)


def odd(dtype):
    return torch.nn.ParameterDict({"odd": torch.nn.Parameter(torch.ones(3, dtype=dtype), dtype.is_floating_point)})


def eights(persistent=False):
    module = torch.nn.Linear(2, 2)
    module.register_buffer("scales", torch.ones(2).to(torch.float8_e4m3fn), persistent)
    return module


def momentum_later():
    module = mlp()
    optimizer = made(module, lr=0.1)
    steps(module, optimizer, batches(1))
    optimizer.param_groups[0]["momentum"] = 0.9
    steps(module, optimizer, batches(1))


def saved_in_part():
    net = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 1))
    kept = made(net, params=net[0].parameters())
    ps.train.Checkpoint(model=net)
    return kept


OPTIMIZERS = [
    ("'odd' is torch.int64", ValueError, lambda: made(odd(torch.int64))),
    ("'odd' is torch.complex64.*view_as_complex", ValueError, lambda: made(odd(torch.complex64))),
    ("'weight' has no shape yet", ValueError, lambda: made(torch.nn.LazyLinear(3))),
    (r"'weight' is on the meta device.*to_empty", ValueError, lambda: made(torch.nn.Linear(2, 3, device="meta"))),
    ("a list is not a module", TypeError, lambda: made([])),
    (r"of shape \(7, 5\) does not belong to the module", ValueError, lambda: made(eights(), params=mlp().parameters())),
    ("add its layer to the module first", ValueError, lambda: made().add_param_group({"params": torch.ones(2, 2)})),
    ("buffers is 'sum'; use 'first', 'mean' or 'own'", ValueError, lambda: made(buffers="sum")),
    (r"buffer 'scales' is torch\.float8_e4m3fn, a dtype that servers do not", ValueError, lambda: made(eights(True))),
    ("Rprop is not supported.*SGD, Adam, AdamW, SparseAdam, NAdam", ValueError, lambda: made(kind=torch.optim.Rprop)),
    ("gradient of parameter '0.weight' is dense, but Spa", ValueError, lambda: made(kind=torch.optim.SparseAdam)),
    ("unexpected keyword argument 'amsgrad'", TypeError, lambda: made(kind=torch.optim.NAdam, amsgrad=True)),
    ("torch.optim.lbfgs.LBFGS is not supported", ValueError, lambda: made(kind=torch.optim.LBFGS)),
    ("Mine is not supported", ValueError, lambda: made(kind=type("Mine", (torch.optim.SGD,), {}))),
    ("pass its class and arguments", TypeError, lambda: made(kind=torch.optim.SGD(mlp().parameters()))),
    ("is not an optimizer", TypeError, lambda: made(kind="adam")),
    ("Invalid learning rate", ValueError, lambda: made(lr=-1.0)),
    ("differentiable=True is not", ValueError, lambda: made(kind=torch.optim.Adam, differentiable=True)),
    ("lr cannot be passed together with a SGD instance", TypeError, lambda: made(kind=ps.optimizers.SGD(0.1), lr=0.1)),
    ("momentum needs a slot 'momentum_buffer'", AttributeError, momentum_later),
    ("step needs cross-replica context", RuntimeError, lambda: ps.get_strategy().run(made().step)),
    (r"parameter '1\.weight' of a module in a checkpoint is not trained by", ValueError, saved_in_part),
]


def table():
    return ps.Variable(torch.zeros(SIZE, 4), name="table")


def bags(lengths=(), weights=3, keys=("a", "b"), **options):
    """What a collection of a table of two features makes of three values."""
    config = pst.EmbeddingBagConfig("t", 2, ["a", "b"], **options)
    jagged = pst.KeyedJaggedTensor([*keys], torch.tensor([1, 2, 3]), torch.tensor(lengths), torch.ones(weights))
    return pst.EmbeddingBagCollection([config], is_weighted=True)(jagged)


DOUBLE = pst.EmbeddingBagConfig("t", 2, ["a", "a"])
APART = [pst.EmbeddingConfig("t", 2, ["a"]), pst.EmbeddingConfig("u", 3, ["b"])]


def unweighted():
    config = pst.EmbeddingBagConfig("t", 2, ["a"])
    jagged = pst.KeyedJaggedTensor(["a"], torch.tensor([1]), torch.tensor([1]))
    return pst.EmbeddingBagCollection([config], is_weighted=True)(jagged)


def floats():
    made = pst.EmbeddingCollection([pst.EmbeddingConfig(name, 2, [name], num_embeddings=4) for name in "ab"])
    return made(pst.KeyedJaggedTensor(["a", "b"], torch.tensor([1.0, 2.0]), torch.tensor([1, 1])))


TWO = [pst.EmbeddingBagConfig("t", 2, ["a"])] * 2
SIZES = r"takes either num_embeddings and embedding_dim, or a table.*ps\.Variable"
DEVICE = "does not support device.*: rows come to the device of the ids"
AGAIN = r"max_norm or norm_type; use one for all"


def limited(max_norm):
    """A table of which one module has a norm already."""
    rows = pst.Embedding(10, 4, max_norm=1.0)
    return pst.Embedding(rows.table, max_norm=max_norm)


def of_group(**options):
    tables = ps.dynamic_embedding.group(["one", "two"], 2)
    return pst.Embedding(tables["one"], **options)


def collected(kind=pst.EmbeddingBagCollection, lengths=(1, 1, 1, 0), weights=None, **sizes):
    """What a collection of two tables of one dimension makes of three ids, of which one is large."""
    made = kind([pst.EmbeddingBagConfig(f"{sizes} {name}", 2, [name], **sizes) for name in "ab"])
    return made(pst.KeyedJaggedTensor(["a", "b"], torch.tensor([1, 2, 2**50]), torch.tensor(lengths), weights))


LIST = r"ids of 'table.*' are a list; pass a tensor"
ROWS = [
    (SIZES, TypeError, pst.Embedding),
    (SIZES, TypeError, lambda: pst.Embedding(10, 4, table=table())),
    (SIZES + "|without embedding_dim", TypeError, lambda: pst.Embedding(table(), 4)),
    ("alone, without dtype", TypeError, lambda: pst.EmbeddingBag(table(), dtype=torch.float16)),
    (r"Embedding\(0, 4\).*at least 1", ValueError, lambda: pst.Embedding(0, 4)),
    (r"EmbeddingBag\(4, None\).*at least 1", ValueError, lambda: pst.EmbeddingBag(4)),
    (DEVICE, TypeError, lambda: pst.Embedding(10, 4, device="cpu")),
    (DEVICE, TypeError, lambda: pst.EmbeddingBagCollection([], device="cpu")),
    ("Embedding does not support sizes=...: remove it", TypeError, lambda: pst.Embedding(10, 4, sizes=3)),
    ("_weight.*use from_pretrained", TypeError, lambda: pst.EmbeddingBag(10, 4, _weight=torch.zeros(10, 4))),
    ("padding_idx is 10, which is not a row of 10", ValueError, lambda: pst.Embedding(10, 4, 10)),
    ("max_norm is -1.0; use a positive number", ValueError, lambda: pst.Embedding(10, 4, max_norm=-1.0)),
    ("norm_type is True; use", ValueError, lambda: pst.Embedding(10, 4, norm_type=True)),
    (AGAIN, ValueError, lambda: limited(2.0)),
    ("max_norm needs a table of vectors with a variable", ValueError, lambda: of_group(max_norm=1.0)),
    ("scale_grad_by_freq is not", ValueError, lambda: pst.EmbeddingBag(9, 4, scale_grad_by_freq=True, mode="max")),
    ("embeddings must be a tensor of two dim", ValueError, lambda: pst.Embedding.from_pretrained(torch.zeros(3))),
    ("rows of a Tensor cannot be looked up", TypeError, lambda: pst.Embedding(torch.zeros(3, 2))),
    ("table 'n.*' is of int64; only floating dtypes", TypeError, lambda: pst.Embedding(ps.Variable([3], name="n"))),
    ("mode is 'least'", ValueError, lambda: pst.EmbeddingBag(table(), mode="least")),
    (LIST, TypeError, lambda: pst.Embedding(table())([1, 2])),
    (LIST, TypeError, lambda: pst.EmbeddingBag(table())([[1]])),
    ("id 20.*'table|'table.*20", ValueError, lambda: pst.Embedding(table())(torch.tensor([SIZE]))),
    ("'t' has data_type INT8; use one of FP16, BF16, FP32, FP64", ValueError, lambda: bags(data_type="INT8")),
    ("table 't' has an init_fn but no size", ValueError, lambda: bags(init_fn=torch.nn.init.ones_)),
    ("feature 'a'", KeyError, lambda: bags([1, 2], keys=["c", "b"])),
    ("two tables.*have the same name", ValueError, lambda: pst.EmbeddingBagCollection(TWO)),
    ("lengths of 'a', 'b' add up to 2, but there are 3 values", ValueError, lambda: bags([1, 1])),
    ("add up to 4, but there are 3 values", ValueError, lambda: bags([2, 2])),
    ("at least 0", ValueError, lambda: bags([4, -1])),
    ("two features are named 'a'", ValueError, lambda: bags([1, 2], keys=["a", "a"])),
    ("features of table 't' are named 'a'", ValueError, lambda: pst.EmbeddingBagCollection([DOUBLE])),
    ("is_weighted=True, but the features have no weights", ValueError, unweighted),
    ("features are a dict; pass a KeyedJaggedTensor", TypeError, lambda: pst.EmbeddingBagCollection([])({})),
    ("id 1125899906842624 at index 0 is not a row of 8", ValueError, lambda: collected(num_embeddings=8)),
    (r"b'.*1125899906842624 at position 0 is not from 0 to 2\*\*48 - 1.*bits=48", ValueError, collected),
    ("ids of .* must be integers|ids .* must be integers, not float", TypeError, floats),
    ("have dimensions 2, 3; use one", ValueError, lambda: pst.EmbeddingCollection(APART)),
    ("2 keys have 3 lengths", ValueError, lambda: bags([1, 1, 1])),
    ("2 weights for 3 values", ValueError, lambda: bags([2, 1], weights=2)),
]

DATA = [(torch.ones(2, 5), torch.ones(2, 3))]


def lookups(key, ids):
    return pst.Loader(DATA, made(), {key: ids})


def scaled(scaler, clips=False):
    module = mlp()
    optimizer = made(module)
    scaler.scale(module(DATA[0][0].double()).sum()).backward()
    if clips:
        scaler.unscale_(optimizer)
        torch.nn.utils.clip_grad_norm_(module.parameters(), 1.0)
    scaler.step(optimizer)


def scaled_apart():
    rows = pst.Embedding(ps.Variable(torch.zeros(SIZE, 4), consistency=ps.Async()))
    optimizer, scaler = made(rows, lr=0.1), pst.GradScaler("cpu")
    scaler.scale(rows(torch.tensor([1])).sum()).backward()
    scaler.step(optimizer)


LOOPS = [
    ("can be iterated only once", TypeError, lambda: pst.Loader(iter(DATA), made())),
    ("is not a distributed optimizer", TypeError, lambda: pst.Loader(DATA, torch.optim.SGD(mlp().parameters()))),
    ("prefetch has a key of type Sequential", TypeError, lambda: lookups(mlp(), lambda batch: batch)),
    ("prefetch has 3 for a Embedding", TypeError, lambda: lookups(pst.Embedding(table()), 3)),
    (r"use psclient\.torch\.GradScaler, which decides", RuntimeError, lambda: scaled(torch.amp.GradScaler("cpu"))),
    (r"consistency=ps\.Async\(\) do not wait for all workers", ValueError, scaled_apart),
    ("use global_clipnorm", RuntimeError, lambda: scaled(pst.GradScaler("cpu"), clips=True)),
]


@pytest.mark.parametrize(("words", "error", "call"), [*OPTIMIZERS, *ROWS, *LOOPS])
def test_what_is_wrong_with_torch_is_told(strategy, words, error, call):
    """Parameters, optimizers, buffers; tables and what is looked up in them; data, and scalers."""
    with strategy.scope():
        refused(error, words, call)


def test_what_is_right_beside_it_is_taken(strategy):
    """A buffer of any dtype that is no part of the module's state; bags whose lengths add up; a length of a loader."""
    with strategy.scope():
        assert made(eights()).variables
        assert bags([2, 1]).values().shape == (1, 4)
        assert len(pst.Loader(DATA, made())) == 1


def test_where_there_is_no_strategy():
    """Or no servers, or several replicas: it says so."""
    with pytest.raises(ValueError, match=r"no strategy is active; create the optimizer in strategy\.scope\(\)"):
        made()
    for kind, words in (
        ("mirrored-1", "trained by parameter servers, but a MirroredStrategy has none"),
        ("servers-2x2", "the strategy has 2 replicas in this process"),
    ):
        with opened(kind) as other:
            refused(TypeError, words, lambda other=other: made(strategy=other))


def test_a_large_parameter_with_sparse_gradients_is_told(strategy, caplog):
    """It comes back as a whole; a small one, and one with dense gradients, is not worth a word."""
    for size, sparse, told in ((70_000, True, 1), (70_000, False, 0), (100, True, 0)):
        caplog.clear()
        made(torch.nn.EmbeddingBag(size, 4, sparse=sparse), strategy=strategy)
        assert sum("the whole parameter" in each.getMessage() for each in caplog.records) == told


# ---- What is refused leaves all as it was ----


def test_a_second_optimizer_over_a_parameter(strategy):
    """Is refused while there is the first; afterwards it begins anew, with the values of then. One that could not be
    created trains nothing: parameters and rows are free for the next one, even while its error is looked at."""
    with strategy.scope():
        module = torch.nn.ModuleList([mlp(), pst.Embedding(ps.Variable([[1.0], [2.0]], name="rows"))])
    net, rows = module
    groups = [{"params": [*net[0].parameters(), rows]}, {"params": mlp().parameters()}]
    errors = []
    for given in ([*net.parameters(), rows, torch.nn.Parameter(torch.ones(2))], groups):
        with pytest.raises(ValueError, match="does not belong to the module and") as raised:
            made(module, params=given, strategy=strategy)
        errors.append(raised)
    first = made(module, lr=0.1, strategy=strategy)
    already = "is already trained by another"
    refused(ValueError, rf"parameter '0\.weight' {already} psclient", lambda: made(net, lr=0.1, strategy=strategy))
    refused(ValueError, f"what is looked up in 'rows.*' {already}", lambda: made(rows, lr=0.1, strategy=strategy))
    assert len(errors) == 2
    steps(net, first, batches(2))
    del first
    steps(net, made(module, lr=0.1, strategy=strategy), batches(2))
    assert apart(net, sgd_of_torch([*batches(2), *batches(2)])) < 1e-12


def test_a_state_of_another_optimizer_changes_nothing(pair):
    """Whether its groups lack a number or its parameters have other slots; a group of an older one may lack a word."""
    (module, optimizer), theirs = pair(mlp(), torch.optim.SGD, lr=0.1, momentum=0.5)
    steps(module, optimizer, batches(1))
    other = mlp()
    adam = torch.optim.Adam(other.parameters(), lr=0.5)
    steps(other, adam, batches(1))
    state = adam.state_dict()
    mixed = {**state, "param_groups": [{**optimizer.param_groups[0], **state["param_groups"][0]}]}
    slots = r"'0\.weight' has exp_avg, exp_avg_sq, but a SGD on servers has momentum_buffer"
    for wrong, words in ((state, "a parameter group without dampening, momentum"), (mixed, slots)):
        refused(ValueError, words, lambda wrong=wrong: optimizer.load_state_dict(wrong))
    assert optimizer.param_groups[0]["lr"] == 0.1
    steps(module, optimizer, batches(2)[1:])
    saved = optimizer.state_dict()
    del saved["param_groups"][0]["maximize"]
    optimizer.load_state_dict(saved)
    steps(module, optimizer, batches(3)[2:])
    steps(*theirs, batches(3))
    assert apart(module, theirs[0]) < 1e-12


REPLACED = {
    "a layer": (
        lambda module: module.__setitem__(2, torch.nn.Linear(7, 3).double()),
        r"'2\.weight' of the module was replaced after its optimizer was created",
    ),
    "a layer's dtype": (lambda m: m.__setitem__(2, torch.nn.Linear(7, 3)), r"'2\.weight' has dtype torch\.float32"),
    "the device": (lambda m: m.to("meta"), r"'0\.weight' has device meta, but had cpu when its optimizer was"),
    "memory": (lambda module: module.to_empty(device="meta"), r"'0\.weight' has device meta, but had cpu"),
    "the dtype": (lambda module: module.float(), r"'0\.weight' has dtype torch\.float32, but had torch\.float64"),
    "a shape": (
        lambda module: setattr(module[2].bias, "data", torch.zeros(4).double()),
        r"'2\.bias' has shape \(4,\), but had \(3,\)",
    ),
}


@pytest.mark.parametrize("case", REPLACED)
@pytest.mark.parametrize("compiled", [False, True])
def test_a_parameter_that_is_replaced(strategy, case, compiled):
    """By another object, shape, dtype or device: the step says which; one that is only not used is no error."""
    change, word = REPLACED[case]
    module = mlp()
    optimizer = made(torch.compile(module, backend="eager") if compiled else module, strategy=strategy)
    x = batches(1)[0][0]
    module[0](x).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    change(module)
    if case in ("a layer", "the device", "memory"):
        module(x.to(module[0].weight.device)).sum().backward()
    refused(RuntimeError, word, optimizer.step)


def test_a_step_in_one_worker_only():
    """Another one does something else: both are told what, instead of waiting for each other."""

    def work(strategy, worker):
        module = mlp()
        optimizer = made(module, lr=0.1, strategy=strategy)
        module(batches(1)[0][0]).sum().backward()
        do = (lambda: float(strategy.reduce("sum", 1.0, axis=None))) if worker else optimizer.step
        with pytest.raises(ps.errors.PSError) as raised:
            do()
        return str(raised.value)

    for told in job(work, 2):
        assert "reduce sum float64[3] for '2.bias'" in told
        assert "reduce sum float64[]" in told
