"""The administration of keys and usage, under `/v1/organization`."""
