"""API keys, tenants and quotas."""
