"""The catalogue of all metrics (scheduling §16, acceptance §10): one line each.

A shell's telemetry builds its Prometheus collectors from here and never invents a name. Labels come from closed sets; request
and job ids are never labels (scheduling §16).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Kind = Literal["counter", "gauge", "histogram"]

SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0)
STEPS = (0.001, 0.0025, 0.005, 0.01, 0.015, 0.02, 0.03, 0.05, 0.075, 0.1, 0.15, 0.25, 0.5, 1.0, 2.5, 10.0)
"""Seconds between two tokens."""
LENGTHS = (16.0, 64.0, 256.0, 512.0, 1024.0, 2048.0, 4096.0, 8192.0, 16384.0, 32768.0, 40960.0, 65536.0, 131072.0)
"""Tokens of a sequence; 40960 is the baseline artifact's context."""


REQUEST_CLASSES = ("model", "prompt", "output", "concurrency")
"""Labels of a request's times (acceptance §10.1): its model, and classes of its prompt's and output's length and of the router's requests in
flight when it ended. Closed sets: `PROMPT_CLASSES` and the others."""
PROMPT_CLASSES = {512: "1-512", 4096: "513-4096", None: "4097+"}
OUTPUT_CLASSES = {64: "1-64", 512: "65-512", None: "513+"}
CONCURRENCY_CLASSES = {1: "1", 4: "2-4", 16: "5-16", None: "17+"}
"""Upper bound -> label; None: no bound."""


@dataclass(frozen=True, slots=True)
class Metric:
    """One metric; a counter's exposed name ends in `_total`."""

    component: Literal["router", "worker", "supervisor", "process"]
    """`process`: told by each of the three about itself, with its own name in the label `process`."""
    name: str
    kind: Kind
    help: str
    labels: tuple[str, ...] = ()
    buckets: tuple[float, ...] = SECONDS


CATALOGUE: tuple[Metric, ...] = (
    # Router: requests.
    Metric("router", "calculet_router_requests", "counter", "Requests ended, by model, outcome and HTTP status", ("model", "outcome", "status")),
    Metric("router", "calculet_router_errors", "counter", "Errors answered, by stable code", ("code",)),
    Metric("router", "calculet_router_inflight", "gauge", "Requests accepted and not ended"),
    Metric("router", "calculet_router_connections", "gauge", "Open HTTP connections"),
    Metric("router", "calculet_router_prompt_tokens", "counter", "Prompt tokens of ended requests", ("model",)),
    Metric("router", "calculet_router_generated_tokens", "counter", "Tokens generated for ended requests", ("model",)),
    Metric("router", "calculet_router_ttft_seconds", "histogram", "Request parsed to first token written", REQUEST_CLASSES),
    Metric("router", "calculet_router_e2e_seconds", "histogram", "Request parsed to response end", REQUEST_CLASSES),
    Metric("router", "calculet_router_tpot_seconds", "histogram", "Time per token after the first, mean of a call with one choice and more tokens than one", REQUEST_CLASSES, STEPS),
    Metric("router", "calculet_router_waiting_model", "gauge", "Requests that wait for their model's turn on a time-shared board, or for a board about to be reached", ("model",)),
    Metric("router", "calculet_router_model_wait_seconds", "histogram", "How long a request waited for its model's turn", ("model",)),
    Metric("router", "calculet_router_held_requests", "counter", "Requests that waited for a board about to be reached: it took them, or they were refused", ("outcome",)),
    Metric("router", "calculet_router_resends", "counter", "Attempts beyond the first, by reason", ("reason",)),
    Metric("router", "calculet_router_disconnects", "counter", "Clients that left before their terminal"),
    Metric("router", "calculet_router_slow_readers", "counter", "Streams cancelled because their output buffer was full"),
    Metric("router", "calculet_router_bad_messages", "counter", "Frames ignored: unknown, malformed or late", ("reason",)),
    Metric("router", "calculet_router_lost_messages", "counter", "Gaps in a worker's sequence numbers"),
    Metric("router", "calculet_router_view_version", "gauge", "Version of the fleet view in use"),
    Metric("router", "calculet_router_workers", "gauge", "Worker links by state", ("state",)),
    Metric("router", "calculet_router_tenant_requests", "counter", "Requests of a tenant ended, by outcome", ("tenant", "outcome")),
    Metric("router", "calculet_router_tenant_tokens", "counter", "Tokens of a tenant's ended requests, by kind", ("tenant", "kind")),
    Metric("router", "calculet_router_tenant_refusals", "counter", "Errors that a tenant's requests got, by stable code", ("tenant", "code")),
    Metric("router", "calculet_router_tenant_active", "gauge", "Requests of a tenant accepted and not ended", ("tenant",)),
    Metric("router", "calculet_router_keys", "gauge", "API keys that are accepted now"),
    Metric("router", "calculet_router_keys_version", "gauge", "Version of the key file in use; 0: none"),
    Metric("router", "calculet_router_keys_usable", "gauge", "0 while the key file cannot be used and the last good one is in force"),
    Metric("router", "calculet_router_usage_records", "counter", "Usage records written"),
    Metric("router", "calculet_router_usage_lost", "counter", "Usage records that no disk took"),
    Metric("router", "calculet_router_usage_recovered", "counter", "Usage records of requests whose router was killed"),
    Metric("router", "calculet_router_lookups", "counter", "Questions to /tokenize and /detokenize ended, by outcome", ("kind", "outcome")),
    Metric("router", "calculet_router_open_lookups", "gauge", "Questions to /tokenize and /detokenize that have no answer yet"),
    Metric("router", "calculet_router_tls_expiry_timestamp_seconds", "gauge", "End of the TLS certificate, seconds since 1970; 0: no TLS"),
    Metric("router", "calculet_router_tls_usable", "gauge", "0 while the TLS files cannot be used and the last certificate goes on serving"),
    Metric("router", "calculet_router_limit", "gauge", "Configured limits and time-outs, by configuration key", ("limit",)),
    Metric("router", "calculet_router_limit_hits", "counter", "Times that a limit or time-out of the HTTP server took effect, by configuration key", ("limit",)),
    Metric("router", "calculet_router_streams", "gauge", "Open streams"),
    Metric("router", "calculet_router_body_bytes", "gauge", "Bytes of large bodies that are being received"),
    # Worker: admission.
    Metric("worker", "calculet_worker_waiting_requests", "gauge", "Requests waiting for admission"),
    Metric("worker", "calculet_worker_waiting_prompt_tokens", "gauge", "Prompt tokens of waiting requests"),
    Metric("worker", "calculet_worker_admissions", "counter", "Admission decisions", ("decision",)),
    Metric("worker", "calculet_worker_admission_wait_seconds", "histogram", "Tokenized to admitted"),
    Metric("worker", "calculet_worker_limit", "gauge", "Configured and proven limits", ("limit",)),
    # Worker: queues and batches.
    Metric("worker", "calculet_worker_queue_depth", "gauge", "Sequences by queue", ("queue",)),
    Metric("worker", "calculet_worker_queue_oldest_seconds", "gauge", "Oldest wait by queue", ("queue",)),
    Metric("worker", "calculet_worker_long_prefills", "gauge", "Long prompts that have a lane and no token yet"),
    Metric("worker", "calculet_worker_turns", "counter", "Device turns by queue", ("queue",)),
    Metric("worker", "calculet_worker_batch_lane_waste", "counter", "Compiled lanes without a sequence, summed over decode steps"),
    Metric("worker", "calculet_worker_batch_wait_seconds", "histogram", "Oldest sequence ready to its decode step submitted"),
    Metric("worker", "calculet_worker_batch_compiled", "gauge", "Compiled batch of the last decode"),
    Metric("worker", "calculet_worker_batch_active", "counter", "Active lanes summed over decode steps"),
    Metric("worker", "calculet_worker_batch_rows", "counter", "Compiled lanes summed over decode steps (fill ratio = active / rows)"),
    # Worker: KV.
    Metric("worker", "calculet_worker_kv_sequences", "gauge", "Lanes by KV state", ("state",)),
    Metric("worker", "calculet_worker_kv_tokens", "gauge", "KV tokens used, reserved and in total", ("kind",)),
    Metric("worker", "calculet_worker_kv_hint_denied", "gauge", "1 while the device denies a lane that is free by our accounting"),
    Metric("worker", "calculet_worker_kv_free_seconds", "histogram", "Lane released to confirmed free"),
    Metric("worker", "calculet_worker_kv_violations", "gauge", "Broken KV invariants; must be 0"),
    # Worker: executor.
    Metric("worker", "calculet_worker_inflight_jobs", "gauge", "Jobs submitted and not complete"),
    Metric("worker", "calculet_worker_inflight_limit", "gauge", "Jobs that may be in flight now"),
    Metric("worker", "calculet_worker_pingpong_degraded", "counter", "Times that two jobs in flight were taken back to one", ("reason",)),
    Metric("worker", "calculet_worker_engine_jobs", "counter", "Jobs by engine", ("engine",)),
    Metric("worker", "calculet_worker_overlap_seconds", "counter", "Device time in which two jobs computed at once, by the device's trace"),
    Metric("worker", "calculet_worker_refusals", "counter", "Submissions that the device refused, by return code", ("rc",)),
    Metric("worker", "calculet_worker_jobs", "counter", "Jobs by kind and result", ("kind", "result")),
    Metric("worker", "calculet_worker_device_busy_seconds", "counter", "Time with at least one job in flight"),
    Metric("worker", "calculet_worker_device_part_seconds", "counter", "Time of device jobs by part, by the device's own trace: input copied (h2d), computed (wait), output copied (d2h)", ("kind", "part")),
    Metric("worker", "calculet_worker_step_seconds", "histogram", "Submit to completion, by job kind", ("kind",)),
    Metric("worker", "calculet_worker_device_counters", "gauge", "The device's own queue counters", ("counter",)),
    Metric("worker", "calculet_worker_stale_completions", "counter", "Completions dropped by the generation or job check"),
    Metric("worker", "calculet_worker_buffers", "gauge", "Output buffers, in all and by state", ("state",)),
    Metric("worker", "calculet_worker_buffer_wait_seconds", "gauge", "How long something has been ready that finds no output buffer"),
    # Worker: model, fairness, recovery, requests.
    Metric("worker", "calculet_worker_model_state", "gauge", "1 for the generation's state", ("state",)),
    Metric("worker", "calculet_worker_generation", "gauge", "Generation that serves"),
    Metric("worker", "calculet_worker_tenant_tokens", "counter", "Tokens served, by tenant", ("tenant",)),
    Metric("worker", "calculet_worker_tenant_active", "gauge", "Sequences with a lane, by tenant", ("tenant",)),
    Metric("worker", "calculet_worker_tenant_waiting_tokens", "gauge", "Prompt tokens that wait, by tenant", ("tenant",)),
    Metric("worker", "calculet_worker_tenant_virtual_lag", "gauge", "Virtual finish of a tenant's next request less global virtual time", ("tenant",)),
    Metric("worker", "calculet_worker_starvation_events", "counter", "Requests that waited longer than fairness.starvation_after_ms", ("tenant",)),
    Metric("worker", "calculet_worker_model_phase_seconds", "gauge", "How long the last of each phase of a generation took", ("phase",)),
    Metric("worker", "calculet_worker_recovery_seconds", "histogram", "Fault to Ready again"),
    Metric("worker", "calculet_worker_lanes_lost", "counter", "Lanes whose content nobody knows any more"),
    Metric("worker", "calculet_worker_faults", "counter", "Faults by kind", ("kind",)),
    Metric("worker", "calculet_worker_resets", "counter", "Board resets since start"),
    Metric("worker", "calculet_worker_requests", "counter", "Attempts ended, by outcome", ("outcome",)),
    Metric("worker", "calculet_worker_tokens", "counter", "Tokens, by kind", ("kind",)),
    Metric("worker", "calculet_worker_sequence_tokens", "histogram", "Length of sequences that ended: of their prompts, and in total", ("kind",), LENGTHS),
    Metric("worker", "calculet_worker_cancel_to_free_seconds", "histogram", "Cancel received to lane free"),
    Metric("worker", "calculet_worker_bad_messages", "counter", "Frames ignored: unknown, malformed or late", ("reason",)),
    Metric("worker", "calculet_worker_chip_temperature_celsius", "gauge", "Temperature", ("chip",)),
    Metric("worker", "calculet_worker_chip_power_watts", "gauge", "Power", ("chip",)),
    Metric("worker", "calculet_worker_chip_frequency_megahertz", "gauge", "Frequency", ("chip",)),
    Metric("worker", "calculet_worker_chip_throttled", "gauge", "1 while throttled", ("chip",)),
    Metric("worker", "calculet_worker_fault_injection_armed", "gauge", "1 while a fault injector is armed"),
    Metric("worker", "calculet_worker_constraints", "counter", "Requests with a schema or tools, by what became of compiling it", ("result",)),
    Metric("worker", "calculet_worker_constraint_compile_seconds", "histogram", "Request arrived to schema compiled and prompt encoded"),
    Metric("worker", "calculet_worker_constraints_cached", "gauge", "Compiled schemas that are kept"),
    Metric("worker", "calculet_worker_constraints_compiling", "gauge", "Requests whose schema is being compiled or waits for that"),
    Metric("worker", "calculet_worker_constraint_masks", "counter", "Tokens that were drawn under a schema"),
    Metric("worker", "calculet_worker_constraint_mask_seconds", "counter", "Time spent on working out which tokens a schema allows"),
    # Worker: device memory, and the process (acceptance §10.3).
    Metric("worker", "calculet_worker_chip_memory_used_bytes", "gauge", "Device memory in use", ("chip",)),
    # Supervisor.
    Metric("supervisor", "calculet_supervisor_workers", "gauge", "Worker processes by state", ("state",)),
    Metric("supervisor", "calculet_supervisor_restarts", "counter", "Automatic restarts, counted when decided", ("board",)),
    Metric("supervisor", "calculet_supervisor_resets", "counter", "Board resets granted", ("board",)),
    Metric("supervisor", "calculet_supervisor_resets_denied", "counter", "Board resets refused by the budget", ("board",)),
    Metric("supervisor", "calculet_supervisor_worker_up", "gauge", "1 while the board's worker is up", ("board",)),
    Metric("supervisor", "calculet_supervisor_board_ready", "gauge", "1 while the board serves", ("board",)),
    Metric("supervisor", "calculet_supervisor_crash_bundles", "gauge", "Crash bundles of this supervisor's life", ("result",)),
    Metric("supervisor", "calculet_supervisor_limit", "gauge", "Configured limits", ("limit",)),
    Metric("supervisor", "calculet_supervisor_view_version", "gauge", "Version of the fleet view"),
    Metric("supervisor", "calculet_supervisor_bad_messages", "counter", "Ignored: strangers' bytes, malformed or unexpected messages, what is no control request", ("reason",)),
    Metric("supervisor", "calculet_supervisor_routers", "gauge", "Routers with a live heartbeat"),
    Metric("supervisor", "calculet_supervisor_resident", "gauge", "1: it is the model's turn on the time-shared board", ("board", "model")),
    Metric("supervisor", "calculet_supervisor_switches", "counter", "Turns taken on a time-shared board", ("board",)),
    Metric("supervisor", "calculet_supervisor_rollouts", "gauge", "Model swaps under way, by state", ("state",)),
    Metric("supervisor", "calculet_supervisor_rollouts_ended", "counter", "Model swaps ended, by how", ("state",)),
    Metric("supervisor", "calculet_supervisor_board_condemned", "gauge", "1 while the board is set aside", ("board",)),
    Metric("supervisor", "calculet_supervisor_unusable", "gauge", "What the configuration names and cannot be used, while what was in force goes on: 1 for the configuration itself, or the number of packages", ("what",)),
    Metric("supervisor", "calculet_supervisor_artifacts_quarantined", "gauge", "Artifacts set aside"),
    Metric("supervisor", "calculet_supervisor_breaker_open", "gauge", "1 while automatic action is stopped: too many boards went bad at once"),
    Metric("supervisor", "calculet_supervisor_chaos_enabled", "gauge", "1 while the configuration allows faults on purpose"),
    Metric("supervisor", "calculet_supervisor_chaos_orders", "counter", "Faults on purpose that an administrator has ordered", ("fault",)),
    # Each process, of itself.
    Metric("process", "calculet_process_resident_bytes", "gauge", "Memory in use (RSS)", ("process",)),
    Metric("process", "calculet_process_cpu_seconds", "counter", "CPU time, user and system", ("process",)),
    Metric("process", "calculet_process_threads", "gauge", "Threads", ("process",)),
    Metric("process", "calculet_process_open_fds", "gauge", "Open file descriptors", ("process",)),
    Metric("process", "calculet_process_max_fds", "gauge", "File descriptors that it may open", ("process",)),
    Metric("process", "calculet_process_start_timestamp_seconds", "gauge", "When it started, seconds since 1970", ("process",)),
    Metric("process", "calculet_process_journal_lost", "counter", "Journal and trace lines that no disk took", ("process",)),
    Metric("process", "calculet_process_spans_queued", "gauge", "Spans that wait to be sent to the collector (tracing.max_queue)", ("process",)),
    Metric("process", "calculet_process_spans_exported", "counter", "Spans that the collector took", ("process",)),
    Metric("process", "calculet_process_spans_lost", "counter", "Spans that the queue had no room for, or that no collector took", ("process",)),
)  # fmt: skip


def metrics_of(component: str) -> dict[str, Metric]:
    """The component's metrics by name."""
    return {metric.name: metric for metric in CATALOGUE if metric.component == component}
