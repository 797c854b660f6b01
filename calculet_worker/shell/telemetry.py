"""The worker's metrics: counters from the engine's records, gauges read when somebody asks.

Every name is the catalogue's. What comes with every request or job is only added up here, and carried over before a scrape.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from calculet_core import history
from calculet_core.clock import S
from calculet_core.history import Event
from calculet_core.shell.sums import Histogram, Sums
from calculet_core.shell.telemetry import Collectors
from calculet_core.states.model_generation import ModelState
from calculet_worker.device.base import Device
from calculet_worker.engine import Engine
from calculet_worker.shell.constraints import Constraints

OTHER = "other"
"""Label of tenants that no configuration names."""
PHASES = frozenset({"VALIDATING", "CONFIGURING", "WARMING", "DRAINING", "UNLOADING", "RECOVERING"})


class Telemetry:
    """One worker's collectors; `armed` says that a fault injector is around the device."""

    def __init__(self, board: str, engine: Engine, device: Device, tenants: Iterable[str], armed: bool) -> None:
        self._engine, self._device, self._armed = engine, device, armed
        self._tenants = frozenset(tenants)
        self._metric = Collectors("worker", board=board)
        self._sums = Sums("worker", self._metric)
        self._admission_wait, self._step, self._batch_wait, self._kv_free, self._lengths = (
            Histogram("worker", name, self._metric, {"board": board})
            for name in (
                "calculet_worker_admission_wait_seconds", "calculet_worker_step_seconds", "calculet_worker_batch_wait_seconds",
                "calculet_worker_kv_free_seconds", "calculet_worker_sequence_tokens",
            )
        )  # fmt: skip
        self._busy_told_ns = 0
        self._compiled: int | None = None
        """Rows of the last decode step's profile."""
        self._constraints: Constraints | None = None
        self._told: dict[str, float] = {}
        """Totals that others keep, as of the last scrape."""
        self._phase: tuple[str, int] | None = None
        self._fault_ns: int | None = None
        self._counters: dict[str, Callable[[Event], None]] = {
            history.ATTEMPT_ADMITTED: self._admitted,
            history.ATTEMPT_DONE: self._attempt_done,
            history.BOARD_JOB: self._job,
            history.BOARD_STALE: lambda _: self._metric("calculet_worker_stale_completions").inc(),
            history.BOARD_FAULT: self._fault,
            history.BOARD_GENERATION: self._generation,
            history.BOARD_PINGPONG: self._pingpong,
            history.BOARD_LANE_LOST: lambda _: self._metric("calculet_worker_lanes_lost").inc(),
            history.BOARD_RESET: lambda _: self._metric("calculet_worker_resets").inc(),
            history.BOARD_LANE_FREE: self._lane_free,
        }

    def count(self, event: Event) -> None:
        """Take one record of the engine."""
        if counter := self._counters.get(event.event):
            counter(event)

    def bad_message(self, reason: str) -> None:
        """A frame was ignored."""
        self._metric("calculet_worker_bad_messages", reason=reason).inc()

    def watch(self, constraints: Constraints) -> None:
        """Tell about these from now on."""
        self._constraints = constraints

    def compiled(self, seconds: float) -> None:
        """A request's constraint and prompt are ready, or refused."""
        self._metric("calculet_worker_constraint_compile_seconds").observe(seconds)

    def take_tenants(self, tenants: Iterable[str]) -> None:
        """Other names are configured now."""
        gone, self._tenants = self._tenants, frozenset(tenants)
        for tenant in gone - self._tenants:
            for name in ("active", "waiting_tokens", "virtual_lag"):
                self._metric.forget(f"calculet_worker_tenant_{name}", tenant=tenant)

    def _tenant(self, name: str) -> str:
        """A label from a closed set."""
        return name if name in self._tenants else OTHER

    # ---------------------------------------------------------------- counters
    def _admitted(self, event: Event) -> None:
        data, grown = event.data, self._sums.grown
        grown["calculet_worker_admissions", ("queue" if data["queued"] else "admit",)] += 1
        self._admission_wait.observe((), data["wait_ns"] / S)
        if data.get("starved"):
            grown["calculet_worker_starvation_events", (self._tenant(data["tenant"]),)] += 1

    def _attempt_done(self, event: Event) -> None:
        data, grown = event.data, self._sums.grown
        grown["calculet_worker_requests", (data["outcome"],)] += 1
        if data["outcome"] == "refused":
            grown["calculet_worker_admissions", (f"refuse_{data['code']}",)] += 1
            return
        if data.get("timed_out"):
            grown["calculet_worker_admissions", ("timeout",)] += 1
        prompt, generated = data["prompt_tokens"], data["tokens"]
        grown["calculet_worker_tokens", ("prompt",)] += prompt
        grown["calculet_worker_tokens", ("generated",)] += generated
        grown["calculet_worker_tenant_tokens", (self._tenant(data["tenant"]),)] += prompt + generated
        self._lengths.observe(("prompt",), prompt)
        self._lengths.observe(("total",), prompt + generated)

    def _job(self, event: Event) -> None:
        data, grown = event.data, self._sums.grown
        kind, result = data["kind"], data["result"]
        grown["calculet_worker_jobs", (kind, result)] += 1
        grown["calculet_worker_turns", (data["queue"],)] += 1
        if result != "ok":
            if rc := data.get("rc"):
                grown["calculet_worker_refusals", (str(rc),)] += 1
            return
        self._step.observe((kind,), data["ns"] / S)
        grown["calculet_worker_engine_jobs", (data["engine"],)] += 1
        timings = data["timings"]
        for part, spent_ns in (("h2d", timings.h2d_ns), ("wait", timings.wait_ns), ("d2h", timings.d2h_ns)):
            if spent_ns is not None:  # what a device does not tell has no sample
                grown["calculet_worker_device_part_seconds", (kind, part)] += spent_ns / S
        if overlap := data.get("overlap_ns"):
            grown["calculet_worker_overlap_seconds", ()] += overlap / S
        if kind == "decode":
            rows, compiled = data["rows"], data["compiled"]
            self._compiled = compiled
            grown["calculet_worker_batch_active", ()] += rows
            grown["calculet_worker_batch_rows", ()] += compiled
            grown["calculet_worker_batch_lane_waste", ()] += compiled - rows
            self._batch_wait.observe((), data["waited_ns"] / S)

    def _lane_free(self, event: Event) -> None:
        self._kv_free.observe((), event.data["free_ns"] / S)
        if (since := event.data.get("since_cancel_ns")) is not None:
            self._metric("calculet_worker_cancel_to_free_seconds").observe(since / S)

    def _pingpong(self, event: Event) -> None:
        if reason := event.data["reason"]:
            self._metric("calculet_worker_pingpong_degraded", reason=reason).inc()

    def _fault(self, event: Event) -> None:
        self._metric("calculet_worker_faults", kind=event.data["kind"]).inc()
        self._fault_ns = self._fault_ns or event.t

    def _generation(self, event: Event) -> None:
        """A phase of a generation is over when the next one begins."""
        state = event.data["state"]
        if self._phase is not None and self._phase[0] in PHASES:
            phase, since_ns = self._phase
            self._metric("calculet_worker_model_phase_seconds", phase=phase.lower()).set((event.t - since_ns) / S)
        self._phase = (state, event.t)
        if state == ModelState.READY.name and self._fault_ns is not None:
            self._metric("calculet_worker_recovery_seconds").observe((event.t - self._fault_ns) / S)
            self._fault_ns = None

    # ---------------------------------------------------------------- gauges
    def exposition(self, now_ns: int, busy_ns: int) -> bytes:
        """The scrape's text, with every gauge as it is now; `busy_ns` is how long the device has had a job so far."""
        metric, gauges = self._metric, self._engine.gauges(now_ns)
        self._sums.settle()
        if self._compiled is not None:
            metric("calculet_worker_batch_compiled").set(self._compiled)
        metric("calculet_worker_device_busy_seconds").inc((busy_ns - self._busy_told_ns) / S)
        self._busy_told_ns = busy_ns
        metric("calculet_worker_waiting_requests").set(gauges.queue_depth["waiting"])
        metric("calculet_worker_waiting_prompt_tokens").set(gauges.waiting_tokens)
        metric("calculet_worker_kv_violations").set(gauges.kv_violations)
        metric("calculet_worker_inflight_jobs").set(gauges.inflight)
        metric("calculet_worker_inflight_limit").set(gauges.max_inflight)
        metric("calculet_worker_long_prefills").set(gauges.long_prefills)
        metric("calculet_worker_buffer_wait_seconds").set(gauges.buffer_wait_s)
        metric("calculet_worker_kv_hint_denied").set(gauges.device_full)
        metric("calculet_worker_generation").set(gauges.generation)
        metric("calculet_worker_fault_injection_armed").set(self._armed)
        for state in ModelState:
            metric("calculet_worker_model_state", state=state.name).set(gauges.state == state.name)
        for tenant, shown in gauges.tenants.items():
            if tenant in self._tenants:
                metric("calculet_worker_tenant_active", tenant=tenant).set(shown.active)
                metric("calculet_worker_tenant_waiting_tokens", tenant=tenant).set(shown.waiting_tokens)
                metric("calculet_worker_tenant_virtual_lag", tenant=tenant).set(shown.virtual_lag)
        for queue, depth in gauges.queue_depth.items():
            metric("calculet_worker_queue_depth", queue=queue).set(depth)
            metric("calculet_worker_queue_oldest_seconds", queue=queue).set(gauges.queue_oldest_s.get(queue, 0.0))
        for name, label, values in (
            ("calculet_worker_limit", "limit", gauges.limits),
            ("calculet_worker_kv_sequences", "state", gauges.lanes),
            ("calculet_worker_kv_tokens", "kind", gauges.kv_tokens),
            ("calculet_worker_buffers", "state", gauges.buffers),
        ):
            for value_of, value in values.items():
                metric(name, **{label: value_of}).set(value)
        self._device_gauges()
        if self._constraints is not None:
            self._constraint_gauges(self._constraints)
        return metric.exposition()

    def _constraint_gauges(self, constraints: Constraints) -> None:
        metric = self._metric
        metric("calculet_worker_constraints_cached").set(constraints.cached)
        metric("calculet_worker_constraints_compiling").set(constraints.compiling)
        for limit, value in constraints.limits.items():
            metric("calculet_worker_limit", limit=f"constraints.{limit}").set(value)
        for result, count in constraints.results.items():
            metric("calculet_worker_constraints", result=result).inc(self._more(result, count))
        metric("calculet_worker_constraint_masks").inc(self._more("masks", constraints.masks))
        metric("calculet_worker_constraint_mask_seconds").inc(self._more("mask_ns", constraints.mask_ns) / S)

    def _more(self, name: str, total: float) -> float:
        """What a total has grown by since the last scrape."""
        grown = total - self._told.get(name, 0)
        self._told[name] = total
        return grown

    def _device_gauges(self) -> None:
        counters = self._device.counters()
        for name in ("pending", "finished", "left", "resets"):
            self._metric("calculet_worker_device_counters", counter=name).set(getattr(counters, name))
        for index, chip in enumerate(self._device.telemetry()):
            for name, value in (
                ("calculet_worker_chip_temperature_celsius", chip.temperature_c),
                ("calculet_worker_chip_power_watts", chip.power_w),
                ("calculet_worker_chip_frequency_megahertz", chip.frequency_mhz),
                ("calculet_worker_chip_throttled", chip.throttled),
                ("calculet_worker_chip_memory_used_bytes", chip.memory_used_bytes),
            ):
                if value is not None:  # what a device cannot tell has no sample
                    self._metric(name, chip=str(index)).set(value)
