"""What learns: one readable file an algorithm; knows torch and numpy, not Redis, not processes."""
