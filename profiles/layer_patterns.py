"""Which layer of a decoder is of which kind, read from a config.json by one of the ways in which models say it."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from llmq.profiles.errors import InputError

Config = dict[str, Any]


@dataclass(frozen=True)
class Field:
    """A value of config.json under the first of `names` that is there and not null; a dot goes into an object."""

    names: tuple[str, ...]
    default: Any = None

    def of(self, config: Config) -> Any:
        found = (_at(config, name) for name in self.names)
        return next((value for value in found if value is not None), self.default)

    def number(self, config: Config) -> int:
        """Raises InputError where there is no whole number above 0."""
        value = self.of(config)
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise InputError(f"config.json: {self.names[0]} is {value!r}, a whole number above 0 is expected")
        return value


def field(*names: str, default: Any = None) -> Field:
    return Field(names, default)


ONE = Field((), 1)


@dataclass(frozen=True)
class Chosen:
    """A number that flags choose: that of the first case whose flag is set, else the last one."""

    cases: tuple[tuple[Field, Field], ...]
    otherwise: Field

    def _chosen(self, config: Config) -> Field:
        return next((number for flag, number in self.cases if flag.of(config)), self.otherwise)

    def of(self, config: Config) -> Any:
        return self._chosen(config).of(config)

    def number(self, config: Config) -> int:
        return self._chosen(config).number(config)


def _at(config: Config, path: str) -> Any:
    value: Any = config
    for name in path.split("."):
        value = value.get(name) if isinstance(value, dict) else None
    return value


class LayerPattern(Protocol):
    def kinds(self, config: Config, num_layers: int | None) -> list[str] | None:
        """The kind of each layer; None where config.json does not say it in this way."""
        ...


@dataclass(frozen=True)
class Uniform:
    """All layers are of one kind."""

    kind: str

    def kinds(self, config: Config, num_layers: int | None) -> list[str] | None:
        return None if num_layers is None else [self.kind] * num_layers


@dataclass(frozen=True)
class Listed:
    """A list (or a string) with one word (or letter) a layer; what follows the decoder's own layers is not counted."""

    source: Field
    words: Mapping[Any, str]

    def kinds(self, config: Config, num_layers: int | None) -> list[str] | None:
        listed = self.source.of(config)
        if not listed:
            return None
        listed = list(listed)[:num_layers]
        if unknown := sorted({str(word) for word in listed if word not in self.words}):
            raise InputError(f"config.json: {self.source.names[0]} has layers of type {', '.join(unknown)}, not known")
        if num_layers is not None and len(listed) != num_layers:
            raise InputError(f"config.json: {self.source.names[0]} names {len(listed)} of {num_layers} layers")
        return [self.words[word] for word in listed]


@dataclass(frozen=True)
class Every:
    """The layers `offset`, `offset` + `period`, … are of one kind, all others of another.

    Without `offset` it is period - 1.
    """

    period: Field
    kind: str
    others: str
    offset: Field | None = None

    def kinds(self, config: Config, num_layers: int | None) -> list[str] | None:
        period = self.period.of(config)
        if num_layers is None or not period:
            return None
        offset = period - 1 if self.offset is None else self.offset.of(config)
        return [self.kind if layer % period == offset % period else self.others for layer in range(num_layers)]


@dataclass(frozen=True)
class Numbered:
    """The layers whose numbers config.json lists, counted from `first`, are of one kind, all others of another."""

    source: Field
    kind: str
    others: str
    first: int = 0

    def kinds(self, config: Config, num_layers: int | None) -> list[str] | None:
        listed = self.source.of(config)
        if num_layers is None or listed is None:
            return None
        return [self.kind if layer + self.first in listed else self.others for layer in range(num_layers)]
