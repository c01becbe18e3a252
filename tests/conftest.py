"""What holds for all tests."""

from hypothesis import settings

settings.register_profile("flatmtl", deadline=None)  # a busy machine is no fault
settings.load_profile("flatmtl")
