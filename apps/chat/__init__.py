"""The local chat app: a page, the routes that it talks to, and the database of its conversations."""
