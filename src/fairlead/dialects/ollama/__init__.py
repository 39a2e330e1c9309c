"""Ollama's chats, completions and embeddings."""
