"""Structured answers: wire formats of reasoning and tool calls, their grammars, their parser. No torch."""
