"""What generates: one protocol, several kinds."""
