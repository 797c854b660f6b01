"""What makes a measurement invalid, apart from what it says about the server (acceptance §15, exit 3), and what makes it wrong
before it began (exit 2). Pure rules; the runner asks them."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Sequence

from calculet_perf.assemble import nearest_rank
from calculet_perf.client.outcomes import UNREACHABLE
from calculet_perf.manifest import Manifest
from calculet_perf.records import DeviceRecord, RequestRecord
from calculet_perf.runinfo import CaseRecord, Invalid, Returned
from calculet_perf.workloads.facts import ServerFacts
from calculet_perf.workloads.matrix import Matrix

CLOCK_SHARE = 0.01
"""More successes than this share without a complete clock: the client's clock is not to be trusted."""
SUSPENDED_S = 0.1
STEADY_C, STEADY_W_SHARE = 2.0, 0.10
EXACT = ("leased_buffers", "quarantined_buffers", "kv_used_tokens", "kv_reserved_tokens", "active_lanes", "waiting_requests",
         "inflight_jobs")  # fmt: skip
"""Come back to their baseline exactly."""
NEAR = {"open_fds": 8.0, "threads": 4.0}
"""Come back to their baseline, give or take so many (idle connections, pools)."""


def mismatches(manifest: Manifest, facts: ServerFacts) -> list[str]:
    """Where the manifest and what the server tells of itself disagree (acceptance §8.1); null on either side is no disagreement."""
    pairs = (
        ("$.model.calbin_sha256", manifest.model.calbin_sha256, facts.calbin_sha256),
        ("$.model.generation", manifest.model.generation, facts.generation),
        ("$.software.server_commit", manifest.software.server_commit, facts.server_commit),
        ("$.software.image_digest", manifest.software.image_digest, facts.image_digest),
        ("$.software.calrt", manifest.software.calrt, facts.calrt),
        ("$.software.driver", manifest.software.driver, facts.driver),
        ("$.software.firmware", manifest.software.firmware, facts.firmware),
        ("$.hardware.chips", manifest.hardware.chips, facts.chips),
        ("$.hardware.power_mode", manifest.hardware.power_mode, facts.power_mode),
    )
    found = [
        f"{path}: the manifest says {said}, the server {told}"
        for path, said, told in pairs
        if None not in (said, told) and said != told
    ]
    if facts.models and manifest.model.alias not in facts.models:
        found.append(f"$.model.alias: {manifest.model.alias!r} is not served (served: {', '.join(facts.models)})")
    return found


def case_trouble(case: CaseRecord, records: Sequence[RequestRecord], matrix: Matrix) -> Invalid | None:
    """What makes one cell's execution invalid."""
    if case.offered_qps is not None and case.achieved_qps is not None:
        off = abs(case.achieved_qps / case.offered_qps - 1)
        if off > matrix.rate_tolerance:
            message = f"{case.case}: {case.achieved_qps:.3f}/s were sent, {case.offered_qps:g}/s were asked for ({off:.1%} off)"
            return Invalid(code="rate", message=message)
    if case.burst_spread_ms is not None and case.burst_spread_ms > matrix.burst_spread_ms:
        message = f"{case.case}: a burst was sent over {case.burst_spread_ms:.1f} ms (at most {matrix.burst_spread_ms:g})"
        return Invalid(code="burst_spread", message=message)
    answered = [record for record in records if record.result.error_code is None]
    broken = sum(not record.quality.clock_complete for record in answered)
    if broken > CLOCK_SHARE * len(answered):
        return Invalid(code="clock", message=f"{case.case}: {broken} of {len(answered)} successes have no complete clock")
    lost = sum(record.result.error_code == "network_broken" for record in records)
    if lost:
        return Invalid(code="network", message=f"{case.case}: {lost} requests were lost to the network")
    return None


def went_away(records: Iterable[RequestRecord]) -> bool:
    """Whether the cell's failures are of a kind that a server which is gone gives."""
    return any(record.result.error_code in (*UNREACHABLE, "connection_reset") for record in records)


def refused(records: Sequence[RequestRecord], path: str, *, foreign: bool, ids: bool) -> str | None:
    """Why nothing can be measured where a server refuses every golden prompt for what the manifest or matrix says: that is a wrong
    address or key, or a matrix which does not fit the server, not a server that answers wrongly. None: it is not so.

    Args:
        path: where requests are sent, under the server's root.
        foreign: it is no Calculet.
        ids: prompts are lists of token ids.
    """
    codes = {(record.result.http_status, record.result.error_code) for record in records}
    statuses = {status or 0 for status, _ in codes}
    if records and statuses <= {404, 405}:
        return f"the server has no {path} (HTTP {min(statuses)}): is $.server.url its root, and $.server.api what it serves?"
    if records and statuses <= {401, 403}:
        return f"the server refuses the key (HTTP {min(statuses)}): $.server.api_key_env names the variable that holds it"
    if not (foreign and ids and records and all((status or 0) >= 400 and code for status, code in codes)):
        return None
    status, code = min(codes, key=str)
    return (
        f"the server refuses every golden prompt (HTTP {status}, {code}), which is a list of token ids: "
        "`corpus: {kind: text}` in the matrix sends words, and `api: chat` in the manifest messages"
    )


def clock_trouble(monotonic_ns: int, boottime_ns: int, realtime_ns: int) -> tuple[str | None, str | None]:
    """(why the clock is invalid, what to note) of the spans of three clocks over the same time.

    CLOCK_BOOTTIME counts while a machine sleeps and CLOCK_MONOTONIC does not: a difference means that it slept, or that the clock
    stood still.
    """
    if (asleep := (boottime_ns - monotonic_ns) / 1e9) > SUSPENDED_S:
        return f"the monotonic clock stood still for {asleep:.3f} s (a suspended machine?)", None
    stepped = (realtime_ns - boottime_ns) / 1e9
    return None, f"the wall clock was stepped by {stepped:+.3f} s" if abs(stepped) > 0.5 else None


def idle_notes(samples: Sequence[DeviceRecord]) -> list[str]:
    """Whether temperature, power and frequency were steady in the second half of the idle phase (acceptance §8.2)."""
    notes = []
    boards = sorted({sample.board for sample in samples})
    for board in boards:
        own = [sample for sample in samples if sample.board == board]
        half = own[len(own) // 2 :]
        for index in {chip.chip for sample in half for chip in sample.chips}:
            chips = [chip for sample in half for chip in sample.chips if chip.chip == index]
            heat = [chip.temperature_c for chip in chips if chip.temperature_c is not None]
            power = [chip.power_w for chip in chips if chip.power_w is not None]
            speed = {chip.frequency_mhz for chip in chips if chip.frequency_mhz is not None}
            if heat and max(heat) - min(heat) > STEADY_C:
                notes.append(f"{board} chip {index}: idle temperature was not steady ({min(heat):.1f} to {max(heat):.1f} C)")
            if power and max(power) - min(power) > STEADY_W_SHARE * max(power):
                notes.append(f"{board} chip {index}: idle power was not steady ({min(power):.1f} to {max(power):.1f} W)")
            if len(speed) > 1:
                notes.append(f"{board} chip {index}: idle frequency was not steady ({min(speed):g} to {max(speed):g} MHz)")
    return notes


def returned(before: Sequence[DeviceRecord], after: Sequence[DeviceRecord]) -> list[Returned]:
    """Resources of each board against their baseline (acceptance §8.8); what is not told is not listed."""
    baseline = {record.board: record.resources for record in before}
    found = []
    for record in after:
        first = baseline.get(record.board)
        if first is None:
            continue
        for name in (*EXACT, *NEAR):
            old, new = getattr(first, name), getattr(record.resources, name)
            if old is not None and new is not None:
                back = new <= old + NEAR[name] if name in NEAR else new == old
                found.append(Returned(resource=name, board=record.board, before=old, after=new, returned=back))
    return found


def round_trip_ms(times_ns: Sequence[int]) -> tuple[float | None, float | None]:
    """(median, 95th percentile less median) of small requests on an open connection."""
    if not times_ns:
        return None, None
    ordered = sorted(times_ns)
    median, high = statistics.median(ordered), nearest_rank(ordered, 0.95)
    return median / 1e6, ((high or median) - median) / 1e6
