"""Encoders of images and text by name: `open_clip:...` and the offline `bridge:lite0-minilm`.

Import from the submodules. The towers are frozen: an encoder's image side is the one block of a `Backbone`, its text
side is `Backbone.text`.
"""
