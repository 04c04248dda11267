"""A command group whose first command runs if none is named: `mlmclm sweep FILE` is `mlmclm sweep run FILE`."""

from __future__ import annotations

import copy
import difflib
from pathlib import Path
from typing import Any

import typer.core

from mlmclm.errors import UserError


class DefaultCommand(typer.core.TyperGroup):
    """The group; its help shows the first command's arguments and options, and all commands.

    A file with the name of a command is given as `./NAME`.
    """

    @property
    def _default(self) -> Any:
        return next(iter(self.commands.values()))

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Put the default command's name first, unless a command or help is asked for."""
        first = args[0] if args else ""
        completing = ctx.resilient_parsing
        if first in ctx.help_option_names:
            return super().parse_args(ctx, [first])
        if first in self.commands or (completing and not args):
            return super().parse_args(ctx, args)
        near = difflib.get_close_matches(first, self.commands, n=1, cutoff=0.7)
        if near and not completing and not Path(first).exists():
            raise UserError(f"{first}: no such file. Did you mean `{ctx.command_path} {near[0]}`?")
        return super().parse_args(ctx, [str(self._default.name), *args])

    def format_help(self, ctx: Any, formatter: Any) -> None:
        """Write the help."""
        group = copy.copy(self)
        group.help = self._default.help
        group.params = [*self._default.params, *self.params]
        super(DefaultCommand, group).format_help(ctx, formatter)

    def shell_complete(self, ctx: Any, incomplete: str) -> list[Any]:
        """Complete commands, and the default command's options."""
        return [*super().shell_complete(ctx, incomplete), *self._default.shell_complete(ctx, incomplete)]
