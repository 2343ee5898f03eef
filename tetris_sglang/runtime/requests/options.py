"""What a request may ask of speculation: no drafts for itself, or more or fewer of the batch's than its survivals earn.

The fields travel in SGLang's own `custom_params`, under the key `tetris`.
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

LARGEST_WEIGHT = 64.0
SMALLEST_WEIGHT = 1 / LARGEST_WEIGHT
_KEY = "tetris"


@dataclass(frozen=True)
class RequestOptions:
    """One request's wishes.

    speculate: whether its drafts may be verified at all.
    weight: what selection multiplies its survivals with, in [SMALLEST_WEIGHT, LARGEST_WEIGHT].
    """

    speculate: bool = True
    weight: float = 1.0


DEFAULT = RequestOptions()
_FIELDS = tuple(RequestOptions.__dataclass_fields__)
_KNOWN = f"Known: {', '.join(_FIELDS)}."


def parse(custom_params: Mapping[str, Any] | None) -> RequestOptions:
    """Read a request's options out of its `custom_params`; keys that are not TETRIS's are left alone.

    A field that is left out, or null, has its default.

    Raises:
        ValueError: naming the field, its value, what is allowed and the way out.
    Example: {"tetris": {"weight": 4}} -> RequestOptions(speculate=True, weight=4.0)
    """
    if custom_params is None:
        return DEFAULT
    if not isinstance(custom_params, Mapping):
        raise _refusal("", custom_params, f'give an object, as {{"{_KEY}": {{"speculate": false}}}}.')
    for name, value in custom_params.items():
        # Other keys belong to others; what is nearly ours was meant for us.
        if name != _KEY and str(name).lower().startswith(_KEY):
            raise _refusal(
                f".{name}",
                value,
                f'no such field. TETRIS\'s are given as {{"{_KEY}": {{"weight": 4}}}}; {_KNOWN}',
            )
    fields = custom_params.get(_KEY)
    if fields is None:
        return DEFAULT
    if not isinstance(fields, Mapping):
        raise _refusal(f".{_KEY}", fields, f'give an object, as {{"speculate": false}}. {_KNOWN}')
    for name, value in fields.items():
        if name not in _FIELDS:
            close = difflib.get_close_matches(str(name), _FIELDS, n=1)
            hint = f"Did you mean {close[0]}? " if close else ""
            raise _refusal(f".{_KEY}.{name}", value, f"no such field. {hint}{_KNOWN}")
    return RequestOptions(_parse_speculate(fields.get("speculate")), _parse_weight(fields.get("weight")))


def _parse_speculate(value: Any) -> bool:
    if value is None:
        return DEFAULT.speculate
    if not isinstance(value, bool):
        raise _refusal(f".{_KEY}.speculate", value, "give true or false, or leave it out (true).")
    return value


def _parse_weight(value: Any) -> float:
    if value is None:
        return DEFAULT.weight
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if not (is_number and SMALLEST_WEIGHT <= value <= LARGEST_WEIGHT):  # a NaN compares false
        raise _refusal(
            f".{_KEY}.weight",
            value,
            f"give a number from 1/{LARGEST_WEIGHT:g} to {LARGEST_WEIGHT:g}, or leave it out (1). A request that is to "
            f"get no drafts at all says speculate: false.",
        )
    return float(value)


def _refusal(field: str, value: Any, way_out: str) -> ValueError:
    return ValueError(f"custom_params{field}={value!r}: {way_out}")
