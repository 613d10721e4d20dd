"""One file a stage kind: what it reads, what decides its result, and how it runs."""
