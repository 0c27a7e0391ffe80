"""Property tests have no deadline per example: how long one takes says nothing on a busy machine."""

from hypothesis import settings

settings.register_profile("memkv", deadline=None)
settings.load_profile("memkv")
