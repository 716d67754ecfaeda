"""What makes the demo stop with one line instead of a traceback."""


class DemoError(Exception):
    """Something that the user can put right: exit code 2."""


class VerificationError(Exception):
    """A log-probability that is not what it should be: exit code 1."""
