"""HTTP/1.1: the listener, the client to nodes, and server-sent events."""
