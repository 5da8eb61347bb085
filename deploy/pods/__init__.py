"""Runs pods on this machine as a kubelet would, without Kubernetes: see README.md."""
