"""Sentences about training images: where they come from, which are fit for use, and what models learn from them.

Import from the submodules. Captions never leave their client. One that states a label exists for training images alone
(`caption`).
"""
