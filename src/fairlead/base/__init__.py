"""Values and settings that every package uses."""
