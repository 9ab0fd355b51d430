"""The commands `serve`, `app` and `agent`, and what opens an engine for the commands."""
