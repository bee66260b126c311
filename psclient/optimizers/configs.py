"""Optimizers, schedules and loss scales as plain values, that JSON can hold, and made of these again."""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping
from typing import Any, Self

import numpy as np

from psclient._src.tracing.hyperparameters import Configured

CustomObjects = Mapping[str, type]
"""Classes of one's own, by the names that configs have for them."""


class Described(Configured):
    """Base of objects that are made of the arguments of their constructor, which they keep as attributes."""

    def get_config(self) -> dict[str, Any]:
        """Returns the arguments with which the constructor makes an equal object. In any context.

        Returns:
            Numbers, strings, None, and lists of these; for another such object a dict with its `class_name` and
            `config`.

        Raises:
            ValueError: an argument is another kind of value, such as a function.
            NotImplementedError: the class stores an argument under another name, and has no `get_config` of its own.
        """
        return {name: _plain(name, self._argument(name)) for name in self._arguments()}

    @classmethod
    def from_config(cls, config: Mapping[str, Any], custom_objects: CustomObjects | None = None) -> Self:
        """Makes an object from the result of `get_config`, or from a Keras config. In the contexts of the constructor.

        Args:
            config: the arguments of the constructor, by name; missing ones have their defaults.
            custom_objects: classes that are not of this package, by name.

        Raises:
            ValueError: the name of a class is not known.
            TypeError: the constructor has no such argument.
        """
        return cls(**{name: _made(value, custom_objects or {}) for name, value in config.items()})

    @classmethod
    def _arguments(cls) -> list[str]:
        """Names of the constructor's arguments."""
        kinds = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
        named = inspect.signature(cls.__init__).parameters.values()
        return [parameter.name for parameter in named if parameter.kind in kinds][1:]

    def _argument(self, name: str) -> object:
        """Returns an argument as it is kept."""
        if not hasattr(self, name):
            raise NotImplementedError(
                f"{type(self).__name__} does not store its argument {name!r} as an attribute of that name; "
                "implement its get_config"
            )
        return getattr(self, name)


def _plain(name: str, value: object) -> Any:
    if isinstance(value, Described):
        return {"class_name": type(value).__name__, "config": value.get_config()}
    if isinstance(value, tuple | list):
        return [_plain(name, item) for item in value]
    if isinstance(value, np.generic):
        value = value.item()
    if value is None or type(value) in (bool, int, float, str):
        return value
    raise ValueError(
        f"{name} is {value!r}, but a config can contain only numbers and strings; leave it out of the "
        "config, and pass it to the constructor"
    )


def _made(value: Any, custom: CustomObjects) -> Any:
    if not (isinstance(value, Mapping) and {"class_name", "config"} <= value.keys()):
        return value
    name = value["class_name"]
    known = {kind.__name__: kind for kind in _subclasses(Described) if kind.__module__.startswith(f"{__package__}.")}
    kind: Any = custom.get(name) or known.get(name)
    if kind is None:
        raise ValueError(f"class {name!r} is not known; pass it as custom_objects={{{name!r}: ...}}")
    return kind.from_config(value["config"], **({"custom_objects": custom} if issubclass(kind, Described) else {}))


def _subclasses(kind: type[Any]) -> Iterator[type[Any]]:
    for subclass in kind.__subclasses__():
        yield subclass
        yield from _subclasses(subclass)
