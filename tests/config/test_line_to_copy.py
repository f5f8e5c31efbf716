"""The line to copy in place of names of other libraries: what a name brings along, and what is not in the line."""

import re
import shlex
from pathlib import Path

import pytest
from typer.testing import CliRunner

from tinyrl.cli.commands import app
from tinyrl.config.derive import derive_over
from tinyrl.config.foreign_names import home_of
from tinyrl.config.given import Given
from tinyrl.config.recipe import find_recipe, load_config, load_written_config
from tinyrl.process.errors import UnknownSettings


def refused(method: str, *given: str) -> str:
    with pytest.raises(UnknownSettings) as caught:
        load_config(method, None, overrides=[*given])
    return str(caught.value)


def line(method: str, *given: str) -> str:
    return refused(method, "task.name=sort", *given).splitlines()[-1].removeprefix("to copy: ")


@pytest.mark.parametrize(
    ("method", "given", "words"),
    [
        # TRL's, verl's and OpenRLHF's upper clip is the lower one where it is not given
        ("grpo", ["epsilon=0.1"], "grpo.clip_eps=0.1 grpo.clip_eps_high=0.1"),
        ("grpo", ["epsilon=0.1", "epsilon_high=0.3"], "grpo.clip_eps=0.1 grpo.clip_eps_high=0.3"),
        ("grpo", ["epsilon=0.1", "grpo.clip_eps_high=0.3"], "grpo.clip_eps=0.1"),
        ("grpo", ["epsilon_high=0.3"], "grpo.clip_eps_high=0.3"),
        ("ppo", ["epsilon=0.1"], "ppo.clip_eps=0.1"),
        ("grpo", ["eps_clip=0.1"], "grpo.clip_eps=0.1 grpo.clip_eps_high=0.1"),
        ("grpo", ["eps_clip_low_high=[0.1, 0.3]"], "grpo.clip_eps=0.1 grpo.clip_eps_high=0.3"),
        ("grpo", ["a.clip_ratio_low=0.1"], "grpo.clip_eps=0.1 grpo.clip_eps_high=0.2"),
        # verl's estimators are advantages alone, with its clip and without a KL
        ("grpo", ["algorithm.adv_estimator=rloo"], "grpo.advantage=leave-one-out grpo.clip_eps_high=0.2"),
        ("grpo", ["clip_ratio=0.1", "adv_estimator=grpo"],
         "grpo.clip_eps=0.1 grpo.clip_eps_high=0.1 grpo.advantage=group"),
        ("grpo", ["a.use_kl_loss=true"], "grpo.kl_estimator=k3 grpo.kl_coef=0.001"),
        ("grpo", ["a.use_kl_loss=true", "a.kl_loss_coef=0.1"], "grpo.kl_estimator=k3 grpo.kl_coef=0.1"),
        ("ppo", ["a.use_kl_loss=false", "a.kl_loss_coef=0.1"], "ppo.kl_coef=0"),
        ("ppo", ["a.use_kl_loss=false", "algorithm.use_kl_in_reward=true"], "ppo.kl_estimator=k1 ppo.kl_coef=0.001"),
        ("ppo", ["kl_loss_coef=0.1"], "ppo.kl_coef=0.1 ppo.kl_estimator=k3"),
        ("grpo", ["init_kl_coef=0.1"], "grpo.kl_coef=0.1 grpo.kl_estimator=k1"),
        ("grpo", ["init_kl_coef=0"], "grpo.kl_coef=0"),
        # alpha of verl and OpenRLHF, of PEFT, and of TRL, whose is ours
        ("sft", ["lora_rank=8"], "lora.r=8 lora.alpha=16"),
        ("sft", ["r=4"], "lora.r=4 lora.alpha=8"),
        ("sft", ["r=4", "lora_alpha=32"], "lora.r=4 lora.alpha=32"),
        ("sft", ["lora_r=8"], "lora.r=8"),
        # SimPO of TRL's CPO
        ("dpo", ["loss_type=simpo", "simpo_gamma=0.3"], "dpo.loss=simpo dpo.beta=0.1 dpo.target_margin=0.3"),
    ],
)  # fmt: skip
def test_a_name_brings_the_defaults_of_its_library(method: str, given: list[str], words: str) -> None:
    assert line(method, *given) == words


def test_what_a_run_was_given_is_no_default(tmp_path: Path) -> None:
    (tmp_path / "config.yaml").write_text("method: grpo\ntask: {name: sort}\n")
    run = load_written_config(tmp_path / "config.yaml")
    for given, words in (({}, "grpo.clip_eps=0.1 grpo.clip_eps_high=0.1"),
                         ({"grpo": {"clip_eps_high": 0.3}}, "grpo.clip_eps=0.1")):  # fmt: skip
        with pytest.raises(UnknownSettings) as caught:
            derive_over(run.with_given(Given({"method": "grpo", **given})), ["epsilon=0.1"])
        assert str(caught.value).splitlines()[-1] == f"to copy: {words}"


@pytest.mark.parametrize(
    ("method", "given", "words", "without"),
    [
        ("grpo", ["loss_type=cispo", "epsilon=0.2"], "grpo.surrogate=cispo", "epsilon"),
        ("grpo", ["lora_dropout=0.1", "seed=1"], "run.seed=1", "lora_dropout"),
        ("ppo", ["vf_coef=0.1", "seed=1"], "run.seed=1", "vf_coef"),
        ("grpo", ["num_generations=1", "seed=1"], "run.seed=1", "num_generations"),  # nothing to compare with
        ("grpo", ["vllm_enable_sleep_mode=true", "seed=1"], "run.seed=1", "vllm_enable_sleep_mode"),
        ("sft", ["use_peft=false", "lora_r=8"], "lora.enabled=false", "lora_r"),
    ],
)
def test_what_would_be_refused_is_named_and_not_in_the_line(
    method: str, given: list[str], words: str, without: str
) -> None:
    assert line(method, *given) == words
    assert f"{without} (" in refused(method, "task.name=sort", *given)


@pytest.mark.parametrize(
    ("method", "given", "words"),
    [
        ("sft", ["lora_dropout=0.1"], "lora.dropout=0.1"),
        ("ppo", ["critic.kind=shared", "vf_coef=0.1"], "ppo.value_coef=0.1"),
        ("grpo", ["grpo.advantage=reinforce++", "num_generations=1"], "grpo.group_size=1"),
        ("grpo", ["grpo.preset=grpo", "kl_loss_type=k2"], "grpo.kl_estimator=k2"),  # whose KL the preset gives
    ],
)
def test_what_counts_beside_other_settings_is_in_the_line(method: str, given: list[str], words: str) -> None:
    assert line(method, *given) == words


@pytest.mark.parametrize(
    ("given", "words"),
    [
        (["reward_funcs=r.py:f"], "reward.functions=[{use: r.py:f}]"),
        (["reward_funcs=[r.py:f, my.rewards.g]", "reward_weights=[1.0, 0.5]"],
         "reward.functions=[{use: r.py:f}, {use: my.rewards:g, weight: 0.5}]"),
        (["reward_funcs=[owner/rm, r.py:f]"], "reward.functions=[{use: r.py:f}] reward.model=owner/rm"),
        (["reward=r.py:f"], "reward.functions=[{use: r.py:f}]"),
        (["reward_model=owner/rm"], "reward.model=owner/rm"),
        (["model=m", "train_dataset=rows.jsonl", "eval_dataset=e.jsonl"],
         "model.path=m task.data=rows.jsonl task.eval_data=e.jsonl"),
        (["dataset_name=a/b", "dataset_config=main", "dataset_train_split=train", "dataset_test_split=test"],
         "task.data=a/b:main@train task.eval_data=a/b:main@test"),
        (["dataset_name=rows.jsonl", "dataset_train_split=train"], "task.data=rows.jsonl"),
        (["prompt_data=a/b", "input_key=question", "label_key=answer"], "task.data=a/b task.columns.prompt=question"),
        (["target_modules=q_proj,v_proj"], 'lora.target_modules=["q_proj", "v_proj"]'),
        (["target_modules=all-linear"], "lora.target_modules=all-linear"),
        (["optim=paged_adamw_8bit"], "optim.optimizer=adamw8bit"),
        (["vllm_server_host=0.0.0.0", "vllm_server_port=9000"],
         "generation.engine=server generation.url=http://127.0.0.1:9000"),
        (["trainer.logger=[console, wandb]"], "run.trackers=[wandb]"),
        (["report_to=none"], "run.trackers=[]"),
        (["data.filter_overlong_prompts=true", "data.truncation=error"], "task.on_overlong_prompt=drop"),
        (["trust_remote_code=true", "seed=1"], "--trust-remote-code run.seed=1"),
        # verl's prompts of a minibatch are sequences here; OpenRLHF's batches are sequences
        (["data.train_batch_size=8", "a.ppo_mini_batch_size=4", "a.rollout.n=5"],
         "grpo.num_prompts=8 grpo.minibatch_size=20 grpo.group_size=5"),
        (["train_batch_size=16", "rollout_batch_size=4"], "grpo.minibatch_size=16 grpo.num_prompts=4"),
        (["actor.optim.weight_decay=0.1"], "optim.weight_decay=0.1"),  # ours, at the end of a long name
    ],
)  # fmt: skip
def test_what_a_script_has_is_in_the_line(given: list[str], words: str) -> None:
    shown = refused("grpo", *given).splitlines()[-1].removeprefix("to copy: ")
    options = [word for word in shlex.split(words) if word.startswith("--")]
    assert " ".join(shlex.split(shown)) == words.replace("'", "")
    if not options and "a/b" not in words:
        load_config("grpo", None, overrides=shlex.split(shown))


@pytest.mark.parametrize(
    ("given", "words"),
    [
        (["per_device_train_batch_size=16", "gradient_accumulation_steps=4"],
         "ppo.num_prompts=64 ppo.minibatch_size=null"),
        (["per_device_train_batch_size=16", "num_mini_batches=4"], "ppo.num_prompts=16 ppo.minibatch_size=4"),
        (["per_device_train_batch_size=16", "total_episodes=100"],  # ceil(100 / 16) steps
         "ppo.num_prompts=16 ppo.minibatch_size=null run.num_steps=7"),
        (["critic.model.path=c", "actor_rollout_ref.model.path=m"],
         "critic.kind=separate critic.path=c model.path=m"),
        (["critic.model.path=m", "actor_rollout_ref.model.path=m"], "model.path=m"),
    ],
)  # fmt: skip
def test_sizes_and_critics_of_ppo(given: list[str], words: str) -> None:
    assert line("ppo", *given) == words


def test_a_reward_that_is_no_name_of_code_is_named() -> None:
    found = refused("grpo", "reward_funcs=[accuracy, r.py:f]")
    assert "reward_funcs (accuracy:" in found
    assert found.splitlines()[-1] == "to copy: 'reward.functions=[{use: r.py:f}]'"


@pytest.mark.parametrize(
    ("given", "to_add", "is_example"),
    [
        (["num_generations=4"], ["model.path", "task.data", "reward.functions"], True),
        (["num_generations=4", "reward_funcs=r.py:f"], ["model.path", "task.data"], True),
        (["train_dataset=rows.jsonl"], ["model.path", "reward.functions"], False),
        (["model=m", "reward_model_path=rm"], ["task.data"], False),
        (["task=sort"], [], False),
    ],
)
def test_the_built_in_example_is_named_where_it_would_be_trained(
    given: list[str], to_add: list[str], is_example: bool
) -> None:
    added = [text for text in refused("grpo", *given).splitlines() if text.startswith("add ")]
    named = re.findall(r"(?:model\.path|task\.data|reward\.functions)", " ".join(added))
    assert named == to_add
    assert ("built-in example" in " ".join(added)) is is_example


@pytest.mark.parametrize(
    ("given", "is_told"),
    [(["num_generations=4"], True), (["num_generations=4", "lora.r=8"], False), (["num_generations=4", "r=8"], False),
     (["lam=0.9"], False)],
)  # fmt: skip
def test_that_all_weights_are_trained_elsewhere_is_told(given: list[str], is_told: bool) -> None:
    method = "ppo" if "lam=0.9" in given else "grpo"
    assert ("lora.enabled=false" in refused(method, "task.name=sort", *given)) is is_told


# ---- where names are typed ----


@pytest.mark.parametrize(
    ("key", "method", "home"),
    [
        ("warmup_steps", "ppo", "optim.warmup_steps"),  # and not the critic's
        ("kl_coef", "ppo", "ppo.kl_coef"),  # and not the teacher's
        ("kl_coef", "grpo", "grpo.kl_coef"),
        ("top_k", None, "generation.top_k"),
        ("kl_coef", "distill", "teacher.kl_coef"),
    ],
)
def test_a_name_is_of_the_methods_own_section_first(key: str, method: str | None, home: str) -> None:
    assert home_of(key, method) == home


@pytest.mark.parametrize(
    ("given", "meant"),
    [
        ("num_generation=4", "`num_generations`, here `ppo.group_size`"),  # and not the section `generation`
        ("NUM-GENERATIONS=4", "`num_generations`, here `ppo.group_size`"),
        ("ppo.num_generation=4", "`num_generations`, here `ppo.group_size`"),
        ("learning_rat=1", "`optim.learning_rate`"),
        ("critic.pth=x", "`critic.path`"),  # of its own section first
        ("generatio.x=1", "`generation`"),
    ],
)
def test_a_slip_is_answered_with_the_nearest_name_of_any_library(given: str, meant: str) -> None:
    assert f"Did you mean {meant}" in refused("ppo", "task.name=sort", given)


@pytest.mark.parametrize(
    ("given", "guessed"),
    [
        ("trainer.name=x", "task.name"),
        ("actor.checkpoint.enabled=true", "lora.enabled"),
        ("reward.path=x", "model.path"),
    ],
)
def test_a_key_that_says_nothing_without_its_section_is_no_guess_at_another(given: str, guessed: str) -> None:
    answer = refused("grpo", "task.data=r.jsonl", given)
    assert guessed not in answer
    assert "to copy" not in answer


def test_such_a_key_alone_is_a_guess() -> None:
    assert line("grpo", "path=x") == "model.path=x"


@pytest.mark.parametrize("name", ["run.name", "wandb.name", "trainer.experiment_name"])
def test_a_name_of_the_run_is_the_option(name: str) -> None:
    assert line("grpo", f"{name}=first") == "--name first"


def test_the_function_of_verls_rewards_is_not_in_the_line() -> None:
    given = ["seed=3", "custom_reward_function.path=a.py", "custom_reward_function.name=f"]
    assert line("grpo", *given) == "run.seed=3"
    assert "is unknown" not in refused("grpo", *given)


def test_a_name_of_verl_below_a_section_of_another_method_is_answered() -> None:
    for name, setting in (("reward_model.enable", "reward.functions"), ("reward_model.model.path", "reward.model")):
        with pytest.raises(ValueError, match=rf"`{name}` is not a setting: .*{setting}"):
            load_config("ppo", None, overrides=["task.name=sort", f"{name}=m"])
    with pytest.raises(ValueError, match="is not a section of `train ppo`"):
        load_config("ppo", None, overrides=["task.name=sort", "reward_model.batch_size=4"])


def told(*words: str) -> str:
    result = CliRunner().invoke(app, [*words])
    assert result.exit_code == 2
    return result.output


def test_options_are_answered_together() -> None:
    found = told(
        "train", "grpo", "--num_generations", "4", "--beta=0.04", "--bf16", "--no_use_peft", "--reward_funcs", "a.b",
        "c.py:d", "task.name=sort", "--nmae", "x"
    )  # fmt: skip
    assert found.splitlines()[-1].strip() == (
        "to copy: grpo.group_size=4 grpo.kl_coef=0.04 grpo.kl_unbiased=true model.dtype=bfloat16 lora.enabled=false "
        "'reward.functions=[{use: a:b}, {use: c.py:d}]'"
    )
    assert "`nmae` is unknown" in found


def test_a_slip_in_an_option_is_answered_with_what_is_nearest() -> None:
    assert "`num_generations`, here `grpo.group_size`" in told("train", "grpo", "--num-generation", "4")
    assert "--name" in told("train", "grpo", "--nam", "x")  # an option of the command's own
    assert "run.seed=3" in told("train", "grpo", "--seed", "3")  # near --seeds, and a setting
    assert "mean" not in told("train", "grpo", "--qqq", "x")


def test_an_option_behind_a_switch_is_not_its_value() -> None:
    assert "model.dtype=bfloat16" in told("train", "--bf16", "grpo", "task.name=sort")


def test_a_command_that_does_not_train_answers_with_settings_that_it_takes() -> None:
    assert "grpo" not in told("eval", "starter", "--num_generations", "4")
    assert "generation.temperature=0.5" in told("eval", "starter", "--temperature", "0.5")
    assert "`generation.temperature`" in told("eval", "starter", "--task", "sort", "temperature=0.5")
    assert "mean" not in told("eval", "starter", "--task", "sort", "num_generations=4")


@pytest.mark.parametrize(
    ("name", "words"), [("GRPO", "grpo"), ("Grpo", "grpo"), ("DPO", "dpo"), ("RLOO", "grpo grpo.preset=rloo")]
)
def test_a_method_in_capitals_is_answered(name: str, words: str) -> None:
    for command in ("train", "check"):
        assert f"`tinyrl train {words}`" in told(command, name, "num_generations=4")
    with pytest.raises(ValueError, match="neither a file"):
        find_recipe(f"{name}X")


@pytest.mark.parametrize("text", ["reward_model: m\n", "model: m\n"])
def test_a_section_that_is_a_name_is_answered_in_a_recipe(tmp_path: Path, text: str) -> None:
    """Also that of another method, which a recipe may have as a section."""
    file = tmp_path / "r.yaml"
    file.write_text(f"method: grpo\ntask: {{name: sort}}\n{text}")
    with pytest.raises(UnknownSettings, match=r"(?s)r\.yaml:3.*to copy: (reward\.model|model\.path)=m"):
        load_config("grpo", str(file), overrides=[])
    file.write_text("method: grpo\ntask: {name: sort}\nsft: 3\n")
    with pytest.raises(ValueError, match=r"`sft` is 3"):
        load_config("grpo", str(file), overrides=[])
    file.write_text("method: grpo\ntask: {name: sort}\nreward_model: {batch_size: 4}\n")
    assert load_config("grpo", str(file), overrides=[]).method == "grpo"
