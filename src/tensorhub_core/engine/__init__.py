"""What all engine adapters share: the swap transaction and the follow loop."""
