"""The training loop, its loss, optimizer and schedule."""
