"""The demo's user errors."""


class DemoError(Exception):
    """Something the user can put right; printed as one line, without a traceback."""
