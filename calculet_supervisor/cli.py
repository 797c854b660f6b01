"""`calculet`: what operators type. Each verb is a file in `commands/`; what is heavy is imported by the verb that needs it.

Exit codes: 0 done, 1 refused or failed, 2 wrong usage, 69 the supervisor cannot be reached, 78 the configuration is wrong. What was
asked for goes to stdout, everything else to stderr.
"""

from __future__ import annotations

import click

from calculet_supervisor.commands import COMMANDS


@click.group(context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100})
@click.version_option(package_name="calculet", prog_name="calculet")
def main() -> None:
    """Serves LLM accelerator boards.

    Exit codes: 0 done, 1 refused or failed, 2 wrong usage, 69 the supervisor cannot be reached, 78 the configuration is wrong.
    """


for command in COMMANDS:
    main.add_command(command)


if __name__ == "__main__":
    main()
