"""`vgpu doctor`: what is wrong with an installation, and what to do about it.

`cluster` and `host` judge facts and are pure; `look` gathers the facts.
"""
