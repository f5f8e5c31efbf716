"""TRL's objects as a run. TRL is not installed here: its configuration is written down as TRL 1.16 has it, field by
field with the defaults of that version; `test_trls_own_object` reads the real one where it is there.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from peft import LoraConfig

import tinyrl
from tinyrl.config.trl_config import settings_of


@dataclass
class GRPOConfig:
    """The fields of TRL 1.16's GRPOConfig that are read here, with its defaults."""

    output_dir: str | None = "trainer_output"
    bf16: bool | None = False
    learning_rate: float = 1e-6
    lr_scheduler_type: str = "linear"
    warmup_steps: float = 0
    weight_decay: float = 0.0
    adam_beta1: float = 0.9
    adam_beta2: float = 0.999
    max_grad_norm: float = 1.0
    per_device_train_batch_size: int = 8
    gradient_accumulation_steps: int = 1
    num_train_epochs: float = 3.0
    max_steps: int = -1
    num_generations: int = 8
    num_iterations: int = 1
    max_completion_length: int = 512
    temperature: float = 1.0
    top_p: float = 1.0
    beta: float = 0.0
    epsilon: float = 0.2
    epsilon_high: float | None = None
    loss_type: str = "dapo"
    scale_rewards: str = "group"
    reward_weights: list[float] | None = None
    report_to: Any = field(default_factory=list)
    use_vllm: bool = False
    logging_steps: float = 10
    run_name: str | None = None
    eval_strategy: str = "no"
    eval_steps: float | None = None
    do_eval: bool = False
    use_cpu: bool = False
    log_on_each_node: bool = True
    dataloader_pin_memory: bool = True
    activation_checkpointing: bool = True
    model_init_kwargs: dict[str, Any] | None = None

    def __post_init__(self) -> None:
        """Derive what transformers derives."""
        self.do_eval = self.do_eval or self.eval_strategy != "no"
        self.dataloader_pin_memory = self.dataloader_pin_memory and not self.use_cpu


@dataclass
class SFTConfig:
    learning_rate: float = 2e-5
    max_steps: int = -1
    num_train_epochs: float = 3.0
    per_device_train_batch_size: int = 8
    loss_type: str = "nll"


@dataclass
class PPOConfig:
    """The fields of TRL's PPOConfig that are read here, with its defaults."""

    learning_rate: float = 5e-5
    warmup_steps: float = 0
    max_steps: int = -1
    num_train_epochs: float = 3.0
    per_device_train_batch_size: int = 8
    gradient_accumulation_steps: int = 1
    num_mini_batches: int = 1
    total_episodes: int | None = None
    response_length: int = 53
    temperature: float = 0.7
    num_ppo_epochs: int = 4
    kl_coef: float = 0.05
    vf_coef: float = 0.1
    missing_eos_penalty: float | None = None
    stop_token: str | None = None
    reward_model_path: str = "EleutherAI/pythia-160m"


def reward(prompts: list[Any], completions: list[Any], **columns: Any) -> list[float]:
    return [float(len(completion)) for completion in completions]


def test_what_decides_a_run_has_trls_defaults() -> None:
    settings = settings_of(GRPOConfig(), None).settings
    assert settings["optim.learning_rate"] == 1e-6
    assert settings["optim.schedule"] == "linear"
    assert (settings["grpo.num_prompts"], settings["grpo.group_size"]) == (1, 8)
    assert (settings["grpo.clip_eps"], settings["grpo.clip_eps_high"]) == (0.2, 0.2)
    assert settings["grpo.kl_coef"] == 0.0
    assert settings["run.epochs"] == 3
    assert settings["lora.enabled"] is False  # TRL trains the whole model without a peft_config


def test_given_fields_are_the_settings_of_the_line_to_copy() -> None:
    given = GRPOConfig(
        max_steps=100,
        num_generations=4,
        gradient_accumulation_steps=2,
        beta=0.04,
        loss_type="dr_grpo",
        report_to=["wandb"],
    )
    settings = settings_of(given, LoraConfig(r=4, lora_alpha=8, target_modules=["q_proj", "v_proj"])).settings
    assert settings["run.num_steps"] == 100
    assert "run.epochs" not in settings
    assert (settings["grpo.num_prompts"], settings["grpo.group_size"]) == (4, 4)
    assert (settings["grpo.kl_coef"], settings["grpo.kl_unbiased"]) == (0.04, True)
    assert settings["grpo.aggregation"] == "constant"
    assert settings["run.trackers"] == ["wandb"]
    assert (settings["lora.r"], settings["lora.alpha"]) == (4, 8)
    assert settings["lora.target_modules"] == ["q_proj", "v_proj"]


def test_both_betas_are_one_setting() -> None:
    assert settings_of(GRPOConfig(adam_beta1=0.9, adam_beta2=0.99), None).settings["optim.betas"] == [0.9, 0.99]
    assert settings_of(GRPOConfig(), None).settings["optim.betas"] == [0.9, 0.999]


def test_matrices_of_experts_are_taken_by_name() -> None:
    """One of them, too."""
    wanted = ["7.mlp.experts.gate_up_proj", "7.mlp.experts.down_proj"]
    for parameters in (wanted, wanted[:1]):
        taken = settings_of(GRPOConfig(), LoraConfig(target_modules=["q_proj"], target_parameters=parameters))
        assert taken.settings["lora.target_parameters"] == sorted(parameters)
        assert not taken.refused


def test_all_that_cannot_be_taken_is_named_at_once() -> None:
    with pytest.raises(ValueError, match=r"top_p[^\n]*\n.*use_dora"):
        tinyrl.from_trl(GRPOConfig(top_p=0.9), peft_config=LoraConfig(use_dora=True))
    plan = tinyrl.from_trl(
        GRPOConfig(top_p=0.9), peft_config=LoraConfig(use_dora=True), leave_out=["top_p", "use_dora"]
    )
    assert "generation.top_p" not in plan.settings


def test_a_default_of_trls_that_the_method_does_not_have_is_not_refused() -> None:
    taken = settings_of(SFTConfig(max_steps=5), None)
    assert taken.refused == {}
    assert taken.settings["run.num_steps"] == 5


def test_ppo_has_trls_sizes_and_its_own_coefficients() -> None:
    given = PPOConfig(
        gradient_accumulation_steps=2,
        num_mini_batches=4,
        total_episodes=40,
        vf_coef=0.2,
        missing_eos_penalty=1.0,
        stop_token="eos",
    )
    taken = settings_of(given, LoraConfig(r=4))
    settings = taken.settings
    assert taken.refused == {}
    assert (settings["ppo.num_prompts"], settings["ppo.minibatch_size"]) == (16, 4)
    assert settings["run.num_steps"] == 3  # ceil(40 / 16)
    assert "run.epochs" not in settings
    assert (settings["ppo.kl_coef"], settings["optim.warmup_steps"]) == (0.05, 0)  # no teacher's, no critic's
    assert (settings["generation.max_new_tokens"], settings["generation.temperature"]) == (53, 0.7)
    assert settings["reward.truncated"] == "penalize"
    assert "ppo.value_coef" not in settings  # the critic has a loss of its own
    assert any("vf_coef" in note for note in taken.notes)


def test_models_of_ppos_trainer_are_taken_by_name() -> None:
    plan = tinyrl.from_trl(PPOConfig(), model="m", ref_model=None, reward_model="rm", value_model="v")
    assert (plan.settings["reward.model"], plan.settings["critic.path"]) == ("rm", "v")
    assert plan.settings["critic.kind"] == "separate"
    with pytest.raises(ValueError, match="reward_model"):
        tinyrl.from_trl(PPOConfig(), model="m", reward_model=object())


def test_epochs_beside_steps_are_a_note() -> None:
    taken = settings_of(GRPOConfig(max_steps=5, num_train_epochs=1), None)
    assert taken.refused == {}
    assert (taken.settings["run.num_steps"], "run.epochs" in taken.settings) == (5, False)
    assert any("num_train_epochs" in note for note in taken.notes)


def test_the_upper_clip_is_the_lower_one_but_for_cispo() -> None:
    assert settings_of(GRPOConfig(epsilon=0.1), None).settings["grpo.clip_eps_high"] == 0.1
    taken = settings_of(GRPOConfig(loss_type="cispo", epsilon_high=5.0), None)
    assert taken.refused == {}
    assert not [name for name in taken.settings if "clip" in name]
    assert any("epsilon_high" in note for note in taken.notes)


def test_an_object_of_another_kind_is_refused() -> None:
    with pytest.raises(ValueError, match="GRPOConfig"):
        tinyrl.from_trl(object())


def test_fields_that_decide_nothing_here_or_are_derived_are_no_refusal() -> None:
    given = GRPOConfig(
        run_name="sums",
        use_cpu=True,
        log_on_each_node=False,
        eval_strategy="steps",
        eval_steps=50,
        activation_checkpointing=False,
    )
    plan = tinyrl.from_trl(given, processing_class=object(), train_dataset=[{"prompt": "a"}])
    assert plan.name == "sums"
    assert "sums" not in str(plan.settings)
    assert plan.settings["run.eval_every"] == 50
    assert plan.settings["model.gradient_checkpointing"] is False
    said = "\n".join(plan.notes)
    assert all(word in said for word in ("use_cpu", "log_on_each_node", "processing_class", "held out"))


def test_the_dtype_of_the_model_is_taken_and_other_ways_to_load_it_are_not() -> None:
    assert settings_of(GRPOConfig(model_init_kwargs={"dtype": "float32"}), None).settings["model.dtype"] == "float32"
    assert "model_init_kwargs" in settings_of(GRPOConfig(model_init_kwargs={"device_map": "auto"}), None).refused


def test_a_reward_model_is_one_of_the_rewards() -> None:
    plan = tinyrl.from_trl(GRPOConfig(), reward_funcs=[reward, "some/reward-model"])
    assert plan.settings["reward.model"] == "some/reward-model"
    assert plan.reward == {reward: 1.0}
    with pytest.raises(ValueError, match="one reward model"):
        tinyrl.from_trl(GRPOConfig(), reward_funcs=["some/reward-model", "another/one"])


def test_an_argument_of_the_trainer_and_a_dropout_are_refused_at_once() -> None:
    with pytest.raises(ValueError, match=r"callbacks[^\n]*\n.*lora_dropout"):
        tinyrl.from_trl(GRPOConfig(), peft_config=LoraConfig(lora_dropout=0.1), callbacks=[])


@pytest.mark.slow
def test_the_run_is_trained_with_weighted_rewards(tmp_path: Path) -> None:
    def shorter(completions: list[Any], **columns: Any) -> list[float]:
        return [-float(len(completion)) for completion in completions]

    given = GRPOConfig(
        reward_weights=[1.0, 0.5],
        max_steps=1,
        num_generations=2,
        per_device_train_batch_size=4,
        max_completion_length=4,
        use_vllm=True,
    )
    plan = tinyrl.from_trl(
        given,
        model="starter",
        peft_config=LoraConfig(r=2),
        reward_funcs=[reward, shorter],
        train_dataset=[{"prompt": f"sort: b a {i}"} for i in range(12)],
    )
    assert any("use_vllm" in note for note in plan.notes)
    run = plan.train({"run.eval_prompts": 0}, output_dir=tmp_path)
    config = run.config
    assert run.exit_code == 0
    assert [each.weight for each in config.reward.functions] == [1.0, 0.5]
    assert (config.grpo.num_prompts, config.grpo.group_size, config.lora.r) == (2, 2, 2)


def test_rewards_have_the_weights_of_the_configuration() -> None:
    plan = tinyrl.from_trl(GRPOConfig(reward_weights=[0.5]), reward_funcs=reward, train_dataset=[{"prompt": "a"}])
    assert plan.reward == {reward: 0.5}
    assert plan.rows == [{"prompt": "a"}]


def test_trls_own_object() -> None:
    trl = pytest.importorskip("trl", reason="TRL is not installed")
    settings = settings_of(trl.GRPOConfig(bf16=False, max_steps=7, beta=0.1), None).settings
    assert settings["run.num_steps"] == 7
    assert settings["grpo.kl_coef"] == 0.1
