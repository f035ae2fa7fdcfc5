"""A cluster of stand-ins for the demo and the tests: API server, kubelet, kube-scheduler."""
