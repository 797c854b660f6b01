"""Boards out of a Prometheus exposition: one device record a board, null for what it does not tell (acceptance §4, §10)."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable

from prometheus_client.parser import text_string_to_metric_families

from calculet_perf.records import Chip, DeviceJobs, DeviceRecord, ProcessRecord, Resources

Labels = dict[str, str]
Sample = tuple[str, Labels, float]
PREFIX, WORKER = "calculet_", "worker-"
"""Of names, and of the label `process` of a board's worker."""
_WANTED = (
    "calculet_worker_chip_", "calculet_worker_device_counters", "calculet_worker_kv_", "calculet_worker_buffers",
    "calculet_worker_inflight_jobs", "calculet_worker_waiting_requests", "calculet_worker_batch_",
    "calculet_worker_fault_injection", "calculet_worker_device_busy", "calculet_process_",
)  # fmt: skip


def samples_of(text: str) -> list[Sample]:
    """The samples that are about boards; an exposition is large, so that others are not even parsed."""
    lines = [line for line in text.splitlines() if line.startswith(_WANTED) or line.startswith("# TYPE " + PREFIX)]
    families = text_string_to_metric_families("\n".join(lines) + "\n")
    return [(sample.name, dict(sample.labels), sample.value) for family in families for sample in family.samples]


def boards_of(samples: Iterable[Sample]) -> dict[str, list[Sample]]:
    """Samples by board."""
    found: dict[str, list[Sample]] = defaultdict(list)
    for sample in samples:
        process = sample[1].get("process", "")
        if board := sample[1].get("board") or (process.removeprefix(WORKER) if process.startswith(WORKER) else None):
            found[board].append(sample)
    return dict(found)


def device_record(
    board: str, samples: Iterable[Sample], *, run_id: str, utc: str, monotonic_ns: int, sample_ms: float, phase: str
) -> DeviceRecord:
    """One board at one moment."""
    values: dict[tuple[str, str], float] = {}
    chips: dict[int, Chip] = {}
    for name, labels, value in samples:
        if (chip := labels.get("chip")) is not None and chip.isdigit():
            _chip(chips.setdefault(int(chip), Chip(chip=int(chip))), name, value)
        else:
            others = [text for label, text in labels.items() if label not in ("board", "process", "le", "quantile")]
            values[name.removeprefix(PREFIX).removeprefix("worker_"), others[0] if others else ""] = value
    lanes = [value for (name, state), value in values.items() if name == "kv_sequences" and state != "FREE"]
    get = values.get
    return DeviceRecord(
        run_id=run_id, utc=utc, monotonic_ns=monotonic_ns, sample_ms=sample_ms, board=board, phase=phase,
        chips=[chips[index] for index in sorted(chips)],
        jobs=DeviceJobs(
            pending=get(("device_counters", "pending")), finished=get(("device_counters", "finished")),
            left=get(("device_counters", "left")),
        ),
        reset_count=get(("device_counters", "resets")),
        resources=Resources(
            rss_bytes=get(("process_resident_bytes", "")), cpu_s=get(("process_cpu_seconds_total", "")),
            threads=get(("process_threads", "")), open_fds=get(("process_open_fds", "")), leased_buffers=get(("buffers", "leased")),
            quarantined_buffers=get(("buffers", "quarantined")), kv_used_tokens=get(("kv_tokens", "used")),
            kv_reserved_tokens=get(("kv_tokens", "reserved")), active_lanes=sum(lanes) if lanes else None,
            waiting_requests=get(("waiting_requests", "")), inflight_jobs=get(("inflight_jobs", "")),
            batch_active=get(("batch_active_total", "")), batch_rows=get(("batch_rows_total", "")),
            device_busy_s=get(("device_busy_seconds_total", "")),
        ),
    )  # fmt: skip


def processes_of(samples: Iterable[Sample], *, run_id: str, utc: str, monotonic_ns: int, phase: str) -> list[ProcessRecord]:
    """Routers and supervisor at one moment: processes that tell of themselves and are no board's."""
    values: dict[str, dict[str, float]] = defaultdict(dict)
    for name, labels, value in samples:
        process = labels.get("process", "")
        if name.startswith(PREFIX + "process_") and process and not process.startswith(WORKER):
            values[process][name.removeprefix(PREFIX + "process_")] = value
    return [
        ProcessRecord(
            run_id=run_id, utc=utc, monotonic_ns=monotonic_ns, phase=phase, process=process,
            start_s=told.get("start_timestamp_seconds"), cpu_s=told.get("cpu_seconds_total"), rss_bytes=told.get("resident_bytes"),
            threads=told.get("threads"), open_fds=told.get("open_fds"),
        )
        for process, told in sorted(values.items())
    ]  # fmt: skip


def injector_armed(samples: Iterable[Sample]) -> bool | None:
    """Whether any board's fault injector is armed; None: nobody tells."""
    told = [value for name, _, value in samples if name == "calculet_worker_fault_injection_armed"]
    return any(value > 0 for value in told) if told else None


def throttled(records: Iterable[DeviceRecord]) -> bool | None:
    """Whether any chip was throttled; None: no sample tells."""
    told = [chip.throttled for record in records for chip in record.chips if chip.throttled is not None]
    return any(told) if told else None


def fill_ratio(before: Iterable[DeviceRecord], after: Iterable[DeviceRecord]) -> float | None:
    """Active over compiled lanes of the decode steps between two moments (acceptance §7); None: not told, or no step."""
    active = rows = 0.0
    earlier = {record.board: record.resources for record in before}
    for record in after:
        first, last = earlier.get(record.board), record.resources
        if first is None or None in (first.batch_active, first.batch_rows, last.batch_active, last.batch_rows):
            return None
        active += (last.batch_active or 0) - (first.batch_active or 0)
        rows += (last.batch_rows or 0) - (first.batch_rows or 0)
    return active / rows if rows > 0 else None


def _chip(chip: Chip, name: str, value: float) -> None:
    if name.endswith("_temperature_celsius"):
        chip.temperature_c = value
    elif name.endswith("_power_watts"):
        chip.power_w = value
    elif name.endswith("_frequency_megahertz"):
        chip.frequency_mhz = value
    elif name.endswith("_memory_used_bytes"):
        chip.memory_used_bytes = value
    elif name.endswith("_throttled"):
        chip.throttled = value > 0
