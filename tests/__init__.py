"""Tests, in the folders of what they test. Without a GPU Triton interprets its kernels, if told so when imported."""

import os

import torch

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"
