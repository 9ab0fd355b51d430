"""The engine on MLX: loaded models, groups of requests that take steps, and `stream_generate` without a thread."""
