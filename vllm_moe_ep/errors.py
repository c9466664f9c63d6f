"""Exceptions by meaning: what a caller may do about them differs, so the types do.

Neither is a ``ValueError``: pydantic, which builds vLLM's configuration, would bury the text of
one in a report about the whole configuration object.

A mistake in a call (wrong shape, too many rows) stays a plain ``ValueError`` or ``TypeError``
and is never caught inside the package.
"""


class UnsupportedError(Exception):
    """Declined: this path cannot serve the request, another one may.

    The caller may fall back after logging the reason once.

    Attributes:
        reason: one line that says what was asked for and what is supported.
    """

    def __init__(self, reason: str) -> None:
        self.reason = " ".join(reason.split())
        super().__init__(self.reason)


class SettingsError(Exception):
    """A setting (variable, command-line value, config field) has a value it cannot have.

    The text names the setting, the value found and the values accepted. Never caught to fall
    back: a typo must not turn into a default.
    """


class CheckpointError(Exception):
    """A checkpoint is damaged or incomplete. The text names the file, or the tensors and where."""
