"""How the bundled models are made: run from a checkout, not installed."""
