"""Names of configuration files -> classes and functions, with errors that help.

Filters, priorities, workflows, reward functions and the parts of algorithms are families of this
one kind; a plug-in file registers into a family when it is imported.
"""

from __future__ import annotations

import difflib
import importlib
import inspect
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import Any, Generic, TypeVar

from ..schemas.errors import ConfigError

T = TypeVar("T", bound=Callable[..., Any])


class Registry(Generic[T]):
    """One family of classes or functions by name; a dotted path reaches a user's own."""

    def __init__(
        self, kind: str, *, method: str | None = None, binds_functions: bool = False
    ) -> None:
        """`kind` names the family in messages; what is made must offer `method`, when given.

        Entries are called with their arguments to make what is used; with `binds_functions` a
        plain function is itself what is used, its arguments bound.
        """
        self.kind, self.method, self.binds_functions = kind, method, binds_functions
        self._entries: dict[str, T] = {}

    def register(self, name: str) -> Callable[[T], T]:
        """Decorator that files a class or function under `name`, in place of an earlier one."""

        def file(entry: T) -> T:
            self._entries[name] = entry
            return entry

        return file

    def names(self) -> list[str]:
        """Every known name, sorted."""
        return sorted(self._entries)

    def get(self, name: str) -> T:
        """The class or function.

        Raises:
            ConfigError: unknown, or not importable; names the nearest and what is known.
        """
        if name in self._entries:
            return self._entries[name]
        module, _, attribute = name.rpartition(".")
        if not module:
            raise ConfigError(
                f"{unknown(self.kind, name, self._entries)} Or give the dotted path of your own, "
                "or a file in --plugin-dir that registers it."
            )
        try:
            return getattr(importlib.import_module(module), attribute)
        except Exception as error:  # whatever a user's module raises: it is named
            why = f"{type(error).__name__}: {error}"
            raise ConfigError(
                f"{self.kind} {name!r} cannot be imported: {why}. Give a registered name, or "
                "the dotted path of a class or function on the Python path."
            ) from error

    def create(self, name: str, args: Mapping[str, Any]) -> Any:
        """What the entry makes of `args`, given by name.

        Raises:
            ConfigError: as `get`; an argument is unknown, missing or refused; no such method.
        """
        entry: Any = self.get(name)
        self._check_names(name, entry, args)
        try:
            binds = self.binds_functions and not inspect.isclass(entry)
            made = partial(entry, **args) if binds else entry(**args)
        except ConfigError:
            raise
        except (TypeError, ValueError) as error:
            raise ConfigError(f"{self.kind} {name!r}: {error}") from error
        if self.method and not callable(getattr(made, self.method, None)):
            raise ConfigError(f"{self.kind} {name!r}: its objects have no method {self.method}()")
        return made

    def _check_names(self, name: str, entry: Any, args: Mapping[str, Any]) -> None:
        try:
            known = inspect.signature(entry).parameters
        except (TypeError, ValueError):  # a class written in C tells no signature
            return
        if any(p.kind is p.VAR_KEYWORD for p in known.values()):
            return
        for arg in args:
            if arg not in known:
                raise ConfigError(unknown(f"argument of {self.kind} {name!r}", arg, known))


def unknown(kind: str, name: str, known: Iterable[str]) -> str:
    """The message for an unknown name: what was found, the nearest, all that there are."""
    names = sorted(known)
    near = difflib.get_close_matches(name, names, n=1)
    hint = f" Did you mean {near[0]!r}?" if near else ""
    return f"{kind} {name!r} is unknown.{hint} Known: {', '.join(names) or 'none'}."
