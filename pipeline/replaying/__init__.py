"""From stream to batch: mirror the live window, choose samples, fill slots."""
