"""Bfloat16 logits: what they are rounded to, and a board that returns them from its lanes to golden cases."""

from __future__ import annotations

import msgspec
import numpy as np
import pytest
from builders_engine import Driver
from builders_sim import a_sim_manifest
from hypothesis import given
from hypothesis import strategies as st

from calculet_core.artifact import parse_manifest
from calculet_core.errors import ArtifactError
from calculet_core.faults import FaultKind
from calculet_core.jobs import Completion, EngineBank, JobTimings, OutputStatus
from calculet_worker.jobs.completion import Faulty, judge
from calculet_worker.output.bf16 import Widener, narrow, widen


@given(st.lists(st.floats(width=32), min_size=1, max_size=50))
def test_narrowing_takes_the_nearest_and_widening_loses_nothing(numbers: list[float]) -> None:
    exact = np.array(numbers, np.float32)
    bits = narrow(exact)
    wide = widen(bits)
    assert wide.dtype == np.float32 and np.array_equal(narrow(wide), bits)
    assert np.array_equal(np.isnan(wide), np.isnan(exact))
    with np.errstate(invalid="ignore"):  # beside infinity there are NaNs
        steps = [widen((bits.astype(np.int32) + step).clip(0, 0xFFFF).astype(np.uint16)).astype(np.float64) for step in (-1, 1)]
    for place, value in enumerate(exact.astype(np.float64)):
        if np.isfinite(value) and np.isfinite(wide[place]):
            near = abs(value - float(wide[place]))
            assert all(near <= abs(value - other[place]) for other in steps if np.isfinite(other[place])), value


def test_ties_go_to_the_even_one_and_nan_and_inf_stay() -> None:
    ties = np.array([0x3F808000, 0x3F818000], np.uint32).view(np.float32)
    assert narrow(ties).tolist() == [0x3F80, 0x3F82]
    assert widen(narrow([np.inf, -np.inf])).tolist() == [np.inf, -np.inf] and np.isnan(widen(narrow([np.nan]))[0])


def test_a_lease_keeps_its_array() -> None:
    widener = Widener()
    first = widener.widen(1, narrow(np.ones((4, 8))))
    other = widener.widen(2, narrow(np.zeros((4, 8))))
    assert first.all() and not other.any()
    assert widener.widen(1, narrow(np.zeros((2, 8)))).base is first.base, "no new memory at every step"
    assert widener.widen(1, narrow(np.ones((2, 9)))).shape == (2, 9), "another model"


def test_a_manifest_says_how_logits_leave_and_only_what_is_known() -> None:
    data = a_sim_manifest()
    mapping = msgspec.to_builtins(data)
    for profile in mapping["profiles"]:
        profile["logit_dtype"] = "bfloat16"
    assert parse_manifest(msgspec.json.encode(mapping), "toy").profiles[0].logit_dtype == "bfloat16"
    mapping["profiles"][1]["logit_dtype"] = "float8"
    with pytest.raises(ArtifactError, match=r"profiles\[1\].logit_dtype.*float8.*bfloat16"):
        parse_manifest(msgspec.json.encode(mapping), "toy")


def test_numbers_of_any_other_type_are_a_fault_of_the_artifact() -> None:
    driver = Driver().ready()
    driver.submit(1, [1, 2, 3], 2)
    assert driver.engine.serving is not None
    (entry,) = driver.engine.serving.inflight.pop_all()
    size = driver.engine.serving.vocab_size
    for dtype in (np.float16, np.uint16, np.float64):
        done = Completion(entry.job.job_id, entry.job.generation, OutputStatus.DONE, np.zeros((1, size), dtype), EngineBank.PING, JobTimings(), 1)
        verdict = judge(done, entry, size)
        assert isinstance(verdict, Faulty) and verdict.kind is FaultKind.INVALID_DTYPE

