"""What outlives the server: usage by hour, budgets' spending, and API keys. SQLite or PostgreSQL."""
