"""From environment to stream: step copies, cut segments, send entries; and evaluate."""
