"""The cost of one decoding step: its parts, and where the host waits."""
