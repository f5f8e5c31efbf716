"""The model of a step's time on several devices: hand-computed seconds, and the limits that it must have."""

import json
import math
from dataclasses import asdict, replace
from pathlib import Path

import pytest

from benchmarks import scale
from benchmarks.scale import Device, Link, Step, break_even, parallel_s, pays_until, served_s
from benchmarks.scale_figure import draw, parts_s, tables

DEVICE = Device("d", decode_s=0.01, decode_row_s=1e-3, read_s=1e-4, learn_s=3e-4, alone_s=0.5, gradient_bytes=1000)
LINK = Link("slow", bandwidth=1000.0, latency=0.25)
STEP = Step(rows=16, group=4, prompt=10, longest=20)  # 160 new tokens, 40 of prompts


def test_one_device_takes_the_sum_of_its_parts():
    sampling = 20 * 0.01 + 160 * 1e-3 + 40 * 1e-4
    assert parallel_s(DEVICE, STEP, 1, LINK) == pytest.approx(sampling + 200 * 4e-4 + 0.5)


def test_two_devices_share_all_but_the_decoding_steps_and_exchange_a_rollout_and_a_gradient():
    sampling = 0.2 + (0.16 + 0.004) / 2
    exchange = (2 * 1000 + 12 * 160) / 2 / 1000 + 12 * 0.25
    assert parallel_s(DEVICE, STEP, 2, LINK) == pytest.approx(sampling + 0.08 / 2 + exchange + 0.5)
    assert sum(parts_s(DEVICE, STEP, 2, LINK)) == pytest.approx(parallel_s(DEVICE, STEP, 2, LINK))


def test_a_served_step_waits_for_the_server_and_reads_once_more():
    quick = replace(LINK, bandwidth=math.inf, latency=0.0)
    probe = 64 * 0.01 + 256 * (1e-3 + 1e-4)
    sampled = 0.364 / 4 + 200 * 1e-4 + probe
    assert served_s(DEVICE, STEP, 2, quick, faster=4) == pytest.approx(sampled + 200 * 4e-4 + 0.5)


@pytest.mark.parametrize("devices", [2, 4, 8])
def test_at_the_break_even_both_take_the_same_time(devices: int):
    quick, long = Link("quick", 1e9, 1e-5), replace(STEP, rows=256, longest=2000)
    needed = break_even(DEVICE, long, devices, quick)
    assert served_s(DEVICE, long, devices, quick, faster=needed) == pytest.approx(
        parallel_s(DEVICE, long, devices, quick)
    )


def test_no_server_is_fast_enough_where_the_step_is_all_training():
    quick = Link("quick", 1e9, 1e-5)
    assert break_even(replace(DEVICE, learn_s=1.0), STEP, 2, quick) == math.inf


def test_doubling_pays_for_longer_where_less_is_not_shared():
    quick = Link("quick", 1e9, 1e-6)
    shared = replace(DEVICE, decode_s=0.0, alone_s=1e-3)
    assert pays_until(DEVICE, STEP, quick) == 1  # 0.9 s of 1.44 s are not shared
    assert pays_until(shared, STEP, quick) > 16


def test_the_figure_and_the_tables_are_drawn(tmp_path: Path):
    file = tmp_path / "measured.json"
    file.write_text(json.dumps([asdict(DEVICE)]))
    draw([Device(**one) for one in json.loads(file.read_text())], tmp_path / "scale.png")
    assert (tmp_path / "scale.png").stat().st_size > 10_000
    assert "| d | 4,096 |" in tables([DEVICE])


@pytest.mark.slow
def test_a_device_is_measured(tmp_path: Path):
    options = scale.Namespace(out=tmp_path, threads=1, device="cpu")
    found = scale.measure("xs", options)
    assert min(found.decode_s, found.read_s, found.learn_s, found.alone_s) > 0
    assert found.gradient_bytes == 4 * 16 * 2 * sum(a + b for a, b in scale.SIZES["xs"].matrices)
