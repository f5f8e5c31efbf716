"""Recipes and overrides: broken files, mistakes and how they are answered, and config.yaml read back."""

import ast
import re
import shlex
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from tinyrl.config.aliases import ALIASES, reader_of
from tinyrl.config.derive import derive
from tinyrl.config.foreign_values import Values
from tinyrl.config.given import Given, apply_overrides, as_override
from tinyrl.config.methods import METHODS
from tinyrl.config.recipe import (
    dump_config,
    find_recipe,
    load_config,
    load_written_config,
    method_of,
    packaged_recipes,
)
from tinyrl.config.removed import REMOVED, RENAMED
from tinyrl.config.settings import SECTIONS, allowed, describe_settings, fields_of
from tinyrl.config.yaml_reader import parse_plain
from tinyrl.process.errors import UnknownSettings
from tinyrl.runs.resolve import config_of
from tinyrl.text import truncate

JUDGE = "{use: judge, url: 'http://a:1', model: m, rubric: r.md}"
SORT = "method: grpo\ntask: {name: sort}\n"


@pytest.fixture
def recipe(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str | bytes], str]:
    """Return a function that writes r.yaml into the current folder, which is a fresh one."""
    monkeypatch.chdir(tmp_path)

    def write(content: str | bytes) -> str:
        Path("r.yaml").write_bytes(content.encode("utf-8") if isinstance(content, str) else content)
        return "r.yaml"

    return write


def refused(method: str, name: str | None, *overrides: str) -> str:
    with pytest.raises(ValueError, match=r"\S") as caught:
        load_config(method, name, overrides=list(overrides))
    assert type(caught.value) in (ValueError, UnknownSettings)
    assert len(str(caught.value).splitlines()) <= 6 or type(caught.value) is UnknownSettings
    return str(caught.value)


def test_a_function_in_place_of_a_list_is_refused_with_the_line_to_type():
    refusal = refused("grpo", None, "task.name=sort", "reward.functions=rewards.py:score")
    [line] = [word for word in shlex.split(refusal.replace("`", "")) if word.startswith("reward.functions=[")]
    [function] = load_config("grpo", None, overrides=["task.name=sort", line]).reward.functions
    assert function.use == "rewards.py:score"
    assert "reward.functions=[" not in refused("grpo", None, "task.name=sort", "reward.functions=no function")


# ---- files ----


@pytest.mark.parametrize(
    ("content", "place", "part"),
    [
        ("# only a comment\n", "r.yaml: ", "empty"),
        ("- a\n", "r.yaml: ", "mapping of sections"),
        (b"method: grpo\nmodel: {path: caf\xe9}\n", "r.yaml: ", "UTF-8"),
        ("method: grpo\ngrpo: {group_size: [4\n", "r.yaml:3: ", "broken YAML"),
        (SORT + "grpo:\n  kl_coef: 0\n  kl_coef: 1\n", "r.yaml:5: ", "`kl_coef`"),
        (SORT + "grpo:\n  group_sise: 4\n", "r.yaml:4: ", "`grpo.group_size`"),
        (SORT + "grpo:\n  seed: 4\n", "r.yaml:4: ", "`run.seed`"),
        (SORT + "lora:\n  r: 1:30\n", "r.yaml:4: ", "`lora.r` is '1:30'"),
        (SORT + "reward:\n  functions:\n    - {use: a.py:f}\n    - {use: judge}\n", "r.yaml:6: ", "needs url"),
        (SORT + "grpo:\n  minibatch_size: 7\n", "r.yaml:4: ", "does not divide"),
        ("method: gpro\n", "r.yaml:1: ", "`grpo`"),
        ("method: ppo\n", "r.yaml:1: ", "train ppo`, not grpo"),
    ],
)
def test_a_bad_recipe_is_refused(recipe: Callable[..., str], content: str | bytes, place: str, part: str):
    found = refused("grpo", recipe(content))
    assert found.startswith(place)
    assert part in found


def test_a_recipe_as_other_editors_write_it_and_one_for_two_methods(recipe: Callable[..., str]):
    for content in (b"\xef\xbb\xbf" + SORT.encode(), SORT.replace("\n", "\r\n"), "task: {name: sort}\n"):
        assert load_config("grpo", recipe(content), overrides=[]).task.name == "sort"
    name = recipe(SORT + "grpo: {num_prompts: 4}\nppo: {num_prompts: 64}\n")
    grpo, ppo = (load_config(method, name, overrides=[]) for method in ("grpo", "ppo"))
    assert (grpo.grpo.num_prompts, ppo.ppo.num_prompts) == (4, 64)
    assert "ppo" not in dump_config(grpo)


def test_packaged_recipes_are_found_by_name_and_files_come_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    packaged = packaged_recipes()["starter-grpo"]
    for name in ("starter-grpo", "starter-grpo.yaml"):
        assert find_recipe(name) == packaged
    Path("starter-grpo").write_text(SORT)
    assert find_recipe("starter-grpo") == Path("starter-grpo")
    assert "`starter-grpo`" in refused("grpo", "starter-gpro")
    for name in ("./nothing.yaml", str(tmp_path), "x" * 5000, "a\0b"):
        assert refused("grpo", name).startswith("recipe '")


def test_words_begin_with_a_method_or_with_a_recipe_that_names_its_own(recipe: Callable[[str | bytes], str]):
    name = recipe(SORT)
    assert method_of([name, "run.seed=7"]) == ("grpo", [name, "run.seed=7"])
    assert method_of(["ppo", name, "run.seed=7"]) == ("ppo", [name, "run.seed=7"])
    for words, part in ((["run.seed=7"], "which method"), ([recipe("task: {name: sort}\n")], r"grpo r\.yaml")):
        with pytest.raises(ValueError, match=part):
            method_of(words)


# ---- overrides ----


def test_overrides_are_laid_over_and_read_as_yaml():
    before = {"grpo": {"kl_coef": 0.1, "group_size": 4}, "run": None}
    given = ["grpo.kl_coef=1", "grpo.kl_coef=5e-5", "run.seed=3", "model.adapter=", "lora={r: 4}", "a.b=x=y"]
    assert apply_overrides(before, given) == {
        "grpo": {"kl_coef": 5e-5, "group_size": 4},
        "run": {"seed": 3},
        "model": {"adapter": None},
        "lora": {"r": 4},
        "a": {"b": "x=y"},
    }
    assert before == {"grpo": {"kl_coef": 0.1, "group_size": 4}, "run": None}
    for value in (
        "a b",
        "no",
        "3",
        "010",
        "x: [",
        "",
        "line\nbreak",
        "\u00e9\U0001f600",
        "a\x85\u2028\u2029b",
        {"a": "q"},
        None,
    ):
        assert apply_overrides({}, [as_override("task.x", value)]) == {"task": {"x": value}}
    for override in ("grpo.kl_coef", "=3", "grpo..x=3", "grpo.x=[1", "list.0.x=1", "text.x=1"):
        with pytest.raises(ValueError, match=re.escape(f"override '{override}'")):
            apply_overrides({"list": [1], "text": "abc"}, [override])


@pytest.mark.parametrize(
    ("method", "override", "part"),
    [
        ("grpo", "grpo.minibatch_size=7", "does not divide"),
        ("grpo", "ppo.kl_coef=1", "`grpo.kl_coef`"),
        ("grpo", "method=ppo", "train grpo"),
        # unknown: a near name, the section that has it, or what there is
        ("grpo", "grpo.group_sise=4", "`grpo.group_size`"),
        ("grpo", "rum={}", "`run`"),
        ("grpo", "num_steps=3", "`run.num_steps`"),
        ("grpo", "reward.functions=[{use: 'a.py:f', wait: 2}]", "`reward.functions[0].weight`"),
        # wrong values, with what is allowed
        ("grpo", "run.micro_batch_tokens=0", "must be auto or a whole number from 1"),
        ("grpo", "lora.target_modules=[1]", "all-linear or a list of strings"),
        ("grpo", "lora.dropout=2", "at least 0 and below 1"),
        ("grpo", "reward.functions=[{}]", "`reward.functions[0].use` is missing"),
        ("grpo", "grpo.preset=dappo", "`dapo`"),
        ("grpo", "task.chat_template_kwargs={a: [1]}", "`task.chat_template_kwargs.a` is [1]"),
        # names of TRL and verl, also with dots
        ("grpo", "+actor_rollout_ref.rollout.n=8", "`grpo.group_size`"),
        ("ppo", "algorithm.adv_estimator=gae", "tinyrl train ppo"),
        ("dpo", "dpo.simpo_gamma=0.1", "`dpo.target_margin`"),
        ("grpo", "environment.use=python", "`environment.name`"),  # an earlier name
        ("grpo", "output_dir=x", "`--output-dir`"),
        # of a list's item, not of the recipe that ships
        ("grpo", "reward.functions=[{use: judge}]", "needs url, model, rubric"),
        ("grpo", f"reward.functions=[{JUDGE.replace('}', ', scale: [5.0, 1.0]}')}]", "the worst score"),
        ("grpo", f"reward.functions=[{JUDGE.replace('}', ', seed: 0}')}]", "key `reward.functions[0].seed`"),
        # numbers and truth values of YAML 1.2
        ("grpo", "lora.r=1:30", "`lora.r` is '1:30'"),
        ("grpo", "lora.enabled=no", "must be true or false"),
    ],
)
def test_a_mistake_in_an_override_is_placed_and_answered(method: str, override: str, part: str):
    found = refused(method, None, "task.data=rows.jsonl", override)
    assert found.startswith(f"override '{truncate(override)}'")
    assert part in found


def test_one_sentence_a_setting_and_three_at_most(recipe: Callable[..., str]):
    name = recipe(SORT + "grpo: {clip_eps: 3}\n")  # which is not placed at an override
    assert refused("grpo", name, "grpo.kl_coef=0").startswith("r.yaml:3: `grpo.clip_eps` is 3")
    values = {"run": {"seed": -1, "num_steps": 0, "threads": "x", "micro_batch_tokens": "abc"}, "lora": {"r": 0}}
    with pytest.raises(ValueError, match=r"lora\.r") as caught:
        config_of({"method": "grpo", **values})
    assert [line.split("`")[1] for line in str(caught.value).splitlines()] == [
        "lora.r", "run.num_steps", "run.seed",
    ]  # fmt: skip


def test_a_contradiction_is_placed_where_the_command_line_made_it(recipe: Callable[..., str]):
    name = recipe(SORT + "model: {adapter: a}\ngrpo: {num_prompts: 4}\n")
    assert refused("grpo", name, "lora.enabled=false").startswith("override 'lora.enabled=false'")
    name = recipe(SORT + "model: {adapter: a}\nlora: {enabled: false}\n")
    assert refused("grpo", name, "run.seed=1").startswith("r.yaml:3: ")


TRL = (  # a GRPOConfig as people have it, and what each name is here
    ("num_generations", "grpo.group_size"), ("beta", "grpo.kl_coef"), ("epsilon", "grpo.clip_eps"),
    ("epsilon_high", "grpo.clip_eps_high"), ("num_iterations", "grpo.num_epochs"), ("loss_type", "grpo.aggregation"),
    ("scale_rewards", "grpo.advantage_scale"), ("max_completion_length", "generation.max_new_tokens"),
    ("temperature", "generation.temperature"), ("max_prompt_length", "generation.max_prompt_tokens"),
    ("max_steps", "run.num_steps"), ("save_steps", "run.save_every"), ("seed", "run.seed"),
    ("report_to", "run.trackers"), ("lora_alpha", "lora.alpha"), ("model_name_or_path", "model.path"),
)  # fmt: skip


def test_all_unknown_names_are_answered_at_once(recipe: Callable[..., str]):
    name = recipe(SORT + "".join(f"{theirs}: 1\n" for theirs, _ in TRL) + "logging_steps: 1\nwhat: 1\n")
    found = refused("grpo", name)
    assert "r.yaml:3" in found.splitlines()[0]
    for theirs, ours in TRL:
        assert f"`{theirs}` is `{ours}`" in found
    assert "`logging_steps` is not needed" in found
    assert "`what` is unknown" in found


def test_names_with_dots_are_answered_each(recipe: Callable[..., str]):
    found = refused(
        "grpo", recipe(SORT + "lora: {r: 8}\n"), "a.rollout.n=8", "a.actor.grad_clip=1", "a.actor.no_such_thing=1"
    )
    assert [line.partition(":")[0] for line in found.splitlines()] == [
        "override 'a.rollout.n=8'", "override 'a.actor.grad_clip=1'", "override 'a.actor.no_such_thing=1'", "to copy",
    ]  # fmt: skip
    assert "`grpo.group_size`" in found
    assert "`optim.max_grad_norm`" in found


def test_unknown_names_hide_no_other_mistake(recipe: Callable[..., str]):
    name = recipe(SORT + "lora: {r: 0}\n" + "".join(f"{theirs}: 1\n" for theirs, _ in TRL[:4]))
    first, *others = refused("grpo", name).splitlines()
    assert first.startswith("4 unknown settings")
    assert any(line.startswith("r.yaml:3: `lora.r` is 0") for line in others)


@pytest.mark.parametrize(
    ("method", "given", "lines"),
    [
        ("grpo", ["num_generations=8", "learning_rate=2e-6"], "grpo.group_size=8 optim.learning_rate=2e-06"),
        ("grpo", ["scale_rewards=false", "loss_type=dr_grpo"], "grpo.advantage_scale=none grpo.aggregation=constant"),
        ("grpo", ["output_dir=my runs", "bf16=true"], "--output-dir 'my runs' model.dtype=bfloat16"),
        ("ppo", ["epsilon=0.1"], "ppo.clip_eps=0.1"),  # the method's own section
        ("dpo", ["beta=0.2", "loss_type=ipo"], "dpo.beta=0.2 dpo.loss=ipo"),
        # counts of optimizer steps: two of them a step
        ("grpo", ["num_iterations=2", "save_steps=50", "max_steps=101"],
         "grpo.num_epochs=2 run.save_every=25 run.num_steps=51"),
        ("grpo", ["chat_template_kwargs={a: true}"], "'task.chat_template_kwargs={\"a\": true}'"),
        # no line for what depends on other settings, or is not there
        ("grpo", ["num_generations=8", "warmup_ratio=0.1", "min_p=0.1"], "grpo.group_size=8"),
        # what training refuses
        ("grpo", ["num_generations=8", "top_p=0.9", "top_k=20"], "grpo.group_size=8"),
        # completions of a step, with TRL's 8, 1 and 8 where they are not given
        ("grpo", ["per_device_train_batch_size=16", "gradient_accumulation_steps=4", "num_generations=4"],
         "grpo.num_prompts=16 grpo.group_size=4"),
        ("grpo", ["per_device_train_batch_size=32"], "grpo.num_prompts=4"),
        ("grpo", ["gradient_accumulation_steps=3"], "grpo.num_prompts=3"),
        ("grpo", ["gradient_accumulation_steps=2", "num_generations=3", "seed=1"], "grpo.group_size=3 run.seed=1"),
        # a rollout of two optimizer steps: 8 x 4 completions, 16 of them in each
        ("grpo", ["steps_per_generation=4", "gradient_accumulation_steps=2", "max_steps=10"],
         "grpo.num_prompts=4 grpo.minibatch_size=16 run.num_steps=5"),
        ("grpo", ["generation_batch_size=64", "save_steps=16"],  # 8 optimizer steps
         "grpo.num_prompts=8 grpo.minibatch_size=8 run.save_every=2"),
        ("sft", ["per_device_train_batch_size=4", "gradient_accumulation_steps=2"], "sft.batch_size=8"),
        # TRL weighs its KL since 1.11
        ("grpo", ["beta=0.04"], "grpo.kl_coef=0.04 grpo.kl_unbiased=true"),
        ("grpo", ["beta=0.0"], "grpo.kl_coef=0.0"),
        ("grpo", ["beta=0.04", "use_bias_correction_kl=false"], "grpo.kl_coef=0.04 grpo.kl_unbiased=false"),
        ("grpo", ["seed=1", "use_bias_correction_kl=true"], "run.seed=1"),
        # the length of the run, and shares of it: ceil(0.1 x 25) = 3 optimizer steps, two of them a step
        ("grpo", ["max_steps=-1", "num_train_epochs=2"], "run.epochs=2"),
        # one setting of two names, with the default of one that is not given; OpenRLHF has both in one
        ("grpo", ["adam_beta1=0.9", "adam_beta2=0.99"], "'optim.betas=[0.9, 0.99]'"),
        ("grpo", ["adam_beta2=0.99"], "'optim.betas=[0.9, 0.99]'"),
        ("grpo", ["adam_betas=[0.9, 0.95]"], "'optim.betas=[0.9, 0.95]'"),
        ("grpo", ["actor_rollout_ref.actor.optim.betas=[0.8, 0.95]"], "'optim.betas=[0.8, 0.95]'"),  # verl's
        ("grpo", ["adam_beta1=high", "seed=1"], "run.seed=1"),
        ("grpo", ["full_determinism=true"], "run.deterministic=true"),
        # 1.0 of a ratio is the whole run, and 1.0 step is one
        ("grpo", ["max_steps=25", "warmup_ratio=1.0"], "run.num_steps=25 optim.warmup_steps=25"),
        ("grpo", ["max_steps=25", "warmup_steps=10.0"], "run.num_steps=25 optim.warmup_steps=10"),
        ("grpo", ["max_steps=25", "warmup_steps=1.0"], "run.num_steps=25 optim.warmup_steps=1"),
        ("grpo", ["max_steps=25", "num_train_epochs=2", "warmup_ratio=2"], "run.num_steps=25"),  # no share
        ("grpo", ["max_steps=25", "warmup_ratio=0.1", "num_iterations=2"],
         "run.num_steps=13 optim.warmup_steps=2 grpo.num_epochs=2"),
        ("grpo", ["max_steps=-1", "warmup_ratio=0.1", "seed=1"], "run.seed=1"),
        ("grpo", ["log_completions=true", "seed=1"], "run.seed=1"),
        ("grpo", ["vllm_server_base_url=http://127.0.0.1:8000"],
         "generation.engine=server generation.url=http://127.0.0.1:8000"),
        ("grpo", ["log_completions=true", "report_to=wandb"], "run.log_completions=true 'run.trackers=[wandb]'"),
    ],
)  # fmt: skip
def test_names_of_other_libraries_end_with_the_line_to_copy(
    recipe: Callable[..., str], method: str, given: list[str], lines: str
):
    assert refused(method, None, "task.name=sort", *given).splitlines()[-1] == f"to copy: {lines}"


def test_names_without_a_line_have_no_line_to_copy(recipe: Callable[..., str]):
    assert "to copy" not in refused("grpo", recipe(SORT), "warmup_ratio=0.1", "reward_weights=[1, 2]")


def last_lines(*given: str) -> dict[str, str]:
    """Return what the lines behind the answers say, by their beginnings."""
    lines = [line for line in refused("grpo", None, *given).splitlines() if not line.startswith(("  ", "override"))]
    return {line.partition(" ")[0].rstrip(":"): line.partition(" ")[2] for line in lines}


def test_the_line_to_copy_of_a_whole_configuration_is_taken():
    given = ["learning_rate=2e-5", "per_device_train_batch_size=8", "gradient_accumulation_steps=4", "top_p=0.9",
             "beta=0.04", "max_steps=40", "num_iterations=2", "warmup_ratio=0.1", "log_completions=true",
             "eval_strategy=steps", "max_completion_length=64", "temperature=0.9", "loss_type=dr_grpo",
             "max_tool_calling_iterations=3"]  # fmt: skip
    line = last_lines(*given)["to"].removeprefix("copy: ")
    config = load_config("grpo", None, overrides=["task.name=sort", *shlex.split(line)])
    assert (config.grpo.num_prompts, config.run.num_steps, config.optim.warmup_steps) == (4, 20, 2)
    assert (config.grpo.kl_coef, config.grpo.kl_unbiased, config.grpo.aggregation) == (0.04, True, "constant")


def test_the_line_for_the_grpo_config_of_the_docs_is_the_recipe_beside_it():
    page = (Path(__file__).parents[2] / "docs" / "settings.md").read_text(encoding="utf-8")
    block = re.search(r"```python\n(GRPOConfig\(.*?)```\n\n```yaml\n(.*?)```", page, re.DOTALL)
    assert block is not None
    call = next(node for node in ast.walk(ast.parse(block[1])) if isinstance(node, ast.Call))
    given = [as_override(str(word.arg), ast.literal_eval(word.value)) for word in call.keywords]
    beside = parse_plain(block[2], "settings.md")
    own = [as_override(name, beside[name]) for name in ("model", "task", "reward", "lora")]  # not of a GRPOConfig
    line = refused("grpo", None, *given).splitlines()[-1].removeprefix("to copy: --name sums ")
    assert load_config("grpo", None, overrides=[*own, *shlex.split(line)]) == config_of(beside)


def test_names_that_are_not_in_the_line_are_named():
    without = last_lines("seed=1", "reward_weights=[1]", "adam_epsilon=1.0e-6", "max_steps=-1", "logging_steps=1")[
        "not"
    ]
    named = re.findall(r"(\w+) \(", without)
    assert sorted(named) == ["adam_epsilon", "logging_steps", "max_steps", "reward_weights"]
    assert "not" not in last_lines("seed=1", "num_generations=4")


def test_divided_counts_are_told():
    told = last_lines("num_iterations=2", "max_steps=41", "save_steps=10", "seed=1")["divided"]
    assert "max_steps 41 is 21" in told
    assert "save_steps 10 is 5" in told
    assert "divided" not in last_lines("max_steps=41", "save_steps=10", "seed=1")


def test_what_a_run_of_ones_own_needs_is_added_where_nothing_of_it_was_given():
    assert [*re.findall(r"\w+\.\w+", last_lines("seed=1")["add"])] == ["model.path", "task.data", "reward.functions"]
    assert "model.path" not in last_lines("seed=1", "model_name_or_path=m")["add"]
    assert "add" not in last_lines("seed=1", "task.name=sort")


def test_sizes_that_were_not_given_are_told():
    assert "num_generations=8" in last_lines("per_device_train_batch_size=8", "seed=1")["grpo.num_prompts"]
    sizes = ["per_device_train_batch_size=8", "gradient_accumulation_steps=1", "num_generations=8"]
    assert "with TRL's" not in last_lines(*sizes)["grpo.num_prompts"]


def test_the_sum_that_makes_prompts_of_completions_is_shown():
    sizes = ["per_device_train_batch_size=16", "gradient_accumulation_steps=4", "num_generations=8"]
    counted = last_lines(*sizes, "generation_batch_size=128")["grpo.num_prompts"]
    assert re.findall(r"\d+", counted) == ["128", "16", "8", "64"]


@pytest.mark.parametrize(
    ("given", "is_told"),
    [
        (["num_generations=8"], True),
        (["num_generations=8", "lr_scheduler_type=constant"], False),
        (["lam=0.9"], False),  # of no library that has a schedule of its own
    ],
)
def test_the_schedule_that_trl_has_where_none_is_given_is_told(given: list[str], is_told: bool):
    method = "ppo" if "lam=0.9" in given else "grpo"
    assert ("optim.schedule=linear" in refused(method, None, "task.name=sort", *given)) is is_told


@pytest.mark.parametrize("has_adapter", [True, False])
def test_what_an_adapter_brings_is_not_in_the_line(has_adapter: bool):
    adapter = ["model.adapter=runs/sft"] if has_adapter else []
    found = refused("grpo", None, "task.name=sort", *adapter, "lora_r=8", "lora_alpha=16", "seed=1")
    line = "run.seed=1" if has_adapter else "lora.r=8 lora.alpha=16 run.seed=1"
    assert found.splitlines()[-1] == f"to copy: {line}"
    assert ("lora_r (the adapter" in found) is has_adapter


def test_steps_over_a_recipe_with_epochs_are_refused_with_what_to_type(recipe: Callable[..., str]):
    name = recipe(SORT + "run: {epochs: 1}\n")
    found = refused("grpo", name, "run.num_steps=40")
    words = found.partition("To have it: ")[2].split()
    assert words == ["run.epochs=null", "run.num_steps=40"]
    assert load_config("grpo", name, overrides=words).run.num_steps == 40


@pytest.mark.parametrize("exists", [True, False])
def test_a_data_file_is_no_recipe(recipe: Callable[..., str], *, exists: bool):
    recipe(SORT)
    if exists:
        Path("rows.jsonl").write_text("{}\n")
    with pytest.raises(ValueError, match=r"task\.data=rows\.jsonl"):
        load_config("grpo", "rows.jsonl", overrides=[])


VALUES_OF = {name: read.lines for name in sorted(ALIASES) if isinstance(read := reader_of(name), Values)}


@pytest.mark.parametrize("alias", VALUES_OF)
def test_each_line_to_copy_is_a_setting_with_a_value_it_takes(alias: str):
    for text in VALUES_OF[alias].values():
        line = text if "=" in text else f"{ALIASES[alias].ours.setting}={text}"
        setting, _, value = line.partition("=")
        section, _, key = setting.partition(".")
        method = section if section in ("ppo", "sft", "dpo") else "grpo"
        extra = ["grpo.kl_coef=0.1"] if setting == "grpo.kl_estimator" else []
        config = load_config(method, None, overrides=["task.name=sort", *extra, line])
        assert key in fields_of(section)
        assert getattr(getattr(config, section), key) == parse_plain(value, line)


@pytest.mark.parametrize(("old", "new"), RENAMED.items())
def test_an_old_name_is_answered_with_the_new_one(old: str, new: str):
    section, _, name = new.partition(".")
    assert name in fields_of(section)
    method = section if section in METHODS else "ppo" if section == "critic" else "grpo"
    assert refused(method, None, "task.name=sort", f"{old}=1") == f"override '{old}=1': `{old}` is `{new}` now"


@pytest.mark.parametrize("method", METHODS)
def test_a_removed_setting_is_answered_with_what_replaced_it_whatever_is_trained(method: str):
    instead = REMOVED["distill.objective"].instead
    assert refused(method, None, "distill.objective=sampled").endswith(instead)
    if method != "distill":  # one that there is, of a section that the method lacks
        assert instead not in refused(method, None, "distill.on_policy_fraction=1")


def test_an_old_name_in_a_run_s_config_yaml_is_read(recipe: Callable[..., str]):
    """But a recipe is somebody's, and is told."""
    old = "method: grpo\ngrpo: {refill_rounds: 2}\nenvironment: {use: python}\n"
    config = load_written_config(Path(recipe(old)))
    assert (config.grpo.dynamic_sampling_rounds, config.environment.name) == (2, "python")
    assert "`grpo.dynamic_sampling_rounds`" in refused("grpo", "r.yaml")


def test_every_name_from_elsewhere_is_answered_with_a_setting_there_is():
    for row in ALIASES.values():
        for ours in (row.ours, *row.under.values()):
            if ours.setting and not ours.setting.startswith("--"):
                section, _, key = ours.setting.partition(".")
                assert key in fields_of(section), ours


def test_without_a_recipe_the_embedded_default_runs_unless_a_model_or_data_is_named():
    embedded = load_config("grpo", None, overrides=[])
    assert embedded == load_config("grpo", "starter-grpo", overrides=[])
    plain = derive(Given({"method": "grpo", "task": {"name": "gsm8k"}}))
    for overrides in (["task.name=gsm8k"], ["task={name: gsm8k}"]):
        assert load_config("grpo", None, overrides=overrides) == plain
    assert load_config("grpo", None, overrides=["run.num_steps=7"]).run.num_steps == 7
    assert embedded != plain


# ---- the page of settings ----


def test_the_page_is_a_recipe_with_every_default() -> None:
    values = parse_plain(describe_settings(), "page")
    plain = derive(Given({"method": "grpo"}))
    assert {name: {*fields} for name, fields in values.items()} == {
        name: {*dict(getattr(plain, name))} for name in SECTIONS
    }
    for method in METHODS:
        assert derive(Given({"method": method, **values})) == derive(Given({"method": method}))
    with pytest.raises(ValueError, match=r"no section 'gpro'.*`grpo`"):
        describe_settings("gpro")


def test_the_page_in_narrow_lines_has_the_same_values() -> None:
    narrow = describe_settings(columns=80)
    assert parse_plain(narrow, "page") == parse_plain(describe_settings(), "page")
    assert [line for line in narrow.splitlines() if len(line) > 80 and "#" in line[40:]] == []


# ---- config.yaml gives the same object ----


@pytest.mark.parametrize("method", METHODS)
def test_config_yaml_is_the_same_object(method: str, tmp_path: Path):
    variables = {"enable_thinking": False, "effort": "low", "budget": 3, "share": 0.5, "none": None}
    task = {"data": "x.jsonl", "chat_template_kwargs": variables}
    asked = {"ppo": {"minibatch_size": None}}  # defaults to 64: a null that was left out would come back as 64
    for lora in (True, False):
        config = config_of({"method": method, "lora": {"enabled": lora}, "task": task, **asked})
        (tmp_path / "config.yaml").write_text(dump_config(config), encoding="utf-8")
        assert load_written_config(tmp_path / "config.yaml") == config


# ---- nothing but a Config or a ValueError ----

NAMES = [*fields_of(), *(key for name in fields_of() for key in fields_of(name)), *ALIASES]
KEYS = st.sampled_from(NAMES) | st.text(max_size=6) | st.none() | st.integers() | st.tuples(st.integers())
ODD = st.sampled_from([10**400, -1, 0, 2, float("nan"), float("inf"), b"\xff", "auto", "all-linear", "dapo", "grpo"])
SCALARS = st.none() | st.booleans() | st.integers() | ODD | st.floats() | st.text(max_size=8)
VALUES = st.recursive(SCALARS, lambda one: st.lists(one, max_size=3) | st.dictionaries(KEYS, one, max_size=3))


@given(st.dictionaries(KEYS, VALUES, max_size=4), st.sampled_from([*METHODS]) | SCALARS)
@settings(max_examples=100, deadline=None)
@example({1: 2}, None)
@example({None: 1, 0: 1, "model": None, "lora": {None: 1, 0: 1}}, None)
@example({"grpo": {None: 1}, "task": {"columns": {1: [2]}}}, "grpo")
def test_any_values_give_a_config_or_a_sentence(values: dict[Any, Any], method: Any):
    try:
        config = config_of({**values, "method": method})
    except ValueError as error:
        assert type(error) in (ValueError, UnknownSettings)  # noqa: PT017
        assert 1 <= len(str(error).splitlines()) <= (6 if type(error) is ValueError else 80)  # noqa: PT017
    else:
        assert config.method == method


@pytest.mark.parametrize(
    ("override", "value"),
    [
        ("task.system_prompt=Answer as item # then stop", "Answer as item # then stop"),
        ("task.system_prompt=yes: no", "yes: no"),
        ("task.system_prompt=[a", "[a"),
        ("task.system_prompt=5", "5"),
        ("task.system_prompt= a ", " a "),
        ('task.system_prompt="a # b"', "a # b"),
        ('task.system_prompt="Go" he said', '"Go" he said'),
        *[(f"task.system_prompt={null}", None) for null in ("null", "~", "")],
        ("model.path=null", "null"),  # which may not be null
        # others are YAML
        ("run.num_steps=5 # steps", 5),
        ("generation.stop=[a, 'b # c']", ["a", "b # c"]),
        ("generation.stop=[a, b] # two", ["a", "b"]),
        ("task.columns={q: a}", {"q": "a"}),
    ],
)
def test_a_text_on_the_command_line_is_what_was_typed(override: str, value: Any):
    section, _, name = override.partition("=")[0].partition(".")
    assert apply_overrides({}, [override]) == {section: {name: value}}


@pytest.mark.parametrize("override", ["generation.stop=[a # b, c]", "reward.model_label=a # b", "generation.stop=# a"])
def test_a_comment_that_cuts_a_value_is_named(override: str):
    with pytest.raises(ValueError, match="`#`"):
        apply_overrides({}, [override])


@pytest.mark.parametrize("value", ["a # b", "'a", '"a"', "null", "5", " a ", "", "x: [", "line\nbreak", None])
def test_an_override_of_a_text_reads_back_as_it_was(value: str | None):
    assert apply_overrides({}, [as_override("task.system_prompt", value)]) == {"task": {"system_prompt": value}}


@pytest.mark.parametrize(
    "override", ["task.system_prompt=a\ud83d", 'generation.stop=["\\ud83d"]', "task.columns={q: \ud83d}"]
)
def test_a_lone_surrogate_in_a_setting_is_refused(override: str):
    with pytest.raises(ValueError, match=r"surrogate|not allowed"):
        apply_overrides({}, [override])
    with pytest.raises(ValueError, match=r"task\.system_prompt.*surrogate"):
        apply_overrides({"task": {"system_prompt": "\ud83d"}}, [])


def test_the_page_leaves_out_limits_that_only_keep_out_nonsense():
    of_any_size = {"type": "number", "minimum": -1_000_000, "maximum": 1_000_000}
    above_zero = {"type": "number", "exclusiveMinimum": 0, "maximum": 1_000_000}
    assert allowed(of_any_size, brief=True) == "a number"
    assert allowed(above_zero, brief=True) == "a number above 0"
    assert allowed(above_zero) == "a number above 0 and of at most 1000000"


def test_a_range_and_a_list_are_named_in_plain_words() -> None:
    rank = {"type": "integer", "minimum": 1, "maximum": 16384}
    assert allowed(rank) == "a whole number from 1 to 16384"
    assert allowed({"type": "array", "items": rank}) == "a list of whole numbers from 1 to 16384"
    assert allowed({"type": "array", "items": {"type": "string"}}) == "a list of strings"
