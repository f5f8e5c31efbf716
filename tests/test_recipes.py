"""Packaged recipes: each loads with its method, and each one runs."""

import importlib.util
from pathlib import Path

import pytest

from tests import running
from tests.tiny_models import tiny_model, tiny_tokenizer
from tinyrl.config.methods import METHODS
from tinyrl.config.recipe import load_config, packaged_recipes, read_recipe
from tinyrl.config.schema import Config
from tinyrl.data.writers import write_rows
from tinyrl.runs.resolve import model_facts
from tinyrl.tasks import load_task, sums

RECIPES = packaged_recipes()


@pytest.mark.parametrize("name", RECIPES)
def test_loads_with_each_method_it_has_a_section_for(name: str):
    written = read_recipe(RECIPES[name])
    for method in {written["method"]} | ({"grpo", "ppo"} & set(written)):
        config = load_config(method, name, overrides=[], facts=model_facts)
        assert config.method == method
        assert load_task(config.task.name or "rows").name == (config.task.name or "rows")


# ---- every recipe runs ----

METHODS_OF = [
    (name, method)
    for name, path in RECIPES.items()
    for written in [read_recipe(path)]
    for method in dict.fromkeys([written["method"], *({"grpo", "ppo"} & set(written))])
    if not name.startswith("sentiment")  # tests/test_chain.py runs these
]
FEW = ["run.num_steps=2", "run.eval_prompts=8", "run.threads=1", "run.eval_every=0", "run.save_every=0"]
WORDS = ("How", "many", "apples", "are", "2", "and", "3", "?", "user", "assistant", "system", "<answer>", "knight")
TEMPLATE = (
    "{% for tool in tools or [] %}{{ tool.function.name }} {% endfor %}"
    "{% for m in messages %}{{ m.role }} : {{ m.content }} <eos> {% endfor %}"
    "{% if add_generation_prompt %}assistant : {% endif %}"
)
REWARD = "def score(prompts, completions, answer, **columns):\n    return [float(len(c) % 7) for c in completions]\n"
JUDGED = (("chosen", "2 and 3"), ("rejected", "?"))
KNIGHTS = {
    "prompt": "A very special island is inhabited only by knights and knaves. Ann says: Bob is a knave.",
    "answer": "(1) Ann is a knight (2) Bob is a knave",
}


def settings_of(name: str, method: str | None = None, *overrides: str) -> Config:
    """The configuration of a packaged recipe, for its own method or another one it has a section for."""
    own = read_recipe(RECIPES[name])["method"]
    return load_config(method or own, name, overrides=list(overrides), facts=model_facts)


def with_a_small_model(config: Config) -> list[str]:
    """A hub recipe on a random model of the family it names, with a template, and on rows of its task's form."""
    family = "qwen3" if "Qwen3" in config.model.path else "llama"
    folder = tiny_model(Path("model"), family, vocabulary=WORDS)
    tokenizer = tiny_tokenizer(vocabulary=WORDS)
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(folder)
    overrides = [f"model.path={folder}"]
    if METHODS[config.method].samples:
        overrides.append("generation.max_new_tokens=8")
    if "max_observation_tokens" in config.environment.model_fields_set:
        overrides.append("environment.max_observation_tokens=16")
    if importlib.util.find_spec("bitsandbytes") is None:
        overrides.append("model.quantization=null")
    asked = [{"role": "user", "content": "How many apples ?"}]
    of_method = {
        "ppo": {"prompt": "How many apples are" if config.task.chat is False else asked},
        "sft": {"messages": [*asked, {"role": "assistant", "content": "2"}]},
        "dpo": {side: [*asked, {"role": "assistant", "content": word}] for side, word in JUDGED},
        "reward": {side: [*asked, {"role": "assistant", "content": word}] for side, word in JUDGED},
    }
    if config.task.chat is False:
        of_method["sft"] = of_method["reward"] = {"text": "2 and 3 apples", "label": 1}
    rows = {
        "rows": of_method.get(config.method),
        "gsm8k": {"question": "How many apples are 2 and 3 ?", "answer": "2 + 3 = 5\n#### 5"},
        "knights_and_knaves": KNIGHTS,
        "search_qa": {"question": "How many apples ?", "golden_answers": ["2"]},
    }.get(config.task.name or "")
    if config.task.name == "sums" and config.task.data is not None:
        sums.write(Path("data"))
    if config.environment.corpus is not None:
        write_rows(Path("corpus.jsonl"), [{"id": "0", "contents": '"Apples"\nThere are 2 apples.'}])
        overrides += ["environment.corpus=corpus.jsonl"]
    if rows is not None:
        labels = [{"label": n % 2} if "label" in rows else {} for n in range(40)]
        write_rows(Path("rows.jsonl"), [{**rows, "number": n, **label} for n, label in enumerate(labels)])
        overrides += ["task.data=rows.jsonl", "task.eval_data=rows.jsonl"]
    return overrides


@pytest.mark.slow
@pytest.mark.parametrize(("name", "method"), METHODS_OF, ids=lambda word: word)
def test_runs_two_steps(name: str, method: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """As shipped where everything is at hand; recipes for models that are not with a small one in their place."""
    monkeypatch.chdir(tmp_path)
    config = settings_of(name, method)
    elsewhere = "/" in config.model.path or config.model.path.startswith("smollm2")  # on the hub, or made by a script
    overrides = with_a_small_model(config) if elsewhere else []
    if name == "my-own-rows":  # a person has the rows and the reward
        write_rows(Path("rows.jsonl"), [{"prompt": f"sort: {'cab'[n % 3 :]}", "answer": "abc"} for n in range(40)])
        Path("rewards.py").write_text(REWARD)
    code, run, _ = running.train(settings_of(name, method, *overrides, *FEW), Path("runs"))
    assert code == 0
    lines = running.metrics(run)
    assert [line["step"] for line in lines] == [0, 1, 2]
    assert {"optim/grad_norm", "value/grad_norm"} & {*lines[-1]}  # ppo: the critic alone while it warms up
