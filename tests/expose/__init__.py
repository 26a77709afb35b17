"""Tests of what is told."""
