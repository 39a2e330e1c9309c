"""Who may send a request, and from where: keys, `Host`, `Origin`, a trusted gateway's headers."""
