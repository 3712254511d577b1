"""Checked access to the fields of a JSON request body: every complaint names the field, with its path.

A field that is null counts as missing, as clients of all dialects send it. Pure.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from services.front.chat.messages import ChatError, kind_of


class Fields:
    """A JSON object and where it stands in the body ("" for the body itself).

    All methods raise ChatError for a value of the wrong type or out of range.
    """

    def __init__(self, value: Any, where: str = "") -> None:
        if not isinstance(value, Mapping):
            raise ChatError(f"{where or 'the body'} must be an object, not {kind_of(value)}")
        self.values = value
        self.where = where

    def place(self, key: str) -> str:
        """The path of a field, for messages."""
        return f"{self.where}.{key}" if self.where else key

    def raw(self, key: str) -> Any:
        return self.values.get(key)

    def has(self, key: str) -> bool:
        return self.raw(key) is not None

    def text(self, key: str, default: str | None = None) -> str:
        """A text; required if there is no default."""
        return self._typed(key, str, "text", default)  # type: ignore[no-any-return]

    def flag(self, key: str, default: bool) -> bool:
        return self._typed(key, bool, "true or false", default)  # type: ignore[no-any-return]

    def whole(self, key: str, default: int | None, low: int, high: int = 2**31 - 1) -> int:
        """A whole number between both limits, included."""
        value: int = self._typed(key, int, "a whole number", default)
        if isinstance(value, bool):
            raise ChatError(f"{self.place(key)} must be a whole number, not {kind_of(value)}")
        if not low <= value <= high:
            raise ChatError(f"{self.place(key)} must be {low} to {high}, not {value!r:.40}")
        return value

    def number(self, key: str, default: float, low: float, high: float) -> float:
        value = self._typed(key, int | float, "a number", default)
        if isinstance(value, bool):
            raise ChatError(f"{self.place(key)} must be a number, not {kind_of(value)}")
        if not low <= value <= high:
            raise ChatError(f"{self.place(key)} must be {low:g} to {high:g}, not {value!r:.40}")
        return float(value)

    def share(self, key: str, default: float) -> float:
        """A number above 0 and at most 1."""
        value = self.number(key, default, 0.0, 1.0)
        if value == 0.0:
            raise ChatError(f"{self.place(key)} must be above 0")
        return value

    def choice(self, key: str, known: tuple[str, ...], default: str | None = None) -> str:
        value = self.text(key, default)
        if value not in known:
            raise ChatError(f"{self.place(key)} must be one of {', '.join(known)}, not {value[:40]!r}")
        return value

    def table(self, key: str) -> Fields:
        """The object of this name, empty if it is missing."""
        return Fields(self.values[key] if self.has(key) else {}, self.place(key))

    def items(self, key: str) -> list[Any]:
        """The list of this name, empty if it is missing."""
        return self._typed(key, list, "a list", [])  # type: ignore[no-any-return]

    def tables(self, key: str) -> Iterator[Fields]:
        """The objects in the list of this name."""
        return (Fields(item, f"{self.place(key)}[{i}]") for i, item in enumerate(self.items(key)))

    def texts(self, key: str) -> tuple[str, ...]:
        """The texts in the list of this name, none of them empty."""
        items = self.items(key)
        for i, item in enumerate(items):
            if not isinstance(item, str) or not item:
                raise ChatError(f"{self.place(key)}[{i}] must be a text of at least one character")
        return tuple(items)

    def _typed(self, key: str, kind: Any, name: str, default: Any) -> Any:
        value = self.raw(key)
        if value is None:
            if default is None:
                raise ChatError(f"{self.place(key)} is missing; it must be {name}")
            return default
        if not isinstance(value, kind):
            raise ChatError(f"{self.place(key)} must be {name}, not {kind_of(value)}")
        return value
