"""What holds for all tests."""

import signal

from hypothesis import settings

settings.register_profile("flatmtl", deadline=None)  # a busy machine is no fault
settings.load_profile("flatmtl")

# A job that a shell has put into the background ignores Ctrl-C, and so would the commands that are stopped by it here.
signal.signal(signal.SIGINT, signal.default_int_handler)
