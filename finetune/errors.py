"""What can go wrong for a user, and the exit code each kind ends with.

    FinetuneError                 what happened, where, how to fix it
    ├── RecipeError            2  a recipe, a flag or a setting is wrong
    ├── DataError              3  a data file, a row or a chat template is wrong
    ├── CheckpointError        4  a checkpoint or a model folder is damaged, incomplete or does not match
    ├── ResourceError          5  not enough memory, disk or devices, or a process was lost
    ├── MissingDependencyError 6  an optional package is needed; ``fix`` holds its install line
    ├── HubError               7  the Hugging Face Hub refused or could not be reached
    ├── QualityGateError       8  a stage finished but its result is worse than the recipe allows
    └── InterruptedRunError  130  the user stopped the run

Anything else is a bug of ours: it ends with exit code 1 and a traceback. ``assert`` marks what only a bug can do.
"""

from __future__ import annotations

import difflib
import errno
import unicodedata
from collections.abc import Iterable


class FinetuneError(Exception):
    """An error that the user can act on: what happened, where, and how to fix it."""

    exit_code = 1

    def __init__(self, what: str, *, where: object = None, fix: str | None = None) -> None:
        super().__init__(what)
        self.what = what
        self.where = None if where is None else str(where)
        self.fix = fix

    def __str__(self) -> str:
        lines = [f"error: {self.what}"]
        if self.where:
            lines.append(f"  at:  {self.where}")
        if self.fix:
            lines.append(f"  fix: {self.fix}")
        return "".join(_seen(letter) for letter in "\n".join(lines))

    def __reduce__(self) -> tuple[object, ...]:
        return _rebuild, (type(self), self.what, self.where, self.fix)


def _seen(letter: str) -> str:
    """A character of a file or a path that would act on a terminal (colours, the direction of writing) by its number.

    Half a character can't be written at all. The joiners that scripts and emoji need stay.
    """
    if letter in "\n\t\u200c\u200d" or unicodedata.category(letter) not in ("Cc", "Cf", "Cs"):
        return letter
    return f"<U+{ord(letter):04X}>"


def _rebuild(kind: type[FinetuneError], what: str, where: str | None, fix: str | None) -> FinetuneError:
    return kind(what, where=where, fix=fix)


class RecipeError(FinetuneError):
    exit_code = 2


class DataError(FinetuneError):
    exit_code = 3


class CheckpointError(FinetuneError):
    exit_code = 4


class ResourceError(FinetuneError):
    exit_code = 5


class MissingDependencyError(FinetuneError):
    exit_code = 6


class HubError(FinetuneError):
    exit_code = 7


class QualityGateError(FinetuneError):
    exit_code = 8


class InterruptedRunError(FinetuneError):
    exit_code = 130


OUTSIDE_FAULTS = {
    *(errno.ENOSPC, errno.EDQUOT, errno.EFBIG),
    *(errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOTDIR, errno.ENAMETOOLONG),
    errno.EIO,
}
"""Numbers of an OSError that the machine is to blame for, not the code that met it."""


def resource_error(error: OSError) -> ResourceError | None:
    """The system's refusal of a file or a process as an error of the user's; None for what only a bug can do."""
    if error.errno not in OUTSIDE_FAULTS:
        return None
    full = error.errno in (errno.ENOSPC, errno.EDQUOT)
    fix = "free some disk, or write to another disk" if full else "check its permissions, or name another place"
    return ResourceError(f"the system refused: {error.strerror}", where=error.filename2 or error.filename, fix=fix)


def did_you_mean(word: str, allowed: Iterable[str]) -> str:
    """The ``fix`` line for a name that isn't one of ``allowed``: the closest match first, then all of them."""
    names = sorted(set(allowed))
    close = difflib.get_close_matches(word, names, n=1, cutoff=0.6)
    guess = f"did you mean `{close[0]}`? " if close else ""
    shown = ", ".join(names[:20]) + (f", and {len(names) - 20} more" if len(names) > 20 else "")
    return f"{guess}allowed: {shown}"
