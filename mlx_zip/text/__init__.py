"""Text and what turns it into base ids: tokenizers, the hub, data files, prompts, streamed text. Without MLX."""
