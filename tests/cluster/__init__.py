"""A real Kubernetes node on this machine, and the checks that run on it: `python -m tests.cluster`."""
