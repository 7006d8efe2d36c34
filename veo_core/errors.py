"""The errors that veo_core raises on purpose. Each message names the input, its value and the remedy."""


class VeoError(Exception):
    """Base of every error that a user can cause and can mend."""


class InputError(VeoError):
    """A file, picture, clip or option that cannot be used."""


class ModelError(VeoError):
    """Weights that are missing, damaged or of another kind."""


class BudgetError(VeoError):
    """A memory budget in which the run cannot be done."""


class OutputError(VeoError):
    """A place or a format that cannot be written."""
