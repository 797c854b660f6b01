"""`calculet completion SHELL`: prints what a shell needs to complete `calculet`."""

from __future__ import annotations

import click
from click.shell_completion import get_completion_class

SHELLS = ("bash", "zsh", "fish")
PROGRAM, VARIABLE = "calculet", "_CALCULET_COMPLETE"


@click.command()
@click.argument("shell", type=click.Choice(SHELLS))
@click.pass_context
def completion(ctx: click.Context, shell: str) -> None:
    """Print the completion of commands, options, boards, aliases, rollouts and keys for a shell.

    \b
    bash:  calculet completion bash > ~/.local/share/bash-completion/completions/calculet
    zsh:   calculet completion zsh > "${fpath[1]}/_calculet"
    fish:  calculet completion fish > ~/.config/fish/completions/calculet.fish

    Names come from the running fleet; where none answers, nothing is offered.
    """
    kind = get_completion_class(shell)
    assert kind is not None
    complete = kind(ctx.find_root().command, {}, PROGRAM, VARIABLE)
    click.echo(complete.source_template % complete.source_vars())
