"""The errors of the storage layer. Each message names the field, the value and the remedy."""


class StorageError(Exception):
    """Parent of every error that this package raises on purpose."""


class UnavailableError(StorageError):
    """The server could not be reached, or did not answer, within the time allowed."""


class UnsuitableServerError(StorageError):
    """The server answers, but its version or settings would lose data; says what to change."""


class DamagedError(StorageError):
    """Bytes that do not decode: a frame, an entry, a parameter set, a configuration."""


class InvalidEntryError(StorageError):
    """An entry that may not be written: object dtype, NaN, lengths that do not fit together."""


class InvalidNameError(StorageError):
    """An experiment, agent or learner name with characters that keys do not allow."""


class UnknownExperimentError(StorageError):
    """No such experiment, or one with another creation id."""


class LostRoleError(StorageError):
    """A lease is gone: another process holds this role under a higher fence."""
