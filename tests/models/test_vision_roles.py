"""Roles beside the policy on prompts with images: their numbers are those of plain transformers from pixels."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel
from PIL import Image as PILImage
from torch import Tensor
from transformers import PreTrainedModel

from tests.images import image_file
from tests.models.building import stir
from tests.tiny_vision import FAMILIES, tiny_vision
from tinyrl.data.image_files import ImageFiles
from tinyrl.data.images import FIRST_IMAGE_ID, is_image_id
from tinyrl.models.batch import Batch, Example
from tinyrl.models.build import build_policy
from tinyrl.models.device import Device
from tinyrl.models.loading import load_image_text_model, load_tokenizer
from tinyrl.models.logprobs import head_of
from tinyrl.models.memory import bytes_by_role
from tinyrl.models.policy import Policy, Role
from tinyrl.models.policy_files import save_policy
from tinyrl.models.towers import language_parameters, towers_of
from tinyrl.runs.resolve import config_of
from tinyrl.training.dpo import pair_logprobs
from tinyrl.training.teacher import known_there

FULL: dict[str, Any] = {"lora": {"enabled": False}}
ORDER = sorted(FAMILIES, key=lambda family: family != "smolvlm")  # of which the first is fast
ANSWER = [5, 9, 7]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Any:
    root = tmp_path_factory.mktemp("vision")
    return cache(lambda family: tiny_vision(family, root / family))


@pytest.fixture
def green(tmp_path: Path) -> Path:
    return image_file(tmp_path / "green.png", (40, 200, 90), (32, 32))


def policy_at(folder: Path, *, dtype: torch.dtype = torch.float32, method: str = "ppo", **sections: Any) -> Policy:
    """The policy of a run on the model in a folder, with its tower."""
    model = {"path": str(folder), "with_images": True}
    config = config_of({"method": method, "model": model, **sections})
    tokenizer = load_tokenizer(str(folder))
    return build_policy(config, tokenizer=tokenizer, device=Device(torch.device("cpu"), dtype), teacher=True)


def tokens_of(policy: Policy, picture: Path) -> tuple[list[int], Any]:
    """Return the tokens of a prompt with a picture, and what plain transformers reads of it with an answer."""
    assert policy.images is not None
    expander = policy.images.expander
    text = expander.processor.apply_chat_template(
        [{"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "what?"}]}], tokenize=False
    )
    [prompt] = expander.tokenised([text], [[ImageFiles(base=picture.parent).image_of(picture.name)]])
    pictures = [[PILImage.open(picture)]]
    given = expander.processor(text=[text], images=pictures, return_tensors="pt", add_special_tokens=False)
    for name, values in given.items():
        if name in ("input_ids", "mm_token_type_ids", "token_type_ids", "attention_mask"):
            more = {"input_ids": ANSWER, "attention_mask": [1] * len(ANSWER)}.get(name, [0] * len(ANSWER))
            given[name] = torch.cat([values, torch.tensor([more])], 1)
    return prompt, given


def plain_states(model: PreTrainedModel | PeftModel | None, adapter: str | None, given: Any) -> Tensor:
    """Compute the states of a model, with an adapter merged into it, by plain transformers."""
    plain: Any = copy.deepcopy(model)
    if adapter is not None:
        plain.set_adapter(adapter)
        plain = plain.merge_and_unload()
    names = {*given} - {"text_replacement_offsets"}
    with torch.no_grad():
        return plain.model(**{name: given[name] for name in names}).last_hidden_state[0]


def computed(policy: Policy, role: Role, function: Callable[[Any], Tensor], prompt: list[int], **how: Any) -> Tensor:
    """Compute a function of a batch of the prompt with its answer, and of one without a picture, by a role."""
    batch = policy.batch_of([Example(prompt, (ANSWER,)), Example([8, 9], ([4],))], role=role, **how)
    with torch.no_grad(), policy.acting(role):
        return function(batch)


@pytest.mark.wide
@pytest.mark.parametrize("family", ORDER)
@pytest.mark.parametrize(("kind", "sections"), [("separate", FULL), ("separate", {}), ("adapter", {})])
def test_values_behind_an_image_are_of_plain_transformers_states(
    folders: Any, green: Path, family: str, kind: str, sections: dict[str, Any]
) -> None:
    policy = policy_at(folders(family), critic={"kind": kind}, **sections)
    stir(policy.parameters["critic"])
    prompt, given = tokens_of(policy, green)
    model = policy.adapters.peft if kind == "adapter" else policy.critic_model
    assert policy.value_head is not None
    adapter = {"adapter": "critic"}.get(kind, None if sections else "default")
    states = plain_states(model, adapter, given)[len(prompt) - 1 : -1]
    with torch.no_grad():
        expected = policy.value_head(states)
    found = computed(policy, "critic", policy.values, prompt)
    torch.testing.assert_close(found[0], expected, atol=1e-5, rtol=1e-5)


@pytest.mark.wide
@pytest.mark.parametrize("family", ORDER)
@pytest.mark.parametrize("sections", [FULL, {}], ids=["full", "lora"])
def test_a_separate_critic_shares_the_tower_and_does_not_train_it(
    folders: Any, family: str, sections: dict[str, Any]
) -> None:
    policy = policy_at(folders(family), dtype=torch.bfloat16, critic={"kind": "separate"}, **sections)
    tower = {id(parameter) for part in towers_of(policy.causal) for parameter in part.parameters()}
    assert policy.critic_model is not None
    assert tower <= {id(parameter) for parameter in policy.critic_model.parameters()}
    assert not tower & {id(parameter) for parameter in policy.parameters["critic"].values()}
    assert {parameter.dtype for part in towers_of(policy.causal) for parameter in part.parameters()} == {torch.bfloat16}
    assert {parameter.dtype for parameter in policy.parameters["critic"].values()} == {torch.float32}


def test_the_tower_of_a_separate_critic_counts_once_in_memory(folders: Any) -> None:
    policy = policy_at(folders("smolvlm"), critic={"kind": "separate"}, **FULL)
    language = sum(parameter.nbytes for parameter in language_parameters(policy.causal).values())
    assert bytes_by_role(policy)["critic"] < language + 1000


@pytest.mark.wide
@pytest.mark.parametrize("family", ORDER)
@pytest.mark.parametrize("packed", [True, False], ids=["packed", "padded"])
def test_log_probabilities_of_both_answers_of_a_pair_are_plain_transformers(
    folders: Any, green: Path, family: str, packed: bool
) -> None:
    policy = policy_at(folders(family), method="dpo")
    stir(policy.parameters["policy"])
    prompt, given = tokens_of(policy, green)
    policy.try_images()
    policy.packs = policy.packs and packed
    batch = policy.batch_of([Example(prompt, (ANSWER, ANSWER[:2])), Example([8, 9], ([4], [6]))])
    with torch.no_grad(), policy.acting("policy"):
        found = pair_logprobs(policy, "policy", batch)
    states = plain_states(policy.adapters.peft, "default", given)[len(prompt) - 1 : -1]
    with torch.no_grad():
        logprobs = policy.head("policy").logits(states).log_softmax(1)
    of_tokens = logprobs[range(3), ANSWER]
    torch.testing.assert_close(found[0], torch.stack([of_tokens.sum(), of_tokens[:2].sum()]), atol=1e-4, rtol=1e-4)


@pytest.mark.wide
@pytest.mark.parametrize("family", ORDER)
def test_a_score_behind_an_image_is_of_plain_transformers_last_state(folders: Any, green: Path, family: str) -> None:
    policy = policy_at(folders(family), method="reward")
    policy.train_score_head()
    stir(policy.parameters["policy"])
    prompt, given = tokens_of(policy, green)
    found = computed(policy, "policy", policy.reward_scores, prompt, last_tokens=True)
    assert policy.score_head is not None
    with torch.no_grad():
        expected = policy.score_head(plain_states(policy.adapters.peft, "default", given)[-1])
    torch.testing.assert_close(found[0], expected, atol=1e-5, rtol=1e-5)


def test_policy_and_reference_are_compared_on_a_prompt_that_ends_in_an_image(folders: Any, green: Path) -> None:
    policy = policy_at(folders("qwen2_5_vl"), method="dpo")
    prompt, _ = tokens_of(policy, green)
    last = max(place for place, token in enumerate(prompt) if is_image_id(token))
    policy.check_reference([prompt[: last + 2]], temperature=1.0)


def teacher_logprobs(policy: Policy, prompt: list[int]) -> Tensor:
    def of(batch: Batch) -> Tensor:
        return policy.logprobs("teacher", batch, temperature=1.0)[0]

    return computed(policy, "teacher", of, prompt)[0]


@pytest.mark.wide
@pytest.mark.parametrize("family", ORDER)
def test_a_teacher_with_a_tower_of_its_own_is_plain_transformers(
    folders: Any, green: Path, family: str, tmp_path: Path
) -> None:
    teacher = tiny_vision(family, tmp_path / "teacher", seed=1)
    policy = policy_at(folders(family), method="distill", teacher={"path": str(teacher)})
    prompt, given = tokens_of(policy, green)
    policy.try_images()
    own = load_image_text_model(str(teacher), dtype=torch.float32)
    states = plain_states(own, None, given)[len(prompt) - 1 : -1]
    with torch.no_grad():
        expected = head_of(own).logits(states).log_softmax(1)[range(3), ANSWER]
    torch.testing.assert_close(teacher_logprobs(policy, prompt), expected, atol=1e-4, rtol=1e-4)


@pytest.mark.wide
@pytest.mark.parametrize("family", ORDER)
def test_a_teacher_that_is_an_adapter_reads_images_on_the_policy_s_base(
    folders: Any, green: Path, family: str, tmp_path: Path
) -> None:
    taught = policy_at(folders(family), method="sft")
    stir(taught.parameters["policy"])
    save_policy(taught, tmp_path / "teacher")
    policy = policy_at(folders(family), method="distill", teacher={"path": str(tmp_path / "teacher")})
    prompt, given = tokens_of(policy, green)
    states = plain_states(taught.adapters.peft, "default", given)[len(prompt) - 1 : -1]
    with torch.no_grad():
        expected = taught.head("policy").logits(states).log_softmax(1)[range(3), ANSWER]
    torch.testing.assert_close(teacher_logprobs(policy, prompt), expected, atol=1e-4, rtol=1e-4)


def test_a_teacher_that_makes_other_pixels_of_an_image_is_refused(folders: Any, tmp_path: Path) -> None:
    teacher = tiny_vision("smolvlm", tmp_path / "teacher")
    file = teacher / "preprocessor_config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "image_mean": [0.1, 0.2, 0.3]}))
    with pytest.raises(ValueError, match=r"teacher\.path=.*image_mean"):
        policy_at(folders("smolvlm"), method="distill", teacher={"path": str(teacher)})


def test_a_token_that_a_teacher_does_not_know_is_its_last_and_an_image_stays() -> None:
    assert known_there([[3, 9, FIRST_IMAGE_ID + 5]], 7) == [[3, 7, FIRST_IMAGE_ID + 5]]
