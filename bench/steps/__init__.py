"""The cost of one decoding step: its parts, its launches, and estimates for a Mac."""
