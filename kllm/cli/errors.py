"""What a user did wrong or the machine refused, said in one line."""

from __future__ import annotations


class UsageError(Exception):
    """The command line is wrong: printed in one line, exit status 2."""


class CommandError(Exception):
    """The command cannot be carried out: printed in one line, exit status 1."""
