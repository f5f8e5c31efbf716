"""The embedded models: equal to what the build makes, small, and good enough for the defaults."""

import hashlib
import json
from pathlib import Path
from typing import Any

import pytest

import tinyrl.starter
from examples.embedded_models.build import HERE, PLANS, build, build_lookup_tokenizer, write_blank_models
from examples.embedded_models.reviews import reward_pairs
from examples.embedded_models.text import episode_rows, language_rows
from tests import running
from tinyrl.config.recipe import load_config
from tinyrl.data.writers import write_rows
from tinyrl.models.loading import load_tokenizer
from tinyrl.models.reward_model import SCORE_OFFSET
from tinyrl.rewards.model_text import TEXT_FORMAT
from tinyrl.starter.lookup import TASK

FOLDER = Path(tinyrl.starter.__file__).parent
MODELS = ("model", "reward_model", "lookup_model")


def facts_of(folder: Path) -> dict[str, dict[str, Any]]:
    return json.loads((folder / "CHECKSUMS.json").read_text())


def test_shipped_weights_are_the_checksummed_ones_and_small() -> None:
    for model in MODELS:
        content = (FOLDER / model / "model.safetensors").read_bytes()
        assert hashlib.sha256(content).hexdigest() == facts_of(FOLDER)[model]["sha256"]
    assert sum(p.stat().st_size for p in FOLDER.rglob("*") if p.suffix in (".safetensors", ".json")) < 4_000_000
    built, shipped = build_lookup_tokenizer(), (FOLDER / "lookup_model" / "tokenizer.json").read_text()
    assert json.loads(shipped) == json.loads(built.backend_tokenizer.to_str())


@pytest.mark.release
def test_rebuilding_gives_the_same_models(tmp_path: Path) -> None:
    """From the seed: the same tokenizer to the byte, the same config except for the score's trained offset, held-out
    numbers that agree. A changed rounding moves the reward model's accuracy as another seed does (0.89 to 0.95).
    """
    build(tmp_path, MODELS)
    shipped, built = facts_of(FOLDER), facts_of(tmp_path)
    for model in MODELS:
        assert (tmp_path / model / "tokenizer.json").read_bytes() == (FOLDER / model / "tokenizer.json").read_bytes()
        configs = [json.loads((folder / model / "config.json").read_text()) for folder in (tmp_path, FOLDER)]
        trained = {k: v for k, v in configs[0].items() if k in (SCORE_OFFSET, TEXT_FORMAT)}
        assert configs[0] == {**configs[1], **trained}
    for model in ("model", "lookup_model"):
        assert built[model]["eval/loss"] == pytest.approx(shipped[model]["eval/loss"], abs=0.02)
    assert built["reward_model"]["eval/accuracy"] >= 0.87


@pytest.mark.slow
def test_grpo_default_reaches_what_the_readme_says(tmp_path: Path) -> None:
    code, run, _ = running.train(load_config("grpo", None, overrides=["run.seed=21"]), tmp_path)
    assert code == 0
    first, *_, last = running.metrics(run)
    assert 0.2 <= first["eval/pass@1"] <= 0.5
    assert last["eval/pass@1"] >= 0.85
    assert last["eval/greedy/pass@1"] >= first["eval/greedy/pass@1"] + 0.10
    assert last["eval/distinct_answers"] > 450


@pytest.mark.release
def test_ppo_default_reaches_what_the_readme_says(tmp_path: Path) -> None:
    code, run, _ = running.train(load_config("ppo", None, overrides=["run.seed=21"]), tmp_path)
    assert code == 0
    first, *_, last = running.metrics(run)
    assert last["eval/reward_mean"] - first["eval/reward_mean"] >= 0.8 * first["eval/reward_std"]
    assert last["eval/verifier_mean"] > first["eval/verifier_mean"] + 0.2  # the grammar agrees
    assert last["eval/kl"] < 10
    assert last["eval/distinct"] >= 0.9 * first["eval/distinct"]
    assert last["value/explained_variance"] > 0.2


@pytest.mark.slow
@pytest.mark.parametrize("model", PLANS)
def test_a_build_trains_by_the_recipe_beside_it(model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    write_blank_models(Path(), [model])
    write_rows(Path("language.jsonl"), language_rows(200, 0))
    write_rows(Path("pairs.jsonl"), reward_pairs("train", num_rows=200, seed=0))
    write_rows(Path("episodes.jsonl"), episode_rows(200, 0))
    plan, few = PLANS[model], ["run.num_steps=2", "run.eval_prompts=8", "run.threads=1", "run.eval_every=0"]
    words = [f"model.path={model}", f"task.data={plan.data}.jsonl", "task.eval_data=null", "run.save_every=0", *few]
    code, run, _ = running.train(load_config(plan.method, str(HERE / f"{plan.recipe}.yaml"), overrides=words), tmp_path)
    assert code == 0
    assert running.metrics(run)[-1]["step"] == 2


# ---- the lookup model ----


def test_every_word_of_lookup_is_one_token_and_texts_round_trip() -> None:
    tokenizer = load_tokenizer("lookup")
    assert len(tokenizer) == 164
    for row in [*episode_rows(300, 5), *TASK.rows("eval")]:
        text = row["prompt"] + row.get("completion", "")
        tokens = tokenizer(text).input_ids
        assert len(tokens) == len(text.split())
        assert tokenizer.unk_token_id not in tokens
        assert tokenizer.decode(tokens) == text
    assert tokenizer.decode(tokenizer(" search Ada\nfoo <b>").input_ids) == " search Ada<unk><unk>"
