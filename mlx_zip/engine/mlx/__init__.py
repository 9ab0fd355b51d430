"""The engine on MLX: the model that it serves, groups that take steps, `stream_generate` in the caller's thread."""
