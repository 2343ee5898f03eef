"""What an inventory of contacts with SGLang consists of: hooks, which change it, and symbols, which are relied on."""

from __future__ import annotations

import inspect
import pkgutil
import re
from collections.abc import Iterable
from typing import Any, NamedTuple


class Hook(NamedTuple):
    target: str
    """Dotted name of the upstream function."""
    hook: str
    """Dotted name of ours."""
    kind: str
    """SGLang's HookType, by name; or FILL: assigned to a name that upstream leaves None, which its registry cannot hook."""
    purpose: str
    until: str
    """What upstream would have to offer for the hook to go."""
    parameters: tuple[str, ...] = ()
    """All of the target's, in order, where ours has to take them by name."""
    like: str = ""
    """Where a FILL's parameters are looked up: upstream's version for another device."""


class Symbol(NamedTuple):
    name: str
    """Dotted name upstream."""
    members: tuple[str, ...]
    """Parameters of a function, or attributes and constructor arguments of a class."""
    purpose: str


def find_missing_symbols(symbols: Iterable[Symbol]) -> list[str]:
    """What the installed SGLang lacks of `symbols`, each with what it is for."""
    missing = []
    for name, members, purpose in symbols:
        try:
            symbol = pkgutil.resolve_name(name)
        except (ImportError, AttributeError):
            missing.append(f"{name} ({purpose})")
            continue
        offered = _members(symbol)
        if not offered.issuperset(members) and inspect.isclass(symbol):
            offered |= _used_of_self(symbol)
        missing += [f"{name}: {member} ({purpose})" for member in members if member not in offered]
    return missing


def _members(symbol: Any) -> set[str]:
    """Parameters of a function; attributes and fields of a class."""
    if not inspect.isclass(symbol):
        return set(inspect.signature(symbol).parameters)
    return {name for base in symbol.__mro__[:-1] for name in (*vars(base), *inspect.get_annotations(base))}


def _used_of_self(class_: type) -> set[str]:
    """What the methods of a class read and write of self."""
    ours = [base for base in class_.__mro__ if base.__module__.startswith("sglang.")]
    return {name for base in ours for name in re.findall(r"\bself\.(\w+)", inspect.getsource(base))}
