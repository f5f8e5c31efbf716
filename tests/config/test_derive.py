"""What was given is told from what follows: presets, rates and lengths over recipes, runs and forks."""

from pathlib import Path
from typing import Any

import pytest

from tinyrl.config.derive import derive, derive_over, read_written, with_num_steps
from tinyrl.config.given import Given
from tinyrl.config.method_sections import PRESETS
from tinyrl.config.recipe import dump_config, dump_given, load_config, load_written_config
from tinyrl.config.refusal import Source
from tinyrl.config.removed import RENAMED
from tinyrl.config.rules import AdapterFacts, ModelFacts
from tinyrl.config.schema import Config
from tinyrl.config.yaml_reader import dump_plain, parse_plain

HERE = Path(__file__).parent
EARLIER = HERE.parent / "runs" / "earlier"


def new(method: str, *overrides: str, **sections: Any) -> Config:
    return derive(Given({"method": method, **sections}).over(overrides))


def as_a_run(config: Config, *, keeps_given: bool = True) -> Config:
    """The configuration as it is read from its run's folder."""
    values: Any = parse_plain(dump_config(config), "config.yaml")
    given: Any = parse_plain(dump_given(config) or "", "given.yaml") if keeps_given else None
    return read_written(values, Source("config.yaml"), given)


# ---- a preset over a run ----


@pytest.mark.parametrize("preset", ["dr_grpo", "gspo", "rloo", "cispo", "reinforce++"])
@pytest.mark.parametrize("keeps_given", [True, False])
def test_a_preset_over_a_run_brings_all_its_fields(preset: str, *, keeps_given: bool) -> None:
    run = as_a_run(new("grpo", run={"seed": 3}), keeps_given=keeps_given)
    changed = derive_over(run, [f"grpo.preset={preset}"])
    assert changed == new("grpo", run={"seed": 3}, grpo={"preset": preset})


def test_a2c_over_a_ppo_run_has_one_epoch_and_whole_batches() -> None:
    changed = derive_over(as_a_run(new("ppo")), ["ppo.preset=a2c"]).ppo
    assert (changed.num_epochs, changed.minibatch_size, changed.gae_lambda) == (1, None, 1.0)


def test_what_was_given_stays_under_another_preset() -> None:
    run = as_a_run(new("grpo", grpo={"preset": "grpo", "kl_coef": 0.04}))
    changed = derive_over(run, ["grpo.preset=dr_grpo"]).grpo
    assert (changed.kl_coef, changed.aggregation) == (0.04, "constant")


def test_without_the_record_a_value_that_its_preset_derives_counts_as_derived() -> None:
    run = as_a_run(new("grpo", grpo={"preset": "grpo", "kl_coef": 0.5, "clip_eps": 0.2}), keeps_given=False)
    changed = derive_over(run, ["grpo.preset=gspo"]).grpo
    assert (changed.kl_coef, changed.clip_eps) == (0.5, 3e-4)


def test_beta_follows_from_the_loss_unless_it_was_given() -> None:
    assert derive_over(as_a_run(new("dpo")), ["dpo.loss=simpo"]).dpo.beta == 2.0
    given = as_a_run(new("dpo", dpo={"beta": 0.3}))
    assert derive_over(given, ["dpo.loss=simpo"]).dpo.beta == 0.3


def test_rates_follow_from_lora_and_from_null() -> None:
    run = as_a_run(new("ppo", optim={"learning_rate": 1e-4}, critic={"kind": "separate"}))
    full = derive_over(run, ["lora.enabled=false"])
    assert (full.optim.learning_rate, full.optim.critic_learning_rate, full.critic.kind) == (1e-4, 1e-5, "separate")
    assert derive_over(run, ["optim.learning_rate=null"]).optim.learning_rate == 5e-5


def test_null_is_a_value_of_a_minibatch_and_not_a_request() -> None:
    assert new("ppo", ppo={"minibatch_size": None}).ppo.minibatch_size is None
    assert new("ppo", ppo={"preset": "a2c", "value_clip_eps": 0.1}).ppo.value_clip_eps == 0.1


def test_a_whole_section_over_a_run_is_the_section_of_a_new_run() -> None:
    changed = derive_over(as_a_run(new("grpo", grpo={"num_prompts": 4})), ["grpo={preset: rloo}"])
    assert changed == new("grpo", grpo={"preset": "rloo"})


@pytest.mark.parametrize(("epochs", "steps"), [(1, 3), (0.5, 2), (2, 5), (0.1, 1), (None, 7)])
def test_epochs_are_rounded_up_to_whole_steps(epochs: float | None, steps: int) -> None:
    """10 rows, 4 of them a step: an epoch is 2.5 steps."""
    run = {"num_steps": 7} if epochs is None else {"epochs": epochs}
    config = new("grpo", run=run)
    assert with_num_steps(config, rows=10, of_step=4).run.num_steps == steps


# ---- a refused value that was derived ----


def test_a_refused_value_of_a_preset_names_the_preset(tmp_path: Path) -> None:
    recipe = tmp_path / "mine.yaml"
    recipe.write_text("task: {name: sort}\ngrpo:\n  preset: rloo\n")
    with pytest.raises(ValueError, match=r"`grpo.advantage` follows from grpo.preset=rloo \(.*mine.yaml:3\)"):
        load_config("grpo", str(recipe), overrides=["grpo.group_size=1"])


def test_a_value_that_a_fork_s_preset_brings_is_refused_at_that_override() -> None:
    run = as_a_run(new("grpo", grpo={"preset": "reinforce++", "group_size": 1}))
    refused = r"^override 'grpo.preset=rloo': .*`grpo.advantage` follows from grpo.preset=rloo"
    with pytest.raises(ValueError, match=refused):
        derive_over(run, ["grpo.preset=rloo"])


def test_a_refused_default_follows_from_nothing() -> None:
    with pytest.raises(ValueError, match=r"grpo\.advantage=group") as refused:
        new("grpo", "grpo.group_size=1")
    assert "follows" not in str(refused.value)


# ---- what is not derived anew ----


def test_config_yaml_holds_where_nothing_is_overridden() -> None:
    """Another version's defaults and presets may be others."""
    values: Any = parse_plain(dump_config(new("grpo", grpo={"preset": "grpo"})), "config.yaml")
    values["grpo"] |= {"clip_eps": 0.11, "entropy_coef": 0.5}
    values["optim"] |= {"learning_rate": 0.03}
    run = read_written(values, Source("config.yaml"), {"method": "grpo", "grpo": {"preset": "grpo"}})
    assert parse_plain(dump_config(run), "config.yaml") == values
    changed = derive_over(run, ["run.num_steps=7"])
    values["run"] |= {"num_steps": 7}
    assert parse_plain(dump_config(changed), "config.yaml") == values


def test_lengths_are_derived_anew_for_another_model_alone() -> None:
    def facts(config: Config) -> ModelFacts:
        return ModelFacts(positions={"small": 64, "large": 128}.get(config.model.path))

    run = derive(Given({"method": "grpo", "model": {"path": "small"}, "task": {"data": "x"}}), facts)
    assert run.generation.max_new_tokens == 32
    run = as_a_run(run)
    assert derive_over(run, ["optim.weight_decay=0.1"], facts).generation.max_new_tokens == 32
    assert derive_over(run, ["model.path=large"], facts).generation.max_new_tokens == 64
    given = as_a_run(derive_over(run, ["generation.max_new_tokens=20"], facts))
    assert derive_over(given, ["model.path=large"], facts).generation.max_new_tokens == 20


def test_what_was_changed_is_given_from_then_on() -> None:
    changed = as_a_run(derive_over(as_a_run(new("grpo")), ["grpo.clip_eps=0.1"]))
    assert derive_over(changed, ["grpo.preset=gspo"]).grpo.clip_eps == 0.1


def test_the_rank_of_an_adapter_is_read_anew_with_another_adapter_alone() -> None:
    def facts(config: Config) -> ModelFacts:
        rank = {"first": 8, "second": 4}[str(config.model.adapter)]
        return ModelFacts(adapter=AdapterFacts(r=rank, alpha=1.0, target_modules=None))

    run = as_a_run(derive(Given({"method": "grpo", "model": {"adapter": "first"}}), facts))
    assert run.lora.r == 8

    def edited(config: Config) -> ModelFacts:
        return ModelFacts(adapter=AdapterFacts(r=64, alpha=1.0, target_modules=None))

    assert derive_over(run, ["run.num_steps=7"], edited).lora.r == 8
    assert derive_over(run, ["model.adapter=second"], facts).lora.r == 4


def test_an_old_name_in_what_was_given_is_read() -> None:
    """given.yaml of an earlier version, as config.yaml."""
    old, new_name = next(iter(RENAMED.items()))
    section, _, name = old.partition(".")
    run = read_written({"method": "ppo"}, Source("config.yaml"), {"method": "ppo", section: {name: 3}})
    assert run.given.has(new_name)


# ---- refusals and notes ----


@pytest.mark.parametrize("override", ["ppo.kl_coef=0.5", "critic.kind=shared", "sft={}", "method=ppo"])
def test_a_setting_of_another_method_is_refused_over_a_run(override: str) -> None:
    with pytest.raises(ValueError, match=rf"override '{override}'"):
        derive_over(as_a_run(new("grpo")), [override])


def notes_of(method: str, recipe: str, *overrides: str) -> list[str]:
    notes = list[str]()
    load_config(method, recipe, overrides=list(overrides), note=notes.append)
    return notes


def test_a_value_of_a_recipe_that_stays_against_an_override_is_told(tmp_path: Path) -> None:
    recipe = tmp_path / "r.yaml"
    recipe.write_text("task: {name: sort}\nppo:\n  num_epochs: 4\n  gae_lambda: 1.0\n")
    [note] = notes_of("ppo", str(recipe), "ppo.preset=a2c")
    assert f"{recipe}:3" in note
    assert "ppo.preset=a2c" in note
    assert not notes_of("ppo", str(recipe), "ppo.preset=a2c", "ppo.num_epochs=2")


def test_a_length_that_a_recipe_gives_is_not_told_beside_another_model(tmp_path: Path) -> None:
    recipe = tmp_path / "r.yaml"
    recipe.write_text("task: {name: sort}\ngeneration: {max_new_tokens: 16}\n")
    assert not notes_of("grpo", str(recipe), "model.path=starter")


def a_run_folder(path: Path, config: Config) -> Path:
    path.mkdir()
    (path / "config.yaml").write_text(dump_config(config))
    (path / "env.json").write_text("{}")
    return path / "config.yaml"


def test_a_run_s_config_yaml_is_a_recipe_without_notes(tmp_path: Path) -> None:
    file = a_run_folder(tmp_path / "run", new("grpo", task={"name": "sort"}))
    assert not notes_of("grpo", str(file))
    plain = load_config("grpo", str(file), overrides=["grpo.preset=rloo"])
    assert plain == new("grpo", task={"name": "sort"}, grpo={"preset": "rloo"})


def test_a_run_s_config_yaml_has_the_values_of_the_run(tmp_path: Path) -> None:
    config = new("grpo", task={"name": "sort"}, optim={"learning_rate": 0.01}, grpo={"clip_eps": 0.1})
    assert load_config("grpo", str(a_run_folder(tmp_path / "run", config)), overrides=[]) == config


# ---- records ----


def test_given_yaml_has_what_was_said_and_no_more() -> None:
    config = new("ppo", "ppo.preset=a2c", "optim.learning_rate=null", task={"name": "sort"}, sft={"batch_size": 1})
    assert parse_plain(dump_given(config) or "", "given.yaml") == {
        "method": "ppo",
        "task": {"name": "sort"},
        "ppo": {"preset": "a2c"},
        "optim": {"learning_rate": None},
    }


def test_given_yaml_has_no_secret() -> None:
    address = "http://user:secret@127.0.0.1:1/x?key=secret"
    config = new("grpo", f"generation.url={address}", "generation.engine=server")
    assert "secret" not in (dump_given(config) or "")


def test_a_run_of_an_earlier_version_has_no_record_of_what_was_given() -> None:
    config = load_written_config(EARLIER / "ppo" / "config.yaml")
    assert dump_given(config) is None
    changed = derive_over(config, ["ppo.preset=a2c"]).ppo
    assert (changed.gae_lambda, changed.whiten_advantages) == (1.0, False)


def test_a_run_that_is_older_than_adapters_on_experts_has_those_of_peft(tmp_path: Path) -> None:
    """Which all-linear was then, on Qwen3-MoE; also in a fork. A new run has none."""
    newer, older = tmp_path / "newer.yaml", tmp_path / "older.yaml"
    newer.write_text(dump_config(new("grpo")))
    older.write_text(newer.read_text().replace("  target_parameters: null\n", ""))
    config = load_written_config(older)
    assert config.lora.target_parameters == "peft"
    assert derive_over(config, ["grpo.kl_coef=0.1"]).lora.target_parameters == "peft"
    assert load_written_config(newer).lora.target_parameters is None
    assert load_written_config(EARLIER / "grpo" / "config.yaml").lora.target_parameters is None  # of named modules


def test_each_preset_differs_from_the_defaults_it_names() -> None:
    """A field that equals the default would be no difference."""
    plain = new("grpo").grpo
    for preset, fields in PRESETS.items():
        for name, value in fields.items():
            assert getattr(plain, name) != value, (preset, name)


def test_dump_and_load_keep_what_was_given(tmp_path: Path) -> None:
    config = new("grpo", grpo={"kl_coef": 0.04})
    (tmp_path / "config.yaml").write_text(dump_config(config))
    (tmp_path / "given.yaml").write_text(dump_plain({"method": "grpo", "grpo": {"kl_coef": 0.04}}))
    again = load_written_config(tmp_path / "config.yaml")
    assert again == config
    assert again.given.values == config.given.values
