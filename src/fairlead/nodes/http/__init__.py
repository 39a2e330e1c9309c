"""The HTTP/1.1 client: connections to nodes and to services of others, with bounds."""
