"""The worker's side: sync API, session thread, executor thread."""
