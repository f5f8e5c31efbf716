"""Further families of vision-language models: which of the trials on an image they pass."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.images import image_file
from tests.models.test_vision_roles import policy_at, tokens_of
from tests.tiny_vision import MORE, tiny_vision
from tinyrl.generation.library_decoder import LibraryDecoder
from tinyrl.models.checks import check_images, decodes_exactly, packs_images_exactly


@pytest.mark.wide
@pytest.mark.parametrize("family", MORE)
def test_trials_on_an_image_pass_but_for_packing_of_windows_and_states(family: str, tmp_path: Path) -> None:
    policy = policy_at(tiny_vision(family, tmp_path / family), method="grpo")
    tokens_of(policy, image_file(tmp_path / "green.png", (40, 200, 90), (32, 32)))
    assert policy.images is not None
    backbone = policy.backbone("policy")
    check_images(policy.images, backbone)
    assert packs_images_exactly(backbone, policy.images) == (family in ("internvl", "glm4v"))
    decoder = LibraryDecoder(policy.causal, dtype=torch.float32, layout="merged", images=policy.images)
    decoder.sync(None)
    assert decodes_exactly(backbone, decoder, longest=60, images=policy.images)
