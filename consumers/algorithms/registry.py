"""Names of configuration files -> the functions of the algorithms, with errors that help.

No torch here: a configuration can be read before torch is imported. `build.py` imports what fills
the registries.
"""

from __future__ import annotations

import difflib
import importlib
import inspect
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Generic, TypeVar

from ...schemas.errors import ConfigError

T = TypeVar("T", bound=Callable[..., Any])


class Registry(Generic[T]):
    """One family of classes (or functions) by name; a dotted path reaches a user's own."""

    def __init__(self, key: str) -> None:
        """`key` is the configuration key that names the family, for messages."""
        self.key = key
        self._entries: dict[str, T] = {}

    def register(self, name: str) -> Callable[[T], T]:
        """Decorator that files the entry under `name`."""

        def file(entry: T) -> T:
            self._entries[name] = entry
            return entry

        return file

    def names(self) -> list[str]:
        """Every known name, sorted."""
        return sorted(self._entries)

    def get(self, name: str) -> T:
        """The entry. Raises ConfigError with the nearest known name."""
        if name in self._entries:
            return self._entries[name]
        if "." in name:
            return _import(self.key, name)
        raise ConfigError(unknown(self.key, name, self._entries))

    def create(self, name: str, args: Mapping[str, Any]) -> Any:
        """Call the entry with `args`.

        Raises:
            ConfigError: the name or an argument is unknown, or the entry refuses a value.
        """
        entry = self.get(name)
        known = inspect.signature(entry).parameters
        takes_any = any(p.kind is p.VAR_KEYWORD for p in known.values())
        for arg in args:
            if arg not in known and not takes_any:
                raise ConfigError(unknown(f"{self.key}_args of {name}", arg, known))
        return entry(**args)


def unknown(key: str, name: str, known: Iterable[str]) -> str:
    """The message for an unknown name: what was found, the nearest, all that there are."""
    names = sorted(known)
    near = difflib.get_close_matches(name, names, n=1)
    hint = f" Did you mean {near[0]!r}?" if near else ""
    return f"algorithm.{key}: {name!r} is unknown.{hint} Known: {', '.join(names) or 'none'}."


def _import(key: str, path: str) -> Any:
    module, _, name = path.rpartition(".")
    try:
        return getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError) as error:
        raise ConfigError(
            f"algorithm.{key}: {path!r} cannot be imported ({error}). Give a registered name, or "
            "the dotted path of a class on the Python path."
        ) from error


ADVANTAGES: Registry[Any] = Registry("advantage_fn")
POLICY_LOSSES: Registry[Any] = Registry("policy_loss_fn")
KL_LOSSES: Registry[Any] = Registry("kl_loss_fn")
ENTROPY_LOSSES: Registry[Any] = Registry("entropy_loss_fn")
AGGREGATIONS: Registry[Any] = Registry("loss_agg_mode")
