"""The one exception of this package's searches and checks."""


class DeepGemmUnavailableError(ImportError):
    """DeepGEMM cannot be used in this process; the text says why and what to do."""
