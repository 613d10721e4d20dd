"""Rows in many formats to token batches with exact loss masks."""
