"""Engines behind the Model and Session protocols."""
