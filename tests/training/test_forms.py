"""Variants of the same training: chat messages, bfloat16, gradient checkpointing, a reward that sometimes fails."""

import json
from pathlib import Path

import pytest
from transformers import AutoTokenizer

from tests import running
from tests.tiny_models import tiny_model
from tinyrl.config.schema import Config
from tinyrl.rollout.load import load_collector, load_method
from tinyrl.runs.launched import Options

TEMPLATE = (
    "{% for m in messages %}[{{ m['role'] }}] {{ m['content'] }}\n{% endfor %}"
    "{% if add_generation_prompt %}[assistant] <think>\n{% if effort is defined %}{{ effort }} {% endif %}{% endif %}"
)


@pytest.fixture(scope="module")
def chat_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tiny_model(tmp_path_factory.mktemp("model"), "qwen3")
    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(folder)
    return folder


def test_variables_of_the_template_reach_every_prompt_and_are_recorded(chat_model: Path, tmp_path: Path) -> None:
    rows = [{"prompt": f"say {c}", "completion": c, "chosen": c, "rejected": "no"} for c in "abcdefgh"]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    task = {"name": "rows", "data": str(tmp_path / "rows.jsonl"), "chat_template_kwargs": {"effort": "low"}}
    end = "[assistant] <think>\nlow "
    settings = running.config("grpo", chat_model, task=task)
    assert settings.written()["task"]["chat_template_kwargs"] == {"effort": "low"}
    parts = load_collector(settings, options=Options(device="cpu"))
    assert all(prompt.text.endswith(end) for prompt in (*parts.train_prompts, *parts.eval_prompts))
    values = {"model": {"path": str(chat_model)}, "task": task}
    for method in ("reward", "dpo", "sft"):
        settings = Config.model_validate({"method": method, **values})
        loaded = load_method(settings, options=Options(device="cpu"))
        assert all(
            end in str(loaded.policy.tokenizer.decode(row[0].prompt)) for row in (*loaded.train_rows, *loaded.held_out)
        )


def test_messages_reach_the_reward_as_messages(chat_model: Path, tmp_path: Path) -> None:
    """TRL's forms: prompts as the data has them, completions as messages, the opened <think> put back in front."""
    rows = [{"prompt": [{"role": "user", "content": f"say {c}"}], "target": c} for c in "abcdefgh"]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "rewards.py").write_text(
        "def form(prompts, completions, target, completion_ids, **columns):\n"
        "    assert all(p[0]['content'] == f'say {t}' for p, t in zip(prompts, target)), prompts\n"
        "    assert all(c[0]['role'] == 'assistant' and c[0]['content'].startswith('<think>') for c in completions)\n"
        "    assert all(isinstance(i, int) for ids in completion_ids for i in ids)\n"
        "    return [float(len(ids)) for ids in completion_ids]\n"
    )
    settings = running.config(
        "grpo",
        chat_model,
        task={"name": "rows", "data": str(tmp_path / "rows.jsonl")},
        reward={"functions": [{"use": f"{tmp_path / 'rewards.py'}:form"}]},
        run={"num_steps": 1},
    )
    code, run, _ = running.train(settings, tmp_path)
    assert code == 0
    assert running.metrics(run)[1]["reward/dropped"] == 0
    prompts = [json.loads(line)["prompt"] for line in run.samples.read_text().splitlines()]
    assert all(p.startswith("[user] say ") and p.endswith("[assistant] <think>\n") for p in prompts)


def test_neither_the_engine_nor_the_layout_changes_a_result(
    chat_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Three steps with the fused engine and packed groups, and with the plain path: the same numbers."""
    lines, samples = {}, {}
    for engine, packs in (("fused", True), ("hf", False)):
        if not packs:
            monkeypatch.setattr("tinyrl.models.policy.packs_exactly", lambda backbone: False)
        settings = running.config("ppo", chat_model, generation={"engine": engine})
        code, run, _ = running.train(settings, tmp_path, name=engine)
        assert code == 0
        kept = [{k: v for k, v in line.items() if isinstance(v, int | float)} for line in running.metrics(run)]
        lines[engine] = [{k: v for k, v in line.items() if not k.startswith(running.VOLATILE)} for line in kept]
        samples[engine] = [json.loads(line)["completion"] for line in run.samples.read_text().splitlines()]
    for engine in ("fused",):
        assert samples[engine] == samples["hf"]
        for ours, plain in zip(lines[engine], lines["hf"], strict=True):
            assert ours == pytest.approx(plain, rel=1e-3, abs=1e-5, nan_ok=True)


def test_a_reward_that_fails_drops_its_rows_and_a_broken_one_is_refused(chat_model: Path, tmp_path: Path) -> None:
    (tmp_path / "rewards.py").write_text(
        "def moody(prompts, completions, **columns):\n"
        "    return [float('nan') if len(set(c)) % 5 == 0 else float(len(set(c))) for c in completions]\n"
        "def broken(prompts, completions, **columns):\n"
        "    raise RuntimeError('the judge is away')\n"
    )
    reward = {"functions": [{"use": f"{tmp_path / 'rewards.py'}:moody"}]}
    settings = running.config("grpo", chat_model, reward=reward, grpo={"num_prompts": 8}, run={"num_steps": 2})
    code, run, _ = running.train(settings, tmp_path, name="moody")
    assert code == 0
    assert sum(line.get("reward/dropped", 0) for line in running.metrics(run)) > 0
    reward = {"functions": [{"use": f"{tmp_path / 'rewards.py'}:broken"}], "timeout_s": 5}
    settings = running.config("ppo", chat_model, reward=reward, run={"num_steps": 5})
    with pytest.raises(ValueError, match="the judge is away"):
        running.train(settings, tmp_path, name="broken")
