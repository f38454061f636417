"""Responses of earlier steps and runs, kept on disk by prompt."""
