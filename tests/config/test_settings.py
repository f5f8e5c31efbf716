"""What each setting means: a description of every field, and the page that `tinyrl settings` prints."""

from collections.abc import Iterator

from pydantic import BaseModel

from tinyrl.config.schema import Config, RewardFunctionConfig


def sections() -> Iterator[type[BaseModel]]:
    """The configuration, its sections, and what a list of sections holds."""
    yield from (Config, RewardFunctionConfig)
    for field in Config.model_fields.values():
        if isinstance(field.annotation, type) and issubclass(field.annotation, BaseModel):
            yield field.annotation


def test_every_field_has_a_description_of_one_line() -> None:
    found = {f"{kind.__name__}.{name}": field for kind in sections() for name, field in kind.model_fields.items()}
    assert len(found) > 90
    bad = [name for name, field in found.items() if not 3 <= len((field.description or "").strip()) <= 90]
    bad += [name for name, field in found.items() if "\n" in (field.description or "")]
    assert not bad
