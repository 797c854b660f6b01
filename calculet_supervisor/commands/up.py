"""`calculet up`: the development keeper."""

from __future__ import annotations

import sys
from pathlib import Path

import click

from calculet_supervisor.commands.common import config_option, end, open_file


@click.command()
@config_option
def up(config: Path) -> None:
    """Run the whole fleet here: router, supervisor and a worker per board. Ctrl-C ends everything.

    Exit codes: 0 told to end, 1 it runs already or a folder cannot be used, 78 the configuration is wrong. Logs are in the
    configuration's log_dir.
    """
    import asyncio
    import logging

    from calculet_core.errors import ConfigError, ExitCode
    from calculet_core.shell.fleet import make_folders
    from calculet_core.shell.logs import set_up_logs
    from calculet_core.shell.process import in_words
    from calculet_supervisor.shell.checking import find_problems
    from calculet_supervisor.shell.keeper import AlreadyRuns, Keeper
    from calculet_supervisor.shell.voice import Voice

    fleet = open_file(config)
    if problems := find_problems(fleet):
        end(ExitCode.CONFIG, "\ncalculet: ".join(problems))
    voice = Voice()
    set_up_logs("keeper", "WARNING", voice)

    async def keep() -> int:
        return await Keeper(fleet, voice.say, voice.complain).run()

    try:
        make_folders(fleet)
        code = asyncio.run(keep())
    except ConfigError as error:
        end(ExitCode.CONFIG, str(error))
    except OSError as error:
        end(ExitCode.FAILURE, in_words(error), f"`calculet doctor --config {config}` says more")
    except AlreadyRuns as error:
        end(ExitCode.FAILURE, str(error), f"`calculet status --config {config}` shows it")
    finally:
        voice.close()
    logging.shutdown()
    sys.exit(code)
