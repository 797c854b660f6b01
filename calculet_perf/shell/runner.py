"""A run, in the order of acceptance §8: check what is served, idle, golden, then every cell with its warm-up and its gap,
golden again, and whether the resources came back. Every step is written before the next begins, so that Ctrl-C loses one cell
at most."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

from calculet_perf import validity
from calculet_perf.assemble import Assembler, case_record
from calculet_perf.client.observation import Seen
from calculet_perf.exposition import fill_ratio
from calculet_perf.golden import golden_requests, judge
from calculet_perf.manifest import Manifest, ManifestError
from calculet_perf.plan import Item, Plan, warm_shapes
from calculet_perf.records import DeviceRecord, ProcessRecord, RequestRecord
from calculet_perf.runinfo import EXCLUSIONS, GoldenOutcome, Invalid, InvalidCode, Phase, RunInfo
from calculet_perf.shell.boards import Boards
from calculet_perf.shell.http import HttpClient
from calculet_perf.shell.probe import alive
from calculet_perf.shell.run_dir import CASES, DEVICE, GOLDEN, PROCESSES, REQUESTS, STEPS, RunWriter
from calculet_perf.shell.screen import Screen
from calculet_perf.shell.shards import Applied, ShardError, Shards
from calculet_perf.shell.traces import StepTraces
from calculet_perf.shell.wall_clock import ntp_offset_ms
from calculet_perf.workloads.cells import Cell, Shape
from calculet_perf.workloads.facts import ServerFacts
from calculet_perf.workloads.matrix import Matrix
from calculet_perf.workloads.requests import Planned, Sender, requests_of

ARRIVALS = {"single": "closed", "closed": "closed", "poisson": "scheduled", "burst": "groups"}
FILES: dict[type, str] = {DeviceRecord: DEVICE, ProcessRecord: PROCESSES}
RETURN_WAIT_S = 30.0
BURST_GAP_S = 0.2
TRIES = 3


class Stop(Exception):
    """The run ends here, as the status that was set says."""


@dataclass(slots=True)
class Expected:
    """Golden expectations and where they come from."""

    hashes: dict[str, str]
    source: str


@dataclass(slots=True)
class Setup:
    """What a run is made of."""

    manifest: Manifest
    matrix: Matrix
    facts: ServerFacts
    plan: Plan
    sender: Sender
    expected: Expected
    done: set[tuple[str, int]]
    traces: StepTraces | None = None
    """The server's own step trace, where it is on this host."""


class Runner:
    """Runs a plan into a folder. `info` is the state that `run.json` shows."""

    def __init__(self, setup: Setup, info: RunInfo, writer: RunWriter, client: HttpClient, shards: Shards, screen: Screen) -> None:
        self.setup, self.info = setup, info
        self._writer, self._client, self._shards, self._screen = writer, client, shards, screen
        self._assembler = Assembler(
            setup.manifest, setup.facts, exact_prompts=setup.sender.sends_ids
        )
        self._boards = Boards(
            client, setup.manifest.run_id, lambda record: writer.append(FILES[type(record)], record), setup.matrix.device_sample_s
        )
        self._warmed: set[tuple[int, int]] = set()
        self._baseline: list[DeviceRecord] = []
        self._begun_ns = time.monotonic_ns()
        self._clocks = _clocks()

    async def run(self) -> None:
        """The whole order; `info.status` says how it ended. Raises only what nobody foresaw, and cancellation."""
        steps: tuple[tuple[str, Callable[[], Awaitable[None]]], ...] = (
            ("idle", self._idle), ("golden before", self._golden_before), ("measure", self.measure),
            ("golden after", self._golden_after), ("resources", self._resources),
        )  # fmt: skip
        self._boards.start()
        try:
            for name, step in steps:
                phase = Phase(name=name, start_ns=time.monotonic_ns())
                self.info.phases.append(phase)
                self._save()
                await step()
                phase.end_ns = time.monotonic_ns()
                self._clock()
                self._save()
            self.info.status = "infrastructure_invalid" if self.info.invalid else "complete"
        except Stop:
            pass
        except ShardError as error:
            self._invalid("unreachable" if error.code != "crash" else "crash", str(error))
        except asyncio.CancelledError:
            self.info.status = "interrupted"
            self.info.invalid.append(Invalid(code="interrupted", message="stopped before its end"))
            raise
        finally:
            await self._boards.stop()
            self._end()

    # ---------------------------------------------------------------- steps
    async def _idle(self) -> None:
        self._boards.phase = "idle"
        seconds = self.setup.plan.idle_s
        self._screen.step("idle sampling", max(1, round(seconds)))
        begin = time.monotonic_ns()
        await self._boards.sample()
        while (left := seconds - (time.monotonic_ns() - begin) / 1e9) > 0:
            await asyncio.sleep(min(1.0, left))
            self._screen.advance()
        self._baseline = await self._boards.sample()
        self.info.notes += validity.idle_notes(self._boards.between(begin, time.monotonic_ns()))
        if not self._boards.told:
            self._note("the server tells nothing of its boards: device.jsonl is empty")
        self.info.injector_armed = self._boards.armed

    async def _golden_before(self) -> None:
        await self._golden("before")
        if not self.info.golden[-1].passed:
            self.info.status = "golden_failed"
            raise Stop

    async def _golden_after(self) -> None:
        await self._golden("after")

    async def _golden(self, moment: str) -> None:
        setup, info = self.setup, self.info
        self._boards.phase = "golden"
        passes = max(2, 2 * (setup.facts.boards or 1))  # so that every board is likely to be asked
        label = f"{info.run_id}-s{info.sessions}"
        rounds = golden_requests(setup.sender, setup.matrix.golden, passes, label, moment)
        self._screen.step(f"golden {moment}", passes * len(rounds[0]))
        records: list[RequestRecord] = []
        for planned in rounds:
            applied = await self._apply("closed", planned, 1)
            self._say_failure(applied.seen)
            records += [self._record(one, seen, 1) for one, seen in zip(planned, applied.seen, strict=True)]
        for record in records:
            self._writer.append(GOLDEN, record)
        if all(validity.went_away([record]) for record in records):
            self._invalid("unreachable", f"golden {moment}: no request reached {self._client.target.name}")
            raise Stop
        if trouble := validity.refused_ids(records, foreign=setup.facts.foreign, ids=setup.sender.sends_ids):
            info.status = "configuration_invalid"
            raise ManifestError(trouble)
        setup.expected.hashes, failures = judge(records, setup.expected.hashes)
        outcome = GoldenOutcome(
            moment="before" if moment == "before" else "after", passed=not failures, cases=len(records),
            source=setup.expected.source, failures=failures,
        )  # fmt: skip
        info.golden.append(outcome)
        self._screen.say(f"golden {moment}: {'passed' if outcome.passed else 'FAILED'} ({len(records)} requests)")
        for failure in failures:
            self._screen.say(f"  {failure}")

    async def measure(self) -> None:
        """Every cell of the plan that is not done."""
        items = self.setup.plan.items
        self._screen.whole(len(items), sum((item.cell.id, item.round) in self.setup.done for item in items))
        for order, item in enumerate(items):
            if (item.cell.id, item.round) in self.setup.done:
                continue
            await self.cell(order, item)
            self._screen.cell_done()

    async def _resources(self) -> None:
        """Back to the baseline, which may take a moment after the last answer."""
        self._boards.phase = "after"
        if not self._baseline:
            return
        deadline = time.monotonic() + RETURN_WAIT_S
        while True:
            self.info.returned = validity.returned(self._baseline, await self._boards.sample())
            if all(one.returned for one in self.info.returned) or time.monotonic() > deadline:
                break
            await asyncio.sleep(0.5)
        for one in self.info.returned:
            if not one.returned:
                self._screen.say(f"{one.board}: {one.resource} was {one.before:g} before and is {one.after:g}")

    # ---------------------------------------------------------------- cells
    async def _warm_up(self, cell: Cell) -> None:
        self._boards.phase = "warmup"
        for shape in warm_shapes(cell, self._warmed):
            users = cell.concurrency or 1
            count = max(self.setup.plan.warmups, users) if self.setup.plan.warmups else 0
            self._warmed.add((shape.prompt, shape.output))
            if not count:
                continue
            planned = self._warm_requests(cell, shape, count)
            self._screen.step(f"warm-up p{shape.prompt} o{shape.output}", count)
            applied = await self._apply("closed", planned, users)
            for one, seen in zip(planned, applied.seen, strict=True):
                self._writer.append(REQUESTS, self._record(one, seen, users, warmup=True))

    def _warm_requests(self, cell: Cell, shape: Shape, count: int) -> list[Planned]:
        warm = Cell(
            id=f"warmup/p{shape.prompt}/o{shape.output}", kind="warmup", arrival="closed", shapes=(shape,), stream=cell.stream,
            sampling="greedy", asked_requests=count, concurrency=cell.concurrency,
        )  # fmt: skip
        return requests_of(self.setup.sender, warm, self.info.sessions, count, self.info.run_id)

    async def cell(self, order: int, item: Item) -> list[RequestRecord]:
        """Warm-up where it is due, the gap, and one cell in one round; its records are written.

        Raises:
            Stop: the server went away.
            ShardError: the load could not be applied.
        """
        cell, setup = item.cell, self.setup
        await self._warm_up(cell)
        gap_from = time.monotonic_ns()
        self._boards.phase = "gap"
        await asyncio.sleep(setup.matrix.gap_s)
        gap_s = (time.monotonic_ns() - gap_from) / 1e9
        planned = requests_of(setup.sender, cell, item.round, item.count, self.info.run_id)
        self._boards.phase = "measure"
        before = await self._boards.sample()
        self._screen.step(cell.id, len(planned))
        applied = await self._apply(ARRIVALS[cell.arrival], planned, self._connections(item, planned))
        after = await self._boards.sample()
        records = []
        for one, seen in zip(planned, applied.seen, strict=True):
            start, end = seen.client.request_start or applied.start_ns, seen.client.response_end or applied.end_ns
            slow = self._boards.throttled_between(start - int(setup.matrix.device_sample_s * 1e9), end)
            records.append(self._record(one, seen, cell.concurrency, throttled=slow))
        case = case_record(
            self.info.run_id, item, order, records, applied.start_ns, applied.end_ns, [one.asked.offset_ns for one in planned]
        )
        heat = [chip.temperature_c for sample in before for chip in sample.chips if chip.temperature_c is not None]
        case.gap_s, case.temperature_c = gap_s, max(heat) if heat else None
        case.throttled = self._boards.throttled_between(before[0].monotonic_ns, time.monotonic_ns()) if before else None
        case.fill_ratio = fill_ratio(before, after)
        case.lane_waste = None if case.fill_ratio is None else 1 - case.fill_ratio
        self._clock()
        if trouble := validity.case_trouble(case, records, setup.matrix):
            case.invalid = trouble.code
            self.info.invalid.append(trouble)
            self._screen.say(f"invalid: {trouble.message}")
        for record in records:
            self._writer.append(REQUESTS, record)
        if validity.went_away(records) and not await self._still_there():
            self._writer.flush()
            self._invalid("unreachable", f"{self._client.target.name} went away in {cell.id}")
            raise Stop
        self._writer.append(CASES, case)
        self._save()
        failed = f", {case.failed} failed" if case.failed else ""
        self.say(f"{cell.id}  {case.requests} requests{failed}")
        if case.failed:
            self._say_failure(applied.seen)
        return records

    def _connections(self, item: Item, planned: Sequence[Planned]) -> int:
        """Closed: the users. Open loop: as many as are likely to be open at once, so that opening them is not measured."""
        cell = item.cell
        if cell.concurrency is not None:
            return cell.concurrency
        return min(len(planned), max(4, round((cell.qps or 1) * 10)))

    async def _still_there(self) -> bool:
        for _ in range(TRIES):
            if await alive(self._client):
                return True
            await asyncio.sleep(1)
        return False

    # ---------------------------------------------------------------- small parts
    def say(self, text: str) -> None:
        """A line for the person who watches."""
        self._screen.say(text)

    def put(self, name: str, data: bytes) -> None:
        """A small file into the run's folder."""
        self._writer.put(name, data)

    async def _apply(self, arrival: str, planned: Sequence[Planned], users: int) -> Applied:
        asked = [one.asked for one in planned]
        return await self._shards.apply(arrival, asked, concurrency=users, gap_s=BURST_GAP_S, progress=self._screen.advance)

    def _say_failure(self, seen: Sequence[Seen]) -> None:
        """The first failure in the server's own words, which no file keeps."""
        for one in seen:
            if one.error_code is not None:
                self.say(f"  {one.error_code} (HTTP {one.http_status}): {one.error_message or 'no message'}")
                return

    def _record(
        self, planned: Planned, seen: Seen, users: int | None, *, warmup: bool = False, throttled: bool | None = None
    ) -> RequestRecord:
        return self._assembler.request(planned, seen, concurrency=users, warmup=warmup, throttled=throttled)

    def _clock(self) -> None:
        """Compare three clocks since the last time."""
        now = _clocks()
        trouble, note = validity.clock_trouble(*(after - before for after, before in zip(now, self._clocks, strict=True)))
        self._clocks = now
        if trouble:
            self.info.invalid.append(Invalid(code="clock", message=trouble))
        if note:
            self._note(note)

    def _invalid(self, code: InvalidCode, message: str) -> None:
        self.info.status = "infrastructure_invalid"
        self.info.invalid.append(Invalid(code=code, message=message))
        self._screen.say(message)

    def _note(self, text: str) -> None:
        if text not in self.info.notes:
            self.info.notes.append(text)

    def _save(self) -> None:
        self._writer.flush()
        self.info.injector_armed = self._boards.armed
        self._writer.put_info(self.info)

    def _collect(self) -> None:
        """The steps of this run's requests, from the server's trace."""
        if self.setup.traces is None or not self.info.phases:
            return
        count = 0
        for step in self.setup.traces.between(self._begun_ns, time.monotonic_ns()):
            self._writer.append(STEPS, step)
            count += 1
        self._note(f"{count} steps from the server's trace; {self.setup.traces.unreadable} lines could not be read")

    def _end(self) -> None:
        self._collect()
        self.info.ended_utc = utc_now()
        self._save()
        self._writer.close()


def new_info(setup: Setup, target: str, version: str, sums: tuple[str, str], processes: int) -> RunInfo:
    """`run.json` of a run that begins.

    Args:
        sums: sha256 of the manifest's and the matrix's bytes.
    """
    plan = setup.plan
    return RunInfo(
        run_id=setup.manifest.run_id, perf_version=version, manifest_sha256=sums[0], matrix_sha256=sums[1],
        matrix_name=setup.matrix.name, started_utc=utc_now(), boot_id=boot_id(), ntp_offset_ms=ntp_offset_ms(), target=target,
        foreign=setup.facts.foreign, context_tokens=setup.facts.context, backend=setup.facts.backend, processes=processes,
        planned=[item.name for item in plan.items],
        not_applicable=plan.not_applicable, shortened=plan.shortened, exclusions=list(EXCLUSIONS),
    )  # fmt: skip


def utc_now() -> str:
    """ISO 8601, seconds, UTC."""
    return datetime.now(UTC).isoformat(timespec="seconds").replace("+00:00", "Z")


def boot_id() -> str | None:
    """Names the machine's boot, and with it what CLOCK_MONOTONIC counts from."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return None


def _clocks() -> tuple[int, int, int]:
    """Monotonic, boot time, wall clock; nanoseconds."""
    return time.monotonic_ns(), time.clock_gettime_ns(time.CLOCK_BOOTTIME), time.time_ns()
