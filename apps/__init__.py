"""The room for applications on top of the runtime (the local chat app comes to live here)."""
