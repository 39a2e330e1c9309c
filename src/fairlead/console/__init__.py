"""What a person at a terminal sees: progress, the ready line, the chat. Knows a server by its URL only."""
