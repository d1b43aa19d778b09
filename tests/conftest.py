import os

from hypothesis import HealthCheck, settings

# The machine's speed says nothing about the code: no example is failed for being slow.
settings.register_profile(
    "default",
    max_examples=100,
    stateful_step_count=40,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow],
)
# HYPOTHESIS_PROFILE=thorough looks much longer, for a night or before a release.
settings.register_profile(
    "thorough",
    parent=settings.get_profile("default"),
    max_examples=5_000,
    stateful_step_count=100,
)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "default"))
