"""A refusal of settings, and the places where settings were given, which its sentence begins with.

What finds a refusal knows the settings and their values, what read them knows where they were written:

    with refusals_at(places):
        check_before_loading(config)  # raises Refusal(("run.threads",), "...")
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import chain

from tinyrl.text import truncate
from tinyrl.urls import mask_url


class Refusal(ValueError):
    """Settings that cannot be as they are. settings: section.name of each, what is wrong first; sentence: for people,
    with their values and what would be right.
    """

    def __init__(self, settings: tuple[str, ...], sentence: str) -> None:
        super().__init__(settings, sentence)  # which copies are made from
        self.settings = settings
        self.sentence = sentence

    def __str__(self) -> str:
        return self.sentence


def raise_first(refusals: Iterable[Refusal]) -> None:
    """Raise the first of some refusals, if there is one."""
    first = next(iter(refusals), None)
    if first is not None:
        raise first


@dataclass(frozen=True)
class Source:
    """A file of settings, or another name for messages, and the line of each. Without a name: nothing that was read."""

    name: str = ""
    lines: dict[str, int] = field(default_factory=dict)

    def line(self, setting: str) -> str | None:
        """Return the line that gives the setting."""
        return f"{self.name}:{self.lines[setting]}" if setting in self.lines else None

    def nearest(self, setting: str) -> str | None:
        """Return the line of the setting, or else of what it would be in."""
        part = setting
        while part and part not in self.lines:
            part = part[: max(part.rfind("."), part.rfind("["), 0)]
        return self.line(part)


@dataclass(frozen=True)
class Places:
    """Where settings were given: in a source, or in overrides laid over it. arguments: the argument of the Python API
    that an override was, by its setting; follows: the settings that a derived one follows from, and their values.
    """

    source: Source = field(default_factory=Source)
    overrides: tuple[str, ...] = ()
    arguments: dict[str, str] = field(default_factory=dict)
    follows: dict[str, dict[str, str]] = field(default_factory=dict)

    def override_of(self, setting: str) -> str | None:
        """Return the last override that gives the setting, or a part of it."""
        for override in reversed(self.overrides):
            key = override.partition("=")[0]
            if f"{setting}.".startswith((f"{key}.", f"{key}[")) or key.startswith(f"{setting}."):
                return override
        return None

    def given(self, setting: str) -> str | None:
        """Return the override or the line that gives the setting; None for a default."""
        override = self.override_of(setting)
        if override is None:
            return self.source.line(setting)
        argument = self.arguments.get(override.partition("=")[0])
        return f"override '{truncate(mask_url(override))}'" if argument is None else f"argument {argument}"

    def of(self, settings: Sequence[str]) -> str:
        """Return the place of the first setting that an override gives, or else a line; else the line nearest to where
        one could be, or the name of the source.
        """
        for setting in settings:
            if self.override_of(setting) is not None:
                return self.given(setting) or ""
        lines = [self.source.line(setting) for setting in settings]
        near = [self.source.nearest(setting) for setting in settings]
        return next((place for place in (*lines, *near) if place is not None), self.source.name)

    def sentence(self, refusal: Refusal) -> str:
        """Return the sentence of a refusal with its place, what its derived settings follow from, and the places of its
        other settings.
        """
        derived = {setting: self.follows[setting] for setting in refusal.settings if setting in self.follows}
        place = self.of([*refusal.settings, *chain.from_iterable(derived.values())])
        others: dict[str, list[str]] = {}  # settings by their place
        for setting in refusal.settings:
            given = self.given(setting)
            if given is not None and given != place:
                others.setdefault(given, []).append(setting)
        sentences = [f"{place}: {refusal.sentence}" if place else refusal.sentence]
        for setting, sources in derived.items():
            by = [self._with_line(source, value) for source, value in sources.items()]
            sentences.append(f"`{setting}` follows from {', '.join(by)}")
        if others:
            also = [f"{', '.join(names)} ({given})" for given, names in others.items()]
            sentences.append(f"Also given: {'; '.join(also)}")
        return ". ".join(sentences)

    def _with_line(self, setting: str, value: str) -> str:
        line = None if self.override_of(setting) else self.source.line(setting)
        return f"{setting}={value}" if line is None else f"{setting}={value} ({line})"


@contextmanager
def refusals_at(places: Places) -> Iterator[None]:
    """Raise a refusal from within as a ValueError whose sentence says where its settings were given."""
    try:
        yield
    except Refusal as refusal:
        raise ValueError(places.sentence(refusal)) from refusal
