"""Settings without effect and contradictions: refused, or noted, each beside a near miss that is accepted."""

import json
import re
import shlex
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

import tinyrl
from tinyrl.cli.commands import app
from tinyrl.config.derive import derive_over, rebuilt
from tinyrl.config.marks import OnlyIf
from tinyrl.config.methods import METHODS
from tinyrl.config.recipe import dump_config, load_config, load_written_config
from tinyrl.config.settings import SECTIONS, describe, fields_of
from tinyrl.config.yaml_reader import parse_plain
from tinyrl.runs.resolve import config_of
from tinyrl.tasks import TASKS, load_task

JUDGE = "[{use: judge, url: 'http://a:1', model: m, rubric: r.md, mode: rank}]"
# method, settings, what is wrong with them, and settings that repair it
NO_EFFECT = [
    ("grpo", "lora.r=64", "model.adapter=adapter", "model.adapter="),
    ("grpo", "lora.alpha=64", "model.adapter=adapter", "model.adapter="),
    ("grpo", "lora.r=64", "lora.enabled=false", "lora.enabled=true"),
    ("grpo", "teacher.path=starter-teacher", "teacher.kl_coef=0", "teacher.kl_coef=0.1"),
    ("distill", "teacher.kl_coef=1", "teacher.path=x", None),
    ("grpo", "task.chat_template_kwargs={a: 1}", "task.chat=false", "task.chat=auto"),
    ("sft", "task.sampler=difficulty", "task.data=rows.jsonl", None),
    ("grpo", "reward.model_label=1", "reward.model=", "reward.model=starter-reward"),
    ("grpo", "environment.max_concurrency=2", "environment.name=python", "environment={agent: 'a.py:f'}"),
    ("grpo", "environment.max_call_tokens=9", "environment.name=python", "environment={agent: 'a.py:f'}"),
    ("grpo", "environment.side_prompts=['title']", "environment.name=python", "environment={agent: 'a.py:f'}"),
    ("grpo", "environment.min_tools=1", "environment.name=python", "environment={agent: 'a.py:f'}"),
    ("grpo", "environment.max_turns=2", "task.name=rows", "environment.name=python"),
    ("grpo", "environment.max_turns=2", "task.name=gsm8k", "task.name=search_qa"),
    ("grpo", "environment.max_turns=2", "task.name=sort", "task.name=lookup"),
    ("grpo", "environment.max_observation_tokens=9", "task.name=gsm8k", "task.name='mine.py:TASK'"),
    ("grpo", "environment.max_observation_tokens=9", "environment.agent=a.py:f", "environment.name=python"),
    ("grpo", "generation.stop=['x']", "environment.agent=a.py:f", "environment.name=python"),
    ("grpo", "task.system_prompt=hello", "environment.agent=a.py:f", "environment.name=python"),
    ("grpo", "environment.corpus=a.jsonl", "task.name=gsm8k", "environment.name=search"),
    ("grpo", "environment.corpus=a.jsonl", "task.name=lookup", "task.name=search_qa"),
    ("grpo", "environment.top_k=2", "environment.name=python", "environment.name=search"),
    ("grpo", "generation.url='http://a:1'", "generation.engine=hf", "generation.engine=server"),
    ("grpo", "generation.server_sleep=true", "generation.engine=hf", "generation={engine: server, url: 'http://a:1'}"),
    ("grpo", "optim.critic_learning_rate=1e-3", "run.seed=1", None),
    ("grpo", "grpo.advantage_scale=batch", "grpo.preset=rloo", "grpo.preset=grpo"),
    ("grpo", "grpo.turn_gamma=0.9", "environment.name=a.py:f", None),
    ("grpo", "grpo.kl_estimator=k2", "grpo.kl_coef=0", "grpo.kl_coef=0.1"),
    ("ppo", "ppo.value_coef=0.5", "critic.kind=adapter", "critic.kind=shared"),
    ("ppo", "ppo.ptx_data=rows.jsonl", "ppo.ptx_coef=0", "ppo.ptx_coef=0.5"),
    ("dpo", "dpo.label_smoothing=0.1", "dpo.loss=ipo", "dpo.loss=sigmoid"),
    ("dpo", "dpo.target_margin=0.1", "dpo.loss=sigmoid", "dpo.loss=simpo"),
]  # fmt: skip
CONTRADICTIONS = [
    ("grpo", "model.revision=main", "model.path=model", "model.path=owner/name"),
    ("grpo", "model.revision=main", "model.path=starter", "model.path=owner/name"),
    ("grpo", "model.random_init=true", "model.adapter=adapter", "model.adapter="),
    ("grpo", "task.columns={prompt: q}", "task.name=gsm8k", "task.data=rows.jsonl"),
    ("grpo", "task.revision=main", "task.data=rows.jsonl", "task.data=owner/name"),
    ("grpo", "reward.overlong_tokens=9", "generation.max_new_tokens=8", "generation.max_new_tokens=9"),
    (
        "grpo",
        "environment={agent: 'a.py:f', max_call_tokens: 9}",
        "generation.max_new_tokens=8",
        "generation.max_new_tokens=9",
    ),
    ("ppo", "ppo.target_kl=6", "ppo.kl_coef=0", "ppo.kl_coef=0.1"),
    ("distill", "distill.on_policy_fraction=0.5", "environment.name=python", "environment.name="),
    ("distill", "distill.on_policy_fraction=0.5", "environment.tools=['a.py:f']", "environment.tools=[]"),
    ("grpo", "run.seed=1", "environment.tools=['a.py:f', 'b.py:f']", "environment.tools=['a.py:f', 'b.py:g']"),
    ("distill", "teacher.quantization=4bit", "teacher.path=starter-teacher", "teacher.path=owner/name"),
]
BASE = {"sft": ["task.data=rows.jsonl"], "dpo": ["task.data=rows.jsonl"], "distill": ["teacher.path=starter-teacher"]}


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("model", "adapter"):
        Path(name).mkdir()
    Path("rows.jsonl").write_text('{"prompt": "a"}\n')


def given(words: list[str]) -> dict[str, Any]:
    """{"section.name": value} of overrides, as the Python API takes it."""
    pairs = [word.partition("=") for word in words]
    return {key: parse_plain(text, key) for key, _, text in pairs}


def sides(case: tuple[str, str, str, str | None]) -> tuple[str, list[str], list[str] | None]:
    """Return the method, settings that are wrong together, and settings that are nearly the same and right."""
    method, setting, other, repaired = case
    base = [*BASE.get(method, []), setting]
    return method, [*base, other], None if repaired is None else [*base, repaired]


@pytest.mark.parametrize("case", [*NO_EFFECT, *CONTRADICTIONS])
def test_it_is_refused_on_the_command_line(case: tuple[str, str, str, str | None]):
    method, wrong, right = sides(case)
    result = CliRunner().invoke(app, ["train", method, "model.dtype=auto", *wrong])
    assert result.exit_code == 2
    assert any(word.partition("=")[0] in result.output for word in case[1:3])
    assert ("has no effect" in result.output) is (case in NO_EFFECT)
    if right is not None:
        load_config(method, None, overrides=right)


@pytest.mark.parametrize("case", [NO_EFFECT[0], CONTRADICTIONS[0]])
def test_it_is_refused_in_python(case: tuple[str, str, str, str | None]):
    method, wrong, _ = sides(case)
    with pytest.raises(ValueError, match=case[1].partition("=")[0]):
        tinyrl.train(method, settings=given(wrong))


@pytest.mark.parametrize("case", NO_EFFECT)
def test_one_of_a_recipe_is_noted(case: tuple[str, str, str, str | None]):
    """But a recipe may be for several methods, and have settings for another one."""
    method, wrong, right = sides(case)
    Path("r.yaml").write_text(dump(method, wrong))
    notes: list[str] = []
    load_config(method, "r.yaml", overrides=[], note=notes.append)
    of_another_method = case[1].startswith(("task.sampler", "optim.critic", "teacher"))
    assert [f"`{case[1].partition('=')[0]}`" in note for note in notes] == [True] * (not of_another_method)
    if right is not None:
        Path("r.yaml").write_text(dump(method, right))
        load_config(method, "r.yaml", overrides=[], note=notes.append)
        assert len(notes) <= 1


@pytest.mark.parametrize("case", CONTRADICTIONS)
def test_a_contradiction_in_a_recipe_is_refused(case: tuple[str, str, str, str | None]):
    method, wrong, right = sides(case)
    Path("r.yaml").write_text(dump(method, wrong))
    with pytest.raises(ValueError, match=r"r\.yaml:1: "):
        load_config(method, "r.yaml", overrides=[])
    if right is not None:
        Path("r.yaml").write_text(dump(method, right))
        load_config(method, "r.yaml", overrides=[])


def dump(method: str, words: list[str]) -> str:
    """Write overrides as a recipe; JSON is YAML."""
    values: dict[str, Any] = {"method": method}
    for key, value in given(words).items():
        section, _, name = key.partition(".")
        values.setdefault(section, {}).update({name: value} if name else value)
    return json.dumps(values)


@pytest.mark.parametrize("case", [*NO_EFFECT, *CONTRADICTIONS])
def test_a_run_that_has_it_stays_readable_and_may_be_resumed(case: tuple[str, str, str, str | None]):
    method, wrong, _ = sides(case)
    values = parse_plain(dump(method, wrong), "values")
    Path("config.yaml").write_text(dump_config(rebuilt(values)))
    assert derive_over(load_written_config(Path("config.yaml")), ["run.num_steps=7"]).run.num_steps == 7


def test_what_is_typed_for_a_resume_is_refused():
    values = {"method": "grpo", "model": {"path": "x", "adapter": "adapter"}, "reward": {"overlong_tokens": 256}}
    Path("config.yaml").write_text(dump_config(config_of(values)))
    for override in ("lora.r=64", "generation.max_new_tokens=255"):
        with pytest.raises(ValueError, match=override):
            derive_over(load_written_config(Path("config.yaml")), [override])


def test_a_setting_that_is_taken_back_is_no_setting():
    config_of({"method": "grpo"}, ["teacher.path=", "environment.corpus=null", "task.chat_template_kwargs={}"])


def test_what_only_a_judge_has_is_refused_of_a_function():
    for function in ({"use": "a.py:f", "scale": [0.0, 5.0]}, {"use": "a.py:f", "key_env": "KEY"}):
        with pytest.raises(ValueError, match=r"only of a judge, and use=a\.py:f"):
            config_of({"method": "grpo", "reward": {"functions": [function]}})
    config_of({"method": "grpo"}, [f"reward.functions={JUDGE}"])


def test_a_resume_takes_no_output_dir():
    result = CliRunner().invoke(app, ["train", "--resume", "runs/x", "--output-dir", "elsewhere"])
    assert result.exit_code == 2
    assert "--resume" in result.output


def test_the_environment_s_settings_count_with_each_task_that_has_one():
    for name in TASKS:
        task = load_task(name)
        config = config_of({"method": "grpo", "task": {"name": name}})
        has_turns = task.respond is not None or task.environment is not None
        assert (config.unmet("environment", "max_turns") is None) == has_turns, name
        assert (config.unmet("environment", "corpus") is None) == (task.environment == "search"), name


def test_a_resume_without_one_looks_for_the_run():
    result = CliRunner().invoke(app, ["train", "--resume", "runs/x"])
    assert "runs/x is not a run" in result.output


def test_every_condition_is_of_settings_there_are_and_on_the_page():
    configs = [config_of({"method": method}) for method in METHODS]
    count = 0
    for section in SECTIONS:
        fields = type(getattr(configs[0], section)).model_fields
        rows = {name: meaning for name, _, meaning in describe(section)}
        for name, field in fields.items():
            for mark in field.metadata:
                if isinstance(mark, OnlyIf):
                    count += 1
                    assert {type(mark.holds(config)) for config in configs} == {bool}
                    assert mark.words in rows[name]
                    for setting in re.findall(r"([a-z_]+)\.([a-z_]+)", mark.words):
                        assert setting[1] in fields_of(setting[0])
    assert count > 30


def test_what_to_type_for_a_setting_that_does_not_count_is_taken():
    for override, other in (
        ("lora.r=64", "model.adapter=adapter"),
        ("generation.stop=['x']", "environment.agent=a.py:f"),
        ("run.num_steps=7", "run.epochs=1"),
    ):
        with pytest.raises(ValueError, match="To have it: ") as caught:
            config_of({"method": "grpo"}, [other, override])
        remedy = shlex.split(str(caught.value).partition("To have it: ")[2])
        config_of({"method": "grpo"}, [other, *remedy])
