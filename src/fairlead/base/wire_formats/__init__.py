"""How models mark reasoning and tool calls: the records, and the patterns in them."""
