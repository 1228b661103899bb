"""The Responses API over the same engine."""
