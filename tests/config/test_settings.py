"""The page that `tinyrl list settings` prints."""

import pytest

from tinyrl.config.schema import Config
from tinyrl.config.settings import SECTIONS, describe_settings
from tinyrl.config.yaml_reader import parse_plain


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


def test_an_unknown_section_is_answered_with_a_near_one_or_a_field_s() -> None:
    for word, near in (("gpro", "`grpo`"), ("minibatch_size", "grpo and ppo"), ("zzz", "model, lora")):
        with pytest.raises(ValueError, match=f"no section '{word}'.*{near}"):
            describe_settings(word)
