"""The local chat app: a page, the routes that the page calls, and the database of conversations."""
