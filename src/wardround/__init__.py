"""Personalised federated learning for medical images: one model per hospital, trained with the help of all."""

__version__ = "0.1.0"
