"""The commands serve, app and agent, and how the commands that need an engine open one."""
