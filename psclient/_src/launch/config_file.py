"""The file that describes a local cluster, for `psworker --config`: which keys it has, and what each may say.

`configs/schema.json` says the same to editors; `python tools/make_schema.py` makes it from here.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import yaml

from psclient._src.config import LaunchConfig, security_options, timeouts_from
from pswire.errors import ConfigError
from pswire.limits import Timeouts, refuse_unknown
from pswire.options import BYTES, DEVICE, LIST, PATH, SECONDS, SWITCH, TEXT, WHOLE, Option, options_of
from pswire.security.given import read_small
from pswire.security.identity import SecurityOptions
from pswire.server_options import ServerOptions

SIZE = r"^\s*[0-9]+(\.[0-9]+)?\s*([bB]|[kKmMgGtT][iI]?[bB])?\s*$"
ON = r"^(cpu|gpu(:[0-9]+)?)$"

KINDS: dict[str, dict[str, object]] = {
    WHOLE: {"type": "integer"},
    SECONDS: {"type": "number"},
    SWITCH: {"type": "boolean"},
    TEXT: {"type": "string"},
    PATH: {"type": "string"},
    BYTES: {"type": ["string", "integer"], "minimum": 0, "pattern": SIZE},
    DEVICE: {"type": "string", "pattern": ON},
    LIST: {"type": "array", "items": {"type": ["string", "number", "boolean"]}},
}
"""The JSON schema of each kind of value."""

_TYPES: dict[str, Callable[[Any], bool]] = {
    "integer": lambda value: type(value) is int,
    "number": lambda value: type(value) in (int, float),
    "boolean": lambda value: type(value) is bool,
    "string": lambda value: type(value) is str,
    "array": lambda value: type(value) is list,
}

_READ: dict[str, Callable[[Any], Any]] = {SECONDS: float, BYTES: str, LIST: lambda items: tuple(map(str, items))}
"""Converters of a YAML value by the kind of its option; values of other kinds stay as they are."""

SECTIONS: dict[str, type] = {"server": ServerOptions, "timeouts": Timeouts, "security": SecurityOptions}
"""The options of each key that is a mapping itself; all other keys are those of `LaunchConfig`."""


def refuse(option: Option, value: object, where: str) -> None:
    """Raises `ConfigError`, which begins with `where`, if a value may not be said for an option."""
    if _fits(schema_of(option), value):
        return
    wanted = option.kind if option.least is None or option.kind == SECONDS else f"{option.kind} from {option.least}"
    if option.choices:
        wanted = f"one of {', '.join(option.choices)}"
    raise ConfigError(f"{where} must be {wanted}, not {value!r}")


def schema_of(option: Option) -> dict[str, Any]:
    """The JSON schema of an option."""
    least = {"exclusiveMinimum" if option.kind == SECONDS else "minimum": option.least}
    more = {} if option.least is None else least
    return KINDS[option.kind] | more | ({"enum": list(option.choices)} if option.choices else {})


class _Once(yaml.SafeLoader):
    """Refuses a key that comes twice, of which YAML would take the last."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        """Reads a mapping as the base class does, and refuses keys that come twice."""
        found = set[Any]()
        for key, _ in node.value:
            name = self.construct_object(key, deep=True)
            if name in found:
                raise ConfigError(f"line {key.start_mark.line + 1}: key {name} appears twice; remove one")
            found.add(name)
        return super().construct_mapping(node, deep)


def load_launch_config(path: Path) -> LaunchConfig:
    """Reads a local cluster from a YAML file; its keys are the attributes of `LaunchConfig`.

    Raises:
        ConfigError: the file is not there, is no YAML, or says something unknown or impossible; it names the key.
    """
    try:
        data = yaml.load(read_small(path), _Once)
    except ConfigError as error:
        raise ConfigError(f"{path}: {error.message}") from error
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror}") from error
    except RecursionError:
        raise ConfigError(f"{path} is not a configuration, because its values are nested too deep") from None
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} is not valid YAML: {' '.join(str(error).split())}") from error
    values = _checked(data, str(path))
    try:
        return LaunchConfig(**values)
    except ConfigError as error:
        raise ConfigError(f"{path}: {error.message}") from error


def schema() -> dict[str, Any]:
    """The JSON schema of the file."""
    sections = {name: _object(owner) for name, owner in SECTIONS.items()}
    top = _object(LaunchConfig)
    heading = {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": "A local cluster of psworker --config",
    }
    return heading | top | {"properties": top["properties"] | sections}


def _checked(data: object, path: str) -> dict[str, Any]:
    """The arguments of `LaunchConfig`."""
    values = _mapping(data, path)
    refuse_unknown(values, [*options_of(LaunchConfig), *SECTIONS], f"{path}: key")
    sections = {name: values.pop(name) for name in SECTIONS.keys() & values.keys()}
    found = _read(values, LaunchConfig, f"{path}: ")
    for name, section in sections.items():
        section = _mapping(section, f"{path}: {name}")
        refuse_unknown(section, options_of(SECTIONS[name]), f"{path}: key of {name}")
        found[name] = _MAKE[name](_read(section, SECTIONS[name], f"{path}: {name}."))
    return found


def _read(values: Mapping[str, object], owner: type, where: str) -> dict[str, Any]:
    """The values of options, as their dataclass has them."""
    options = options_of(owner)
    for name, value in values.items():
        refuse(options[name], value, where + name)
    return {name: _READ.get(options[name].kind, lambda same: same)(value) for name, value in values.items()}


def _mapping(data: object, where: str) -> dict[str, Any]:
    if not isinstance(data, dict):
        raise ConfigError(f"{where} must be a mapping of keys to values, not {data!r}")
    return {str(key): value for key, value in data.items()}


_MAKE: dict[str, Callable[[dict[str, Any]], object]] = {
    "server": lambda section: ServerOptions(**section),
    "timeouts": lambda section: dataclasses.replace(timeouts_from(), **section),
    "security": lambda section: security_options().under(section),
}


def _fits(rule: dict[str, Any], value: Any) -> bool:
    """Returns whether a value is what one of our schemas of a key says; they need no more of JSON schema than this."""
    kinds = [rule["type"]] if isinstance(rule["type"], str) else rule["type"]
    if not any(_TYPES[kind](value) for kind in kinds):
        return False
    if isinstance(value, str):
        return re.search(rule.get("pattern", ""), value) is not None and value in rule.get("enum", [value])
    if isinstance(value, list):
        return all(_fits(rule["items"], item) for item in value)
    least, above = rule.get("minimum", value), rule.get("exclusiveMinimum", float("-inf"))
    return bool(value >= least and above < value < float("inf"))


def _object(owner: type) -> dict[str, Any]:
    options = options_of(owner).items()
    properties = {name: {"description": each.about} | schema_of(each) for name, each in options}
    return {"type": "object", "additionalProperties": False, "properties": properties}
