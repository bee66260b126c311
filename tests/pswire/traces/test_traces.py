"""What processes know of one another's spans, and whether they export any."""

import pytest

from pswire.cluster import Task
from pswire.encoding import messages
from pswire.errors import ConfigError
from pswire.pb import parameter_server_pb2 as pb
from pswire.traces.options import TraceOptions
from pswire.traces.trace_ids import StepName, trace_id
from pswire.traces.traceparent import labels_of, well_formed

SPAN = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"


def test_all_members_find_the_same_trace_id():
    """It is a function of the step's name alone, and differs where any part of that does."""
    step = StepName(7, (1, 2), "", 41, 0)
    assert trace_id(step) == trace_id(StepName(7, (1, 2), "", 41, 0)) == 0x9B3D348C7E58CDD7051E413FA28D1450
    other = {"job": 8, "incarnations": (1, 3), "strand": "/job:worker/task:0", "round": 42, "since": 1}
    others = [step._replace(**{name: value}) for name, value in other.items()]
    assert len({trace_id(each) for each in (step, *others)}) == 6


def test_trace_ids_are_spread_as_by_chance():
    """A sampler's ratio looks at the last 64 bits: a tenth of them is below a tenth of the greatest."""
    ids = [trace_id(StepName(7, (1, 2), "", round, 0)) & (1 << 64) - 1 for round in range(10_000)]
    assert 900 < sum(each < (1 << 64) // 10 for each in ids) < 1100


MALFORMED = ["", "x", "0" * 100_000, SPAN.upper(), SPAN + "-00", "\n" + SPAN, SPAN + "\n", "ff" + SPAN[2:]]
MALFORMED += ["00-" + "0" * 32 + SPAN[35:], SPAN[:36] + "0" * 16 + "-01", SPAN[:-2] + "00"]  # the last is not exported


@pytest.mark.parametrize("text", MALFORMED)
def test_a_peers_malformed_trace_is_none(text):
    """It is dropped, and the call is answered as ever."""
    assert well_formed(text) == ""
    header = pb.PushHeader(session=1, trace=text)
    assert messages.contribution_from_pb(header).trace == ""


def test_lines_of_a_log_name_their_trace():
    assert labels_of(SPAN) == {"trace_id": SPAN[3:35], "span_id": SPAN[36:52]}


def test_the_environment_says_whether_traces_are_on():
    """PS_TRACES does, a flag wins over it, and OpenTelemetry's own switch over both."""
    read = TraceOptions.from_environ
    assert read({}) == read({"PS_TRACES": "off"}) == TraceOptions("off", "http/protobuf")
    assert read({"PS_TRACES": "otlp"}) == read({}, "otlp") == TraceOptions("otlp", "http/protobuf")
    assert read({"PS_TRACES": "otlp"}, "off").traces == "off"
    assert read({"PS_TRACES": "otlp", "OTEL_SDK_DISABLED": "True"}).traces == "off"
    assert read({"PS_TRACES": "otlp", "OTEL_EXPORTER_OTLP_PROTOCOL": "grpc"}).protocol == "grpc"
    both = {"OTEL_EXPORTER_OTLP_PROTOCOL": "grpc", "OTEL_EXPORTER_OTLP_TRACES_PROTOCOL": "http/protobuf"}
    assert read({"PS_TRACES": "otlp", **both}).protocol == "http/protobuf"
    with pytest.raises(ConfigError, match="PS_TRACES jaeger is unknown; known are off, otlp"):
        read({"PS_TRACES": "jaeger"})
    with pytest.raises(
        ConfigError, match="OTEL_EXPORTER_OTLP_PROTOCOL http/json is unknown; known are grpc, http/protobuf"
    ):
        read({"PS_TRACES": "otlp", "OTEL_EXPORTER_OTLP_PROTOCOL": "http/json"})
    assert TraceOptions().open(Task("worker", 0)) is None
