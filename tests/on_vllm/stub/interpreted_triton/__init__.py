"""A Triton backend named "cpu" that compiles nothing: with `TRITON_INTERPRET=1` no kernel is compiled."""
