"""`vgpu run` and its slices on one machine, without a cluster."""
