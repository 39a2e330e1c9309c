"""The parent's ends of the sockets to processes that run a model."""
