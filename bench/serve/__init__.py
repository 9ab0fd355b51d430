"""Benches of the server, which is started as a process and asked from raw sockets."""
