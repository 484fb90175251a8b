"""Every error goodviews raises on purpose, and the exit code each one ends the command with.

    GoodviewsError                 1  the job failed
      UsageError                   2  the command line or the config is wrong
        ConfigError                2
      InputError                   1  a source file is missing, broken or not what was said of it
      StorageError                 1  reading or publishing failed (disk full, no permission)
        TransientStorageError      1  a store did not answer or a device hiccuped; tasks try again
      IntegrityError               1  a published file is not what its manifest says
      AccountingError              1  texts read != texts kept + rejects: a bug or a lost row, never tolerated
      RejectBudgetError            3  more rejects than `--max-reject-rate` allows
      ConflictError                4  somebody else holds the lock, or the same name means two things

A message is one sentence each for what happened, the value, why it matters and what to do.
"""

from __future__ import annotations

EXIT_DONE = 0
EXIT_INTERRUPTED = 130


class GoodviewsError(Exception):
    """Base of all errors with a sentence for the user; anything else that escapes is a bug."""

    exit_code = 1


class UsageError(GoodviewsError):
    """The command line is wrong; nothing was started."""

    exit_code = 2


class ConfigError(UsageError):
    """A config file or `--set` names an unknown key or holds a wrong value."""


class InputError(GoodviewsError):
    """A source file is missing, broken, or not what was said of it."""


class StorageError(GoodviewsError):
    """Reading or publishing a file failed."""


class TransientStorageError(StorageError):
    """A store or a device failed in a way that often passes; tasks are tried again before this reaches the user."""


class IntegrityError(GoodviewsError):
    """A published file is not what its manifest says."""


class AccountingError(GoodviewsError):
    """Texts read are not texts kept plus rejects."""


class RejectBudgetError(GoodviewsError):
    """The share of rejects is over the budget of the job."""

    exit_code = 3


class ConflictError(GoodviewsError):
    """A lock is held by somebody else, or one name would mean two things."""

    exit_code = 4


def encode(error: GoodviewsError) -> tuple[str, str]:
    """Name and message of an error, in which form it crosses to another process; `decode` makes it an error again."""
    # A subclass of another module crosses as the error of this module that it is.
    kind = next(kind for kind in type(error).__mro__ if kind.__module__ == __name__)
    return kind.__name__, str(error)


def decode(name: str, message: str) -> GoodviewsError:
    """The error that `encode` wrote; a name that is no error of this module gives a GoodviewsError that states it."""
    kind = globals().get(name)
    if isinstance(kind, type) and issubclass(kind, GoodviewsError):
        return kind(message)
    return GoodviewsError(f"{name}: {message}")
