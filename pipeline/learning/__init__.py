"""From batch to parameters: fetch the next batch, update, publish."""
