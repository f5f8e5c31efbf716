"""What each setting means: a description of every field, and the page that `tinyrl list settings` prints."""

from collections.abc import Iterator

import pytest
from pydantic import BaseModel

from tinyrl.config.schema import Config
from tinyrl.config.sections import RewardFunctionConfig
from tinyrl.config.settings import SECTIONS, describe_settings
from tinyrl.config.yaml_reader import parse_plain


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


def test_the_page_of_a_section() -> None:
    assert describe_settings("reference") == (
        "reference:    # the policy to stay near to (read by grpo, ppo, distill and dpo)\n"
        "  kind: auto  # auto: the policy at the start, frozen (auto or none)"
    )


@pytest.mark.parametrize("width", [60, 80, 120])
def test_the_page_is_a_recipe_with_every_default_and_fits_the_terminal(width: int) -> None:
    page = describe_settings(width=width)
    assert max(map(len, page.splitlines())) <= width
    values, _ = parse_plain(page, str)
    assert list(values) == [*SECTIONS]
    assert {name: set(fields) for name, fields in values.items()} == {
        name: {*dict(getattr(Config.model_validate({"method": "grpo"}), name))} - {"forked_from"} for name in SECTIONS
    }
    for method in ("grpo", "ppo", "sft", "reward", "dpo"):
        written = Config.model_validate({"method": method, **values})
        assert written == Config.model_validate({"method": method})


def test_what_a_reward_function_of_the_list_has_is_shown() -> None:
    shown = describe_settings("reward").splitlines()
    use = next(i for i, line in enumerate(shown) if line.startswith("  #   use:"))
    assert shown[use + 1].startswith("  #   weight: 1.0")


@pytest.mark.parametrize(
    ("word", "answer"),
    [
        ("gpro", "there is no section 'gpro'. Did you mean `grpo`? Sections: model, lora"),
        (
            "minibatch_size",
            "there is no section 'minibatch_size'. `minibatch_size` is in grpo and ppo. Sections:",
        ),
        ("zzz", "there is no section 'zzz'. Sections: model, lora"),
    ],
)
def test_an_unknown_section_is_answered(word: str, answer: str) -> None:
    with pytest.raises(ValueError, match="no section") as caught:
        describe_settings(word)
    assert str(caught.value).startswith(answer)
