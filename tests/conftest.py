"""What holds for every test."""

from hypothesis import settings

# How long one example takes says nothing on a busy machine.
settings.register_profile("icebox", deadline=None)
settings.load_profile("icebox")
