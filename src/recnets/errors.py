"""The exceptions that the command line turns into a clean line instead of a traceback."""


class RecNetsError(Exception):
    """Trouble that a user can act on: the message names the value, what was expected and what to do next."""


class Misuse(RecNetsError):
    """A name, value or setting that cannot be: the command line ends with status 2, not 1."""
