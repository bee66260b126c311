"""Traces: what a step is made of, over all processes, told to OpenTelemetry. Off, nothing of it is loaded or done.

- `options`: whether, and how, a process exports traces
- `traceparent`: the text by which one process's span is known to another
- `trace_ids`: the id of a step's trace, which all members find by themselves
- `tracer`: spans, and their export. The one module that imports `opentelemetry`; loaded where traces are on

It imports errors, options and versions. No value of a variable, and no token, ever enters it.
"""
