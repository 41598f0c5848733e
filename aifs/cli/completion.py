"""``aifs completion``: what a shell needs to complete commands, options and paths."""

import click


@click.command(
    "completion",
    short_help="Print what a shell needs to complete commands.",
    epilog="\b\nExamples:\n"
    "  source <(aifs completion bash)                                  in ~/.bashrc\n"
    "  aifs completion fish > ~/.config/fish/completions/aifs.fish",
)
@click.argument("shell", type=click.Choice(["bash", "zsh", "fish"]))
@click.pass_context
def completion_command(context: click.Context, shell: str) -> None:
    """Print the script with which SHELL completes commands, options and paths of aifs."""
    from click.shell_completion import get_completion_class

    found = get_completion_class(shell)
    assert found is not None, "click knows the shells that it names"
    print(found(context.find_root().command, {}, "aifs", "_AIFS_COMPLETE").source())
