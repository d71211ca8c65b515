"""The device that models share: who may use it when, and how much memory each has."""
