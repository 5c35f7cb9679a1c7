"""Workflows and reward functions by name: a registered one, or the dotted path of a user's own."""

from __future__ import annotations

import difflib
import importlib
import inspect
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, TypeVar

from ..schemas.errors import ConfigError

T = TypeVar("T", bound=Callable[..., Any])


class Registry:
    """One family of classes or functions. Plug-in files register into it when they are imported."""

    def __init__(self, kind: str) -> None:
        """`kind` names the family in messages, such as workflow."""
        self.kind = kind
        self._entries: dict[str, Callable[..., Any]] = {}

    def register(self, name: str) -> Callable[[T], T]:
        """Decorator that files a class or function under `name`, in place of an earlier one."""

        def file(entry: T) -> T:
            self._entries[name] = entry
            return entry

        return file

    def get(self, name: str) -> Callable[..., Any]:
        """The class or function.

        Raises:
            ConfigError: unknown, or not importable; names the nearest and what is known.
        """
        if name in self._entries:
            return self._entries[name]
        module, _, attribute = name.rpartition(".")
        if not module:
            near = difflib.get_close_matches(name, self._entries, n=1)
            hint = f" Did you mean {near[0]!r}?" if near else ""
            known = ", ".join(sorted(self._entries))
            raise ConfigError(
                f"{self.kind} {name!r} is unknown.{hint} Known: {known}; "
                "or give a dotted path, or a file in --plugin-dir."
            )
        try:
            return getattr(importlib.import_module(module), attribute)
        except (ImportError, AttributeError) as error:
            raise ConfigError(f"{self.kind} {name!r} cannot be imported: {error}") from error

    def create(self, name: str, args: Mapping[str, Any]) -> Callable[..., Any]:
        """An object of the class, or the function, with `args` bound by name.

        Raises:
            ConfigError: as `get`, or an argument does not fit.
        """
        entry: Any = self.get(name)
        try:
            inspect.signature(entry).bind_partial(**args)
            made: Any = entry(**args) if inspect.isclass(entry) else partial(entry, **args)
        except (TypeError, ValueError) as error:
            raise ConfigError(f"{self.kind} {name!r}: arguments {dict(args)}: {error}") from error
        return made
