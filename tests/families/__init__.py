"""Tiny models of every family, and the layouts that their templates are made of."""
