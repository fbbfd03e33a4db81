"""Frame and encode the protocol's messages; no sockets here."""
