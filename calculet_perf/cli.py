"""`calculet-perf`: measures, breaks and judges OpenAI-compatible servers. Each verb is a file in `commands/`; what is heavy is
imported by the verb that needs it.

Exit codes are the specification's (acceptance §15): a crash or an interruption of this program is 3, never Python's 1, because 1
says that the *product* is wrong.
"""

from __future__ import annotations

import errno
import os
import sys
import traceback
from typing import Any, NoReturn

import click

try:
    from calculet_perf.commands import COMMANDS
    from calculet_perf.commands.common import Exit
    from calculet_perf.manifest import ManifestError
    from calculet_perf.records import RecordError
    from calculet_perf.shell.run_dir import RunDirError
except KeyboardInterrupt:
    sys.stderr.write("calculet-perf: interrupted\n")
    sys.exit(3)

STORAGE = (errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EIO, errno.EACCES, errno.EFBIG)
"""What a disk says that takes no more."""


class Verbs(click.Group):
    """A group that ends with the specification's exit codes, whatever happens."""

    def invoke(self, ctx: click.Context) -> Any:
        """Run the verb; input that is wrong is 2, what nobody expected is 3."""
        try:
            return super().invoke(ctx)
        except (click.ClickException, click.exceptions.Exit):
            raise
        except (ManifestError, RecordError, RunDirError) as error:
            click.echo(f"calculet-perf: {error}", err=True)
            sys.exit(Exit.INVALID)
        except (KeyboardInterrupt, click.Abort):
            click.echo("calculet-perf: interrupted; a run goes on with --resume", err=True)
            sys.exit(Exit.INFRASTRUCTURE)
        except BrokenPipeError:
            # Whoever read our output has gone; nothing more can be said to them, and Python must not try at its end.
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            sys.exit(Exit.INFRASTRUCTURE)
        except OSError as error:
            if error.errno not in STORAGE:
                self._fault()
            where = f"{error.filename}: " if error.filename else ""
            click.echo(f"calculet-perf: cannot write: {where}{error.strerror}", err=True)
            click.echo("  what is written stays; once there is room, a run goes on with --resume", err=True)
            sys.exit(Exit.INFRASTRUCTURE)
        except Exception:
            self._fault()

    @staticmethod
    def _fault() -> NoReturn:
        """What nobody foresaw, with all that is known of it."""
        traceback.print_exc()
        click.echo("calculet-perf: this is a fault of calculet-perf, not a verdict on the server", err=True)
        sys.exit(Exit.INFRASTRUCTURE)


@click.group(cls=Verbs, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100})
@click.version_option(package_name="calculet", prog_name="calculet-perf")
def main() -> None:
    """Measures a server, breaks it, and says what it proved.

    Exit codes: 0 pass, 1 correctness or reliability failed, 2 artifact, configuration or usage wrong, 3 the measurement is invalid
    (clock, network, a crash of this program), 4 slower than allowed.
    """


for command in COMMANDS:
    main.add_command(command)


if __name__ == "__main__":
    main()
