"""`calculet`: what operators type. Each verb is a file in `commands/`; what is heavy is imported by the verb that needs it.

Exit codes: 0 done, 1 refused or failed, 2 wrong usage, 69 the supervisor cannot be reached, 78 the configuration is wrong. What was
asked for goes to stdout, everything else to stderr.
"""

from __future__ import annotations

import os
import sys
from contextlib import suppress
from typing import Any

import click

from calculet_supervisor.commands import COMMANDS
from calculet_supervisor.commands.common import end


class _Calculet(click.Group):
    def main(self, *args: Any, **kwargs: Any) -> Any:
        """A full disk, a folder of somebody else: one line and no stack, whichever verb meets it."""
        try:
            return super().main(*args, **kwargs)
        except OSError as error:
            from calculet_core.errors import ExitCode
            from calculet_core.shell.process import in_words, is_machines

            if not is_machines(error):
                raise
            if sys.stdout is not None and error.filename is None:  # it was the output: nothing more of it is tried at the end
                with suppress(OSError):
                    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            end(ExitCode.FAILURE, in_words(error), "`calculet doctor` says more")


@click.group(cls=_Calculet, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100})
@click.version_option(package_name="calculet", prog_name="calculet")
def main() -> None:
    """Serves LLM accelerator boards.

    Exit codes: 0 done, 1 refused or failed, 2 wrong usage, 69 the supervisor cannot be reached, 78 the configuration is wrong.
    """


for command in COMMANDS:
    main.add_command(command)


if __name__ == "__main__":
    main()
