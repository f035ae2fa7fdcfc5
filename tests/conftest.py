"""Settings of all tests."""

from hypothesis import settings

settings.register_profile("vgpu", deadline=None)  # no test asserts a duration: the machine may be busy
settings.load_profile("vgpu")
