"""The one exception that the command line turns into a clean line instead of a traceback."""


class RecNetsError(Exception):
    """Trouble that a user can act on: the message names the value, what was expected and what to do next."""
