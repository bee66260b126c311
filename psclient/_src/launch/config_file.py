"""The file that describes a local cluster, for `psworker --config`: which keys it has, and what each may say.

`configs/schema.json` says the same to editors; `python tools/make_schema.py` makes it from here.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from psclient._src.config import CHIEFS, LaunchConfig, ServerOptions, security_options, timeouts_from
from pswire.errors import ConfigError
from pswire.limits import refuse_unknown
from pswire.telemetry import logging_setup
from pswire.transport.traffic import LANES

SIZE = r"^\s*[0-9]+(\.[0-9]+)?\s*([bB]|[kKmMgGtT][iI]?[bB])?\s*$"
DEVICE = r"^(cpu|gpu(:[0-9]+)?)$"


@dataclass(frozen=True)
class Key:
    """What may stand for one key.

    Attributes:
        about: what it is, in one sentence.
        kind: the word for it in messages, a key of `KINDS`.
        least: the least number, which for seconds may not be reached itself; None for any.
        choices: the only words that may stand there; () for any.
    """

    about: str
    kind: str
    least: int | None = None
    choices: tuple[str, ...] = ()

    def refuse(self, value: Any, where: str) -> None:
        """Raises `ConfigError`, which begins with `where`, if the value may not stand there."""
        if not _fits(self.schema(), value):
            raise ConfigError(f"{where} must be {self._wanted()}, not {value!r}")

    def schema(self) -> dict[str, Any]:
        """The same as a JSON schema."""
        least = {} if self.least is None else {"exclusiveMinimum" if self.kind == SECONDS else "minimum": self.least}
        return KINDS[self.kind] | least | ({"enum": list(self.choices)} if self.choices else {})

    def _wanted(self) -> str:
        if self.choices:
            return f"one of {', '.join(self.choices)}"
        return self.kind if self.least is None or self.kind == SECONDS else f"{self.kind} from {self.least}"


WHOLE, SECONDS, SWITCH, WORDS = "a whole number", "a positive number of seconds", "true or false", "text"
BYTES, ON, LIST = "a number of bytes with a unit, such as 4GiB", "cpu or gpu:N", "a list, one item for each argument"

KINDS: dict[str, dict[str, Any]] = {
    WHOLE: {"type": "integer"},
    SECONDS: {"type": "number"},
    SWITCH: {"type": "boolean"},
    WORDS: {"type": "string"},
    BYTES: {"type": ["string", "integer"], "minimum": 0, "pattern": SIZE},
    ON: {"type": "string", "pattern": DEVICE},
    LIST: {"type": "array", "items": {"type": ["string", "number", "boolean"]}},
}

_TYPES: dict[str, Callable[[Any], bool]] = {
    "integer": lambda value: type(value) is int,
    "number": lambda value: type(value) in (int, float),
    "boolean": lambda value: type(value) is bool,
    "string": lambda value: type(value) is str,
    "array": lambda value: type(value) is list,
}

TOP: dict[str, Key] = {
    "ps": Key("Servers.", WHOLE, 1),
    "workers": Key("Processes that run the script.", WHOLE, 0),
    "chief": Key("A process that only drives, one that runs the script as well, or worker 0.", WORDS, None, CHIEFS),
    "evaluator": Key("Whether one more process runs the script, as the task that follows checkpoints.", SWITCH),
    "restarts": Key(
        "Failures, in all, that are made good by starting tasks again before one ends the cluster.", WHOLE, 0
    ),
    "script": Key("What workers run, as a path from where psworker is started.", WORDS),
    "args": Key("The script's arguments.", LIST),
    "debug": Key("Whether every process shows tracebacks of this package.", SWITCH),
    "lane": Key("The fastest lane that workers may use.", WORDS, None, LANES),
    "log_level": Key("Of every process's log.", WORDS, None, logging_setup.LEVELS),
    "log_format": Key("Of every process's log, on stderr.", WORDS, None, logging_setup.FORMATS),
    "metrics_port": Key("Where the first task serves its metrics, the others behind it; 0 picks.", WHOLE, 0),
    "metrics_host": Key("Where metrics are served: an address of this machine.", WORDS),
}

SECTIONS: dict[str, dict[str, Key]] = {
    "server": {
        "device": Key("Where the variables live.", ON),
        "memory_limit": Key("Bytes that variables may take on one server; 0 for no limit.", BYTES),
        "checkpoint_root": Key("The directory, or the URL that fsspec knows, below which checkpoints are.", WORDS),
        "threads": Key("Threads of one update program.", WHOLE, 1),
        "shared_memory": Key("Bytes in which answers are for clients on the same host; 0 for none.", BYTES),
        "in_flight": Key("Bytes of one worker's contribution that are held before they are used.", BYTES),
        "snapshot_limit": Key("Bytes of old values for checkpoints that are being written; 0 for no limit.", BYTES),
        "max_sessions": Key("Sessions that may be open at a time.", WHOLE, 1),
    },
    "timeouts": {
        "lease": Key("A session that does not beat for this long is ended.", SECONDS, 0),
        "beat": Key("Pause between two beats; several must fit into a lease.", SECONDS, 0),
        "call": Key("An ordinary call, retries included.", SECONDS, 0),
        "round": Key("How long a worker that is alive may hold a round up; three leases at least.", SECONDS, 0),
        "server": Key("How long a server that is silent is waited for.", SECONDS, 0),
        "word": Key("Pause between two log lines that say whom a waiting call waits for.", SECONDS, 0),
        "chief": Key("How long what needs a chief waits for one.", SECONDS, 0),
        "alone": Key("How long a job waits where all its workers are gone.", SECONDS, 0),
        "first": Key("How long a chief waits for all workers to have come.", SECONDS, 0),
        "start": Key("How long a process waits at the start for the tasks of its cluster.", SECONDS, 0),
    },
    "security": {
        "tls_cert": Key("Path of a task's certificate; {task} becomes ps-0, worker-1 and so on.", WORDS),
        "tls_key": Key("Path of its key, the same.", WORDS),
        "tls_ca": Key("Path of the certificate that has signed those of all tasks, the same.", WORDS),
        "token_file": Key("Path of the file with the token of the job, the same.", WORDS),
    },
}


class _Once(yaml.SafeLoader):
    """Refuses a key that comes twice, of which YAML would take the last."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        """As the base class does."""
        found = set[Any]()
        for key, _ in node.value:
            name = self.construct_object(key, deep=True)
            if name in found:
                raise ConfigError(f"line {key.start_mark.line + 1}: key {name} comes twice; leave one of them out")
            found.add(name)
        return super().construct_mapping(node, deep)


def load_launch_config(path: Path) -> LaunchConfig:
    """Reads a local cluster from a YAML file; its keys are the attributes of `LaunchConfig`.

    Raises:
        ConfigError: the file is not there, is no YAML, or says something unknown or impossible; it names the key.
    """
    try:
        data = yaml.load(path.read_text(encoding="utf-8"), _Once)
    except ConfigError as error:
        raise ConfigError(f"{path}: {error.message}") from error
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror}") from error
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} is no YAML: {' '.join(str(error).split())}") from error
    values = _checked(data, str(path))
    try:
        return LaunchConfig(**values)
    except ConfigError as error:
        raise ConfigError(f"{path}: {error.message}") from error


def schema() -> dict[str, Any]:
    """The JSON schema of the file."""
    sections = {name: _object(keys) for name, keys in SECTIONS.items()}
    top = _object(TOP)
    heading = {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": "A local cluster of psworker --config",
    }
    return heading | top | {"properties": top["properties"] | sections}


def _checked(data: Any, path: str) -> dict[str, Any]:
    """The arguments of `LaunchConfig`."""
    values = _mapping(data, path)
    refuse_unknown(values, [*TOP, *SECTIONS], f"{path}: key")
    for name in TOP.keys() & values.keys():
        TOP[name].refuse(values[name], f"{path}: {name}")
    if "args" in values:
        values["args"] = tuple(map(str, values["args"]))
    for name in SECTIONS.keys() & values.keys():
        values[name] = _MAKE[name](_section(values[name], name, path))
    return values


def _section(data: Any, name: str, path: str) -> dict[str, Any]:
    section = _mapping(data, f"{path}: {name}")
    refuse_unknown(section, SECTIONS[name], f"{path}: key of {name}")
    for key, value in section.items():
        SECTIONS[name][key].refuse(value, f"{path}: {name}.{key}")
    return section


def _mapping(data: Any, where: str) -> dict[str, Any]:
    if not isinstance(data, dict):
        raise ConfigError(f"{where} must be a mapping of keys to values, not {data!r}")
    return {str(key): value for key, value in data.items()}


_MAKE: dict[str, Callable[[dict[str, Any]], Any]] = {
    "server": lambda section: ServerOptions(**{key: str(value) for key, value in section.items()}),
    "timeouts": lambda section: dataclasses.replace(timeouts_from(), **{k: float(v) for k, v in section.items()}),
    "security": lambda section: security_options().under(section),
}


def _fits(rule: dict[str, Any], value: Any) -> bool:
    """Whether a value is what one of our schemas of a key says; they need no more of JSON schema than this."""
    kinds = [rule["type"]] if isinstance(rule["type"], str) else rule["type"]
    if not any(_TYPES[kind](value) for kind in kinds):
        return False
    if isinstance(value, str):
        return re.search(rule.get("pattern", ""), value) is not None and value in rule.get("enum", [value])
    if isinstance(value, list):
        return all(_fits(rule["items"], item) for item in value)
    least, above = rule.get("minimum", value), rule.get("exclusiveMinimum", float("-inf"))
    return bool(value >= least and above < value < float("inf"))


def _object(keys: Mapping[str, Key]) -> dict[str, Any]:
    properties = {name: {"description": key.about} | key.schema() for name, key in keys.items()}
    return {"type": "object", "additionalProperties": False, "properties": properties}
