"""How a token is chosen from logits: parameters and their columns, logits processors, samplers."""
