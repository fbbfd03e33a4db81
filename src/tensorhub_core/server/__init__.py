"""The reference server's acting half: sockets, timers, the embedded server."""
