"""Bytes alive on the meta device, counted by hand on a few tensors."""

import torch

from tinyrl.models.memory import AsOn, LiveBytes

META, CPU = torch.device("meta"), torch.device("cpu")


def test_a_tensor_counts_from_its_making_to_its_last_use_and_views_and_weights_do_not():
    weight = torch.zeros(10, 10, device=META)
    with LiveBytes() as live:
        row = weight[0]  # a view of what was there before
        x = torch.zeros(2, 10, device=META)  # 80 bytes
        y = x @ weight  # 80 more
        z = y.t()  # none
        assert (live.now, live.most) == (160, 160)
        del y
        assert live.now == 160  # z still reads it
        del z
        assert (live.now, live.most) == (80, 160)
        del x
        assert live.now == 0
    assert row.shape == (10,)


def test_what_autograd_keeps_is_alive_until_the_backward_pass_and_gradients_after_it():
    weight = torch.zeros(8, 8, device=META, requires_grad=True)  # 256 bytes
    x = torch.zeros(4, 8, device=META)
    with LiveBytes() as live:
        loss = (x @ weight).exp().sum()  # exp keeps its output (128), the sum has 4
        assert live.now == 128 + 4
        loss.backward()
        del loss
        assert live.now == 256  # the weight's gradient
        assert live.most >= 256 + 128
    assert weight.grad is not None


def attention_bytes(*, masked: bool, device: torch.device | None) -> int:
    """Alive after attention of 2 heads over 64 tokens of size 8, whose inputs take 4096 bytes each."""
    q, k, v = (torch.zeros(1, 2, 64, 8, device=META, requires_grad=True) for _ in range(3))
    mask = torch.zeros(64, 64, device=META) if masked else None
    with LiveBytes() as live:
        out = torch.nn.functional.scaled_dot_product_attention
        if device is None:
            kept = out(q, k, v, attn_mask=mask, is_causal=not masked)
        else:
            with AsOn(device):
                kept = out(q, k, v, attn_mask=mask, is_causal=not masked)
        assert kept.shape == q.shape
        return live.now


def test_attention_takes_what_the_devices_kernel_keeps_and_not_a_square():
    for masked in (False, True):
        assert attention_bytes(masked=masked, device=CPU) == 4096 + 2 * 64 * 4  # outputs, and a number a query
        assert attention_bytes(masked=masked, device=None) >= 2 * 64 * 64 * 4  # plain products keep the square


def test_products_are_computed_in_autocasts_dtype():
    x, weight = torch.zeros(4, 8, device=META), torch.zeros(16, 8, device=META)
    with AsOn(CPU, autocast=torch.bfloat16):
        assert torch.nn.functional.linear(x, weight).dtype == torch.bfloat16
        assert (x + 1).dtype == torch.float32
