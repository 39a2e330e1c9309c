"""A server of several processes and machines: supervisor, frontends, their sockets, lease, Ray."""
