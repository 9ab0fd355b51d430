"""Benches of the server, which runs as a process and receives requests over HTTP."""
