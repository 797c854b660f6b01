"""The matrix file, `calculet-perf-matrix/v1`: which cells, how many samples, how long to idle (acceptance §6-§8)."""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from calculet_perf.manifest import ManifestError, convert, load_yaml

Tokens = Annotated[int, Meta(ge=1)]
Positive = Annotated[int, Meta(ge=1)]
NotNegative = Annotated[float, Meta(ge=0)]
Rate = Annotated[float, Meta(gt=0)]
Sampling = Literal["greedy", "sampled"]


class _Section(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Base: frozen, unknown keys are errors."""


class _Cells(_Section, frozen=True, kw_only=True, tag_field="kind"):
    """What all kinds of cells share."""

    requests: Positive | None = None
    """Samples of each of these cells; None: the manifest's `measured_requests` for short ones, `min_requests` for others."""
    sampling: tuple[Sampling, ...] = ("greedy",)
    stream: tuple[bool, ...] = (True,)


class Single(_Cells, frozen=True, kw_only=True, tag="single"):
    """One request at a time (acceptance §6.1): every prompt with every output."""

    prompts: Annotated[tuple[Tokens, ...], Meta(min_length=1)]
    outputs: Annotated[tuple[Tokens, ...], Meta(min_length=1)]


class Closed(_Cells, frozen=True, kw_only=True, tag="closed"):
    """So many users, each of whom sends its next request when it has its answer (acceptance §6.2)."""

    concurrency: Annotated[tuple[Positive, ...], Meta(min_length=1)]
    prompt: Tokens
    output: Tokens


class DecodeHeavy(Closed, frozen=True, kw_only=True, tag="decode_heavy"):
    """Long answers to short prompts (acceptance §6.3)."""


class PrefillHeavy(Closed, frozen=True, kw_only=True, tag="prefill_heavy"):
    """Long prompts with short answers (acceptance §6.3)."""


class Poisson(_Cells, frozen=True, kw_only=True, tag="poisson"):
    """Open loop (acceptance §6.2): requests come at their rate, whatever becomes of those before."""

    qps: Annotated[tuple[Rate, ...], Meta(min_length=1)]
    prompt: Tokens
    output: Tokens


class Burst(_Cells, frozen=True, kw_only=True, tag="burst"):
    """So many at the same moment; the next burst waits for all of them (acceptance §6.2)."""

    sizes: Annotated[tuple[Positive, ...], Meta(min_length=1)]
    prompt: Tokens
    output: Tokens


class TrafficClass(_Section, frozen=True, kw_only=True):
    """A share of mixed traffic."""

    name: Annotated[str, Meta(pattern=r"^[a-z0-9_-]{1,32}$")]
    share: Rate
    prompt: Tokens
    output: Tokens


class Mixed(_Cells, frozen=True, kw_only=True, tag="mixed"):
    """Classes drawn by their shares (acceptance §6.3): open loop at `qps`, closed loop at `concurrency`."""

    classes: Annotated[tuple[TrafficClass, ...], Meta(min_length=1)]
    qps: tuple[Rate, ...] = ()
    concurrency: tuple[Positive, ...] = ()


class Interference(_Cells, frozen=True, kw_only=True, tag="interference"):
    """Short answers are being decoded when long prompts arrive: head-of-line blocking (acceptance §6.3). Each group has `short`
    requests at once and `long` ones `after_ms` later; `baseline` adds the same group without the long ones."""

    short: Positive
    short_prompt: Tokens
    short_output: Tokens
    long: Positive = 1
    long_prompt: Tokens
    long_output: Tokens = 1
    after_ms: NotNegative = 200
    baseline: bool = True


class Boundary(_Cells, frozen=True, kw_only=True, tag="boundary"):
    """A prompt that fills the context but for one token: one output token succeeds, more are refused (acceptance §6.1)."""

    prompt: Tokens | Literal["context"]
    """`context`: whatever the served artifact has, less one."""
    refused_outputs: tuple[Tokens, ...] = (2, 32, 256)


class Lanes(_Cells, frozen=True, kw_only=True, tag="lanes"):
    """Batch profiles by active lanes, 1..B each (acceptance §7)."""

    profiles: Annotated[tuple[Positive, ...], Meta(min_length=1)]
    active: tuple[Positive, ...] | None = None
    """None: every number from 1 to the profile."""
    prompt: Tokens
    output: Tokens


CellSpec = Single | Closed | DecodeHeavy | PrefillHeavy | Poisson | Burst | Mixed | Interference | Boundary | Lanes


class Corpus(_Section, frozen=True, kw_only=True):
    """Where prompts come from. `ids`: token ids drawn from [low, high), so that a prompt has exactly its length; `text`: common
    words, for servers and interfaces that take no ids, whose length the server's own usage tells afterwards."""

    kind: Literal["ids", "text"] = "ids"
    low: Annotated[int, Meta(ge=0)] = 33
    high: Annotated[int, Meta(ge=1)] = 123
    unique: bool | None = None
    """Every request of a run has a prompt of its own, so that a prefix cache has nothing to find. None: for foreign servers; for
    Calculet, which has no such cache, equal samples in different cells also show crosstalk."""


class Golden(_Section, frozen=True, kw_only=True):
    """The fixed cases before and after (acceptance §8.3, §8.8)."""

    file: str | None = None
    """JSON lines of `GoldenCase`; relative to the matrix. None: greedy answers of this server, asked twice, must agree."""
    prompts: Annotated[tuple[Tokens, ...], Meta(min_length=1)] = (16, 64, 256)
    output: Tokens = 16


class Assume(_Section, frozen=True, kw_only=True):
    """How fast the server is thought to be, for the estimate of a dry run only."""

    prefill_tokens_per_s: Rate = 1000.0
    decode_tokens_per_s: Rate = 60.0
    lanes: Positive = 1
    """Requests that it decodes at the same speed together."""


class Short(_Section, frozen=True, kw_only=True):
    """Cells within both get the larger number of samples (acceptance §8.6)."""

    prompt: Tokens = 512
    output: Tokens = 32


class Sampled(_Section, frozen=True, kw_only=True):
    """Business sampling, with the manifest's seed (acceptance §6.1)."""

    temperature: Annotated[float, Meta(gt=0, le=2)] = 0.7
    top_p: Annotated[float, Meta(gt=0, le=1)] = 0.95


class Capacity(_Section, frozen=True, kw_only=True):
    """The search for the highest stable rate (acceptance §14.3)."""

    prompt: Tokens
    output: Tokens
    ttft_p99_ms: Rate | None = None
    """SLA from the scheduled start; None: not part of it."""
    e2e_p99_ms: Rate | None = None
    error_share: Annotated[float, Meta(ge=0, le=1)] = 0.01
    queue_growth: NotNegative = 2.0
    """Requests by which the queue may grow over a window."""
    start_qps: Rate = 1.0
    factor: Annotated[float, Meta(gt=1)] = 1.5
    tolerance: Annotated[float, Meta(gt=0, le=0.5)] = 0.05
    """Pass and fail must be this close."""
    min_qps: Rate = 0.01
    max_qps: Rate = 10_000.0
    screen_s: Rate = 180.0
    window_s: Rate = 1800.0
    """Below 1800 s the result is labelled shortened."""
    confirmations: Positive = 2
    """Full windows that the winner has to pass."""


class Matrix(_Section, frozen=True, kw_only=True):
    """`calculet-perf-matrix/v1`."""

    schema: Literal["calculet-perf-matrix/v1"]
    name: str
    cells: tuple[CellSpec, ...] = ()
    idle_s: NotNegative = 300
    """Idle sampling before anything runs; below 300 s the run is labelled shortened (acceptance §8.2)."""
    gap_s: NotNegative = 10
    """Idle time between cells."""
    rounds: Positive = 1
    """A cell's samples are split over so many rounds, each in a random order of its own (acceptance §8.5)."""
    min_requests: Positive = 30
    """Samples of a cell that is not short (acceptance §8.6)."""
    device_sample_s: Rate = 1.0
    """Time between two samples of the boards."""
    rate_tolerance: Rate = 0.01
    """An open loop that was sent slower or faster by more than this share makes the run invalid."""
    burst_spread_ms: Rate = 5.0
    """A burst whose requests were sent further apart is no burst: its cell is invalid."""
    short: Short = Short()
    sampled: Sampled = Sampled()
    corpus: Corpus = Corpus()
    golden: Golden = Golden()
    assume: Assume = Assume()
    capacity: Capacity | None = None
    """For `calculet-perf capacity`."""


def parse_matrix(data: bytes, source: str) -> Matrix:
    """A matrix from its file's bytes.

    Raises:
        ManifestError: names the file, the path in it and what is wrong.
    """
    matrix: Matrix = convert(load_yaml(data, source), Matrix, source)
    if matrix.corpus.high <= matrix.corpus.low:
        raise ManifestError(f"{source}: $.corpus.high: must be above low ({matrix.corpus.low})")
    if not matrix.cells and matrix.capacity is None:
        raise ManifestError(f"{source}: $.cells: nothing to measure")
    for index, spec in enumerate(matrix.cells):
        where = f"{source}: $.cells[{index}]"
        if isinstance(spec, Mixed) and not spec.qps and not spec.concurrency:
            raise ManifestError(f"{where}: mixed traffic needs qps (open loop) or concurrency (closed loop)")
        if isinstance(spec, Lanes) and spec.active is not None and max(spec.active) > max(spec.profiles):
            raise ManifestError(f"{where}.active: {max(spec.active)} is above the largest profile, {max(spec.profiles)}")
    return matrix
