"""Networks and layers: backbones by name, the trained classifier, feature alignment, logit correction.

Import from the submodules. This file stays empty so that `wardround.models.options` and `.catalogue` cost no
torch.
"""
