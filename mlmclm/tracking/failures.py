"""Failures of writing to MLflow: which can pass, and which are due to the record itself."""

from __future__ import annotations

import errno

PASSING = {"OSError", "OperationalError", "EnvironmentFault"}
"""Classes of errors that can pass: the database is locked, its disk is full, or the server is out of reach."""
LASTING = {
    *(errno.EACCES, errno.EPERM, errno.EROFS),  # no permission to write
    *(errno.ENOENT, errno.EEXIST, errno.ENOTDIR, errno.EISDIR),  # a file that is missing, or in the way
    *(errno.ENOLCK, errno.ENOTSUP, errno.ENOSYS),  # a file system without locks
}
"""The `errno` values of such errors that nevertheless last until somebody acts."""
LASTING_IN_SQLITE = ("SQLITE_ERROR", "SQLITE_READONLY", "SQLITE_AUTH")
"""Beginnings of the names of SQLite's errors that stay: a wrong schema, or a database that may only be read."""


def passing(error: BaseException | None) -> bool:
    """Return whether an error can pass: the error or one of its causes is of a kind that can pass, and none is of a kind that stays."""
    can_pass = False
    while error is not None:
        if getattr(error, "errno", None) in LASTING:
            return False
        if getattr(error, "sqlite_errorname", "").startswith(LASTING_IN_SQLITE):
            return False
        # By name: importing SQLAlchemy for its class takes long, and sqlite3 and other drivers have their own.
        can_pass = can_pass or bool(PASSING & {kind.__name__ for kind in type(error).__mro__})
        error = error.__cause__ or error.__context__
    return can_pass


def refused(error: Exception) -> bool:
    """Return whether MLflow says that a record is wrong, so that trying again is of no use."""
    return getattr(error, "error_code", None) == "INVALID_PARAMETER_VALUE"
