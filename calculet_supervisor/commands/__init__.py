"""One administrative verb per file; `COMMANDS` is all of them, in the order of the help text."""

from __future__ import annotations

import click

from calculet_supervisor.commands.chaos import chaos
from calculet_supervisor.commands.completion import completion
from calculet_supervisor.commands.config import config
from calculet_supervisor.commands.doctor import doctor
from calculet_supervisor.commands.drain import drain
from calculet_supervisor.commands.generations import generations
from calculet_supervisor.commands.init import init
from calculet_supervisor.commands.install import install, uninstall
from calculet_supervisor.commands.journals import events, explain
from calculet_supervisor.commands.keys import keys
from calculet_supervisor.commands.package import package
from calculet_supervisor.commands.pingpong import pingpong
from calculet_supervisor.commands.recovery import breaker, condemn, probation, release, reset
from calculet_supervisor.commands.restart import restart
from calculet_supervisor.commands.resume import resume
from calculet_supervisor.commands.rollouts import load, promote, rollback, rollouts, unload
from calculet_supervisor.commands.start import start
from calculet_supervisor.commands.status import status
from calculet_supervisor.commands.stop import stop
from calculet_supervisor.commands.support_bundle import support_bundle
from calculet_supervisor.commands.top import top
from calculet_supervisor.commands.up import up
from calculet_supervisor.commands.upgrade import upgrade
from calculet_supervisor.commands.usage import usage
from calculet_supervisor.commands.version import version
from calculet_supervisor.commands.wait import wait

COMMANDS: tuple[click.Command, ...] = (
    init, doctor,
    up, status, top, events, explain, load, rollback, promote, unload, rollouts, generations, drain, resume, stop, start, restart,
    wait, reset, condemn, probation, breaker, release, pingpong, keys, usage, config, chaos, package, install, uninstall,
    upgrade, support_bundle, completion, version,
)  # fmt: skip
