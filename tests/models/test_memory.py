"""Memory of each role's weights, counted by hand on models of known size."""

from tests.models.building import lora_roles, roles_with_critic
from tests.tiny_models import HIDDEN, TinyModels
from tinyrl.models.roles import Roles, bytes_by_role


def base_bytes(roles: Roles) -> int:
    return 4 * sum(p.numel() for n, p in roles.causal.named_parameters() if "lora_" not in n)


def test_adapters_add_their_matrices_and_the_reference_adds_nothing(tiny: TinyModels):
    roles = roles_with_critic(tiny("llama"), with_lora=True, kind="adapter")
    # per layer: q, o 32 -> 32; k, v 32 -> 16; gate, up 32 -> 64; down 64 -> 32; rank 4, two layers
    adapter = 4 * 2 * 4 * (2 * (32 + 32) + 2 * (32 + 16) + 2 * (32 + 64) + (64 + 32))
    head = 4 * (HIDDEN + 1)
    assert bytes_by_role(roles) == {"base": base_bytes(roles), "policy": adapter, "critic": adapter + head}
    assert sum(bytes_by_role(roles).values()) < 2.2 * base_bytes(roles)  # a tiny model; see RESULTS.md for real ones


def test_a_frozen_copy_of_an_adapter_and_a_model_of_its_own_are_counted(tiny: TinyModels):
    roles = lora_roles(tiny("llama"))
    roles.freeze_reference_adapter()
    counted = bytes_by_role(roles, reward_model=roles.causal)
    assert counted["reference"] == counted["policy"]
    assert counted["reward"] > counted["base"]
    own = bytes_by_role(roles_with_critic(tiny("llama"), with_lora=False, kind="separate"))
    assert own["critic"] > own["reference"] == own["base"]
    assert "policy" not in own  # full fine-tuning: the policy is the base
