"""What one decoding step costs: its parts, its launches, and what it would cost on a Mac."""
