"""Fill vLLM engines from peers and swap new versions in between requests."""
