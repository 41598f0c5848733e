"""Types of command-line arguments that several commands share."""

import click


class _PathType(click.ParamType):
    """A path that is not empty: an empty one, from a shell variable that is not set, would mean the directory
    one happens to be in."""

    name = "path"

    def convert(self, value: str, param: click.Parameter | None, ctx: click.Context | None) -> str:
        if not value:
            self.fail("it is empty; was a variable not set?", param, ctx)
        return value


PATH = _PathType()
