"""The terminal interface: progress, the ready line, the chat. Reaches a server only by its URL."""
