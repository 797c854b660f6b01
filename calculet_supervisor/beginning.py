"""The files of a new fleet, as text: every section that people change is there, what has a default is a comment. Pure."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence

import yaml

from calculet_core.config import parse_fleet, parse_scheduler

FLEET_FILE = "fleet.yaml"
UNPROVEN: tuple[int, ...] = (1,)
"""Profiles while no manifest was seen: what every artifact has."""

_FLEET = """\
# A fleet: one host. Written by `calculet init`; it is yours now.
# Check it with `calculet config check --config {file}`, look at the machine with `calculet doctor --config {file}`,
# start it with `calculet up --config {file}`. Every key: docs/reference/configuration.md.
# Relative paths start at this file's folder.
schema: calculet-fleet/v1

run_dir: run      # sockets; goes with the boot
state_dir: state  # what must survive: the supervisor's memory, API keys, usage records, packages to go back to
log_dir: log      # logs and journals, rotated

# Public keys that packages must be signed with. A package of any other signer is not loaded.
trusted_keys: [{trusted_key}]

router:
  listen: 127.0.0.1:8080
  admin_listen: 127.0.0.1:8081  # the dashboard, for a browser on this host
  # max_connections: 8192
  # require_keys: true  # 401 without a key, even before the first one is made (`calculet keys create TENANT`)
  # tls: {{certificate: tls/cert.pem, key: tls/key.pem}}

boards:
{boards}

models:
  - alias: {alias}  # what clients send as `model`
    package: {package}
    scheduler: {scheduler}
    # boards: [board0]  # default: all

# Who uses it. `default` gets requests without a key.
tenants:
  - name: default
  # - name: search
  #   weight: 2.0           # share of service against others
  #   max_active: 16        # requests at once
  #   requests_per_s: 20.0

# supervision:
#   heartbeat_timeout_ms: 5000
#   restart: {{max_restarts: 5, window_s: 60.0}}
# recovery:
#   max_resets_per_10min: 2
# journal: {{max_bytes: 33554432, keep: 3}}
# usage: {{keep_days: 400}}
"""

_SCHEDULER = """\
# The scheduler of {alias}. Keys that are comments have this default.
schema: calculet-scheduler/v1
model_alias: {alias}

batch:
  # Compiled batches to use, of those that the package's manifest proves{proven}.
  profiles: {profiles}
  # batching_window_us: 0

# admission:
#   max_waiting_requests: 128
#   max_waiting_prompt_tokens: 262144
#   deadline_default_ms: 120000
# queues:  # device turns
#   decode_weight: 8
#   short_prefill_weight: 4
#   medium_prefill_weight: 2
#   long_prefill_weight: 1
# executor:
#   max_inflight: 1  # 2: ping/pong
# recovery:
#   max_resets_per_10min: 2
"""
_PLAIN = re.compile(r"[A-Za-z0-9_./][A-Za-z0-9_./+-]*\Z")
_OPTIONS = {"llamacpp": "    options: {threads: 1}  # of the CPU engine, for each board"}


def new_fleet(boards: int, device: str, package: str, alias: str, trusted_key: str, proven: Sequence[int] | None) -> dict[str, str]:
    """File name -> text; `proven` are the profiles of the package's manifest, None when it was not there to read.

    Raises:
        ConfigError: a value does not fit its key; names it.
    """
    scheduler = f"scheduler-{alias}.yaml"
    lines = []
    for number in range(boards):
        lines += [f"  - name: board{number}", f"    device: {_text(device)}"]
        lines += [_OPTIONS[device]] if device in _OPTIONS else []
    fleet = _FLEET.format(
        file=FLEET_FILE, boards="\n".join(lines), alias=_text(alias), package=_text(package), scheduler=_text(scheduler),
        trusted_key=_text(trusted_key),
    )  # fmt: skip
    rules = _SCHEDULER.format(
        alias=_text(alias), profiles=list(proven or UNPROVEN), proven="" if proven else "; the package was not there to be asked"
    )
    # Parsed before anybody is told that it is good; this is also where a wrong alias is found.
    parse_fleet(fleet.encode(), FLEET_FILE)
    parse_scheduler(rules.encode(), scheduler)
    return {FLEET_FILE: fleet, scheduler: rules}


def _text(value: str) -> str:
    """A YAML scalar that means exactly this string: plain where nothing can be misread (`no` is false), else quoted."""
    return value if _PLAIN.match(value) and yaml.safe_load(value) == value else json.dumps(value)
