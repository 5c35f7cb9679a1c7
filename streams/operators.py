"""From an operator's name in the configuration to the object that does it."""

from __future__ import annotations

import difflib
import importlib
import inspect
from collections.abc import Callable, Mapping
from typing import Any

from ..schemas.errors import ConfigError
from .settings import OperatorSettings


def build(
    operator: OperatorSettings, known: Mapping[str, Callable[..., Any]], *, kind: str, method: str
) -> Any:
    """Make the operator: a name of `known`, or the dotted path of a user's class or function.

    Args:
        operator: its name and arguments.
        known: what is built in, by name.
        kind: filter or priority, for messages.
        method: what the made object must offer.

    Raises:
        ConfigError: unknown name (with the nearest one), no such module or class, wrong arguments.
    """
    make = known.get(operator.name)
    if make is None:
        make = _load(operator.name, known, kind)
    _check_arguments(make, operator, kind)
    try:
        made = make(**operator.args)
    except (TypeError, ValueError) as error:
        raise ConfigError(f"{kind} {operator.name}: {error}") from error
    if not callable(getattr(made, method, None)):
        raise ConfigError(f"{kind} {operator.name}: its objects have no method {method}()")
    return made


def _load(name: str, known: Mapping[str, Any], kind: str) -> Callable[..., Any]:
    module, _, attribute = name.rpartition(".")
    if not module:
        near = difflib.get_close_matches(name, known, 1, 0.4)
        hint = f"did you mean {near[0]}? " if near else ""
        raise ConfigError(
            f"{kind} {name!r} is unknown; {hint}Known are {', '.join(known)}, or give the dotted "
            "path of your own class."
        )
    try:
        return getattr(importlib.import_module(module), attribute)
    except (ImportError, AttributeError) as error:
        raise ConfigError(f"{kind} {name!r} cannot be imported: {error}") from error


def _check_arguments(make: Callable[..., Any], operator: OperatorSettings, kind: str) -> None:
    try:
        signature = inspect.signature(make)
    except (TypeError, ValueError):
        return
    try:
        signature.bind(**operator.args)
    except TypeError as error:
        allowed = ", ".join(signature.parameters) or "none"
        raise ConfigError(
            f"{kind} {operator.name}: {error}; its arguments are {allowed}"
        ) from error
