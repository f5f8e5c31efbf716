"""Device, dtype and thread count of a run; errors of memory."""

import pytest
import torch

from tinyrl.models.device import as_out_of_memory, make_accelerator, threads_for


@pytest.mark.parametrize(
    ("width", "cores", "threads"),
    [(96, 2, 1), (128, 64, 1), (255, 8, 1), (256, 1, 1), (256, 2, 2), (256, 64, 4), (576, 2, 2), (4096, 16, 16)],
)
def test_threads_follow_from_the_width_and_the_cores(width: int, cores: int, threads: int):
    assert threads_for(width=width, cores=cores) == threads


def test_a_device_that_is_not_there(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(ValueError, match="--device cuda: torch sees no CUDA device"):
        make_accelerator("cuda", dtype="auto")
    with pytest.raises(ValueError, match="'tpu': allowed are auto, cpu, cuda"):
        make_accelerator("tpu", dtype="auto")


def test_autocast_follows_dtype():
    for dtype, precision in (("float32", "no"), ("bfloat16", "bf16"), ("auto", "no")):
        accelerator = make_accelerator("cpu", dtype=dtype)
        assert accelerator.device.type == "cpu"
        assert accelerator.mixed_precision == precision
        with accelerator.autocast():
            product = torch.ones(2, 2) @ torch.ones(2, 2)
        assert product.dtype == (torch.bfloat16 if precision == "bf16" else torch.float32)


def test_a_cpu_that_has_no_more_memory_says_so_as_a_gpu_does():
    with pytest.raises(torch.OutOfMemoryError, match="you tried to allocate"), as_out_of_memory():
        torch.empty(1 << 50)
    for said in (
        "CUDA error: out of memory\nCUDA kernel errors",
        "CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate`",
    ):
        with pytest.raises(torch.OutOfMemoryError), as_out_of_memory():
            raise RuntimeError(said)
    with pytest.raises(torch.OutOfMemoryError, match="no more memory"), as_out_of_memory():
        bytearray(1 << 60)
    with pytest.raises(RuntimeError, match="size") as caught, as_out_of_memory():
        torch.add(torch.ones(2), torch.ones(3))
    assert not isinstance(caught.value, torch.OutOfMemoryError)
