"""Commands that stand on an engine: the server, the chat app, the settings of agents; and how they open one."""
